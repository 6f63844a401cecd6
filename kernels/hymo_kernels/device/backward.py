"""Gated delta rule, backward: a chain that carries the state's gradient back, then every chunk by itself.

    dV' = P^T do + w k dS,   dR = A^T dV',   dS <- gamma_C dS + scale q^T (gamma do) - k^T (beta gamma dR)

    dP = tril(do V'^T),   dL = -tril(dR V'^T, -1),   dv = beta dR,   M = dP * Gamma,   W = beta dL * Gamma
    dq = scale (gamma do S^T + M k),   dk = scale M^T q + w V' dS^T - beta gamma dR S^T + (W + W^T) k

dg and dbeta are sums over the same products. Products are formed in the orientation in which they are used: Triton 3.4
to 3.7.0 miscompiles the transpose of a dot's result as an operand of a dot on Hopper.
"""

import triton
import triton.language as tl

from hymo_kernels.device.forward import (
    chunks_to_forget,
    gates,
    load_state,
    no_state,
    store_state,
    store_tile,
    tile_of,
    vector_of,
    wide,
)
from hymo_kernels.device.places import place_of_slot, sequence


@triton.jit(do_not_specialize=["T", "slots", "sequences", "segment_chunks", "segments"])
def chain_kernel(
    q,
    k,
    do,  # [B, T, HV, V]
    inverse,
    attention,
    total,
    segment,
    strength,
    q_unit,
    k_unit,
    forget,
    d_end,  # [N, HV, K, V], gradient of the end state
    dR,  # [B, T, HV, V]
    d_states,  # [B, HV, slots, K, V], gradient of the state after each chunk
    d_start,  # [N, HV, K, V] fp32, gradient of the start state
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
    stride_rb,
    stride_rt,
    stride_rh,
    T,
    slots,
    sequences,
    segment_chunks,
    segments,
    threshold,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_END: tl.constexpr,
    KEEP_START: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    tiles: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    lean: tl.constexpr = (K > BLOCK_K) or (k.dtype.element_ty == tl.float32)
    program = tl.program_id(0).to(tl.int64)
    tile = (program % tiles).to(tl.int32)
    hv = program // tiles % HV
    part = (program // (tiles * HV) % segments).to(tl.int32)
    n = program // (tiles * HV * segments)
    head = hv // (HV // H)
    batch, first, length, slot = sequence(n, cu_seqlens, T, sequences, C, PACKED)
    chunks = tl.cdiv(length, C)
    begin = tl.minimum(part * segment_chunks, chunks)
    end = tl.minimum(begin + segment_chunks, chunks)
    if (begin < end) | (part == 0):
        row = (batch * HV + hv) * T + first
        unit_row = (batch * H + head) * T + first
        place = (batch * HV + hv) * slots + slot
        columns = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        q += batch * stride_qb + first * stride_qt + head * stride_qh
        k += batch * stride_kb + first * stride_kt + head * stride_kh
        do += batch * stride_ob + first * stride_ot + hv * stride_oh
        dR += batch * stride_rb + first * stride_rt + hv * stride_rh
        inverse += row * C
        attention += row * C
        total += row
        segment += row
        strength += row
        q_unit += unit_row
        k_unit += unit_row
        d_states += place * K * V

        late = chunks_to_forget(forget + place, end, threshold, BACK=False, chunks=chunks)
        dS = no_state(K, BLOCK_K, BLOCK_V)
        if HAS_END:
            if end + late == chunks:
                at = d_end + n * stride_sn + hv * stride_sh
                dS = load_state(at, stride_sk, stride_sv, columns, K, V, BLOCK_K)
        for step in tl.range(0, late, num_stages=STAGES, disable_licm=lean):
            dS, _ = _retreat(
                dS,
                end + late - 1 - step,
                q,
                k,
                do,
                inverse,
                attention,
                total,
                segment,
                strength,
                q_unit,
                k_unit,
                scale,
                stride_qt,
                stride_kt,
                stride_ot,
                length,
                columns,
                K,
                V,
                BLOCK_K,
                BLOCK_V,
                C,
                PRECISION,
            )
        for step in tl.range(0, end - begin, num_stages=STAGES, disable_licm=lean):
            chunk = end - 1 - step
            store_state(d_states + wide(chunk) * K * V, dS, columns, K, V, BLOCK_K)
            dS, d_write = _retreat(
                dS,
                chunk,
                q,
                k,
                do,
                inverse,
                attention,
                total,
                segment,
                strength,
                q_unit,
                k_unit,
                scale,
                stride_qt,
                stride_kt,
                stride_ot,
                length,
                columns,
                K,
                V,
                BLOCK_K,
                BLOCK_V,
                C,
                PRECISION,
            )
            store_tile(dR, stride_rt, chunk, length, columns, d_write, C, V, BLOCK_V)
        if KEEP_START:
            if begin == 0:
                store_state(d_start + (n * HV + hv) * K * V, dS, columns, K, V, BLOCK_K)


@triton.jit
def _retreat(
    dS,
    chunk,
    q,
    k,
    do,
    inverse,
    attention,
    total,
    segment,
    strength,
    q_unit,
    k_unit,
    scale,
    stride_qt,
    stride_kt,
    stride_ot,
    length,
    columns,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of the state before one chunk from that after it, and dR."""
    pieces: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    queries = ()
    keys = ()
    for piece in tl.static_range(pieces):
        features = piece * BLOCK_K + tl.arange(0, BLOCK_K)
        queries = queries + (tile_of(q, stride_qt, chunk, length, features, C, K, BLOCK_K),)
        keys = keys + (tile_of(k, stride_kt, chunk, length, features, C, K, BLOCK_K),)
    dot = tile_of(do, stride_ot, chunk, length, columns, C, V, BLOCK_V)
    A = tile_of(inverse, C, chunk, length, tl.arange(0, C), C, C, C)
    P = tile_of(attention, C, chunk, length, tl.arange(0, C), C, C, C)
    beta, gamma, w, gamma_all = gates(total, segment, strength, chunk, length, C)
    qu = scale * vector_of(q_unit, chunk, length, C)
    ku = vector_of(k_unit, chunk, length, C)
    kdS = tl.zeros([C, BLOCK_V], tl.float32)
    for piece in tl.static_range(pieces):
        kdS = tl.dot(keys[piece], dS[piece].to(dot.dtype), kdS, input_precision=PRECISION)
    d_write = tl.dot(tl.trans(P), dot, (w * ku)[:, None] * kdS, input_precision=PRECISION)
    dR = tl.dot(tl.trans(A), d_write.to(dot.dtype), input_precision=PRECISION)
    read = ((gamma * qu)[:, None] * dot.to(tl.float32)).to(dot.dtype)
    erased = ((-beta * gamma * ku)[:, None] * dR).to(dot.dtype)
    before = ()
    for piece in tl.static_range(pieces):
        part = tl.dot(tl.trans(queries[piece]), read, gamma_all * dS[piece], input_precision=PRECISION)
        before = before + (tl.dot(tl.trans(keys[piece]), erased, part, input_precision=PRECISION),)
    return before, dR


@triton.jit(do_not_specialize=["T", "slots", "sequences"])
def chunk_kernel(
    q,
    k,
    v,
    do,
    inverse,
    attention,
    total,
    segment,
    strength,
    q_unit,
    k_unit,
    states,
    d_states,
    dq,  # [B, T, H, K]
    dk,  # [B, T, H, K]
    dv,  # [B, T, HV, V]: dR before, dv after
    dg,  # [B, T, HV] fp32
    d_beta,  # [B, T, HV] fp32
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
    stride_dqb,
    stride_dqt,
    stride_dqh,
    stride_dvb,
    stride_dvt,
    stride_dvh,
    T,
    slots,
    sequences,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    PACKED: tl.constexpr,
    NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    head = program % H
    batch, slot, first, chunk, length, live = place_of_slot(program // H, cu_seqlens, T, slots, sequences, C, PACKED)
    if live:
        unit_row = (batch * H + head) * T + first
        i = tl.arange(0, C)
        t = chunk * C + i
        inside = t < length
        features = tl.arange(0, BLOCK_K)
        q += batch * stride_qb + first * stride_qt + head * stride_qh
        k += batch * stride_kb + first * stride_kt + head * stride_kh
        dq += batch * stride_dqb + first * stride_dqt + head * stride_dqh
        dk += batch * stride_dqb + first * stride_dqt + head * stride_dqh
        kt = tile_of(k, stride_kt, chunk, length, features, C, K, BLOCK_K)
        qt = tile_of(q, stride_qt, chunk, length, features, C, K, BLOCK_K)
        qu = scale * vector_of(q_unit + unit_row, chunk, length, C)
        ku = vector_of(k_unit + unit_row, chunk, length, C)
        # dq comes out transposed, [K, C]: then only transposes of what was loaded are operands.
        dq_turned = tl.zeros([BLOCK_K, C], tl.float32)
        dk_turned = tl.zeros([BLOCK_K, C], tl.float32)
        dk_rows = tl.zeros([C, BLOCK_K], tl.float32)

        for member in tl.static_range(HV // H):
            hv = head * (HV // H) + member
            row = (batch * HV + hv) * T + first
            place = (batch * HV + hv) * slots + slot
            beta, gamma, w, gamma_all = gates(total + row, segment + row, strength + row, chunk, length, C)
            values = v + batch * stride_vb + first * stride_vt + hv * stride_vh
            reads = do + batch * stride_ob + first * stride_ot + hv * stride_oh
            rows = dv + batch * stride_dvb + first * stride_dvt + hv * stride_dvh
            memory = states + place * K * V
            d_memory = d_states + place * K * V
            dP_t = tl.zeros([C, C], tl.float32)
            dL_t = tl.zeros([C, C], tl.float32)
            d_strength = tl.zeros([C], tl.float32)
            dG = tl.zeros([C], tl.float32)
            to_end = tl.zeros([C], tl.float32)
            kept = tl.zeros([BLOCK_K], tl.float32)  # <dS, S>
            for tile in tl.range((V + BLOCK_V - 1) // BLOCK_V, num_stages=STAGES):
                columns = tile * BLOCK_V + tl.arange(0, BLOCK_V)
                S = state_tile(memory, features, columns, K, V)
                dS = state_tile(d_memory, features, columns, K, V)
                vt = tile_of(values, stride_vt, chunk, length, columns, C, V, BLOCK_V)
                dot = tile_of(reads, stride_ot, chunk, length, columns, C, V, BLOCK_V)
                dR = tile_of(rows, stride_dvt, chunk, length, columns, C, V, BLOCK_V)
                A = tile_of(inverse + row * C, C, chunk, length, i, C, C, C)
                kS = (gamma * ku)[:, None] * tl.dot(kt, S, input_precision=PRECISION)
                error = vt.to(tl.float32) - kS
                dR_wide = dR.to(tl.float32)
                d_strength += tl.sum(dR_wide * error, 1)
                dG -= beta * tl.sum(dR_wide * kS, 1)
                write = tl.dot(A, (beta[:, None] * error).to(kt.dtype), input_precision=PRECISION)
                to_end += w * ku * tl.sum(write * tl.dot(kt, dS, input_precision=PRECISION), 1)
                kept += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
                dP_t = tl.dot(write.to(kt.dtype), tl.trans(dot), dP_t, input_precision=PRECISION)
                dL_t = tl.dot(write.to(kt.dtype), tl.trans(dR), dL_t, input_precision=PRECISION)
                weighted = ((w * ku)[:, None] * write).to(kt.dtype)
                dk_rows = tl.dot(weighted, tl.trans(dS), dk_rows, input_precision=PRECISION)
                erased = ((-beta * gamma * ku)[:, None] * dR_wide).to(kt.dtype)
                dk_rows = tl.dot(erased, tl.trans(S), dk_rows, input_precision=PRECISION)
                store_tile(rows, stride_dvt, chunk, length, columns, beta[:, None] * dR_wide, C, V, BLOCK_V)

            # What is left at token i of what token j wrote, [j, i].
            G = vector_of(total + row, chunk, length, C)
            seg = tl.load(segment + row + t, mask=inside, other=127).to(tl.int32)
            later = (i[:, None] <= i[None, :]) & (seg[:, None] == seg[None, :])
            Gamma_t = tl.where(later, tl.exp(G[None, :] - G[:, None]), 0.0)
            # Row and column sums of one fp32 matrix: a rounded copy for one of them makes dg wrong under strong decay.
            dP_t = dP_t * Gamma_t * ku[:, None] * qu[None, :]
            M = dP_t.to(kt.dtype)
            X = dP_t * tl.dot(kt, tl.trans(qt), input_precision=PRECISION)
            dG += tl.sum(X, 0) - tl.sum(X, 1)
            dk_rows = tl.dot(M, qt, dk_rows, input_precision=PRECISION)
            dL_t = -tl.where(i[:, None] < i[None, :], dL_t * Gamma_t, 0.0) * ku[:, None] * ku[None, :]
            X = dL_t * tl.dot(kt, tl.trans(kt), input_precision=PRECISION)
            d_strength += tl.sum(X, 0)
            X *= beta[None, :]
            dG += tl.sum(X, 0) - tl.sum(X, 1)
            W = (dL_t * beta[None, :]).to(kt.dtype)
            dk_rows = tl.dot(W, kt, dk_rows, input_precision=PRECISION)
            dk_turned = tl.dot(tl.trans(kt), W, dk_turned, input_precision=PRECISION)

            for tile in tl.range((V + BLOCK_V - 1) // BLOCK_V, num_stages=STAGES):
                columns = tile * BLOCK_V + tl.arange(0, BLOCK_V)
                S = state_tile(memory, features, columns, K, V)
                dot = tile_of(reads, stride_ot, chunk, length, columns, C, V, BLOCK_V)
                read = (gamma * qu)[:, None] * dot.to(tl.float32)
                dG += tl.sum(read * tl.dot(qt, S, input_precision=PRECISION), 1)
                dq_turned = tl.dot(S, tl.trans(read.to(kt.dtype)), dq_turned, input_precision=PRECISION)
            dq_turned = tl.dot(tl.trans(kt), M, dq_turned, input_precision=PRECISION)

            dG -= to_end
            final = tl.minimum(chunk * C + C, length) - 1
            dG += tl.where(t == final, gamma_all * tl.sum(kept, 0) + tl.sum(to_end, 0), 0.0)
            # dg: the sum of dG over the later tokens of the same segment; a reset's own gate does not matter.
            d_gate = tl.sum(tl.where(later & inside[None, :], dG[None, :], 0.0), 1)
            before = tl.load(segment + row + t - 1, mask=inside & (i > 0), other=0).to(tl.int32)
            d_gate = tl.where(seg == before, d_gate, 0.0)
            out = (batch * T + first + t) * HV + hv
            tl.store(dg + out, d_gate, mask=inside)
            tl.store(d_beta + out, d_strength, mask=inside)

        # d x = u (d - x_unit <x_unit, d>) is d - x <x, d> u^2 here, where d already carries u = 1 / |x|.
        if NORM:
            unit = qu / scale
            # Read again: kept in registers all along, the tile would not fit.
            q_turned = tl.trans(tile_of(q, stride_qt, chunk, length, features, C, K, BLOCK_K)).to(tl.float32)
            dq_turned -= q_turned * (tl.sum(q_turned * dq_turned, 0) * unit * unit)[None, :]
        in_turned = inside[None, :]
        if K % BLOCK_K != 0:
            in_turned = in_turned & (features < K)[:, None]
        at = wide(chunk * C) * stride_dqt + (i[None, :] * stride_dqt + features[:, None])
        tl.store(dq + at, dq_turned.to(dq.dtype.element_ty), mask=in_turned)
        dk_rows += tl.trans(dk_turned)
        if NORM:
            k_wide = tile_of(k, stride_kt, chunk, length, features, C, K, BLOCK_K).to(tl.float32)
            dk_rows -= k_wide * (tl.sum(k_wide * dk_rows, 1) * ku * ku)[:, None]
        store_tile(dk, stride_dqt, chunk, length, features, dk_rows, C, K, BLOCK_K)


@triton.jit
def state_tile(state, features, columns, K: tl.constexpr, V: tl.constexpr):
    """Some columns of a state."""
    mask = (features < K)[:, None] & (columns < V)[None, :]
    return tl.load(state + (features[:, None] * V + columns[None, :]), mask=mask, other=0.0)
