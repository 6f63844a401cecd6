"""The gated delta rule on NVIDIA GPUs: what is launched, on how many programs, and with which tiles.

Narrow heads have kernels of their own: `narrow_gated_delta_rule`.
"""

import functools
import importlib.util
import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hymo_kernels.host import hopper_gated_delta_rule as hopper
from hymo_kernels.host import narrow_gated_delta_rule as narrow
from hymo_kernels.host.gated_delta_call import (
    FORGOTTEN,
    FP32_FORGOTTEN,
    STATIC,
    Gradients,
    Options,
    Prepared,
    Shape,
    aligned,
    backward_outputs,
    multiprocessors,
    over_groups,
    shape_of,
)
from hymo_kernels.primitive import define, differentiable

HAS_TRITON = importlib.util.find_spec("triton") is not None


class Tiles(NamedTuple):
    """How one kernel is cut: value features at a time, warps, software pipeline stages, key features at a time.

    A width of 0 is all of it.
    """

    block_v: int
    warps: int
    stages: int
    block_k: int = 0


class Plan(NamedTuple):
    """The tiles of every kernel for one kind of shapes."""

    prepare: Tiles
    forward: Tiles
    states: Tiles
    chain: Tiles
    chunk: Tiles  # of `wide_chunk_kernel` if it is cut along key features


PLANS: dict[int, Plan] = {
    64: Plan(Tiles(0, 4, 1), Tiles(64, 4, 2), Tiles(64, 4, 2), Tiles(64, 4, 2), Tiles(64, 4, 1)),
    128: Plan(Tiles(0, 4, 1), Tiles(64, 4, 2), Tiles(64, 4, 2), Tiles(64, 4, 2), Tiles(64, 8, 1)),
    256: Plan(Tiles(0, 4, 1, 128), Tiles(64, 8, 1, 64), Tiles(64, 8, 1, 64), Tiles(64, 8, 1, 64), Tiles(64, 8, 1, 64)),
}
"""By key width, rounded up; 16-bit numbers. Every entry was proven on an H200.

Not every tiling is right: Triton 3.6 makes code from some others (value tiles of 32 with 4 warps at width 128) that
reads out of bounds or gives NaN. `tests/kernels/test_triton.py` runs every entry against the definition.
"""

FP32_PLANS: dict[int, Plan] = {
    32: Plan(Tiles(0, 4, 1, 32), Tiles(32, 4, 1), Tiles(32, 4, 1), Tiles(32, 4, 1), Tiles(32, 4, 1, 32)),
    64: Plan(Tiles(0, 4, 1, 32), Tiles(16, 4, 1), Tiles(16, 4, 1), Tiles(16, 4, 1), Tiles(32, 4, 1, 32)),
    128: Plan(Tiles(0, 8, 1, 32), Tiles(16, 8, 1, 64), Tiles(16, 8, 1, 64), Tiles(16, 8, 1, 64), Tiles(32, 8, 1, 32)),
    256: Plan(Tiles(0, 8, 1, 32), Tiles(16, 8, 1, 64), Tiles(16, 8, 1, 64), Tiles(16, 8, 1, 64), Tiles(32, 8, 1, 32)),
}
"""The same of fp32 numbers, proven likewise. From 128 on 8 warps: on 4 there is twice the code to compile where
products are of fp32 operands, and registers spill."""

WIDEST = 256

SHORTEST = 8
"""Chunks of the shortest segment."""


def unavailable(q: Tensor, v: Tensor) -> str | None:
    """Why there is no kernel for these tensors; None if there is one."""
    if q.device.type != "cuda":
        return f"it needs tensors on an NVIDIA GPU, these are on {q.device.type}"
    if not HAS_TRITON:
        return "Triton is not installed"
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32) or v.dtype != q.dtype:
        return f"it computes in bfloat16, float16 or float32, q is {q.dtype} and v {v.dtype}"
    widths = (q.shape[-1], v.shape[-1])
    if any(width % 2 or not 0 < width <= WIDEST for width in widths):
        return f"key and value widths are even and at most {WIDEST}, got {widths[0]} and {widths[1]}"
    return None


def width_of(shape: Shape, dtype: torch.dtype) -> int:
    """The key width of the entry that serves a shape: its tiles are proven, whatever part of them a shape fills."""
    return next(width for width in _table(dtype) if width >= shape.k)


def plan_of(shape: Shape, dtype: torch.dtype) -> Plan:
    """The tiles of a call."""
    return _table(dtype)[width_of(shape, dtype)]


def _table(dtype: torch.dtype) -> dict[int, Plan]:
    return FP32_PLANS if dtype == torch.float32 else PLANS


def segments_of(shape: Shape, tiles: Tiles, device: int | None) -> tuple[int, int]:
    """Chunks per segment, and segments: enough to fill the card, each long enough to pay for its early start."""
    programs = shape.b * shape.sequences * shape.hv * _tiles(shape, tiles)
    chunks = -(-shape.t // shape.chunk)
    wanted = max(1, -(-2 * multiprocessors(device) // programs))
    length = max(SHORTEST, -(-chunks // wanted))
    return length, max(1, -(-chunks // length))


def _tiles(shape: Shape, tiles: Tiles) -> int:
    return -(-shape.v // tiles.block_v)


def _cut(shape: Shape, tiles: Tiles, dtype: torch.dtype, options: Options) -> dict[str, Any]:
    return {
        "H": shape.h,
        "HV": shape.hv,
        "K": shape.k,
        "BLOCK_K": tiles.block_k or width_of(shape, dtype),
        "C": shape.chunk,
        "PACKED": shape.packed,
        # Of 16-bit numbers only the inverse is a product of fp32 numbers.
        "PRECISION": options.precision if dtype == torch.float32 else "tf32",
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }


def _columns(shape: Shape, tiles: Tiles) -> dict[str, int]:
    return {"V": shape.v, "BLOCK_V": tiles.block_v, "STAGES": tiles.stages}


def _forgotten(dtype: torch.dtype) -> float:
    return FP32_FORGOTTEN if dtype == torch.float32 else FORGOTTEN


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    start: Tensor | None,
    cu_seqlens: Tensor | None,
    *static: Any,
) -> tuple[Tensor, ...]:
    """Read-outs, final states (an empty tensor unless kept), and what the backward needs."""
    from hymo_kernels.device.prepare import prepare_kernel

    options = Options(*static)
    q, k, v = aligned(q), aligned(k), aligned(v)
    shape = shape_of(q, v, cu_seqlens)
    o, end, *rest, states = _forward_outputs(q, k, v, cu_seqlens, options)
    made = Prepared(*rest)
    if shape.t == 0 or shape.packed:
        o.zero_()
    if shape.t == 0:
        if options.keep_end:
            end.copy_(start) if start is not None else end.zero_()
        return o, end, *made, states
    plan = plan_of(shape, q.dtype)
    bounds = made.segment if cu_seqlens is None else cu_seqlens
    gates = beta if g is None else g
    if hopper.prepares(q, k, shape, options):
        hopper.prepare(q, k, g, beta, A_log, dt_bias, bounds, made, shape=shape, options=options)
    else:
        prepare_kernel[(shape.b * shape.slots * shape.h,)](
            q,
            k,
            gates,
            beta,
            beta if A_log is None else A_log,
            beta if dt_bias is None else dt_bias,
            bounds,
            options.scale,
            *made,
            *q.stride()[:3],
            *k.stride()[:3],
            *gates.stride(),
            *beta.stride(),
            shape.t,
            shape.slots,
            shape.sequences,
            **_cut(shape, plan.prepare, q.dtype, options),
            **_gating(g, dt_bias, options),
        )
    kept = states if options.keep_states else None
    _scan(q, k, v, made, start, bounds, o=o, end=end, states=kept, shape=shape, tiles=plan.forward, options=options)
    return o, end, *made, states


def _gating(g: Tensor | None, dt_bias: Tensor | None, options: Options) -> dict[str, Any]:
    return {
        "NORM": options.norm,
        "GATE": options.gate,
        "HAS_BIAS": dt_bias is not None,
        "SIGMOID": options.sigmoid,
        "HAS_G": g is not None,
        "BETA_MAX": options.beta_max,
    }


def _scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    made: Prepared,
    start: Tensor | None,
    bounds: Tensor,
    *,
    o: Tensor | None,
    end: Tensor | None,
    states: Tensor | None,
    shape: Shape,
    tiles: Tiles,
    options: Options,
) -> None:
    """Carries the state through all chunks, writing what is given of o, end and states."""
    from hymo_kernels.device.forward import forward_kernel

    if hopper.serves(q, shape):
        hopper.scan(q, k, v, made, start, bounds, o=o, end=end, states=states, shape=shape, options=options)
        return
    length, segments = segments_of(shape, tiles, q.device.index)
    keeps_end = end is not None and options.keep_end
    forward_kernel[(_tiles(shape, tiles) * shape.hv * segments * shape.b * shape.sequences,)](
        q,
        k,
        v,
        *made,
        made.inverse if start is None else start,
        v if o is None else o,
        made.inverse if states is None else states,
        made.total if end is None else end,
        bounds,
        options.scale,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *((0, 0, 0, 0) if start is None else start.stride()),
        *(v if o is None else o).stride()[:3],
        shape.t,
        shape.slots,
        shape.sequences,
        length,
        segments,
        _forgotten(q.dtype),
        **_cut(shape, tiles, q.dtype, options),
        **_columns(shape, tiles),
        HAS_START=start is not None,
        READ_OUT=o is not None,
        KEEP_STATES=states is not None,
        KEEP_END=keeps_end,
    )


def _forward_outputs(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, options: Options
) -> tuple[Tensor, ...]:
    shape = shape_of(q, v, cu_seqlens)
    b, t, h, hv = shape[:4]

    def new(*size: int | torch.SymInt, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=q.device)

    return (
        new(b, t, hv, shape.v, dtype=v.dtype),
        new(b * shape.sequences, hv, shape.k, shape.v) if options.keep_end else new(b, 0),
        new(b, hv, t, shape.chunk, dtype=q.dtype),
        new(b, hv, t, shape.chunk, dtype=q.dtype),
        new(b, hv, t),
        new(b, hv, t, dtype=torch.int32),
        new(b, hv, t),
        new(b, h, t),
        new(b, h, t),
        new(b, hv, shape.slots),
        _empty_states(q, shape) if options.keep_states else new(b, 0, dtype=q.dtype),
    )


def _empty_states(q: Tensor, shape: Shape) -> Tensor:
    return torch.empty(shape.b, shape.hv, shape.slots, shape.k, shape.v, dtype=q.dtype, device=q.device)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    cu_seqlens: Tensor | None,
    inverse: Tensor,
    attention: Tensor,
    total: Tensor,
    segment: Tensor,
    strength: Tensor,
    q_unit: Tensor,
    k_unit: Tensor,
    forget: Tensor,
    kept_states: Tensor,
    do: Tensor,
    d_end: Tensor | None,
    only_start: bool,
    *static: Any,
) -> tuple[Tensor, ...]:
    """The gradients of `forward`; with `only_start` that of the initial state alone is computed."""
    from hymo_kernels.device.backward import chain_kernel

    options = Options(*static)
    kept = Prepared(inverse, attention, total, segment, strength, q_unit, k_unit, forget)
    q, k, v, do = aligned(q), aligned(k), aligned(v), aligned(do)
    shape = shape_of(q, v, cu_seqlens)
    grads = Gradients(*backward_outputs(q, k, v, start, cu_seqlens))
    if shape.t == 0:
        if start is not None:
            grads.start.copy_(d_end) if d_end is not None else grads.start.zero_()
        return tuple(grads)
    if shape.packed:
        for grad in grads[:5]:
            grad.zero_()
    bounds = kept.segment if cu_seqlens is None else cu_seqlens
    plan = plan_of(shape, q.dtype)
    states = None
    if options.keep_states and not only_start:
        states = kept_states
    elif not only_start:
        states = _empty_states(q, shape)
        _scan(
            q,
            k,
            v,
            kept,
            start,
            bounds,
            o=None,
            end=None,
            states=states,
            shape=shape,
            tiles=plan.states,
            options=options,
        )
    if states is not None and hopper.serves(q, shape):
        hopper.backward(q, k, v, do, kept, states, d_end, bounds, grads, start, shape=shape, options=options)
        return tuple(grads)
    d_states = _empty_states(q, shape)
    length, segments = segments_of(shape, plan.chain, q.device.index)
    chain_kernel[(_tiles(shape, plan.chain) * shape.hv * segments * shape.b * shape.sequences,)](
        q,
        k,
        do,
        *kept,
        kept.inverse if d_end is None else d_end,
        grads.v,
        d_states,
        grads.start,
        bounds,
        options.scale,
        *q.stride()[:3],
        *k.stride()[:3],
        *do.stride()[:3],
        *((0, 0, 0, 0) if d_end is None else d_end.stride()),
        *grads.v.stride()[:3],
        shape.t,
        shape.slots,
        shape.sequences,
        length,
        segments,
        _forgotten(q.dtype),
        **_cut(shape, plan.chain, q.dtype, options),
        **_columns(shape, plan.chain),
        HAS_END=d_end is not None,
        KEEP_START=start is not None,
    )
    if states is not None:
        chunks = _pieces if plan.chunk.block_k else _chunks
        chunks(q, k, v, do, kept, states, d_states, bounds, grads, shape=shape, tiles=plan.chunk, options=options)
    return tuple(grads)


def _chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    kept: Prepared,
    states: Tensor,
    d_states: Tensor,
    bounds: Tensor,
    grads: Gradients,
    *,
    shape: Shape,
    tiles: Tiles,
    options: Options,
) -> None:
    """Fills all of `grads` but that of the start, given the states around each chunk and dR in place of dv."""
    from hymo_kernels.device.backward import chunk_kernel

    chunk_kernel[(shape.b * shape.slots * shape.h,)](
        q,
        k,
        v,
        do,
        *kept[:-1],
        states,
        d_states,
        *grads[:5],
        bounds,
        options.scale,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *do.stride()[:3],
        *grads.q.stride()[:3],
        *grads.v.stride()[:3],
        shape.t,
        shape.slots,
        shape.sequences,
        **_cut(shape, tiles, q.dtype, options),
        **_columns(shape, tiles),
        NORM=options.norm,
    )


def _pieces(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    kept: Prepared,
    states: Tensor,
    d_states: Tensor,
    bounds: Tensor,
    grads: Gradients,
    *,
    shape: Shape,
    tiles: Tiles,
    options: Options,
) -> None:
    """The same as `_chunks`, some key features at a time."""
    from hymo_kernels.device.wide_backward import wide_chunk_kernel

    with over_groups(grads, shape) as (dq, dk):
        wide_chunk_kernel[(shape.b * shape.slots * shape.hv,)](
            q,
            k,
            v,
            do,
            kept.inverse,
            *kept[2:-1],
            states,
            d_states,
            dq,
            dk,
            *grads[2:5],
            torch.empty_like(grads.v),
            bounds,
            options.scale,
            *q.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            *do.stride()[:3],
            shape.t,
            shape.slots,
            shape.sequences,
            **_cut(shape, tiles, q.dtype, options),
            **_columns(shape, tiles),
            NORM=options.norm,
        )


INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? start, "
    "Tensor? cu_seqlens"
)


class Ops(NamedTuple):
    """The two opaque operations of one kind of kernels, and how many tensors the one leaves to the other."""

    forward: Any
    backward: Any
    kept: int


def _ops(name: str, forward: Any, backward: Any, outputs: Any, kept: tuple[str, ...]) -> Ops:
    left = ", ".join(f"Tensor {each}" for each in kept)
    return Ops(
        define(
            f"{name}_forward({INPUTS}, {STATIC}) -> ({', '.join(['Tensor'] * (2 + len(kept)))})",
            fake=lambda q, k, v, g, beta, A_log, dt_bias, start, cu_seqlens, *static: outputs(
                q, k, v, cu_seqlens, Options(*static)
            ),
            cuda=forward,
        ),
        define(
            f"{name}_backward(Tensor q, Tensor k, Tensor v, Tensor? start, Tensor? cu_seqlens, "
            f"{left}, Tensor do, Tensor? d_end, bool only_start, {STATIC}) -> ({', '.join(['Tensor'] * 6)})",
            fake=lambda q, k, v, start, cu_seqlens, *others: backward_outputs(q, k, v, start, cu_seqlens),
            cuda=backward,
        ),
        len(kept),
    )


OPS = {
    False: _ops("gated_delta", forward, backward, _forward_outputs, (*Prepared._fields, "kept_states")),
    True: _ops("narrow_gated_delta", narrow.forward, narrow.backward, narrow.forward_outputs, narrow.Kept._fields),
}
"""By whether the heads are narrow."""
ARGUMENTS = 9 + len(Options._fields)


def _gradients(
    is_narrow: bool,
    needs: tuple[bool, ...],
    arguments: tuple[Any, ...],
    outputs: tuple[Tensor | None, ...],
    grads: tuple[Tensor | None, ...],
) -> tuple[Tensor | None, ...]:
    q, k, v, g, beta, A_log, dt_bias, start, cu_seqlens = arguments[:9]
    options = Options(*arguments[9:])
    do = torch.zeros_like(v) if grads[0] is None else grads[0]
    only_start = not any(needs[:7])
    rest = (*outputs[2:], do, grads[1], only_start, *options)
    found = Gradients(*OPS[is_narrow].backward(q, k, v, start, cu_seqlens, *rest))
    dg, d_beta, d_rate, d_bias = through_gates(found, g, beta, A_log, dt_bias, options)
    return (
        found.q,
        found.k,
        found.v,
        dg,
        d_beta,
        d_rate,
        d_bias,
        None if start is None else found.start.to(start.dtype),
        None,
        *(None for _ in options),
    )


def through_gates(
    found: Gradients, g: Tensor | None, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, options: Options
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """Gradients of g, beta, A_log and dt_bias as they were given."""
    d_gate, d_strength = found.retention, found.strength
    if options.sigmoid:
        write = beta.float().sigmoid()
        d_strength = d_strength * (options.beta_max * write * (1 - write))
    d_beta = d_strength.to(beta.dtype)
    if not options.gate or A_log is None:
        return None if g is None else d_gate.to(g.dtype), d_beta, None, None
    raw = torch.zeros_like(d_gate) if g is None else g.float()
    # A reset's gradient is 0, and infinite inputs must not make it NaN.
    raw = torch.where(raw.isinf(), 0, raw)
    if dt_bias is not None:
        raw = raw + dt_bias.float()
    d_softplus = -d_gate * A_log.float().exp()
    d_rate = (d_softplus * torch.nn.functional.softplus(raw)).sum((0, 1)).to(A_log.dtype)
    d_raw = d_softplus * raw.sigmoid()
    d_bias = None if dt_bias is None else d_raw.sum((0, 1)).to(dt_bias.dtype)
    return None if g is None else d_raw.to(g.dtype), d_beta, d_rate, d_bias


def _rule(is_narrow: bool, shared: tuple[int, ...]) -> Any:
    def gated_delta_rule(*arguments: Any) -> Any:
        return OPS[is_narrow].forward(*arguments)

    kept = OPS[is_narrow].kept
    saved = (*range(9), *range(ARGUMENTS + 2, ARGUMENTS + 2 + kept))
    gradients = functools.partial(_gradients, is_narrow)
    return differentiable(gated_delta_rule, gradients, save=saved, shared=shared, residuals=kept)


# By the kind of kernels, and which of A_log, dt_bias and cu_seqlens are given. Made here: a class cannot be made while
# a call is traced.
_RULES = {
    (is_narrow, shared): _rule(is_narrow, shared)
    for is_narrow in OPS
    for count in range(4)
    for shared in itertools.combinations((5, 6, 8), count)
}


def triton_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Read-outs and final states; an empty tensor for these unless `options.keep_end`."""
    shared = tuple(i for i, x in ((5, A_log), (6, dt_bias), (8, cu_seqlens)) if x is not None)
    o, end = _RULES[narrow.serves(q, v), shared](q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, *options)
    return o, end
