"""`piece_begin` alone, for a GPU."""

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl

from hymo_kernels.device.transfers import piece_begin


@gluon.jit(do_not_specialize=["chunks", "segment_chunks"])
def cuts_kernel(
    forget,  # [lines, chunks]
    begins,  # [lines, programs / lines]
    chunks,
    segment_chunks,
    parts,
    threshold,
    BACK: gl.constexpr,
    OWN: gl.constexpr,
    WALKED: gl.constexpr,
):
    program = gl.program_id(0)
    line = forget + program // parts * chunks
    begin = piece_begin(line, program % parts, segment_chunks, chunks, threshold, BACK, OWN, WALKED)
    gl.store(begins + program, begin)
