"""Which window of which source a training sample is: a pure function of the seed and the sample's number.

There is no loader state. A run that has seen n samples continues with sample n, on any number of ranks and at any batch
size.

Samples come in blocks. Each block gives every source its share of slots, in an order shuffled by a keyed permutation;
the k-th draw of a source is window `permutation(k mod n)` of epoch `k div n`. So each epoch visits each of its n
windows once, in an order of its own, before the next begins.
"""

import hashlib
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

_ROUNDS = 4
_BLOCKS = (100, 1_000)


class Draw(NamedTuple):
    """One sample: the number of its source, how often that source was used up before, and the window."""

    source: int
    epoch: int
    window: int


@dataclass(frozen=True)
class Mixture:
    """Sources mixed by weight.

    Attributes:
        weights: relative, at least 0, not all 0. A share below about 1 in 2,000 is never drawn: see `shares`.
        windows: number of windows of each source, positive where the weight is.
        seed: any integer.

    Raises:
        ValueError: if the weights or windows are not as above.
    """

    weights: tuple[float, ...]
    windows: tuple[int, ...]
    seed: int

    def __post_init__(self) -> None:
        if len(self.weights) != len(self.windows) or not self.weights:
            raise ValueError(f"mixture: {len(self.weights)} weights for {len(self.windows)} sources; give one for each")
        if not all(math.isfinite(weight) and weight >= 0 for weight in self.weights) or sum(self.weights) <= 0:
            raise ValueError(f"mixture: weights {self.weights} must be finite, at least 0 and not all 0")
        for source, (weight, windows) in enumerate(zip(self.weights, self.windows, strict=True)):
            if weight > 0 and windows < 1:
                raise ValueError(
                    f"mixture: source {source} has weight {weight} but no whole window; give it more text or weight 0"
                )

    @cached_property
    def slots(self) -> tuple[int, ...]:
        """Slots of each source in a block: 100 in all if that makes every share whole, else 1,000."""
        return next(
            (slots for block in _BLOCKS if _is_exact(slots := apportion(self.weights, block), self.weights)),
            apportion(self.weights, _BLOCKS[-1]),
        )

    @property
    def shares(self) -> tuple[float, ...]:
        """The fraction of samples that each source gets."""
        return tuple(slots / sum(self.slots) for slots in self.slots)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of all that decides the draws; equal exactly when two mixtures draw the same."""
        content = {"slots": self.slots, "windows": self.windows, "seed": self.seed}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def draw(self, number: int) -> Draw:
        """Sample `number` (from 0) of the run; any number costs the same, however long the run and its sources."""
        block, offset = divmod(number, sum(self.slots))
        source, earlier_in_block = _order(self.slots, f"{self.seed}/block/{block}")[offset]
        count = block * self.slots[source] + earlier_in_block
        epoch, position = divmod(count, self.windows[source])
        key = f"{self.seed}/source/{source}/epoch/{epoch}"
        return Draw(source, epoch, permute(position, size=self.windows[source], key=key))


def apportion(weights: Sequence[float], slots: int) -> tuple[int, ...]:
    """`slots` divided in proportion to `weights`, whole numbers by largest remainder (ties to the first)."""
    quotas = [weight * slots / sum(weights) for weight in weights]
    # The nudge keeps 0.29 * 100 = 28.999999999999996 from losing a slot to rounding.
    floors = [int(quota + 1e-9) for quota in quotas]
    by_remainder = sorted(range(len(weights)), key=lambda i: (floors[i] - quotas[i], i))
    extra = set(by_remainder[: slots - sum(floors)])
    return tuple(floor + (i in extra) for i, floor in enumerate(floors))


def permute(position: int, *, size: int, key: str) -> int:
    """Where the random permutation of range(size) that `key` names sends `position`, in O(1) memory.

    A Feistel network of 4 rounds permutes the next power of 4; walking its cycle until a number below `size` comes
    permutes the range. Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains".
    """
    secret = hashlib.blake2b(key.encode(), digest_size=32).digest()
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = position >> half, position & mask
        for turn in range(_ROUNDS):
            digest = hashlib.blake2b(struct.pack("<BQ", turn, right), key=secret, digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        position = left << half | right
        if position < size:
            return position


def rank_samples(samples_seen: int, rows: int, *, rank: int, world: int) -> range:
    """Sample numbers of one rank's `rows` rows in the step after `samples_seen`; all ranks have rows * world."""
    first = samples_seen + rank * rows
    if not 0 <= rank < world:
        raise ValueError(f"rank_samples: rank {rank} is not one of {world} ranks")
    return range(first, first + rows)


def window_count(num_tokens: int, seq_len: int) -> int:
    """Whole windows of seq_len + 1 tokens in a stream; neighbours share one token, a label first and then an input."""
    return max(0, (num_tokens - 1) // seq_len)


# A few, because a batch may straddle blocks and a resumed run may look back.
@lru_cache(maxsize=8)
def _order(slots: tuple[int, ...], key: str) -> tuple[tuple[int, int], ...]:
    """The slots of one block in the order that `key` names: (source, slots of that source before this one)."""
    owners = [source for source, count in enumerate(slots) for _ in range(count)]
    used = [0] * len(slots)
    order = []
    for position in range(len(owners)):
        source = owners[permute(position, size=len(owners), key=key)]
        order.append((source, used[source]))
        used[source] += 1
    return tuple(order)


def _is_exact(slots: Sequence[int], weights: Sequence[float]) -> bool:
    total = sum(weights)
    return all(abs(weight / total * sum(slots) - count) < 1e-6 for weight, count in zip(weights, slots, strict=True))
