"""Where a program works: sequences, their chunks, and the slots that chunks are kept in.

Sequence i of a packed batch owns the slots from `cu_seqlens[i] // C + i` on. Those starts increase by at least the
number of its chunks, so that no table has to be built, and none read on the host.
"""

import triton
import triton.language as tl


@triton.jit
def sequence(n, cu_seqlens, T, sequences, C: tl.constexpr, PACKED: tl.constexpr):
    """Batch row, first token in it, number of tokens and first slot in the row, of sequence n."""
    if PACKED:
        i = n % sequences
        first = tl.load(cu_seqlens + i).to(tl.int64)
        length = (tl.load(cu_seqlens + i + 1).to(tl.int64) - first).to(tl.int32)
        return n // sequences, first, length, first // C + i
    return n, n * 0, (T + n * 0).to(tl.int32), n * 0


@triton.jit
def place_of_slot(place, cu_seqlens, T, slots, sequences, C: tl.constexpr, PACKED: tl.constexpr):
    """Batch row, slot in it, first token of its sequence, chunk in that, the sequence's tokens, whether it is used."""
    batch = place // slots
    slot = place % slots
    if PACKED:
        low = slot * 0
        high = sequences + slot * 0
        # The last sequence whose first slot is not after this one.
        while high - low > 1:
            middle = (low + high) // 2
            start = tl.load(cu_seqlens + middle).to(tl.int64) // C + middle
            low = tl.where(start <= slot, middle, low)
            high = tl.where(start <= slot, high, middle)
        _, first, length, start = sequence(low, cu_seqlens, T, sequences, C, PACKED)
        chunk = (slot - start).to(tl.int32)
        return batch, slot, first, chunk, length, chunk * C < length
    chunk = slot.to(tl.int32)
    return batch, slot, slot * 0, chunk, (T + slot * 0).to(tl.int32), chunk * C < T
