"""Moving a chunk's rows between memories, on Hopper."""

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from hymo_kernels.device import places

sequence = gluon.jit(places.sequence.fn)
# Names until Triton 3.6, and since.
RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
copy_in = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
tile_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tile_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@gluon.jit
def seen_as(tile, rows: gl.constexpr, columns: gl.constexpr):
    """The same memory as [rows, columns]."""
    if RENAMED:
        x = tile.reinterpret(tile.dtype, [rows, columns], tile.layout)
    else:
        x = tile._reinterpret(tile.dtype, [rows, columns], tile.layout)
    return x


@gluon.jit
def of_type(tile, dtype: gl.constexpr):
    """The same memory as numbers of another type of that size."""
    if RENAMED:
        x = tile.reinterpret(dtype, tile.shape, tile.layout)
    else:
        x = tile._reinterpret(dtype, tile.shape, tile.layout)
    return x


@gluon.jit
def clear_all(q, k, do, A, P, left, C: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr):
    """What follows the sequence is another's: it must not be multiplied, not even by 0."""
    clear(q, left, C, D, LAYOUT)
    clear(k, left, C, D, LAYOUT)
    clear(do, left, C, D, LAYOUT)
    clear(A, left, C, C, LAYOUT)
    clear(P, left, C, C, LAYOUT)
    fence_async_shared()


@gluon.jit
def clear(tile, left, C: gl.constexpr, D: gl.constexpr, LAYOUT: gl.constexpr):
    """Zeros in the rows beyond the sequence."""
    i = gl.arange(0, C, gl.SliceLayout(1, LAYOUT))
    x = tile.load(LAYOUT)
    tile.store(gl.where((i < left)[:, None], x, gl.zeros([C, D], x.dtype, LAYOUT)))


@gluon.jit
def copy_line(line, numbers, chunk, left, C: gl.constexpr, LAYOUT: gl.constexpr):
    """Starts to move one number a token to shared memory, zero beyond the sequence."""
    i = gl.arange(0, C, LAYOUT)
    copy_in(line, numbers + (chunk * C + i), mask=i < left)


@gluon.jit
def copy_line_before(line, numbers, chunk, left, C: gl.constexpr, LAYOUT: gl.constexpr):
    """The same, of the token before each; zero before the chunk."""
    i = gl.arange(0, C, LAYOUT)
    copy_in(line, numbers + (chunk * C + gl.maximum(i - 1, 0)), mask=(i > 0) & (i < left))


@gluon.jit
def write_rows(
    rows,
    x,
    at,
    column,
    left,
    stride: gl.constexpr,
    FULL: gl.constexpr,
    C: gl.constexpr,
    D: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    i = gl.arange(0, C, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    rows += at.to(gl.int64) * stride + column
    to = rows + (i[:, None] * stride + columns[None, :])
    if FULL:
        gl.store(to, x.to(rows.dtype.element_ty))
    else:
        gl.store(to, x.to(rows.dtype.element_ty), mask=(i < left)[:, None])


@gluon.jit
def chunks_to_forget(forget, edge, threshold, chunks, BACK: gl.constexpr, LAYOUT: gl.constexpr):
    """How many chunks before `edge` (or from it on) retain less than e^-threshold together; all of them if none do."""
    block = gl.arange(0, 64, LAYOUT)
    available = edge if BACK else chunks - edge
    count = edge * 0
    kept = 0.0
    going = available > 0
    while going:
        step = count + block
        at = edge - 1 - step if BACK else edge + step
        piece = gl.load(forget + at, mask=step < available, other=float("-inf"))
        # -inf - -inf would be NaN; anything below the threshold is the same.
        piece = gl.maximum(piece, -1e4)
        more = gl.sum((kept + gl.associative_scan(piece, 0, add) > -threshold).to(gl.int32), 0)
        kept += gl.sum(piece, 0)
        going = (more == 64) & (count + 64 < available)
        count = gl.where(going, count + 64, gl.minimum(count + more + 1, available))
    return count


@gluon.jit
def add(a, b):
    return a + b
