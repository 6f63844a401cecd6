"""Gated linear recurrence in chunks, forward and backward, with no exponent above 0.

    h_t = exp(-g_t a) * h_{t-1} + b_t v_t^T,   o_t = c_t h_t,   a = exp(A_log)

The decay between two tokens is a number per channel, exp(-(G_i - G_j) a), and a product of one factor a token only with
a reference between them: with any other, a factor exceeds 1 and overflows. So the pairs of a chunk are sorted by the
highest bit in which their places differ. At level l all pairs lie across the middle of a block of 2^(l+1) tokens; a
token reads (second half) or is read (first half), and has one leg, the gates between it and the middle:

    x_t = (c_t or b_t) exp(-leg_t a),   P_ij = <x_i, x_j>,   o = P v + (c exp(-(g_0 + .. + g_t) a)) S

log2(C) products of whole tiles make P, and log2(C) exponentials a token and channel. The backward differentiates just
that: the gradient of a leg is a sum of its rows, spread over its gates, and nothing cancels in dg or dA_log.
"""

import triton
import triton.language as tl

from hymo_kernels.device.places import place_of_slot, sequence

SIZES = ["T", "slots", "sequences", "stride_gb", "stride_sn"]
"""What changes from call to call is no reason to compile again: not whether it is 1, nor a multiple of 16."""


@triton.jit(do_not_specialize=SIZES)
def carry_kernel(
    x,  # [B, T, H, S]: b, or c on the way back
    y,  # [B, T, H, V]: v, or the gradient of the read-outs on the way back
    g,  # [B, T, H]
    A_log,  # [H, S]
    start,  # [N, H, S, V], state before the first chunk, or gradient of that after the last on the way back
    states,  # [B, H, slots, S, V], what enters each chunk
    end,  # [N, H, S, V] fp32, what leaves the last one
    cu_seqlens,
    stride_xb,
    stride_xt,
    stride_xh,
    stride_yb,
    stride_yt,
    stride_yh,
    stride_gb,
    stride_gt,
    stride_gh,
    stride_sn,
    stride_sh,
    stride_ss,
    stride_sv,
    T,
    slots,
    sequences,
    H: tl.constexpr,
    S: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PACKED: tl.constexpr,
    BACK: tl.constexpr,
    HAS_START: tl.constexpr,
    KEEP_END: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """State <- gamma state + (x decayed to the chunk's edge)^T y, chunk by chunk; channels and features are tiles."""
    s_tiles: tl.constexpr = (S + BLOCK_S - 1) // BLOCK_S
    v_tiles: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0).to(tl.int64)
    columns = (program % v_tiles).to(tl.int32) * BLOCK_V + tl.arange(0, BLOCK_V)
    channels = (program // v_tiles % s_tiles).to(tl.int32) * BLOCK_S + tl.arange(0, BLOCK_S)
    h = program // (v_tiles * s_tiles) % H
    n = program // (v_tiles * s_tiles * H)
    batch, first, length, slot = sequence(n, cu_seqlens, T, sequences, C, PACKED)
    chunks = tl.cdiv(length, C)
    x += batch * stride_xb + first * stride_xt + h * stride_xh
    y += batch * stride_yb + first * stride_yt + h * stride_yh
    g += batch * stride_gb + first * stride_gt + h * stride_gh
    states += ((batch * H + h) * slots + slot) * S * V
    in_state = (channels < S)[:, None] & (columns < V)[None, :]
    place = channels[:, None] * V + columns[None, :]
    rate = rate_of(A_log + h * S, channels, S)

    state = tl.zeros([BLOCK_S, BLOCK_V], tl.float32)
    if HAS_START:
        at = n * stride_sn + h * stride_sh + channels[:, None] * stride_ss + columns[None, :] * stride_sv
        state = tl.load(start + at, mask=in_state, other=0.0).to(tl.float32)
    for step in tl.range(0, chunks, num_stages=STAGES):
        chunk = chunks - 1 - step if BACK else step
        tl.store(states + wide(chunk) * S * V + place, state.to(states.dtype.element_ty), mask=in_state)
        xt = rows_of(x, stride_xt, chunk, length, channels, C, S, BLOCK_S)
        yt = rows_of(y, stride_yt, chunk, length, columns, C, V, BLOCK_V)
        gates, resets = gates_of(g, stride_gt, chunk, length, C)
        leg, crossed = edge_legs(gates, resets, BACK, C)
        faded = (xt.to(tl.float32) * fade(leg, crossed, rate)).to(xt.dtype)
        state = tl.dot(tl.trans(faded), yt, kept_of(gates, resets, rate)[:, None] * state, input_precision=PRECISION)
    if KEEP_END:
        tl.store(end + (n * H + h) * S * V + place, state, mask=in_state)


@triton.jit(do_not_specialize=SIZES)
def pairs_kernel(
    b,  # [B, T, H, S]
    c,  # [B, T, H, S]
    g,  # [B, T, H]
    A_log,  # [H, S]
    pairs,  # [B, H, T, C]: P
    cu_seqlens,
    stride_bb,
    stride_bt,
    stride_bh,
    stride_cb,
    stride_ct,
    stride_ch,
    stride_gb,
    stride_gt,
    stride_gh,
    T,
    slots,
    sequences,
    H: tl.constexpr,
    S: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """How much of what token j wrote token i reads, for the pairs of each chunk."""
    program = tl.program_id(0).to(tl.int64)
    h = program % H
    batch, _, first, chunk, length, live = place_of_slot(program // H, cu_seqlens, T, slots, sequences, C, PACKED)
    if live:
        b += batch * stride_bb + first * stride_bt + h * stride_bh
        c += batch * stride_cb + first * stride_ct + h * stride_ch
        g += batch * stride_gb + first * stride_gt + h * stride_gh
        pairs += ((batch * H + h) * T + first) * C
        i = tl.arange(0, C)
        gates, resets = gates_of(g, stride_gt, chunk, length, C)
        own = tl.zeros([C], tl.float32)
        P = tl.zeros([C, C], tl.float32)
        for tile in tl.range((S + BLOCK_S - 1) // BLOCK_S):
            channels = tile * BLOCK_S + tl.arange(0, BLOCK_S)
            rate = rate_of(A_log + h * S, channels, S)
            bt = rows_of(b, stride_bt, chunk, length, channels, C, S, BLOCK_S)
            ct = rows_of(c, stride_ct, chunk, length, channels, C, S, BLOCK_S)
            own += tl.sum(bt.to(tl.float32) * ct.to(tl.float32), 1)
            for level in tl.range(LEVELS):
                leg = total_over(gates, in_leg(level, C))
                x = tl.where(reads(level, C)[:, None], ct, bt).to(tl.float32) * tl.exp(-leg[:, None] * rate[None, :])
                x = x.to(bt.dtype)
                P = tl.where(across(level, C), tl.dot(x, tl.trans(x), P, input_precision=PRECISION), P)
        P = tl.where(i[:, None] == i[None, :], own[:, None], P)
        P = tl.where((i[:, None] >= i[None, :]) & together(resets, C), P, 0.0)
        store_rows(pairs, C, chunk, length, i, P, C, C, C)


@triton.jit(do_not_specialize=SIZES)
def read_kernel(
    x,  # [B, T, H, S]: c, or b for the gradient of v
    y,  # [B, T, H, V]: v, or the gradient of the read-outs for that of v
    g,  # [B, T, H]
    A_log,  # [H, S]
    pairs,  # [B, H, T, C]
    states,  # [B, H, slots, S, V]
    out,  # [B, T, H, V]
    cu_seqlens,
    stride_xb,
    stride_xt,
    stride_xh,
    stride_yb,
    stride_yt,
    stride_yh,
    stride_gb,
    stride_gt,
    stride_gh,
    stride_ob,
    stride_ot,
    stride_oh,
    T,
    slots,
    sequences,
    H: tl.constexpr,
    S: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PACKED: tl.constexpr,
    BACK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """P y + (x decayed from the chunk's edge) state, or with P turned and the other edge: each chunk by itself."""
    v_tiles: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0).to(tl.int64)
    columns = (program % v_tiles).to(tl.int32) * BLOCK_V + tl.arange(0, BLOCK_V)
    h = program // v_tiles % H
    batch, slot, first, chunk, length, live = place_of_slot(
        program // (v_tiles * H), cu_seqlens, T, slots, sequences, C, PACKED
    )
    if live:
        x += batch * stride_xb + first * stride_xt + h * stride_xh
        y += batch * stride_yb + first * stride_yt + h * stride_yh
        g += batch * stride_gb + first * stride_gt + h * stride_gh
        out += batch * stride_ob + first * stride_ot + h * stride_oh
        pairs += ((batch * H + h) * T + first) * C
        states += ((batch * H + h) * slots + slot) * S * V
        P = rows_of(pairs, C, chunk, length, tl.arange(0, C), C, C, C)
        yt = rows_of(y, stride_yt, chunk, length, columns, C, V, BLOCK_V).to(P.dtype)
        gates, resets = gates_of(g, stride_gt, chunk, length, C)
        leg, crossed = edge_legs(gates, resets, not BACK, C)
        result = tl.dot(tl.trans(P) if BACK else P, yt, input_precision=PRECISION)
        for tile in tl.range((S + BLOCK_S - 1) // BLOCK_S):
            channels = tile * BLOCK_S + tl.arange(0, BLOCK_S)
            xt = rows_of(x, stride_xt, chunk, length, channels, C, S, BLOCK_S).to(tl.float32)
            state = state_tile(states, channels, columns, S, V)
            faded = (xt * fade(leg, crossed, rate_of(A_log + h * S, channels, S))).to(state.dtype)
            result = tl.dot(faded, state, result, input_precision=PRECISION)
        store_rows(out, stride_ot, chunk, length, columns, result, C, V, BLOCK_V)


@triton.jit(do_not_specialize=SIZES)
def pairs_backward_kernel(
    v,  # [B, T, H, V]
    b,  # [B, T, H, S]
    c,  # [B, T, H, S]
    g,  # [B, T, H]
    A_log,  # [H, S]
    do,  # [B, T, H, V]
    states,  # [B, H, slots, S, V], the state before each chunk
    d_states,  # [B, H, slots, S, V], gradient of the state after each chunk
    db,  # [B, T, H, S]
    dc,  # [B, T, H, S]
    dg,  # [B, T, H] fp32
    d_rate,  # [B, H, slots, S] fp32, each chunk's part of dA_log
    cu_seqlens,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_bb,
    stride_bt,
    stride_bh,
    stride_cb,
    stride_ct,
    stride_ch,
    stride_gb,
    stride_gt,
    stride_gh,
    stride_ob,
    stride_ot,
    stride_oh,
    T,
    slots,
    sequences,
    H: tl.constexpr,
    S: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of b, c, g and A_log, each chunk by itself."""
    program = tl.program_id(0).to(tl.int64)
    h = program % H
    batch, slot, first, chunk, length, live = place_of_slot(program // H, cu_seqlens, T, slots, sequences, C, PACKED)
    if live:
        v += batch * stride_vb + first * stride_vt + h * stride_vh
        b += batch * stride_bb + first * stride_bt + h * stride_bh
        c += batch * stride_cb + first * stride_ct + h * stride_ch
        g += batch * stride_gb + first * stride_gt + h * stride_gh
        do += batch * stride_ob + first * stride_ot + h * stride_oh
        row = (batch * T + first) * H + h
        db += row * S
        dc += row * S
        dg += row
        place = (batch * H + h) * slots + slot
        states += place * S * V
        d_states += place * S * V
        d_rate += place * S
        wide_type = states.dtype.element_ty  # what has no bound is an operand in the states' type: fp16 would overflow
        i = tl.arange(0, C)
        later = i[:, None] > i[None, :]
        gates, resets = gates_of(g, stride_gt, chunk, length, C)

        # The gradient of P, below the diagonal as it is and above it turned, and of its diagonal.
        own = tl.zeros([C], tl.float32)
        lower = tl.zeros([C, C], tl.float32)
        upper = tl.zeros([C, C], tl.float32)
        for tile in tl.range((V + BLOCK_V - 1) // BLOCK_V):
            columns = tile * BLOCK_V + tl.arange(0, BLOCK_V)
            vt = rows_of(v, stride_vt, chunk, length, columns, C, V, BLOCK_V)
            dot = rows_of(do, stride_ot, chunk, length, columns, C, V, BLOCK_V)
            own += tl.sum(vt.to(tl.float32) * dot.to(tl.float32), 1)
            lower = tl.dot(dot, tl.trans(vt), lower, input_precision=PRECISION)
            upper = tl.dot(vt, tl.trans(dot), upper, input_precision=PRECISION)
        dP = tl.where(together(resets, C), tl.where(later, lower, upper), 0.0).to(wide_type)

        d_gates = tl.zeros([C], tl.float32)
        from_start, after_reset = edge_legs(gates, resets, True, C)
        to_end, before_reset = edge_legs(gates, resets, False, C)
        total = tl.sum(gates, 0)
        for tile in tl.range((S + BLOCK_S - 1) // BLOCK_S):
            channels = tile * BLOCK_S + tl.arange(0, BLOCK_S)
            rate = rate_of(A_log + h * S, channels, S)
            # Through the states: what was read of the one before, written to the one after, and kept of it.
            read = tl.zeros([C, BLOCK_S], tl.float32)
            written = tl.zeros([C, BLOCK_S], tl.float32)
            kept = tl.zeros([BLOCK_S], tl.float32)
            for part in tl.range((V + BLOCK_V - 1) // BLOCK_V):
                columns = part * BLOCK_V + tl.arange(0, BLOCK_V)
                vt = rows_of(v, stride_vt, chunk, length, columns, C, V, BLOCK_V).to(wide_type)
                dot = rows_of(do, stride_ot, chunk, length, columns, C, V, BLOCK_V).to(wide_type)
                state = state_tile(states, channels, columns, S, V)
                d_state = state_tile(d_states, channels, columns, S, V)
                read = tl.dot(dot, tl.trans(state), read, input_precision=PRECISION)
                written = tl.dot(vt, tl.trans(d_state), written, input_precision=PRECISION)
                kept += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1)
            bt = rows_of(b, stride_bt, chunk, length, channels, C, S, BLOCK_S).to(tl.float32)
            ct = rows_of(c, stride_ct, chunk, length, channels, C, S, BLOCK_S).to(tl.float32)
            read *= fade(from_start, after_reset, rate)
            written *= fade(to_end, before_reset, rate)
            kept *= kept_of(gates, resets, rate)
            d_log = total * kept + tl.sum(from_start[:, None] * ct * read + to_end[:, None] * bt * written, 0)
            d_leg = tl.sum(ct * read * rate[None, :], 1)
            d_gates += tl.sum(tl.where(i[:, None] >= i[None, :], d_leg[:, None], 0.0), 0)
            d_leg = tl.sum(bt * written * rate[None, :], 1)
            d_gates += tl.sum(tl.where(i[:, None] < i[None, :], d_leg[:, None], 0.0), 0)
            d_gates += tl.sum(kept * rate, 0)
            read += own[:, None] * bt
            written += own[:, None] * ct
            for level in tl.range(LEVELS):
                leg = total_over(gates, in_leg(level, C))
                faded = tl.exp(-leg[:, None] * rate[None, :])
                x = tl.where(reads(level, C)[:, None], ct, bt) * faded
                d_x = tl.dot(
                    tl.where(across(level, C), dP, 0.0).to(wide_type), x.to(wide_type), input_precision=PRECISION
                )
                d_log += tl.sum(leg[:, None] * x * d_x, 0)
                d_leg = tl.sum(x * d_x * rate[None, :], 1)
                d_gates += tl.sum(tl.where(in_leg(level, C), d_leg[:, None], 0.0), 0)
                read += tl.where(reads(level, C)[:, None], d_x * faded, 0.0)
                written += tl.where(reads(level, C)[:, None], 0.0, d_x * faded)
            store_rows(dc, H * S, chunk, length, channels, read, C, S, BLOCK_S)
            store_rows(db, H * S, chunk, length, channels, written, C, S, BLOCK_S)
            tl.store(d_rate + channels, -rate * d_log, mask=channels < S)
        t = chunk * C + i
        tl.store(dg + wide(t) * H, -d_gates, mask=t < length)


@triton.jit
def in_leg(level, C: tl.constexpr):
    """[token, gate]: the gates between a token and the middle of its block."""
    i = tl.arange(0, C)[:, None]
    gate = tl.arange(0, C)[None, :]
    middle = ((i >> level) | 1) << level
    return ((gate >= middle) & (gate <= i)) | ((gate > i) & (gate < middle))


@triton.jit
def reads(level, C: tl.constexpr):
    """Whether a token is in the second half of its block, which reads what the first half wrote."""
    return (tl.arange(0, C) >> level) & 1 == 1


@triton.jit
def across(level, C: tl.constexpr):
    """The pairs of a level, in both orders."""
    return (tl.arange(0, C)[:, None] ^ tl.arange(0, C)[None, :]) >> level == 1


@triton.jit
def gates_of(g, stride, chunk, length, C: tl.constexpr):
    """The finite gates of a chunk, and its resets (+inf) as ones; nothing beyond the sequence."""
    t = chunk * C + tl.arange(0, C)
    x = tl.load(g + wide(t) * stride, mask=t < length, other=0.0).to(tl.float32)
    reset = x == float("inf")
    # Sums of 64 stay finite: infinity times an exponential of 0 would be NaN.
    return tl.where(reset, 0.0, tl.minimum(x, 1e30)), tl.where(reset, 1.0, 0.0)


@triton.jit
def total_over(x, which):
    """The sum of x over the marked columns, for each row; only what is named adds to the rounding."""
    return tl.sum(tl.where(which, x[None, :], 0.0), 1)


@triton.jit
def edge_legs(gates, resets, FROM_START: tl.constexpr, C: tl.constexpr):
    """Gates between each token and the chunk's start, its own included, or its end; and resets among them."""
    i = tl.arange(0, C)
    which = i[None, :] <= i[:, None] if FROM_START else i[None, :] > i[:, None]
    return total_over(gates, which), total_over(resets, which)


@triton.jit
def fade(leg, crossed, rate):
    """What is left of each channel over a leg: nothing across a reset."""
    return tl.where((crossed == 0.0)[:, None], tl.exp(-leg[:, None] * rate[None, :]), 0.0)


@triton.jit
def kept_of(gates, resets, rate):
    """What a whole chunk keeps of each channel."""
    return tl.where(tl.sum(resets, 0) == 0.0, tl.exp(-tl.sum(gates, 0) * rate), 0.0)


@triton.jit
def together(resets, C: tl.constexpr):
    """The pairs with no reset between them."""
    i = tl.arange(0, C)
    before = total_over(resets, i[None, :] <= i[:, None])
    before_turned = tl.sum(tl.where(i[:, None] <= i[None, :], resets[:, None], 0.0), 0)
    return before[:, None] == before_turned[None, :]


@triton.jit
def rate_of(A_log, channels, S: tl.constexpr):
    return tl.exp(tl.load(A_log + channels, mask=channels < S, other=0.0).to(tl.float32))


@triton.jit
def wide(x):
    """x in 64 bits: offsets beyond 2^31 elements are ordinary."""
    return x + tl.full((), 0, tl.int64)


@triton.jit
def rows_of(rows, stride, chunk, length, columns, C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Some columns of the rows of a chunk, zero beyond the sequence and the width."""
    t = chunk * C + tl.arange(0, C)
    mask = (t < length)[:, None]
    if WIDTH % BLOCK != 0:
        mask = mask & (columns < WIDTH)[None, :]
    return tl.load(rows + wide(t)[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(rows, stride, chunk, length, columns, x, C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Writes what `rows_of` reads."""
    t = chunk * C + tl.arange(0, C)
    mask = (t < length)[:, None]
    if WIDTH % BLOCK != 0:
        mask = mask & (columns < WIDTH)[None, :]
    tl.store(rows + wide(t)[:, None] * stride + columns[None, :], x.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def state_tile(state, channels, columns, S: tl.constexpr, V: tl.constexpr):
    """Some channels and features of a state."""
    mask = (channels < S)[:, None] & (columns < V)[None, :]
    return tl.load(state + (channels[:, None] * V + columns[None, :]), mask=mask, other=0.0)
