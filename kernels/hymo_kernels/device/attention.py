"""Softmax attention inside documents: nothing is computed for a document that no row of a tile belongs to.

A tile of queries is a run of pairs (token, query head of one group), token by token, so that a group reads its keys and
values once and a tile spans few tokens, and with them few documents: pair i is head i % R of token i // R. Token t sees
the keys from start_t = t - position_t, which never decreases along a row, to t. Keys of a tile of queries thus begin at
the start of its first token, and queries of a tile of keys end where a start passes its last key. Only a tile that lies
across a start or the diagonal is masked.

Scores are scaled to base 2. A row with nothing seen yet has the lowest finite maximum, so that no -inf is subtracted
from another. Rows of a tile past the end of a sequence are 0 or copies of its last: they are masked or never stored.

COPIED tensors are descriptors, of which Hopper's copy engine brings the tiles of a loop; the others are pointers. So
are those of which a tile is read once, before a loop: by pointers it stays in shared memory, where a product finds it
every time. What is copied would wait in registers, and `ptxas` (12.8 to 13.0) lets a product of two row blocks use up
registers that it needs again in the next round: from the second tile of keys on, weights stood in place of queries.
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
    COPIED: tl.constexpr,
):
    program = tl.program_id(0)
    batch, group = program % (B * G) // G, program % G
    # The last tokens, which may see the most, go first.
    first = (tl.cdiv(T * R, PAIRS) - 1 - program // (B * G)) * PAIRS
    position += batch.to(tl.int64) * stride_pb
    pair, token, head = _pairs(first, T, R, PAIRS)
    start = _start(position, token, stride_pt)
    q_tile = _queries(q, batch, first, group, T, stride_qb, stride_qt, stride_qh, R, K, BLOCK_K, PAIRS, False)
    begin, whole, end = _keys_of(position, stride_pt, first, T, R, PAIRS, KEYS)
    top = tl.full([PAIRS], -3.4028234663852886e38, tl.float32)
    total = tl.zeros([PAIRS], tl.float32)
    read = tl.zeros([PAIRS, BLOCK_V], tl.float32)
    for at in tl.range(begin, end, KEYS):
        k_tile = _keys(k, batch, at, group, T, stride_kb, stride_kt, stride_kg, K, BLOCK_K, KEYS, COPIED)
        score = tl.dot(q_tile, tl.trans(k_tile))
        if at >= whole:
            key = at + tl.arange(0, KEYS)
            seen = (key[None, :] >= start[:, None]) & (key[None, :] <= token[:, None])
            score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1) * scale)
        weight = tl.exp2(score * scale - higher[:, None])
        decay = tl.exp2(top - higher)
        top = higher
        total = total * decay + tl.sum(weight, 1)
        v_tile = _keys(v, batch, at, group, T, stride_vb, stride_vt, stride_vg, V, BLOCK_V, KEYS, COPIED)
        read = tl.dot(weight.to(v_tile.dtype), v_tile, read * decay[:, None])
    row = ((batch.to(tl.int64) * T + token) * G + group) * R + head
    _store(o, read / total[:, None], row, pair < T * R, V, BLOCK_V)
    tl.store(lse + (batch.to(tl.int64) * G + group) * _padded(T * R) + pair, top + tl.log2(total))


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
    COPIED: tl.constexpr,
):
    program = tl.program_id(0)
    batch, group = program % (B * G) // G, program % G
    first = (tl.cdiv(T * R, PAIRS) - 1 - program // (B * G)) * PAIRS
    position += batch.to(tl.int64) * stride_pb
    pair, token, head = _pairs(first, T, R, PAIRS)
    start = _start(position, token, stride_pt)
    q_tile = _queries(q, batch, first, group, T, stride_qb, stride_qt, stride_qh, R, K, BLOCK_K, PAIRS, False)
    o_tile = _queries(o, batch, first, group, T, stride_ob, stride_ot, stride_oh, R, V, BLOCK_V, PAIRS, False)
    do_tile = _queries(do, batch, first, group, T, stride_db, stride_dt, stride_dh, R, V, BLOCK_V, PAIRS, False)
    sums = (batch.to(tl.int64) * G + group) * _padded(T * R) + pair
    logsum = tl.load(lse + sums)
    dot = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    tl.store(delta + sums, dot)
    begin, whole, end = _keys_of(position, stride_pt, first, T, R, PAIRS, KEYS)
    dq_tile = tl.zeros([PAIRS, BLOCK_K], tl.float32)
    for at in tl.range(begin, end, KEYS):
        k_tile = _keys(k, batch, at, group, T, stride_kb, stride_kt, stride_kg, K, BLOCK_K, KEYS, COPIED)
        v_tile = _keys(v, batch, at, group, T, stride_vb, stride_vt, stride_vg, V, BLOCK_V, KEYS, COPIED)
        score = tl.dot(q_tile, tl.trans(k_tile))
        d_weight = tl.dot(do_tile, tl.trans(v_tile))
        if at >= whole:
            key = at + tl.arange(0, KEYS)
            seen = (key[None, :] >= start[:, None]) & (key[None, :] <= token[:, None])
            score = tl.where(seen, score, float("-inf"))
        d_score = tl.exp2(score * scale - logsum[:, None]) * (d_weight - dot[:, None])
        dq_tile = tl.dot(d_score.to(k_tile.dtype), k_tile, dq_tile)
    row = ((batch.to(tl.int64) * T + token) * G + group) * R + head
    _store(dq, dq_tile * natural_scale, row, pair < T * R, K, BLOCK_K)


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
    COPIED: tl.constexpr,
):
    """The scores stand transposed, keys by pairs, so that no operand of a product is the transpose of a product."""
    program = tl.program_id(0)
    batch, group = program % (B * G) // G, program % G
    # The first keys, which may be seen by the most, go first.
    first = program // (B * G) * KEYS
    position += batch.to(tl.int64) * stride_pb
    key = first + tl.arange(0, KEYS)
    k_tile = _keys(k, batch, first, group, T, stride_kb, stride_kt, stride_kg, K, BLOCK_K, KEYS, False)
    v_tile = _keys(v, batch, first, group, T, stride_vb, stride_vt, stride_vg, V, BLOCK_V, KEYS, False)
    whole = _readers(position, stride_pt, first, first, T) * R
    end = _readers(position, stride_pt, first, tl.minimum(first + KEYS, T) - 1, T) * R
    dk_tile = tl.zeros([KEYS, BLOCK_K], tl.float32)
    dv_tile = tl.zeros([KEYS, BLOCK_V], tl.float32)
    for at in tl.range(first * R // PAIRS * PAIRS, end, PAIRS):
        q_tile = _queries(q, batch, at, group, T, stride_qb, stride_qt, stride_qh, R, K, BLOCK_K, PAIRS, COPIED)
        do_tile = _queries(do, batch, at, group, T, stride_db, stride_dt, stride_dh, R, V, BLOCK_V, PAIRS, COPIED)
        score = tl.dot(k_tile, tl.trans(q_tile))
        if (at < (first + KEYS - 1) * R) | (at + PAIRS > whole):
            pair, token, _ = _pairs(at, T, R, PAIRS)
            start = _start(position, token, stride_pt)
            seen = (key[:, None] >= start[None, :]) & (key[:, None] <= token[None, :]) & (pair < T * R)[None, :]
            score = tl.where(seen, score, float("-inf"))
        # Each product is used up before the next is made: two would not fit in registers beside the sums.
        weight = tl.exp2(score * scale - _sums(lse, batch * G + group, at, T * R, PAIRS, COPIED)[None, :])
        dv_tile = tl.dot(weight.to(do_tile.dtype), do_tile, dv_tile)
        d_weight = tl.dot(v_tile, tl.trans(do_tile))
        d_score = weight * (d_weight - _sums(delta, batch * G + group, at, T * R, PAIRS, COPIED)[None, :])
        dk_tile = tl.dot(d_score.to(q_tile.dtype), q_tile, dk_tile)
    row = (batch.to(tl.int64) * T + key) * G + group
    _store(dk, dk_tile * natural_scale, row, key < T, K, BLOCK_K)
    _store(dv, dv_tile, row, key < T, V, BLOCK_V)


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
def _keys_of(position, stride, first, T, R: tl.constexpr, PAIRS: tl.constexpr, KEYS: tl.constexpr):
    """The keys of a tile of pairs: the first, the first of a tile that not every pair sees whole, and the end."""
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
def _keys(
    x,
    batch,
    at,
    group,
    T,
    stride_b,
    stride_t,
    stride_g,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    COPIED: tl.constexpr,
):
    """A tile of keys or values."""
    if COPIED:
        tile = x.load([batch, at, group, 0]).reshape(KEYS, BLOCK)
    else:
        token = tl.minimum(at + tl.arange(0, KEYS), T - 1)
        row = x + batch.to(tl.int64) * stride_b + group.to(tl.int64) * stride_g + token.to(tl.int64) * stride_t
        tile = _rows(row, WIDTH, BLOCK)
    return tile


@triton.jit
def _queries(
    x,
    batch,
    at,
    group,
    T,
    stride_b,
    stride_t,
    stride_h,
    R: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    COPIED: tl.constexpr,
):
    """A tile of what belongs to query heads."""
    if COPIED:
        tile = x.load([batch, at // R, group * R, 0]).reshape(PAIRS, BLOCK)
    else:
        _, token, head = _pairs(at, T, R, PAIRS)
        x += batch.to(tl.int64) * stride_b
        tile = _rows(x + token.to(tl.int64) * stride_t + (group * R + head).to(tl.int64) * stride_h, WIDTH, BLOCK)
    return tile


@triton.jit
def _rows(row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of rows that begin where the pointers are, 0 beyond the width."""
    column = tl.arange(0, BLOCK)
    if WIDTH == BLOCK:
        tile = tl.load(row[:, None] + column[None, :])
    else:
        tile = tl.load(row[:, None] + column[None, :], mask=(column < WIDTH)[None, :], other=0.0)
    return tile


@triton.jit
def _sums(x, row, at, pairs, PAIRS: tl.constexpr, COPIED: tl.constexpr):
    if COPIED:
        sums = x.load([row, at]).reshape(PAIRS)
    else:
        sums = tl.load(x + row.to(tl.int64) * _padded(pairs) + at + tl.arange(0, PAIRS))
    return sums


@triton.jit
def _padded(pairs):
    """Room for the sums of so many pairs, also for those past the end in the last tile of any kernel."""
    return (pairs + PADDING - 1) // PADDING * PADDING


@triton.jit
def _store(x, tile, row, inside, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    place = x + row[:, None] * WIDTH + column[None, :]
    tl.store(place, tile.to(x.dtype.element_ty), mask=inside[:, None] & (column < WIDTH)[None, :])
