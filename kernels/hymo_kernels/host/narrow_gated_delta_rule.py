"""The gated delta rule for narrow heads, keys and values of at most 32 features: small programs, many at once.

What a chunk of 64 tokens moves is little here, and a whole state fits one warp's registers. So chunks are of 16 tokens,
programs of one warp, and sequences are cut into as many segments as fill the card, each from its true start:

    prepare    every chunk's inverse; what every segment makes of a state
    carry      the state before every segment
    forward    read-outs; the state before every chunk, if it is kept
    chain      what every segment adds to the gradient of the state before it
    carry      the gradient after every segment
    forward    the state before every chunk, if it was not kept
    backward   all gradients

Two things decide how fast a program of one warp is here. Its registers: at 128 of a thread four programs share a
scheduler. And whether loads are fetched ahead: Triton 3.6 does so for a tile that is a right operand, transposed or
not, but not for one whose transpose is a left operand; and the transpose of a result is a right operand as it lies in
registers if it is rounded after being transposed, through shared memory if before.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hymo_kernels.host.gated_delta_call import (
    Gradients,
    Options,
    Shape,
    aligned,
    backward_outputs,
    multiprocessors,
    over_groups,
    shape_of,
)

CHUNK = 16
"""Tokens a chunk: what a program holds of one fits the registers of a warp, and the inverse is three doublings."""

WIDEST = 32
"""Features of the widest key or value."""

SHORTEST = 16
"""Chunks of the shortest segment."""

MOST = 64
"""Segments of a sequence: they are carried one by one."""


class Tiles(NamedTuple):
    """Warps of a program, software pipeline stages, registers of a thread at most (None: as many as there are), and
    value features of a program, where they are cut."""

    warps: int
    stages: int
    registers: int | None = None
    values: int = 32


PREPARE, CARRY = Tiles(1, 2), Tiles(1, 3, None, 16)
FORWARD, STATES = Tiles(1, 3, 128), Tiles(1, 3, 128)
CHAIN, BACKWARD = Tiles(1, 2, 96), Tiles(1, 2)
"""But for CARRY, the fastest of eight tilings on an H200 (Triton 3.6), 4 x 4096 x 40 heads of 32 features."""

RESIDENT = 16
"""Programs that a multiprocessor shall have at least."""


class Kept(NamedTuple):
    """What the forward leaves to the backward."""

    inverse: Tensor  # [B, HV, slots, CHUNK, CHUNK]: of every chunk's system, under the gates, rows times 1 / |k|
    numbers: Tensor  # [B, HV, slots, 7, CHUNK] fp32: what `narrow_prepare.NUMBERS` says of every chunk's tokens
    carried: Tensor  # [B, HV, places, V, K] fp32: the state before every segment but the first
    states: Tensor  # [B, HV, slots, V, K]: before every chunk, where states are kept
    product: Tensor  # [B, HV, places, K, K] fp32: what every segment multiplies a state by


def serves(q: Tensor, v: Tensor) -> bool:
    """Whether the heads are narrow, of 16-bit numbers."""
    # A plain bool: kernels are looked up by it, also where a tracer's widths are symbols.
    return bool(q.element_size() == 2 and max(q.shape[-1], v.shape[-1]) <= WIDEST)


def segments_of(shape: Shape, device: int | None) -> tuple[int, int]:
    """Chunks per segment, and segments of the longest sequence that there may be."""
    chunks = -(-shape.t // CHUNK)
    wanted = min(MOST, RESIDENT * multiprocessors(device) // (shape.b * shape.sequences * shape.hv))
    length = max(SHORTEST, -(-chunks // max(1, wanted)))
    return length, -(-chunks // length)


def _places(shape: Shape) -> Any:
    """Segments kept per batch row and head; `place_in_row` of the kernels gives each its own."""
    return shape.slots // SHORTEST + shape.sequences + 1


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
    from hymo_kernels.device.narrow_prepare import narrow_prepare_kernel

    options = Options(*static)
    q, k, v = aligned(q, CHUNK), aligned(k, CHUNK), aligned(v, CHUNK)
    shape = shape_of(q, v, cu_seqlens, CHUNK)
    o, end, *rest = forward_outputs(q, k, v, cu_seqlens, options)
    kept = Kept(*rest)
    if shape.t == 0 or shape.packed:
        o.zero_()
    if shape.t == 0:
        if options.keep_end:
            end.copy_(start) if start is not None else end.zero_()
        return o, end, *kept
    bounds = kept.numbers if cu_seqlens is None else cu_seqlens
    first = kept.numbers if start is None else start
    gates = beta if g is None else g
    length, segments = segments_of(shape, q.device.index)
    added = _per_segment(shape, kept, segments)
    narrow_prepare_kernel[(shape.b * shape.sequences * shape.hv * segments,)](
        k,
        v,
        gates,
        beta,
        beta if A_log is None else A_log,
        beta if dt_bias is None else dt_bias,
        first,
        bounds,
        kept.inverse,
        kept.numbers,
        kept.product,
        added,
        *k.stride()[:3],
        *v.stride()[:3],
        *gates.stride(),
        *beta.stride(),
        *((0, 0, 0, 0) if start is None else start.stride()),
        shape.t,
        shape.slots,
        _places(shape),
        shape.sequences,
        length,
        segments,
        **_heads(shape, options, PREPARE),
        GATE=options.gate,
        HAS_BIAS=dt_bias is not None,
        SIGMOID=options.sigmoid,
        HAS_G=g is not None,
        BETA_MAX=options.beta_max,
        HAS_START=start is not None,
        HALF=options.norm and q.dtype != torch.float32,
        **_tiles(PREPARE),
    )
    _carry(kept, added, kept.carried, bounds, None, shape=shape, length=length, segments=segments, back=False)
    states = kept.states if options.keep_states else None
    _scan(q, k, v, kept, start, bounds, o=o, end=end, states=states, shape=shape, options=options)
    return o, end, *kept


def _scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kept: Kept,
    start: Tensor | None,
    bounds: Tensor,
    *,
    o: Tensor | None,
    end: Tensor | None,
    states: Tensor | None,
    shape: Shape,
    options: Options,
) -> None:
    """Carries the state through all chunks, writing what is given of o, end and states."""
    from hymo_kernels.device.narrow_forward import narrow_forward_kernel

    length, segments = segments_of(shape, q.device.index)
    tiles = FORWARD if o is not None else STATES
    values = -(-shape.v // tiles.values)
    narrow_forward_kernel[(shape.b * shape.sequences * shape.hv * segments * values,)](
        q,
        k,
        v,
        kept.inverse,
        kept.numbers,
        kept.numbers if start is None else start,
        kept.carried,
        v if o is None else o,
        kept.inverse if states is None else states,
        kept.numbers if end is None else end,
        bounds,
        options.scale,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *((0, 0, 0, 0) if start is None else start.stride()),
        shape.t,
        shape.slots,
        _places(shape),
        shape.sequences,
        length,
        segments,
        **_heads(shape, options, tiles),
        HAS_START=start is not None,
        READ_OUT=o is not None,
        KEEP_STATES=states is not None,
        KEEP_END=end is not None and options.keep_end,
        **_tiles(tiles),
    )


def _per_segment(shape: Shape, kept: Kept, segments: int) -> Tensor:
    """Room for a state a segment; none is needed if there is but one."""
    places = _places(shape) if segments > 1 else 0
    return kept.numbers.new_empty(shape.b, shape.hv, places, shape.v, shape.k)


def _heads(shape: Shape, options: Options, tiles: Tiles) -> dict[str, Any]:
    return {"H": shape.h, "NORM": options.norm, "PRECISION": "tf32", **_states(shape, tiles)}


def _states(shape: Shape, tiles: Tiles) -> dict[str, Any]:
    blocks = {"BLOCK_K": 16 if shape.k <= 16 else 32, "BLOCK_V": min(tiles.values, 16 if shape.v <= 16 else 32)}
    return {"HV": shape.hv, "K": shape.k, "V": shape.v, "C": CHUNK, "PACKED": shape.packed, **blocks}


def _tiles(tiles: Tiles) -> dict[str, int]:
    sizes = {"STAGES": tiles.stages, "num_warps": tiles.warps, "num_stages": tiles.stages}
    return sizes if tiles.registers is None else sizes | {"maxnreg": tiles.registers}


def _carry(
    kept: Kept,
    added: Tensor,
    carried: Tensor,
    bounds: Tensor,
    final: Tensor | None,
    *,
    shape: Shape,
    length: int,
    segments: int,
    back: bool,
) -> None:
    """Fills `carried`, what comes to every segment but the first, and, if given, `final`, what leaves the last."""
    from hymo_kernels.device.narrow_carry import narrow_carry_kernel

    if segments > 1 or final is not None:
        narrow_carry_kernel[(shape.b * shape.sequences * shape.hv * -(-shape.v // CARRY.values),)](
            kept.product,
            added,
            carried,
            added if final is None else final,
            bounds,
            shape.t,
            _places(shape),
            shape.sequences,
            length,
            **_states(shape, CARRY),
            BACK=back,
            KEEP_FINAL=final is not None,
            **_tiles(CARRY),
        )


def forward_outputs(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, options: Options) -> tuple[Tensor, ...]:
    """What `forward` returns, empty."""
    shape = shape_of(q, v, cu_seqlens, CHUNK)
    b, t, _, hv = shape[:4]

    def new(*size: int | torch.SymInt, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=q.device)

    return (
        new(b, t, hv, shape.v, dtype=v.dtype),
        new(b * shape.sequences, hv, shape.k, shape.v) if options.keep_end else new(b, 0),
        new(b, hv, shape.slots, CHUNK, CHUNK, dtype=q.dtype),
        new(b, hv, shape.slots, 7, CHUNK),
        new(b, hv, _places(shape), shape.v, shape.k),
        new(b, hv, shape.slots if options.keep_states else 0, shape.v, shape.k, dtype=q.dtype),
        new(b, hv, _places(shape), shape.k, shape.k),
    )


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    cu_seqlens: Tensor | None,
    inverse: Tensor,
    numbers: Tensor,
    carried: Tensor,
    states: Tensor,
    product: Tensor,
    do: Tensor,
    d_end: Tensor | None,
    only_start: bool,
    *static: Any,
) -> tuple[Tensor, ...]:
    """The gradients of `forward`; with `only_start` that of the initial state alone is computed."""
    from hymo_kernels.device.narrow_backward import narrow_backward_kernel, narrow_chain_kernel

    options = Options(*static)
    kept = Kept(inverse, numbers, carried, states, product)
    q, k, v, do = aligned(q, CHUNK), aligned(k, CHUNK), aligned(v, CHUNK), aligned(do, CHUNK)
    shape = shape_of(q, v, cu_seqlens, CHUNK)
    grads = Gradients(*backward_outputs(q, k, v, start, cu_seqlens))
    if shape.t == 0:
        if start is not None:
            grads.start.copy_(d_end) if d_end is not None else grads.start.zero_()
        return tuple(grads)
    if shape.packed:
        for grad in grads[:5]:
            grad.zero_()
    bounds = kept.numbers if cu_seqlens is None else cu_seqlens
    last = kept.numbers if d_end is None else d_end
    last_stride = (0, 0, 0, 0) if d_end is None else d_end.stride()
    length, segments = segments_of(shape, q.device.index)
    sizes = (shape.t, shape.slots, _places(shape), shape.sequences, length, segments)
    grid = (shape.b * shape.sequences * shape.hv * segments,)
    alone = only_start and start is not None
    added = _per_segment(shape, kept, max(segments, 2) if alone else segments)
    if segments > 1 or alone:
        narrow_chain_kernel[grid](
            q,
            k,
            do,
            kept.inverse,
            kept.numbers,
            last,
            added,
            bounds,
            options.scale,
            *q.stride()[:3],
            *k.stride()[:3],
            *do.stride()[:3],
            *last_stride,
            *sizes,
            **_heads(shape, options, CHAIN),
            HAS_END=d_end is not None,
            ALL=alone,
            **_tiles(CHAIN),
        )
    final = grads.start if alone else None
    after = torch.empty_like(added)
    _carry(kept, added, after, bounds, final, shape=shape, length=length, segments=segments, back=True)
    if only_start:
        return tuple(grads)
    states = kept.states
    if not options.keep_states:
        states = q.new_empty(shape.b, shape.hv, shape.slots, shape.v, shape.k)
        _scan(q, k, v, kept, start, bounds, o=None, end=None, states=states, shape=shape, options=options)
    with over_groups(grads, shape) as (dq, dk):
        narrow_backward_kernel[grid](
            q,
            k,
            v,
            do,
            kept.inverse,
            kept.numbers,
            states,
            last,
            after,
            dq,
            dk,
            *grads[2:],
            bounds,
            options.scale,
            *q.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            *do.stride()[:3],
            *last_stride,
            *sizes,
            **_heads(shape, options, BACKWARD),
            HAS_END=d_end is not None,
            KEEP_START=start is not None,
            **_tiles(BACKWARD),
        )
    return tuple(grads)
