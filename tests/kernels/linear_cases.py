"""Cases of the Triton linear scan against its definition in fp64, for the interpreter and for a GPU.

The interpreter's are run by `interpreter.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from hymo_kernels import naive_gated_linear_scan
from hymo_kernels.host import triton_gated_linear_scan as kernels

NAMES = ("o", "state", "dv", "db", "dc", "dg", "dA_log", "dstate")
HEAD_AXIS = (2, 1, 2, 2, 2, 2, 0, 1)


@dataclass(frozen=True)
class Case:
    """One call: sizes, the size of its gates, and what is optional."""

    b: int
    t: int
    h: int
    s: int
    v: int
    gate: float = 0.3
    state: bool = True
    resets: tuple[int, ...] = ()
    bounds: tuple[int, ...] = ()


def inputs(case: Case, device: str, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """Tensors of a case, drawn on the CPU: unit b and c, as a layer makes them."""
    draw = torch.Generator().manual_seed(case.t * 131 + case.s)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    rows, state = (case.b, case.t, case.h), (len(case.bounds) - 1 if case.bounds else case.b, case.h, case.s, case.v)
    g = case.gate * torch.rand(*rows, generator=draw)
    for reset in case.resets:
        g[:, reset] = float("inf")
    b, c = (torch.nn.functional.normalize(normal(*rows, case.s), dim=-1) for _ in range(2))
    low = {"v": normal(*rows, case.v), "b": b, "c": c, "do": normal(*rows, case.v)}
    high = {"g": g, "A_log": normal(case.h, case.s), "start": normal(*state), "d_end": normal(*state)}
    made: dict[str, Tensor | None] = {name: x.to(device, dtype) for name, x in low.items()}
    made |= {name: x.to(device) for name, x in high.items()}
    made["start"] = made["start"] if case.state else None
    made["bounds"] = torch.tensor(case.bounds, dtype=torch.int32, device=device) if case.bounds else None
    return made


def by_kernels(case: Case, x: dict[str, Tensor | None]) -> list[Tensor]:
    """Read-outs, final state, and gradients, straight from the launchers."""
    tensors = [x[name] for name in ("v", "b", "c", "g", "A_log", "start", "bounds")]
    o, end, pairs = kernels.forward(*tensors, True)  # type: ignore[arg-type]
    grads = kernels.Gradients(*kernels.backward(*tensors, pairs, x["do"], x["d_end"], True, True))  # type: ignore[arg-type]
    found = [o, end, grads.v, grads.b, grads.c, grads.g, grads.rate.sum((0, 2))]
    return [*found, grads.start] if case.state else found


def by_definition(case: Case, x: dict[str, Tensor | None]) -> list[Tensor]:
    """The same in fp64 on the CPU."""
    names = ["v", "b", "c", "g", "A_log", *(["start"] if case.state else [])]
    leaves = [x[name].cpu().double().requires_grad_() for name in names]  # type: ignore[union-attr]
    o, end = naive_gated_linear_scan(
        *leaves[:5],
        initial_state=leaves[5] if case.state else None,
        output_final_state=True,
        cu_seqlens=None if x["bounds"] is None else x["bounds"].cpu(),
    )
    assert end is not None
    assert x["do"] is not None
    assert x["d_end"] is not None
    loss = (o * x["do"].cpu().double()).sum() + (end * x["d_end"].cpu().double()).sum()
    return [o, end, *torch.autograd.grad(loss, leaves)]


def worst_heads(case: Case, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Relative error of every quantity, of the head that has it worst; never NaN: that counts as infinite."""
    x = inputs(case, device, dtype)
    errors = {}
    for name, axis, got, want in zip(NAMES, HEAD_AXIS, by_kernels(case, x), by_definition(case, x), strict=False):
        difference = (got.cpu().double() - want).movedim(axis, 0).flatten(1).norm(dim=1)
        # dg and dA_log are sums of many products, which may cancel: their floor is the size of the terms.
        floor = case.v**0.5 / 4 if name in ("dg", "dA_log") else 1e-3
        size = want.movedim(axis, 0).flatten(1).norm(dim=1).clamp(min=floor)
        errors[name] = float((difference / size).nan_to_num(float("inf")).max()) if want.numel() else 0.0
    return errors


INTERPRETED = (
    Case(1, 45, 1, 16, 16),
    Case(2, 33, 1, 24, 40, resets=(7, 20)),
    Case(1, 64, 1, 16, 48, bounds=(0, 5, 5, 40, 60), gate=2.0),
    Case(1, 32, 2, 40, 16, state=False, gate=1e4),
    Case(1, 1, 1, 16, 16),
)


def check_public_path() -> None:
    """Gradients through the primitive, mapped over samples, and the ops' declared outputs."""
    cases = [inputs(Case(1, t, 1, 16, 16, resets=(2,)), "cpu", torch.float32) for t in (5, 5)]
    cases[1]["v"] = cases[1]["v"].flip(1)  # type: ignore[union-attr]
    names = ("v", "b", "c", "g", "A_log", "start")

    def loss(rule: Any, *x: Tensor) -> Tensor:
        o, end = rule(*x[:5], initial_state=x[5])
        return o.sin().sum() + end.cos().sum()

    def kernel(*x: Tensor, initial_state: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.triton_gated_linear_scan(*x, initial_state=initial_state, cu_seqlens=None, keep_end=True)

    def definition(*x: Tensor, initial_state: Tensor) -> Any:
        return naive_gated_linear_scan(*x, initial_state=initial_state, output_final_state=True)

    each = [torch.func.grad(partial(loss, definition), tuple(range(6)))(*(x[n] for n in names)) for x in cases]
    stacked = [torch.stack([x[n] for x in cases]) for n in names]  # type: ignore[misc]
    for argnums in (tuple(range(6)), (0,), (2,), (5,)):
        found = torch.func.vmap(torch.func.grad(partial(loss, kernel), argnums))(*stacked)
        for i, grad in zip(argnums, found, strict=True):
            torch.testing.assert_close(grad, torch.stack([x[i] for x in each]), rtol=1e-4, atol=1e-6)
    plain = [cases[0][n] for n in (*names, "bounds")]
    torch.library.opcheck(kernels.FORWARD, (*plain, True), test_utils=("test_schema", "test_faketensor"))
    pairs = kernels.FORWARD(*plain, True)[2]
    grads = (pairs, cases[0]["do"], cases[0]["d_end"])
    for needs in ((True, True), (False, False)):
        torch.library.opcheck(kernels.BACKWARD, (*plain, *grads, *needs), test_utils=("test_schema", "test_faketensor"))


def check_compiled_path() -> None:
    """Six lengths are one compilation, whether the gradient is compiled or the forward, with stand-ins for kernels."""

    def loss(*x: Tensor) -> Tensor:
        o, _ = kernels.triton_gated_linear_scan(*x, initial_state=None, cu_seqlens=None, keep_end=False)
        return o.float().square().sum()

    for whole in (True, False):
        counter = CompileCounterWithBackend("aot_eager")
        compiler = partial(torch.compile, fullgraph=True, dynamic=True, backend=counter)
        run = compiler(torch.func.grad(loss, tuple(range(5))) if whole else loss)
        for time in (65, 128, 200, 333, 500, 640):
            v = torch.randn(2, time, 2, 32)
            x = [y.clone().requires_grad_(not whole) for y in (v, v, v, v[..., 0], v[0, 0])]
            grads = run(*x) if whole else torch.autograd.grad(run(*x), x)
            assert [y.shape for y in grads] == [y.shape for y in x]
        assert counter.frame_count == 1, counter.frame_count


def on_cpu(forward: Callable[..., Any], backward: Callable[..., Any], check: Callable[[], None]) -> None:
    """Runs `check` with these implementations of the ops for tensors of the CPU."""
    library = torch.library.Library("hymo", "IMPL")
    library.impl("gated_linear_forward", forward, "CPU")
    library.impl("gated_linear_backward", backward, "CPU")
    check()
    library._destroy()
    print(check.__name__)


def declared_forward(v: Tensor, b: Tensor, *others: Any) -> Any:
    return tuple(x.zero_() for x in kernels._forward_outputs(v, b, None, others[-1]))


def declared_backward(v: Tensor, b: Tensor, *others: Any) -> Any:
    return tuple(x.zero_() for x in kernels._backward_outputs(v, b, None, None, *others[-2:]))


def main() -> None:
    for case in INTERPRETED:
        errors = worst_heads(case, "cpu", torch.float32)
        print(case, {name: f"{error:.1e}" for name, error in errors.items()})
        assert max(errors.values()) < 3e-6, (case, errors)
    on_cpu(kernels.forward, kernels.backward, check_public_path)
    on_cpu(declared_forward, declared_backward, check_compiled_path)
