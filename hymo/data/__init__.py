"""Text to batches: tokenizer, token shards, a stateless mixture, batches, and the corpus that every Python carries."""

from hymo.data.batches import (
    BatchLoader,
    SourcedBatch,
    label_bytes,
    mix_sources,
    validation_batches,
)
from hymo.data.corpus import (
    Floor,
    PreparedCorpus,
    embedded_documents,
    order0_entropy,
    prepare_corpus,
    prepare_embedded,
    read_floors,
    xz_bits_per_byte,
)
from hymo.data.held_out import build_val_set
from hymo.data.mixture import Draw, Mixture, window_count
from hymo.data.pipeline import prepare
from hymo.data.shards import (
    Document,
    Manifest,
    Shard,
    TokenSource,
    open_shards,
    open_source,
    read_manifest,
    verify_shards,
    write_manifest,
    write_shards,
)
from hymo.data.tokenizer import ExtendedTokenizer, train_bpe_tokenizer

__all__ = [
    "BatchLoader",
    "Document",
    "Draw",
    "ExtendedTokenizer",
    "Floor",
    "Manifest",
    "Mixture",
    "PreparedCorpus",
    "Shard",
    "SourcedBatch",
    "TokenSource",
    "build_val_set",
    "embedded_documents",
    "label_bytes",
    "mix_sources",
    "open_shards",
    "open_source",
    "order0_entropy",
    "prepare",
    "prepare_corpus",
    "prepare_embedded",
    "read_floors",
    "read_manifest",
    "train_bpe_tokenizer",
    "validation_batches",
    "verify_shards",
    "window_count",
    "write_manifest",
    "write_shards",
    "xz_bits_per_byte",
]
