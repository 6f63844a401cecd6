"""Products that are symmetric, on Hopper: the tiles below the diagonal are computed, those above are their transposes.

One program a multiprocessor walks through the tiles of all matrices. A warp brings what is multiplied, stage by stage;
groups of warps multiply. With two of them each has every other tile, and while one writes, the other multiplies.
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
          K: gl.constexpr, SHARE: gl.constexpr):  # fmt: skip
    """Fills the stages, round after round."""
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        matrix, row, column = place_of(tile, each, C)
        alone = (row == column) if SHARE else (row < 0)
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
def multiply(who: gl.constexpr, added, out, factors, one, stages, filled, emptied, results, added_bars, turns, tiles,
             each, steps, WORKERS: gl.constexpr, WARPS: gl.constexpr, TALL: gl.constexpr, STAGES: gl.constexpr,
             C: gl.constexpr, K: gl.constexpr, SHARE: gl.constexpr, ADD: gl.constexpr):  # fmt: skip
    """One group's tiles."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])
    dtype: gl.constexpr = out.dtype
    whole = results.index(who)
    result = whole.reshape([C, C])
    mine = who
    gl.assume(steps > 0)
    for tile in range(gl.program_id(0) + who * gl.num_programs(0), tiles, WORKERS * gl.num_programs(0)):
        matrix, row, column = place_of(tile, each, C)
        alone = (row == column) if SHARE else (row < 0)
        other = gl.where(alone, 0, 1)
        if ADD:
            factors_here = factors + matrix * 3
            of_product = gl.load(factors_here)
            of_added = gl.load(factors_here + 1)
            of_identity = gl.load(factors_here + 2)
            tma.store_wait(0)
            barrier()
            mbarrier.expect(added_bars.index(who), 2 * C * C)
            tile_in(added, [matrix, row, column], added_bars.index(who), whole)
        acc = gl.zeros([C, C], gl.float32, ACC)
        count = mine * steps
        before = count % STAGES
        if WORKERS == 2:
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
        if WORKERS == 2:
            mbarrier.arrive(turns.index(1 - who), count=1)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(emptied.index(before), count=1)

        i = gl.arange(0, C, gl.SliceLayout(1, ACC))
        j = gl.arange(0, C, gl.SliceLayout(0, ACC))
        if ADD:
            mbarrier.wait(added_bars.index(who), (mine // WORKERS) & 1)
            acc = of_product * acc + of_added * result.load(ACC).to(gl.float32)
            acc = gl.where((i + row)[:, None] == (j + column)[None, :], acc + of_identity, acc)
        else:
            tma.store_wait(0)
            acc = one * acc
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
        mine += WORKERS
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["one", "tiles", "each", "steps"])
def symmetric_product_kernel(
    x,  # [B, N, K], or [B, K, N] if TALL
    added,  # [B, N, N], symmetric
    out,  # [B, N, N]
    factors,  # [B, 3], of the product, of what is added, of the identity
    one,  # 1.0: where nothing is multiplied after wgmma, ptxas has the products wait for each other
    tiles,
    each,  # tiles a matrix
    steps,
    TALL: gl.constexpr,
    STAGES: gl.constexpr,
    WORKERS: gl.constexpr,
    C: gl.constexpr,
    K: gl.constexpr,
    SHARE: gl.constexpr,
    ADD: gl.constexpr,
    num_warps: gl.constexpr,
):
    gl.assume(steps > 0)
    stages = gl.allocate_shared_memory(x.dtype, [2 * STAGES] + x.block_type.shape, x.layout)
    results = gl.allocate_shared_memory(x.dtype, [WORKERS, 1, C, C], out.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    emptied = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    added_bars = gl.allocate_shared_memory(gl.int64, [WORKERS, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [WORKERS, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(filled.index(s), count=1)
        mbarrier.init(emptied.index(s), count=1)
    for s in gl.static_range(WORKERS):
        mbarrier.init(added_bars.index(s), count=1)
        mbarrier.init(turns.index(s), count=1)
    fence_async_shared()
    barrier()
    if WORKERS == 2:
        gl.warp_specialize(
            [
                (multiply, (0, added, out, factors, one, stages, filled, emptied, results, added_bars, turns, tiles,
                            each, steps, WORKERS, num_warps, TALL, STAGES, C, K, SHARE, ADD)),
                (multiply, (1, added, out, factors, one, stages, filled, emptied, results, added_bars, turns, tiles,
                            each, steps, WORKERS, num_warps, TALL, STAGES, C, K, SHARE, ADD)),
                (bring, (x, stages, filled, emptied, tiles, each, steps, TALL, STAGES, C, K, SHARE)),
            ],
            [num_warps, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply, (0, added, out, factors, one, stages, filled, emptied, results, added_bars, turns, tiles,
                            each, steps, WORKERS, num_warps, TALL, STAGES, C, K, SHARE, ADD)),
                (bring, (x, stages, filled, emptied, tiles, each, steps, TALL, STAGES, C, K, SHARE)),
            ],
            [1],
            [24],
        )  # fmt: skip
