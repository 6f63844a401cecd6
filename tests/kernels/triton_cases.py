"""Cases of the Triton scan against the definition in fp64, for the interpreter and for a GPU.

The interpreter's are run by `interpreter.py`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hymo_kernels import naive_gated_delta_rule
from hymo_kernels.host import narrow_gated_delta_rule as narrow
from hymo_kernels.host import triton_gated_delta_rule as general
from hymo_kernels.host.gated_delta_call import Gradients, Options, Precision

HEAD_AXIS = {"o": 2, "state": 1, "dq": 2, "dk": 2, "dv": 2, "dg": 2, "dbeta": 2, "dstart": 1}
"""Which axis of each quantity counts heads."""


@dataclass(frozen=True)
class Case:
    """One call: sizes, gates, and what is optional."""

    b: int
    t: int
    h: int
    hv: int
    k: int
    v: int
    gate: float = -0.3
    norm: bool = True
    gated: bool = True
    state: bool = True
    resets: tuple[int, ...] = ()
    bounds: tuple[int, ...] = ()
    in_kernel: bool = False
    precision: Precision = "tf32x3"
    keep: bool = False


def inputs(case: Case, device: str, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """Tensors of a case, drawn on the CPU."""
    draw = torch.Generator().manual_seed(case.t * 131 + case.k)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    sequences = len(case.bounds) - 1 if case.bounds else case.b
    q, k, v = (
        normal(case.b, case.t, case.h, case.k),
        normal(case.b, case.t, case.h, case.k),
        normal(case.b, case.t, case.hv, case.v),
    )
    if not case.norm:
        q, k = torch.nn.functional.normalize(q, dim=-1), torch.nn.functional.normalize(k, dim=-1)
    g = (
        normal(case.b, case.t, case.hv)
        if case.in_kernel
        else case.gate * torch.rand(case.b, case.t, case.hv, generator=draw)
    )
    beta = (
        normal(case.b, case.t, case.hv) if case.in_kernel else 1.5 * torch.rand(case.b, case.t, case.hv, generator=draw)
    )
    for reset in case.resets:
        g[:, reset] = float("inf") if case.in_kernel else -float("inf")
    state = (sequences, case.hv, case.k, case.v)
    wide = {"g": g, "beta": beta, "start": normal(*state) if case.state else None, "d_end": normal(*state)}
    low = {"q": q, "k": k, "v": v, "do": normal(case.b, case.t, case.hv, case.v)}
    made: dict[str, Tensor | None] = {name: x.to(device, dtype) for name, x in low.items()}
    made |= {name: None if x is None else x.to(device) for name, x in wide.items()}
    made["bounds"] = torch.tensor(case.bounds, dtype=torch.int32, device=device) if case.bounds else None
    if not case.gated:
        made["g"] = None
    made["A_log"] = torch.linspace(-2, 1, case.hv).to(device) if case.in_kernel else None
    made["dt_bias"] = torch.linspace(-1, 1, case.hv).to(device) if case.in_kernel else None
    return made


def by_kernels(case: Case, x: dict[str, Tensor | None], kernels: Any = None) -> dict[str, Tensor]:
    """Read-outs, final state, and gradients, straight from the launchers: those that a call would take unless given."""
    beta_max = 2.0 if case.in_kernel else 1.0
    static = (case.k**-0.5, case.norm, case.in_kernel, case.in_kernel, beta_max, True, case.precision, case.keep)
    tensors = [x[name] for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "start", "bounds")]
    q, k, v, g, beta, A_log, dt_bias, start, bounds = tensors
    if kernels is None:
        kernels = narrow if narrow.serves(q, v) else general  # type: ignore[arg-type]
    o, end, *made = kernels.forward(*tensors, *static)
    grads = kernels.backward(q, k, v, start, bounds, *made, x["do"], x["d_end"], False, *static)
    found = Gradients(*grads)
    dg, d_beta, _, _ = general.through_gates(found, g, beta, A_log, dt_bias, Options(*static))  # type: ignore[arg-type]
    values = (o, end, found.q, found.k, found.v, dg, d_beta, found.start if case.state else None)
    return {name: x for name, x in zip(HEAD_AXIS, values, strict=True) if x is not None}


def by_definition(case: Case, x: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """The same in fp64 on the CPU."""
    given = {name: x[name] for name in ("q", "k", "v", "g", "beta", "start")}
    leaves = {name: leaf.cpu().double().requires_grad_() for name, leaf in given.items() if leaf is not None}
    o, end = naive_gated_delta_rule(
        *(leaves.get(name) for name in ("q", "k", "v", "g", "beta")),  # type: ignore[arg-type]
        initial_state=leaves.get("start"),
        output_final_state=True,
        use_qk_l2norm_in_kernel=case.norm,
        use_beta_sigmoid_in_kernel=case.in_kernel,
        allow_neg_eigval=case.in_kernel,
        use_gate_in_kernel=case.in_kernel,
        A_log=None if x["A_log"] is None else x["A_log"].cpu(),
        dt_bias=None if x["dt_bias"] is None else x["dt_bias"].cpu(),
        cu_seqlens=None if x["bounds"] is None else x["bounds"].cpu(),
    )
    assert end is not None
    assert x["do"] is not None
    assert x["d_end"] is not None
    loss = (o * x["do"].cpu().double()).sum() + (end * x["d_end"].cpu().double()).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {"o": o, "state": end} | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def worst_heads(case: Case, device: str, dtype: torch.dtype, kernels: Any = None) -> dict[str, float]:
    """Relative error of every quantity, of the head that has it worst; never NaN: that counts as infinite."""
    x = inputs(case, device, dtype)
    errors = {}
    found, true = by_kernels(case, x, kernels), by_definition(case, x)
    assert found.keys() == true.keys()
    for name, want in true.items():
        got, axis = found[name], HEAD_AXIS[name]
        difference = (got.cpu().double() - want).movedim(axis, 0).flatten(1).norm(dim=1)
        # dg and dbeta are sums of k * v products, which may cancel: their floor is the size of the terms.
        floor = (case.k * case.v) ** 0.5 / 4 if name in ("dg", "dbeta") else 1e-3
        size = want.movedim(axis, 0).flatten(1).norm(dim=1).clamp(min=floor)
        errors[name] = float((difference / size).nan_to_num(float("inf")).max())
    return errors


# Less than a segment and several, of one width and of two, cut short or not.
NARROW = (
    Case(1, 70, 1, 1, 16, 16),
    Case(1, 70, 1, 2, 16, 32, resets=(20, 25), keep=True),
    Case(2, 130, 1, 1, 32, 16, norm=False),
    Case(1, 150, 1, 1, 16, 16, bounds=(0, 20, 20, 97, 140)),
    Case(1, 80, 1, 2, 24, 16, in_kernel=True, resets=(3,)),
    Case(1, 16 * 10, 1, 1, 32, 32, gate=-0.02),
    Case(1, 70, 1, 2, 16, 16, gated=False),
    Case(1, 16 * 10 - 3, 1, 1, 16, 16, state=False),
    Case(1, 180, 1, 1, 16, 32, bounds=(0, 5, 5, 170, 171)),
)
MIDDLE = (
    Case(1, 70, 1, 2, 16, 64, resets=(20, 25)),
    Case(2, 130, 1, 1, 64, 16, norm=False),
    Case(1, 70, 1, 2, 64, 16, gated=False),
    Case(1, 150, 1, 1, 48, 16, bounds=(0, 20, 20, 97, 140)),
    Case(1, 80, 1, 2, 24, 64, in_kernel=True, resets=(3,)),
    Case(1, 32 * 9, 1, 1, 16, 64, gate=-0.5, state=False),
)
WIDE = (
    Case(1, 40, 1, 2, 192, 96, resets=(9,)),
    Case(1, 33, 1, 1, 256, 256, norm=False),
    Case(1, 50, 1, 1, 160, 40, bounds=(0, 7, 45), in_kernel=True, precision="ieee"),
)
LOW = (
    Case(1, 70, 1, 1, 96, 192, resets=(20,)),
    Case(1, 70, 1, 2, 160, 32, in_kernel=True),
    Case(1, 129, 1, 1, 256, 48, bounds=(0, 50, 115)),
    Case(1, 100, 1, 1, 32, 24, bounds=(0, 5, 90)),
    Case(1, 70, 1, 2, 16, 32, in_kernel=True),
)


def main(part: str) -> None:
    # Two multiprocessors and short segments, so that long cases are cut into three.
    narrow.multiprocessors = general.multiprocessors = lambda device: 2  # type: ignore[assignment]
    narrow.SHORTEST = general.SHORTEST = 4
    if part == "fp32":
        check(NARROW[:5] + MIDDLE + WIDE, torch.float32, within=2e-6)
        check_drawn()
        return
    # The interpreter has no bf16 products.
    check(LOW, torch.float16, within=2e-3)
    # fp32 shows more of an error than fp16: the kernels and tiles of 16-bit numbers with it.
    check(NARROW, torch.float32, within=2e-6, kernels=narrow)
    general.FP32_PLANS.update(general.PLANS)
    check(MIDDLE, torch.float32, within=2e-6)


@settings(max_examples=10, derandomize=True, deadline=None, database=None, phases=[Phase.generate])
@given(
    case=st.builds(
        Case,
        b=st.just(1),
        t=st.integers(1, 100),
        h=st.just(1),
        hv=st.integers(1, 2),
        k=st.integers(1, 128).map(lambda half: 2 * half),
        v=st.integers(1, 128).map(lambda half: 2 * half),
        gate=st.sampled_from([0.0, -0.05, -1.0]),
        norm=st.booleans(),
        state=st.booleans(),
        resets=st.sampled_from([(), (0,)]),
        in_kernel=st.booleans(),
        precision=st.sampled_from(["tf32x3", "ieee"]),
        keep=st.booleans(),
    ),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def check_drawn(case: Case, dtype: torch.dtype) -> None:
    check((case,), dtype, within=2e-6 if dtype == torch.float32 else 3e-3)


def check(cases: tuple[Case, ...], dtype: torch.dtype, *, within: float, kernels: Any = None) -> None:
    for case in cases:
        errors = worst_heads(case, "cpu", dtype, kernels)
        print(case, {name: f"{error:.1e}" for name, error in errors.items()})
        assert max(errors.values()) < within, (case, errors)
