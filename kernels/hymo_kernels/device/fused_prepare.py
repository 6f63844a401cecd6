"""Gated delta rule on Hopper, what needs no state: gates, norms, and the inverse of every chunk's triangular system.

What `prepare.py` computes, for keys and queries that are divided by their lengths here: then every factor of the
inverse is bounded and half precision operands give it to 1e-3, well within the 16 bits it is kept in.
"""

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from hymo_kernels.device import places
from hymo_kernels.device.transfers import add, barrier, copy_in

place_of_slot = gluon.jit(places.place_of_slot.fn)


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
    DOWN: gl.constexpr = gl.SliceLayout(1, SQUARE)
    ACROSS: gl.constexpr = gl.SliceLayout(0, SQUARE)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    SMALL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    program = gl.program_id(0).to(gl.int64)
    head = program % H
    batch, slot, first, chunk, length, live = place_of_slot(program // H, cu_seqlens, T, slots, sequences, C, PACKED)
    if live:
        begin = first + chunk * C  # in the rows of the sequence's batch
        left = length - chunk * C
        q_tile = gl.allocate_shared_memory(dtype, [C, D], TILE)
        k_tile = gl.allocate_shared_memory(dtype, [C, D], TILE)
        row = gl.arange(0, C, gl.SliceLayout(1, LINES))
        column = gl.arange(0, D, gl.SliceLayout(0, LINES))
        mask = (row < left)[:, None]
        q_rows = q + batch * stride_qb + begin * stride_qt + head * stride_qh
        k_rows = k + batch * stride_kb + begin * stride_kt + head * stride_kh
        at = row[:, None] * stride_kt + column[None, :]
        copy_in(k_tile, k_rows + at, mask=mask)
        at = row[:, None] * stride_qt + column[None, :]
        copy_in(q_tile, q_rows + at, mask=mask)
        async_copy.commit_group()

        totals = gl.allocate_shared_memory(gl.float32, [C], FLAT)
        resets = gl.allocate_shared_memory(gl.int32, [C], FLAT)
        strengths = gl.allocate_shared_memory(gl.float32, [C], FLAT)
        k_units = gl.allocate_shared_memory(gl.float32, [C], FLAT)
        L_tile = gl.allocate_shared_memory(gl.float16, [C, C], TILE)
        A_tile = gl.allocate_shared_memory(gl.float16, [C, C], TILE)

        j = gl.arange(0, C, DOWN)  # rows: the token that reads or erases
        i = gl.arange(0, C, ACROSS)
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        flat = gl.zeros([C, C], gl.float32, SQUARE)
        kk = warpgroup_mma(k_tile, k_tile.permute([1, 0]), flat, use_acc=False, is_async=True)
        qk = warpgroup_mma(q_tile, k_tile.permute([1, 0]), flat, use_acc=False, is_async=True)
        qq = warpgroup_mma(q_tile, q_tile.permute([1, 0]), flat, use_acc=False, is_async=True)
        kk, qk, qq = warpgroup_mma_wait(0, deps=[kk, qk, qq])
        diagonal = j[:, None] == i[None, :]
        k_squares = gl.sum(gl.where(diagonal, kk, 0.0), 1)
        ku = gl.rsqrt(k_squares + 1e-6)
        qu = gl.rsqrt(gl.sum(gl.where(diagonal, qq, 0.0), 1) + 1e-6)
        unit_row = (batch * H + head) * T + begin
        gl.store(k_unit + unit_row + j, ku, mask=j < left)
        gl.store(q_unit + unit_row + j, qu, mask=j < left)
        k_units.store(ku)
        ku_i = k_units.load(ACROSS)
        kk = kk * ku[:, None] * ku_i[None, :]
        qk = qk * (scale * qu)[:, None] * ku_i[None, :]
        t = gl.arange(0, C, LINE)
        inside = t < left
        k_length = k_units.load(LINE)
        k_length = gl.where(inside, 1.0 - 1e-6 * k_length * k_length, 0.0)  # |k|^2 of the key as it is used

        for member in gl.static_range(HV // H):
            hv = head * (HV // H) + member
            out = (batch * HV + hv) * T + begin
            x = gl.load(beta + batch * stride_bb + hv * stride_bh + (begin + t) * stride_bt, mask=inside, other=0.0)
            write = x.to(gl.float32)
            if SIGMOID:
                write = gl.where(inside, BETA_MAX / (1.0 + gl.exp(-write)), 0.0)
            decay = gl.zeros([C], gl.float32, LINE)
            if HAS_G:
                x = gl.load(g + batch * stride_gb + hv * stride_gh + (begin + t) * stride_gt, mask=inside, other=0.0)
                decay = x.to(gl.float32)
            if GATE:
                if HAS_BIAS:
                    decay += gl.load(dt_bias + hv).to(gl.float32)
                rate = gl.exp(gl.load(A_log + hv).to(gl.float32))
                softplus = gl.where(decay > 20.0, decay, gl.log(1.0 + gl.exp(gl.minimum(decay, 20.0))))
                decay = gl.where(inside, -rate * softplus, 0.0)
            reset = (decay == float("-inf")).to(gl.int32)
            decay = gl.where(reset > 0, 0.0, decay)
            G = gl.associative_scan(decay, 0, add)
            # What lies beyond the sequence is a segment of its own.
            seg = gl.where(inside, gl.associative_scan(reset, 0, add), 127)
            gl.store(total + out + t, G, mask=inside)
            gl.store(segment + out + t, seg, mask=inside)
            gl.store(strength + out + t, write, mask=inside)
            # The largest factor of I - beta k k^T is |1 - beta |k|^2| where that exceeds 1.
            growth = gl.log(gl.maximum(1.0, gl.abs(1.0 - write * k_length)))
            kept = gl.where(gl.sum(reset, 0) > 0, float("-inf"), gl.sum(decay + growth, 0))
            gl.store(forget + (batch * HV + hv) * slots + slot, kept)
            barrier()
            totals.store(G)
            resets.store(seg)
            strengths.store(write)

            at = row_major(C, SMALL)
            in_rows = (gl.arange(0, C, gl.SliceLayout(1, SMALL)) < left)[:, None]
            P = (qk * _decays(totals, resets, C, SQUARE)).to(attention.dtype.element_ty)
            gl.store(attention + out * C + at, gl.convert_layout(P, SMALL), mask=in_rows)

            # (I + L)^-1 by block doubling: with the inverses A of the diagonal blocks of s tokens, those of 2 s are
            # A - A L A, taken in the lower left quarter of every block.
            L = gl.where(j[:, None] > i[None, :], strengths.load(DOWN)[:, None] * kk, 0.0)
            L_tile.store(L.to(gl.float16))
            A = gl.where(diagonal, 1.0, 0.0) - gl.where(j[:, None] // 2 == i[None, :] // 2, L, 0.0)
            for level in gl.static_range(1, 6):
                A = _double(A, L_tile, A_tile, 2**level, C, SQUARE)
            A = (A * _decays(totals, resets, C, SQUARE)).to(inverse.dtype.element_ty)
            gl.store(inverse + out * C + at, gl.convert_layout(A, SMALL), mask=in_rows)


@gluon.jit
def _decays(totals, resets, C: gl.constexpr, SQUARE: gl.constexpr):
    """What is left at each token of what each earlier one wrote. Made twice: it does not fit beside the inverse."""
    i = gl.arange(0, C, gl.SliceLayout(1, SQUARE))
    j = gl.arange(0, C, gl.SliceLayout(0, SQUARE))
    reset_i, reset_j = resets.load(gl.SliceLayout(1, SQUARE)), resets.load(gl.SliceLayout(0, SQUARE))
    fall = totals.load(gl.SliceLayout(1, SQUARE))[:, None] - totals.load(gl.SliceLayout(0, SQUARE))[None, :]
    seen = (i[:, None] >= j[None, :]) & (reset_i[:, None] == reset_j[None, :])
    return gl.where(seen, gl.exp(fall), 0.0)


@gluon.jit
def row_major(C: gl.constexpr, LAYOUT: gl.constexpr):
    i = gl.arange(0, C, gl.SliceLayout(1, LAYOUT))
    j = gl.arange(0, C, gl.SliceLayout(0, LAYOUT))
    return i[:, None] * C + j[None, :]


@gluon.jit
def _double(A, L_tile, A_tile, SIZE: gl.constexpr, C: gl.constexpr, SQUARE: gl.constexpr):
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SQUARE, 2)
    i = gl.arange(0, C, gl.SliceLayout(1, SQUARE))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, SQUARE))[None, :]
    none = gl.zeros([C, C], gl.float32, SQUARE)
    half = A.to(gl.float16)
    A_tile.store(half)
    fence_async_shared()
    X = warpgroup_mma(gl.convert_layout(half, LEFT), L_tile, none, use_acc=False)
    X = warpgroup_mma(gl.convert_layout(X.to(gl.float16), LEFT), A_tile, none, use_acc=False)
    return A - gl.where((i // (2 * SIZE) == j // (2 * SIZE)) & (i // SIZE > j // SIZE), X, 0.0)
