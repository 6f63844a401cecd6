"""Gated delta rule, forward: the state of a head carried through its chunks, read out on the way.

    R = beta (v - gamma k S),   V' = A R,   o = scale (gamma q S + P V'),   S <- gamma_C S + k^T (w V')

gamma, w, Gamma: retention from the chunk's start, to its end, and between two of its tokens; A = (I + L)^-1 * Gamma,
P = q k^T * Gamma. A long sequence is cut into segments; a segment starts from nothing, as many chunks early as it takes
to forget that it did.
"""

import triton
import triton.language as tl

from hymo_kernels.device.places import sequence


@triton.jit(do_not_specialize=["T", "slots", "sequences", "segment_chunks", "segments"])
def forward_kernel(
    q,  # [B, T, H, K]
    k,  # [B, T, H, K]
    v,  # [B, T, HV, V]
    inverse,  # [B, HV, T, C]
    attention,  # [B, HV, T, C]
    total,  # [B, HV, T]
    segment,  # [B, HV, T]
    strength,  # [B, HV, T]
    q_unit,  # [B, H, T]
    k_unit,  # [B, H, T]
    forget,  # [B, HV, slots]
    start_state,  # [N, HV, K, V]
    o,  # [B, T, HV, V]
    states,  # [B, HV, slots, K, V], the state before each chunk
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
    stride_ob,
    stride_ot,
    stride_oh,
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
    HAS_START: tl.constexpr,
    READ_OUT: tl.constexpr,
    KEEP_STATES: tl.constexpr,
    KEEP_END: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    tiles: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    # Moved out of the loop, the addresses of many wide tiles would fill the registers.
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
    last = end == chunks
    if (begin < end) | (part == 0):
        row = (batch * HV + hv) * T + first
        unit_row = (batch * H + head) * T + first
        place = (batch * HV + hv) * slots + slot
        columns = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        q += batch * stride_qb + first * stride_qt + head * stride_qh
        k += batch * stride_kb + first * stride_kt + head * stride_kh
        v += batch * stride_vb + first * stride_vt + hv * stride_vh
        o += batch * stride_ob + first * stride_ot + hv * stride_oh
        inverse += row * C
        attention += row * C
        total += row
        segment += row
        strength += row
        q_unit += unit_row
        k_unit += unit_row
        states += place * K * V

        early = chunks_to_forget(forget + place, begin, threshold, BACK=True)
        S = no_state(K, BLOCK_K, BLOCK_V)
        if HAS_START:
            if begin == early:
                at = start_state + n * stride_sn + hv * stride_sh
                S = load_state(at, stride_sk, stride_sv, columns, K, V, BLOCK_K)
        for chunk in tl.range(begin - early, begin, num_stages=STAGES, disable_licm=lean):
            S, _ = _advance(
                S,
                chunk,
                q,
                k,
                v,
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
                stride_vt,
                length,
                columns,
                K,
                V,
                BLOCK_K,
                BLOCK_V,
                C,
                False,
                PRECISION,
            )
        for chunk in tl.range(begin, end, num_stages=STAGES, disable_licm=lean):
            if KEEP_STATES:
                store_state(states + wide(chunk) * K * V, S, columns, K, V, BLOCK_K)
            S, read = _advance(
                S,
                chunk,
                q,
                k,
                v,
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
                stride_vt,
                length,
                columns,
                K,
                V,
                BLOCK_K,
                BLOCK_V,
                C,
                READ_OUT,
                PRECISION,
            )
            if READ_OUT:
                store_tile(o, stride_ot, chunk, length, columns, read, C, V, BLOCK_V)
        if KEEP_END:
            if last:
                store_state(end_state + (n * HV + hv) * K * V, S, columns, K, V, BLOCK_K)


@triton.jit
def chunks_to_forget(forget, edge, threshold, BACK: tl.constexpr, chunks=0):
    """How many chunks before `edge` (or from it on) retain less than e^-threshold together; all of them if none do."""
    block = tl.arange(0, 64)
    available = edge if BACK else chunks - edge
    count = edge * 0
    kept = 0.0
    going = available > 0
    while going:
        step = count + block
        at = edge - 1 - step if BACK else edge + step
        piece = tl.load(forget + at, mask=step < available, other=float("-inf"))
        # -inf - -inf would be NaN; anything below the threshold is the same.
        piece = tl.maximum(piece, -1e4)
        more = tl.sum((kept + tl.cumsum(piece, 0) > -threshold).to(tl.int32), 0)
        kept += tl.sum(piece, 0)
        going = (more == 64) & (count + 64 < available)
        count = tl.where(going, count + 64, tl.minimum(count + more + 1, available))
    return count


@triton.jit
def wide(x):
    """x in 64 bits: offsets beyond 2^31 elements are ordinary."""
    return x + tl.full((), 0, tl.int64)


@triton.jit
def no_state(K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """Zero, in pieces of BLOCK_K key features: a product takes both its operands into registers whole."""
    S = ()
    for _ in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        S = S + (tl.zeros([BLOCK_K, BLOCK_V], tl.float32),)
    return S


@triton.jit
def load_state(state, stride_k, stride_v, columns, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr):
    """Some columns of a state, in pieces."""
    S = ()
    for piece in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        features = piece * BLOCK_K + tl.arange(0, BLOCK_K)
        mask = (features < K)[:, None] & (columns < V)[None, :]
        at = state + features[:, None] * stride_k + columns[None, :] * stride_v
        S = S + (tl.load(at, mask=mask, other=0.0).to(tl.float32),)
    return S


@triton.jit
def store_state(state, S, columns, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr):
    """Writes a state's columns, row by row of V."""
    for piece in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        features = piece * BLOCK_K + tl.arange(0, BLOCK_K)
        mask = (features < K)[:, None] & (columns < V)[None, :]
        tl.store(state + features[:, None] * V + columns[None, :], S[piece].to(state.dtype.element_ty), mask=mask)


@triton.jit
def tile_of(rows, stride, chunk, length, columns, C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The rows of one chunk, zero beyond the sequence and the width."""
    i = tl.arange(0, C)
    start = chunk * C
    rows += wide(start) * stride
    mask = (i < length - start)[:, None]
    if WIDTH % BLOCK != 0:
        mask = mask & (columns < WIDTH)[None, :]
    return tl.load(rows + (i[:, None] * stride + columns[None, :]), mask=mask, other=0.0)


@triton.jit
def store_tile(rows, stride, chunk, length, columns, x, C: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Writes what `tile_of` reads."""
    i = tl.arange(0, C)
    start = chunk * C
    rows += wide(start) * stride
    mask = (i < length - start)[:, None]
    if WIDTH % BLOCK != 0:
        mask = mask & (columns < WIDTH)[None, :]
    tl.store(rows + (i[:, None] * stride + columns[None, :]), x.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def vector_of(rows, chunk, length, C: tl.constexpr):
    """One number per token of a chunk, zero beyond the sequence."""
    i = tl.arange(0, C)
    start = chunk * C
    return tl.load(rows + start + i, mask=i < length - start, other=0.0)


@triton.jit
def gates(total, segment, strength, chunk, length, C: tl.constexpr):
    """Of one chunk: write strength, retention from its start, to its end, of all of it."""
    i = tl.arange(0, C)
    start = chunk * C
    left = length - start
    total += start
    segment += start
    strength += start
    final = tl.minimum(left, C) - 1
    G = tl.load(total + i, mask=i < left, other=0.0)
    # What lies beyond the sequence is a segment of its own.
    seg = tl.load(segment + i, mask=i < left, other=127).to(tl.int32)
    beta = tl.load(strength + i, mask=i < left, other=0.0)
    G_final = tl.load(total + final)
    seg_final = tl.load(segment + final).to(tl.int32)
    gamma = tl.where(seg == 0, tl.exp(G), 0.0)
    w = tl.where(seg == seg_final, tl.exp(G_final - G), 0.0)
    gamma_all = tl.where(seg_final == 0, tl.exp(G_final), 0.0)
    return beta, gamma, w, gamma_all


@triton.jit
def _advance(
    S,
    chunk,
    q,
    k,
    v,
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
    stride_vt,
    length,
    columns,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    READ_OUT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The state after one chunk and, if asked for, the chunk's read-outs."""
    pieces: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    keys = ()
    for piece in tl.static_range(pieces):
        features = piece * BLOCK_K + tl.arange(0, BLOCK_K)
        keys = keys + (tile_of(k, stride_kt, chunk, length, features, C, K, BLOCK_K),)
    vt = tile_of(v, stride_vt, chunk, length, columns, C, V, BLOCK_V)
    A = tile_of(inverse, C, chunk, length, tl.arange(0, C), C, C, C)
    beta, gamma, w, gamma_all = gates(total, segment, strength, chunk, length, C)
    ku = vector_of(k_unit, chunk, length, C)
    kS = tl.zeros([C, BLOCK_V], tl.float32)
    qS = tl.zeros([C, BLOCK_V], tl.float32)
    for piece in tl.static_range(pieces):
        S_low = S[piece].to(vt.dtype)
        kS = tl.dot(keys[piece], S_low, kS, input_precision=PRECISION)
        if READ_OUT:
            features = piece * BLOCK_K + tl.arange(0, BLOCK_K)
            qt = tile_of(q, stride_qt, chunk, length, features, C, K, BLOCK_K)
            qS = tl.dot(qt, S_low, qS, input_precision=PRECISION)
    R = beta[:, None] * (vt.to(tl.float32) - (gamma * ku)[:, None] * kS)
    write = tl.dot(A, R.to(vt.dtype), input_precision=PRECISION)
    read = write
    if READ_OUT:
        P = tile_of(attention, C, chunk, length, tl.arange(0, C), C, C, C)
        qu = scale * vector_of(q_unit, chunk, length, C)
        read = tl.dot(P, write.to(vt.dtype), (qu * gamma)[:, None] * qS, input_precision=PRECISION)
    weighted = ((w * ku)[:, None] * write).to(vt.dtype)
    after = ()
    for piece in tl.static_range(pieces):
        after = after + (tl.dot(tl.trans(keys[piece]), weighted, gamma_all * S[piece], input_precision=PRECISION),)
    return after, read
