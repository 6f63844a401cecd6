import gc
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hymo.batch import IGNORED
from hymo.data import (
    BatchLoader,
    PreparedCorpus,
    SourcedBatch,
    TokenSource,
    label_bytes,
    mix_sources,
    open_source,
    validation_batches,
)

CASES = settings(max_examples=20, deadline=None, derandomize=True)
SEQ = 16


def opened(prepared: PreparedCorpus, split: str) -> list[TokenSource]:
    return [
        open_source(prepared.directory, source=name, split=split, tokenizer=prepared.tokenizer.fingerprint)
        for name in prepared.manifest.sources
    ]


@pytest.fixture(scope="module")
def train(prepared: PreparedCorpus) -> Iterator[list[TokenSource]]:
    sources = opened(prepared, "train")
    yield sources
    for source in sources:
        source.close()


@pytest.fixture(scope="module")
def val(prepared: PreparedCorpus) -> Iterator[list[TokenSource]]:
    sources = opened(prepared, "val")
    yield sources
    for source in sources:
        source.close()


def loader(sources: list[TokenSource], accumulation: int, micro_batch: int, **options: int) -> BatchLoader:
    mixture = mix_sources(sources, weights={"tales": 0.7, "notes": 0.3}, seq_len=SEQ, seed=5)
    return BatchLoader(
        sources, mixture=mixture, seq_len=SEQ, accumulation=accumulation, micro_batch=micro_batch, **options
    )


def rows(items: list[SourcedBatch]) -> torch.Tensor:
    """Every row that the batches hold, in order: its source, then inputs, labels and positions."""
    return torch.cat(
        [
            torch.cat([item.source.reshape(-1, 1), *(part.reshape(-1, SEQ) for part in item.batch)], dim=1)
            for item in items
        ]
    )


@CASES
@given(
    world=st.sampled_from([1, 2, 4, 8]),
    accumulation=st.sampled_from([1, 2]),
    steps_before=st.integers(0, 50),
    seed=st.integers(0, 2**31),
)
def test_any_ranks_and_any_restart_read_the_same_rows(
    train: list[TokenSource], world: int, accumulation: int, steps_before: int, seed: int
) -> None:
    with loader(train, 1, 16) as whole:
        expected = rows([next(whole) for _ in range(3)])
        assert whole.samples_seen == 48
    parts = []
    for rank in range(world):
        micro = 16 // world // accumulation
        with loader(train, accumulation, micro, rank=rank, world=world) as part:
            parts.append([next(part) for _ in range(3)])
            assert part.samples_seen == 48
            assert part.fingerprint == whole.fingerprint
    assert torch.equal(rows([parts[rank][step] for step in range(3) for rank in range(world)]), expected)
    with loader(train, 16, 1, samples_seen=seed % 32) as late:
        assert torch.equal(rows([next(late)]), expected[seed % 32 : seed % 32 + 16])


def test_a_batch_is_inputs_labels_and_positions_of_its_windows(train: list[TokenSource]) -> None:
    with loader(train, 2, 3) as batches:
        (tokens, labels, position), source = next(batches)
    assert tokens.shape == labels.shape == position.shape == (2, 3, SEQ)
    assert source.shape == (2, 3)
    assert {part.dtype for part in (tokens, labels, position, source)} == {torch.int64}
    assert torch.equal(tokens[..., 1:], labels[..., :-1])
    assert int(tokens.min()) >= 0
    assert int(tokens.max()) < 376
    assert torch.equal(position[..., 0], torch.zeros(2, 3, dtype=torch.int64))
    restarts = tokens[..., 1:] == 0
    assert torch.equal(position[..., 1:], torch.where(restarts, 0, position[..., :-1] + 1))


def test_an_epoch_shows_every_window_of_a_source(train: list[TokenSource]) -> None:
    source = train[1]
    count = (source.num_tokens - 1) // SEQ
    mixture = mix_sources([source], weights={"notes": 1.0}, seq_len=SEQ, seed=0)
    with BatchLoader([source], mixture=mixture, seq_len=SEQ, accumulation=1, micro_batch=count) as batches:
        first, second = next(batches).batch.tokens[0], next(batches).batch.tokens[0]
    expected = source.read(0, count * SEQ).reshape(count, SEQ)
    assert sorted(first.tolist()) == sorted(second.tolist()) == sorted(expected.tolist())
    assert not torch.equal(first, second)


def test_rows_come_from_sources_in_their_shares(train: list[TokenSource]) -> None:
    with loader(train, 10, 10) as batches:
        counts = Counter(next(batches).source.reshape(-1).tolist())
    assert counts == {0: 70, 1: 30}


def test_an_error_of_the_thread_is_raised_where_batches_are_taken(train: list[TokenSource]) -> None:
    class Failing(TokenSource):
        def __init__(self) -> None:
            self.name, self.num_tokens, self.sha256 = "tales", train[0].num_tokens, train[0].sha256

        def read(self, start: int, count: int) -> torch.Tensor:
            raise OSError("the disk is gone")

    with loader([Failing(), train[1]], 4, 4) as batches:
        with pytest.raises(OSError, match="the disk is gone"):
            next(batches)
        with pytest.raises(ValueError, match="closed"):
            next(batches)


def test_a_loader_that_is_closed_or_forgotten_stops_its_thread(train: list[TokenSource]) -> None:
    def running() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "hymo-batches"]

    batches = loader(train, 1, 1)
    next(batches)
    (thread,) = running()
    batches.close()
    assert not thread.is_alive()
    forgotten = loader(train, 1, 1)
    (thread,) = running()
    del forgotten
    gc.collect()
    thread.join(timeout=5)
    assert not thread.is_alive()


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("per_rank", [1, 4])
def test_validation_shows_every_byte_once_whatever_the_ranks(
    val: list[TokenSource], prepared: PreparedCorpus, world: int, per_rank: int
) -> None:
    one = [rows([item]) for item in validation_batches(val, seq_len=SEQ, rows=1)]
    ranks = [list(validation_batches(val, seq_len=SEQ, rows=per_rank, rank=r, world=world)) for r in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    every = torch.cat([rows([batches[i]]) for i in range(len(ranks[0])) for batches in ranks])
    assert torch.equal(every[: len(one)], torch.cat(one))
    source, labels = every[:, 0], every[:, 1 + SEQ : 1 + 2 * SEQ]
    assert (labels[len(one) :] == IGNORED).all()
    for number, name in enumerate(prepared.manifest.sources):
        mine = labels[source == number]
        shards = prepared.manifest.sources[name]["val"]
        assert int((mine != IGNORED).sum()) == sum(shard.tokens for shard in shards) - 1
        assert int((mine == 0).sum()) == sum(shard.documents for shard in shards)
        counted = label_bytes(mine, prepared.tokenizer.token_bytes())
        assert int(counted.sum()) == sum(shard.bytes for shard in shards) == prepared.validation[name].bytes


def test_limited_validation_is_a_fixed_part_of_the_whole(val: list[TokenSource]) -> None:
    whole = rows(list(validation_batches(val, seq_len=SEQ, rows=1))).tolist()
    part = rows(list(validation_batches(val, seq_len=SEQ, rows=2, limit=3))).tolist()
    assert len(part) == 3 * len(val)
    assert all(row in whole for row in part)
    assert part == rows(list(validation_batches(val, seq_len=SEQ, rows=1, limit=3))).tolist()


def test_labels_without_text_have_no_bytes(prepared: PreparedCorpus) -> None:
    token_bytes = prepared.tokenizer.token_bytes()
    word = prepared.tokenizer.encode("gate")
    labels = torch.tensor([[0, IGNORED, 2, *word, 120 + 255]])
    counted = label_bytes(labels, token_bytes)
    assert counted[0, :3].tolist() == [0, 0, 0]
    assert int(counted.sum()) == len("gate") + 1


@pytest.mark.parametrize(
    ("weights", "seq_len", "reason"),
    [
        ({"tales": 1.0}, SEQ, "weights are given for"),
        (
            {"tales": 0.5, "notes": 0.5},
            10**6,
            r"source tales has \d+ tokens, a window of seq_len 1000000 needs 1000001",
        ),
    ],
)
def test_sources_that_do_not_fit_the_mixture_are_named(
    train: list[TokenSource], weights: dict[str, float], seq_len: int, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        mix_sources(train, weights=weights, seq_len=seq_len, seed=0)


def test_a_weight_that_draws_nothing_is_refused_with_one_that_draws(train: list[TokenSource]) -> None:
    tiny, large = (source.name for source in train)
    with pytest.raises(ValueError, match=f"source {tiny} has weight 0.0001, .* none; give it at least 0.001, or leave"):
        mix_sources(train, weights={tiny: 0.0001, large: 0.9999}, seq_len=SEQ, seed=0)
    assert mix_sources(train, weights={tiny: 0.001, large: 0.999}, seq_len=SEQ, seed=0).shares == (0.001, 0.999)
    assert mix_sources(train, weights={tiny: 0.0, large: 1.0}, seq_len=SEQ, seed=0).shares == (0.0, 1.0)


def test_rows_that_memory_cannot_hold_are_refused_at_once(train: list[TokenSource]) -> None:
    with loader(train, 1, 10**15) as batches, pytest.raises(ValueError, match=r"rows of .* do not fit in memory"):
        next(batches)
