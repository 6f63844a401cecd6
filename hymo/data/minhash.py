"""Near copies by MinHash: documents that have most of their runs of five words in common.

A signature holds, for each of 120 hash functions, the smallest hash of a document's runs of words; two documents agree
in a share of its places that is close to the share of runs that they have in common. Cut into 20 bands of 6 places,
documents that agree in a whole band are compared: of pairs that have 0.8 in common 99.8 % are.

Sources: Broder 1997, "On the resemblance and containment of documents"; Leskovec, Rajaraman and Ullman, "Mining of
massive datasets", chapter 3.
"""

import hashlib
import re
import struct
import zlib

import torch
from jaxtyping import Bool, Int, Int16
from torch import Tensor

BANDS, ROWS, RUN = 20, 6, 5
PLACES = BANDS * ROWS
NOTHING = 2**32
"""In a signature of a document that is shorter than a run of words: it is like no other."""

# Scripts that set no spaces: there each character counts as a word.
_WORD = re.compile("[^\\W\u2e80-\U0003ffff]+|[\u2e80-\U0003ffff]")
# Hashes made at a time: they stay in the cache of a core.
_TOGETHER = 1_024
# How many earlier documents of a band one is compared with, beside the first.
_NEIGHBOURS = 4
_COMPARED_TOGETHER = 65_536


def _constants(name: str, count: int) -> Int[Tensor, " {count}"]:
    """Odd 64-bit integers, the same wherever and whenever they are made."""
    digests = (hashlib.blake2b(f"{name}/{i}".encode(), digest_size=8).digest() for i in range(count))
    return torch.tensor([struct.unpack("<q", digest)[0] | 1 for digest in digests])


_MULTIPLIERS, _OFFSETS, _OF_WORD, _OF_ROW = (
    _constants(name, count) for name, count in (("times", PLACES), ("plus", PLACES), ("word", RUN), ("row", ROWS))
)


def signature(text: str) -> Int[Tensor, "places"]:
    """The signature of a document, each place in [0, 2^32), or all NOTHING."""
    words = torch.tensor([zlib.crc32(word.encode()) for word in _WORD.findall(text.lower())])
    if len(words) < RUN:
        return torch.full((PLACES,), NOTHING)
    # Products wrap around at 64 bits; their upper half is well mixed.
    runs = _mixed((words.unfold(0, RUN, 1) * _OF_WORD).sum(-1))
    smallest = torch.full((PLACES,), NOTHING)
    for some in torch.split(runs, _TOGETHER):
        hashes = (_MULTIPLIERS[:, None] * some + _OFFSETS[:, None]) >> 32 & 0xFFFFFFFF
        smallest = torch.minimum(smallest, hashes.amin(-1))
    return smallest


def band_keys(signatures: Int[Tensor, "n places"]) -> Int[Tensor, "bands n"]:
    """A 64-bit key of each band of each signature: equal where the bands are."""
    return _mixed((signatures.reshape(-1, BANDS, ROWS) * _OF_ROW).sum(-1)).T.contiguous()


def short_signatures(signatures: Int[Tensor, "n places"]) -> Int16[Tensor, "n places"]:
    """The lower 16 bits: enough to count the places in which two agree."""
    return ((signatures & 0xFFFF) - 2**15).to(torch.int16)


def has_runs(short: Int16[Tensor, "n places"]) -> Bool[Tensor, " n"]:
    """Whether documents with these short signatures were long enough to have one."""
    return (short != -(2**15)).any(-1)


def near_in_band(
    keys: Int[Tensor, " n"], short: Int16[Tensor, "n places"], *, alive: Bool[Tensor, " n"], threshold: float
) -> Bool[Tensor, " n"]:
    """Whether a document is like an earlier one with the same key: in at least `threshold` of the signature.

    It is compared with the first of that key and the four before it, whether those are copies themselves or not.

    Args:
        alive: documents that count.
    """
    documents = alive.nonzero()[:, 0]
    order = documents[keys[documents].argsort(stable=True)]
    of_order = keys[order]
    position = torch.arange(len(order))
    starts = torch.cat([torch.ones(1, dtype=torch.bool), of_order[1:] != of_order[:-1]])[: len(order)]
    first = torch.where(starts, position, 0).cummax(0).values
    is_near = torch.zeros(len(keys), dtype=torch.bool)
    others = [first, *(position - lag for lag in range(1, _NEIGHBOURS + 1))]
    for other in others:
        pairs = ((other >= first) & (other < position)).nonzero()[:, 0]
        for some in torch.split(pairs, _COMPARED_TOGETHER):
            later, earlier = order[some], order[other[some]]
            is_near[later] |= (short[later] == short[earlier]).float().mean(-1) >= threshold
    return is_near


def _mixed(hashes: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """Murmur3's finaliser, so that every bit depends on every bit."""
    for factor in (-0xAE502812AA7333, -0x3B314601E57A13AD):
        hashes = (hashes ^ ((hashes >> 33) & 0x7FFFFFFF)) * factor
    return hashes ^ ((hashes >> 33) & 0x7FFFFFFF)
