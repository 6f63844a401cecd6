"""Evaluation: sums over tokens, in the units that it says, whatever the batches."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import smallest_config, tiny_config, windows
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hymo.evaluate
from hymo import tree
from hymo.batch import IGNORED, Batch, make_batch
from hymo.config import DELIMITER, DataConfig
from hymo.data import Document, SourcedBatch, TokenSource, open_shards, validation_batches, write_shards
from hymo.evaluate import Evaluation, compute_validation_loss, get_val_batch, open_validation, windows_per_source
from hymo.loss import token_nats
from hymo.model import ModelParams, model_spec
from hymo.params import initialize

CFG = tiny_config().model
PARAMS = initialize(model_spec(CFG), 0)
# Ids 0 to 4 are special; the others stand for 1 to 5 bytes.
TOKEN_BYTES = torch.where(torch.arange(512) < 5, 0, torch.arange(512) % 5 + 1)
SOURCES = ["prose", "code", "poems"]
TOKENIZER = "ab" * 32


def batches(tokens: Tensor, source: Tensor, rows: int, labels: Tensor | None = None) -> Iterator[SourcedBatch]:
    """The windows in batches of `rows`, the last filled up with rows of ignored labels."""
    whole = make_batch(tokens)
    whole = whole if labels is None else whole._replace(labels=labels)
    missing = -len(tokens) % rows
    padding = make_batch(torch.full((missing, tokens.shape[1]), DELIMITER))
    padding = padding._replace(labels=torch.full_like(padding.labels, IGNORED))
    whole = tree.map(lambda a, b: torch.cat([a, b]), whole, padding)
    source = torch.cat([source, source.new_zeros(missing)])
    parts = zip(*(leaf.split(rows) for leaf in (*whole, source)), strict=True)
    for *batch, number in parts:
        yield SourcedBatch(Batch(*batch), number)


def evaluate(given_batches: Any, params: ModelParams = PARAMS, **options: Any) -> Evaluation:
    defaults: dict[str, Any] = {"cfg": CFG, "token_bytes": TOKEN_BYTES, "sources": SOURCES}
    return compute_validation_loss(params, given_batches, **(defaults | options))


def test_a_uniform_model_costs_ln_of_the_vocabulary_a_token_and_log2_of_it_over_bytes() -> None:
    uniform = PARAMS._replace(table=torch.zeros_like(PARAMS.table))
    tokens = windows(0, 4, 17)
    found = evaluate(batches(tokens, torch.tensor([0, 1, 1, 2]), 2), uniform)
    size = TOKEN_BYTES[tokens[:, 1:]]
    assert found.loss == pytest.approx(math.log(512), rel=1e-6)
    assert found.perplexity == pytest.approx(512, rel=1e-5)
    assert found.bits_per_byte == pytest.approx(9 * (size > 0).sum().item() / size.sum().item(), rel=1e-6)
    assert found.byte_perplexity == pytest.approx(2**found.bits_per_byte)
    assert (found.tokens, found.bytes) == (4 * 16, size.sum().item())


def test_a_delimiter_counts_in_nats_per_token_and_not_in_bits_per_byte() -> None:
    tokens = windows(1, 3, 17, document=4)
    batch = make_batch(tokens)
    nats = token_nats(PARAMS, batch, cfg=CFG).double()
    is_text = TOKEN_BYTES[batch.labels] > 0
    assert (batch.labels == DELIMITER).any()
    found = evaluate(batches(tokens, torch.zeros(3, dtype=torch.int64), 3))
    assert found.loss == pytest.approx(nats.mean().item(), rel=1e-6)
    bits = nats[is_text].sum().item() / math.log(2) / TOKEN_BYTES[batch.labels].sum().item()
    assert found.bits_per_byte == pytest.approx(bits, rel=1e-6)


@settings(max_examples=8, deadline=None)
@given(rows=st.integers(1, 6), seed=st.integers(0, 2**16))
def test_an_evaluation_does_not_depend_on_the_batches(rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens, source = windows(seed, 5, 13), torch.randint(0, 3, (5,), generator=generator)
    labels = make_batch(tokens).labels
    # Rows of very different weight: a mean of means would show.
    lengths = torch.randint(1, 13, (5, 1), generator=generator)
    labels = torch.where(torch.arange(12) < lengths, labels, IGNORED)
    found, expected = (evaluate(batches(tokens, source, n, labels)) for n in (rows, 5))
    assert (found.tokens, found.bytes) == (expected.tokens, expected.bytes) == (lengths.sum().item(), expected.bytes)
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert found.bits_per_byte == pytest.approx(expected.bits_per_byte, rel=1e-6)
    assert found.sources.keys() == expected.sources.keys()
    for name, each in found.sources.items():
        assert each == pytest.approx(expected.sources[name], rel=1e-6)


def test_sources_add_up_to_the_whole() -> None:
    source = torch.tensor([2, 0, 2, 2])
    found = evaluate(batches(windows(3, 4, 17), source, 2))
    assert list(found.sources) == ["prose", "poems"]
    assert sum(each.tokens for each in found.sources.values()) == found.tokens
    assert sum(each.bytes for each in found.sources.values()) == found.bytes
    assert sum(each.tokens * each.loss for each in found.sources.values()) / found.tokens == pytest.approx(found.loss)
    alone = evaluate(batches(windows(3, 4, 17)[1:2], source[1:2], 1))
    assert found.sources["prose"] == pytest.approx(alone.sources["prose"], rel=1e-6)


def test_no_token_is_dropped_whatever_the_capacity() -> None:
    skewed = [
        block._replace(ffn=block.ffn._replace(bias=torch.tensor([9.0, 8.0, 0.0, 0.0])))
        if i in CFG.mla_layers
        else block
        for i, block in enumerate(PARAMS.blocks)
    ]
    params = PARAMS._replace(blocks=tuple(skewed))
    tokens, source = windows(4, 2, 33), torch.zeros(2, dtype=torch.int64)
    tight, wide = (tiny_config(model={"moe_capacity_factor": factor}).model for factor in (0.01, 100.0))
    assert evaluate(batches(tokens, source, 2), params, cfg=tight) == evaluate(
        batches(tokens, source, 2), params, cfg=wide
    )


def test_an_evaluation_is_traced_once_for_all_its_batches_and_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = []

    def counting(*args: Any, **options: Any) -> Tensor:
        traces.append(1)
        return token_nats(*args, **options)

    monkeypatch.setattr(hymo.evaluate, "token_nats", counting)
    cfg = smallest_config().model
    params, tokens, source = initialize(model_spec(cfg), 0), windows(5, 5, 9), torch.zeros(5, dtype=torch.int64)
    compiled = evaluate(batches(tokens, source, 2), params, cfg=cfg, compile="aot_eager")
    count = len(traces)
    evaluate(batches(tokens[:3], source[:3], 2), initialize(model_spec(cfg), 1), cfg=cfg, compile="aot_eager")
    assert len(traces) == count
    assert compiled.loss == pytest.approx(evaluate(batches(tokens, source, 2), params, cfg=cfg).loss, rel=1e-5)


def test_a_record_is_one_line_of_json() -> None:
    found = evaluate(batches(windows(0, 2, 9), torch.tensor([0, 1]), 2))
    record = json.loads(json.dumps(found.record()))
    assert list(record) == ["loss", "perplexity", "bits_per_byte", "byte_perplexity", "tokens", "bytes", "sources"]
    assert record["sources"]["code"] == found.sources["code"]._asdict()


def test_without_text_there_is_nothing_to_evaluate() -> None:
    with pytest.raises(ValueError, match="not one of 16 labels is text"):
        evaluate(batches(torch.full((2, 9), DELIMITER), torch.tensor([0, 1]), 2))
    with pytest.raises(ValueError, match="not one of 0 labels is text"):
        evaluate([])


def test_a_tokenizer_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="token_bytes has 500 ids, the model 512"):
        evaluate([], token_bytes=TOKEN_BYTES[:500])


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    texts = [Document(windows(seed, 40, document=10**9).tolist(), 100) for seed in range(3)]
    write_shards(tmp_path, texts, name="held_out", vocab_size=512, tokenizer=TOKENIZER)
    return tmp_path


@pytest.fixture
def source(shards: Path) -> TokenSource:
    return open_shards(shards, name="held_out", tokenizer=TOKENIZER)


def test_every_window_of_a_source_is_scored_once(source: TokenSource) -> None:
    found = [evaluate(validation_batches([source], seq_len=16, rows=rows), sources=["held_out"]) for rows in (1, 3)]
    assert found[0].tokens == found[1].tokens == source.num_tokens - 1
    assert found[0].loss == pytest.approx(found[1].loss, rel=1e-6)


def test_validation_is_what_the_configuration_names(shards: Path) -> None:
    data = DataConfig(validation=str(shards / "*.bin"))
    (opened,) = open_validation(data, "unused", tokenizer=TOKENIZER)
    assert opened.name == "validation"
    with pytest.raises(ValueError, match="tokenizer"):
        open_validation(data, "unused", tokenizer="cd" * 32)


def test_the_tokens_of_an_evaluation_are_shared_by_the_sources() -> None:
    data = DataConfig(val_tokens=10_000)
    assert windows_per_source(data, seq_len=100, sources=4) == 25
    assert windows_per_source(data, seq_len=9_000, sources=4) == 1


def test_a_validation_batch_is_a_function_of_its_seed(source: TokenSource) -> None:
    x, y = get_val_batch(source, batch_size=4, seq_len=8, seed=1)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal(x, get_val_batch(source, batch_size=4, seq_len=8, seed=1)[0])
    assert not torch.equal(x, get_val_batch(source, batch_size=4, seq_len=8, seed=2)[0])
    assert len({tuple(row) for row in x.tolist()}) == 4


def test_more_validation_windows_than_there_are_cannot_be_had(source: TokenSource) -> None:
    with pytest.raises(ValueError, match=r"3 windows of 50 tokens asked, source held_out has 2 \(\d+ tokens\)"):
        get_val_batch(source, batch_size=3, seq_len=50)
