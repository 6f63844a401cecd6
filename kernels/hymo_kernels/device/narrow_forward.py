"""Gated delta rule for narrow heads, forward: the state carried through the chunks of a segment, read out on the way.

The equations are those of `forward.py`; states and what is written are transposes, read-outs are not: so each product
has as its right operand what is loaded, or the transpose of what was computed. A segment's start is the true one. Where
the length of a key divides what is written, it is part of the inverse.
"""

import triton
import triton.language as tl

from hymo_kernels.device.forward import store_tile, tile_of, wide
from hymo_kernels.device.narrow_prepare import (
    NUMBERS,
    gates_kept,
    piece,
    retained,
    state_of,
    store_state,
    unit_of,
)


@triton.jit(do_not_specialize=["T", "slots", "places", "sequences", "length", "segments"])
def narrow_forward_kernel(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    v,  # [B, T, HV, V]
    inverse,  # [B, HV, slots, C, C]
    numbers,  # [B, HV, slots, NUMBERS, C]
    start_state,  # [N, HV, K, V]
    carried,  # [B, HV, places, V, K] fp32, the state before each segment but the first
    o,  # [B, T, HV, V]
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
    READ_OUT: tl.constexpr,
    KEEP_STATES: tl.constexpr,
    KEEP_END: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    tile, hv, n, batch, first, tokens, slot, part, place, begin, end, more = piece(
        cu_seqlens, T, places, sequences, length, segments, HV, (V + BLOCK_V - 1) // BLOCK_V, C, PACKED
    )
    head = hv // (HV // H)
    features = tl.arange(0, BLOCK_K)
    columns = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    i = tl.arange(0, C)
    same = i[:, None] == i[None, :]
    identity = tl.where(columns[:, None] == columns[None, :], 1.0, 0.0).to(v.dtype.element_ty)
    q += batch * stride_qb + first * stride_qt + head * stride_qh
    k += batch * stride_kb + first * stride_kt + head * stride_kh
    v += batch * stride_vb + first * stride_vt + hv * stride_vh
    o += ((batch * T + first) * HV + hv) * V
    inverse += ((batch * HV + hv) * slots + slot) * C * C
    numbers += ((batch * HV + hv) * slots + slot) * NUMBERS * C
    states += ((batch * HV + hv) * slots + slot) * K * V
    S = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    if HAS_START:
        if part == 0:
            start_state += n * stride_sn + hv * stride_sh
            S = state_of(start_state, stride_sv, stride_sk, columns, features, V, K).to(tl.float32)
    if (part > 0) & (begin < end):
        S = state_of(carried + place * V * K, K, 1, columns, features, V, K)
    for chunk in tl.range(begin, end, num_stages=STAGES, disable_licm=True):
        kt = tile_of(k, stride_kt, chunk, tokens, features, C, K, BLOCK_K)
        vt = tile_of(v, stride_vt, chunk, tokens, columns, C, V, BLOCK_V)
        A = tl.load(inverse + wide(chunk) * C * C + i[:, None] * C + i[None, :])
        G, seg, beta, gamma, w, gamma_all = gates_kept(numbers, chunk, tokens, C)
        erasing = -beta * gamma
        if NORM:
            erasing *= tl.load(numbers + wide(chunk) * NUMBERS * C + 3 * C + i)
        S_low = S.to(kt.dtype)
        if KEEP_STATES:
            store_state(states + wide(chunk) * V * K, K, 1, columns, features, S_low, V, K)
        R = beta[None, :] * tl.dot(identity, tl.trans(vt), input_precision=PRECISION)
        R += erasing[None, :] * tl.dot(S_low, tl.trans(kt), input_precision=PRECISION)
        write = tl.dot(R.to(kt.dtype), tl.trans(A), input_precision=PRECISION)
        if READ_OUT:
            qt = tile_of(q, stride_qt, chunk, tokens, features, C, K, BLOCK_K)
            qu = tl.full([C], scale, tl.float32)
            if NORM:
                squares = tl.dot(qt, tl.trans(qt), input_precision=PRECISION)
                qu = unit_of(tl.where(same, squares, 0.0))
                tl.store(numbers + wide(chunk) * NUMBERS * C + 4 * C + i, qu)
                qu = scale * qu
            P = tl.dot(qt, tl.trans(kt), input_precision=PRECISION) * retained(G, seg, C) * qu[:, None]
            read = (gamma * qu)[:, None] * tl.dot(qt, tl.trans(S).to(kt.dtype), input_precision=PRECISION)
            read = tl.dot(P.to(kt.dtype), tl.trans(write).to(kt.dtype), read, input_precision=PRECISION)
            store_tile(o, HV * V, chunk, tokens, columns, read, C, V, BLOCK_V)
        S = tl.dot((w[None, :] * write).to(kt.dtype), kt, gamma_all * S, input_precision=PRECISION)
    if KEEP_END:
        if ((begin < end) | (part == 0)) & (more == 0):
            store_state(end_state + (n * HV + hv) * K * V, 1, V, columns, features, S, V, K)
