"""The gated delta rule on NVIDIA GPUs: what is launched, on how many programs, and with which tiles."""

import functools
import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hymo_kernels.primitive import define, differentiable

CHUNK = 64


class Tiles(NamedTuple):
    """How one kernel is cut: value features per program (0: all), warps, software pipeline stages."""

    block_v: int
    warps: int
    stages: int


class Plan(NamedTuple):
    """The tiles of every kernel for one kind of shapes."""

    prepare: Tiles
    forward: Tiles
    states: Tiles
    chain: Tiles
    chunk: Tiles


PLANS: dict[int, Plan] = {
    32: Plan(Tiles(0, 4, 1), Tiles(32, 4, 2), Tiles(32, 4, 2), Tiles(32, 4, 2), Tiles(32, 4, 1)),
    64: Plan(Tiles(0, 4, 1), Tiles(64, 4, 2), Tiles(64, 4, 2), Tiles(64, 4, 2), Tiles(64, 4, 1)),
    128: Plan(Tiles(0, 4, 1), Tiles(64, 4, 2), Tiles(64, 4, 2), Tiles(64, 4, 2), Tiles(64, 8, 1)),
}
"""By the larger of key and value width, rounded up to a power of two; 16-bit numbers. Proven one by one on an H200.

Not every tiling is right: Triton 3.6 makes code from some others (value tiles of 32 with 4 warps at width 128) that
reads out of bounds or gives NaN. `tests/kernels/test_triton.py` runs every entry against the definition.
"""


class Shape(NamedTuple):
    """Sizes of one call, and how its sequences are cut."""

    b: int
    t: int
    h: int
    hv: int
    k: int
    v: int
    sequences: int  # of one batch row
    slots: int  # chunks kept per batch row and head
    packed: bool


class Prepared(NamedTuple):
    """What `prepare_kernel` makes of a call, for the forward and the backward."""

    inverse: Tensor
    attention: Tensor
    total: Tensor
    segment: Tensor
    strength: Tensor
    q_unit: Tensor
    k_unit: Tensor
    forget: Tensor


class Options(NamedTuple):
    """The static arguments of a call."""

    scale: float
    norm: bool  # q and k are divided by their lengths
    gate: bool  # g is what A_log and dt_bias make a gate of
    sigmoid: bool  # beta is a logit
    beta_max: float
    keep_end: bool


def shape_of(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Shape:
    """The shape of a call."""
    b, t, h, k = q.shape
    sequences = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    slots = -(-t // CHUNK) if cu_seqlens is None else t // CHUNK + sequences + 1
    return Shape(b, t, h, v.shape[2], k, v.shape[3], sequences, slots, cu_seqlens is not None)


@functools.cache
def multiprocessors(device: int | None) -> int:
    """How many programs a GPU runs at once, at one each."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def unavailable(q: Tensor, v: Tensor) -> str | None:
    """Why there is no kernel for these tensors; None if there is one."""
    if q.device.type != "cuda":
        return f"it needs tensors on an NVIDIA GPU, these are on {q.device.type}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if q.dtype not in (torch.bfloat16, torch.float16) or v.dtype != q.dtype:
        return f"it computes in bfloat16 or float16, q is {q.dtype} and v {v.dtype}"
    width = max(q.shape[-1], v.shape[-1])
    if width > max(PLANS) or width % 2:
        return f"key and value widths are even and at most {max(PLANS)}, got {q.shape[-1]} and {v.shape[-1]}"
    return None


def plan_of(shape: Shape) -> Plan:
    """The plan for a shape."""
    return PLANS[max(32, _block(max(shape.k, shape.v)))]


def segments_of(shape: Shape, tiles: Tiles, device: int | None) -> tuple[int, int]:
    """Chunks per segment, and segments: enough to fill the card, each long enough to pay for its early start."""
    programs = shape.b * shape.sequences * shape.hv * _tiles(shape, tiles)
    chunks = -(-shape.t // CHUNK)
    wanted = max(1, -(-2 * multiprocessors(device) // programs))
    length = max(8, -(-chunks // wanted))
    return length, max(1, -(-chunks // length))


def _block(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _block_v(shape: Shape, tiles: Tiles) -> int:
    return min(tiles.block_v, _block(shape.v))


def _tiles(shape: Shape, tiles: Tiles) -> int:
    return -(-shape.v // _block_v(shape, tiles))


def _aligned(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


FORGOTTEN = 12.0
"""How much decay, in nats, makes a start from nothing as good as the true one: e^-12 is 6e-6, far below bf16."""


def _sizes(shape: Shape) -> dict[str, Any]:
    return {"H": shape.h, "HV": shape.hv, "K": shape.k, "BLOCK_K": _block(shape.k), "C": CHUNK, "PACKED": shape.packed}


def _cut(shape: Shape, tiles: Tiles) -> dict[str, Any]:
    return {
        "V": shape.v,
        "BLOCK_V": _block_v(shape, tiles),
        "PRECISION": "tf32",
        "STAGES": tiles.stages,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }


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
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    shape = shape_of(q, v, cu_seqlens)
    o, end, *rest = _forward_outputs(q, k, v, cu_seqlens, options)
    made = Prepared(*rest)
    if shape.t == 0 or shape.packed:
        o.zero_()
    if shape.t == 0:
        if options.keep_end:
            end.copy_(start) if start is not None else end.zero_()
        return o, end, *made
    plan = plan_of(shape)
    bounds = made.segment if cu_seqlens is None else cu_seqlens
    gates = beta if g is None else g
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
        **_sizes(shape),
        **_gating(g, dt_bias, options),
        PRECISION="tf32",
        num_warps=plan.prepare.warps,
        num_stages=plan.prepare.stages,
    )
    _scan(q, k, v, made, start, bounds, o=o, end=end, states=None, shape=shape, tiles=plan.forward, options=options)
    return o, end, *made


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
        FORGOTTEN,
        **_sizes(shape),
        **_cut(shape, tiles),
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

    def new(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=q.device)

    return (
        new(b, t, hv, shape.v, dtype=v.dtype),
        new(b * shape.sequences, hv, shape.k, shape.v) if options.keep_end else new(b, 0),
        new(b, hv, t, CHUNK, dtype=q.dtype),
        new(b, hv, t, CHUNK, dtype=q.dtype),
        new(b, hv, t),
        new(b, hv, t, dtype=torch.int8),
        new(b, hv, t),
        new(b, h, t),
        new(b, h, t),
        new(b, hv, shape.slots),
    )


class Gradients(NamedTuple):
    """Of one call; `gates` is dg, or that of the logit of g; `rate` each chunk's part of dA_log."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Tensor
    beta: Tensor
    rate: Tensor
    start: Tensor


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
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
    do: Tensor,
    d_end: Tensor | None,
    only_start: bool,
    *static: Any,
) -> tuple[Tensor, ...]:
    """The gradients of `forward`; with `only_start` that of the initial state alone is computed."""
    from hymo_kernels.device.backward import chain_kernel, chunk_kernel

    options = Options(*static)
    kept = Prepared(inverse, attention, total, segment, strength, q_unit, k_unit, forget)
    q, k, v, do = _aligned(q), _aligned(k), _aligned(v), _aligned(do)
    shape = shape_of(q, v, cu_seqlens)
    grads = Gradients(*_backward_outputs(q, k, v, g, A_log, start, cu_seqlens))
    if shape.t == 0:
        if start is not None:
            grads.start.copy_(d_end) if d_end is not None else grads.start.zero_()
        return tuple(grads)
    if shape.packed:
        for grad in grads[:6]:
            grad.zero_()
    plan = plan_of(shape)
    bounds = kept.segment if cu_seqlens is None else cu_seqlens
    d_states = torch.empty(shape.b, shape.hv, shape.slots, shape.k, shape.v, dtype=q.dtype, device=q.device)
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
        FORGOTTEN,
        **_sizes(shape),
        **_cut(shape, plan.chain),
        HAS_END=d_end is not None,
        KEEP_START=start is not None,
    )
    if only_start:
        return tuple(grads)
    states = torch.empty_like(d_states)
    _scan(
        q, k, v, kept, start, bounds, o=None, end=None, states=states, shape=shape, tiles=plan.states, options=options
    )
    gates = beta if g is None else g
    chunk_kernel[(shape.b * shape.slots * shape.h,)](
        q,
        k,
        v,
        do,
        gates,
        *kept[:-1],
        states,
        d_states,
        beta if A_log is None else A_log,
        beta if dt_bias is None else dt_bias,
        *grads[:6],
        bounds,
        options.scale,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *do.stride()[:3],
        *gates.stride(),
        *grads.q.stride()[:3],
        *grads.v.stride()[:3],
        shape.t,
        shape.slots,
        shape.sequences,
        **_sizes(shape),
        **_cut(shape, plan.chunk),
        **_gating(g, dt_bias, options),
    )
    return tuple(grads)


def _backward_outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    A_log: Tensor | None,
    start: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, ...]:
    shape = shape_of(q, v, cu_seqlens)
    b, t, h, hv = shape[:4]

    def new(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=q.device)

    return (
        new(b, t, h, shape.k, dtype=q.dtype),
        new(b, t, h, shape.k, dtype=k.dtype),
        new(b, t, hv, shape.v, dtype=v.dtype),
        new(b, t, hv) if g is not None else new(b, 0),
        new(b, t, hv),
        new(b, hv, shape.slots) if A_log is not None else new(b, 0),
        new(*start.shape) if start is not None else new(b, 0),
    )


INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? start, "
    "Tensor? cu_seqlens"
)
STATIC = "float scale, bool norm, bool gate, bool sigmoid, float beta_max, bool keep_end"
MADE = ", ".join(f"Tensor {name}" for name in Prepared._fields)
FORWARD = define(
    f"gated_delta_forward({INPUTS}, {STATIC}) -> ({', '.join(['Tensor'] * 10)})",
    fake=lambda q, k, v, g, beta, A_log, dt_bias, start, cu_seqlens, *static: _forward_outputs(
        q, k, v, cu_seqlens, Options(*static)
    ),
    cuda=forward,
)
BACKWARD = define(
    f"gated_delta_backward({INPUTS}, {MADE}, Tensor do, Tensor? d_end, bool only_start, {STATIC})"
    f" -> ({', '.join(['Tensor'] * 7)})",
    fake=lambda q, k, v, g, beta, A_log, dt_bias, start, cu_seqlens, *others: _backward_outputs(
        q, k, v, g, A_log, start, cu_seqlens
    ),
    cuda=backward,
)
ARGUMENTS = 9 + len(Options._fields)


def _gradients(
    needs: tuple[bool, ...],
    arguments: tuple[Any, ...],
    outputs: tuple[Tensor, ...],
    grads: tuple[Tensor | None, ...],
) -> tuple[Tensor | None, ...]:
    tensors, static, made = arguments[:9], arguments[9:], outputs[2:]
    _, _, v, g, beta, A_log, dt_bias, start, _ = tensors
    do = torch.zeros_like(v) if grads[0] is None else grads[0]
    only_start = not any(needs[:7])
    found = Gradients(*BACKWARD(*tensors, *made, do, grads[1], only_start, *static))
    return (
        found.q,
        found.k,
        found.v,
        None if g is None else found.gates.to(g.dtype),
        found.beta.to(beta.dtype),
        None if A_log is None else found.rate.sum((0, 2)).to(A_log.dtype),
        None if dt_bias is None else found.gates.sum((0, 1)).to(dt_bias.dtype),
        None if start is None else found.start.to(start.dtype),
        None,
        *(None for _ in static),
    )


@functools.cache
def _rule(shared: tuple[int, ...]) -> Any:
    def gated_delta_rule(*arguments: Any) -> Any:
        return FORWARD(*arguments)

    saved = (*range(9), *range(ARGUMENTS + 2, ARGUMENTS + 2 + len(Prepared._fields)))
    return differentiable(gated_delta_rule, _gradients, save=saved, shared=shared, residuals=len(Prepared._fields))


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
    o, end = _rule(shared)(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, *options)
    return o, end
