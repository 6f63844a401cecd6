"""Train a tokenizer on text files: `train_tokenizer.py OUT.json FILES ...`.

    python recipes/train_tokenizer.py tokenizer.json 'texts/*.jsonl.xz' --vocab-size 64000

It has --vocab-size ids for special and merged tokens and 256 more for the bytes; the same texts give the same file.
prepare_data trains one by itself, on training text only; this is for one that several corpora share.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from glob import glob
from itertools import chain
from pathlib import Path

from command_line import Parser, execute, user_errors

from hymo.data import train_bpe_tokenizer
from hymo.data.preparation import FilterConfig, TextConfig
from hymo.data.quality import refusal
from hymo.data.readers import read_file


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, and returns the exit code."""
    return execute("train_tokenizer", lambda: run(list(sys.argv[1:] if argv is None else argv)))


@user_errors()
def run(arguments: Sequence[str]) -> None:
    """Reads the command line, trains, and tells how well the tokenizer compresses what it was trained on."""
    parser = Parser("Train a tokenizer on text files.")
    parser.add_argument("output", help="file to write, e.g. tokenizer.json")
    parser.add_argument("files", nargs="+", help=".txt, .jsonl (.gz .xz .bz2 .zst), .parquet; globs too")
    parser.add_argument("--vocab-size", type=int, default=64_000, help="ids without the 256 bytes (default 64000)")
    parser.add_argument("--max-bytes", type=int, default=500_000_000, help="text in all, an equal part of each file")
    parser.add_argument("--column", default="text", help="field of a record that holds the document (default text)")
    asked = parser.parse_args(arguments)
    if Path(asked.output).exists():
        raise ValueError(f"output: expected a new file, got {asked.output}, which is there already")
    if asked.max_bytes < 1:
        raise ValueError(f"--max-bytes: expected at least 1, got {asked.max_bytes}")
    paths = [Path(path) for path in sorted({path for pattern in asked.files for path in glob(pattern)})]
    if not paths:
        raise ValueError(f"files: {' '.join(asked.files)} finds none")
    source = TextConfig("tokenizer", files=tuple(map(str, paths)), column=asked.column)
    sizes: list[int] = []
    begun = time.perf_counter()
    texts = (
        text for path in paths for text in read_some(path, source, most=asked.max_bytes // len(paths), sizes=sizes)
    )
    first = next(texts, None)
    if first is None:
        raise ValueError(
            f"files: none of {' '.join(asked.files)} begins with a document that passes the filters and fits into"
            f" {asked.max_bytes // len(paths):,} bytes, its part of --max-bytes"
        )
    tokenizer = train_bpe_tokenizer(chain([first], texts), vocab_size=asked.vocab_size, output_path=asked.output)
    print(
        f"{asked.output}: {tokenizer.vocab_size} ids, trained on {sum(sizes):,} bytes of {len(sizes):,} documents in "
        f"{time.perf_counter() - begun:.0f} s"
    )
    for path in paths:
        sample = list(read_some(path, source, most=1_000_000, sizes=[]))
        if tokens := sum(map(len, tokenizer.encode_batch(sample))):
            print(f"{path.name}: {sum(len(text.encode()) for text in sample) / tokens:.2f} bytes a token")


def read_some(path: Path, source: TextConfig, *, most: int, sizes: list[int]) -> Iterator[str]:
    """The first documents of a file that pass the filters, up to `most` bytes; appends the size of each."""
    filters, left = FilterConfig(), most
    for read in read_file(path, source, limit=filters.max_document_bytes):
        if read.text and not refusal(read.text, filters):
            size = len(read.text.encode())
            left -= size
            if left < 0:
                return
            sizes.append(size)
            yield read.text


if __name__ == "__main__" and (code := main()):
    sys.exit(code)
