"""Cases of the Triton convolution of heads against the eager one in fp64, for the interpreter and for a GPU.

The interpreter's are run by `interpreter.py`.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hymo_kernels import causal_conv1d_heads
from hymo_kernels.host import triton_causal_conv1d as walks
from hymo_kernels.host import triton_causal_conv1d_heads as kernels
from hymo_kernels.primitive import LIBRARY

NAMES = ("q", "k", "v", "dx", "dweight")


@dataclass(frozen=True)
class Case:
    """One call: sizes, documents, and whether its tensors have gaps."""

    b: int
    t: int
    key: tuple[int, int]  # heads, dim
    value: tuple[int, int]
    half: int
    w: int = 4
    lengths: tuple[int, ...] = ()  # of documents, by `position`
    strided: bool = False

    @property
    def sizes(self) -> tuple[int, int, int]:
        return *self.key, self.value[0]


def inputs(case: Case, device: str, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """Tensors of a case, drawn on the CPU."""
    draw = torch.Generator().manual_seed(case.t * 131 + case.half)
    channels = 2 * case.key[0] * case.key[1] + case.value[0] * case.value[1]

    def normal(*shape: int) -> Tensor:
        """With gaps between rows, heads and batches, if the case asks for them."""
        if not case.strided:
            return torch.randn(*shape, generator=draw).to(device, dtype)
        wide = torch.randn(*(n + 1 for n in shape[:-1]), shape[-1] + 16, generator=draw).to(device, dtype)
        return wide[tuple(slice(1, None) for _ in shape[:-1])][..., 16:]

    ages = torch.cat([torch.arange(n) for n in case.lengths]) if case.lengths else None
    angle = 6.3 * torch.rand(case.b, case.t, 1, case.half, generator=draw).to(device)
    return {
        "x": normal(case.b, case.t, channels),
        "weight": torch.randn(channels, case.w, generator=draw).to(device, dtype),
        "position": None if ages is None else ages.expand(case.b, -1).to(device),
        "cos": angle.cos(),
        "sin": angle.sin(),
        "dq": normal(case.b, case.t, *case.key),
        "dk": normal(case.b, case.t, *case.key),
        "dv": normal(case.b, case.t, *case.value),
    }


INPUTS, GRADS = ("x", "weight", "position", "cos", "sin"), ("dq", "dk", "dv")


def by_kernels(case: Case, x: dict[str, Tensor | None]) -> list[Tensor]:
    """Outputs and gradients, straight from the launchers."""
    tensors = [x[name] for name in INPUTS]
    outputs = kernels.forward(*tensors, *case.sizes)  # type: ignore[arg-type]
    return [*outputs, *kernels.backward(*tensors, *(x[name] for name in GRADS))]  # type: ignore[arg-type]


def by_definition(case: Case, x: dict[str, Tensor | None]) -> list[Tensor]:
    """The same in fp64 on the CPU."""
    wide = {name: each.cpu().double() for name, each in x.items() if each is not None and each.is_floating_point()}
    leaves = [wide[name].requires_grad_() for name in ("x", "weight")]
    heads, dim, value_heads = case.sizes
    *outputs, end = causal_conv1d_heads(
        *leaves,
        wide["cos"],
        wide["sin"],
        key_heads=heads,
        key_dim=dim,
        value_heads=value_heads,
        position=None if x["position"] is None else x["position"].cpu(),
        backend="eager",
    )
    assert end is None
    loss = sum((y * wide[name]).sum() for y, name in zip(outputs, GRADS, strict=True))  # type: ignore[union-attr]
    return [*outputs, *torch.autograd.grad(loss, leaves)]  # type: ignore[arg-type, list-item]


def errors(case: Case, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Relative error of every quantity, the worst head's; NaN counts as infinite."""
    x = inputs(case, device, dtype)
    found = {}
    for name, got, want in zip(NAMES, by_kernels(case, x), by_definition(case, x), strict=True):
        assert got.shape == want.shape, (name, got.shape, want.shape)
        if want.numel() > 0:
            rest = [d for d in range(want.ndim) if d != 2 or name not in ("q", "k", "v")]
            error, size = ((each.square().sum(rest).sqrt()) for each in (got.cpu().double() - want, want))
            error = error / size.clamp(min=1e-3)
            found[name] = float(error.nan_to_num(float("inf")).max())
    return found


def check_documents_are_alone(device: str) -> None:
    """Neither values nor gradients of a document change by a bit if its neighbour is NaN."""
    case = Case(1, 12, (1, 16), (2, 16), 4, lengths=(5, 7))
    x = inputs(case, device, torch.float32)
    clean = by_kernels(case, x)[:4]
    for own, other in ((slice(5, None), slice(0, 5)), (slice(0, 5), slice(5, None))):
        poisoned = dict(x)
        for name in ("x", *GRADS):
            poisoned[name] = x[name].clone()  # type: ignore[union-attr]
            poisoned[name][:, other] = torch.nan  # type: ignore[index]
        for got, want in zip(by_kernels(case, poisoned)[:4], clean, strict=True):
            assert torch.equal(got[:, own], want[:, own])


INTERPRETED = (
    Case(1, 21, (2, 16), (4, 8), 2, lengths=(1, 2, 3, 15), strided=True),
    Case(1, 18, (3, 5), (3, 7), 0, w=2, lengths=(5, 13)),
    Case(2, 5, (1, 6), (3, 3), 3, w=8),
    Case(1, 17, (3, 48), (1, 144), 24, w=3),
    Case(2, 0, (2, 8), (2, 8), 2),
)


def check_public_path() -> None:
    """Gradients through the public name, alone and mapped over samples, and the ops' declared outputs."""
    launches: tuple[tuple[str, Callable[..., object]], ...] = (
        ("forward", kernels.forward),
        ("backward", kernels.backward),
    )
    for name, launch in launches:
        LIBRARY.impl(f"causal_conv1d_heads_{name}", launch, "CPU")  # type: ignore[no-untyped-call]
    importlib.import_module("hymo_kernels.host.causal_conv1d").unavailable = lambda *tensors: None  # type: ignore[attr-defined]
    case = Case(2, 5, (1, 8), (2, 8), 2, lengths=(3, 2))
    tensors = inputs(case, "cpu", torch.float32)
    x, weight, position, cos, sin = (tensors[name] for name in INPUTS)
    assert x is not None

    def gradients(backend: str, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        def loss(x: Tensor, weight: Tensor) -> Tensor:
            options = dict(zip(("key_heads", "key_dim", "value_heads"), case.sizes, strict=True))
            q, _, v, _ = causal_conv1d_heads(x, weight, cos, sin, position=position[:1], backend=backend, **options)  # type: ignore[arg-type, index]
            return q.sin().sum() + v.cos().sum()

        found: tuple[Tensor, ...] = torch.func.grad(loss, (0, 1))(x, weight)
        return found

    # A batch of one a sample, weights shared.
    samples = (x[:, None], weight, cos[:, None], sin[:, None])  # type: ignore[index]
    for in_dims, given in (((None, 0, None, 0, 0), samples), (None, (x[:1], weight, cos[:1], sin[:1]))):  # type: ignore[index]
        call = gradients if in_dims is None else torch.func.vmap(gradients, in_dims=in_dims)
        for got, want in zip(call("triton", *given), call("eager", *given), strict=True):  # type: ignore[arg-type]
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    utils = ("test_schema", "test_faketensor")
    plain = (x, weight, position, cos, sin)
    torch.library.opcheck(kernels.FORWARD, (*plain, *case.sizes), test_utils=utils)
    torch.library.opcheck(kernels.BACKWARD, (*plain, *(tensors[name] for name in GRADS)), test_utils=utils)
    print("public path")


def main(part: str) -> None:
    """`kernels` against the definition, or what `surrounds` them."""
    # So many multiprocessors that sequences are cut as finely as they can be.
    walks.multiprocessors = lambda device: 10**6  # type: ignore[assignment]
    # Rows that are loaded ahead past the end of a walk are work for nothing, which an interpreter feels.
    kernels.FORWARD_PLAN, kernels.BACKWARD_PLAN = (
        plan._replace(ahead=2) for plan in (kernels.FORWARD_PLAN, kernels.BACKWARD_PLAN)
    )
    if part == "surrounds":
        check_documents_are_alone("cpu")
        check_public_path()
        return
    for case in INTERPRETED:
        found = errors(case, "cpu", torch.float32)
        print(case, {name: f"{error:.1e}" for name, error in found.items()})
        assert all(error < 1e-6 for error in found.values()), (case, found)
