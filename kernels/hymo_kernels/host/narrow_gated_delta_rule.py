"""The gated delta rule for narrow heads, keys and values of at most 32 features: small programs, many at once.

What a chunk of 64 tokens moves is little here, and a whole state fits one warp's registers. So chunks are of 16 tokens,
programs of one warp, and sequences are cut into as many segments as fill the card, each from its true start:

    prepare    every chunk's inverse; what every segment makes of a state
    carry      the state before every segment
    forward    read-outs, and the state before every chunk
    chain      what every segment adds to the gradient of the state before it
    carry      the gradient after every segment
    backward   all gradients
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
    """Warps of a program, software pipeline stages, and registers of a thread at most (None: as many as there are)."""

    warps: int
    stages: int
    registers: int | None = None


PREPARE, CARRY, FORWARD = Tiles(1, 1, 128), Tiles(1, 3), Tiles(1, 2)
CHAIN, BACKWARD = Tiles(1, 2, 128), Tiles(1, 2)
"""But for CARRY, the fastest of eight tilings on an H200 (Triton 3.6), 4 x 4096 x 40 heads of 32 features."""

RESIDENT = 16
"""Programs that a multiprocessor shall have at least."""


class Kept(NamedTuple):
    """What the forward leaves to the backward."""

    inverse: Tensor  # [B, HV, T, CHUNK]: of every chunk's triangular system, under the gates, rows times 1 / |k|
    total: Tensor  # [B, HV, T] fp32: log2 of the retention from the chunk's start
    segment: Tensor  # [B, HV, T] int32: resets in the chunk so far
    strength: Tensor  # [B, HV, T] fp32: beta as it is used
    k_unit: Tensor  # [B, HV, T] fp32: 1 / |k|, where keys are normalised
    q_unit: Tensor  # [B, HV, T] fp32: 1 / |q|, likewise
    states: Tensor  # [B, HV, slots, V, K]: before every chunk
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
    from hymo_kernels.device.narrow_forward import narrow_forward_kernel
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
    bounds = kept.segment if cu_seqlens is None else cu_seqlens
    first = kept.total if start is None else start
    first_stride = (0, 0, 0, 0) if start is None else start.stride()
    gates = beta if g is None else g
    length, segments = segments_of(shape, q.device.index)
    sizes = (shape.t, _places(shape), shape.sequences, length, segments)
    grid = (shape.b * shape.sequences * shape.hv * segments,)
    added = _per_segment(shape, kept, segments)
    narrow_prepare_kernel[grid](
        k,
        v,
        gates,
        beta,
        beta if A_log is None else A_log,
        beta if dt_bias is None else dt_bias,
        first,
        bounds,
        kept.inverse,
        kept.total,
        kept.segment,
        kept.strength,
        kept.k_unit,
        kept.product,
        added,
        *k.stride()[:3],
        *v.stride()[:3],
        *gates.stride(),
        *beta.stride(),
        *first_stride,
        *sizes,
        **_heads(shape, options),
        GATE=options.gate,
        HAS_BIAS=dt_bias is not None,
        SIGMOID=options.sigmoid,
        HAS_G=g is not None,
        BETA_MAX=options.beta_max,
        HAS_START=start is not None,
        HALF=options.norm and q.dtype != torch.float32,
        **_tiles(PREPARE),
    )
    carried = _carry(kept, added, bounds, None, shape=shape, length=length, segments=segments, back=False)
    narrow_forward_kernel[grid](
        q,
        k,
        v,
        kept.inverse,
        kept.total,
        kept.segment,
        kept.strength,
        kept.k_unit,
        first,
        carried,
        o,
        kept.q_unit,
        kept.states,
        end if options.keep_end else kept.total,
        bounds,
        options.scale,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *first_stride,
        shape.t,
        shape.slots,
        *sizes[1:],
        **_heads(shape, options),
        HAS_START=start is not None,
        KEEP_END=options.keep_end,
        **_tiles(FORWARD),
    )
    return o, end, *kept


def _per_segment(shape: Shape, kept: Kept, segments: int) -> Tensor:
    """Room for a state a segment; none is needed if there is but one."""
    places = _places(shape) if segments > 1 else 0
    return kept.total.new_empty(shape.b, shape.hv, places, shape.v, shape.k)


def _heads(shape: Shape, options: Options) -> dict[str, Any]:
    return {"H": shape.h, "NORM": options.norm, "PRECISION": "tf32", **_states(shape)}


def _states(shape: Shape) -> dict[str, Any]:
    blocks = {"BLOCK_K": 16 if shape.k <= 16 else 32, "BLOCK_V": 16 if shape.v <= 16 else 32}
    return {"HV": shape.hv, "K": shape.k, "V": shape.v, "C": CHUNK, "PACKED": shape.packed, **blocks}


def _tiles(tiles: Tiles) -> dict[str, int]:
    sizes = {"STAGES": tiles.stages, "num_warps": tiles.warps, "num_stages": tiles.stages}
    return sizes if tiles.registers is None else sizes | {"maxnreg": tiles.registers}


def _carry(
    kept: Kept,
    added: Tensor,
    bounds: Tensor,
    final: Tensor | None,
    *,
    shape: Shape,
    length: int,
    segments: int,
    back: bool,
) -> Tensor:
    """What comes to every segment but the first from those before it; fills `final` with what leaves the last."""
    from hymo_kernels.device.narrow_carry import narrow_carry_kernel

    carried = torch.empty_like(added)
    if segments > 1 or final is not None:
        sizes = _states(shape) | {"BLOCK_V": 16}
        narrow_carry_kernel[(shape.b * shape.sequences * shape.hv * -(-shape.v // 16),)](
            kept.product,
            added,
            carried,
            added if final is None else final,
            bounds,
            shape.t,
            _places(shape),
            shape.sequences,
            length,
            **sizes,
            BACK=back,
            KEEP_FINAL=final is not None,
            **_tiles(CARRY),
        )
    return carried


def forward_outputs(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, options: Options) -> tuple[Tensor, ...]:
    """What `forward` returns, empty."""
    shape = shape_of(q, v, cu_seqlens, CHUNK)
    b, t, _, hv = shape[:4]

    def new(*size: int | torch.SymInt, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=q.device)

    return (
        new(b, t, hv, shape.v, dtype=v.dtype),
        new(b * shape.sequences, hv, shape.k, shape.v) if options.keep_end else new(b, 0),
        new(b, hv, t, CHUNK, dtype=q.dtype),
        new(b, hv, t),
        new(b, hv, t, dtype=torch.int32),
        new(b, hv, t),
        new(b, hv, t if options.norm else 0),
        new(b, hv, t if options.norm else 0),
        new(b, hv, shape.slots, shape.v, shape.k, dtype=q.dtype),
        new(b, hv, _places(shape), shape.k, shape.k),
    )


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    cu_seqlens: Tensor | None,
    inverse: Tensor,
    total: Tensor,
    segment: Tensor,
    strength: Tensor,
    k_unit: Tensor,
    q_unit: Tensor,
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
    kept = Kept(inverse, total, segment, strength, k_unit, q_unit, states, product)
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
    bounds = kept.segment if cu_seqlens is None else cu_seqlens
    last = kept.total if d_end is None else d_end
    last_stride = (0, 0, 0, 0) if d_end is None else d_end.stride()
    length, segments = segments_of(shape, q.device.index)
    sizes = (_places(shape), shape.sequences, length, segments)
    grid = (shape.b * shape.sequences * shape.hv * segments,)
    alone = only_start and start is not None
    added = _per_segment(shape, kept, max(segments, 2) if alone else segments)
    if segments > 1 or alone:
        narrow_chain_kernel[grid](
            q,
            k,
            do,
            kept.inverse,
            kept.total,
            kept.segment,
            kept.strength,
            kept.k_unit,
            kept.q_unit,
            last,
            added,
            bounds,
            options.scale,
            *q.stride()[:3],
            *k.stride()[:3],
            *do.stride()[:3],
            *last_stride,
            shape.t,
            *sizes,
            **_heads(shape, options),
            HAS_END=d_end is not None,
            ALL=alone,
            **_tiles(CHAIN),
        )
    final = grads.start if alone else None
    carried = _carry(kept, added, bounds, final, shape=shape, length=length, segments=segments, back=True)
    if only_start:
        return tuple(grads)
    with over_groups(grads, shape) as (dq, dk):
        narrow_backward_kernel[grid](
            q,
            k,
            v,
            do,
            kept.inverse,
            kept.total,
            kept.segment,
            kept.strength,
            kept.k_unit,
            kept.q_unit,
            kept.states,
            last,
            carried,
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
            shape.t,
            shape.slots,
            *sizes,
            **_heads(shape, options),
            HAS_END=d_end is not None,
            KEEP_START=start is not None,
            **_tiles(BACKWARD),
        )
    return tuple(grads)
