"""The gated linear recurrence on NVIDIA GPUs: what is launched, on how many programs, and with which tiles."""

import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hymo_kernels.primitive import define, differentiable


class Tiles(NamedTuple):
    """How one kernel is cut: channels and value features at a time, warps, software pipeline stages."""

    block_s: int
    block_v: int
    warps: int
    stages: int


class Plan(NamedTuple):
    """Tokens a chunk, and the tiles of every kernel."""

    chunk: int
    carry: Tiles
    pairs: Tiles
    read: Tiles
    pairs_backward: Tiles


PLANS: dict[torch.dtype, Plan] = {
    torch.bfloat16: Plan(64, Tiles(64, 32, 4, 2), Tiles(32, 0, 4, 1), Tiles(64, 64, 4, 2), Tiles(32, 64, 8, 1)),
    torch.float16: Plan(64, Tiles(64, 32, 4, 2), Tiles(32, 0, 4, 1), Tiles(32, 64, 4, 2), Tiles(32, 32, 8, 1)),
    torch.float32: Plan(32, Tiles(32, 32, 4, 2), Tiles(32, 0, 4, 1), Tiles(32, 32, 4, 2), Tiles(32, 32, 8, 1)),
}
"""By the dtype of v, b and c. A tile is never wider than the width it cuts, rounded up to a power of two."""

WIDEST = 256

# Looked up once: a compiler cannot trace it.
HAS_TRITON = importlib.util.find_spec("triton") is not None


class Shape(NamedTuple):
    """Sizes of one call, and how its sequences are cut."""

    b: int
    t: int
    h: int
    s: int
    v: int
    sequences: int  # of one batch row
    slots: int  # chunks kept per batch row and head
    packed: bool


class Gradients(NamedTuple):
    """Of one call; `rate` is each chunk's part of that of A_log."""

    v: Tensor
    b: Tensor
    c: Tensor
    g: Tensor
    rate: Tensor
    start: Tensor


def unavailable(v: Tensor, b: Tensor, c: Tensor) -> str | None:
    """Why there is no kernel for these tensors; None if there is one."""
    if v.device.type != "cuda":
        return f"it needs tensors on an NVIDIA GPU, these are on {v.device.type}"
    if not HAS_TRITON:
        return "Triton is not installed"
    if v.dtype not in PLANS or b.dtype != v.dtype or c.dtype != v.dtype:
        return f"v, b and c must be all bfloat16, all float16 or all float32, got {v.dtype}, {b.dtype} and {c.dtype}"
    widths = (b.shape[-1], v.shape[-1])
    if any(width % 2 or not 0 < width <= WIDEST for width in widths):
        return f"state and value widths are even and at most {WIDEST}, got {widths[0]} and {widths[1]}"
    return None


def shape_of(v: Tensor, b: Tensor, cu_seqlens: Tensor | None) -> Shape:
    """The shape of a call."""
    rows, t, h, width = v.shape
    chunk = PLANS[v.dtype].chunk
    sequences = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    slots = -(-t // chunk) if cu_seqlens is None else t // chunk + sequences + 1
    return Shape(rows, t, h, b.shape[3], width, sequences, slots, cu_seqlens is not None)


def _wide(v: Tensor) -> torch.dtype:
    """What states, and whatever else has no bound, are kept in between kernels: fp16 would overflow."""
    return torch.bfloat16 if v.dtype == torch.bfloat16 else torch.float32


def _aligned(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _block(width: int, most: int) -> int:
    return min(most, max(16, 1 << (width - 1).bit_length()))


def _cut(shape: Shape, tiles: Tiles, v: Tensor) -> dict[str, Any]:
    return {
        "H": shape.h,
        "S": shape.s,
        "C": PLANS[v.dtype].chunk,
        "BLOCK_S": _block(shape.s, tiles.block_s),
        "PACKED": shape.packed,
        "PRECISION": "tf32x3" if v.dtype == torch.float32 else "tf32",
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }


def _columns(shape: Shape, tiles: Tiles) -> dict[str, int]:
    return {"V": shape.v, "BLOCK_V": _block(shape.v, tiles.block_v)}


def _v_tiles(shape: Shape, tiles: Tiles) -> int:
    return -(-shape.v // _block(shape.v, tiles.block_v))


def _carry(
    x: Tensor,
    y: Tensor,
    g: Tensor,
    A_log: Tensor,
    start: Tensor | None,
    bounds: Tensor,
    *,
    end: Tensor | None,
    shape: Shape,
    back: bool,
) -> Tensor:
    """What enters each chunk: the state, or on the way back the gradient of that after it; the last goes to `end`."""
    from hymo_kernels.device.linear import carry_kernel

    tiles = PLANS[x.dtype].carry
    states = torch.empty(shape.b, shape.h, shape.slots, shape.s, shape.v, dtype=_wide(x), device=x.device)
    s_tiles = -(-shape.s // _block(shape.s, tiles.block_s))
    carry_kernel[(_v_tiles(shape, tiles) * s_tiles * shape.h * shape.b * shape.sequences,)](
        x,
        y,
        g,
        A_log,
        A_log if start is None else start,
        states,
        A_log if end is None else end,
        bounds,
        *x.stride()[:3],
        *y.stride()[:3],
        *g.stride(),
        *((0, 0, 0, 0) if start is None else start.stride()),
        shape.t,
        shape.slots,
        shape.sequences,
        **_cut(shape, tiles, x),
        **_columns(shape, tiles),
        BACK=back,
        HAS_START=start is not None,
        KEEP_END=end is not None,
        STAGES=tiles.stages,
    )
    return states


def _read(
    x: Tensor,
    y: Tensor,
    g: Tensor,
    A_log: Tensor,
    pairs: Tensor,
    states: Tensor,
    bounds: Tensor,
    *,
    out: Tensor,
    shape: Shape,
    back: bool,
) -> None:
    from hymo_kernels.device.linear import read_kernel

    tiles = PLANS[x.dtype].read
    read_kernel[(_v_tiles(shape, tiles) * shape.h * shape.slots * shape.b,)](
        x,
        y,
        g,
        A_log,
        pairs,
        states,
        out,
        bounds,
        *x.stride()[:3],
        *y.stride()[:3],
        *g.stride(),
        *out.stride()[:3],
        shape.t,
        shape.slots,
        shape.sequences,
        **_cut(shape, tiles, x),
        **_columns(shape, tiles),
        BACK=back,
    )


def _levels(v: Tensor) -> int:
    """How many bits the place of a token in its chunk has."""
    return PLANS[v.dtype].chunk.bit_length() - 1


def forward(
    v: Tensor,
    b: Tensor,
    c: Tensor,
    g: Tensor,
    A_log: Tensor,
    start: Tensor | None,
    cu_seqlens: Tensor | None,
    keep_end: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Read-outs, final states (an empty tensor unless kept), and the products of pairs for the backward."""
    from hymo_kernels.device.linear import pairs_kernel

    v, b, c, A_log = _aligned(v), _aligned(b), _aligned(c), A_log.contiguous()
    shape = shape_of(v, b, cu_seqlens)
    o, end, pairs = _forward_outputs(v, b, cu_seqlens, keep_end)
    if shape.t == 0:
        if keep_end:
            end.copy_(start) if start is not None else end.zero_()
        return o, end, pairs
    if shape.packed:
        o.zero_()
    bounds = g if cu_seqlens is None else cu_seqlens
    states = _carry(b, v, g, A_log, start, bounds, end=end if keep_end else None, shape=shape, back=False)
    tiles = PLANS[v.dtype].pairs
    pairs_kernel[(shape.b * shape.slots * shape.h,)](
        b,
        c,
        g,
        A_log,
        pairs,
        bounds,
        *b.stride()[:3],
        *c.stride()[:3],
        *g.stride(),
        shape.t,
        shape.slots,
        shape.sequences,
        **_cut(shape, tiles, v),
        LEVELS=_levels(v),
    )
    _read(c, v, g, A_log, pairs, states, bounds, out=o, shape=shape, back=False)
    return o, end, pairs


def backward(
    v: Tensor,
    b: Tensor,
    c: Tensor,
    g: Tensor,
    A_log: Tensor,
    start: Tensor | None,
    cu_seqlens: Tensor | None,
    pairs: Tensor,
    do: Tensor,
    d_end: Tensor | None,
    needs_v: bool,
    needs_pairs: bool,
) -> tuple[Tensor, ...]:
    """The gradients of `forward`; that of v, and those of b, c, g and A_log together, only where asked for."""
    from hymo_kernels.device.linear import pairs_backward_kernel

    v, b, c, do, A_log = _aligned(v), _aligned(b), _aligned(c), _aligned(do), A_log.contiguous()
    shape = shape_of(v, b, cu_seqlens)
    grads = Gradients(*_backward_outputs(v, b, start, cu_seqlens, needs_v, needs_pairs))
    if shape.packed or shape.t == 0:
        for grad in grads[:5]:
            grad.zero_()
    if shape.t == 0:
        if start is not None:
            grads.start.copy_(d_end) if d_end is not None else grads.start.zero_()
        return tuple(grads)
    bounds = g if cu_seqlens is None else cu_seqlens
    end = None if start is None else grads.start
    d_states = _carry(c, do, g, A_log, d_end, bounds, end=end, shape=shape, back=True)
    if needs_v:
        _read(b, do, g, A_log, pairs, d_states, bounds, out=grads.v, shape=shape, back=True)
    if needs_pairs:
        states = _carry(b, v, g, A_log, start, bounds, end=None, shape=shape, back=False)
        tiles = PLANS[v.dtype].pairs_backward
        pairs_backward_kernel[(shape.b * shape.slots * shape.h,)](
            v,
            b,
            c,
            g,
            A_log,
            do,
            states,
            d_states,
            *grads[1:5],
            bounds,
            *v.stride()[:3],
            *b.stride()[:3],
            *c.stride()[:3],
            *g.stride(),
            *do.stride()[:3],
            shape.t,
            shape.slots,
            shape.sequences,
            **_cut(shape, tiles, v),
            **_columns(shape, tiles),
            LEVELS=_levels(v),
        )
    return tuple(grads)


def _forward_outputs(v: Tensor, b: Tensor, cu_seqlens: Tensor | None, keep_end: bool) -> tuple[Tensor, Tensor, Tensor]:
    shape = shape_of(v, b, cu_seqlens)
    ends = (shape.b * shape.sequences, shape.h, shape.s, shape.v) if keep_end else (shape.b, 0)
    return (
        torch.empty(v.shape, dtype=v.dtype, device=v.device),
        torch.empty(ends, dtype=torch.float32, device=v.device),
        torch.empty(shape.b, shape.h, shape.t, PLANS[v.dtype].chunk, dtype=_wide(v), device=v.device),
    )


def _backward_outputs(
    v: Tensor, b: Tensor, start: Tensor | None, cu_seqlens: Tensor | None, needs_v: bool, needs_pairs: bool
) -> tuple[Tensor, ...]:
    shape = shape_of(v, b, cu_seqlens)
    rows = (shape.b, shape.t, shape.h)

    def new(wanted: bool, *size: int | torch.SymInt, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size if wanted else (shape.b, 0), dtype=dtype, device=v.device)

    return (
        new(needs_v, *rows, shape.v, dtype=v.dtype),
        new(needs_pairs, *rows, shape.s, dtype=v.dtype),
        new(needs_pairs, *rows, shape.s, dtype=v.dtype),
        new(needs_pairs, *rows),
        new(needs_pairs, shape.b, shape.h, shape.slots, shape.s),
        new(True, *start.shape) if start is not None else new(False),
    )


INPUTS = "Tensor v, Tensor b, Tensor c, Tensor g, Tensor A_log, Tensor? start, Tensor? cu_seqlens"
FORWARD = define(
    f"gated_linear_forward({INPUTS}, bool keep_end) -> (Tensor, Tensor, Tensor)",
    fake=lambda v, b, c, g, A_log, start, cu_seqlens, keep_end: _forward_outputs(v, b, cu_seqlens, keep_end),
    cuda=forward,
)
BACKWARD = define(
    f"gated_linear_backward({INPUTS}, Tensor pairs, Tensor do, Tensor? d_end, bool needs_v, bool needs_pairs)"
    f" -> ({', '.join(['Tensor'] * 6)})",
    fake=lambda v, b, c, g, A_log, start, cu_seqlens, pairs, do, d_end, needs_v, needs_pairs: _backward_outputs(
        v, b, start, cu_seqlens, needs_v, needs_pairs
    ),
    cuda=backward,
)


def _gradients(
    needs: tuple[bool, ...],
    arguments: tuple[Any, ...],
    outputs: tuple[Tensor | None, ...],
    grads: tuple[Tensor | None, ...],
) -> tuple[Tensor | None, ...]:
    v, _, _, g, A_log, start, _ = tensors = arguments[:7]
    do = torch.zeros_like(v) if grads[0] is None else grads[0]
    needs_pairs = any(needs[1:5])
    found = Gradients(*BACKWARD(*tensors, outputs[2], do, grads[1], needs[0], needs_pairs))
    return (
        found.v,
        found.b,
        found.c,
        found.g.to(g.dtype),
        found.rate.sum((0, 2)).to(A_log.dtype) if needs_pairs else None,
        None if start is None else found.start.to(start.dtype),
        None,
        None,
    )


def gated_linear(*arguments: Any) -> Any:
    return FORWARD(*arguments)


# Made here and not at a call: Dynamo does not trace the definition of a class.
RULE, PACKED_RULE = (
    differentiable(gated_linear, _gradients, save=(*range(7), 10), shared=shared, residuals=1)
    for shared in ((4,), (4, 6))
)


def triton_gated_linear_scan(
    v: Tensor,
    b: Tensor,
    c: Tensor,
    g: Tensor,
    A_log: Tensor,
    *,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    keep_end: bool,
) -> tuple[Tensor, Tensor]:
    """Read-outs and final states; an empty tensor for these unless `keep_end`."""
    rule = RULE if cu_seqlens is None else PACKED_RULE
    o, end = rule(v, b, c, g, A_log, initial_state, cu_seqlens, keep_end)
    return o, end
