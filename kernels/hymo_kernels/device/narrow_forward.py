"""Gated delta rule for narrow heads, forward: the state carried through the chunks of a segment, read out on the way.

The equations are those of `forward.py`, in transposes; a segment's start is the true one. Where the length of a key
divides what is written, it is part of the inverse.
"""

import triton
import triton.language as tl

from hymo_kernels.device.forward import store_tile, wide
from hymo_kernels.device.narrow_prepare import (
    gates_kept,
    numbers_of,
    piece,
    retained,
    rows_of,
    state_of,
    store_state,
    unit_of,
)


@triton.jit(do_not_specialize=["T", "slots", "places", "sequences", "length", "segments"])
def narrow_forward_kernel(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    v,  # [B, T, HV, V]
    inverse,  # [B, HV, T, C]
    total,  # [B, HV, T]
    segment,  # [B, HV, T]
    strength,  # [B, HV, T]
    k_unit,  # [B, HV, T]
    start_state,  # [N, HV, K, V]
    carried,  # [B, HV, places, V, K] fp32, the state before each segment but the first
    o,  # [B, T, HV, V]
    q_unit,  # [B, HV, T] fp32: 1 / |q|
    states,  # [B, HV, slots, V, K], the state before each chunk
    end_state,  # [N, HV, K, V] fp32
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
    HAS_START: tl.constexpr,
    KEEP_END: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    hv, n, batch, first, tokens, slot, part, place, begin, end, more = piece(
        cu_seqlens, T, places, sequences, length, segments, HV, C, PACKED
    )
    head = hv // (HV // H)
    row = (batch * HV + hv) * T + first
    features = tl.arange(0, BLOCK_K)
    columns = tl.arange(0, BLOCK_V)
    i = tl.arange(0, C)
    q += batch * stride_qb + first * stride_qt + head * stride_qh
    k += batch * stride_kb + first * stride_kt + head * stride_kh
    v += batch * stride_vb + first * stride_vt + hv * stride_vh
    o += ((batch * T + first) * HV + hv) * V
    states += ((batch * HV + hv) * slots + slot) * K * V
    S = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    if HAS_START:
        if part == 0:
            start_state += n * stride_sn + hv * stride_sh
            S = state_of(start_state, stride_sv, stride_sk, columns, features, V, K).to(tl.float32)
    if (part > 0) & (begin < end):
        S = state_of(carried + place * V * K, K, 1, columns, features, V, K)
    for chunk in tl.range(begin, end, num_stages=STAGES, disable_licm=True):
        kt = rows_of(k, stride_kt, chunk, tokens, features, C, K, BLOCK_K)
        vt = tl.trans(rows_of(v, stride_vt, chunk, tokens, columns, C, V, BLOCK_V))
        qt = rows_of(q, stride_qt, chunk, tokens, features, C, K, BLOCK_K)
        A = rows_of(inverse + row * C, C, chunk, tokens, i, C, C, C)
        G, seg, beta, gamma, w, gamma_all = gates_kept(total + row, segment + row, strength + row, chunk, tokens, C)
        ku = tl.full([C], 1.0, tl.float32)
        qu = tl.full([C], scale, tl.float32)
        if NORM:
            ku = numbers_of(k_unit + row, chunk, tokens, C)
            qu = unit_of(qt)
            tl.store(q_unit + row + wide(chunk * C) + i, qu, mask=i < tokens - chunk * C)
            qu = scale * qu
        S_low = S.to(kt.dtype)
        store_state(states + wide(chunk) * V * K, K, 1, columns, features, S_low, V, K)
        R = beta[None, :] * vt.to(tl.float32)
        R -= (beta * gamma * ku)[None, :] * tl.dot(S_low, tl.trans(kt), input_precision=PRECISION)
        write = tl.dot(R.to(kt.dtype), tl.trans(A), input_precision=PRECISION)
        S = tl.dot((w[None, :] * write).to(kt.dtype), kt, gamma_all * S, input_precision=PRECISION)
        P = tl.dot(qt, tl.trans(kt), input_precision=PRECISION) * retained(G, seg, C) * qu[:, None]
        read = (gamma * qu)[None, :] * tl.dot(S_low, tl.trans(qt), input_precision=PRECISION)
        read = tl.dot(write.to(kt.dtype), tl.trans(P).to(kt.dtype), read, input_precision=PRECISION)
        store_tile(o, HV * V, chunk, tokens, columns, tl.trans(read.to(kt.dtype)), C, V, BLOCK_V)
    if KEEP_END:
        if ((begin < end) | (part == 0)) & (more == 0):
            store_state(end_state + (n * HV + hv) * K * V, 1, V, columns, features, S, V, K)
