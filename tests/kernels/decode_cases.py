"""Cases of the token by token Triton scan against the definition in fp64, for the interpreter and for a GPU.

The interpreter's are run by `interpreter.py`.
"""

import importlib
from dataclasses import dataclass

import torch
from torch import Tensor

from hymo_kernels import fused_recurrent_gated_delta_rule, naive_gated_delta_rule
from hymo_kernels.host import triton_recurrent_delta_rule as kernels
from hymo_kernels.host.gated_delta_call import Options
from hymo_kernels.primitive import LIBRARY
from tests.close import worst_error

# Outputs and gradients; the axis of the heads; and the RMS below which a true value counts as that: dg and dbeta are
# sums over the whole state, which may cancel.
HEADS = {"o": 2, "end": 1, "dq": 2, "dk": 2, "dv": 2, "dg": 2, "dbeta": 2, "dA_log": 1, "ddt_bias": 1, "dstart": 1}
FLOOR = {"dg": 0.5, "dbeta": 0.5, "dA_log": 0.5, "ddt_bias": 0.5}
LEAVES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "start")


@dataclass(frozen=True)
class Case:
    """One call: sizes, and what is optional."""

    b: int
    t: int
    h: int
    hv: int
    k: int
    v: int
    norm: bool = True
    in_kernel: bool = True  # gate and sigmoid
    gated: bool = True
    state: bool = True
    resets: tuple[int, ...] = ()
    bounds: tuple[int, ...] = ()
    strided: bool = False


def inputs(case: Case, device: str, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """Tensors of a case, drawn on the CPU; rows of no sequence are NaN."""
    draw = torch.Generator().manual_seed(case.t * 131 + case.k)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    rows, sequences = (case.b, case.t), len(case.bounds) - 1 if case.bounds else case.b
    widths = (case.h * case.k, case.h * case.k, case.hv * case.v)
    q, k, v = torch.split(normal(*rows, sum(widths)), widths, dim=-1)
    low = {
        "q": q.unflatten(-1, (case.h, case.k)),
        "k": k.unflatten(-1, (case.h, case.k)),
        "v": v.unflatten(-1, (case.hv, case.v)),
        "do": normal(*rows, case.hv, case.v),
    }
    if not case.norm:
        low |= {name: torch.nn.functional.normalize(low[name], dim=-1) for name in ("q", "k")}
    g, beta = normal(*rows, case.hv), normal(*rows, case.hv)
    if not case.in_kernel:
        g, beta = -g.abs() / 3, 2 * beta.sigmoid()
    for reset in case.resets:
        g[:, reset] = torch.inf if case.in_kernel else -torch.inf
    state = (sequences, case.hv, case.k, case.v)
    wide = {"beta": beta, "d_end": normal(*state)}
    wide |= {"g": g} if case.gated else {}
    wide |= {"start": normal(*state).mT.contiguous().mT if case.strided else normal(*state)} if case.state else {}
    if case.in_kernel:
        wide |= {"A_log": torch.linspace(-2, 1, case.hv), "dt_bias": torch.linspace(-1, 1, case.hv)}
    made = {name: (x if case.strided else x.contiguous()).to(device, dtype) for name, x in low.items()}
    made |= {name: x.to(device) for name, x in wide.items()}
    if case.bounds:
        made["bounds"] = torch.tensor(case.bounds, dtype=torch.int32, device=device)
        for name in ("q", "k", "v", "g", "beta"):
            made[name][:, case.bounds[-1] :] = torch.nan
    return dict.fromkeys((*LEAVES, "bounds")) | made


def options_of(case: Case) -> Options:
    return Options(
        scale=case.k**-0.5,
        norm=case.norm,
        gate=case.in_kernel,
        sigmoid=case.in_kernel,
        beta_max=2.0 if case.in_kernel else 1.0,
        keep_end=True,
    )


def by_kernels(case: Case, x: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Outputs and gradients, straight from the launchers."""
    tensors, static = [x[name] for name in (*LEAVES, "bounds")], options_of(case)
    o, end = kernels.forward(*tensors, *static)  # type: ignore[arg-type]
    found = kernels.Gradients(*kernels.backward(*tensors, x["do"], x["d_end"], *static))  # type: ignore[arg-type]
    every = {
        "o": o,
        "end": end,
        "dq": found.q,
        "dk": found.k,
        "dv": found.v,
        "dg": found.gates,
        "dbeta": found.beta,
        "dA_log": found.rate.sum((0, 1)),
        "ddt_bias": found.gates.sum((0, 1)),
        "dstart": found.start,
    }
    return {name: each for name, each in every.items() if name[0] != "d" or x[name[1:]] is not None}


def by_definition(case: Case, x: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """The same in fp64 on the CPU."""
    leaves = {name: x[name].cpu().double().requires_grad_() for name in LEAVES if x[name] is not None}  # type: ignore[union-attr]
    bounds, do, d_end = x["bounds"], x["do"], x["d_end"]
    assert do is not None
    assert d_end is not None
    o, end = naive_gated_delta_rule(
        *(leaves.get(name) for name in LEAVES[:5]),
        initial_state=leaves.get("start"),
        output_final_state=True,
        use_qk_l2norm_in_kernel=case.norm,
        use_beta_sigmoid_in_kernel=case.in_kernel,
        allow_neg_eigval=case.in_kernel,
        use_gate_in_kernel=case.in_kernel,
        A_log=leaves.get("A_log"),
        dt_bias=leaves.get("dt_bias"),
        cu_seqlens=None if bounds is None else bounds.cpu(),
    )
    assert end is not None
    loss = (o * do.cpu().double()).sum() + (end * d_end.cpu().double()).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return {"o": o, "end": end} | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def errors(case: Case, device: str, dtype: torch.dtype) -> dict[str, float]:
    """Relative error of every quantity, of the head that has it worst."""
    x = inputs(case, device, dtype)
    got, want = by_kernels(case, x), by_definition(case, x)
    assert got.keys() == want.keys()
    return {
        name: worst_error(
            torch.atleast_2d(got[name].cpu()),
            torch.atleast_2d(want[name]),
            head=HEADS[name],
            floor=FLOOR.get(name, 1e-3),
        )
        for name in want
    }


def pool_errors(device: str, dtype: torch.dtype, bounds: tuple[int, ...] = ()) -> dict[str, float]:
    """The same for states in a pool, of which the second sequence has none; what is not named must not change."""
    case = Case(1 if bounds else 4, bounds[-1] + 2 if bounds else 3, 1, 2, 24, 20, bounds=bounds)
    x = inputs(case, device, dtype)
    index = torch.tensor([5, -1, 0, 3], dtype=torch.int32, device=device)
    pool = torch.randn(7, 2, 24, 20, generator=torch.Generator().manual_seed(0)).to(device)
    named = index.clamp(min=0).long()
    x["start"] = pool[named]
    o, end = (x.detach() for name, x in by_definition(case, x).items() if name in ("o", "end"))
    rows = slice(bounds[1], bounds[2]) if bounds else slice(None)
    o[0 if bounds else 1, rows] = 0
    want = pool.cpu().double()
    want[[5, 0, 3]] = end[[0, 2, 3]]
    untouched = pool[[1, 2, 4, 6]].clone()
    sequence = [x[name] for name in LEAVES[:7]]
    got = kernels.update(*sequence, pool, index, x["bounds"], *options_of(case))  # type: ignore[arg-type]
    assert torch.equal(pool[[1, 2, 4, 6]], untouched)
    return {
        "o": worst_error(got.cpu(), o, head=2, floor=1e-3),
        "pool": worst_error(pool.cpu(), want, head=1, floor=1e-3),
    }


INTERPRETED = (
    Case(2, 1, 1, 2, 16, 16),
    Case(1, 4, 2, 4, 24, 40, resets=(2,), strided=True),
    Case(1, 11, 1, 2, 16, 16, norm=False, in_kernel=False, resets=(0, 9)),
    Case(1, 15, 1, 1, 18, 10, bounds=(0, 1, 1, 3, 13)),
    Case(1, 3, 1, 1, 16, 48, in_kernel=False, gated=False, state=False),
    Case(2, 0, 1, 1, 16, 16),
)


def check_public_path() -> None:
    """Gradients through the public name, alone and mapped over samples, and the ops' declared outputs."""
    launches = {"forward": kernels.forward, "backward": kernels.backward, "update": kernels.update}
    for name, launch in launches.items():
        LIBRARY.impl(f"recurrent_delta_{name}", launch, "CPU")  # type: ignore[no-untyped-call]
    entry = importlib.import_module("hymo_kernels.host.gated_delta_rule")
    entry.recurrent_unavailable = lambda *tensors: None  # type: ignore[attr-defined]
    case = Case(2, 3, 1, 2, 16, 16, resets=(1,))
    x = inputs(case, "cpu", torch.float32)
    in_kernel = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval")
    options = dict.fromkeys(in_kernel, True)

    def gradients(backend: str, *y: Tensor) -> tuple[Tensor, ...]:
        def loss(*y: Tensor) -> Tensor:
            weights = {"A_log": y[5], "dt_bias": y[6], "initial_state": y[7]}
            o, end = fused_recurrent_gated_delta_rule(
                *y[:5], output_final_state=True, state_v_first=True, backend=backend, **options, **weights
            )
            assert end is not None
            return o.sin().sum() + end.cos().sum()

        found: tuple[Tensor, ...] = torch.func.grad(loss, tuple(range(8)))(*y)
        return found

    tensors: list[Tensor] = [x[name] for name in LEAVES]  # type: ignore[misc]
    tensors[7] = tensors[7].mT
    samples = [each if i in (5, 6) else each[:, None] for i, each in enumerate(tensors)]
    in_dims = (None, *(None if i in (5, 6) else 0 for i in range(8)))
    want = torch.func.vmap(gradients, in_dims=in_dims)("eager", *samples)
    for got, each in zip(torch.func.vmap(gradients, in_dims=in_dims)("triton", *samples), want, strict=True):
        torch.testing.assert_close(got, each, rtol=1e-4, atol=1e-5)
    sequence, static = [x[name] for name in LEAVES[:7]], options_of(case)
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(kernels.FORWARD, (*sequence, x["start"], None, *static), test_utils=utils)
    torch.library.opcheck(kernels.UPDATE, (*sequence, x["start"], torch.arange(2), None, *static), test_utils=utils)
    grads = (x["do"], x["d_end"])
    torch.library.opcheck(kernels.BACKWARD, (*sequence, x["start"], None, *grads, *static), test_utils=utils)
    print("public path")


def main() -> None:
    # One multiprocessor is filled by wide tiles, a million need narrow ones.
    for processors, cases in ((1, INTERPRETED), (10**6, INTERPRETED[1:2])):
        kernels.multiprocessors = lambda device, processors=processors: processors  # type: ignore[assignment]
        for case in cases:
            report(case, errors(case, "cpu", torch.float32))
    for bounds in ((), (0, 2, 3, 3, 7)):
        report(bounds, pool_errors("cpu", torch.float32, bounds))
    check_public_path()


def report(case: object, found: dict[str, float]) -> None:
    print(case, {name: f"{error:.1e}" for name, error in found.items()})
    # NaN is no less than anything.
    assert all(error < 2e-6 for error in found.values()), (case, found)
