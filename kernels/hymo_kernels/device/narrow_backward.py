"""Gated delta rule for narrow heads, backward: the state's gradient carried back through the chunks of a segment.

The equations are those of `backward.py`, in transposes. `narrow_chain_kernel` finds what a segment adds to the state's
gradient, and of the last segment all of it; by what it multiplies it, the forward has kept. `narrow_backward_kernel`
then has the gradient at the end of its segment, and gives all gradients in one pass.
"""

import triton
import triton.language as tl

from hymo_kernels.device.forward import store_tile, wide
from hymo_kernels.device.narrow_prepare import (
    NUMBERS,
    gates_kept,
    piece,
    retained_later,
    right_operand,
    rows_of,
    state_of,
    store_state,
)


@triton.jit(do_not_specialize=["T", "slots", "places", "sequences", "length", "segments"])
def narrow_chain_kernel(
    q,
    k,
    do,  # [B, T, HV, V]
    inverse,
    numbers,
    d_end,  # [N, HV, K, V], gradient of the end state
    added,  # [B, HV, places, V, K] fp32
    cu_seqlens,
    scale,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_ob,
    stride_ot,
    stride_oh,
    stride_sn,
    stride_sh,
    stride_sk,
    stride_sv,
    T,
    slots,
    places,
    sequences,
    length,
    segments,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    PACKED: tl.constexpr,
    NORM: tl.constexpr,
    HAS_END: tl.constexpr,
    ALL: tl.constexpr,  # the first segments of sequences too
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    _, hv, n, batch, first, tokens, slot, part, place, begin, end, more = piece(
        cu_seqlens, T, places, sequences, length, segments, HV, 1, C, PACKED
    )
    if (part == 0) & ALL | (part > 0) & (begin < end):
        head = hv // (HV // H)
        features = tl.arange(0, BLOCK_K)
        columns = tl.arange(0, BLOCK_V)
        i = tl.arange(0, C)
        q += batch * stride_qb + first * stride_qt + head * stride_qh
        k += batch * stride_kb + first * stride_kt + head * stride_kh
        do += batch * stride_ob + first * stride_ot + hv * stride_oh
        inverse += ((batch * HV + hv) * slots + slot) * C * C
        numbers += ((batch * HV + hv) * slots + slot) * NUMBERS * C
        dS = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
        if HAS_END:
            if more == 0:
                d_end += n * stride_sn + hv * stride_sh
                dS = state_of(d_end, stride_sv, stride_sk, columns, features, V, K).to(tl.float32)
        for step in tl.range(0, end - begin, num_stages=STAGES, disable_licm=True):
            chunk = end - 1 - step
            kt = rows_of(k, stride_kt, chunk, tokens, features, C, K, BLOCK_K)
            qt = rows_of(q, stride_qt, chunk, tokens, features, C, K, BLOCK_K)
            dot = rows_of(do, stride_ot, chunk, tokens, columns, C, V, BLOCK_V)
            A = tl.load(inverse + wide(chunk) * C * C + i[:, None] * C + i[None, :])
            G, seg, beta, gamma, w, gamma_all = gates_kept(numbers, chunk, tokens, C)
            ku = tl.full([C], 1.0, tl.float32)
            qu = tl.full([C], 1.0, tl.float32)
            if NORM:
                ku = tl.load(numbers + wide(chunk) * NUMBERS * C + 3 * C + i)
                qu = tl.load(numbers + wide(chunk) * NUMBERS * C + 4 * C + i)
            reading = tl.where(i < tokens - chunk * C, scale * qu, 0.0)
            P = tl.dot(kt, tl.trans(qt), input_precision=PRECISION) * retained_later(G, seg, C)
            P = P * reading[None, :]
            d_write = w[None, :] * tl.dot(dS.to(kt.dtype), tl.trans(kt), input_precision=PRECISION)
            d_write = tl.dot(tl.trans(dot), tl.trans(P).to(kt.dtype), d_write, input_precision=PRECISION)
            dR = tl.dot(d_write.to(kt.dtype), A, input_precision=PRECISION)
            erased = ((-beta * gamma * ku)[None, :] * dR).to(kt.dtype)
            read = ((gamma * reading)[:, None] * dot.to(tl.float32)).to(kt.dtype)
            dS = tl.dot(tl.trans(read), qt, gamma_all * dS, input_precision=PRECISION)
            dS = tl.dot(erased, kt, dS, input_precision=PRECISION)
        store_state(added + place * V * K, K, 1, columns, features, dS, V, K)


@triton.jit(do_not_specialize=["T", "slots", "places", "sequences", "length", "segments"])
def narrow_backward_kernel(
    q,
    k,
    v,
    do,
    inverse,
    numbers,
    states,
    d_end,  # [N, HV, K, V], gradient of the end state
    carried,  # [B, HV, places, V, K] fp32, gradient of the state after each segment but the last
    dq,  # [B, T, HV, K]
    dk,  # [B, T, HV, K]
    dv,  # [B, T, HV, V]
    dg,  # [B, T, HV] fp32
    d_beta,  # [B, T, HV] fp32
    d_start,  # [N, HV, K, V] fp32
    cu_seqlens,
    scale,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_ob,
    stride_ot,
    stride_oh,
    stride_sn,
    stride_sh,
    stride_sk,
    stride_sv,
    T,
    slots,
    places,
    sequences,
    length,
    segments,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    PACKED: tl.constexpr,
    NORM: tl.constexpr,
    HAS_END: tl.constexpr,
    KEEP_START: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    _, hv, n, batch, first, tokens, slot, part, place, begin, end, more = piece(
        cu_seqlens, T, places, sequences, length, segments, HV, 1, C, PACKED
    )
    head = hv // (HV // H)
    out = (batch * T + first) * HV + hv
    features = tl.arange(0, BLOCK_K)
    columns = tl.arange(0, BLOCK_V)
    i = tl.arange(0, C)
    q += batch * stride_qb + first * stride_qt + head * stride_qh
    k += batch * stride_kb + first * stride_kt + head * stride_kh
    v += batch * stride_vb + first * stride_vt + hv * stride_vh
    do += batch * stride_ob + first * stride_ot + hv * stride_oh
    inverse += ((batch * HV + hv) * slots + slot) * C * C
    numbers += ((batch * HV + hv) * slots + slot) * NUMBERS * C
    states += ((batch * HV + hv) * slots + slot) * K * V
    dS = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    if HAS_END:
        if more == 0:
            d_end += n * stride_sn + hv * stride_sh
            dS = state_of(d_end, stride_sv, stride_sk, columns, features, V, K).to(tl.float32)
    if more:
        dS = state_of(carried + place * V * K, K, 1, columns, features, V, K)
    for step in tl.range(0, end - begin, num_stages=STAGES, disable_licm=True):
        chunk = end - 1 - step
        kt = rows_of(k, stride_kt, chunk, tokens, features, C, K, BLOCK_K)
        qt = rows_of(q, stride_qt, chunk, tokens, features, C, K, BLOCK_K)
        vt = rows_of(v, stride_vt, chunk, tokens, columns, C, V, BLOCK_V)
        dot = rows_of(do, stride_ot, chunk, tokens, columns, C, V, BLOCK_V)
        A = tl.load(inverse + wide(chunk) * C * C + i[:, None] * C + i[None, :])
        # A load of its own: of one load's tile and its transpose as left operands none would be fetched ahead.
        A_t = tl.load(inverse + wide(chunk) * C * C + i[None, :] * C + i[:, None])
        S = state_of(states + wide(chunk) * V * K, K, 1, columns, features, V, K)
        G, seg, beta, gamma, w, gamma_all = gates_kept(numbers, chunk, tokens, C)
        ku = tl.full([C], 1.0, tl.float32)
        qu = tl.full([C], 1.0, tl.float32)
        if NORM:
            ku = tl.load(numbers + wide(chunk) * NUMBERS * C + 3 * C + i)
            qu = tl.load(numbers + wide(chunk) * NUMBERS * C + 4 * C + i)
        reading = tl.where(i < tokens - chunk * C, scale * qu, 0.0)
        left = tokens - chunk * C
        inside = i < left

        # What was written.
        kS = tl.dot(kt, tl.trans(S), input_precision=PRECISION)
        error = beta[:, None] * (vt.to(tl.float32) - (gamma * ku)[:, None] * kS)
        write = tl.dot(A, right_operand(error, kt.dtype), input_precision=PRECISION)
        write_low = write.to(kt.dtype)
        written = tl.trans(write).to(kt.dtype)

        # The chain: what reaches the writes, through the read-outs and through the later state.
        seen = (i[:, None] >= i[None, :]) & (seg[:, None] == seg[None, :])
        Gamma = tl.where(seen, tl.exp2(G[:, None] - G[None, :]), 0.0)
        P = tl.dot(qt, tl.trans(kt), input_precision=PRECISION) * Gamma * reading[:, None]
        dS_low = tl.trans(dS).to(kt.dtype)
        through = w[:, None] * tl.dot(kt, dS_low, input_precision=PRECISION)
        to_end = tl.sum(write * through, 1)
        d_write = tl.dot(tl.trans(P.to(kt.dtype)), dot, through, input_precision=PRECISION)
        dR = tl.dot(A_t, right_operand(d_write, kt.dtype), input_precision=PRECISION)
        erase_sum = (gamma * ku) * tl.sum(dR * kS, 1)
        d_strength = tl.sum(dR * vt.to(tl.float32), 1) - erase_sum
        erase_sum *= beta
        dR_low = dR.to(kt.dtype)
        dR = beta[:, None] * dR
        erased = ((-gamma * ku)[:, None] * dR).to(kt.dtype)
        store_tile(dv + out * V, HV * V, chunk, tokens, columns, dR, C, V, BLOCK_V)

        # Tiles are read again after each store: held from the start they would fill the registers.
        kt = rows_of(k, stride_kt, chunk, tokens, features, C, K, BLOCK_K)
        qt = rows_of(q, stride_qt, chunk, tokens, features, C, K, BLOCK_K)
        dot = rows_of(do, stride_ot, chunk, tokens, columns, C, V, BLOCK_V)
        S = state_of(states + wide(chunk) * V * K, K, 1, columns, features, V, K)
        d_key = w[:, None] * tl.dot(write_low, tl.trans(dS_low), input_precision=PRECISION)
        d_key = tl.dot(erased, S, d_key, input_precision=PRECISION)
        dL = tl.dot(dR_low, written, input_precision=PRECISION)
        dL = tl.where(i[:, None] > i[None, :], -dL * Gamma * ku[:, None], 0.0)
        # Row and column sums of one fp32 matrix: a rounded copy for one of them makes dg wrong under strong decay.
        Y = dL * tl.dot(kt, tl.trans(kt), input_precision=PRECISION)
        write_pairs = tl.sum(Y, 1)
        low = (dL * beta[:, None]).to(kt.dtype)
        d_key = tl.dot(low, kt, d_key, input_precision=PRECISION)
        d_key = tl.dot(tl.trans(low), kt, d_key, input_precision=PRECISION)
        dP = tl.dot(dot, written, input_precision=PRECISION)
        X = dP * P
        read_pairs = tl.sum(X, 1)
        pair_sum = tl.sum(X + beta[:, None] * Y, 0)
        low = (dP * Gamma * reading[:, None]).to(kt.dtype)
        d_key = tl.dot(tl.trans(low), qt, d_key, input_precision=PRECISION)
        d_strength += write_pairs
        write_pairs *= beta
        # d x = u (d - x_unit <x_unit, d>) is d - x <x, d> u^2 here, where d already carries u = 1 / |x|.
        if NORM:
            along_k = to_end - erase_sum + pair_sum + write_pairs
            d_key -= kt.to(tl.float32) * (along_k * ku * ku)[:, None]
        store_tile(dk + out * K, HV * K, chunk, tokens, features, d_key, C, K, BLOCK_K)

        kt = rows_of(k, stride_kt, chunk, tokens, features, C, K, BLOCK_K)
        qt = rows_of(q, stride_qt, chunk, tokens, features, C, K, BLOCK_K)
        dot = rows_of(do, stride_ot, chunk, tokens, columns, C, V, BLOCK_V)
        S = state_of(states + wide(chunk) * V * K, K, 1, columns, features, V, K)
        kept = gamma_all * tl.sum(tl.sum(S.to(tl.float32) * dS, 1), 0)
        read = ((gamma * reading)[:, None] * dot.to(tl.float32)).to(kt.dtype)
        dS = tl.dot(tl.trans(erased), kt, gamma_all * dS, input_precision=PRECISION)
        dS = tl.dot(tl.trans(read), qt, dS, input_precision=PRECISION)
        d_query = tl.dot(read, S, input_precision=PRECISION)
        read_sum = tl.sum(qt.to(tl.float32) * d_query, 1)
        d_query = tl.dot(low, kt, d_query, input_precision=PRECISION)
        if NORM:
            d_query -= qt.to(tl.float32) * ((read_sum + read_pairs) * qu * qu)[:, None]
        store_tile(dq + out * K, HV * K, chunk, tokens, features, d_query, C, K, BLOCK_K)

        dG = read_sum - erase_sum - to_end + read_pairs + write_pairs - pair_sum
        dG += tl.where(i == tl.minimum(left, C) - 1, kept + tl.sum(to_end, 0), 0.0)
        # dg: the sum of dG over the later tokens of the same segment; a reset's own gate does not matter.
        d_gate = tl.sum(tl.where(seen, dG[:, None], 0.0), 0)
        before = tl.load(numbers + wide(chunk) * NUMBERS * C + C + i - 1, mask=i > 0, other=0.0)
        d_gate = tl.where(seg == before, d_gate, 0.0)
        at = out + (wide(chunk * C) + i) * HV
        tl.store(dg + at, d_gate, mask=inside)
        tl.store(d_beta + at, d_strength, mask=inside)
    if KEEP_START:
        if part == 0:
            store_state(d_start + (n * HV + hv) * K * V, 1, V, columns, features, dS, V, K)
