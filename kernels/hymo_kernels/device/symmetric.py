"""Products that are symmetric, on Hopper: the tiles below the diagonal are computed, those above are their transposes.

One program a multiprocessor walks through the tiles of all matrices. A warp brings what is multiplied, stage by stage;
two groups of warps have every other tile each, and while one writes, the other multiplies.
"""

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from hymo_kernels.device.transfers import barrier, tile_in, tile_out


@gluon.jit
def place_of(tile, each, WIDTH: gl.constexpr):
    """Matrix, row and column of a tile, in units of tiles; rows come one after another, each up to the diagonal."""
    matrix = tile // each
    rest = tile % each
    row = (0.5 * (gl.sqrt(8.0 * rest.to(gl.float32) + 1.0) - 1.0)).to(gl.int32)
    row = gl.where(row * (row + 1) // 2 > rest, row - 1, row)
    row = gl.where((row + 1) * (row + 2) // 2 <= rest, row + 1, row)
    return matrix, row * WIDTH, (rest - row * (row + 1) // 2) * WIDTH


@gluon.jit
def bring(x, stages, filled, emptied, tiles, each, steps, TALL: gl.constexpr, STAGES: gl.constexpr, C: gl.constexpr,
          K: gl.constexpr):  # fmt: skip
    """Fills the stages, round after round; a tile on the diagonal needs only half of each."""
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        matrix, row, column = place_of(tile, each, C)
        alone = row == column
        for step in range(steps):
            stage = count % STAGES
            bar = filled.index(stage)
            mbarrier.wait(emptied.index(stage), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, 2 * C * K, pred=alone)
            mbarrier.expect(bar, 4 * C * K, pred=alone == 0)
            if TALL:
                tile_in(x, [matrix, step * K, row], bar, stages.index(2 * stage))
                tile_in(x, [matrix, step * K, column], bar, stages.index(2 * stage + 1), pred=alone == 0)
            else:
                tile_in(x, [matrix, row, step * K], bar, stages.index(2 * stage))
                tile_in(x, [matrix, column, step * K], bar, stages.index(2 * stage + 1), pred=alone == 0)
            count += 1


@gluon.jit
def multiply(who: gl.constexpr, added, out, scale, of_product, of_added, of_identity, stages, filled, emptied, results,
             added_bars, turns, tiles, each, steps, TALL: gl.constexpr, STAGES: gl.constexpr, C: gl.constexpr,
             K: gl.constexpr, ADD: gl.constexpr, SCALED: gl.constexpr):  # fmt: skip
    """One group's tiles: the first, third, ... of the program, or the others."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    dtype: gl.constexpr = out.dtype
    whole = results.index(who)
    result = whole.reshape([C, C])
    mine = who
    # Else ptxas clears the sums twice.
    gl.assume(steps > 0)
    for tile in range(gl.program_id(0) + who * gl.num_programs(0), tiles, 2 * gl.num_programs(0)):
        matrix, row, column = place_of(tile, each, C)
        other = gl.where(row == column, 0, 1)
        if ADD:
            if SCALED:
                size = gl.load(scale + matrix)
            tma.store_wait(0)
            barrier()
            mbarrier.expect(added_bars.index(who), 2 * C * C)
            tile_in(added, [matrix, row, column], added_bars.index(who), whole)
        acc = gl.zeros([C, C], gl.float32, ACC)
        count = mine * steps
        before = count % STAGES
        # Before the other has all that is its own, a stage's parity may be that of a round to come.
        mbarrier.wait(turns.index(who), (mine // 2 + who + 1) & 1)
        for step in range(steps):
            stage = count % STAGES
            mbarrier.wait(filled.index(stage), (count // STAGES) & 1)
            a = stages.index(2 * stage)
            b = stages.index(2 * stage + other)
            if TALL:
                acc = warpgroup_mma(a.reshape([K, C]).permute([1, 0]), b.reshape([K, C]), acc, is_async=True)
            else:
                acc = warpgroup_mma(a.reshape([C, K]), b.reshape([C, K]).permute([1, 0]), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(emptied.index(before), count=1, pred=step > 0)
            before = stage
            count += 1
        mbarrier.arrive(turns.index(1 - who), count=1)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(emptied.index(before), count=1)

        i = gl.arange(0, C, gl.SliceLayout(1, ACC))
        j = gl.arange(0, C, gl.SliceLayout(0, ACC))
        if ADD:
            mbarrier.wait(added_bars.index(who), (mine // 2) & 1)
            plus = result.load(ACC).to(gl.float32)
            if SCALED:
                # Not the fifth power at once: it may be less than fp32 holds.
                squared = size * size
                acc = of_product * (squared * squared) * acc + of_added * squared * plus
            else:
                acc = of_product * acc + of_added * plus
            acc = gl.where((i + row)[:, None] == (j + column)[None, :], acc + of_identity, acc)
            if SCALED:
                acc = size * acc
        else:
            tma.store_wait(0)
            acc = of_product * acc
        barrier()
        half = acc.to(dtype)
        result.store(half)
        if row == column:
            # Its own mirror image.
            barrier()
            half = gl.where(i[:, None] >= j[None, :], half, result.permute([1, 0]).load(ACC))
            barrier()
            result.store(half)
        fence_async_shared()
        barrier()
        tile_out(out, [matrix, row, column], whole)
        if row != column:
            tma.store_wait(0)
            barrier()
            result.permute([1, 0]).store(half)
            fence_async_shared()
            barrier()
            tile_out(out, [matrix, column, row], whole)
        mine += 2
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "each", "steps"])
def symmetric_product_kernel(
    x,  # [B, N, K], or [B, K, N] if TALL
    added,  # [B, N, N], symmetric
    out,  # [B, N, N]
    scale,  # [B], of x and what is added, if SCALED
    of_product,  # 1.0 unless ADD: where nothing is multiplied after wgmma, ptxas has the products wait for each other
    of_added,
    of_identity,
    tiles,
    each,  # tiles a matrix
    steps,
    TALL: gl.constexpr,
    STAGES: gl.constexpr,
    C: gl.constexpr,
    K: gl.constexpr,
    ADD: gl.constexpr,
    SCALED: gl.constexpr,
):
    stages = gl.allocate_shared_memory(x.dtype, [2 * STAGES] + x.block_type.shape, x.layout)
    results = gl.allocate_shared_memory(x.dtype, [2, 1, C, C], out.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    emptied = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    added_bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(filled.index(s), count=1)
        mbarrier.init(emptied.index(s), count=1)
    for s in gl.static_range(2):
        mbarrier.init(added_bars.index(s), count=1)
        mbarrier.init(turns.index(s), count=1)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (multiply, (0, added, out, scale, of_product, of_added, of_identity, stages, filled, emptied, results,
                        added_bars, turns, tiles, each, steps, TALL, STAGES, C, K, ADD, SCALED)),
            (multiply, (1, added, out, scale, of_product, of_added, of_identity, stages, filled, emptied, results,
                        added_bars, turns, tiles, each, steps, TALL, STAGES, C, K, ADD, SCALED)),
            (bring, (x, stages, filled, emptied, tiles, each, steps, TALL, STAGES, C, K)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
