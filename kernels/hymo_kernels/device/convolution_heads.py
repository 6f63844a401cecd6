"""The causal convolution of queries, keys and values: SiLU, rotation and the cut into heads on the way.

A program, one warp, walks along time with the last inputs of its columns in registers. Its columns are either pairs of
features that are rotated, or features that pass; they are of queries, of keys or of values alone.
"""

import triton
import triton.language as tl

from hymo_kernels.device.taps import (
    before_activation,
    furthest_taps,
    passed_on,
    products,
    rows_of,
    sigmoid,
    sums,
    taps_of,
    weighted,
    where_both,
    window_of,
    zeros,
)


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
    x += batch * stride_xb
    at += batch * stride_ab
    q += batch * T * HEADS * DIM
    k += batch * T * HEADS * DIM
    v += batch * T * VALUE_HEADS * VALUE_DIM
    turned: tl.constexpr = 2 * ((HEADS * HALF + PAIRS - 1) // PAIRS)
    if turned > 0:
        if part < turned:
            cos += batch * T * HALF
            sin += batch * T * HALF
            _turned_forward(
                x, weight, at, cos, sin, q, k, stride_xt, stride_wc, stride_ww, stride_at, T, part, begin, end,
                HEADS, DIM, HALF, W, PAIRS, UNROLL, MASKED,
            )  # fmt: skip
            return
    _passing_forward(
        x, weight, at, q, k, v, stride_xt, stride_wc, stride_ww, stride_at, T, part - turned, begin, end,
        HEADS, DIM, HALF, VALUE_HEADS, VALUE_DIM, W, BLOCK, UNROLL, MASKED,
    )  # fmt: skip


@triton.jit
def _turned_forward(
    x,
    weight,
    at,
    cos,
    sin,
    q,
    k,
    stride_xt,
    stride_wc,
    stride_ww,
    stride_at,
    T,
    part,
    begin,
    end,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    W: tl.constexpr,
    PAIRS: tl.constexpr,
    UNROLL: tl.constexpr,
    MASKED: tl.constexpr,
):
    head, i, inside, kind = _pairs(part, HEADS, HALF, PAIRS)
    y = q
    if kind == 1:
        y = k
    column = kind * HEADS * DIM + head * DIM + i
    x += column
    y += head * DIM + i
    a_taps = taps_of(weight, column, inside, stride_wc, stride_ww, W)
    b_taps = taps_of(weight, column + HALF, inside, stride_wc, stride_ww, W)
    a_past = _past(x, stride_xt, begin, inside, W)
    b_past = _past(x + HALF, stride_xt, begin, inside, W)
    for start in tl.range(begin, end, UNROLL):
        furthest = furthest_taps(at, stride_at, start, T, MASKED, UNROLL)
        a_rows = rows_of(x, stride_xt, start, T, inside, furthest, False, UNROLL)
        b_rows = rows_of(x + HALF, stride_xt, start, T, inside, furthest, False, UNROLL)
        cosines = rows_of(cos + i, HALF, start, T, inside, furthest, False, UNROLL)
        sines = rows_of(sin + i, HALF, start, T, inside, furthest, False, UNROLL)
        for n in tl.static_range(UNROLL):
            t = start + n
            a, a_past = _filtered(a_taps, a_past, a_rows[n], furthest[n], W, MASKED)
            b, b_past = _filtered(b_taps, b_past, b_rows[n], furthest[n], W, MASKED)
            row = y + tl.cast(t, tl.int64) * (HEADS * DIM)
            exists = where_both(inside, t < end)
            tl.store(row, (a * cosines[n] - b * sines[n]).to(y.dtype.element_ty), mask=exists)
            tl.store(row + HALF, (b * cosines[n] + a * sines[n]).to(y.dtype.element_ty), mask=exists)


@triton.jit
def _passing_forward(
    x,
    weight,
    at,
    q,
    k,
    v,
    stride_xt,
    stride_wc,
    stride_ww,
    stride_at,
    T,
    part,
    begin,
    end,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    MASKED: tl.constexpr,
):
    head, i, inside, kind = _passing(part, HEADS, DIM, HALF, VALUE_HEADS, VALUE_DIM, BLOCK)
    y = q
    dim = DIM
    width = HEADS * DIM
    if kind == 1:
        y = k
    if kind == 2:
        y = v
        dim = VALUE_DIM
        width = VALUE_HEADS * VALUE_DIM
    column = kind * HEADS * DIM + head * dim + i
    x += column
    y += head * dim + i
    taps = taps_of(weight, column, inside, stride_wc, stride_ww, W)
    past = _past(x, stride_xt, begin, inside, W)
    for start in tl.range(begin, end, UNROLL):
        furthest = furthest_taps(at, stride_at, start, T, MASKED, UNROLL)
        rows = rows_of(x, stride_xt, start, T, inside, furthest, False, UNROLL)
        for n in tl.static_range(UNROLL):
            t = start + n
            z, past = _filtered(taps, past, rows[n], furthest[n], W, MASKED)
            tl.store(y + tl.cast(t, tl.int64) * width, z.to(y.dtype.element_ty), mask=where_both(inside, t < end))


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
    x += batch * stride_xb
    at += batch * stride_ab
    dq += batch * stride_qb
    dk += batch * stride_kb
    dv += batch * stride_vb
    dx += batch * T * C
    d_weight += (batch * chunks + begin // length) * W * C
    turned: tl.constexpr = 2 * ((HEADS * HALF + PAIRS - 1) // PAIRS)
    if turned > 0:
        if part < turned:
            cos += batch * T * HALF
            sin += batch * T * HALF
            _turned_backward(
                x, weight, at, cos, sin, dq, dk, dx, d_weight, stride_xt, stride_wc, stride_ww, stride_at, stride_qt,
                stride_qh, stride_kt, stride_kh, T, part, begin, end, HEADS, DIM, HALF, C, W, PAIRS, UNROLL, MASKED,
            )  # fmt: skip
            return
    _passing_backward(
        x, weight, at, dq, dk, dv, dx, d_weight, stride_xt, stride_wc, stride_ww, stride_at, stride_qt, stride_qh,
        stride_kt, stride_kh, stride_vt, stride_vh, T, part - turned, begin, end,
        HEADS, DIM, HALF, VALUE_HEADS, VALUE_DIM, C, W, BLOCK, UNROLL, MASKED,
    )  # fmt: skip


@triton.jit
def _turned_backward(
    x,
    weight,
    at,
    cos,
    sin,
    dq,
    dk,
    dx,
    d_weight,
    stride_xt,
    stride_wc,
    stride_ww,
    stride_at,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    T,
    part,
    begin,
    end,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    PAIRS: tl.constexpr,
    UNROLL: tl.constexpr,
    MASKED: tl.constexpr,
):
    head, i, inside, kind = _pairs(part, HEADS, HALF, PAIRS)
    dy = dq
    stride_t = tl.cast(stride_qt, tl.int64)
    stride_h = tl.cast(stride_qh, tl.int64)
    if kind == 1:
        dy = dk
        stride_t = tl.cast(stride_kt, tl.int64)
        stride_h = tl.cast(stride_kh, tl.int64)
    column = kind * HEADS * DIM + head * DIM + i
    x += column
    dy += head * stride_h + i
    dx += column
    d_weight += column
    a_taps = taps_of(weight, column, inside, stride_wc, stride_ww, W)
    b_taps = taps_of(weight, column + HALF, inside, stride_wc, stride_ww, W)
    a_past = _past(x, stride_xt, begin, inside, W)
    b_past = _past(x + HALF, stride_xt, begin, inside, W)
    a_pending = zeros(W - 1, PAIRS)  # of the gradients of the W - 1 rows before the current one
    b_pending = zeros(W - 1, PAIRS)
    a_by_tap = zeros(W, PAIRS)
    b_by_tap = zeros(W, PAIRS)
    # The W - 1 tokens after the last one read it too.
    for start in tl.range(begin, end + W - 1, UNROLL):
        furthest = furthest_taps(at, stride_at, start, T, MASKED, UNROLL)
        a_rows = rows_of(x, stride_xt, start, T, inside, furthest, False, UNROLL)
        b_rows = rows_of(x + HALF, stride_xt, start, T, inside, furthest, False, UNROLL)
        a_grads = rows_of(dy, stride_t, start, T, inside, furthest, False, UNROLL)
        b_grads = rows_of(dy + HALF, stride_t, start, T, inside, furthest, False, UNROLL)
        cosines = rows_of(cos + i, HALF, start, T, inside, furthest, False, UNROLL)
        sines = rows_of(sin + i, HALF, start, T, inside, furthest, False, UNROLL)
        for n in tl.static_range(UNROLL):
            t = start + n
            da = a_grads[n].to(tl.float32)
            db = b_grads[n].to(tl.float32)
            da, db = da * cosines[n] + db * sines[n], db * cosines[n] - da * sines[n]
            a, a_past, a_pending, a_by_tap = _gradient(
                a_taps, a_past, a_pending, a_by_tap, a_rows[n], da, furthest[n], t < end, W, MASKED
            )
            b, b_past, b_pending, b_by_tap = _gradient(
                b_taps, b_past, b_pending, b_by_tap, b_rows[n], db, furthest[n], t < end, W, MASKED
            )
            r = t - (W - 1)
            ready = where_both(inside, (r >= begin) & (r < end))
            tl.store(dx + tl.cast(r, tl.int64) * C, a.to(dx.dtype.element_ty), mask=ready)
            tl.store(dx + tl.cast(r, tl.int64) * C + HALF, b.to(dx.dtype.element_ty), mask=ready)
    for j in tl.static_range(W):
        tl.store(d_weight + j * C, a_by_tap[j], mask=inside)
        tl.store(d_weight + j * C + HALF, b_by_tap[j], mask=inside)


@triton.jit
def _passing_backward(
    x,
    weight,
    at,
    dq,
    dk,
    dv,
    dx,
    d_weight,
    stride_xt,
    stride_wc,
    stride_ww,
    stride_at,
    stride_qt,
    stride_qh,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    T,
    part,
    begin,
    end,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    MASKED: tl.constexpr,
):
    head, i, inside, kind = _passing(part, HEADS, DIM, HALF, VALUE_HEADS, VALUE_DIM, BLOCK)
    dy = dq
    stride_t = tl.cast(stride_qt, tl.int64)
    stride_h = tl.cast(stride_qh, tl.int64)
    dim = DIM
    if kind == 1:
        dy = dk
        stride_t = tl.cast(stride_kt, tl.int64)
        stride_h = tl.cast(stride_kh, tl.int64)
    if kind == 2:
        dy = dv
        stride_t = tl.cast(stride_vt, tl.int64)
        stride_h = tl.cast(stride_vh, tl.int64)
        dim = VALUE_DIM
    column = kind * HEADS * DIM + head * dim + i
    x += column
    dy += head * stride_h + i
    dx += column
    d_weight += column
    taps = taps_of(weight, column, inside, stride_wc, stride_ww, W)
    past = _past(x, stride_xt, begin, inside, W)
    pending = zeros(W - 1, BLOCK)
    by_tap = zeros(W, BLOCK)
    for start in tl.range(begin, end + W - 1, UNROLL):
        furthest = furthest_taps(at, stride_at, start, T, MASKED, UNROLL)
        rows = rows_of(x, stride_xt, start, T, inside, furthest, False, UNROLL)
        grads = rows_of(dy, stride_t, start, T, inside, furthest, False, UNROLL)
        for n in tl.static_range(UNROLL):
            t = start + n
            row, past, pending, by_tap = _gradient(
                taps, past, pending, by_tap, rows[n], grads[n].to(tl.float32), furthest[n], t < end, W, MASKED
            )
            r = t - (W - 1)
            ready = where_both(inside, (r >= begin) & (r < end))
            tl.store(dx + tl.cast(r, tl.int64) * C, row.to(dx.dtype.element_ty), mask=ready)
    for j in tl.static_range(W):
        tl.store(d_weight + j * C, by_tap[j], mask=inside)


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
    return program % parts, chunk // chunks, begin, tl.minimum(begin + length, T)


@triton.jit
def _pairs(part, HEADS: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Rotated pairs: head, the first of its features, which of them exist, and 0 for queries, 1 for keys."""
    parts: tl.constexpr = (HEADS * HALF + PAIRS - 1) // PAIRS
    pair = part % parts * PAIRS + tl.arange(0, PAIRS)
    return pair // HALF, pair % HALF, pair < HEADS * HALF, part // parts


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
    j = (part - 2 * parts) * BLOCK + tl.arange(0, BLOCK)
    head = j // VALUE_DIM
    i = j % VALUE_DIM
    inside = j < VALUE_HEADS * VALUE_DIM
    kind = 2 + part * 0
    if width > 0:
        if part < 2 * parts:
            kind = part // parts
            j = part % parts * BLOCK + tl.arange(0, BLOCK)
            head = j // width
            i = 2 * HALF + j % width
            inside = j < HEADS * width
    return head, i, inside, kind


@triton.jit
def _past(x, stride, t, inside, W: tl.constexpr):
    """The W - 1 inputs before token t."""
    rows = ()
    for i in tl.static_range(W - 1):
        lag = W - 1 - i
        row = tl.load(x + tl.cast(t - lag, tl.int64) * stride, mask=where_both(inside, t >= lag), other=0.0)
        rows = rows + (row.to(tl.float32),)
    return rows


@triton.jit
def _filtered(taps, past, row, furthest, W: tl.constexpr, MASKED: tl.constexpr):
    """One token's output before rotation, and the past of the next token."""
    row = row.to(tl.float32)
    z = weighted(taps, window_of(past, row, furthest, W, MASKED), tl.zeros_like(row), W)
    return z * sigmoid(z), past[1:] + (row,)


@triton.jit
def _gradient(taps, past, pending, by_tap, row, dy, furthest, own, W: tl.constexpr, MASKED: tl.constexpr):
    """What one token adds: the gradient of the row W - 1 before it, now whole, and what the next token goes on with."""
    row = row.to(tl.float32)
    none = tl.zeros_like(row)
    window = window_of(past, row, furthest, W, MASKED)
    dz = before_activation(dy, weighted(taps, window, none, W), True)
    by_tap = sums(by_tap, products(window, tl.where(own, dz, 0.0), W), W)
    pending = passed_on(pending, taps, dz, furthest, W, MASKED)
    return pending[0], past[1:] + (row,), pending[1:], by_tap
