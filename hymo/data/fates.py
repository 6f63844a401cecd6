"""What becomes of each document: left out as a copy, kept for training, or held out for validation.

All is decided from a few numbers of each document, about 60 bytes in memory at a time.
"""

from collections.abc import Sequence
from enum import IntEnum
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from hymo.data.minhash import BANDS, has_runs, near_in_band
from hymo.data.parts import Part, map_signatures
from hymo.data.preparation import CopiesConfig, HeldOutConfig


class Fate(IntEnum):
    """What becomes of a document."""

    EXACT_COPY = 0
    NEAR_COPY = 1
    BEYOND_MAX_BYTES = 2
    TRAIN = 3
    VAL = 4


def decide(
    parts: Sequence[Sequence[Part]],
    *,
    max_bytes: Sequence[int | None],
    copies: CopiesConfig,
    held_out: HeldOutConfig,
    work: Path,
) -> UInt8[Tensor, " n"]:
    """The fate of every document, source after source, part after part.

    Args:
        parts: of each source.
        max_bytes: of each source, text to take before copies are left out.
        work: folder for a file of signatures.
    """
    flat = [part for source in parts for part in source]
    sizes, numbers = (torch.cat([getattr(part, name) for part in flat]) for name in ("sizes", "numbers"))
    fates = torch.full((len(sizes),), Fate.TRAIN, dtype=torch.uint8)
    ranges = source_ranges(parts)
    for (start, end), most in zip(ranges, max_bytes, strict=True):
        if most is not None:
            beyond = sizes[start:end].cumsum(0) > most
            fates[start:end][beyond] = Fate.BEYOND_MAX_BYTES
    alive = fates == Fate.TRAIN
    is_copy = _repeats(torch.cat([part.digests for part in flat]), alive=alive)
    fates[is_copy] = Fate.EXACT_COPY
    if copies.near:
        fates[_near_copies(flat, alive=alive & ~is_copy, threshold=copies.threshold, work=work)] = Fate.NEAR_COPY
    for start, end in ranges:
        kept = fates[start:end] == Fate.TRAIN
        bound = _held_out_bound(sizes[start:end][kept], numbers[start:end][kept], held_out)
        fates[start:end][kept & (numbers[start:end] <= bound)] = Fate.VAL
    return fates


def source_ranges(parts: Sequence[Sequence[Part]]) -> list[tuple[int, int]]:
    """Where the documents of each source begin and end."""
    return list(pairwise(accumulate((sum(len(part.sizes) for part in source) for source in parts), initial=0)))


def _repeats(digests: Int[Tensor, "n 2"], *, alive: Bool[Tensor, " n"]) -> Bool[Tensor, " n"]:
    """Whether an earlier document has the same digest."""
    order = alive.nonzero()[:, 0]
    # Stable sorts by the second and then the first half: equal ones are neighbours, the earliest first.
    for half in (1, 0):
        order = order[digests[order, half].argsort(stable=True)]
    same = (digests[order[1:]] == digests[order[:-1]]).all(-1)
    repeats = torch.zeros(len(digests), dtype=torch.bool)
    repeats[order[1:][same]] = True
    return repeats


def _near_copies(
    parts: Sequence[Part], *, alive: Bool[Tensor, " n"], threshold: float, work: Path
) -> Bool[Tensor, " n"]:
    path = work / "signatures.i16"
    short = map_signatures(parts, path)
    is_long = alive & torch.cat([has_runs(some) for some in torch.split(short, 65_536)])
    near = torch.zeros_like(alive)
    for band in range(BANDS):
        keys = torch.cat([part.keys(band) for part in parts])
        near |= near_in_band(keys, short, alive=is_long, threshold=threshold)
    del short
    path.unlink()
    return near


def _held_out_bound(sizes: Int[Tensor, " n"], numbers: Int[Tensor, " n"], held_out: HeldOutConfig) -> int:
    """The split number up to which documents are held out; -1 for none."""
    wanted = min(held_out.bytes, int(held_out.fraction * int(sizes.sum())))
    if not wanted:
        return -1
    order = numbers.argsort(stable=True)
    reached = int((sizes[order].cumsum(0) < wanted).sum())
    return int(numbers[order[reached]])
