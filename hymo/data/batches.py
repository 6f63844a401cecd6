"""Batches: windows of the sources as (tokens, labels, position), read ahead by one thread."""

import hashlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from hymo.batch import IGNORED, Batch, make_batch
from hymo.config import DELIMITER
from hymo.data.mixture import Mixture, rank_samples, window_count
from hymo.data.shards import TokenSource


class SourcedBatch(NamedTuple):
    """A batch and the number of the source of each row (0 for a row of padding, whose labels are all ignored)."""

    batch: Batch
    source: Int[Tensor, "... b"]


def label_bytes(labels: Int[Tensor, "*b t"], token_bytes: Int[Tensor, " vocab"]) -> Int[Tensor, "*b t"]:
    """Bytes of text of each label; 0 where it is ignored or special.

    bits per byte = sum of nats where this is positive / (ln 2 * its sum): a delimiter counts in neither sum.
    """
    return torch.where(labels >= 0, token_bytes[labels.clamp(min=0)], 0)


def mix_sources(sources: Sequence[TokenSource], *, weights: Mapping[str, float], seq_len: int, seed: int) -> Mixture:
    """The mixture of opened sources, in their order, by weights given by name.

    Raises:
        ValueError: if names and weights do not match, a source with a weight is shorter than one window, or a weight is
            so small that its source would never be drawn.
    """
    names = [source.name for source in sources]
    if sorted(names) != sorted(weights):
        raise ValueError(f"mixture: weights are given for {sorted(weights)}, the opened sources are {sorted(names)}")
    for source in sources:
        if weights[source.name] > 0 and source.num_tokens <= seq_len:
            raise ValueError(
                f"mixture: source {source.name} has {source.num_tokens} tokens, a window of seq_len {seq_len} needs "
                f"{seq_len + 1}; give it more text, a shorter seq_len or weight 0"
            )
    windows = tuple(window_count(source.num_tokens, seq_len) for source in sources)
    mixture = Mixture(tuple(float(weights[name]) for name in names), windows, seed)
    for name, share in zip(names, mixture.shares, strict=True):
        if weights[name] > 0 and not share:
            slots = sum(mixture.slots)
            raise ValueError(
                f"mixture: source {name} has weight {weights[name]:g}, of {slots:,} samples it would get none; give it "
                f"at least {sum(weights.values()) / slots:g}, or leave it out"
            )
    return mixture


class BatchLoader:
    """Batches of consecutive steps for one rank, the next ones read ahead by a daemon thread.

    `samples_seen` is the only state: rows handed out so far, over all ranks. A loader built with that number continues
    exactly, whatever the ranks, micro-batch and accumulation before. A step is the next rows in order, each rank a
    contiguous part of them. `fingerprint` is equal exactly when sample n is the same tokens for every n: a run that
    continues must find its own.

    Args:
        sources: in the order of the mixture.
        accumulation: a, micro-batches of a step on this rank.
        micro_batch: b, rows of a micro-batch on this rank.
        samples_seen: where to begin.

    Yields:
        `SourcedBatch` with tokens, labels, position [a, b, seq_len] and source [a, b], all int64, without end. An error
        of the thread is raised here.
    """

    def __init__(
        self,
        sources: Sequence[TokenSource],
        *,
        mixture: Mixture,
        seq_len: int,
        accumulation: int,
        micro_batch: int,
        rank: int = 0,
        world: int = 1,
        samples_seen: int = 0,
    ) -> None:
        if accumulation < 1 or micro_batch < 1 or samples_seen < 0:
            raise ValueError(
                f"loader: accumulation {accumulation} and micro_batch {micro_batch} must be at least 1, "
                f"samples_seen {samples_seen} at least 0"
            )
        self.samples_seen = samples_seen
        content = [mixture.fingerprint, str(seq_len), *(source.sha256 for source in sources)]
        self.fingerprint = hashlib.sha256("/".join(content).encode()).hexdigest()
        self.global_rows = accumulation * micro_batch * world
        rank_samples(0, accumulation * micro_batch, rank=rank, world=world)

        def read_step(first: int) -> SourcedBatch:
            numbers = rank_samples(first, accumulation * micro_batch, rank=rank, world=world)
            windows, source = read_samples(sources, mixture, numbers, seq_len=seq_len)
            shape = (accumulation, micro_batch)
            return SourcedBatch(make_batch(windows.reshape(*shape, -1)), source.reshape(shape))

        self._ready: queue.Queue[SourcedBatch | BaseException] = queue.Queue(maxsize=2)
        self._stop = threading.Event()
        # The thread must not hold the loader, or a loader that nobody uses any more would never stop it.
        arguments = (read_step, samples_seen, self.global_rows, self._ready, self._stop)
        self._thread = threading.Thread(target=_read_ahead, args=arguments, name="hymo-batches", daemon=True)
        self._finalizer = weakref.finalize(self, self._stop.set)
        self._thread.start()

    def __iter__(self) -> "BatchLoader":
        return self

    def __next__(self) -> SourcedBatch:
        if self._stop.is_set():
            raise ValueError("loader: it is closed; build one with samples_seen to go on")
        item = self._ready.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        self.samples_seen += self.global_rows
        return item

    def close(self) -> None:
        """Stop the thread and wait for it; the sources stay open."""
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> "BatchLoader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_samples(
    sources: Sequence[TokenSource], mixture: Mixture, numbers: Sequence[int], *, seq_len: int
) -> tuple[Int[Tensor, "rows window"], Int[Tensor, " rows"]]:
    """The windows of the samples with these numbers, and the source of each; ValueError if memory cannot hold them."""
    # Allocated before anything is read, so that too many rows fail at once.
    try:
        windows = torch.empty(len(numbers), seq_len + 1, dtype=torch.int64)
    except RuntimeError:
        raise ValueError(
            f"loader: {len(numbers):,} rows of {seq_len + 1:,} tokens do not fit in memory; use a smaller micro_batch"
        ) from None
    source = torch.empty(len(numbers), dtype=torch.int64)
    for row, draw in enumerate(map(mixture.draw, numbers)):
        windows[row] = sources[draw.source].read(draw.window * seq_len, seq_len + 1)
        source[row] = draw.source
    return windows, source


def validation_batches(
    sources: Sequence[TokenSource], *, seq_len: int, rows: int, limit: int | None = None, rank: int = 0, world: int = 1
) -> Iterator[SourcedBatch]:
    """Batches [rows, seq_len] in which every token of every source but its first is a label once.

    The windows do not depend on `rows` or `world`. Behind the end of a source labels are ignored; the last batches are
    filled with rows of ignored labels, so that every rank gets as many. Weight by labels, never by batches.

    Args:
        rows: rows of a batch on this rank.
        limit: most windows of a source, spread evenly over it; None is all of them.
    """
    picks = [
        (number, window)
        for number, source in enumerate(sources)
        for window in _spread(-(-(source.num_tokens - 1) // seq_len), limit)
    ]
    for first in range(0, len(picks), rows * world):
        mine = picks[first + rank * rows : min(len(picks), first + (rank + 1) * rows)]
        windows = [_read_padded(sources[number], window * seq_len, seq_len + 1) for number, window in mine]
        padding = [torch.full((seq_len + 1,), IGNORED)] * (rows - len(mine))
        stacked = torch.stack([*windows, *padding])
        batch = make_batch(torch.where(stacked == IGNORED, DELIMITER, stacked))
        labels = stacked[:, 1:].contiguous()
        source = torch.tensor([number for number, _ in mine] + [0] * len(padding))
        yield SourcedBatch(batch._replace(labels=labels), source)


def _spread(count: int, limit: int | None) -> list[int]:
    """`limit` of `count` numbers, evenly spaced; all of them if there are no more."""
    taken = count if limit is None else min(count, limit)
    return [i * count // taken for i in range(taken)]


def _read_padded(source: TokenSource, start: int, count: int) -> Int[Tensor, " {count}"]:
    """`count` tokens from `start`; past the end of the stream, ignored labels."""
    tokens = source.read(start, min(count, source.num_tokens - start))
    return torch.nn.functional.pad(tokens, (0, count - tokens.shape[0]), value=IGNORED)


def _read_ahead(
    read_step: Callable[[int], SourcedBatch],
    first: int,
    stride: int,
    ready: "queue.Queue[SourcedBatch | BaseException]",
    stop: threading.Event,
) -> None:
    """Fill `ready` with the steps from `first` on until told to stop; an error is the last thing put there."""
    item: SourcedBatch | BaseException
    while not stop.is_set():
        try:
            item = read_step(first)
        except BaseException as error:
            # Whatever it is, the consumer raises it.
            item = error
        while not stop.is_set():
            try:
                # A thread that waits for ever could not be stopped.
                ready.put(item, timeout=0.1)
                break
            except queue.Full:
                continue
        if isinstance(item, BaseException):
            return
        first += stride
