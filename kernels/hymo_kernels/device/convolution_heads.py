"""The causal convolution of queries, keys and values: SiLU, rotation and the cut into heads on the way.

A program, one warp, walks along time with the last inputs of its columns in registers. Its columns are either pairs of
features that are rotated, or features that pass; they are of queries, of keys or of values alone. Features are tuples
of rows: both of a pair's (HALF apart), or the one that passes. What a block of tokens reads is loaded while the block
before it is worked on; blocks in the midst of a walk, a document and the sequence need no masks.
"""

import triton
import triton.language as tl

from hymo_kernels.device.taps import (
    passed_on,
    products,
    sums,
    taps_of,
    weighted,
    where_both,
    window_of,
    zeros,
)

# Tokens that are searched at once for the start of a document.
SPAN = tl.constexpr(128)
LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["stride_ab", "stride_at", "T", "length", "chunks"])
def conv_heads_forward_kernel(
    x,  # [B, T, C]: all heads' queries, then keys, then values
    weight,  # [C, W]
    at,  # [B, T], the furthest tap that reads the token's own document
    cos,  # [B, T, HALF] fp32
    sin,
    q,  # [B, T, HEADS, DIM]
    k,
    v,  # [B, T, VALUE_HEADS, VALUE_DIM]
    stride_xb,
    stride_xt,
    stride_wc,
    stride_ww,
    stride_ab,
    stride_at,
    T,
    length,
    chunks,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    W: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    MASKED: tl.constexpr,
):
    part, batch, begin, end = _walk(length, chunks, T, HEADS, DIM, HALF, VALUE_HEADS, VALUE_DIM, PAIRS, BLOCK)
    inputs = (x + batch * stride_xb, at + batch * stride_ab, cos + batch * T * HALF, sin + batch * T * HALF)
    steps = (tl.cast(stride_xt, tl.int64), tl.cast(stride_at, tl.int64))
    keys: tl.constexpr = HEADS * DIM
    values: tl.constexpr = VALUE_HEADS * VALUE_DIM
    outputs = (q + batch * T * keys, k + batch * T * keys, v + batch * T * values)
    turned: tl.constexpr = 2 * ((HEADS * HALF + PAIRS - 1) // PAIRS)
    if turned > 0:
        if part < turned:
            place = _pairs(part, HEADS, HALF, PAIRS)
            _forward(
                inputs, steps, weight, stride_wc, stride_ww, outputs, place, begin, end, T,
                HEADS, DIM, HALF, VALUE_HEADS, VALUE_DIM, W, UNROLL, MASKED, True,
            )  # fmt: skip
            return
    place = _passing(part - turned, HEADS, DIM, HALF, VALUE_HEADS, VALUE_DIM, BLOCK)
    _forward(
        inputs, steps, weight, stride_wc, stride_ww, outputs, place, begin, end, T,
        HEADS, DIM, HALF, VALUE_HEADS, VALUE_DIM, W, UNROLL, MASKED, False,
    )  # fmt: skip


@triton.jit
def _forward(
    inputs,
    steps,
    weight,
    stride_wc,
    stride_ww,
    outputs,
    place,
    begin,
    end,
    T,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    W: tl.constexpr,
    UNROLL: tl.constexpr,
    MASKED: tl.constexpr,
    TURNED: tl.constexpr,
):
    head, i, inside, kind = place
    y = outputs[0]
    dim = DIM
    width = HEADS * DIM
    if kind == 1:
        y = outputs[1]
    if kind == 2:
        y = outputs[2]
        dim = VALUE_DIM
        width = VALUE_HEADS * VALUE_DIM
    column = kind * HEADS * DIM + head * dim + i
    y += tl.cast(begin, tl.int64) * width + head * dim + i
    taps = _taps(weight, column, inside, stride_wc, stride_ww, HALF, W, TURNED)
    x = inputs[0] + column + begin * steps[0]
    past = _past(x, steps[0], begin, inside, HALF, W, TURNED)
    angle = tl.cast(begin, tl.int64) * HALF + i
    places = (x, x, inputs[2] + angle, inputs[3] + angle)
    at, stride_at = inputs[1], steps[1]
    steps = (steps[0], steps[0])
    tokens, places = _tokens(places, steps, inside, begin, T, HALF, UNROLL, TURNED, False)
    quick = _quick(at, stride_at, begin, begin, end, T, W, UNROLL, MASKED)
    for start in tl.range(begin, end, UNROLL):
        if start <= quick:
            ahead = ()
            for n in tl.static_range(UNROLL):
                filtered, past = _filtered(tokens[n], taps, past, 0, W, False, TURNED)
                for f in tl.static_range(1 + TURNED):
                    tl.store(y + n * width + f * HALF, filtered[f].to(y.dtype.element_ty), mask=inside)
                token, places = _token(places, steps, inside, True, HALF, TURNED, False)
                ahead = ahead + (token,)
            tokens = ahead
        else:
            again = _back(places, steps, HALF, UNROLL)
            tokens, places = _tokens(places, steps, inside, start + UNROLL, T, HALF, UNROLL, TURNED, False)
            for t in tl.range(start, tl.minimum(start + UNROLL, end)):
                token, again = _token(again, steps, inside, t < T, HALF, TURNED, False)
                furthest = _furthest(at, stride_at, t, T, MASKED)
                filtered, past = _filtered(token, taps, past, furthest, W, MASKED, TURNED)
                for f in tl.static_range(1 + TURNED):
                    place_of = y + (t - start) * width + f * HALF
                    tl.store(place_of, filtered[f].to(y.dtype.element_ty), mask=inside)
            quick = _quick(at, stride_at, start + UNROLL, begin, end, T, W, UNROLL, MASKED)
        y += UNROLL * width


@triton.jit
def _filtered(token, taps, past, furthest, W: tl.constexpr, MASKED: tl.constexpr, TURNED: tl.constexpr):
    """One token's outputs, and the past of the next token."""
    rows, _, angles = token
    outputs = ()
    later_past = ()
    for f in tl.static_range(1 + TURNED):
        row = rows[f].to(tl.float32)
        z = weighted(taps[f], window_of(past[f], row, furthest, W, MASKED), tl.zeros_like(row), W)
        outputs = outputs + (z * -LN_2 * _sigmoid(z),)
        later_past = later_past + (past[f][1:] + (row,),)
    if TURNED:
        cos, sin = angles
        outputs = (outputs[0] * cos - outputs[1] * sin, outputs[1] * cos + outputs[0] * sin)
    return outputs, later_past


@triton.jit(do_not_specialize=["stride_ab", "stride_at", "T", "length", "chunks"])
def conv_heads_backward_kernel(
    x,
    weight,
    at,
    cos,
    sin,
    dq,
    dk,
    dv,
    dx,  # [B, T, C]
    d_weight,  # [B * chunks, W, C] fp32, parts of the sum over tokens
    stride_xb,
    stride_xt,
    stride_wc,
    stride_ww,
    stride_ab,
    stride_at,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    T,
    length,
    chunks,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    W: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    MASKED: tl.constexpr,
):
    C: tl.constexpr = 2 * HEADS * DIM + VALUE_HEADS * VALUE_DIM
    part, batch, begin, end = _walk(length, chunks, T, HEADS, DIM, HALF, VALUE_HEADS, VALUE_DIM, PAIRS, BLOCK)
    inputs = (x + batch * stride_xb, at + batch * stride_ab, cos + batch * T * HALF, sin + batch * T * HALF)
    steps = (tl.cast(stride_xt, tl.int64), tl.cast(stride_at, tl.int64))
    grads = (
        (dq + batch * stride_qb, tl.cast(stride_qt, tl.int64), tl.cast(stride_qh, tl.int64)),
        (dk + batch * stride_kb, tl.cast(stride_kt, tl.int64), tl.cast(stride_kh, tl.int64)),
        (dv + batch * stride_vb, tl.cast(stride_vt, tl.int64), tl.cast(stride_vh, tl.int64)),
    )
    outputs = (dx + batch * T * C, d_weight + (batch * chunks + begin // length) * W * C)
    turned: tl.constexpr = 2 * ((HEADS * HALF + PAIRS - 1) // PAIRS)
    if turned > 0:
        if part < turned:
            place = _pairs(part, HEADS, HALF, PAIRS)
            _backward(
                inputs, steps, weight, stride_wc, stride_ww, grads, outputs, place, begin, end, T,
                HEADS, DIM, HALF, VALUE_DIM, C, W, UNROLL, MASKED, True,
            )  # fmt: skip
            return
    place = _passing(part - turned, HEADS, DIM, HALF, VALUE_HEADS, VALUE_DIM, BLOCK)
    _backward(
        inputs, steps, weight, stride_wc, stride_ww, grads, outputs, place, begin, end, T,
        HEADS, DIM, HALF, VALUE_DIM, C, W, UNROLL, MASKED, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["parts"])
def sum_taps_kernel(
    by_tap,  # [parts, W, C] fp32
    d_weight,  # [C, W]
    parts,
    C: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Adds up what the programs along time and batch found for each weight."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, parts, ROWS):
        part = first + tl.arange(0, ROWS)
        place = by_tap + part[:, None].to(tl.int64) * (W * C) + entry[None, :]
        total += tl.load(place, mask=(part < parts)[:, None] & (entry < W * C)[None, :], other=0.0)
    found = tl.sum(total, 0)
    tl.store(d_weight + entry % C * W + entry // C, found.to(d_weight.dtype.element_ty), mask=entry < W * C)


@triton.jit
def _backward(
    inputs,
    steps,
    weight,
    stride_wc,
    stride_ww,
    grads,
    outputs,
    place,
    begin,
    end,
    T,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    UNROLL: tl.constexpr,
    MASKED: tl.constexpr,
    TURNED: tl.constexpr,
):
    head, i, inside, kind = place
    dy, stride_t, stride_h = grads[0]
    dim = DIM
    if kind == 1:
        dy, stride_t, stride_h = grads[1]
    if kind == 2:
        dy, stride_t, stride_h = grads[2]
        dim = VALUE_DIM
    column = kind * HEADS * DIM + head * dim + i
    # The first row that a token completes the gradient of.
    dx = outputs[0] + (tl.cast(begin, tl.int64) - (W - 1)) * C + column
    taps = _taps(weight, column, inside, stride_wc, stride_ww, HALF, W, TURNED)
    x = inputs[0] + column + begin * steps[0]
    past = _past(x, steps[0], begin, inside, HALF, W, TURNED)
    pending = ()  # of the gradients of the W - 1 rows before the current one
    by_tap = ()
    for _ in tl.static_range(1 + TURNED):
        pending = pending + (zeros(W - 1, i.shape[0]),)
        by_tap = by_tap + (zeros(W, i.shape[0]),)
    angle = tl.cast(begin, tl.int64) * HALF + i
    dy += begin * stride_t + head * stride_h + i
    places = (x, dy, inputs[2] + angle, inputs[3] + angle)
    at, stride_at = inputs[1], steps[1]
    steps = (steps[0], stride_t)
    tokens, places = _tokens(places, steps, inside, begin, T, HALF, UNROLL, TURNED, True)
    quick = begin - 1
    # The W - 1 tokens after the last one read it too.
    for start in tl.range(begin, end + W - 1, UNROLL):
        if start <= quick:
            ahead = ()
            for n in tl.static_range(UNROLL):
                spread, past, pending, by_tap = _gradients(
                    tokens[n], taps, past, pending, by_tap, 0, True, W, False, TURNED
                )
                for f in tl.static_range(1 + TURNED):
                    tl.store(dx + n * C + f * HALF, spread[f].to(dx.dtype.element_ty), mask=inside)
                token, places = _token(places, steps, inside, True, HALF, TURNED, True)
                ahead = ahead + (token,)
            tokens = ahead
        else:
            again = _back(places, steps, HALF, UNROLL)
            tokens, places = _tokens(places, steps, inside, start + UNROLL, T, HALF, UNROLL, TURNED, True)
            for t in tl.range(start, tl.minimum(start + UNROLL, end + W - 1)):
                token, again = _token(again, steps, inside, t < T, HALF, TURNED, True)
                furthest = _furthest(at, stride_at, t, T, MASKED)
                spread, past, pending, by_tap = _gradients(
                    token, taps, past, pending, by_tap, furthest, t < end, W, MASKED, TURNED
                )
                r = t - (W - 1)
                ready = where_both(inside, (r >= begin) & (r < end))
                for f in tl.static_range(1 + TURNED):
                    place_of = dx + (t - start) * C + f * HALF
                    tl.store(place_of, spread[f].to(dx.dtype.element_ty), mask=ready)
            quick = _quick(at, stride_at, start + UNROLL, begin + W - 1, end, T, W, UNROLL, MASKED)
        dx += UNROLL * C
    for f in tl.static_range(1 + TURNED):
        for j in tl.static_range(W):
            tl.store(outputs[1] + column + j * C + f * HALF, by_tap[f][j] * -LOG2_E, mask=inside)


@triton.jit
def _gradients(
    token, taps, past, pending, by_tap, furthest, own, W: tl.constexpr, MASKED: tl.constexpr, TURNED: tl.constexpr
):
    """What a token adds: the gradients of the row W - 1 before it, now whole, and what the next token goes on with."""
    rows, grads, angles = token
    dy = ()
    for f in tl.static_range(1 + TURNED):
        dy = dy + (grads[f].to(tl.float32),)
    if TURNED:
        cos, sin = angles
        dy = (dy[0] * cos + dy[1] * sin, dy[1] * cos - dy[0] * sin)
    whole = ()
    later_past = ()
    later_pending = ()
    later_by_tap = ()
    for f in tl.static_range(1 + TURNED):
        row = rows[f].to(tl.float32)
        window = window_of(past[f], row, furthest, W, MASKED)
        z = weighted(taps[f], window, tl.zeros_like(row), W)
        s = _sigmoid(z)
        dz = dy[f] * (s * (z * (LN_2 * LN_2 - LN_2 * LN_2 * s) - LN_2))
        spread = passed_on(pending[f], taps[f], dz, furthest, W, MASKED)
        whole = whole + (spread[0],)
        later_past = later_past + (past[f][1:] + (row,),)
        later_pending = later_pending + (spread[1:],)
        later_by_tap = later_by_tap + (sums(by_tap[f], products(window, tl.where(own, dz, 0.0), W), W),)
    return whole, later_past, later_pending, later_by_tap


@triton.jit
def _walk(
    length,
    chunks,
    T,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The part of the columns that is a program's, its batch row, and the tokens that it walks over."""
    turned: tl.constexpr = (HEADS * HALF + PAIRS - 1) // PAIRS
    passing: tl.constexpr = (HEADS * (DIM - 2 * HALF) + BLOCK - 1) // BLOCK
    parts: tl.constexpr = 2 * turned + 2 * passing + (VALUE_HEADS * VALUE_DIM + BLOCK - 1) // BLOCK
    program = tl.program_id(0).to(tl.int64)
    chunk = program // parts
    begin = (chunk % chunks).to(tl.int32) * length
    return (program % parts).to(tl.int32), chunk // chunks, begin, tl.minimum(begin + length, T)


@triton.jit
def _pairs(part, HEADS: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Rotated pairs: head, the first of its features, which of them exist, and 0 for queries, 1 for keys."""
    parts: tl.constexpr = (HEADS * HALF + PAIRS - 1) // PAIRS
    pair, inside = _lanes(part % parts, HEADS * HALF, PAIRS)
    return pair // HALF, pair % HALF, inside, part // parts


@triton.jit
def _lanes(part, COUNT: tl.constexpr, LANES: tl.constexpr):
    """Those of a part, and which of them exist; the last part overlaps the one before it rather than need a mask."""
    first = part * LANES
    if COUNT >= LANES:
        first = tl.minimum(first, COUNT - LANES)
    lanes = first + tl.arange(0, LANES)
    inside = tl.full([LANES], True, tl.int1)
    if COUNT < LANES:
        inside = lanes < COUNT
    return lanes.to(tl.int32), inside


@triton.jit
def _passing(
    part,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Features that pass: head, feature of it, which of them exist, and 0 for queries, 1 for keys, 2 for values."""
    width: tl.constexpr = DIM - 2 * HALF
    parts: tl.constexpr = (HEADS * width + BLOCK - 1) // BLOCK
    j, inside = _lanes(part - 2 * parts, VALUE_HEADS * VALUE_DIM, BLOCK)
    head = j // VALUE_DIM
    i = j % VALUE_DIM
    kind = 2 + part * 0
    if width > 0:
        if part < 2 * parts:
            kind = part // parts
            j, inside = _lanes(part % parts, HEADS * width, BLOCK)
            head = j // width
            i = 2 * HALF + j % width
    return head, i, inside, kind


@triton.jit
def _taps(weight, column, inside, stride_c, stride_w, HALF: tl.constexpr, W: tl.constexpr, TURNED: tl.constexpr):
    """Taps for what `_sigmoid` takes: times -log2(e)."""
    features = ()
    for f in tl.static_range(1 + TURNED):
        rows = taps_of(weight, column + f * HALF, inside, stride_c, stride_w, W)
        scaled = ()
        for j in tl.static_range(W):
            scaled = scaled + (rows[j] * -LOG2_E,)
        features = features + (scaled,)
    return features


@triton.jit
def _past(x, stride, t, inside, HALF: tl.constexpr, W: tl.constexpr, TURNED: tl.constexpr):
    """The W - 1 inputs before token t."""
    features = ()
    for f in tl.static_range(1 + TURNED):
        rows = ()
        for i in tl.static_range(W - 1):
            lag = W - 1 - i
            row = tl.load(x + f * HALF - lag * stride, mask=where_both(inside, t >= lag), other=0.0)
            rows = rows + (row.to(tl.float32),)
        features = features + (rows,)
    return features


@triton.jit
def _tokens(
    places,
    steps,
    inside,
    start,
    T,
    HALF: tl.constexpr,
    UNROLL: tl.constexpr,
    TURNED: tl.constexpr,
    GRADS: tl.constexpr,
):
    """What the tokens of a block read, 0 where there are none, and the places of the next block's first."""
    tokens = ()
    for n in tl.static_range(UNROLL):
        token, places = _token(places, steps, inside, start + n < T, HALF, TURNED, GRADS)
        tokens = tokens + (token,)
    return tokens, places


@triton.jit
def _token(places, steps, inside, exists, HALF: tl.constexpr, TURNED: tl.constexpr, GRADS: tl.constexpr):
    """What a token reads, 0 unless it exists, and the places of the next one."""
    x, dy, cos, sin = places
    rows = ()
    grads = ()
    angles = ()
    for f in tl.static_range(1 + TURNED):
        rows = rows + (_row(x + f * HALF, inside, exists),)
        if GRADS:
            grads = grads + (_row(dy + f * HALF, inside, exists),)
    if TURNED:
        angles = (_row(cos, inside, exists), _row(sin, inside, exists))
    return (rows, grads, angles), (x + steps[0], dy + steps[1], cos + HALF, sin + HALF)


@triton.jit
def _back(places, steps, HALF: tl.constexpr, UNROLL: tl.constexpr):
    """The places of the tokens UNROLL before."""
    x, dy, cos, sin = places
    return x - UNROLL * steps[0], dy - UNROLL * steps[1], cos - UNROLL * HALF, sin - UNROLL * HALF


@triton.jit
def _furthest(at, stride, t, T, MASKED: tl.constexpr):
    """The furthest live tap of token t; nothing is read unless taps can be dead."""
    furthest = 0
    if MASKED:
        furthest = tl.load(at + tl.cast(t, tl.int64) * stride, mask=t < T, other=-1).to(tl.int32)
    return furthest


@triton.jit
def _row(place, inside, exists):
    mask = inside if exists is True else where_both(inside, exists)
    return tl.load(place, mask=mask, other=0.0)


@triton.jit
def _quick(at, stride, start, first, end, T, W: tl.constexpr, UNROLL: tl.constexpr, MASKED: tl.constexpr):
    """The last block that needs no masks, nor those before it from `start` on; one before `start` if there is none.

    From token `first` to `end`, with the next block within the sequence, and no taps in another document.
    """
    last = tl.minimum(end, T - UNROLL)
    if MASKED:
        t = start + tl.arange(0, SPAN)
        furthest = tl.load(at + t.to(tl.int64) * stride, mask=t < T, other=W)
        last = tl.minimum(last, tl.min(tl.where(furthest < W - 1, t, start + SPAN)))
    return tl.where(start < first, start, last) - UNROLL


@triton.jit
def _sigmoid(z):
    """Of -z / log2(e)."""
    # The square of a root: a division takes more instructions.
    root = tl.rsqrt(1.0 + tl.exp2(z))
    return root * root
