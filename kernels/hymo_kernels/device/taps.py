"""Rows of channels as tuples, one entry a tap or a token, for programs that walk along time.

Taps stand oldest first: tap i of W reads the token W - 1 - i before the current one.
"""

import triton
import triton.language as tl


@triton.jit
def zeros(count: tl.constexpr, BLOCK: tl.constexpr):
    rows = ()
    for _ in tl.static_range(count):
        rows = rows + (tl.zeros([BLOCK], tl.float32),)
    return rows


@triton.jit
def sums(a, b, count: tl.constexpr):
    rows = ()
    for i in tl.static_range(count):
        rows = rows + (a[i] + b[i],)
    return rows


@triton.jit
def products(window, x, W: tl.constexpr):
    rows = ()
    for i in tl.static_range(W):
        rows = rows + (window[i] * x,)
    return rows


@triton.jit
def where_both(inside, exists):
    """The mask `inside & exists` of one condition for all channels, in a form that the interpreter spreads right."""
    return inside & (exists.to(tl.int32) + tl.zeros_like(inside.to(tl.int32)) > 0)


@triton.jit
def taps_of(weight, columns, inside, stride_c, stride_w, W: tl.constexpr):
    rows = ()
    for i in tl.static_range(W):
        row = tl.load(weight + columns * stride_c + i * stride_w, mask=inside, other=0.0).to(tl.float32)
        rows = rows + (row,)
    return rows


@triton.jit
def furthest_taps(at, stride, start, T, MASKED: tl.constexpr, UNROLL: tl.constexpr):
    """The furthest live tap of each token of a block; nothing is read unless taps can be dead."""
    numbers = ()
    for i in tl.static_range(UNROLL):
        number = 0
        if MASKED:
            number = tl.load(at + tl.cast(start + i, tl.int64) * stride, mask=start + i < T, other=-1).to(tl.int32)
        numbers = numbers + (number,)
    return numbers


@triton.jit
def rows_of(x, stride, start, T, inside, furthest, PACKED: tl.constexpr, UNROLL: tl.constexpr):
    """The rows of a block of tokens, all under way before the first is used; those of no token are 0."""
    rows = ()
    for i in tl.static_range(UNROLL):
        exists = start + i < T
        if PACKED:
            exists = exists & (furthest[i] >= 0)
        rows = rows + (tl.load(x + tl.cast(start + i, tl.int64) * stride, mask=where_both(inside, exists), other=0.0),)
    return rows


@triton.jit
def window_of(past, row, furthest, W: tl.constexpr, MASKED: tl.constexpr):
    """What the taps read, 0 where they are dead."""
    rows = past
    if MASKED:
        # Few tokens are at the start of a document.
        if furthest < W - 1:
            rows = _chosen(past, zeros(W - 1, row.shape[0]), furthest, W)
    return rows + (row,)


@triton.jit
def weighted(taps, window, start, W: tl.constexpr):
    z = start
    for i in tl.static_range(W):
        z += taps[i] * window[i]
    return z


@triton.jit
def passed_on(pending, taps, dz, furthest, W: tl.constexpr, MASKED: tl.constexpr):
    """The gradients of the inputs that a token's taps read, with what it adds; `pending` has those before its own."""
    none = tl.zeros_like(dz)
    more = sums(pending + (none,), products(taps, dz, W), W)
    if MASKED:
        if furthest < W - 1:
            more = _chosen(more[: W - 1], pending, furthest, W) + (more[W - 1],)
    return more


@triton.jit
def _chosen(alive, dead, furthest, W: tl.constexpr):
    """For each tap before the current token one of two rows, by whether it reads the token's own document."""
    rows = ()
    for i in tl.static_range(W - 1):
        rows = rows + (tl.where(furthest >= W - 1 - i, alive[i], dead[i]),)
    return rows


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def before_activation(dy, z, SILU: tl.constexpr):
    if SILU:
        s = sigmoid(z)
        dy = dy * (s * (1.0 + z * (1.0 - s)))
    return dy
