"""How well a model predicts held-out text: nats per token, and bits per byte, which no tokenizer can flatter.

Everything is a sum over tokens in float64, never a mean of batch means, so that batches and their sizes do not matter.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hymo import tree
from hymo.backend import EAGER, Backend
from hymo.batch import IGNORED, Batch
from hymo.config import DataConfig, ModelConfig
from hymo.data import SourcedBatch, TokenSource, label_bytes, open_shards, open_source
from hymo.data.mixture import permute, window_count
from hymo.distributed import ALONE, Ranks
from hymo.graph import Compile
from hymo.jit import jit
from hymo.loss import token_nats
from hymo.model import ModelParams


class SourceEvaluation(NamedTuple):
    """The figures of one source, as in `Evaluation`."""

    loss: float
    bits_per_byte: float
    tokens: int
    bytes: int


class Evaluation(NamedTuple):
    """What one evaluation found.

    Args:
        loss: nats per label, the delimiters that end documents included.
        perplexity: exp(loss), per label.
        bits_per_byte: nats of the labels that are text, over ln 2 times their bytes; a delimiter is in neither.
        byte_perplexity: 2 ** bits_per_byte.
        tokens: labels that counted in `loss`.
        bytes: of text in those labels.
        sources: the same for each source of which text was scored, by name.
    """

    loss: float
    perplexity: float
    bits_per_byte: float
    byte_perplexity: float
    tokens: int
    bytes: int
    sources: dict[str, SourceEvaluation]

    def record(self) -> dict[str, Any]:
        """Plain dictionaries, for a line of JSON."""
        return {**self._asdict(), "sources": {name: each._asdict() for name, each in self.sources.items()}}


def compute_validation_loss(
    params: ModelParams,
    batches: Iterable[SourcedBatch],
    *,
    cfg: ModelConfig,
    token_bytes: Int[Tensor, " u"],
    sources: Sequence[str],
    backend: Backend = EAGER,
    compile: Compile = "none",
    ranks: Ranks = ALONE,
) -> Evaluation:
    """Scores every label of all ranks' `batches` by the main head, every token served by all its experts.

    Batches of one shape share one compiled step, in this call and in later ones; fill up the last with rows of ignored
    labels, as `hymo.data.validation_batches` does.

    Args:
        token_bytes: bytes of text of each id, 0 for specials (`ExtendedTokenizer.token_bytes`).
        sources: names, in the order of the numbers in `SourcedBatch.source`.
        compile: as in `hymo.jit.jit`.
        ranks: each with as many batches of its own, its shard of the parameters, and a `backend` that gathers them.

    Raises:
        ValueError: if not one label is text, or `token_bytes` is of another vocabulary.
    """
    if token_bytes.shape[0] != cfg.vocab_size:
        raise ValueError(
            f"evaluation: token_bytes has {token_bytes.shape[0]} ids, the model {cfg.vocab_size}; "
            "take the tokenizer that the model was trained with"
        )
    score = _compiled_sums(len(sources), cfg, backend, compile)
    device = params.table.device
    sums = torch.zeros(len(sources), 4, dtype=torch.float64, device=device)
    for batch in batches:
        on = tree.map(lambda leaf: leaf.to(device), (batch.batch, batch.source, token_bytes))
        sums = sums + score(params, *on)
    sums = ranks.sum(sums)
    of_source, (nats, tokens, text_nats, size) = sums.tolist(), sums.sum(0).tolist()
    if not size:
        raise ValueError(f"evaluation: not one of {tokens:.0f} labels is text; give it validation text")
    scored = {name: _source(*each) for name, each in zip(sources, of_source, strict=True) if each[-1]}
    whole = _source(nats, tokens, text_nats, size)
    return Evaluation(
        loss=whole.loss,
        perplexity=math.exp(whole.loss),
        bits_per_byte=whole.bits_per_byte,
        byte_perplexity=2**whole.bits_per_byte,
        tokens=whole.tokens,
        bytes=whole.bytes,
        sources=scored,
    )


def source_sums(
    params: ModelParams,
    batch: Batch,
    source: Int[Tensor, " b"],
    token_bytes: Int[Tensor, " u"],
    *,
    count: int,
    cfg: ModelConfig,
    backend: Backend = EAGER,
) -> Float[Tensor, "{count} 4"]:
    """What adds up over one batch, by source: nats of all labels, their number, nats of text, its bytes; in float64."""
    nats = token_nats(params, batch, cfg=cfg, backend=backend).double()
    size = label_bytes(batch.labels, token_bytes)
    sums = (nats, batch.labels != IGNORED, torch.where(size > 0, nats, 0), size)
    of_row = torch.stack([each.sum(-1).double() for each in sums], dim=-1)
    is_of = source == torch.arange(count, device=source.device)[:, None]
    return is_of.double() @ of_row


def open_validation(data: DataConfig, folder: str | Path, *, tokenizer: str) -> tuple[TokenSource, ...]:
    """The held-out text of each source of `folder`, or what `data.validation` names as one source, `validation`.

    Args:
        tokenizer: fingerprint of the tokenizer that the reader uses.

    Raises:
        ValueError: if it is missing, damaged, or made with another tokenizer.
    """
    if data.validation is not None:
        return (open_shards(data.validation, name="validation", tokenizer=tokenizer),)
    return tuple(open_source(folder, source=each.name, split="val", tokenizer=tokenizer) for each in data.sources)


def windows_per_source(data: DataConfig, *, seq_len: int, sources: int) -> int:
    """How many windows of each source make one evaluation of `data.val_tokens`; at least one."""
    return max(1, data.val_tokens // (seq_len * sources))


def get_val_batch(
    source: TokenSource, *, batch_size: int, seq_len: int, seed: int = 42, device: torch.device | str = "cpu"
) -> tuple[Int[Tensor, "{batch_size} {seq_len}"], Int[Tensor, "{batch_size} {seq_len}"]]:
    """Inputs and labels of `batch_size` different windows of a source, drawn by `seed`: the same at every call.

    For a look at a model; `hymo.data.validation_batches` covers a source.

    Raises:
        ValueError: if the source has fewer windows.
    """
    available = window_count(source.num_tokens, seq_len)
    if batch_size > available:
        raise ValueError(
            f"validation: {batch_size} windows of {seq_len} tokens asked, source {source.name} has {available} "
            f"({source.num_tokens} tokens); ask for fewer or shorter ones"
        )
    picks = [permute(row, size=available, key=f"{seed}/validation") for row in range(batch_size)]
    windows = torch.stack([source.read(pick * seq_len, seq_len + 1) for pick in picks]).to(device)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


# A run evaluates many times; the compiled step must outlive the call that made it.
@functools.lru_cache(maxsize=4)
def _compiled_sums(count: int, cfg: ModelConfig, backend: Backend, compile: Compile) -> Callable[..., Tensor]:
    return jit(partial(source_sums, count=count, cfg=cfg, backend=backend), compile=compile)


def _source(nats: float, tokens: float, text_nats: float, size: float) -> SourceEvaluation:
    return SourceEvaluation(nats / tokens, text_nats / (math.log(2) * size), round(tokens), round(size))
