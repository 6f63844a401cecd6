"""Gated delta rule, forward on Hopper: one program carries a head's whole state through its chunks.

The equations are those of `forward.py`; the form is that of `fused_backward.py`.
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
    piece_begin,
    sequence,
    tile_in,
    tile_out,
    write_rows,
)


@gluon.jit(do_not_specialize=["T", "slots", "sequences", "segment_chunks", "segments"])
def fused_forward_kernel(
    q,  # [B T, H D]
    k,
    v,  # [B T, HV D]
    inverse,  # [B HV T, C]
    attention,
    o,  # [B T, HV D]
    states,  # [B HV slots D, D], the state before each chunk
    total,
    segment,
    strength,
    q_unit,
    k_unit,
    forget,
    start_state,  # [N, HV, D, D]
    end_state,  # [N, HV, D, D] fp32
    o_rows,  # o again, for the rows of a chunk that is not full
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
    HAS_START: gl.constexpr,
    READ_OUT: gl.constexpr,
    KEEP_STATES: gl.constexpr,
    KEEP_END: gl.constexpr,
):
    dtype: gl.constexpr = q.dtype
    high: gl.constexpr = D // 64  # warp groups that a state's rows are spread over
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])  # [C, D]
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4 * high, 2 // high], [16, D * high // 2, 16])  # [D, D]
    ROW: gl.constexpr = gl.SliceLayout(1, WIDE)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [8, 1], [1, 0])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    TILE: gl.constexpr = q.layout
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    COST: gl.constexpr = 3 if READ_OUT else 2  # of a chunk, where one that is only walked over costs 2
    WALKED: gl.constexpr = (2 * C * D + C * C) * 2  # bytes a chunk that is not read out
    COPIED: gl.constexpr = WALKED + (C * D + C * C) * READ_OUT * 2

    program = gl.program_id(0).to(gl.int64)
    hv = program % HV
    part = (program // HV % segments).to(gl.int32)
    n = program // (HV * segments)
    head = hv // (HV // H)
    batch, first, length, slot = sequence(n, cu_seqlens, T, sequences, C, PACKED)
    chunks = (length + C - 1) // C
    place = (batch * HV + hv) * slots + slot
    begin = piece_begin(forget + place, part, segment_chunks, chunks, threshold, True, COST, 2)
    end = piece_begin(forget + place, part + 1, segment_chunks, chunks, threshold, True, COST, 2)
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
        v_tiles = gl.allocate_shared_memory(dtype, [2, C, D], TILE)
        A_tiles = gl.allocate_shared_memory(dtype, [2, C, C], TILE)
        P_tiles = gl.allocate_shared_memory(dtype, [2, C, C], TILE)
        totals = gl.allocate_shared_memory(gl.float32, [2, C], FLAT)
        betas = gl.allocate_shared_memory(gl.float32, [2, C], FLAT)
        q_units = gl.allocate_shared_memory(gl.float32, [2, C], FLAT)
        k_units = gl.allocate_shared_memory(gl.float32, [2, C], FLAT)
        resets = gl.allocate_shared_memory(gl.int32, [2, C], FLAT)
        S_tile = gl.allocate_shared_memory(dtype, [D, D], TILE)
        work = gl.allocate_shared_memory(dtype, [C, D], TILE)
        weighted = gl.allocate_shared_memory(dtype, [C, D], TILE)
        output = gl.allocate_shared_memory(dtype, [C, D], TILE)
        arrived = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        mbarrier.init(arrived.index(0), count=1)
        mbarrier.init(arrived.index(1), count=1)
        fence_async_shared()
        barrier()

        early = chunks_to_forget(forget + place, begin, threshold, chunks, True, ONE)
        S = gl.zeros([D, D], gl.float32, STATE)
        feature = gl.arange(0, D, gl.SliceLayout(1, STATE))
        column = gl.arange(0, D, gl.SliceLayout(0, STATE))
        if HAS_START:
            if begin == early:
                start_state += n * stride_sn + hv * stride_sh
                S = gl.load(start_state + (feature[:, None] * stride_sk + column[None, :] * stride_sv)).to(gl.float32)

        start = begin - early
        steps = end - start
        some = steps > 0
        bar = arrived.index(0)
        at = token_row + start * C
        left = gl.where(some, length - start * C, 0)
        read_first = some & (early == 0)
        mbarrier.expect(bar, COPIED, pred=read_first)
        mbarrier.expect(bar, WALKED, pred=early > 0)
        tile_in(k, [at, key_column], bar, k_tiles.index(0), pred=some)
        tile_in(v, [at, value_column], bar, v_tiles.index(0), pred=some)
        tile_in(inverse, [square_row + start * C, 0], bar, A_tiles.index(0), pred=some)
        if READ_OUT:
            tile_in(q, [at, key_column], bar, q_tiles.index(0), pred=read_first)
            tile_in(attention, [square_row + start * C, 0], bar, P_tiles.index(0), pred=read_first)
        copy_line(totals.index(0), total, start, left, C, ONE)
        copy_line(betas.index(0), strength, start, left, C, ONE)
        copy_line(q_units.index(0), q_unit, start, left, C, ONE)
        copy_line(k_units.index(0), k_unit, start, left, C, ONE)
        copy_line(resets.index(0), segment, start, left, C, ONE)
        async_copy.commit_group()
        final = gl.maximum(gl.minimum(left, C) - 1, 0)
        G_final = gl.load(total + (start * C + final), mask=some, other=0.0)
        seg_final = gl.load(segment + (start * C + final), mask=some, other=0)

        # Chunks before this program's own: only what they write.
        for step in tl.range(0, early, disable_licm=True):
            here = step % 2
            ahead = start + step + 1
            left_ahead = length - ahead * C
            async_copy.wait_group(0)
            barrier()
            bar = arrived.index(1 - here)
            at = token_row + ahead * C
            at_row = square_row + ahead * C
            mbarrier.expect(bar, COPIED, pred=ahead == begin)
            mbarrier.expect(bar, WALKED, pred=ahead < begin)
            tile_in(k, [at, key_column], bar, k_tiles.index(1 - here))
            tile_in(v, [at, value_column], bar, v_tiles.index(1 - here))
            tile_in(inverse, [at_row, 0], bar, A_tiles.index(1 - here))
            if READ_OUT:
                tile_in(q, [at, key_column], bar, q_tiles.index(1 - here), pred=ahead == begin)
                tile_in(attention, [at_row, 0], bar, P_tiles.index(1 - here), pred=ahead == begin)
            copy_line(totals.index(1 - here), total, ahead, left_ahead, C, ONE)
            copy_line(betas.index(1 - here), strength, ahead, left_ahead, C, ONE)
            copy_line(q_units.index(1 - here), q_unit, ahead, left_ahead, C, ONE)
            copy_line(k_units.index(1 - here), k_unit, ahead, left_ahead, C, ONE)
            copy_line(resets.index(1 - here), segment, ahead, left_ahead, C, ONE)
            async_copy.commit_group()

            S_tile.store(S.to(dtype))
            fence_async_shared()
            kt = k_tiles.index(here)
            G = totals.index(here).load(ROW)
            seg = resets.index(here).load(ROW)
            beta = betas.index(here).load(ROW)
            ku = k_units.index(here).load(ROW)
            gamma = gl.where(seg == 0, gl.exp(G), 0.0)
            w = gl.where(seg == seg_final, gl.exp(G_final - G), 0.0)
            gamma_all = gl.where(seg_final == 0, gl.exp(G_final), 0.0)
            final = gl.minimum(left_ahead, C) - 1
            G_final = gl.load(total + (ahead * C + final))
            seg_final = gl.load(segment + (ahead * C + final))
            mbarrier.wait(arrived.index(here), (step // 2) & 1)
            barrier()
            none = gl.zeros([C, D], gl.float32, WIDE)
            kS = warpgroup_mma(kt, S_tile, none, use_acc=False)
            error = v_tiles.index(here).load(WIDE).to(gl.float32) - (gamma * ku)[:, None] * kS
            work.store((beta[:, None] * error).to(dtype))
            fence_async_shared()
            write = warpgroup_mma(A_tiles.index(here), work, none, use_acc=False)
            weighted.store(((w * ku)[:, None] * write).to(dtype))
            fence_async_shared()
            S = warpgroup_mma(kt.permute([1, 0]), weighted, gamma_all * S)

        for step in tl.range(early, steps, disable_licm=True):
            chunk = start + step
            here = step % 2
            left = length - chunk * C
            more = step + 1 < steps
            ahead = gl.where(more, chunk + 1, chunk)
            left_ahead = length - ahead * C
            async_copy.wait_group(0)
            tma.store_wait(0)
            barrier()
            bar = arrived.index(1 - here)
            at = token_row + ahead * C
            mbarrier.expect(bar, COPIED, pred=more)
            tile_in(k, [at, key_column], bar, k_tiles.index(1 - here), pred=more)
            tile_in(v, [at, value_column], bar, v_tiles.index(1 - here), pred=more)
            at_row = square_row + ahead * C
            tile_in(inverse, [at_row, 0], bar, A_tiles.index(1 - here), pred=more)
            if READ_OUT:
                tile_in(q, [at, key_column], bar, q_tiles.index(1 - here), pred=more)
                tile_in(attention, [at_row, 0], bar, P_tiles.index(1 - here), pred=more)
            copy_line(totals.index(1 - here), total, ahead, left_ahead, C, ONE)
            copy_line(betas.index(1 - here), strength, ahead, left_ahead, C, ONE)
            copy_line(q_units.index(1 - here), q_unit, ahead, left_ahead, C, ONE)
            copy_line(k_units.index(1 - here), k_unit, ahead, left_ahead, C, ONE)
            copy_line(resets.index(1 - here), segment, ahead, left_ahead, C, ONE)
            async_copy.commit_group()

            S_tile.store(S.to(dtype))
            fence_async_shared()
            qt = q_tiles.index(here)
            kt = k_tiles.index(here)
            vt = v_tiles.index(here)
            A_tile = A_tiles.index(here)
            P_tile = P_tiles.index(here)
            inside = gl.arange(0, C, ROW) < left
            G = totals.index(here).load(ROW)
            seg = resets.index(here).load(ROW)
            beta = betas.index(here).load(ROW)
            qu = scale * q_units.index(here).load(ROW)
            ku = k_units.index(here).load(ROW)
            gamma = gl.where(inside & (seg == 0), gl.exp(G), 0.0)
            w = gl.where(inside & (seg == seg_final), gl.exp(G_final - G), 0.0)
            gamma_all = gl.where(seg_final == 0, gl.exp(G_final), 0.0)
            final = gl.minimum(left_ahead, C) - 1
            G_final = gl.load(total + (ahead * C + final))
            seg_final = gl.load(segment + (ahead * C + final))
            mbarrier.wait(arrived.index(here), (step // 2) & 1)
            if not FULL:
                if left < C:
                    clear_all(qt, kt, vt, A_tile, P_tile, left, C, D, LINES)
            barrier()
            if KEEP_STATES:
                tile_out(states, [state_row + chunk * D, 0], S_tile)

            none = gl.zeros([C, D], gl.float32, WIDE)
            kS = warpgroup_mma(kt, S_tile, none, use_acc=False, is_async=True)
            read = none
            if READ_OUT:
                read = warpgroup_mma(qt, S_tile, none, use_acc=False, is_async=True)
                kS = warpgroup_mma_wait(1, deps=[kS])
            else:
                kS = warpgroup_mma_wait(0, deps=[kS])
            error = vt.load(WIDE).to(gl.float32) - (gamma * ku)[:, None] * kS
            work.store((beta[:, None] * error).to(dtype))
            fence_async_shared()
            write = warpgroup_mma(A_tile, work, none, use_acc=False, is_async=True)
            if READ_OUT:
                write, read = warpgroup_mma_wait(0, deps=[write, read])
            else:
                write = warpgroup_mma_wait(0, deps=[write])
            weighted.store(((w * ku)[:, None] * write).to(dtype))
            if READ_OUT:
                barrier()
                work.store(write.to(dtype))
            fence_async_shared()
            if READ_OUT:
                read = warpgroup_mma(P_tile, work, (gamma * qu)[:, None] * read, is_async=True)
            S = warpgroup_mma(kt.permute([1, 0]), weighted, gamma_all * S, is_async=True)
            if READ_OUT:
                read = warpgroup_mma_wait(1, deps=[read])
                output.store(read.to(dtype))
                fence_async_shared()
                barrier()
                at = token_row + chunk * C
                if FULL:
                    tile_out(o, [at, value_column], output)
                else:
                    if left < C:
                        write_rows(o_rows, output.load(LINES), at, value_column, left, HV * D, FULL, C, D, LINES)
                    else:
                        tile_out(o, [at, value_column], output)
            S = warpgroup_mma_wait(0, deps=[S])

        async_copy.wait_group(0)
        tma.store_wait(0)
        mbarrier.invalidate(arrived.index(0))
        mbarrier.invalidate(arrived.index(1))
        if KEEP_END:
            if end == chunks:
                end_state += (n * HV + hv) * D * D
                gl.store(end_state + (feature[:, None] * D + column[None, :]), S)
