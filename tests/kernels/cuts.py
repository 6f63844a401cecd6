"""Where a sequence is cut into pieces, in plain Python: what `piece_begin` of the kernels for Hopper must find.

`forget` is a list over chunks: the log of what the state keeps at most, -inf where a document begins.
"""

import itertools
from typing import NamedTuple

import torch

from hymo_kernels.host.gated_delta_call import CHUNK, FORGOTTEN


class Walk(NamedTuple):
    """A kernel's way through a piece: where the state comes from, and what chunks cost."""

    back: bool  # a piece walks over chunks before its own; else over chunks after its own
    own: int
    walked: int


FORWARD, BACKWARD = Walk(True, 3, 2), Walk(False, 4, 1)


def cuts_of(forget: list[float], length: int, walk: Walk) -> list[int]:
    """Where the pieces begin, and the end."""
    return [piece_begin(forget, part, length, walk) for part in range(-(-len(forget) // length) + 1)]


def piece_begin(forget: list[float], part: int, length: int, walk: Walk) -> int:
    chunks = len(forget)
    even = min(part * length, chunks)
    if even in (0, chunks):
        return even
    line = [int(min(max(x, -64.0), 64.0) * 65536) for x in (forget if walk.back else forget[::-1])]
    middle = even if walk.back else chunks - even
    spare = max(0, length - (chunks - even))
    keys = []
    for shift in range(-31, 32):
        cut = middle + shift
        if 2 * abs(shift) < length and 0 < cut < chunks:
            walked = _walked(line, cut, max(0, middle - 96))
            grown = walk.own * (shift if walk.back else shift - spare)
            slow = walk.walked * walked - walk.own * (shift + spare if walk.back else shift)
            keys.append((max(grown, slow, 0), abs(shift), shift < 0))
    _, size, down = min(keys)
    return even + (size if down != walk.back else -size)


def _walked(line: list[int], cut: int, stop: int) -> int:
    kept, retaining = 0, 0
    for at in range(cut - 1, stop - 1, -1):
        kept += line[at]
        retaining += kept > -int(FORGOTTEN * 65536)
    return min(retaining + 1, cut)


def walked_over(forget: list[float], edge: int, walk: Walk) -> int:
    """`chunks_to_forget`."""
    kept = 0.0
    line = forget[:edge][::-1] if walk.back else forget[edge:]
    for count, x in enumerate(line, 1):
        kept += max(x, -1e4)
        if kept <= -FORGOTTEN:
            return count
    return len(line)


def costs(forget: list[float], cuts: list[int], walk: Walk) -> list[int]:
    """Of each piece with a chunk."""
    return [
        walk.own * (end - begin) + walk.walked * walked_over(forget, begin if walk.back else end, walk)
        for begin, end in itertools.pairwise(cuts)
        if begin < end
    ]


def lines(chunks: int, heads: int, tokens: float, generator: torch.Generator) -> list[list[float]]:
    """`forget` of heads as a layer begins with, in one row of documents of so many tokens on average."""
    step = torch.logspace(-3, -1, heads)
    rate = 1 + 15 * torch.rand(heads, generator=generator)
    noise = 0.1 * torch.randn(heads, chunks * CHUNK, generator=generator)
    fall = -rate[:, None] * torch.nn.functional.softplus(torch.log(torch.expm1(step))[:, None] + noise)
    resets = torch.rand(chunks * CHUNK, generator=generator) < 1 / tokens
    kept = fall.unflatten(1, (-1, CHUNK)).sum(2)
    return torch.where(resets.view(-1, CHUNK).any(1), float("-inf"), kept).tolist()
