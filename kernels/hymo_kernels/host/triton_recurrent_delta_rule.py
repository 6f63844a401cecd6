"""The gated delta rule for a few tokens on NVIDIA GPUs: what is launched, on how many programs, with which tiles."""

import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hymo_kernels.host.gated_delta_call import STATIC, Options, multiprocessors
from hymo_kernels.primitive import define, differentiable

HAS_TRITON = importlib.util.find_spec("triton") is not None

WIDEST = 256
"""Keys and values."""

MARK = 8
"""Tokens between the states that the backward keeps; up to as many need none but the first."""

TILES_V = (32, 16, 8)
"""Value columns of a program, widest first: wide ones use whole cache lines of the state, narrow ones fill the card."""

REGISTERS = 32
"""Numbers of the state in a thread; the reverse pass holds two states."""

FILLED = 4
"""Programs a multiprocessor that are enough."""


class Shape(NamedTuple):
    """Sizes of one call."""

    b: int
    t: int
    h: int
    hv: int
    k: int
    v: int
    sequences: int  # of one batch row
    packed: bool


class Tiles(NamedTuple):
    """Value columns per program, programs per head, warps."""

    block_v: int
    programs: int
    warps: int


class Strengths(NamedTuple):
    """What sets retention and write strength; `None` where it is not there."""

    g: Tensor | None
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None


def shape_of(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Shape:
    """The shape of a call."""
    sequences = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    b, t, h, k = q.shape
    return Shape(b, t, h, v.shape[2], k, v.shape[3], sequences, cu_seqlens is not None)


def unavailable(q: Tensor, v: Tensor) -> str | None:
    """Why there is no kernel for these tensors; None if there is one."""
    if q.device.type != "cuda":
        return f"it needs tensors on an NVIDIA GPU, these are on {q.device.type}"
    if not HAS_TRITON:
        return "Triton is not installed"
    if not {q.dtype, v.dtype} <= {torch.bfloat16, torch.float16, torch.float32}:
        return f"it takes bfloat16, float16 and float32, q is {q.dtype} and v {v.dtype}"
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        return f"key and value widths are at most {WIDEST}, got {q.shape[-1]} and {v.shape[-1]}"
    return None


def tiles_of(shape: Shape, device: int | None) -> Tiles:
    """The widest tiles that still fill the card."""
    heads = shape.b * shape.sequences * shape.hv

    def count(block: int) -> int:
        return -(-shape.v // block)

    full = FILLED * multiprocessors(device)
    block_v = next((block for block in TILES_V if heads * count(block) >= full), TILES_V[-1])
    return Tiles(block_v, count(block_v), min(8, max(1, _block(shape.k) * block_v // (32 * REGISTERS))))


def _block(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _aligned(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _slots(shape: Shape) -> int:
    """States kept of one batch row and head, as `device/places.py` numbers them."""
    return -(-shape.t // MARK) if not shape.packed else shape.t // MARK + shape.sequences + 1


def _sizes(shape: Shape, tiles: Tiles) -> dict[str, Any]:
    return {
        "H": shape.h,
        "HV": shape.hv,
        "K": shape.k,
        "V": shape.v,
        "BLOCK_K": _block(shape.k),
        "BLOCK_V": tiles.block_v,
        "C": MARK,
        "PACKED": shape.packed,
        "num_warps": tiles.warps,
    }


def _gating(strengths: Strengths, options: Options) -> dict[str, Any]:
    return {
        "NORM": options.norm,
        "GATE": options.gate,
        "HAS_BIAS": strengths.dt_bias is not None,
        "SIGMOID": options.sigmoid,
        "HAS_G": strengths.g is not None,
        "BETA_MAX": options.beta_max,
    }


def _pointers(strengths: Strengths) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Gates, strengths, and their weights, a stand-in for each that is not there; strides of the first two."""
    beta = strengths.beta
    tensors = tuple(beta if x is None else x for x in strengths)
    return tensors, (*tensors[0].stride(), *beta.stride())


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    strengths: Strengths,
    *,
    start: Tensor | None,
    end: Tensor | None,
    index: Tensor | None,
    o: Tensor | None,
    marks: Tensor | None,
    cu_seqlens: Tensor | None,
    options: Options,
) -> None:
    """Carries the states through all tokens, writing what is given of end, o and marks."""
    from hymo_kernels.device.recurrent import recurrent_kernel

    shape = shape_of(q, v, cu_seqlens)
    tiles = tiles_of(shape, q.device.index)
    pointers, strides = _pointers(strengths)
    recurrent_kernel[(shape.b * shape.sequences * shape.hv * tiles.programs,)](
        q,
        k,
        v,
        *pointers,
        q if start is None else start,
        q if end is None else end,
        q if index is None else index,
        v if o is None else o,
        q if marks is None else marks,
        q if cu_seqlens is None else cu_seqlens,
        options.scale,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *strides,
        *((0, 0, 0, 0) if start is None else start.stride()),
        *((0, 0, 0, 0) if end is None else end.stride()),
        shape.t,
        _slots(shape),
        shape.sequences,
        **_sizes(shape, tiles),
        **_gating(strengths, options),
        HAS_START=start is not None,
        KEEP_END=end is not None,
        POOL=index is not None,
        KEEP_MARKS=marks is not None,
        READ_OUT=o is not None,
    )


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
) -> tuple[Tensor, Tensor]:
    """Read-outs and final states (an empty tensor unless kept)."""
    options = Options(*static)
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    o, end = _forward_outputs(q, v, cu_seqlens, options)
    if _programs(q, v, cu_seqlens) == 0:
        return o.zero_(), end
    with torch.cuda.device(q.get_device()):
        _run(
            q,
            k,
            v,
            Strengths(g, beta, A_log, dt_bias),
            start=start,
            end=end if options.keep_end else None,
            index=None,
            o=o,
            marks=None,
            cu_seqlens=cu_seqlens,
            options=options,
        )
    return o, end


def update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    pool: Tensor,
    state_indices: Tensor,
    cu_seqlens: Tensor | None,
    *static: Any,
) -> Tensor:
    """Read-outs; the states in `pool` that `state_indices` name become the final ones."""
    options = Options(*static)
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    o, _ = _forward_outputs(q, v, cu_seqlens, options._replace(keep_end=False))
    if _programs(q, v, cu_seqlens) == 0:
        return o.zero_()
    with torch.cuda.device(q.get_device()):
        _run(
            q,
            k,
            v,
            Strengths(g, beta, A_log, dt_bias),
            start=pool,
            end=pool,
            index=state_indices.contiguous(),
            o=o,
            marks=None,
            cu_seqlens=cu_seqlens,
            options=options,
        )
    return o


def _programs(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> int:
    """Zero where there is no state to carry."""
    shape = shape_of(q, v, cu_seqlens)
    return shape.b * shape.sequences * shape.hv * shape.k * shape.v


def _forward_outputs(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, options: Options) -> tuple[Tensor, Tensor]:
    shape = shape_of(q, v, cu_seqlens)
    end = (shape.b * shape.sequences, shape.hv, shape.k, shape.v) if options.keep_end else (shape.b, 0)
    return (
        torch.empty(shape.b, shape.t, shape.hv, shape.v, dtype=v.dtype, device=v.device),
        torch.empty(end, dtype=torch.float32, device=v.device),
    )


class Gradients(NamedTuple):
    """Of one call; `gates` is dg, or that of the logit of g; `rate` each token's part of dA_log."""

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
    do: Tensor,
    d_end: Tensor | None,
    *static: Any,
) -> tuple[Tensor, ...]:
    """The gradients of `forward`."""
    from hymo_kernels.device.recurrent import gather_kernel, reverse_kernel

    options, strengths = Options(*static), Strengths(g, beta, A_log, dt_bias)
    q, k, v, do = _aligned(q), _aligned(k), _aligned(v), _aligned(do)
    shape = shape_of(q, v, cu_seqlens)
    grads = Gradients(*_backward_outputs(q, k, v, g, A_log, start, cu_seqlens))
    if _programs(q, v, cu_seqlens) == 0:
        return tuple(grad.zero_() for grad in grads)
    tiles = tiles_of(shape, q.device.index)
    pointers, strides = _pointers(strengths)
    bounds = q if cu_seqlens is None else cu_seqlens

    def new(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.float32, device=q.device)

    parts = (shape.b, shape.t, shape.hv, tiles.programs)
    dq, dk, d_decay, d_write = new(*parts, shape.k), new(*parts, shape.k), new(*parts), new(*parts)
    with torch.cuda.device(q.get_device()):
        marks = None
        if shape.t > MARK:
            marks = new(shape.b, shape.hv, _slots(shape), shape.k, shape.v)
            _run(
                q,
                k,
                v,
                strengths,
                start=start,
                end=None,
                index=None,
                o=None,
                marks=marks,
                cu_seqlens=cu_seqlens,
                options=options,
            )
        reverse_kernel[(shape.b * shape.sequences * shape.hv * tiles.programs,)](
            q,
            k,
            v,
            *pointers,
            q if start is None else start,
            q if marks is None else marks,
            do,
            q if d_end is None else d_end,
            dq,
            dk,
            grads.v,
            d_decay,
            d_write,
            grads.start,
            bounds,
            options.scale,
            *q.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            *strides,
            *((0, 0, 0, 0) if start is None else start.stride()),
            *do.stride()[:3],
            *((0, 0, 0, 0) if d_end is None else d_end.stride()),
            shape.t,
            _slots(shape),
            shape.sequences,
            **_sizes(shape, tiles),
            **_gating(strengths, options),
            HAS_START=start is not None,
            HAS_MARKS=marks is not None,
            HAS_END=d_end is not None,
            KEEP_START=start is not None,
        )
        if shape.t > 0:
            gather_kernel[(shape.b * shape.t * shape.h,)](
                q,
                k,
                *pointers,
                dq,
                dk,
                d_decay,
                d_write,
                grads.q,
                grads.k,
                grads.gates,
                grads.beta,
                grads.rate,
                bounds,
                *q.stride()[:3],
                *k.stride()[:3],
                *strides,
                shape.t,
                shape.sequences,
                **{name: _sizes(shape, tiles)[name] for name in ("H", "HV", "K", "BLOCK_K", "PACKED")},
                TILES=tiles.programs,
                **_gating(strengths, options),
                num_warps=1,
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
    rows = (shape.b, shape.t, shape.hv)

    def new(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=q.device)

    return (
        new(*q.shape, dtype=q.dtype),
        new(*k.shape, dtype=k.dtype),
        new(*v.shape, dtype=v.dtype),
        new(*rows) if g is not None else new(shape.b, 0),
        new(*rows),
        new(*rows) if A_log is not None else new(shape.b, 0),
        new(*start.shape) if start is not None else new(shape.b, 0),
    )


SEQUENCE = "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor beta, Tensor? A_log, Tensor? dt_bias"
INPUTS = f"{SEQUENCE}, Tensor? start, Tensor? cu_seqlens"
FORWARD = define(
    f"recurrent_delta_forward({INPUTS}, {STATIC}) -> (Tensor, Tensor)",
    fake=lambda q, k, v, g, beta, A_log, dt_bias, start, cu_seqlens, *static: _forward_outputs(
        q, v, cu_seqlens, Options(*static)
    ),
    cuda=forward,
)
UPDATE = define(
    f"recurrent_delta_update({SEQUENCE}, Tensor(a!) pool, Tensor state_indices, Tensor? cu_seqlens, {STATIC})"
    " -> Tensor",
    fake=lambda q, k, v, *others: torch.empty_like(v, memory_format=torch.contiguous_format),
    cuda=update,
)
BACKWARD = define(
    f"recurrent_delta_backward({INPUTS}, Tensor do, Tensor? d_end, {STATIC}) -> ({', '.join(['Tensor'] * 7)})",
    fake=lambda q, k, v, g, beta, A_log, dt_bias, start, cu_seqlens, *others: _backward_outputs(
        q, k, v, g, A_log, start, cu_seqlens
    ),
    cuda=backward,
)


def _gradients(
    needs: tuple[bool, ...],
    arguments: tuple[Any, ...],
    outputs: tuple[Tensor | None, ...],
    grads: tuple[Tensor | None, ...],
) -> tuple[Tensor | None, ...]:
    tensors, static = arguments[:9], arguments[9:]
    _, _, v, g, beta, A_log, dt_bias, start, _ = tensors
    do = torch.zeros_like(v) if grads[0] is None else grads[0]
    d_end = grads[1] if Options(*static).keep_end else None
    found = Gradients(*BACKWARD(*tensors, do, d_end, *static))
    return (
        found.q,
        found.k,
        found.v,
        None if g is None else found.gates.to(g.dtype),
        found.beta.to(beta.dtype),
        None if A_log is None else found.rate.sum((0, 1)).to(A_log.dtype),
        None if dt_bias is None else found.gates.sum((0, 1)).to(dt_bias.dtype),
        None if start is None else found.start.to(start.dtype),
        None,
        *(None for _ in static),
    )


def _recurrent_delta_rule(*arguments: Any) -> Any:
    return FORWARD(*arguments)


# Weights and bounds have no batch; a call without any can be mapped over samples in one launch. Made here, since a
# compiler that traces a call cannot trace its making.
_RULES: dict[tuple[int, ...], Any] = {
    shared: differentiable(_recurrent_delta_rule, _gradients, save=tuple(range(9)), shared=shared)
    for shared in ((), (5,), (5, 6), (8,), (5, 8), (5, 6, 8))
}


def triton_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    state_indices: Tensor | None,
    cu_seqlens: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Read-outs and final states; an empty tensor for these unless `options.keep_end`.

    With `state_indices`, `initial_state` is a pool that is updated in place, and is returned; there is no gradient.
    """
    sequence = (q, k, v, g, beta, A_log, dt_bias)
    if state_indices is not None:
        assert initial_state is not None
        return UPDATE(*sequence, initial_state, state_indices, cu_seqlens, *options), initial_state
    shared = tuple(i for i, x in ((5, A_log), (6, dt_bias), (8, cu_seqlens)) if x is not None)
    o, end = _RULES[shared](*sequence, initial_state, cu_seqlens, *options)
    return o, end
