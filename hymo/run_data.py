"""The data of a run: what `config.data` names, opened, and checked against the tokenizer and the model."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from hymo.config import HyMoConfig, SourceConfig
from hymo.data import (
    BatchLoader,
    ExtendedTokenizer,
    Mixture,
    SourcedBatch,
    TokenSource,
    mix_sources,
    open_shards,
    open_source,
    prepare_embedded,
    read_floors,
    validation_batches,
)
from hymo.evaluate import open_validation, windows_per_source
from hymo.run_folder import DATA, TOKENIZER

# Up to here a source is verified before a run begins.
_VERIFIED_TOKENS = 50_000_000


class RunData(NamedTuple):
    """Opened data.

    Args:
        tokenizer: made every shard.
        train: the sources, in the order of the mixture.
        mixture: which window of which source each sample is.
        validation: held-out sources.
        baselines: of the whole validation text, `order0_bits_per_byte` and `xz_bits_per_byte`; empty if not known.
    """

    tokenizer: ExtendedTokenizer
    train: tuple[TokenSource, ...]
    mixture: Mixture
    validation: tuple[TokenSource, ...]
    baselines: Mapping[str, float]

    def loader(self, config: HyMoConfig, samples_seen: int = 0, *, rank: int = 0, world: int = 1) -> BatchLoader:
        """A rank's training batches from sample `samples_seen` on."""
        training = config.training
        return BatchLoader(
            self.train,
            mixture=self.mixture,
            seq_len=training.max_seq_len,
            accumulation=training.gradient_accumulation_steps,
            micro_batch=training.micro_batch_size,
            rank=rank,
            world=world,
            samples_seen=samples_seen,
        )

    def validation_batches(self, config: HyMoConfig, *, rank: int = 0, world: int = 1) -> Iterator[SourcedBatch]:
        """A rank's part of at most `data.val_tokens` tokens of validation, in equal parts from the sources."""
        seq_len, rows = config.training.max_seq_len, config.training.micro_batch_size
        limit = windows_per_source(config.data, seq_len=seq_len, sources=len(self.validation))
        return validation_batches(self.validation, seq_len=seq_len, rows=rows, limit=limit, rank=rank, world=world)

    def close(self) -> None:
        """Closes the shards."""
        for source in (*self.train, *self.validation):
            source.close()


def open_run_data(config: HyMoConfig, folder: Path) -> RunData:
    """Opens the data of a run; an embedded corpus is prepared first, in `data.folder` or in `folder`/data.

    Sources of up to 50 M tokens are read once and compared with the sha256 they were written with. Larger ones are not:
    their ids are checked when a window is read, their content by `hymo.data.verify_shards` or `TokenSource.verify`.

    Raises:
        ValueError: naming what is missing, was changed, does not fit the tokenizer or the model's vocabulary, or is too
            short.
        OSError: if it cannot be read, or a corpus not be written.
    """
    data, model = config.data, config.model
    prepared = Path(data.folder) if data.folder else None
    if prepared and prepared.exists() and not prepared.is_dir():
        raise ValueError(f"data.folder: expected a folder, got {prepared}, which is a file")
    if data.corpus:
        prepared = prepare_embedded(prepared or folder / DATA, vocab_size=model.tokenizer_vocab_size).directory
    tokenizer = ExtendedTokenizer.load(data.tokenizer or _inside(prepared, "tokenizer") / TOKENIZER)
    if tokenizer.vocab_size != model.vocab_size:
        raise ValueError(
            f"model.vocab_size: expected {tokenizer.vocab_size}, that of the tokenizer, got {model.vocab_size}"
        )
    train = tuple(_training_source(each, prepared, tokenizer) for each in data.sources)
    held_out = data.validation or _inside(prepared, "validation")
    validation = open_validation(data, held_out, tokenizer=tokenizer.fingerprint)
    for source in (*train, *validation):
        if source.num_tokens <= _VERIFIED_TOKENS:
            source.verify()
    weights = {each.name: each.weight for each in data.sources}
    mixture = mix_sources(train, weights=weights, seq_len=config.training.max_seq_len, seed=config.training.seed)
    floors = read_floors(prepared) if prepared and not data.validation else {}
    floor = floors["all"]._asdict() if "all" in floors else {}
    baselines = {name: value for name, value in floor.items() if name.endswith("bits_per_byte")}
    return RunData(tokenizer, train, mixture, validation, baselines)


def _inside(prepared: Path | None, key: str) -> Path:
    if prepared is None:
        raise ValueError(f"data.{key}: expected a path, or a prepared folder in data.folder, got null for both")
    return prepared


def _training_source(source: SourceConfig, prepared: Path | None, tokenizer: ExtendedTokenizer) -> TokenSource:
    if source.shards:
        return open_shards(source.shards, name=source.name, tokenizer=tokenizer.fingerprint)
    folder = _inside(prepared, f"sources: {source.name}.shards")
    return open_source(folder, source=source.name, split="train", tokenizer=tokenizer.fingerprint)
