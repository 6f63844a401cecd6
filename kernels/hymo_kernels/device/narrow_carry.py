"""Gated delta rule for narrow heads: the state, or its gradient, carried from segment to segment."""

import triton
import triton.language as tl

from hymo_kernels.device.narrow_prepare import place_in_row, state_of, store_state
from hymo_kernels.device.places import sequence


@triton.jit(do_not_specialize=["T", "places", "sequences", "length"])
def narrow_carry_kernel(
    product,  # [B, HV, places, K, K] fp32: what a segment multiplies a state by
    added,  # [B, HV, places, V, K] fp32: what it adds; of the segment that comes first, all there is after it
    carried,  # [B, HV, places, V, K] fp32: what comes to each segment but the first, from the one before
    final,  # [N, HV, K, V] fp32: what leaves the last one
    cu_seqlens,
    T,
    places,
    sequences,
    length,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    C: tl.constexpr,
    PACKED: tl.constexpr,
    BACK: tl.constexpr,  # a gradient: from the sequence's end to its start, by the transposed products
    KEEP_FINAL: tl.constexpr,
    STAGES: tl.constexpr,
):
    tiles: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    program = tl.program_id(0).to(tl.int64)
    hv = program // tiles % HV
    n = program // (tiles * HV)
    batch, _, tokens, slot = sequence(n, cu_seqlens, T, sequences, C, PACKED)
    count = tl.maximum(tl.cdiv(tl.cdiv(tokens, C), length), 1)
    place = (batch * HV + hv) * places + place_in_row(n, slot, sequences, PACKED)
    features = tl.arange(0, BLOCK_K)
    columns = (program % tiles).to(tl.int32) * BLOCK_V + tl.arange(0, BLOCK_V)
    last = count - 1
    if KEEP_FINAL | (last > 0):
        S = state_of(added + (place + (last if BACK else 0)) * V * K, K, 1, columns, features, V, K)
        for step in tl.range(1, count if KEEP_FINAL else last, num_stages=STAGES):
            here = place + (last - step if BACK else step)
            store_state(carried + here * V * K, K, 1, columns, features, S, V, K)
            M = state_of(product + here * K * K, 1 if BACK else K, K if BACK else 1, features, features, K, K)
            U = state_of(added + here * V * K, K, 1, columns, features, V, K)
            S = tl.dot(S, M, U, input_precision="tf32x3")
        if KEEP_FINAL:
            store_state(final + (n * HV + hv) * K * V, 1, V, columns, features, S, V, K)
        else:
            here = place + (0 if BACK else last)
            store_state(carried + here * V * K, K, 1, columns, features, S, V, K)
