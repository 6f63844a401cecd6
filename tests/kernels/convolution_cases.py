"""Cases of the Triton convolution against the eager one in fp64, for the interpreter and for a GPU.

The interpreter's are run by `interpreter.py`.
"""

import importlib
from dataclasses import dataclass

import torch
from torch import Tensor

from hymo_kernels import causal_conv1d
from hymo_kernels.host import triton_causal_conv1d as kernels
from hymo_kernels.primitive import LIBRARY

NAMES = ("y", "end", "dx", "dweight", "dbias", "dstate")


@dataclass(frozen=True)
class Case:
    """One call: sizes, documents, and what is optional."""

    b: int
    t: int
    c: int
    w: int
    lengths: tuple[int, ...] = ()  # of documents, by `position`
    bounds: tuple[int, ...] = ()  # of packed sequences
    state: bool = True
    bias: bool = True
    silu: bool = True
    strided: bool = False


def inputs(case: Case, device: str, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """Tensors of a case, drawn on the CPU; rows of no sequence are NaN."""
    draw = torch.Generator().manual_seed(case.t * 131 + case.c)
    sequences = len(case.bounds) - 1 if case.bounds else case.b

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(device, dtype)

    x = normal(case.b, case.t, case.c + 16)[..., 16:] if case.strided else normal(case.b, case.t, case.c)
    if case.bounds:
        x[:, case.bounds[-1] :] = float("nan")
    ages = torch.cat([torch.arange(n) for n in case.lengths]) if case.lengths else None
    return {
        "x": x,
        "weight": normal(case.c, case.w),
        "position": None if ages is None else ages.expand(case.b, -1).to(device),
        "bias": normal(case.c) if case.bias else None,
        "state": normal(sequences, case.w - 1, case.c) if case.state else None,
        "bounds": torch.tensor(case.bounds, dtype=torch.int32, device=device) if case.bounds else None,
        "dy": normal(case.b, case.t, case.c),
        "d_end": normal(sequences, case.w - 1, case.c),
    }


def by_kernels(case: Case, x: dict[str, Tensor | None]) -> list[Tensor]:
    """Outputs and gradients, straight from the launchers."""
    tensors = [x[name] for name in ("x", "weight", "position", "bias", "state", "bounds")]
    y, end = kernels.forward(*tensors, case.silu, True)  # type: ignore[arg-type]
    grads = kernels.backward(*tensors, x["dy"], x["d_end"], case.silu)  # type: ignore[arg-type]
    return [y, end, *grads]


def by_definition(case: Case, x: dict[str, Tensor | None]) -> list[Tensor]:
    """The same in fp64 on the CPU; empty where there is nothing."""
    wide = {name: each.cpu().double() for name, each in x.items() if each is not None and each.is_floating_point()}
    names = [name for name in ("x", "weight", "bias", "state") if name in wide]
    leaves = {name: wide[name].requires_grad_() for name in names}
    bounds, position = x["bounds"], x["position"]
    y, end = causal_conv1d(
        leaves["x"],
        leaves["weight"],
        position=None if position is None else position.cpu(),
        bias=leaves.get("bias"),
        activation="silu" if case.silu else None,
        initial_state=leaves.get("state"),
        output_final_state=True,
        cu_seqlens=None if bounds is None else bounds.cpu(),
        backend="eager",
    )
    assert end is not None
    loss = (y * wide["dy"]).sum() + (end * wide["d_end"]).sum()
    grads = dict(zip(names, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    nothing = torch.empty(0)
    return [y, end, *(grads.get(name, nothing) for name in ("x", "weight", "bias", "state"))]


def errors(case: Case, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Relative error of every quantity; NaN counts as infinite, and so does a missing zero."""
    x = inputs(case, device, dtype)
    found = {}
    for name, got, want in zip(NAMES, by_kernels(case, x), by_definition(case, x), strict=True):
        if want.numel() > 0:
            assert got.shape == want.shape, (name, got.shape, want.shape)
            error = (got.cpu().double() - want).norm() / want.norm().clamp(min=1e-3)
            found[name] = float(error.nan_to_num(float("inf")))
    return found


INTERPRETED = (
    Case(2, 17, 40, 4),
    Case(1, 33, 40, 4, lengths=(1, 2, 12, 3, 15), state=False, strided=True),
    Case(2, 17, 32, 2, lengths=(5, 12), bias=False, silu=False),
    Case(1, 34, 32, 4, bounds=(0, 2, 2, 15, 20, 31, 33)),
    Case(1, 20, 32, 8, bounds=(0, 3, 4, 20), state=False, bias=False),
    Case(3, 1, 160, 4),
    Case(1, 0, 32, 3),
)


def check_public_path() -> None:
    """Gradients through the public name, alone and mapped over samples, and the ops' declared outputs."""
    for name, launch in (("causal_conv1d_forward", kernels.forward), ("causal_conv1d_backward", kernels.backward)):
        LIBRARY.impl(name, launch, "CPU")  # type: ignore[no-untyped-call]
    importlib.import_module("hymo_kernels.host.causal_conv1d").unavailable = lambda *tensors: None  # type: ignore[attr-defined]
    x = inputs(Case(2, 5, 32, 3, lengths=(2, 3)), "cpu", torch.float32)
    position, names = x["position"], ("x", "weight", "bias", "state")
    assert position is not None

    def gradients(backend: str, *y: Tensor, position: Tensor = position[:1]) -> tuple[Tensor, ...]:
        def loss(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor) -> Tensor:
            options = {"position": position, "bias": bias, "initial_state": state, "activation": "silu"}
            y, end = causal_conv1d(x, weight, output_final_state=True, backend=backend, **options)  # type: ignore[arg-type]
            assert end is not None
            return y.sin().sum() + end.cos().sum()

        found: tuple[Tensor, ...] = torch.func.grad(loss, (0, 1, 2, 3))(*y)
        return found

    tensors = [x[name] for name in names]
    # A batch of one a sample, weights shared.
    samples = [each[:, None] if i in (0, 3) else each for i, each in enumerate(tensors)]  # type: ignore[index]
    in_dims = (None, 0, None, None, 0)
    want = torch.func.vmap(gradients, in_dims=in_dims)("eager", *samples)
    for got, each in zip(torch.func.vmap(gradients, in_dims=in_dims)("triton", *samples), want, strict=True):
        torch.testing.assert_close(got, each, rtol=1e-4, atol=1e-5)
    plain = (*(x[name] for name in ("x", "weight", "position", "bias", "state", "bounds")),)
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(kernels.FORWARD, (*plain, True, True), test_utils=utils)
    torch.library.opcheck(kernels.BACKWARD, (*plain, x["dy"], x["d_end"], True), test_utils=utils)
    print("public path")


def main() -> None:
    # So many multiprocessors that sequences are cut as finely as they can be.
    kernels.multiprocessors = lambda device: 10**6  # type: ignore[assignment]
    for case in INTERPRETED:
        found = errors(case, "cpu", torch.float32)
        print(case, {name: f"{error:.1e}" for name, error in found.items()})
        assert all(error < 1e-6 for error in found.values()), (case, found)
    check_public_path()
