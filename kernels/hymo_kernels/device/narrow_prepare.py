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

from hymo_kernels.device.forward import wide
from hymo_kernels.device.places import sequence
from hymo_kernels.device.prepare import gates_of

LOG2_E = tl.constexpr(1.4426950408889634)

NUMBERS = tl.constexpr(7)
"""Vectors kept per chunk, each of one fp32 number a token: log2 of the retention from the chunk's start with resets
counted as 0, resets so far, beta as it is used, 1 / |k|, 1 / |q| (which the forward adds), and the retention from the
chunk's start and to its end."""


@triton.jit(do_not_specialize=["stride_gb", "stride_bb", "T", "slots", "places", "sequences", "length", "segments"])
def narrow_prepare_kernel(
    k,  # [B, T, H, K]
    v,  # [B, T, HV, V]
    g,  # [B, T, HV], natural log of the retention, or what the gate makes it of
    beta,  # [B, T, HV], write strength, or its logit
    A_log,  # [HV]
    dt_bias,  # [HV]
    start_state,  # [N, HV, K, V]
    cu_seqlens,  # [N + 1]
    inverse,  # [B, HV, slots, C, C]: A, the inverse under the gates, each row times 1 / |k| of its token
    numbers,  # [B, HV, slots, NUMBERS, C] fp32
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
    _, hv, n, batch, first, tokens, slot, part, place, begin, end, more = piece(
        cu_seqlens, T, places, sequences, length, segments, HV, 1, C, PACKED
    )
    head = hv // (HV // H)
    features = tl.arange(0, BLOCK_K)
    columns = tl.arange(0, BLOCK_V)
    i = tl.arange(0, C)
    same = i[:, None] == i[None, :]
    later = i[:, None] > i[None, :]
    identity = tl.where(columns[:, None] == columns[None, :], 1.0, 0.0).to(v.dtype.element_ty)
    k += batch * stride_kb + first * stride_kt + head * stride_kh
    v += batch * stride_vb + first * stride_vt + hv * stride_vh
    g += batch * stride_gb + first * stride_gt + hv * stride_gh
    beta += batch * stride_bb + first * stride_bt + hv * stride_bh
    inverse += ((batch * HV + hv) * slots + slot) * C * C
    numbers += ((batch * HV + hv) * slots + slot) * NUMBERS * C
    M = tl.where(features[:, None] == features[None, :], 1.0, 0.0)
    U = tl.zeros([BLOCK_V, BLOCK_K], tl.float32)
    if HAS_START:
        if part == 0:
            start_state += n * stride_sn + hv * stride_sh
            U = state_of(start_state, stride_sv, stride_sk, columns, features, V, K).to(tl.float32)
    for chunk in tl.range(begin, end, num_stages=STAGES, disable_licm=True):
        inside = i < tokens - chunk * C
        kt = rows_of(k, stride_kt, chunk, tokens, features, C, K, BLOCK_K)
        vt = rows_of(v, stride_vt, chunk, tokens, columns, C, V, BLOCK_V)
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
        seg = tl.where(inside, tl.cumsum(reset, 0).to(tl.float32), 127.0)
        kept = numbers + wide(chunk) * NUMBERS * C + i
        tl.store(kept, G)
        tl.store(kept + C, seg)
        tl.store(kept + 2 * C, write)
        gamma = tl.where(seg == 0, tl.exp2(G), 0.0)
        resets = tl.sum(reset, 0)
        # Not a sum of its own: that would be rounded otherwise, and be far from the last of G under strong decay.
        G_final = tl.sum(tl.where(i == C - 1, G, 0.0), 0)
        w = tl.where(seg == resets.to(tl.float32), tl.exp2(G_final - G), 0.0)
        tl.store(kept + 5 * C, gamma)
        tl.store(kept + 6 * C, w)
        # Symmetric: the system and its transpose are made of it, so that no product's operand need be transposed.
        pairs = tl.dot(kt, tl.trans(kt), input_precision=PRECISION)
        ku = tl.full([C], 1.0, tl.float32)
        if NORM:
            ku = unit_of(tl.where(same, pairs, 0.0))
            tl.store(kept + 3 * C, ku)
        difference = G[:, None] - G[None, :]
        pairs *= tl.exp2(tl.where(later, difference, -difference)) * ku[:, None] * ku[None, :]
        pairs = tl.where(seg[:, None] == seg[None, :], pairs, 0.0)
        # The inverse of the system under the gates is the inverse under the gates.
        L = tl.where(later, pairs * -write[:, None], 0.0)
        L_t = tl.where(i[:, None] < i[None, :], pairs * -write[None, :], 0.0)
        A = inverse_of(L, L_t, HALF, PRECISION) * ku[:, None]
        tl.store(inverse + wide(chunk) * C * C + i[:, None] * C + i[None, :], A.to(inverse.dtype.element_ty))
        if more:
            gamma_all = tl.where(resets == 0, tl.exp2(G_final), 0.0)
            # Strengths and decays are part of the inverse here.
            weighted = w[:, None] * A * write[None, :]
            erasing = -(gamma * ku)[None, :]
            R = tl.dot(identity, tl.trans(vt), input_precision=PRECISION)
            R += erasing * tl.dot(U.to(kt.dtype), tl.trans(kt), input_precision=PRECISION)
            written = tl.dot(R.to(kt.dtype), tl.trans(weighted).to(kt.dtype), input_precision=PRECISION)
            U = tl.dot(written.to(kt.dtype), kt, gamma_all * U, input_precision=PRECISION)
            weighted *= erasing
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
    TILES: tl.constexpr,
    C: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Of a program's segment: which tile of the values it holds, value head, sequence, its batch row, first token,
    number of tokens and first slot, which segment of it, where it is kept, its first chunk, the one after its last,
    whether others follow."""
    program = tl.program_id(0).to(tl.int64)
    tile = (program % TILES).to(tl.int32)
    program //= TILES
    hv = program % HV
    part = (program // HV % segments).to(tl.int32)
    n = program // (HV * segments)
    batch, first, tokens, slot = sequence(n, cu_seqlens, T, sequences, C, PACKED)
    chunks = tl.cdiv(tokens, C)
    begin = tl.minimum(part * length, chunks)
    end = tl.minimum(begin + length, chunks)
    place = (batch * HV + hv) * places + place_in_row(n, slot, sequences, PACKED) + part
    return tile, hv, n, batch, first, tokens, slot, part, place, begin, end, end < chunks


@triton.jit
def inverse_of(L, L_t, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """(I - L)^-1 of a strictly lower L of 16 rows, given its transpose too, by doubling its diagonal blocks.

    What is transposed is a right operand as it lies in registers: so the transpose of the inverse grows beside it.
    """
    i = tl.arange(0, 16)[:, None]
    j = tl.arange(0, 16)[None, :]
    a = tl.where(i == j, 1.0, 0.0) + tl.where(i // 2 == j // 2, L, 0.0)
    b = tl.where(i == j, 1.0, 0.0) + tl.where(i // 2 == j // 2, L_t, 0.0)
    a, b = _double(a, b, L, L_t, 2, HALF, PRECISION)
    a, b = _double(a, b, L, L_t, 4, HALF, PRECISION)
    return _double(a, b, L, L_t, 8, HALF, PRECISION)[0]


@triton.jit
def _double(a, b, L, L_t, SIZE: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse and its transpose, in diagonal blocks of twice SIZE."""
    dtype: tl.constexpr = tl.float16 if HALF else tl.float32
    i = tl.arange(0, 16)[:, None]
    j = tl.arange(0, 16)[None, :]
    near = i // (2 * SIZE) == j // (2 * SIZE)
    lower = tl.trans(tl.where(near & (i // SIZE < j // SIZE), L_t, 0.0)).to(dtype)
    upper = tl.trans(tl.where(near & (i // SIZE > j // SIZE), L, 0.0)).to(dtype)
    x = tl.dot(a.to(dtype), lower, input_precision=PRECISION).to(dtype)
    y = tl.dot(b.to(dtype), upper, input_precision=PRECISION).to(dtype)
    next_a = tl.dot(x, tl.trans(b).to(dtype), a, input_precision=PRECISION)
    return next_a, tl.dot(y, tl.trans(a).to(dtype), b, input_precision=PRECISION)


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
def unit_of(squares):
    """1 / |x| of each row, given its squares or their sum anywhere in the row, else zeros."""
    return tl.rsqrt(tl.sum(squares, 1) + 1e-6)


@triton.jit
def gates_kept(numbers, chunk, length, C: tl.constexpr):
    """Of one chunk: log2 of the retention from its start, resets so far, write strength, the retention from the chunk's
    start to each token, from each to its end, and of all of it."""
    numbers += wide(chunk) * NUMBERS * C
    i = tl.arange(0, C)
    final = tl.minimum(length - chunk * C, C) - 1
    gamma = tl.load(numbers + 5 * C + i)
    w = tl.load(numbers + 6 * C + i)
    gamma_all = tl.load(numbers + 5 * C + final)
    return tl.load(numbers + i), tl.load(numbers + C + i), tl.load(numbers + 2 * C + i), gamma, w, gamma_all


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
