"""Packed sequences as a padded batch, and back: what `cu_seqlens` means on the CPU."""

from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor


class Packing(NamedTuple):
    """Where each row of a packed batch of one goes in a padded batch of `n` sequences, and which rows exist."""

    sequence: Int[Tensor, " t"]
    offset: Int[Tensor, " t"]
    used: Bool[Tensor, " t"]
    source: Int[Tensor, "n longest"]
    filled: Bool[Tensor, "n longest"]


def packing(cu_seqlens: Int[Tensor, " bounds"], time: int, *, max_seqlen: int | None = None) -> Packing:
    """Index maps between `time` packed rows and the sequences `cu_seqlens[i] .. cu_seqlens[i + 1]`.

    Without `max_seqlen` the longest length is read on the host, which also checks the bounds; a traced program cannot
    do that and must pass it. Rows from `cu_seqlens[-1]` on belong to no sequence.

    Raises:
        ValueError: if the bounds do not start at 0, decrease, or end after `time`; if traced without `max_seqlen`.
    """
    if max_seqlen is None:
        if torch.compiler.is_compiling():
            raise ValueError("cu_seqlens: a compiled CPU program cannot read the lengths; pass max_seqlen, got None")
        bounds = [int(bound) for bound in cu_seqlens.tolist()]
        lengths = [end - start for start, end in pairwise(bounds)]
        if not bounds or bounds[0] != 0 or min(lengths, default=0) < 0 or bounds[-1] > time:
            raise ValueError(
                f"cu_seqlens: bounds must start at 0, never decrease and end within the {time} rows; got {bounds}"
            )
        max_seqlen = max(lengths, default=0)
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    row = torch.arange(time, device=cu_seqlens.device)
    count = starts.shape[0]
    if count == 0:
        nothing = torch.zeros_like(row)
        empty = nothing.new_zeros((0, max_seqlen))
        return Packing(nothing, nothing, nothing.bool(), empty, empty.bool())
    # An empty sequence owns no row: right=True skips every bound that equals the row.
    sequence = torch.searchsorted(ends, row, right=True).clamp(max=count - 1)
    step = torch.arange(max_seqlen, device=cu_seqlens.device)
    return Packing(
        sequence=sequence,
        offset=(row - starts[sequence]).clamp(0, max(max_seqlen - 1, 0)),
        used=row < ends[-1],
        source=(starts[:, None] + step).clamp(max=max(time - 1, 0)),
        filled=step < (ends - starts)[:, None],
    )


def unpack(x: Shaped[Tensor, "1 t *d"], at: Packing) -> Shaped[Tensor, "n longest *d"]:
    """The padded batch; rows past a sequence's end are 0, and no gradient or NaN crosses from them."""
    filled = at.filled.reshape(*at.filled.shape, *[1] * (x.ndim - 2))
    return torch.where(filled, x[0][at.source], 0)


def pack(x: Shaped[Tensor, "n longest *d"], at: Packing) -> Shaped[Tensor, "1 t *d"]:
    """The packed rows; those that belong to no sequence are exactly 0."""
    if x.shape[0] * x.shape[1] == 0:
        return x.new_zeros((1, at.used.shape[0], *x.shape[2:]))
    used = at.used.reshape(-1, *[1] * (x.ndim - 2))
    return torch.where(used, x[at.sequence, at.offset], 0)[None]
