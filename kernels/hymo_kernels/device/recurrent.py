"""Gated delta rule token by token: a program keeps some value columns of one head's state in registers.

    S <- exp(g) S;   S <- S + k (beta (v - k^T S))^T;   o = scale S^T q

All in fp32 and without matrix products, so that nothing depends on their precision. The reverse pass finds the state
before a token by going forward again from the last one kept, `C` tokens back at most.
"""

import triton
import triton.language as tl

from hymo_kernels.device.places import sequence

NOT_SPECIALIZED = ["stride_gb", "stride_gt", "stride_bb", "stride_bt", "T", "slots", "sequences"]


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def recurrent_kernel(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    v,  # [B, T, HV, V]
    g,  # [B, T, HV], natural log of the retention, or what the gate makes it of
    beta,  # [B, T, HV], write strength, or its logit
    A_log,  # [HV]
    dt_bias,  # [HV]
    start_state,  # [N, HV, K, V], or a pool of them that `index` picks from
    end_state,  # the same pool, or [N, HV, K, V] fp32
    index,  # [N], negative: no state, and read-outs of 0
    o,  # [B, T, HV, V]
    marks,  # [B, HV, slots, K, V] fp32, the state before every C-th token
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
    stride_gb,
    stride_gt,
    stride_gh,
    stride_bb,
    stride_bt,
    stride_bh,
    stride_sn,
    stride_sh,
    stride_sk,
    stride_sv,
    stride_en,
    stride_eh,
    stride_ek,
    stride_ev,
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
    GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_G: tl.constexpr,
    BETA_MAX: tl.constexpr,
    HAS_START: tl.constexpr,
    KEEP_END: tl.constexpr,
    POOL: tl.constexpr,
    KEEP_MARKS: tl.constexpr,
    READ_OUT: tl.constexpr,
):
    tiles: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0).to(tl.int64)
    columns = (program % tiles).to(tl.int32) * BLOCK_V + tl.arange(0, BLOCK_V)
    features = tl.arange(0, BLOCK_K)
    hv = program // tiles % HV
    n = program // (tiles * HV)
    head = hv // (HV // H)
    batch, first, length, slot = sequence(n, cu_seqlens, T, sequences, C, PACKED)
    in_state = (features < K)[:, None] & (columns < V)[None, :]
    q += batch * stride_qb + first * stride_qt + head * stride_qh
    k += batch * stride_kb + first * stride_kt + head * stride_kh
    v += batch * stride_vb + first * stride_vt + hv * stride_vh
    g += batch * stride_gb + first * stride_gt + hv * stride_gh
    beta += batch * stride_bb + first * stride_bt + hv * stride_bh
    o += (batch * T + first) * HV * V + hv * V
    marks += ((batch * HV + hv) * slots + slot) * K * V + features[:, None] * V + columns[None, :]
    place = n
    if POOL:
        place = tl.load(index + n).to(tl.int64)
    if READ_OUT:
        # Rows after the last sequence belong to none.
        if PACKED:
            if n % sequences == sequences - 1:
                _clear(o, length, (T - first).to(tl.int32), HV * V, columns, V, BLOCK_V)
        if place < 0:
            _clear(o, length * 0, length, HV * V, columns, V, BLOCK_V)
    if place >= 0:
        S = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
        if HAS_START:
            at = place * stride_sn + hv * stride_sh + features[:, None] * stride_sk + columns[None, :] * stride_sv
            S = tl.load(start_state + at, mask=in_state, other=0.0).to(tl.float32)
        for i in tl.range(0, length):
            t = i + first * 0
            if KEEP_MARKS:
                if i % C == 0:
                    tl.store(marks + t // C * K * V, S, mask=in_state)
            k_t = row_of(k + t * stride_kt, features, K, NORM)
            v_t = tl.load(v + t * stride_vt + columns, mask=columns < V, other=0.0).to(tl.float32)
            decay, write = gate_of(
                g + t * stride_gt, beta + t * stride_bt, A_log + hv, dt_bias + hv, HAS_G, GATE, HAS_BIAS, SIGMOID,
                BETA_MAX,
            )  # fmt: skip
            S = decayed(S, decay)
            S += k_t[:, None] * (write * (v_t - recalled(k_t, S)))[None, :]
            if READ_OUT:
                q_t = scale * row_of(q + t * stride_qt, features, K, NORM)
                tl.store(o + t * HV * V + columns, recalled(q_t, S).to(o.dtype.element_ty), mask=columns < V)
        if KEEP_END:
            at = place * stride_en + hv * stride_eh + features[:, None] * stride_ek + columns[None, :] * stride_ev
            tl.store(end_state + at, S.to(end_state.dtype.element_ty), mask=in_state)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def reverse_kernel(
    q,
    k,
    v,
    g,
    beta,
    A_log,
    dt_bias,
    start_state,
    marks,
    do,  # [B, T, HV, V]
    d_end,  # [N, HV, K, V]
    dq,  # [B, T, HV, tiles, K] fp32: parts of the gradient of the row as it is used
    dk,  # as dq
    dv,  # [B, T, HV, V]
    d_decay,  # [B, T, HV, tiles] fp32
    d_write,  # as d_decay
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
    stride_gb,
    stride_gt,
    stride_gh,
    stride_bb,
    stride_bt,
    stride_bh,
    stride_sn,
    stride_sh,
    stride_sk,
    stride_sv,
    stride_ob,
    stride_ot,
    stride_oh,
    stride_en,
    stride_eh,
    stride_ek,
    stride_ev,
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
    GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_G: tl.constexpr,
    BETA_MAX: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_MARKS: tl.constexpr,
    HAS_END: tl.constexpr,
    KEEP_START: tl.constexpr,
):
    tiles: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0).to(tl.int64)
    tile = program % tiles
    columns = tile.to(tl.int32) * BLOCK_V + tl.arange(0, BLOCK_V)
    features = tl.arange(0, BLOCK_K)
    hv = program // tiles % HV
    n = program // (tiles * HV)
    head = hv // (HV // H)
    batch, first, length, slot = sequence(n, cu_seqlens, T, sequences, C, PACKED)
    in_state = (features < K)[:, None] & (columns < V)[None, :]
    q += batch * stride_qb + first * stride_qt + head * stride_qh
    k += batch * stride_kb + first * stride_kt + head * stride_kh
    v += batch * stride_vb + first * stride_vt + hv * stride_vh
    g += batch * stride_gb + first * stride_gt + hv * stride_gh
    beta += batch * stride_bb + first * stride_bt + hv * stride_bh
    do += batch * stride_ob + first * stride_ot + hv * stride_oh
    row = (batch * T + first) * HV + hv
    dv += row * V
    part = row * tiles + tile
    marks += ((batch * HV + hv) * slots + slot) * K * V + features[:, None] * V + columns[None, :]
    start_state += n * stride_sn + hv * stride_sh + features[:, None] * stride_sk + columns[None, :] * stride_sv
    if PACKED:
        if n % sequences == sequences - 1:
            _clear(dv, length, (T - first).to(tl.int32), HV * V, columns, V, BLOCK_V)
    D = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)  # the gradient of the state after the current token
    if HAS_END:
        at = n * stride_en + hv * stride_eh + features[:, None] * stride_ek + columns[None, :] * stride_ev
        D = tl.load(d_end + at, mask=in_state, other=0.0).to(tl.float32)
    for back in tl.range(0, length):
        i = length - 1 - back
        mark = i // C
        S = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
        if HAS_MARKS:
            S = tl.load(marks + (mark + first * 0) * K * V, mask=in_state, other=0.0)
        elif HAS_START:
            S = tl.load(start_state, mask=in_state, other=0.0).to(tl.float32)
        for j in tl.range(mark * C, i):
            t = j + first * 0
            k_t = row_of(k + t * stride_kt, features, K, NORM)
            v_t = tl.load(v + t * stride_vt + columns, mask=columns < V, other=0.0).to(tl.float32)
            decay, write = gate_of(
                g + t * stride_gt, beta + t * stride_bt, A_log + hv, dt_bias + hv, HAS_G, GATE, HAS_BIAS, SIGMOID,
                BETA_MAX,
            )  # fmt: skip
            S = decayed(S, decay)
            S += k_t[:, None] * (write * (v_t - recalled(k_t, S)))[None, :]
        t = i + first * 0
        q_t = scale * row_of(q + t * stride_qt, features, K, NORM)
        k_t = row_of(k + t * stride_kt, features, K, NORM)
        v_t = tl.load(v + t * stride_vt + columns, mask=columns < V, other=0.0).to(tl.float32)
        do_t = tl.load(do + t * stride_ot + columns, mask=columns < V, other=0.0).to(tl.float32)
        decay, write = gate_of(
            g + t * stride_gt, beta + t * stride_bt, A_log + hv, dt_bias + hv, HAS_G, GATE, HAS_BIAS, SIGMOID, BETA_MAX
        )
        S = decayed(S, decay)
        missing = v_t - recalled(k_t, S)
        wrote = write * missing
        D += q_t[:, None] * do_t[None, :]
        d_wrote = recalled(k_t, D)
        dv_t = write * d_wrote
        # o = S^T q of the state after the write, which is S + k wrote^T.
        dq_t = scale * (tl.sum(S * do_t[None, :], 1) + k_t * tl.sum(wrote * do_t, 0))
        dk_t = tl.sum(D * wrote[None, :] - S * dv_t[None, :], 1)
        D -= k_t[:, None] * dv_t[None, :]
        out = part + t * HV * tiles
        tl.store(dq + out * K + features, dq_t, mask=features < K)
        tl.store(dk + out * K + features, dk_t, mask=features < K)
        tl.store(dv + t * HV * V + columns, dv_t.to(dv.dtype.element_ty), mask=columns < V)
        tl.store(d_decay + out, tl.sum(tl.sum(D * S, 1), 0))
        tl.store(d_write + out, tl.sum(d_wrote * missing, 0))
        D = decayed(D, decay)
    if KEEP_START:
        at = (n * HV + hv) * K * V + features[:, None] * V + columns[None, :]
        tl.store(d_start + at, D, mask=in_state)


@triton.jit(do_not_specialize=["stride_gb", "stride_gt", "stride_bb", "stride_bt", "T", "sequences"])
def gather_kernel(
    q,
    k,
    g,
    beta,
    A_log,
    dt_bias,
    dq_parts,  # [B, T, HV, tiles, K]
    dk_parts,
    d_decay,  # [B, T, HV, tiles]
    d_write,
    dq,  # [B, T, H, K]
    dk,  # [B, T, H, K]
    dg,  # [B, T, HV] fp32, of g as it was given
    dbeta,  # [B, T, HV] fp32, of beta as it was given
    rate,  # [B, T, HV] fp32: this token's part of the gradient of A_log
    cu_seqlens,
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_gb,
    stride_gt,
    stride_gh,
    stride_bb,
    stride_bt,
    stride_bh,
    T,
    sequences,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
    PACKED: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_G: tl.constexpr,
    BETA_MAX: tl.constexpr,
):
    """Adds up the parts of one token and key head, and goes back through norms, gate and sigmoid."""
    program = tl.program_id(0).to(tl.int64)
    head = program % H
    batch = program // H // T
    t = program // H % T
    used = t >= 0
    if PACKED:
        used = t < tl.load(cu_seqlens + sequences)
    features = tl.arange(0, BLOCK_K)
    # Where no sequence is, nothing has written the parts.
    mask = features < tl.where(used, K, 0)
    dq_t = tl.zeros([BLOCK_K], tl.float32)
    dk_t = tl.zeros([BLOCK_K], tl.float32)
    for member in tl.range(0, HV // H):
        hv = head * (HV // H) + member
        row = (batch * T + t) * HV + hv
        by_decay = tl.full((), 0.0, tl.float32)
        by_write = tl.full((), 0.0, tl.float32)
        for tile in tl.range(0, TILES):
            at = row * TILES + tile
            dq_t += tl.load(dq_parts + at * K + features, mask=mask, other=0.0)
            dk_t += tl.load(dk_parts + at * K + features, mask=mask, other=0.0)
            by_decay += tl.load(d_decay + at, mask=used, other=0.0)
            by_write += tl.load(d_write + at, mask=used, other=0.0)
        g_t = g + batch * stride_gb + t * stride_gt + hv * stride_gh
        beta_t = beta + batch * stride_bb + t * stride_bt + hv * stride_bh
        if GATE:
            decay, _ = gate_of(g_t, beta_t, A_log + hv, dt_bias + hv, HAS_G, GATE, HAS_BIAS, SIGMOID, BETA_MAX)
            x = tl.full((), 0.0, tl.float32)
            if HAS_G:
                x += tl.load(g_t).to(tl.float32)
            if HAS_BIAS:
                x += tl.load(dt_bias + hv).to(tl.float32)
            # A reset has no gradient; its infinite decay would make it NaN.
            kept = used & (decay > float("-inf"))
            tl.store(rate + row, tl.where(kept, by_decay * decay, 0.0))
            slope = -tl.exp(tl.load(A_log + hv).to(tl.float32)) * tl.sigmoid(x)
            by_decay = tl.where(kept, by_decay * slope, 0.0)
        if SIGMOID:
            share = tl.sigmoid(tl.load(beta_t).to(tl.float32))
            by_write = tl.where(used, by_write * BETA_MAX * share * (1.0 - share), 0.0)
        if HAS_G:
            tl.store(dg + row, by_decay)
        tl.store(dbeta + row, by_write)
    q_t = q + batch * stride_qb + t * stride_qt + head * stride_qh
    k_t = k + batch * stride_kb + t * stride_kt + head * stride_kh
    out = ((batch * T + t) * H + head) * K + features
    tl.store(dq + out, _unit_gradient(q_t, dq_t, features, mask, NORM).to(dq.dtype.element_ty), mask=features < K)
    tl.store(dk + out, _unit_gradient(k_t, dk_t, features, mask, NORM).to(dk.dtype.element_ty), mask=features < K)


@triton.jit
def row_of(x, features, K: tl.constexpr, NORM: tl.constexpr):
    """One row in fp32, of unit length if asked for."""
    row = tl.load(x + features, mask=features < K, other=0.0).to(tl.float32)
    if NORM:
        row = row * tl.rsqrt(tl.sum(row * row, 0) + 1e-6)
    return row


@triton.jit
def gate_of(
    g,
    beta,
    A_log,
    dt_bias,
    HAS_G: tl.constexpr,
    GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SIGMOID: tl.constexpr,
    BETA_MAX: tl.constexpr,
):
    """Natural log of the retention and write strength of one token, which the pointers point at."""
    write = tl.load(beta).to(tl.float32)
    if SIGMOID:
        write = BETA_MAX * tl.sigmoid(write)
    decay = tl.full((), 0.0, tl.float32)
    if HAS_G:
        decay += tl.load(g).to(tl.float32)
    if GATE:
        if HAS_BIAS:
            decay += tl.load(dt_bias).to(tl.float32)
        e = tl.exp(tl.minimum(decay, 20.0))
        # log(1 + e), of which the sum would lose a small e.
        u = 1.0 + e
        log1p = tl.where(u == 1.0, e, tl.log(u) * (e / (u - 1.0)))
        decay = -tl.exp(tl.load(A_log).to(tl.float32)) * tl.where(decay > 20.0, decay, log1p)
    return decay, write


@triton.jit
def decayed(S, decay):
    """exp(decay) S; after a reset nothing is left, whatever it was."""
    return tl.where(decay == float("-inf"), 0.0, tl.exp(decay) * S)


@triton.jit
def recalled(k, S):
    """k^T S."""
    return tl.sum(k[:, None] * S, 0)


@triton.jit
def _unit_gradient(x, dy, features, mask, NORM: tl.constexpr):
    """The gradient of a row from that of what `row_of` makes of it."""
    if NORM:
        row = tl.load(x + features, mask=mask, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(row * row, 0) + 1e-6)
        unit = row * inverse
        dy = inverse * (dy - unit * tl.sum(unit * dy, 0))
    return dy


@triton.jit
def _clear(rows, begin, end, stride, columns, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """Zeroes rows begin to end."""
    for i in tl.range(begin, end):
        at = (i + tl.full((), 0, tl.int64)) * stride
        tl.store(rows + at + columns, tl.zeros([BLOCK_V], rows.dtype.element_ty), mask=columns < V)
