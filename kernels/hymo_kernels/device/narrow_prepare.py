"""Gated delta rule for narrow heads, first pass: gates, inverses, and what each segment makes of a state.

Sequences are cut into segments, one program each, so that few heads fill a card. A segment turns the state S before it
into `S product + added`: `added` is what becomes of nothing, or of the initial state in the first segment, `product`
what becomes of the identity without any values. `narrow_carry.py` then finds where every segment truly starts.

Everything about narrow heads is in transposes: a state is [V, K], what is written [V, C]. A product's result then is
the left operand of the next as it lies in one warp's registers, and all that is loaded is a right operand. No product
has 64 rows, so that none is one of Hopper's, for which Triton 3.4 to 3.7.0 miscompiles transposes of results.
"""

import triton
import triton.language as tl

from hymo_kernels.device.forward import store_tile, wide
from hymo_kernels.device.places import sequence
from hymo_kernels.device.prepare import gates_of

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["stride_gb", "stride_bb", "T", "places", "sequences", "length", "segments"])
def narrow_prepare_kernel(
    k,  # [B, T, H, K]
    v,  # [B, T, HV, V]
    g,  # [B, T, HV], natural log of the retention, or what the gate makes it of
    beta,  # [B, T, HV], write strength, or its logit
    A_log,  # [HV]
    dt_bias,  # [HV]
    start_state,  # [N, HV, K, V]
    cu_seqlens,  # [N + 1]
    inverse,  # [B, HV, T, C]: A, the inverse under the gates, each row times 1 / |k| of its token
    total,  # [B, HV, T] fp32: log2 of the retention from the chunk's start, resets counted as 0
    segment,  # [B, HV, T] int32: resets in the chunk so far
    strength,  # [B, HV, T] fp32: beta as it is used
    k_unit,  # [B, HV, T] fp32: 1 / |k|
    product,  # [B, HV, places, K, K] fp32
    added,  # [B, HV, places, V, K] fp32
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
    T,
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
    GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SIGMOID: tl.constexpr,
    HAS_G: tl.constexpr,
    BETA_MAX: tl.constexpr,
    HAS_START: tl.constexpr,
    HALF: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    hv, n, batch, first, tokens, _, part, place, begin, end, more = piece(
        cu_seqlens, T, places, sequences, length, segments, HV, C, PACKED
    )
    head = hv // (HV // H)
    row = (batch * HV + hv) * T + first
    features = tl.arange(0, BLOCK_K)
    columns = tl.arange(0, BLOCK_V)
    i = tl.arange(0, C)
    k += batch * stride_kb + first * stride_kt + head * stride_kh
    v += batch * stride_vb + first * stride_vt + hv * stride_vh
    g += batch * stride_gb + first * stride_gt + hv * stride_gh
    beta += batch * stride_bb + first * stride_bt + hv * stride_bh
    M = tl.where(features[:, None] == features[None, :], 1.0, 0.0)
    U = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    if HAS_START:
        if part == 0:
            start_state += n * stride_sn + hv * stride_sh
            U = state_of(start_state, stride_sv, stride_sk, columns, features, V, K).to(tl.float32)
    for chunk in tl.range(begin, end, num_stages=STAGES, disable_licm=True):
        left = tokens - chunk * C
        inside = i < left
        kt = rows_of(k, stride_kt, chunk, tokens, features, C, K, BLOCK_K)
        at = wide(chunk * C)
        write, decay, reset = gates_of(
            g + at * stride_gt,
            beta + at * stride_bt,
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
        G = tl.cumsum(decay * LOG2_E, 0)
        # What lies beyond the sequence is a segment of its own.
        seg = tl.where(inside, tl.cumsum(reset, 0), 127)
        out = row + at + i
        tl.store(total + out, G, mask=inside)
        tl.store(segment + out, seg, mask=inside)
        tl.store(strength + out, write, mask=inside)
        ku = tl.full([C], 1.0, tl.float32)
        if NORM:
            ku = unit_of(kt)
            tl.store(k_unit + out, ku, mask=inside)
        # The inverse of the system under the gates is the inverse under the gates.
        L = tl.dot(kt, tl.trans(kt), input_precision=PRECISION) * retained(G, seg, C)
        L = tl.where(i[:, None] > i[None, :], L * (write * ku)[:, None] * ku[None, :], 0.0)
        A = (ku[:, None] * inverse_of(L, HALF, PRECISION)).to(inverse.dtype.element_ty)
        store_tile(inverse + row * C, C, chunk, tokens, i, A, C, C, C)
        if more:
            vt = tl.trans(rows_of(v, stride_vt, chunk, tokens, columns, C, V, BLOCK_V))
            gamma, w, gamma_all = decays(G, seg, tl.sum(decay * LOG2_E, 0), tl.sum(reset, 0))
            # Strengths and decays are part of the inverse here.
            weighted = w[:, None] * A.to(tl.float32) * write[None, :]
            erased = tl.dot(U.to(kt.dtype), tl.trans(kt), input_precision=PRECISION)
            R = vt.to(tl.float32) - (gamma * ku)[None, :] * erased
            written = tl.dot(R.to(kt.dtype), tl.trans(weighted).to(kt.dtype), input_precision=PRECISION)
            U = tl.dot(written.to(kt.dtype), kt, gamma_all * U, input_precision=PRECISION)
            weighted *= -(gamma * ku)[None, :]
            R = tl.dot(M.to(kt.dtype), tl.trans(kt), input_precision=PRECISION)
            written = tl.dot(R.to(kt.dtype), tl.trans(weighted).to(kt.dtype), input_precision=PRECISION)
            M = tl.dot(written.to(kt.dtype), kt, gamma_all * M, input_precision=PRECISION)
    if more:
        store_state(product + place * K * K, K, 1, features, features, M, K, K)
        store_state(added + place * V * K, K, 1, columns, features, U, V, K)


@triton.jit
def piece(
    cu_seqlens,
    T,
    places,
    sequences,
    length,
    segments,
    HV: tl.constexpr,
    C: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Of a program's segment: value head, sequence, its batch row, first token, number of tokens and first slot, which
    segment of it, where it is kept, its first chunk, the one after its last, whether others follow."""
    program = tl.program_id(0).to(tl.int64)
    hv = program % HV
    part = (program // HV % segments).to(tl.int32)
    n = program // (HV * segments)
    batch, first, tokens, slot = sequence(n, cu_seqlens, T, sequences, C, PACKED)
    chunks = tl.cdiv(tokens, C)
    begin = tl.minimum(part * length, chunks)
    end = tl.minimum(begin + length, chunks)
    place = (batch * HV + hv) * places + place_in_row(n, slot, sequences, PACKED) + part
    return hv, n, batch, first, tokens, slot, part, place, begin, end, end < chunks


@triton.jit
def inverse_of(L, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """(I + L)^-1 of a strictly lower L of 16 rows, by doubling its diagonal blocks."""
    i = tl.arange(0, 16)[:, None]
    j = tl.arange(0, 16)[None, :]
    a = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, L, 0.0)
    a = _double(a, tl.where((i // 4 == j // 4) & (i // 2 > j // 2), L, 0.0), HALF, PRECISION)
    a = _double(a, tl.where((i // 8 == j // 8) & (i // 4 > j // 4), L, 0.0), HALF, PRECISION)
    return _double(a, tl.where(i // 8 > j // 8, L, 0.0), HALF, PRECISION)


@triton.jit
def _double(a, lower, HALF: tl.constexpr, PRECISION: tl.constexpr):
    dtype: tl.constexpr = tl.float16 if HALF else tl.float32
    x = tl.dot(a.to(dtype), right_operand(lower, dtype), input_precision=PRECISION)
    return a - tl.dot(x.to(dtype), right_operand(a, dtype), input_precision=PRECISION)


@triton.jit
def right_operand(x, dtype: tl.constexpr):
    """x, computed in registers, for the right of a product.

    Transposed, it is one as it lies there; transposed again it goes through shared memory, where a single conversion
    would be many shuffles.
    """
    return tl.trans(tl.trans(x).to(dtype))


@triton.jit
def place_in_row(n, slot, sequences, PACKED: tl.constexpr):
    """Where the segments of a sequence are kept: each is of 16 chunks at least."""
    return slot // 16 + n % sequences if PACKED else slot


@triton.jit
def rows_of(rows, stride, chunk, length, columns, C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The rows of one chunk, the last one over and over beyond the sequence, zero beyond the width.

    A mask of rows would clear every register before each load. What a repeated row meets is zero: its token's strength,
    decays and read-out.
    """
    start = chunk * C
    at = tl.minimum(tl.arange(0, C), length - start - 1)
    rows += wide(start) * stride + (at[:, None] * stride + columns[None, :])
    if WIDTH % BLOCK != 0:
        return tl.load(rows, mask=(columns < WIDTH)[None, :], other=0.0)
    return tl.load(rows)


@triton.jit
def numbers_of(numbers, chunk, length, C: tl.constexpr):
    """One number per token of a chunk, the last one over and over beyond the sequence."""
    start = chunk * C
    return tl.load(numbers + start + tl.minimum(tl.arange(0, C), length - start - 1))


@triton.jit
def state_of(state, stride_row, stride_column, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A state, or the product of a segment, zero beyond its size."""
    mask = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    return tl.load(state + (rows[:, None] * stride_row + columns[None, :] * stride_column), mask=mask, other=0.0)


@triton.jit
def store_state(state, stride_row, stride_column, rows, columns, x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Writes what `state_of` reads."""
    mask = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    at = rows[:, None] * stride_row + columns[None, :] * stride_column
    tl.store(state + at, x.to(state.dtype.element_ty), mask=mask)


@triton.jit
def unit_of(x):
    """1 / |x| of each row."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + 1e-6)


@triton.jit
def gates_kept(total, segment, strength, chunk, length, C: tl.constexpr):
    """Of one chunk: log2 of the retention from its start, segments, write strength, and what `decays` gives."""
    start = chunk * C
    inside = tl.arange(0, C) < length - start
    final = start + tl.minimum(length - start, C) - 1
    G = numbers_of(total, chunk, length, C)
    # What lies beyond the sequence is a segment of its own.
    seg = tl.where(inside, numbers_of(segment, chunk, length, C), 127)
    beta = tl.where(inside, numbers_of(strength, chunk, length, C), 0.0)
    gamma, w, gamma_all = decays(G, seg, tl.load(total + final), tl.load(segment + final))
    return G, seg, beta, gamma, w, gamma_all


@triton.jit
def decays(G, seg, G_final, seg_final):
    """Retention from the chunk's start to each token, from each to its end, and of all of it."""
    gamma = tl.where(seg == 0, tl.exp2(G), 0.0)
    w = tl.where(seg == seg_final, tl.exp2(G_final - G), 0.0)
    return gamma, w, tl.where(seg_final == 0, tl.exp2(G_final), 0.0)


@triton.jit
def retained(G, seg, C: tl.constexpr):
    """What is left at each token (rows) of what each earlier one wrote."""
    i = tl.arange(0, C)
    seen = (i[:, None] >= i[None, :]) & (seg[:, None] == seg[None, :])
    return tl.where(seen, tl.exp2(G[:, None] - G[None, :]), 0.0)


@triton.jit
def retained_later(G, seg, C: tl.constexpr):
    """The transpose of `retained`."""
    i = tl.arange(0, C)
    seen = (i[:, None] <= i[None, :]) & (seg[:, None] == seg[None, :])
    return tl.where(seen, tl.exp2(G[None, :] - G[:, None]), 0.0)
