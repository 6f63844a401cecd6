"""Gated delta rule, backward on Hopper: one pass that carries the state's gradient back and finishes every chunk.

The equations are those of `backward.py`. One program walks the chunks of one head from the last to the first; what it
reads of the next chunk travels to shared memory while it works on this one. Written in Gluon: every operand lies where
the tensor cores read it, nothing moves between layouts, and addresses are the copy engine's.
"""

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from hymo_kernels.device.transfers import (
    barrier,
    chunks_to_forget,
    clear_all,
    copy_line,
    copy_line_before,
    piece_begin,
    seen_as,
    sequence,
    tile_in,
    tile_out,
    write_rows,
)


@gluon.jit(do_not_specialize=["T", "slots", "sequences", "segment_chunks", "segments"])
def fused_backward_kernel(
    q,  # [B T, H D]
    k,
    v,  # [B T, HV D]
    do,
    inverse,  # [B HV T, C]
    attention,
    states,  # [B HV slots D, D], state before each chunk
    dq,  # [B T, HV D]
    dk,
    total,
    segment,
    strength,
    q_unit,
    k_unit,
    forget,
    d_end,  # [N, HV, D, D], gradient of the end state
    dg,  # [B, T, HV] fp32
    d_beta,
    dv,  # [B, T, HV, D]
    dq_rows,  # dq and dk again, for the rows of a chunk that is not full
    dk_rows,
    d_start,  # [N, HV, D, D] fp32, gradient of the start state
    cu_seqlens,
    scale,
    stride_sn,
    stride_sh,
    stride_sk,
    stride_sv,
    T,
    slots,
    sequences,
    segment_chunks,
    segments,
    threshold,
    H: gl.constexpr,
    HV: gl.constexpr,
    D: gl.constexpr,
    C: gl.constexpr,
    PACKED: gl.constexpr,
    FULL: gl.constexpr,  # no chunk is cut short
    NORM: gl.constexpr,
    HAS_END: gl.constexpr,
    KEEP_START: gl.constexpr,
):
    dtype: gl.constexpr = q.dtype
    high: gl.constexpr = D // 64  # warp groups that a state's rows are spread over
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])  # [C, D]
    SQUARE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, C // 2, 16])  # [C, C]
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * high, 2 // high], [16, D * high // 2, 16])  # [D, D]
    ROW: gl.constexpr = gl.SliceLayout(1, WIDE)
    DOWN: gl.constexpr = gl.SliceLayout(1, SQUARE)
    ACROSS: gl.constexpr = gl.SliceLayout(0, SQUARE)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [8, 1], [1, 0])
    TILE: gl.constexpr = q.layout
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    LINE: gl.constexpr = gl.SliceLayout(1, LINES)
    # Partial sums: of a row over one warp group's columns, of a column over one warp's rows.
    HALVES: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0], [0, 1]], [], [64, 2]
    )
    BOTH: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0], [0, 0]], [], [64, 2]
    )
    QUARTERS: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0], [2, 0], [0, 8]], [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]], [[0, 16], [0, 32], [0, 0]], [], [4, 64]
    )
    SUFFIX: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [8, 1], [1, 0])  # [C, C], a row in four threads
    PAIR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])

    program = gl.program_id(0).to(gl.int64)
    hv = program % HV
    part = (program // HV % segments).to(gl.int32)
    n = program // (HV * segments)
    head = hv // (HV // H)
    batch, first, length, slot = sequence(n, cu_seqlens, T, sequences, C, PACKED)
    chunks = (length + C - 1) // C
    place = (batch * HV + hv) * slots + slot
    begin = piece_begin(forget + place, part, segment_chunks, chunks, threshold, False, 4, 1)
    end = piece_begin(forget + place, part + 1, segment_chunks, chunks, threshold, False, 4, 1)
    if (begin < end) | (part == 0):
        row = (batch * HV + hv) * T + first
        total += row
        segment += row
        strength += row
        q_unit += (batch * H + head) * T + first
        k_unit += (batch * H + head) * T + first
        token_row = (batch * T + first).to(gl.int32)
        square_row = row.to(gl.int32)
        state_row = (place * D).to(gl.int32)
        key_column = (head * D).to(gl.int32)
        value_column = (hv * D).to(gl.int32)

        q_tiles = gl.allocate_shared_memory(dtype, [2, C, D], TILE)
        k_tiles = gl.allocate_shared_memory(dtype, [2, C, D], TILE)
        do_tiles = gl.allocate_shared_memory(dtype, [2, C, D], TILE)
        totals = gl.allocate_shared_memory(gl.float32, [2, C], FLAT)
        betas = gl.allocate_shared_memory(gl.float32, [2, C], FLAT)
        q_units = gl.allocate_shared_memory(gl.float32, [2, C], FLAT)
        k_units = gl.allocate_shared_memory(gl.float32, [2, C], FLAT)
        resets = gl.allocate_shared_memory(gl.int32, [2, C], FLAT)
        earlier = gl.allocate_shared_memory(gl.int32, [2, C], FLAT)  # resets, one token before
        scales = gl.allocate_shared_memory(gl.float32, [3, C], FLAT)
        row_sums = gl.allocate_shared_memory(gl.float32, [5, C, 2], PAIR)
        column_sums = gl.allocate_shared_memory(gl.float32, [2, 4, C], PAIR)
        S_tile = gl.allocate_shared_memory(dtype, [D, D], TILE)
        A_tile = gl.allocate_shared_memory(dtype, [C, C], TILE)
        P_tile = gl.allocate_shared_memory(dtype, [C, C], TILE)
        dR_tile = gl.allocate_shared_memory(dtype, [C, D], TILE)
        dS_tile = gl.allocate_shared_memory(dtype, [D, D], TILE)
        squares = gl.allocate_shared_memory(dtype, [2, C, C], TILE)
        work = seen_as(squares, C, D)
        streams = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        matrices = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(streams.index(0), count=1)
        mbarrier.init(streams.index(1), count=1)
        warm = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(matrices, count=1)
        mbarrier.init(warm, count=1)
        early = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        mbarrier.init(early.index(0), count=1)
        mbarrier.init(early.index(1), count=1)
        values = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(values, count=1)
        fence_async_shared()
        barrier()

        late = chunks_to_forget(forget + place, end, threshold, chunks, False, ONE)
        dS = gl.zeros([D, D], gl.float32, STATE)
        feature = gl.arange(0, D, gl.SliceLayout(1, STATE))
        column = gl.arange(0, D, gl.SliceLayout(0, STATE))
        if HAS_END:
            if end + late == chunks:
                d_end += n * stride_sn + hv * stride_sh
                dS = gl.load(d_end + (feature[:, None] * stride_sk + column[None, :] * stride_sv)).to(gl.float32)

        # Chunks after this program's own, last first: only what they hand to the state's gradient.
        chunk = gl.maximum(end + late - 1, 0)
        at = token_row + chunk * C
        mbarrier.expect(early.index(0), 3 * C * D * 2, pred=late > 0)
        tile_in(q, [at, key_column], early.index(0), q_tiles.index(0), pred=late > 0)
        tile_in(k, [at, key_column], early.index(0), k_tiles.index(0), pred=late > 0)
        tile_in(do, [at, value_column], early.index(0), do_tiles.index(0), pred=late > 0)
        mbarrier.expect(warm, 2 * C * C * 2, pred=late > 0)
        tile_in(attention, [square_row + chunk * C, 0], warm, P_tile, pred=late > 0)
        tile_in(inverse, [square_row + chunk * C, 0], warm, A_tile, pred=late > 0)
        token = gl.arange(0, C, ROW)
        inside_next = token < gl.where(late > 0, length - chunk * C, 0)
        rows = chunk * C + token
        G_next = gl.load(total + rows, mask=inside_next, other=0.0)
        seg_next = gl.load(segment + rows, mask=inside_next, other=0)
        beta_next = gl.load(strength + rows, mask=inside_next, other=0.0)
        qu_next = gl.load(q_unit + rows, mask=inside_next, other=0.0)
        ku_next = gl.load(k_unit + rows, mask=inside_next, other=0.0)
        final = gl.maximum(gl.minimum(length - chunk * C, C) - 1, 0)
        G_final_next = gl.load(total + (chunk * C + final), mask=late > 0, other=0.0)
        seg_final_next = gl.load(segment + (chunk * C + final), mask=late > 0, other=0)
        for step in tl.range(0, late, disable_licm=True):
            chunk = end + late - 1 - step
            ahead = gl.maximum(chunk - 1, 0)
            more = step + 1 < late
            here = step % 2
            left = length - chunk * C
            barrier()
            at = token_row + ahead * C
            mbarrier.expect(early.index(1 - here), 3 * C * D * 2, pred=more)
            tile_in(q, [at, key_column], early.index(1 - here), q_tiles.index(1 - here), pred=more)
            tile_in(k, [at, key_column], early.index(1 - here), k_tiles.index(1 - here), pred=more)
            tile_in(do, [at, value_column], early.index(1 - here), do_tiles.index(1 - here), pred=more)
            G, seg, beta, qu, ku = G_next, seg_next, beta_next, scale * qu_next, ku_next
            G_final, seg_final = G_final_next, seg_final_next
            token = gl.arange(0, C, ROW)
            inside = token < left
            rows = ahead * C + token
            G_next = gl.load(total + rows, mask=token < C * more.to(gl.int32), other=0.0)
            seg_next = gl.load(segment + rows, mask=token < C * more.to(gl.int32), other=0)
            beta_next = gl.load(strength + rows, mask=token < C * more.to(gl.int32), other=0.0)
            qu_next = gl.load(q_unit + rows, mask=token < C * more.to(gl.int32), other=0.0)
            ku_next = gl.load(k_unit + rows, mask=token < C * more.to(gl.int32), other=0.0)
            G_final_next = gl.load(total + (ahead * C + C - 1), mask=more, other=0.0)
            seg_final_next = gl.load(segment + (ahead * C + C - 1), mask=more, other=0)
            gamma = gl.where(inside & (seg == 0), gl.exp(G), 0.0)
            w = gl.where(inside & (seg == seg_final), gl.exp(G_final - G), 0.0)
            gamma_all = gl.where(seg_final == 0, gl.exp(G_final), 0.0)
            kt = k_tiles.index(here)
            qt = q_tiles.index(here)
            dot = do_tiles.index(here)
            dS_tile.store(dS.to(dtype))
            fence_async_shared()
            mbarrier.wait(early.index(here), (step // 2) & 1)
            mbarrier.wait(warm, step & 1)
            if not FULL:
                if left < C:
                    clear_all(qt, kt, dot, A_tile, P_tile, left, C, D, LINES)
            none = gl.zeros([C, D], gl.float32, WIDE)
            d_write = warpgroup_mma(kt, dS_tile, none, use_acc=False)
            d_write = warpgroup_mma(P_tile.permute([1, 0]), dot, (w * ku)[:, None] * d_write)
            work.store(d_write.to(dtype))
            fence_async_shared()
            dR = warpgroup_mma(A_tile.permute([1, 0]), work, none, use_acc=False)
            barrier()
            at = square_row + ahead * C
            mbarrier.expect(warm, 2 * C * C * 2, pred=more)
            tile_in(attention, [at, 0], warm, P_tile, pred=more)
            tile_in(inverse, [at, 0], warm, A_tile, pred=more)
            dR_tile.store(((-beta * gamma * ku)[:, None] * dR).to(dtype))
            dot.store(((gamma * qu)[:, None] * dot.load(WIDE).to(gl.float32)).to(dtype))
            fence_async_shared()
            dS = warpgroup_mma(qt.permute([1, 0]), dot, gamma_all * dS, is_async=True)
            dS = warpgroup_mma(kt.permute([1, 0]), dR_tile, dS, is_async=True)
            dS = warpgroup_mma_wait(0, deps=[dS])
        barrier()

        last = end - 1
        steps = last + 1 - begin
        left = length - last * C
        full = steps > 0
        left = gl.where(full, left, 0)
        bar = streams.index(0)
        mbarrier.expect(bar, 3 * C * D * 2, pred=full)
        tile_in(q, [token_row + last * C, key_column], bar, q_tiles.index(0), pred=full)
        tile_in(k, [token_row + last * C, key_column], bar, k_tiles.index(0), pred=full)
        tile_in(do, [token_row + last * C, value_column], bar, do_tiles.index(0), pred=full)
        mbarrier.expect(matrices, (2 * C * C + D * D) * 2, pred=full)
        tile_in(attention, [square_row + last * C, 0], matrices, P_tile, pred=full)
        tile_in(inverse, [square_row + last * C, 0], matrices, A_tile, pred=full)
        tile_in(states, [state_row + last * D, 0], matrices, S_tile, pred=full)
        copy_line(totals.index(0), total, last, left, C, ONE)
        copy_line(betas.index(0), strength, last, left, C, ONE)
        copy_line(q_units.index(0), q_unit, last, left, C, ONE)
        copy_line(k_units.index(0), k_unit, last, left, C, ONE)
        copy_line(resets.index(0), segment, last, left, C, ONE)
        copy_line_before(earlier.index(0), segment, last, left, C, ONE)
        async_copy.commit_group()
        final = gl.maximum(gl.minimum(left, C) - 1, 0)
        G_final = gl.load(total + last * C + final, mask=full, other=0.0)
        seg_final = gl.load(segment + last * C + final, mask=full, other=0)

        dS_tile.store(dS.to(dtype))
        fence_async_shared()

        for step in tl.range(0, steps, disable_licm=True):
            chunk = last - step
            here = step % 2
            left = length - chunk * C
            final = gl.minimum(left, C) - 1
            ahead = gl.maximum(chunk - 1, 0)
            more = step + 1 < steps
            async_copy.wait_group(0)
            barrier()
            copy_line(totals.index(1 - here), total, ahead, length - ahead * C, C, ONE)
            copy_line(betas.index(1 - here), strength, ahead, length - ahead * C, C, ONE)
            copy_line(q_units.index(1 - here), q_unit, ahead, length - ahead * C, C, ONE)
            copy_line(k_units.index(1 - here), k_unit, ahead, length - ahead * C, C, ONE)
            copy_line(resets.index(1 - here), segment, ahead, length - ahead * C, C, ONE)
            copy_line_before(earlier.index(1 - here), segment, ahead, length - ahead * C, C, ONE)
            async_copy.commit_group()
            # v lies where dR will.
            mbarrier.expect(values, C * D * 2)
            tile_in(v, [token_row + chunk * C, value_column], values, dR_tile)

            kt = k_tiles.index(here)
            qt = q_tiles.index(here)
            dot = do_tiles.index(here)
            token = gl.arange(0, C, ROW)
            inside = token < left
            G = totals.index(here).load(ROW)
            seg = resets.index(here).load(ROW)
            beta = betas.index(here).load(ROW)
            qu = scale * q_units.index(here).load(ROW)
            ku = k_units.index(here).load(ROW)
            gamma = gl.where(inside & (seg == 0), gl.exp(G), 0.0)
            w = gl.where(inside & (seg == seg_final), gl.exp(G_final - G), 0.0)
            gamma_all = gl.where(seg_final == 0, gl.exp(G_final), 0.0)
            written = w * ku
            scales.index(0).store(gamma * qu)
            scales.index(1).store(-beta * gamma * ku)

            # The chain: what reaches this chunk's writes, through the read-outs and through the later state.
            mbarrier.wait(streams.index(here), (step // 2) & 1)
            mbarrier.wait(matrices, step & 1)
            if not FULL:
                if left < C:
                    clear_all(qt, kt, dot, A_tile, P_tile, left, C, D, LINES)
            none = gl.zeros([C, D], gl.float32, WIDE)
            d_write = warpgroup_mma(kt, dS_tile, none, use_acc=False, is_async=True)
            kS = warpgroup_mma(kt, S_tile, none, use_acc=False, is_async=True)
            tma.store_wait(0)
            bar = streams.index(1 - here)
            at = token_row + ahead * C
            mbarrier.expect(bar, 3 * C * D * 2, pred=more)
            tile_in(q, [at, key_column], bar, q_tiles.index(1 - here), pred=more)
            tile_in(k, [at, key_column], bar, k_tiles.index(1 - here), pred=more)
            tile_in(do, [at, value_column], bar, do_tiles.index(1 - here), pred=more)
            d_write = warpgroup_mma_wait(1, deps=[d_write])
            d_write = warpgroup_mma(P_tile.permute([1, 0]), dot, written[:, None] * d_write, is_async=True)
            d_write, kS = warpgroup_mma_wait(0, deps=[d_write, kS])
            work.store(d_write.to(dtype))
            fence_async_shared()
            dR = warpgroup_mma(A_tile.permute([1, 0]), work, none, use_acc=False, is_async=True)
            mbarrier.wait(values, step & 1)
            value = dR_tile.load(WIDE)
            if not FULL:
                value = gl.where(inside[:, None], value, gl.zeros([C, D], dtype, WIDE))
            error = value.to(gl.float32) - (gamma * ku)[:, None] * kS
            dR = warpgroup_mma_wait(0, deps=[dR])
            barrier()
            dR_tile.store(dR.to(dtype))
            barrier()
            work.store((beta[:, None] * error).to(dtype))
            fence_async_shared()
            write = warpgroup_mma(A_tile, work, none, use_acc=False, is_async=True)
            d_erase = warpgroup_mma(dR_tile, S_tile.permute([1, 0]), none, use_acc=False, is_async=True)
            row_sums.index(0).store(_halves(dR * value.to(gl.float32), C, D, HALVES))
            write = warpgroup_mma_wait(1, deps=[write])
            barrier()
            work.store(write.to(dtype))
            fence_async_shared()

            flat = gl.zeros([C, C], gl.float32, SQUARE)
            through = warpgroup_mma(work, dS_tile.permute([1, 0]), none, use_acc=False, is_async=True)
            d_erase = warpgroup_mma_wait(1, deps=[d_erase])
            dP_t = warpgroup_mma(work, dot.permute([1, 0]), flat, use_acc=False, is_async=True)
            dL_t = warpgroup_mma(work, dR_tile.permute([1, 0]), flat, use_acc=False, is_async=True)
            k_wide = kt.load(WIDE).to(gl.float32)
            row_sums.index(1).store(_halves(k_wide * d_erase, C, D, HALVES))
            d_erase = (-beta * gamma * ku)[:, None] * d_erase
            through = warpgroup_mma_wait(2, deps=[through])
            kq = warpgroup_mma(kt, qt.permute([1, 0]), flat, use_acc=False, is_async=True)
            kk = warpgroup_mma(kt, kt.permute([1, 0]), flat, use_acc=False, is_async=True)
            row_sums.index(2).store(_halves(k_wide * through, C, D, HALVES))
            d_key = d_erase + written[:, None] * through
            kept = gl.sum(gl.reshape(S_tile.load(STATE).to(gl.float32) * dS, [D * D]), 0)
            # What is left at token i of what token j wrote, [j, i].
            j = gl.arange(0, C, DOWN)
            i = gl.arange(0, C, ACROSS)
            later = j[:, None] <= i[None, :]
            later = later & (resets.index(here).load(DOWN)[:, None] == resets.index(here).load(ACROSS)[None, :])
            if not FULL:
                # Lines end in zeros, and a decay from a strong gate to 0 is infinite.
                later = later & (i < left)[None, :]
            fall = totals.index(here).load(ACROSS)[None, :] - totals.index(here).load(DOWN)[:, None]
            Gamma_t = gl.where(later, gl.exp(fall), 0.0) * k_units.index(here).load(DOWN)[:, None]
            dP_t, dL_t = warpgroup_mma_wait(2, deps=[dP_t, dL_t])
            barrier()
            dP_t = dP_t * Gamma_t * (scale * q_units.index(here).load(ACROSS))[None, :]
            squares.index(0).store(dP_t.to(dtype))
            Gamma_t = gl.where(j[:, None] < i[None, :], Gamma_t, 0.0)
            dL_t = -dL_t * Gamma_t * k_units.index(here).load(ACROSS)[None, :]
            beta_i = betas.index(here).load(ACROSS)
            squares.index(1).store((dL_t * beta_i[None, :]).to(dtype))
            d_read = warpgroup_mma(dot, S_tile.permute([1, 0]), none, use_acc=False, is_async=True)
            kq, kk = warpgroup_mma_wait(1, deps=[kq, kk])
            # Row and column sums of one fp32 matrix: a rounded copy for one of them makes dg wrong under strong decay.
            kk = dL_t * kk
            kq = dP_t * kq
            row_sums.index(4).store(_halves(kq + kk * beta_i[None, :], C, C, HALVES))
            column_sums.index(0).store(_quarters(kq, C))
            column_sums.index(1).store(_quarters(kk, C))
            d_read = warpgroup_mma_wait(0, deps=[d_read])
            d_query = (gamma * qu)[:, None] * d_read
            row_sums.index(3).store(_halves(qt.load(WIDE).to(gl.float32) * d_query, C, D, HALVES))

            # Last uses of do and dR as they are; then scaled, for the state.
            dr = dR_tile.load(LINES).to(gl.float32)
            write_rows(
                dv,
                betas.index(here).load(LINE)[:, None] * dr,
                token_row + chunk * C,
                value_column,
                left,
                HV * D,
                FULL,
                C,
                D,
                LINES,
            )
            dR_tile.store((scales.index(1).load(LINE)[:, None] * dr).to(dtype))
            dot.store((scales.index(0).load(LINE)[:, None] * dot.load(LINES).to(gl.float32)).to(dtype))
            fence_async_shared()
            barrier()
            at = square_row + ahead * C
            mbarrier.expect(matrices, (2 * C * C + D * D) * 2, pred=more)
            tile_in(attention, [at, 0], matrices, P_tile, pred=more)
            tile_in(inverse, [at, 0], matrices, A_tile, pred=more)
            tile_in(states, [state_row + ahead * D, 0], matrices, S_tile, pred=more)

            M_t = squares.index(0)
            W_t = squares.index(1)
            dS = warpgroup_mma(qt.permute([1, 0]), dot, gamma_all * dS, is_async=True)
            dS = warpgroup_mma(kt.permute([1, 0]), dR_tile, dS, is_async=True)
            d_key = warpgroup_mma(M_t, qt, d_key, is_async=True)
            d_query = warpgroup_mma(M_t.permute([1, 0]), kt, d_query, is_async=True)
            d_key = warpgroup_mma(W_t, kt, d_key, is_async=True)
            d_key = warpgroup_mma(W_t.permute([1, 0]), kt, d_key, is_async=True)
            dS = warpgroup_mma_wait(4, deps=[dS])
            dS_tile.store(dS.to(dtype))
            fence_async_shared()

            # dG, and what dq and dk have along q and k: sums of the same products.
            value_sum = _row_sum(row_sums.index(0), BOTH, ROW)
            erase_sum = gamma * ku * _row_sum(row_sums.index(1), BOTH, ROW)
            to_end = written * _row_sum(row_sums.index(2), BOTH, ROW)
            read_sum = _row_sum(row_sums.index(3), BOTH, ROW)
            pair_sum = _row_sum(row_sums.index(4), BOTH, ROW)
            read_pairs = gl.convert_layout(gl.sum(column_sums.index(0).load(QUARTERS), 0), ROW, assert_trivial=True)
            write_pairs = gl.convert_layout(gl.sum(column_sums.index(1).load(QUARTERS), 0), ROW, assert_trivial=True)
            d_strength = value_sum - erase_sum + write_pairs
            write_pairs = beta * write_pairs
            erase_sum = beta * erase_sum
            dG = read_sum - erase_sum - to_end + read_pairs + write_pairs - pair_sum
            along_q = read_sum + read_pairs
            along_k = to_end - erase_sum + pair_sum + write_pairs
            out = (batch * T + first + chunk * C) * HV + hv
            gl.store(d_beta + (out + token * HV), d_strength, mask=inside)
            scales.index(2).store(dG)
            # The end of the chunk: the state's decay.
            kept = gamma_all * kept
            above = gl.arange(0, C, gl.SliceLayout(1, SUFFIX))
            below = gl.arange(0, C, gl.SliceLayout(0, SUFFIX))
            same = resets.index(here).load(gl.SliceLayout(1, SUFFIX))
            counts = (above[:, None] <= below[None, :]) & (
                same[:, None] == resets.index(here).load(gl.SliceLayout(0, SUFFIX))[None, :]
            )
            counts = counts & (below < left)[None, :]
            dG_i = scales.index(2).load(gl.SliceLayout(0, SUFFIX))
            dG_i += gl.where(below == final, kept + gl.sum(to_end, 0), 0.0)
            d_gate = gl.sum(gl.where(counts, dG_i[None, :], 0.0), 1)
            # A reset's own gate does not matter.
            d_gate = gl.where(same == earlier.index(here).load(gl.SliceLayout(1, SUFFIX)), d_gate, 0.0)
            gl.store(dg + (out + above * HV), d_gate, mask=above < left)

            d_key, d_query = warpgroup_mma_wait(0, deps=[d_key, d_query])
            # d x = u (d - x_unit <x_unit, d>) is d - x <x, d> u^2 here, where d already carries u = 1 / |x|.
            if NORM:
                unit = q_units.index(here).load(ROW)
                d_query -= qt.load(WIDE).to(gl.float32) * (along_q * unit * unit)[:, None]
                d_key -= kt.load(WIDE).to(gl.float32) * (along_k * ku * ku)[:, None]
            qt.store(d_query.to(dtype))
            kt.store(d_key.to(dtype))
            fence_async_shared()
            barrier()
            at = token_row + chunk * C
            if FULL:
                tile_out(dq, [at, value_column], qt)
                tile_out(dk, [at, value_column], kt)
            else:
                if left < C:
                    write_rows(dq_rows, qt.load(LINES), at, value_column, left, HV * D, FULL, C, D, LINES)
                    write_rows(dk_rows, kt.load(LINES), at, value_column, left, HV * D, FULL, C, D, LINES)
                else:
                    tile_out(dq, [at, value_column], qt)
                    tile_out(dk, [at, value_column], kt)
            G_final = gl.load(total + ahead * C + (C - 1), mask=more, other=0.0)
            seg_final = gl.load(segment + ahead * C + (C - 1), mask=more, other=0)

        async_copy.wait_group(0)
        tma.store_wait(0)
        mbarrier.invalidate(streams.index(0))
        mbarrier.invalidate(streams.index(1))
        mbarrier.invalidate(matrices)
        mbarrier.invalidate(warm)
        mbarrier.invalidate(early.index(0))
        mbarrier.invalidate(early.index(1))
        mbarrier.invalidate(values)
        if KEEP_START:
            if begin == 0:
                d_start += (n * HV + hv) * D * D
                gl.store(d_start + (feature[:, None] * D + column[None, :]), dS)


@gluon.jit
def _halves(x, C: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Sums of the rows of a product, one over each warp group's columns."""
    return gl.convert_layout(gl.sum(gl.reshape(x, [C, 2, N // 2]), 2), LAYOUT, assert_trivial=True)


@gluon.jit
def _quarters(x, C: gl.constexpr):
    """Sums of the columns of a product, one over each warp's rows."""
    return gl.sum(gl.reshape(x, [4, 16, C]), 1)


@gluon.jit
def _row_sum(halves, BOTH: gl.constexpr, ROW: gl.constexpr):
    return gl.convert_layout(gl.sum(halves.load(BOTH), 1), ROW, assert_trivial=True)
