"""One validation stream for runs that are to be compared, whatever they train on."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from hymo.data.corpus import TOKENIZER
from hymo.data.shards import Document, Shard, TokenSource, open_source, read_manifest, write_shard
from hymo.data.tokenizer import ExtendedTokenizer


def build_val_set(directory: str | Path, *, output_path: str | Path, target_tokens: int = 450_000_000) -> Shard:
    """Writes held-out documents of all sources of a prepared folder as one stream, `output_path` (.bin and .idx).

    Each source gives an equal part, its first documents, and no more than it has. Every training document is compared
    with them by the hash of its tokens, so what comes out is proven to be held out. `data.validation` takes the path.

    Args:
        output_path: ends with .bin.
        target_tokens: of the stream, at most.

    Raises:
        ValueError: if a document stands in a training split too, or there is none of `target_tokens` or less.
    """
    root, manifest = Path(directory), read_manifest(directory)
    bytes_of = ExtendedTokenizer.load(root / TOKENIZER).token_bytes()
    with ExitStack() as stack:

        def opened(split: str) -> list[TokenSource]:
            names = [name for name, splits in manifest.sources.items() if split in splits]
            streams = (open_source(root, source=name, split=split, tokenizer=manifest.tokenizer) for name in names)
            return [stack.enter_context(stream) for stream in streams]

        held_out = opened("val")
        spans = [(source, span) for source in held_out for span in _first(source, target_tokens // len(held_out))]
        if not spans:
            raise ValueError(f"data {root}: no held-out document has {target_tokens} tokens or less; allow more")
        digests = {source.digest(*span) for source, span in spans}
        for source in opened("train"):
            for number, span in enumerate(source.documents()):
                if source.digest(*span) in digests:
                    raise ValueError(
                        f"data {root}: document {number} of {source.name} stands in training and in validation;"
                        " prepare the data again"
                    )
        tokens = (source.read(*span) for source, span in spans)
        documents = (Document(each.tolist(), int(bytes_of[each].sum())) for each in tokens)
        return write_shard(Path(output_path), documents, vocab_size=manifest.vocab_size, tokenizer=manifest.tokenizer)


def _first(source: TokenSource, most: int) -> Iterator[tuple[int, int]]:
    """The first documents, with their delimiters of at most `most` tokens together."""
    left = most - 1
    for start, count in source.documents():
        left -= count + 1
        if left < 0:
            return
        yield start, count
