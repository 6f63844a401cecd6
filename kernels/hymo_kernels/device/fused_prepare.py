"""Gated delta rule on Hopper, what needs no state: gates, norms, and the inverse of every chunk's triangular system.

What `prepare.py` computes, for keys and queries that are divided by their lengths here: then every factor of the
inverse is bounded and half precision operands give it to 1e-3, well within the 16 bits it is kept in; to 2e-2 to
5e-2 at worst, for keys that hardly differ from one to the next and beta 2.

Five programs share a multiprocessor: L lies where the keys were, P and A where the queries were, and P is gated by
halves of the columns, for 96 registers hold no more.
"""

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from hymo_kernels.device import places
from hymo_kernels.device.transfers import add, barrier, copy_in, of_type, seen_as

place_of_slot = gluon.jit(places.place_of_slot.fn)
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
RESET = gl.constexpr(200.0)  # doublings: what is left of anything is less than the smallest number


@gluon.jit(do_not_specialize=["stride_gb", "stride_bb", "T", "slots", "sequences"])
def fused_prepare_kernel(
    q,  # [B, T, H, D]
    k,  # [B, T, H, D]
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
    H: gl.constexpr,
    HV: gl.constexpr,
    D: gl.constexpr,
    C: gl.constexpr,
    PACKED: gl.constexpr,
    GATE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    SIGMOID: gl.constexpr,
    HAS_G: gl.constexpr,
    BETA_MAX: gl.constexpr,
):
    dtype: gl.constexpr = q.dtype.element_ty
    SQUARE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])  # [C, C]
    BLOCK: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])  # [4, 16, 16], one a warp
    DOWN: gl.constexpr = gl.SliceLayout(1, SQUARE)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    SMALL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BLOCK_TILE: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [2, 1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    program = gl.program_id(0)
    place = program // HV
    if PACKED:  # else it needs no divisions of 64 bits
        place = place.to(gl.int64)
    batch, slot, first, chunk, length, live = place_of_slot(place, cu_seqlens, T, slots, sequences, C, PACKED)
    if live:
        row = batch.to(gl.int64)
        begin = (first + chunk * C).to(gl.int64)  # in the rows of the sequence's batch
        left = length - chunk * C
        hv = (program % HV).to(gl.int64)
        head = (program % HV // (HV // H)).to(gl.int64)
        q_memory = gl.allocate_shared_memory(dtype, [D // C, C, C], TILE)
        k_memory = gl.allocate_shared_memory(dtype, [D // C, C, C], TILE)
        q_tile = seen_as(q_memory, C, D)
        k_tile = seen_as(k_memory, C, D)
        out_tile = q_memory.index(0)
        A_tile = of_type(out_tile, gl.float16)
        L_tile = of_type(k_memory.index(0), gl.float16)
        L_blocks = gl.allocate_shared_memory(gl.float16, [4, 16, 16], BLOCK_TILE)
        A_blocks = gl.allocate_shared_memory(gl.float16, [4, 16, 16], BLOCK_TILE)
        falls = gl.allocate_shared_memory(gl.float32, [C], FLAT)  # log2 of what is left at each token
        rises = gl.allocate_shared_memory(gl.float32, [C], FLAT)  # the same less log2 of the key's unit
        k_units = gl.allocate_shared_memory(gl.float32, [C], FLAT)
        strengths = gl.allocate_shared_memory(gl.float32, [C], FLAT)

        i = gl.arange(0, C, gl.SliceLayout(1, LINES))
        column = gl.arange(0, D, gl.SliceLayout(0, LINES))
        mask = (i < left)[:, None]
        q += row * stride_qb + begin * stride_qt + head * stride_qh
        k += row * stride_kb + begin * stride_kt + head * stride_kh
        copy_in(k_tile, k + (i[:, None] * stride_kt + column[None, :]), mask=mask)
        copy_in(q_tile, q + (i[:, None] * stride_qt + column[None, :]), mask=mask)
        async_copy.commit_group()
        barrier()  # else the assembler lets some of the copies wait for the gates

        t = gl.arange(0, C, LINE)
        inside = t < left
        beta += row * stride_bb + begin * stride_bt + hv * stride_bh
        write = gl.load(beta + t * stride_bt, mask=inside, other=0.0).to(gl.float32)
        if SIGMOID:
            write = gl.where(inside, BETA_MAX / (1.0 + gl.exp(-write)), 0.0)
        decay = gl.zeros([C], gl.float32, LINE)
        if HAS_G:
            g += row * stride_gb + begin * stride_gt + hv * stride_gh
            decay = gl.load(g + t * stride_gt, mask=inside, other=0.0).to(gl.float32)
        if GATE:
            if HAS_BIAS:
                decay += gl.load(dt_bias + hv).to(gl.float32)
            rate = gl.exp(gl.load(A_log + hv).to(gl.float32))
            softplus = gl.where(decay > 20.0, decay, gl.log(1.0 + gl.exp(gl.minimum(decay, 20.0))))
            decay = gl.where(inside, -rate * softplus, 0.0)
        kept = decay
        if not (SIGMOID and BETA_MAX <= 2.0):
            # For |k| <= 1 the largest factor of I - beta k k^T is |1 - beta| where that exceeds 1.
            kept += LN2 * _log2(gl.maximum(1.0, gl.abs(1.0 - write)))
        gl.store(forget + (row * HV + hv) * slots + slot, gl.sum(kept, 0))
        reset = (decay == float("-inf")).to(gl.int32)
        G = gl.associative_scan(gl.where(reset > 0, 0.0, decay), 0, add)
        seg = gl.associative_scan(reset, 0, add)
        out = (row * HV + hv) * T + begin
        gl.store(total + out + t, G, mask=inside)
        gl.store(segment + out + t, seg, mask=inside)
        gl.store(strength + out + t, write, mask=inside)
        falls.store(gl.where(inside, G * LOG2E - RESET * seg.to(gl.float32), float("-inf")))
        strengths.store(write)

        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        flat = gl.zeros([C, C], gl.float32, SQUARE)
        q_squares = gl.convert_layout(_squares(q_tile, C, D, BLOCK), DOWN, assert_trivial=True)
        kk = warpgroup_mma(k_tile, k_tile.permute([1, 0]), flat, use_acc=False, is_async=True)
        qk = warpgroup_mma(q_tile, k_tile.permute([1, 0]), flat, use_acc=False, is_async=True)
        kk, qk = warpgroup_mma_wait(0, deps=[kk, qk])
        left_kk, right_kk = _halves_of_square(kk, C)
        k_squares = gl.convert_layout(_diagonal(_blocks(left_kk, right_kk, BLOCK), C, BLOCK), DOWN, assert_trivial=True)
        k_squares += 1e-6
        ku = gl.rsqrt(k_squares)
        qu = gl.rsqrt(q_squares + 1e-6)
        j = gl.arange(0, C, DOWN)
        unit_row = (row * H + head) * T + begin
        mask = (j < left) & (hv % (HV // H) == 0)
        gl.store(k_unit + unit_row + j, ku, mask=mask)
        gl.store(q_unit + unit_row + j, qu, mask=mask)
        k_units.store(ku)
        # Beyond the sequence nothing is left of anything.
        rises.store(gl.where(j < left, falls.load(DOWN) + 0.5 * _log2(k_squares), float("inf")))
        barrier()

        left_qk, right_qk = _halves_of_square(qk, C)
        qu *= scale
        ku *= strengths.load(DOWN)
        left_P = _gated(left_qk, qu, falls, rises, 0, C)
        right_P = _gated(right_qk, qu, falls, rises, C // 2, C)
        left_L = _scaled(left_kk, ku, k_units, 0, C)
        right_L = _scaled(right_kk, ku, k_units, C // 2, C)
        out_tile.store(_whole(left_P.to(dtype), right_P.to(dtype), C, SQUARE))
        L_tile.store(_whole(left_L.to(gl.float16), right_L.to(gl.float16), C, SQUARE))
        L = _blocks(left_L, right_L, BLOCK)
        L_blocks.store(L.to(gl.float16))
        barrier()
        at = row_major(C, SMALL)
        in_rows = (gl.arange(0, C, gl.SliceLayout(1, SMALL)) < left)[:, None]
        gl.store(attention + out * C + at, out_tile.load(SMALL), mask=in_rows)

        # (I + L)^-1 by block doubling: with the inverses A of the diagonal blocks of s tokens, those of 2 s are
        # A - A L A, taken in the lower left quarter of every block. Up to 16 each warp is on its own.
        A = _invert_blocks(L, L_blocks.permute([0, 2, 1]).load(BLOCK), BLOCK)
        A = _double_16(A, A_blocks, L_tile, C, SQUARE, BLOCK)
        A = _double_32(A, A_tile, L_tile, C, SQUARE)
        # The gates enter last: under them L would be rounded once more, which near beta 2 is ten times the error.
        A *= _exp2(gl.minimum(falls.load(DOWN)[:, None] - falls.load(gl.SliceLayout(0, SQUARE))[None, :], 0.0))
        barrier()
        out_tile.store(A.to(dtype))
        barrier()
        gl.store(inverse + out * C + at, out_tile.load(SMALL), mask=in_rows)


@gluon.jit
def _exp2(x):
    """To 2 units in the last place; 0 for what is below the normal numbers."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _log2(x):
    """To 2^-22."""
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def row_major(C: gl.constexpr, LAYOUT: gl.constexpr):
    i = gl.arange(0, C, gl.SliceLayout(1, LAYOUT))
    j = gl.arange(0, C, gl.SliceLayout(0, LAYOUT))
    return i[:, None] * C + j[None, :]


@gluon.jit
def _gated(qk, qu, falls, rises, BEGIN: gl.constexpr, C: gl.constexpr):
    """P in half of the columns: products of queries with keys under the gates, divided by the lengths of both."""
    HALF: gl.constexpr = qk.type.layout
    DOWN: gl.constexpr = gl.SliceLayout(1, HALF)
    ACROSS: gl.constexpr = gl.SliceLayout(0, HALF)
    i = gl.arange(0, C, DOWN)[:, None]  # rows: the token that reads or erases
    j = gl.arange(0, C // 2, ACROSS)[None, :] + BEGIN
    fall, rise = falls.load(DOWN), rises.slice(BEGIN, C // 2).load(ACROSS)
    gates = gl.where(i >= j, _exp2(fall[:, None] - rise[None, :]), 0.0)
    return qk * gates * gl.convert_layout(qu, DOWN, assert_trivial=True)[:, None]


@gluon.jit
def _scaled(kk, ku, k_units, BEGIN: gl.constexpr, C: gl.constexpr):
    """L in half of the columns; what it has above and on the diagonal does not matter."""
    HALF: gl.constexpr = kk.type.layout
    ku = gl.convert_layout(ku, gl.SliceLayout(1, HALF), assert_trivial=True)
    return kk * ku[:, None] * k_units.slice(BEGIN, C // 2).load(gl.SliceLayout(0, HALF))[None, :]


@gluon.jit
def _halves(x):
    """Of [4, 16, N] the left and the right half of the columns."""
    return gl.split(gl.permute(gl.reshape(x, [4, 16, 2, x.shape[2] // 2]), [0, 1, 3, 2]))


@gluon.jit
def _halves_of_square(x, C: gl.constexpr):
    left, right = _halves(gl.reshape(x, [4, 16, C]))
    return gl.reshape(left, [C, C // 2]), gl.reshape(right, [C, C // 2])


@gluon.jit
def _whole(left, right, C: gl.constexpr, SQUARE: gl.constexpr):
    """[C, C] from its halves."""
    x = gl.reshape(gl.permute(gl.join(left, right), [0, 2, 1]), [C, C])
    return gl.convert_layout(x, SQUARE, assert_trivial=True)


@gluon.jit
def _blocks(left, right, BLOCK: gl.constexpr):
    """The diagonal blocks [4, 16, 16] of [C, C] given by halves, each in the warp that has its rows."""
    left, right = gl.reshape(left, [4, 16, 32]), gl.reshape(right, [4, 16, 32])
    warp = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, left.type.layout)))[:, None, None]
    left, right = _halves(gl.where(warp >= 2, right, left))
    warp = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, left.type.layout)))[:, None, None]
    return gl.convert_layout(gl.where(warp % 2 == 1, right, left), BLOCK, assert_trivial=True)


@gluon.jit
def _spread(x, C: gl.constexpr, SQUARE: gl.constexpr):
    """[4, 16, 16] -> [C, C], zero beside the diagonal blocks."""
    whole = gl.reshape(gl.zeros([C, C], x.dtype, SQUARE), [4, 16, 4, 16])
    FOUR: gl.constexpr = whole.type.layout
    warp = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, FOUR))))[:, None, None, None]
    block = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, FOUR))))[None, None, :, None]
    x = gl.convert_layout(x, gl.SliceLayout(2, FOUR), assert_trivial=True)[:, :, None, :]
    return gl.convert_layout(gl.reshape(gl.where(warp == block, x, whole), [C, C]), SQUARE, assert_trivial=True)


@gluon.jit
def _places(BLOCK: gl.constexpr):
    i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, BLOCK)))[None, :, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, BLOCK)))[None, None, :]
    return i, j


@gluon.jit
def _diagonal(x, C: gl.constexpr, BLOCK: gl.constexpr):
    i, j = _places(BLOCK)
    return gl.reshape(gl.sum(gl.where(i == j, x, 0.0), 2), [C])


@gluon.jit
def _squares(tile, C: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr):
    """The squared length of every row: of the products of 16 rows with each other, the diagonal."""
    ROWS: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]), 2)
    x = gl.reshape(tile.load(ROWS), [4, 16, D])
    return _diagonal(_product(x, x, BLOCK), C, BLOCK)


@gluon.jit
def _product(a, b_transposed, BLOCK: gl.constexpr):
    """a b of blocks in registers, given b^T: what a warp holds of b^T is what it needs of b."""
    a = gl.convert_layout(a, gl.DotOperandLayout(0, BLOCK, 2), assert_trivial=True)
    b = gl.permute(b_transposed, [0, 2, 1])
    b = gl.convert_layout(b, gl.DotOperandLayout(1, BLOCK, 2), assert_trivial=True)
    return mma_v2(a, b, gl.zeros([4, 16, 16], gl.float32, BLOCK))


@gluon.jit
def _invert_blocks(L, Lt, BLOCK: gl.constexpr):
    """A of blocks of 16, given L and, in fp16, its transpose; what L has above and on the diagonal does not matter."""
    i, j = _places(BLOCK)
    pair = i // 2 == j // 2
    one = gl.where(i == j, 1.0, 0.0)
    A = one - gl.where(pair & (i > j), L, 0.0)
    At = one - gl.where(pair & (i < j), Lt.to(gl.float32), 0.0)
    for level in gl.static_range(1, 4):
        A, At = _double(A, At, Lt, 2**level, BLOCK)
    return A


@gluon.jit
def _double(A, At, Lt, SIZE: gl.constexpr, BLOCK: gl.constexpr):
    """A and its transpose, for each is made of the other's."""
    i, j = _places(BLOCK)
    a, at = A.to(gl.float16), At.to(gl.float16)
    AL = _product(a, Lt, BLOCK).to(gl.float16)
    near = i // (2 * SIZE) == j // (2 * SIZE)
    A = gl.where(near & (i // SIZE > j // SIZE), -_product(AL, at, BLOCK), A)
    At = gl.where(near & (i // SIZE < j // SIZE), -_product(at, AL, BLOCK), At)
    return A, At


@gluon.jit
def _double_16(A, A_blocks, L_tile, C: gl.constexpr, SQUARE: gl.constexpr, BLOCK: gl.constexpr):
    """From blocks [4, 16, 16] to A of blocks of 32, [C, C]."""
    COLUMNS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4, 1], [1, 16, 8])  # [4 column blocks, C, 16]
    half = A.to(gl.float16)
    A_blocks.store(half)
    # A L in a warp's own rows; of that the block beside the diagonal, times the A of its columns.
    own = gl.convert_layout(-half, gl.DotOperandLayout(0, BLOCK, 2), assert_trivial=True)
    rows = L_tile.reshape([4, 16, C]).load(gl.DotOperandLayout(1, BLOCK, 2))
    AL = mma_v2(own, rows, gl.zeros([4, 16, C], gl.float32, BLOCK)).to(gl.float16)
    warp = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, BLOCK)))[:, None, None]
    block = gl.arange(0, C, gl.SliceLayout(0, gl.SliceLayout(1, BLOCK)))[None, None, :] // 16
    AL = gl.where((warp == block + 1) & (warp % 2 == 1), AL, 0.0)
    AL = gl.permute(gl.reshape(AL, [C, 4, 16]), [1, 0, 2])
    AL = gl.convert_layout(AL, gl.DotOperandLayout(0, COLUMNS, 2), assert_trivial=True)
    A = gl.permute(gl.reshape(_spread(A, C, SQUARE), [C, 4, 16]), [1, 0, 2])
    A = gl.convert_layout(A, COLUMNS, assert_trivial=True)
    barrier()
    A = mma_v2(AL, A_blocks.load(gl.DotOperandLayout(1, COLUMNS, 2)), A)
    return gl.convert_layout(gl.reshape(gl.permute(A, [1, 0, 2]), [C, C]), SQUARE, assert_trivial=True)


@gluon.jit
def _double_32(A, A_tile, L_tile, C: gl.constexpr, SQUARE: gl.constexpr):
    """From blocks of 32 to the whole: the lower left quarter."""
    OWN: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    PAIR: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 2, 1], [1, 16, 8])  # [2, 32, 32]
    half = A.to(gl.float16)
    A_tile.store(half)
    _, own = _halves(gl.reshape(half, [4, 16, C]))
    warp = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, own.type.layout)))[:, None, None]
    # Of the upper half's rows nothing, so that they stay.
    own = gl.reshape(gl.where(warp >= 2, -own, 0.0), [2, 32, 32])
    own = gl.convert_layout(own, gl.DotOperandLayout(0, PAIR, 2), assert_trivial=True)
    rows = L_tile.reshape([2, 32, C]).slice(0, 32, 2).load(gl.DotOperandLayout(1, PAIR, 2))
    AL = gl.reshape(mma_v2(own, rows, gl.zeros([2, 32, 32], gl.float32, PAIR)).to(gl.float16), [C, 32])
    AL = gl.convert_layout(AL, gl.DotOperandLayout(0, OWN, 2), assert_trivial=True)
    barrier()
    upper = A_tile.slice(0, 32, 0).slice(0, 32, 1).load(gl.DotOperandLayout(1, OWN, 2))
    left, right = _halves_of_square(A, C)
    LEFT: gl.constexpr = left.type.layout
    X = mma_v2(AL, upper, gl.convert_layout(left, OWN, assert_trivial=True))
    return _whole(gl.convert_layout(X, LEFT, assert_trivial=True), right, C, SQUARE)
