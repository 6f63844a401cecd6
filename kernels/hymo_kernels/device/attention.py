"""Softmax attention inside documents: nothing is computed for a document that no row of a tile belongs to.

A tile of queries is a run of pairs (token, query head of one group), token by token, so that a group reads its keys and
values once and a tile spans few tokens, and with them few documents: pair i is head i % R of token i // R. Token t sees
the keys from start_t = t - position_t, which never decreases along a row, to t. Keys of a tile of queries thus begin at
the start of its first token, and queries of a tile of keys end where a start passes its last key. Only a tile that lies
across a start or the diagonal is masked.

Scores are scaled to base 2. A row with nothing seen yet has the lowest finite maximum, so that no -inf is subtracted
from another. Rows past the end of a sequence are copies of its last one: they are masked or never stored.
"""

import triton
import triton.language as tl

PADDING = tl.constexpr(128)
"""No tile has more pairs; that of `key_backward_kernel`, which reads whole tiles of sums, has no more than others."""

SIZES = ["stride_pb", "stride_pt", "B", "T"]
"""What changes from call to call is no reason to compile again: not whether it is 1, nor a multiple of 16."""


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    q,  # [B, T, G R, K]
    k,  # [B, T, G, K]
    v,  # [B, T, G, V]
    position,  # [B, T]
    o,  # [B, T, G R, V]
    lse,  # [B, G, padded T R] fp32, log2 of the sum of 2^score of each pair
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kg,
    stride_vb,
    stride_vt,
    stride_vg,
    stride_pb,
    stride_pt,
    scale,  # of base-2 scores
    B,
    T,
    G: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PAIRS: tl.constexpr,
    KEYS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    batch, group = program % (B * G) // G, program % G
    # The last tokens, which may see the most, go first.
    first = (tl.cdiv(T * R, PAIRS) - 1 - program // (B * G)).to(tl.int32) * PAIRS
    k += batch * stride_kb + group * stride_kg
    v += batch * stride_vb + group * stride_vg
    position += batch * stride_pb
    pair, token, head = _pairs(first, T, R, PAIRS)
    start = _start(position, token, stride_pt)
    q_tile = _rows(q + batch * stride_qb, token, stride_qt, (group * R + head) * stride_qh, K, BLOCK_K)
    begin, whole, end = _keys(position, stride_pt, first, T, R, PAIRS, KEYS)
    top = tl.full([PAIRS], -3.4028234663852886e38, tl.float32)
    total = tl.zeros([PAIRS], tl.float32)
    read = tl.zeros([PAIRS, BLOCK_V], tl.float32)
    for at in tl.range(begin, end, KEYS):
        key = at + tl.arange(0, KEYS)
        place = tl.minimum(key, T - 1)
        k_tile = _rows(k, place, stride_kt, 0, K, BLOCK_K)
        score = tl.dot(q_tile, tl.trans(k_tile))
        if at >= whole:
            seen = (key[None, :] >= start[:, None]) & (key[None, :] <= token[:, None])
            score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1) * scale)
        weight = tl.exp2(score * scale - higher[:, None])
        decay = tl.exp2(top - higher)
        top = higher
        total = total * decay + tl.sum(weight, 1)
        v_tile = _rows(v, place, stride_vt, 0, V, BLOCK_V)
        read = tl.dot(weight.to(v_tile.dtype), v_tile, read * decay[:, None])
    _store(o, read / total[:, None], ((batch * T + token) * G + group) * R + head, pair < T * R, V, BLOCK_V)
    tl.store(lse + (batch * G + group) * _padded(T * R) + pair, top + tl.log2(total))


@triton.jit(do_not_specialize=SIZES)
def query_backward_kernel(
    q,
    k,
    v,
    position,
    o,
    lse,
    do,  # [B, T, G R, V]
    dq,  # [B, T, G R, K]
    delta,  # [B, G, padded T R] fp32, <o, do> of each pair
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kg,
    stride_vb,
    stride_vt,
    stride_vg,
    stride_pb,
    stride_pt,
    stride_ob,
    stride_ot,
    stride_oh,
    stride_db,
    stride_dt,
    stride_dh,
    scale,
    natural_scale,
    B,
    T,
    G: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PAIRS: tl.constexpr,
    KEYS: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    batch, group = program % (B * G) // G, program % G
    first = (tl.cdiv(T * R, PAIRS) - 1 - program // (B * G)).to(tl.int32) * PAIRS
    k += batch * stride_kb + group * stride_kg
    v += batch * stride_vb + group * stride_vg
    position += batch * stride_pb
    pair, token, head = _pairs(first, T, R, PAIRS)
    start = _start(position, token, stride_pt)
    h = group * R + head
    q_tile = _rows(q + batch * stride_qb, token, stride_qt, h * stride_qh, K, BLOCK_K)
    do_tile = _rows(do + batch * stride_db, token, stride_dt, h * stride_dh, V, BLOCK_V)
    o_tile = _rows(o + batch * stride_ob, token, stride_ot, h * stride_oh, V, BLOCK_V)
    sums = (batch * G + group) * _padded(T * R) + pair
    logsum = tl.load(lse + sums)
    dot = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    tl.store(delta + sums, dot)
    begin, whole, end = _keys(position, stride_pt, first, T, R, PAIRS, KEYS)
    dq_tile = tl.zeros([PAIRS, BLOCK_K], tl.float32)
    for at in tl.range(begin, end, KEYS):
        key = at + tl.arange(0, KEYS)
        place = tl.minimum(key, T - 1)
        k_tile = _rows(k, place, stride_kt, 0, K, BLOCK_K)
        v_tile = _rows(v, place, stride_vt, 0, V, BLOCK_V)
        score = tl.dot(q_tile, tl.trans(k_tile))
        d_weight = tl.dot(do_tile, tl.trans(v_tile))
        if at >= whole:
            seen = (key[None, :] >= start[:, None]) & (key[None, :] <= token[:, None])
            score = tl.where(seen, score, float("-inf"))
        d_score = tl.exp2(score * scale - logsum[:, None]) * (d_weight - dot[:, None])
        dq_tile = tl.dot(d_score.to(k_tile.dtype), k_tile, dq_tile)
    _store(dq, dq_tile * natural_scale, (batch * T + token) * G * R + h, pair < T * R, K, BLOCK_K)


@triton.jit(do_not_specialize=SIZES)
def key_backward_kernel(
    q,
    k,
    v,
    position,
    lse,
    do,
    delta,
    dk,  # [B, T, G, K]
    dv,  # [B, T, G, V]
    stride_qb,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kg,
    stride_vb,
    stride_vt,
    stride_vg,
    stride_pb,
    stride_pt,
    stride_db,
    stride_dt,
    stride_dh,
    scale,
    natural_scale,
    B,
    T,
    G: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PAIRS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """The scores stand transposed, keys by pairs, so that no operand of a product is the transpose of a product."""
    program = tl.program_id(0).to(tl.int64)
    batch, group = program % (B * G) // G, program % G
    # The first keys, which may be seen by the most, go first.
    first = (program // (B * G)).to(tl.int32) * KEYS
    q += batch * stride_qb + group * R * stride_qh
    do += batch * stride_db + group * R * stride_dh
    position += batch * stride_pb
    lse += (batch * G + group) * _padded(T * R)
    delta += (batch * G + group) * _padded(T * R)
    key = first + tl.arange(0, KEYS)
    place = tl.minimum(key, T - 1)
    k_tile = _rows(k + batch * stride_kb + group * stride_kg, place, stride_kt, 0, K, BLOCK_K)
    v_tile = _rows(v + batch * stride_vb + group * stride_vg, place, stride_vt, 0, V, BLOCK_V)
    whole = _readers(position, stride_pt, first, first, T) * R
    end = _readers(position, stride_pt, first, tl.minimum(first + KEYS, T) - 1, T) * R
    dk_tile = tl.zeros([KEYS, BLOCK_K], tl.float32)
    dv_tile = tl.zeros([KEYS, BLOCK_V], tl.float32)
    for at in tl.range(first * R // PAIRS * PAIRS, end, PAIRS):
        pair, token, head = _pairs(at, T, R, PAIRS)
        q_tile = _rows(q, token, stride_qt, head * stride_qh, K, BLOCK_K)
        do_tile = _rows(do, token, stride_dt, head * stride_dh, V, BLOCK_V)
        score = tl.dot(k_tile, tl.trans(q_tile))
        if (at < (first + KEYS - 1) * R) | (at + PAIRS > whole):
            start = _start(position, token, stride_pt)
            seen = (key[:, None] >= start[None, :]) & (key[:, None] <= token[None, :]) & (pair < T * R)[None, :]
            score = tl.where(seen, score, float("-inf"))
        weight = tl.exp2(score * scale - tl.load(lse + pair)[None, :])
        dv_tile = tl.dot(weight.to(do_tile.dtype), do_tile, dv_tile)
        d_weight = tl.dot(v_tile, tl.trans(do_tile))
        d_score = weight * (d_weight - tl.load(delta + pair)[None, :])
        dk_tile = tl.dot(d_score.to(q_tile.dtype), q_tile, dk_tile)
    row, inside = (batch * T + place) * G + group, key < T
    _store(dk, dk_tile * natural_scale, row, inside, K, BLOCK_K)
    _store(dv, dv_tile, row, inside, V, BLOCK_V)


@triton.jit
def _padded(pairs):
    """Room for the sums of so many pairs, also for those past the end in the last tile of any kernel."""
    return (pairs + PADDING - 1) // PADDING * PADDING


@triton.jit
def _pairs(first, T, R: tl.constexpr, PAIRS: tl.constexpr):
    """The pairs of a tile, and the token and head of each."""
    pair = first + tl.arange(0, PAIRS)
    return pair, tl.minimum(pair // R, T - 1), pair % R


@triton.jit
def _start(position, token, stride):
    """The first key that a token sees; a document may begin before its row."""
    return tl.maximum(token - tl.load(position + token.to(tl.int64) * stride).to(tl.int32), 0)


@triton.jit
def _keys(position, stride, first, T, R: tl.constexpr, PAIRS: tl.constexpr, KEYS: tl.constexpr):
    """The keys of a tile of pairs: the first, the first that not all of its pairs may see, and the end."""
    oldest, newest = first // R, tl.minimum((first + PAIRS - 1) // R, T - 1)
    begin = _start(position, oldest, stride)
    alike = _start(position, newest, stride) == begin
    whole = tl.where(alike, begin + (oldest + 1 - begin) // KEYS * KEYS, begin)
    return begin, whole, newest + 1


@triton.jit
def _readers(position, stride, token, key, T):
    """The end of the tokens that see a key, counted from one at or before it."""
    BLOCK: tl.constexpr = 512
    found = BLOCK
    while found == BLOCK:
        t = token + tl.arange(0, BLOCK)
        start = t - tl.load(position + t.to(tl.int64) * stride, mask=t < T, other=0)
        found = tl.sum(((t < T) & (start <= key)).to(tl.int32))
        token += found
    return token


@triton.jit
def _rows(x, row, stride, offset, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A tile [rows, BLOCK], 0 beyond the width."""
    column = tl.arange(0, BLOCK)
    place = x + (row.to(tl.int64) * stride + offset)[:, None] + column[None, :]
    if WIDTH == BLOCK:
        return tl.load(place)
    else:
        return tl.load(place, mask=(column < WIDTH)[None, :], other=0.0)


@triton.jit
def _store(x, tile, row, inside, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    place = x + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(place, tile.to(x.dtype.element_ty), mask=inside[:, None] & (column < WIDTH)[None, :])
