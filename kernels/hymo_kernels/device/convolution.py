"""Causal depthwise convolution: a program walks along time with the last inputs of its channels in registers.

Every input is read once, and every gradient written once.
"""

import triton
import triton.language as tl

from hymo_kernels.device.taps import (
    before_activation,
    furthest_taps,
    passed_on,
    products,
    rows_of,
    sums,
    taps_of,
    weighted,
    where_both,
    window_of,
    zeros,
)


@triton.jit(do_not_specialize=["T", "sequences"])
def offsets_kernel(cu_seqlens, offset, sequence, T, sequences, BLOCK: tl.constexpr):
    """Of each packed row: its index in its sequence, -1 where it belongs to none, and which sequence that is."""
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.int64)
    size = sequences + tl.program_id(0) * 0
    # The last sequence that does not start after t.
    while size > 1:
        half = size // 2
        found = tl.where(tl.load(cu_seqlens + found + half) <= t, found + half, found)
        size -= half
    inside = t < tl.load(cu_seqlens + sequences)
    tl.store(offset + t, tl.where(inside, t - tl.load(cu_seqlens + found), -1).to(tl.int32), mask=t < T)
    tl.store(sequence + t, found.to(tl.int32), mask=t < T)


@triton.jit(do_not_specialize=["stride_ab", "stride_at", "T", "length", "chunks", "sequences"])
def forward_kernel(
    x,  # [B, T, C]
    weight,  # [C, W]
    bias,  # [C]
    at,  # [B, T], the furthest tap that reads the token's own document; -1: no token
    sequence,  # [T], of the packed rows
    state,  # [N, W - 1, C], inputs before the first of each sequence
    y,  # [B, T, C]
    stride_xb,
    stride_xt,
    stride_wc,
    stride_ww,
    stride_ab,
    stride_at,
    stride_sn,
    stride_st,
    T,
    length,
    chunks,
    sequences,
    C: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    PACKED: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_STATE: tl.constexpr,
    SILU: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    columns, inside = _channels(program, C, BLOCK)
    chunk = program // ((C + BLOCK - 1) // BLOCK)
    batch = chunk // chunks
    begin = chunk % chunks * length
    end = tl.minimum(begin + length, T)
    x += batch * stride_xb + columns
    y += batch * T * C + columns
    at += batch * stride_ab
    state += columns
    taps = taps_of(weight, columns, inside, stride_wc, stride_ww, W)
    added = _vector(bias, columns, inside, HAS_BIAS, BLOCK)
    past = _past(
        x, at, sequence, state, batch, begin, inside, stride_xt, stride_at, stride_sn, stride_st, sequences, W, PACKED,
        HAS_STATE, BLOCK,
    )  # fmt: skip
    for start in tl.range(begin, end, UNROLL):
        furthest = furthest_taps(at, stride_at, start, T, MASKED, UNROLL)
        rows = rows_of(x, stride_xt, start, T, inside, furthest, PACKED, UNROLL)
        for i in tl.static_range(UNROLL):
            t = start + i
            if PACKED and HAS_STATE:
                past = _refilled(
                    past, furthest[i], sequence, state, batch, t, inside, stride_sn, stride_st, sequences, W
                )
            row = rows[i].to(tl.float32)
            # The state has taken the place of other sequences' rows.
            window = window_of(past, row, furthest[i], W, MASKED and not (PACKED and HAS_STATE))
            z = weighted(taps, window, added, W)
            if SILU:
                z = z * tl.sigmoid(z)
            if PACKED:
                z = tl.where(furthest[i] >= 0, z, 0.0)
            tl.store(y + t * C, z.to(y.dtype.element_ty), mask=where_both(inside, t < end))
            past = past[1:] + (row,)


@triton.jit(do_not_specialize=["stride_ab", "stride_at", "T", "length", "chunks", "sequences"])
def backward_kernel(
    x,
    weight,
    bias,
    at,
    sequence,
    state,
    dy,  # [B, T, C]
    d_end,  # [N, W - 1, C], of the last inputs
    cu_seqlens,
    dx,  # [B, T, C]
    d_weight,  # [B * chunks, W, C] fp32, parts of the sum over tokens
    d_bias,  # [B * chunks, C] fp32
    stride_xb,
    stride_xt,
    stride_wc,
    stride_ww,
    stride_ab,
    stride_at,
    stride_sn,
    stride_st,
    stride_db,
    stride_dt,
    stride_en,
    stride_et,
    T,
    length,
    chunks,
    sequences,
    C: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    UNROLL: tl.constexpr,
    PACKED: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_STATE: tl.constexpr,
    SILU: tl.constexpr,
    HAS_END: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    columns, inside = _channels(program, C, BLOCK)
    chunk = program // ((C + BLOCK - 1) // BLOCK)
    batch = chunk // chunks
    begin = chunk % chunks * length
    end = tl.minimum(begin + length, T)
    x += batch * stride_xb + columns
    dy += batch * stride_db + columns
    dx += batch * T * C + columns
    d_end += columns
    at += batch * stride_ab
    state += columns
    taps = taps_of(weight, columns, inside, stride_wc, stride_ww, W)
    added = _vector(bias, columns, inside, HAS_BIAS, BLOCK)
    past = _past(
        x, at, sequence, state, batch, begin, inside, stride_xt, stride_at, stride_sn, stride_st, sequences, W, PACKED,
        HAS_STATE, BLOCK,
    )  # fmt: skip
    pending = zeros(W - 1, BLOCK)  # of the gradients of the W - 1 rows before the current one
    by_tap = zeros(W, BLOCK)
    by_bias = tl.zeros([BLOCK], tl.float32)
    # The W - 1 tokens after the last one read it too.
    for start in tl.range(begin, end + W - 1, UNROLL):
        furthest = furthest_taps(at, stride_at, start, T, MASKED, UNROLL)
        rows = rows_of(x, stride_xt, start, T, inside, furthest, PACKED, UNROLL)
        d_rows = rows_of(dy, stride_dt, start, T, inside, furthest, PACKED, UNROLL)
        for i in tl.static_range(UNROLL):
            t = start + i
            if PACKED and HAS_STATE:
                past = _refilled(
                    past, furthest[i], sequence, state, batch, t, inside, stride_sn, stride_st, sequences, W
                )
            row = rows[i].to(tl.float32)
            window = window_of(past, row, furthest[i], W, MASKED and not (PACKED and HAS_STATE))
            dz = before_activation(d_rows[i].to(tl.float32), weighted(taps, window, added, W), SILU)
            exists = t < T
            if PACKED:
                exists = exists & (furthest[i] >= 0)
            # Not a product with 0: what lies beyond may be NaN.
            dz = tl.where(exists, dz, 0.0)
            own = tl.where(t < end, dz, 0.0)
            by_tap = sums(by_tap, products(window, own, W), W)
            by_bias += own
            spread = passed_on(pending, taps, dz, furthest[i], W, MASKED)
            r = t - (W - 1)
            ready = (r >= begin) & (r < end)
            d_row = spread[0]
            if HAS_END:
                n = batch
                stop = T + r * 0
                if PACKED:
                    own_sequence = tl.load(sequence + r, mask=ready, other=0).to(tl.int64)
                    n = batch * sequences + own_sequence
                    stop = tl.load(cu_seqlens + own_sequence + 1).to(tl.int64)
                kept = r - stop + (W - 1)
                ends = ready & (kept >= 0) & (kept < W - 1)
                kept_row = d_end + n * stride_en + kept * stride_et
                d_row += tl.load(kept_row, mask=where_both(inside, ends), other=0.0).to(tl.float32)
            tl.store(dx + r * C, d_row.to(dx.dtype.element_ty), mask=where_both(inside, ready))
            pending = spread[1:]
            past = past[1:] + (row,)
    for i in tl.static_range(W):
        tl.store(d_weight + (chunk * W + i) * C + columns, by_tap[i], mask=inside)
    if HAS_BIAS:
        tl.store(d_bias + chunk * C + columns, by_bias, mask=inside)


@triton.jit(do_not_specialize=["stride_ab", "stride_at", "T", "sequences"])
def start_kernel(
    x,
    weight,
    bias,
    at,
    state,
    dy,
    d_end,
    cu_seqlens,
    d_state,  # [N, W - 1, C]
    stride_xb,
    stride_xt,
    stride_wc,
    stride_ww,
    stride_ab,
    stride_at,
    stride_sn,
    stride_st,
    stride_db,
    stride_dt,
    stride_en,
    stride_et,
    T,
    sequences,
    C: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    HAS_END: tl.constexpr,
):
    """The gradient of the state before each sequence, which its first W - 1 tokens read."""
    program = tl.program_id(0).to(tl.int64)
    columns, inside = _channels(program, C, BLOCK)
    n = program // ((C + BLOCK - 1) // BLOCK)
    batch, first, tokens = _sequence(n, cu_seqlens, T, sequences, PACKED)
    x += batch * stride_xb + first * stride_xt + columns
    dy += batch * stride_db + first * stride_dt + columns
    at += batch * stride_ab + first * stride_at
    state += n * stride_sn + columns
    d_end += n * stride_en + columns
    taps = taps_of(weight, columns, inside, stride_wc, stride_ww, W)
    added = _vector(bias, columns, inside, HAS_BIAS, BLOCK)
    past = ()
    for i in tl.static_range(W - 1):
        past = past + (tl.load(state + i * stride_st, mask=inside, other=0.0).to(tl.float32),)
    total = zeros(W - 1, BLOCK)
    for t in tl.static_range(W - 1):
        exists = t < tokens
        furthest = W
        if MASKED and not PACKED:
            furthest = tl.load(at + t * stride_at, mask=exists, other=0)
        row = tl.load(x + t * stride_xt, mask=where_both(inside, exists), other=0.0).to(tl.float32)
        window = window_of(past, row, furthest, W, MASKED and not PACKED)
        dy_row = tl.load(dy + t * stride_dt, mask=where_both(inside, exists), other=0.0).to(tl.float32)
        dz = tl.where(exists, before_activation(dy_row, weighted(taps, window, added, W), SILU), 0.0)
        # Row r of the state is under tap r - t.
        spread = passed_on(total[t:] + zeros(t, BLOCK), taps, dz, furthest, W, MASKED and not PACKED)
        total = total[:t] + spread[: W - 1 - t]
        past = past[1:] + (row,)
    for r in tl.static_range(W - 1):
        grad = total[r]
        if HAS_END:
            # A sequence shorter than the state leaves some of it at the end.
            left = r - tokens
            grad += tl.load(d_end + left * stride_et, mask=where_both(inside, left >= 0), other=0.0).to(tl.float32)
        tl.store(d_state + (n * (W - 1) + r) * C + columns, grad.to(d_state.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T", "sequences"])
def end_kernel(
    x,
    state,
    cu_seqlens,
    end,  # [N, W - 1, C]
    stride_xb,
    stride_xt,
    stride_sn,
    stride_st,
    T,
    sequences,
    C: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_STATE: tl.constexpr,
):
    """The last W - 1 inputs of each sequence, of its state and its tokens together."""
    program = tl.program_id(0).to(tl.int64)
    columns, inside = _channels(program, C, BLOCK)
    n = program // ((C + BLOCK - 1) // BLOCK)
    batch, first, tokens = _sequence(n, cu_seqlens, T, sequences, PACKED)
    x += batch * stride_xb + first * stride_xt + columns
    state += n * stride_sn + columns
    for r in tl.static_range(W - 1):
        t = tokens - (W - 1) + r
        row = tl.load(x + t * stride_xt, mask=where_both(inside, t >= 0), other=0.0).to(tl.float32)
        if HAS_STATE:
            kept = tl.load(state + (tokens + r) * stride_st, mask=where_both(inside, t < 0), other=0.0).to(tl.float32)
            row = tl.where(t >= 0, row, kept)
        tl.store(end + (n * (W - 1) + r) * C + columns, row.to(end.dtype.element_ty), mask=inside)


@triton.jit
def _channels(program, C: tl.constexpr, BLOCK: tl.constexpr):
    """The channels of a program, and which of them exist."""
    columns = program % ((C + BLOCK - 1) // BLOCK) * BLOCK + tl.arange(0, BLOCK)
    return columns, columns < C


@triton.jit
def _sequence(n, cu_seqlens, T, sequences, PACKED: tl.constexpr):
    """Batch row, first token in it and number of tokens of sequence n."""
    batch = n
    first = n * 0
    tokens = T + n * 0
    if PACKED:
        batch = n // sequences
        first = tl.load(cu_seqlens + n % sequences).to(tl.int64)
        tokens = tl.load(cu_seqlens + n % sequences + 1).to(tl.int64) - first
    return batch, first, tokens


@triton.jit
def _vector(x, columns, inside, PRESENT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.zeros([BLOCK], tl.float32)
    if PRESENT:
        row += tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
    return row


@triton.jit
def _past(
    x,
    at,
    sequence,
    state,
    batch,
    t,
    inside,
    stride_xt,
    stride_at,
    stride_sn,
    stride_st,
    sequences,
    W: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_STATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The W - 1 inputs before token t; those of a state where its sequence has not as many."""
    rows = ()
    index = t
    n = batch
    if PACKED and HAS_STATE:
        index = tl.load(at + t * stride_at).to(tl.int64)
        n = batch * sequences + tl.load(sequence + t).to(tl.int64)
    for i in tl.static_range(W - 1):
        lag = W - 1 - i
        row = tl.load(x + (t - lag) * stride_xt, mask=where_both(inside, index >= lag), other=0.0).to(tl.float32)
        if HAS_STATE:
            # A row of no sequence has index -1 and needs no past.
            kept = state + n * stride_sn + (index + i) * stride_st
            row += tl.load(kept, mask=where_both(inside, (index >= 0) & (index < lag)), other=0.0).to(tl.float32)
        rows = rows + (row,)
    return rows


@triton.jit
def _refilled(past, index, sequence, state, batch, t, inside, stride_sn, stride_st, sequences, W: tl.constexpr):
    """The past of token t: at the start of a sequence its state."""
    starts = index == 0
    n = batch * sequences + tl.load(sequence + t, mask=starts, other=0).to(tl.int64)
    rows = ()
    for i in tl.static_range(W - 1):
        kept = tl.load(state + n * stride_sn + i * stride_st, mask=where_both(inside, starts), other=0.0).to(tl.float32)
        rows = rows + (tl.where(starts, kept, past[i]),)
    return rows
