"""Cases of the Triton attention against the definition in fp64, for the interpreter and for a GPU.

The interpreter's are run by `interpreter.py`.
"""

import importlib
from dataclasses import dataclass

import torch
from torch import Tensor

from hymo_kernels import document_attention, naive_document_attention
from hymo_kernels.host import triton_attention as kernels
from hymo_kernels.primitive import LIBRARY

NAMES = ("o", "dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """One call: sizes, and the lengths of documents; `before` tokens of the first one lie before the row."""

    b: int
    h: int
    g: int
    k: int
    v: int
    lengths: tuple[int, ...]
    before: int = 0
    strided: bool = False

    @property
    def t(self) -> int:
        return sum(self.lengths)


def inputs(case: Case, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors of a case, drawn on the CPU; batch rows have the documents in turned order."""
    draw = torch.Generator().manual_seed(case.t * 131 + case.k)

    def normal(heads: int, width: int) -> Tensor:
        x = torch.randn(case.b, case.t, heads, width + 8, generator=draw).to(device, dtype)
        return x[..., 8:] if case.strided else x[..., 8:].contiguous()

    rows = []
    for row in range(case.b):
        lengths = case.lengths[row:] + case.lengths[:row]
        rows.append(torch.cat([torch.arange(n) for n in (*lengths, 0)]))
        rows[-1][: lengths[0] if lengths else 0] += case.before
    return {
        "q": normal(case.h, case.k),
        "k": normal(case.g, case.k),
        "v": normal(case.g, case.v),
        "position": torch.stack(rows).to(device),
        "do": normal(case.h, case.v),
    }


def by_kernels(case: Case, x: dict[str, Tensor]) -> list[Tensor]:
    """Outputs and gradients, straight from the launchers."""
    tensors, scale = [x[name] for name in ("q", "k", "v", "position")], case.k**-0.5
    o, lse = kernels.forward(*tensors, scale)
    return [o, *kernels.backward(*tensors, o, lse, x["do"], scale)]


def by_definition(case: Case, x: dict[str, Tensor]) -> list[Tensor]:
    """The same in fp64 on the CPU."""
    q, k, v = (x[name].cpu().double().requires_grad_() for name in ("q", "k", "v"))
    o = naive_document_attention(q, k, v, position=x["position"].cpu(), scale=case.k**-0.5)
    return [o, *torch.autograd.grad(o, (q, k, v), x["do"].cpu().double())]


def errors(case: Case, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Relative error of every quantity; NaN counts as infinite; an absolute one below a norm of 1."""
    x = inputs(case, device, dtype)
    found = {}
    for name, got, want in zip(NAMES, by_kernels(case, x), by_definition(case, x), strict=True):
        assert got.shape == want.shape, (name, got.shape, want.shape)
        error = (got.cpu().double() - want).norm() / want.norm().clamp(min=1)
        found[name] = float(error.nan_to_num(float("inf")))
    return found


INTERPRETED = (
    Case(2, 4, 2, 16, 16, (1, 20, 3, 13)),
    Case(1, 6, 2, 12, 20, (5, 30, 1, 1), before=7, strided=True),
    Case(1, 4, 2, 24, 16, (5, 30, 1, 1), before=7, strided=True),
    Case(1, 1, 1, 16, 8, (70,)),
    Case(3, 4, 1, 16, 16, (1,)),
    Case(2, 2, 2, 16, 16, ()),
)
SMALL = kernels.Tiles(pairs=16, keys=16, warps=4, stages=1)


def check_public_path() -> None:
    """Gradients through the public name, alone and mapped over samples, and the ops' declared outputs."""
    for name, launch in (("forward", kernels.forward), ("backward", kernels.backward)):
        LIBRARY.impl(f"document_attention_{name}", launch, "CPU")  # type: ignore[no-untyped-call]
    importlib.import_module("hymo_kernels.host.document_attention").unavailable = lambda *tensors: None  # type: ignore[attr-defined]
    x = inputs(Case(3, 4, 2, 16, 8, (4, 5)), "cpu", torch.float32)

    def gradients(backend: str, position: Tensor, *y: Tensor) -> tuple[Tensor, ...]:
        def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return document_attention(q, k, v, position=position, scale=0.3, backend=backend).sin().sum()  # type: ignore[arg-type]

        found: tuple[Tensor, ...] = torch.func.grad(loss, (0, 1, 2))(*y)
        return found

    tensors = [x[name] for name in ("q", "k", "v")]
    # A batch of one a sample, documents shared.
    samples, in_dims = [y[:, None] for y in tensors], (None, None, 0, 0, 0)
    want = torch.func.vmap(gradients, in_dims=in_dims)("eager", x["position"][:1], *samples)
    found = torch.func.vmap(gradients, in_dims=in_dims)("triton", x["position"][:1], *samples)
    for got, each in zip(found, want, strict=True):
        torch.testing.assert_close(got, each, rtol=1e-4, atol=1e-5)
    check_declared_outputs(x)
    print("public path")


def check_declared_outputs(x: dict[str, Tensor]) -> None:
    """Schema and fake tensors of the raw ops."""
    plain, utils = [x[name] for name in ("q", "k", "v", "position")], ("test_schema", "test_faketensor")
    o, lse = kernels.FORWARD(*plain, 0.3)
    torch.library.opcheck(kernels.FORWARD, (*plain, 0.3), test_utils=utils)
    torch.library.opcheck(kernels.BACKWARD, (*plain, o, lse, x["do"], 0.3), test_utils=utils)


def main() -> None:
    # Tiles so small that few tokens meet every kind of tile.
    kernels.PLANS[64] = kernels.Plan(SMALL, SMALL, SMALL)
    for case in INTERPRETED:
        for engine in (False, True):
            kernels._has_copy_engine = lambda device, engine=engine: engine  # type: ignore[assignment, misc]
            found = errors(case, "cpu", torch.float32)
            print(case, engine, {name: f"{error:.1e}" for name, error in found.items()})
            assert all(error < 1e-6 for error in found.values()), (case, engine, found)
    check_public_path()
