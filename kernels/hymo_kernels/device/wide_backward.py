"""Gated delta rule, backward of one chunk in pieces of its key features: for keys or numbers too wide for `backward`.

The formulas are those of `backward.py`. Products over key features come first, as sums over pieces; what they give
(V', dv, M and W) is then all that a piece of dq and dk needs, <q, dq> and <k, dk> included, by which the gradient of
a norm is formed. A program serves one value head: those of a key head are added afterwards.
"""

import triton
import triton.language as tl

from hymo_kernels.device.backward import state_tile
from hymo_kernels.device.forward import gates, store_tile, tile_of, vector_of
from hymo_kernels.device.places import place_of_slot


@triton.jit(do_not_specialize=["T", "slots", "sequences"])
def wide_chunk_kernel(
    q,  # [B, T, H, K]
    k,
    v,  # [B, T, HV, V]
    do,
    inverse,  # [B, HV, T, C]
    total,  # [B, HV, T]
    segment,
    strength,
    q_unit,  # [B, H, T]
    k_unit,
    states,  # [B, HV, slots, K, V]
    d_states,
    dq,  # [B, T, HV, K]
    dk,
    dv,  # [B, T, HV, V]: dR before, dv after
    dg,  # [B, T, HV] fp32
    d_beta,
    written,  # [B, T, HV, V]: V'
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
    hv = program % HV
    head = hv // (HV // H)
    batch, slot, first, chunk, length, live = place_of_slot(program // HV, cu_seqlens, T, slots, sequences, C, PACKED)
    if live:
        unit_row = (batch * H + head) * T + first
        row = (batch * HV + hv) * T + first
        place = (batch * HV + hv) * slots + slot
        token = (batch * T + first) * HV + hv
        i = tl.arange(0, C)
        t = chunk * C + i
        inside = t < length
        q += batch * stride_qb + first * stride_qt + head * stride_qh
        k += batch * stride_kb + first * stride_kt + head * stride_kh
        v += batch * stride_vb + first * stride_vt + hv * stride_vh
        do += batch * stride_ob + first * stride_ot + hv * stride_oh
        dq += token * K
        dk += token * K
        dv += token * V
        written += token * V
        states += place * K * V
        d_states += place * K * V
        qu = scale * vector_of(q_unit + unit_row, chunk, length, C)
        ku = vector_of(k_unit + unit_row, chunk, length, C)
        beta, gamma, w, gamma_all = gates(total + row, segment + row, strength + row, chunk, length, C)

        dP_t = tl.zeros([C, C], tl.float32)
        dL_t = tl.zeros([C, C], tl.float32)
        d_strength = tl.zeros([C], tl.float32)
        erasing = tl.zeros([C], tl.float32)  # of <k, dk>, what comes through the state before; and so on
        writing = tl.zeros([C], tl.float32)
        reading = tl.zeros([C], tl.float32)
        kept = tl.zeros([BLOCK_K], tl.float32)  # <dS, S>
        for tile in tl.range((V + BLOCK_V - 1) // BLOCK_V, num_stages=STAGES, disable_licm=True):
            columns = tile * BLOCK_V + tl.arange(0, BLOCK_V)
            kS = tl.zeros([C, BLOCK_V], tl.float32)
            kdS = tl.zeros([C, BLOCK_V], tl.float32)
            qS = tl.zeros([C, BLOCK_V], tl.float32)
            for piece in tl.range((K + BLOCK_K - 1) // BLOCK_K, num_stages=STAGES, disable_licm=True):
                features = piece * BLOCK_K + tl.arange(0, BLOCK_K)
                kt = tile_of(k, stride_kt, chunk, length, features, C, K, BLOCK_K)
                qt = tile_of(q, stride_qt, chunk, length, features, C, K, BLOCK_K)
                S = state_tile(states, features, columns, K, V)
                dS = state_tile(d_states, features, columns, K, V)
                kS = tl.dot(kt, S, kS, input_precision=PRECISION)
                kdS = tl.dot(kt, dS, kdS, input_precision=PRECISION)
                qS = tl.dot(qt, S, qS, input_precision=PRECISION)
                kept += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
            vt = tile_of(v, stride_vt, chunk, length, columns, C, V, BLOCK_V)
            dot = tile_of(do, stride_ot, chunk, length, columns, C, V, BLOCK_V)
            dR = tile_of(dv, HV * V, chunk, length, columns, C, V, BLOCK_V)
            A = tile_of(inverse + row * C, C, chunk, length, i, C, C, C)
            kS = (gamma * ku)[:, None] * kS
            error = vt.to(tl.float32) - kS
            dR_wide = dR.to(tl.float32)
            d_strength += tl.sum(dR_wide * error, 1)
            erasing += beta * tl.sum(dR_wide * kS, 1)
            write = tl.dot(A, (beta[:, None] * error).to(vt.dtype), input_precision=PRECISION)
            writing += w * ku * tl.sum(write * kdS, 1)
            reading += gamma * qu * tl.sum(dot.to(tl.float32) * qS, 1)
            dP_t = tl.dot(write.to(vt.dtype), tl.trans(dot), dP_t, input_precision=PRECISION)
            dL_t = tl.dot(write.to(vt.dtype), tl.trans(dR), dL_t, input_precision=PRECISION)
            store_tile(written, HV * V, chunk, length, columns, write, C, V, BLOCK_V)
            store_tile(dv, HV * V, chunk, length, columns, beta[:, None] * dR_wide, C, V, BLOCK_V)

        # Products over key features, [j, i].
        kq = tl.zeros([C, C], tl.float32)
        kk = tl.zeros([C, C], tl.float32)
        for piece in tl.range((K + BLOCK_K - 1) // BLOCK_K, num_stages=STAGES, disable_licm=True):
            features = piece * BLOCK_K + tl.arange(0, BLOCK_K)
            kt = tile_of(k, stride_kt, chunk, length, features, C, K, BLOCK_K)
            qt = tile_of(q, stride_qt, chunk, length, features, C, K, BLOCK_K)
            kq = tl.dot(kt, tl.trans(qt), kq, input_precision=PRECISION)
            kk = tl.dot(kt, tl.trans(kt), kk, input_precision=PRECISION)

        # What is left at token i of what token j wrote, [j, i].
        G = vector_of(total + row, chunk, length, C)
        seg = tl.load(segment + row + t, mask=inside, other=127).to(tl.int32)
        later = (i[:, None] <= i[None, :]) & (seg[:, None] == seg[None, :])
        Gamma_t = tl.where(later, tl.exp(G[None, :] - G[:, None]), 0.0)
        # Row and column sums of one fp32 matrix: a rounded copy for one of them makes dg wrong under strong decay.
        dP_t = dP_t * Gamma_t * ku[:, None] * qu[None, :]
        M = dP_t.to(q.dtype.element_ty)
        X = dP_t * kq
        q_dq = reading + tl.sum(X, 0)
        k_dk = writing - erasing + tl.sum(X, 1)
        dG = reading - erasing - writing + tl.sum(X, 0) - tl.sum(X, 1)
        dL_t = -tl.where(i[:, None] < i[None, :], dL_t * Gamma_t, 0.0) * ku[:, None] * ku[None, :]
        X = dL_t * kk
        d_strength += tl.sum(X, 0)
        X *= beta[None, :]
        k_dk += tl.sum(X, 0) + tl.sum(X, 1)
        dG += tl.sum(X, 0) - tl.sum(X, 1)
        W = (dL_t * beta[None, :]).to(q.dtype.element_ty)

        final = tl.minimum(chunk * C + C, length) - 1
        dG += tl.where(t == final, gamma_all * tl.sum(kept, 0) + tl.sum(writing, 0), 0.0)
        # dg: the sum of dG over the later tokens of the same segment; a reset's own gate does not matter.
        d_gate = tl.sum(tl.where(later & inside[None, :], dG[None, :], 0.0), 1)
        before = tl.load(segment + row + t - 1, mask=inside & (i > 0), other=0).to(tl.int32)
        d_gate = tl.where(seg == before, d_gate, 0.0)
        tl.store(dg + token + t * HV, d_gate, mask=inside)
        tl.store(d_beta + token + t * HV, d_strength, mask=inside)

        # Other threads read what these wrote.
        tl.debug_barrier()
        for piece in tl.range((K + BLOCK_K - 1) // BLOCK_K, num_stages=STAGES, disable_licm=True):
            features = piece * BLOCK_K + tl.arange(0, BLOCK_K)
            kt = tile_of(k, stride_kt, chunk, length, features, C, K, BLOCK_K)
            qt = tile_of(q, stride_qt, chunk, length, features, C, K, BLOCK_K)
            # Transposed, [BLOCK_K, C]: then only transposes of what was loaded are operands.
            dq_turned = tl.dot(tl.trans(kt), M, input_precision=PRECISION)
            dk_turned = tl.dot(tl.trans(kt), W, input_precision=PRECISION)
            dk_rows = tl.dot(M, qt, input_precision=PRECISION)
            dk_rows = tl.dot(W, kt, dk_rows, input_precision=PRECISION)
            for tile in tl.range((V + BLOCK_V - 1) // BLOCK_V, num_stages=STAGES, disable_licm=True):
                columns = tile * BLOCK_V + tl.arange(0, BLOCK_V)
                S = state_tile(states, features, columns, K, V)
                dS = state_tile(d_states, features, columns, K, V)
                dot = tile_of(do, stride_ot, chunk, length, columns, C, V, BLOCK_V)
                write = tile_of(written, HV * V, chunk, length, columns, C, V, BLOCK_V)
                erased = tile_of(dv, HV * V, chunk, length, columns, C, V, BLOCK_V)
                read = ((gamma * qu)[:, None] * dot.to(tl.float32)).to(kt.dtype)
                write = ((w * ku)[:, None] * write.to(tl.float32)).to(kt.dtype)
                erased = ((-gamma * ku)[:, None] * erased.to(tl.float32)).to(kt.dtype)
                dq_turned = tl.dot(S, tl.trans(read), dq_turned, input_precision=PRECISION)
                dk_rows = tl.dot(write, tl.trans(dS), dk_rows, input_precision=PRECISION)
                dk_rows = tl.dot(erased, tl.trans(S), dk_rows, input_precision=PRECISION)
            dq_rows = tl.trans(dq_turned)
            dk_rows += tl.trans(dk_turned)
            # d x = u (d - x_unit <x_unit, d>) is d - x <x, d> u^2 here, where d already carries u = 1 / |x|.
            if NORM:
                unit = qu / scale
                dq_rows -= qt.to(tl.float32) * (q_dq * unit * unit)[:, None]
                dk_rows -= kt.to(tl.float32) * (k_dk * ku * ku)[:, None]
            store_tile(dq, HV * K, chunk, length, features, dq_rows, C, K, BLOCK_K)
            store_tile(dk, HV * K, chunk, length, features, dk_rows, C, K, BLOCK_K)
