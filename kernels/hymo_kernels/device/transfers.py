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
def piece_begin(
    forget,
    part,
    segment_chunks,
    chunks,
    threshold,
    BACK: gl.constexpr,
    OWN: gl.constexpr,
    WALKED: gl.constexpr,
):
    """The chunk that piece `part` of a sequence begins with, so that the pieces on both sides of the cut end together.

    One of them also walks over the chunks before the cut (BACK, the later piece) or from it on (the earlier one), until
    they are forgotten: at a cost of WALKED each, where its own chunks cost OWN. The cut lies up to 31 chunks from
    `part * segment_chunks`, and there if no cut is better. Programs on both sides find it from the same whole numbers.
    """
    FACES: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [8, 1], [1, 0])  # [cuts, chunks walked over]
    CUTS: gl.constexpr = gl.SliceLayout(1, FACES)
    OVER: gl.constexpr = gl.SliceLayout(0, FACES)
    LINE: gl.constexpr = gl.BlockedLayout([2], [32], [8], [0])
    even = gl.minimum(part * segment_chunks, chunks)
    begin = even
    if (even > 0) & (even < chunks):
        # Chunks are counted from the end that the state comes from: 64 that may be cut before, and 64 more.
        middle = even if BACK else chunks - even
        first = middle - 32
        place = gl.arange(0, 64, LINE) + first
        near = _forgets(forget, place, chunks, BACK)
        far = _forgets(forget, place - 64, chunks, BACK)
        # What the chunks from one up to a cut retain together is the difference of two sums.
        near_sum = gl.associative_scan(near, 0, add) - near
        far_sum = gl.associative_scan(far, 0, add) - far - gl.sum(far, 0)
        bound = gl.convert_layout(near_sum, CUTS) + (threshold * 65536.0).to(gl.int32)
        near_sum = gl.convert_layout(gl.where(place >= 0, near_sum, 1 << 30), OVER)
        far_sum = gl.convert_layout(gl.where(place >= 64, far_sum, 1 << 30), OVER)
        i = gl.arange(0, 64, CUTS)
        near_kept = (near_sum[None, :] < bound[:, None]) & (gl.arange(0, 64, OVER)[None, :] < i[:, None])
        far_kept = far_sum[None, :] < bound[:, None]
        cut = first + i
        walked = gl.minimum(gl.sum(near_kept.to(gl.int32) + far_kept.to(gl.int32), 1) + 1, cut)
        shift = i - 32
        spare = gl.maximum(segment_chunks - (chunks - even), 0)  # in the last piece
        if BACK:
            cost = gl.maximum(OWN * shift, WALKED * walked - OWN * (shift + spare))
        else:
            cost = gl.maximum(OWN * (shift - spare), WALKED * walked - OWN * shift)
        size = gl.maximum(shift, -shift)
        key = gl.maximum(cost, 0) * 128 + 2 * size + (shift < 0).to(gl.int32)
        allowed = (2 * size < segment_chunks) & (size < 32) & (cut > 0) & (cut < chunks)
        best = gl.min(gl.where(allowed, key, 1 << 30), 0) % 128
        best = gl.where(best % 2 == 1, -(best // 2), best // 2)
        begin = even + best if BACK else even - best
    return begin


@gluon.jit
def _forgets(forget, place, chunks, BACK: gl.constexpr):
    """Whole 65536ths of a nat, whose sums are exact; anything below any threshold is the same."""
    at = place if BACK else chunks - 1 - place
    x = gl.load(forget + at, mask=(place >= 0) & (place < chunks), other=0.0)
    return (gl.minimum(gl.maximum(x, -64.0), 64.0) * 65536.0).to(gl.int32)


@gluon.jit
def add(a, b):
    return a + b
