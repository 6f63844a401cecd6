"""Gradient of silu(gate) * up, gate and up side by side: a program has the same columns of both halves."""

import triton
import triton.language as tl


@triton.jit
def gated_backward_kernel(
    y,  # [r, 2 F], gate before up
    dh,  # [r, F]
    ends,  # [E]; rows from the last of them on are left as they are
    dy,  # [r, 2 F]
    E: tl.constexpr,
    F: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    across: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    first = tl.program_id(0) // across * BLOCK_R
    column = tl.program_id(0) % across * BLOCK_F + tl.arange(0, BLOCK_F)[None, :]
    end = tl.load(ends + E - 1)
    if first >= end:
        return
    row = first + tl.arange(0, BLOCK_R)[:, None]
    inside = row < end
    if F % BLOCK_F != 0:
        inside &= column < F
    of_row = row.to(tl.int64) * F
    of_gate = 2 * of_row + column
    gate = tl.load(y + of_gate, mask=inside).to(tl.float32)
    up = tl.load(y + of_gate + F, mask=inside).to(tl.float32)
    d = tl.load(dh + of_row + column, mask=inside).to(tl.float32)
    s = tl.sigmoid(gate)
    # The slope of silu first: it is finite for all gates.
    d_gate = d * up * (s * (1 + gate * (1 - s)))
    d_up = d * (gate * s)
    tl.store(dy + of_gate, d_gate.to(dy.dtype.element_ty), mask=inside)
    tl.store(dy + of_gate + F, d_up.to(dy.dtype.element_ty), mask=inside)
