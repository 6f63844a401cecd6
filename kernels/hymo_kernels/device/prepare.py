"""Gated delta rule, what needs no state: gates, norms, and the inverse of every chunk's triangular system."""

import triton
import triton.language as tl

from hymo_kernels.device.places import place_of_slot


@triton.jit(do_not_specialize=["stride_gb", "stride_bb", "T", "slots", "sequences"])
def prepare_kernel(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    g,  # [B, T, HV], natural log of the retention, or what the gate makes it of
    beta,  # [B, T, HV], write strength, or its logit
    A_log,  # [HV]
    dt_bias,  # [HV]
    cu_seqlens,  # [N + 1]
    scale,
    inverse,  # [B, HV, T, C]: A, the inverse under the gates
    attention,  # [B, HV, T, C]: P, scaled products of queries and keys under the gates
    total,  # [B, HV, T] fp32: sum of g from the chunk's start, resets counted as 0
    segment,  # [B, HV, T] int32: resets in the chunk so far
    strength,  # [B, HV, T] fp32: beta as it is used
    q_unit,  # [B, H, T] fp32: 1 / |q|
    k_unit,  # [B, H, T] fp32: 1 / |k|
    forget,  # [B, HV, slots] fp32: bound on the log of what a chunk keeps of the state before it
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
    slots,
    sequences,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    C: tl.constexpr,
    PACKED: tl.constexpr,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_G: tl.constexpr,
    BETA_MAX: tl.constexpr,
    PRECISION: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    head = program % H
    batch, slot, first, chunk, length, live = place_of_slot(program // H, cu_seqlens, T, slots, sequences, C, PACKED)
    if live:
        begin = first + chunk * C  # in the rows of the sequence's batch
        left = length - chunk * C
        unit_row = (batch * H + head) * T + begin
        q_rows = q + batch * stride_qb + begin * stride_qt + head * stride_qh
        k_rows = k + batch * stride_kb + begin * stride_kt + head * stride_kh

        i = tl.arange(0, C)
        inside = i < left
        k_squares = tl.zeros([C], tl.float32)
        q_squares = tl.zeros([C], tl.float32)
        kk = tl.zeros([C, C], tl.float32)
        qk = tl.zeros([C, C], tl.float32)
        for piece in tl.range((K + BLOCK_K - 1) // BLOCK_K, num_stages=1, disable_licm=True):
            features = piece * BLOCK_K + tl.arange(0, BLOCK_K)
            mask = inside[:, None] & (features < K)[None, :]
            kt = tl.load(k_rows + (i[:, None] * stride_kt + features[None, :]), mask=mask, other=0.0)
            qt = tl.load(q_rows + (i[:, None] * stride_qt + features[None, :]), mask=mask, other=0.0)
            k_squares += _squares(kt)
            q_squares += _squares(qt)
            kk = tl.dot(kt, tl.trans(kt), kk, input_precision=PRECISION)
            qk = tl.dot(qt, tl.trans(kt), qk, input_precision=PRECISION)
        ku, k_length = _unit(k_squares, k_unit + unit_row, inside, NORM, C)
        qu, _ = _unit(q_squares, q_unit + unit_row, inside, NORM, C)
        kk *= ku[:, None] * ku[None, :]
        qk *= (scale * qu)[:, None] * ku[None, :]
        for member in tl.static_range(HV // H):
            hv = head * (HV // H) + member
            out = (batch * HV + hv) * T + begin
            write, decay, reset = gates_of(
                g + batch * stride_gb + begin * stride_gt + hv * stride_gh,
                beta + batch * stride_bb + begin * stride_bt + hv * stride_bh,
                A_log + hv,
                dt_bias + hv,
                inside,
                stride_gt,
                stride_bt,
                C,
                GATE,
                HAS_BIAS,
                SIGMOID,
                HAS_G,
                BETA_MAX,
            )
            G = tl.cumsum(decay, 0)
            # What lies beyond the sequence is a segment of its own.
            seg = tl.where(inside, tl.cumsum(reset, 0), 127)
            seen = (i[:, None] >= i[None, :]) & (seg[:, None] == seg[None, :])
            Gamma = tl.where(seen, tl.exp(G[:, None] - G[None, :]), 0.0)
            at = i[:, None] * C + i[None, :]
            P = (qk * Gamma).to(attention.dtype.element_ty)
            tl.store(attention + out * C + at, P, mask=inside[:, None])
            A = _inverse(tl.where(i[:, None] > i[None, :], write[:, None] * kk, 0.0), C, PRECISION)
            tl.store(inverse + out * C + at, (A * Gamma).to(inverse.dtype.element_ty), mask=inside[:, None])
            tl.store(total + out + i, G, mask=inside)
            tl.store(segment + out + i, seg, mask=inside)
            tl.store(strength + out + i, write, mask=inside)
            # The largest factor of I - beta k k^T is |1 - beta |k|^2| where that exceeds 1.
            growth = tl.log(tl.maximum(1.0, tl.abs(1.0 - write * k_length)))
            kept = tl.where(tl.sum(reset, 0) > 0, float("-inf"), tl.sum(decay + growth, 0))
            tl.store(forget + (batch * HV + hv) * slots + slot, kept)


@triton.jit
def gates_of(
    g,
    beta,
    A_log,
    dt_bias,
    inside,
    stride_gt,
    stride_bt,
    C: tl.constexpr,
    GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_G: tl.constexpr,
    BETA_MAX: tl.constexpr,
):
    """Of each token of a chunk: the write strength, the log of the retention, and whether that was a reset: then 0."""
    i = tl.arange(0, C)
    write = tl.load(beta + i * stride_bt, mask=inside, other=0.0).to(tl.float32)
    if SIGMOID:
        write = tl.where(inside, BETA_MAX * tl.sigmoid(write), 0.0)
    decay = tl.zeros([C], tl.float32)
    if HAS_G:
        decay = tl.load(g + i * stride_gt, mask=inside, other=0.0).to(tl.float32)
    if GATE:
        if HAS_BIAS:
            decay += tl.load(dt_bias).to(tl.float32)
        rate = tl.exp(tl.load(A_log).to(tl.float32))
        softplus = tl.where(decay > 20.0, decay, tl.log(1.0 + tl.exp(tl.minimum(decay, 20.0))))
        decay = tl.where(inside, -rate * softplus, 0.0)
    reset = (decay == float("-inf")).to(tl.int32)
    return write, tl.where(reset > 0, 0.0, decay), reset


@triton.jit
def _squares(x):
    """The squared length of each row."""
    wide = x.to(tl.float32)
    return tl.sum(wide * wide, 1)


@triton.jit
def _unit(squares, out, inside, NORM: tl.constexpr, C: tl.constexpr):
    """1 / |x| of each row, kept, and the squared length of what it makes of the row."""
    unit = tl.full([C], 1.0, tl.float32)
    if NORM:
        unit = tl.rsqrt(squares + 1e-6)
    tl.store(out + tl.arange(0, C), unit, mask=inside)
    return unit, squares * unit * unit


@triton.jit
def _inverse(L, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + L)^-1 of a strictly lower L by block doubling: inverses of diagonal blocks of 2, 4, .., C tokens.

    Every factor is bounded for |k| <= 1 and beta <= 2, which those of a Neumann series are not. Blocks up to 16 are
    one batch of small products, one block a warp.
    """
    n: tl.constexpr = C // 16
    D = _diagonal(L, n, 16)
    i = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 16)[None, None, :]
    a = tl.where(i == j, 1.0, 0.0) - tl.where((i // 2 == j // 2) & (i > j), D, 0.0)
    a = _double(a, tl.where((i // 4 == j // 4) & (i // 2 > j // 2), D, 0.0), PRECISION)
    a = _double(a, tl.where((i // 8 == j // 8) & (i // 4 > j // 4), D, 0.0), PRECISION)
    a = _double(a, tl.where(i // 8 > j // 8, D, 0.0), PRECISION)
    if C == 64:
        a = _spread(tl.reshape(a, [2, 2, 16, 16]), 2, 2, 16)
        i = tl.arange(0, 32)[None, :, None]
        j = tl.arange(0, 32)[None, None, :]
        a = _double(a, tl.where(i // 16 > j // 16, _diagonal(L, 2, 32), 0.0), PRECISION)
    a = tl.reshape(_spread(tl.reshape(a, [1, 2, C // 2, C // 2]), 1, 2, C // 2), [C, C])
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    return _double(a, tl.where(i // (C // 2) > j // (C // 2), L, 0.0), PRECISION)


@triton.jit
def _double(a, lower, PRECISION: tl.constexpr):
    return a - tl.dot(tl.dot(a, lower, input_precision=PRECISION), a, input_precision=PRECISION)


@triton.jit
def _diagonal(x, n: tl.constexpr, size: tl.constexpr):
    """The n diagonal blocks of a matrix."""
    block = tl.arange(0, n)
    same = block[:, None, None, None] == block[None, None, :, None]
    return tl.sum(tl.where(same, tl.reshape(x, [n, size, n, size]), 0.0), 2)


@triton.jit
def _spread(x, m: tl.constexpr, n: tl.constexpr, size: tl.constexpr):
    """[m, n, size, size] -> [m, n * size, n * size], block diagonal."""
    block = tl.arange(0, n)
    same = block[None, :, None, None, None] == block[None, None, None, :, None]
    return tl.reshape(tl.where(same, x[:, :, :, None, :], 0.0), [m, n * size, n * size])
