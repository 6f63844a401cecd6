"""How fast text becomes tokens and tokens become batches: MB of text per second of one core.

    python benchmarks/data.py prepared --source python
    python benchmarks/data.py prepared --megabytes 20 --output benchmarks/results/data_cpu.txt

Reads the training text of a prepared folder. Beside hymo's encoder stands tiktoken with the same vocabulary, if it is
installed; ids are compared before anything is timed. Speeds are per CPU-second, the median of interleaved rounds.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("RAYON_NUM_THREADS", "1")

import torch

from hymo.config import BYTE_TOKENS
from hymo.data import BatchLoader, ExtendedTokenizer, TokenSource, mix_sources, open_source, read_manifest
from hymo.data.encoding import encode_documents
from hymo.data.minhash import signature
from hymo.data.preparation import FilterConfig
from hymo.data.quality import refusal
from hymo.data.tokenizer import SPECIALS


def main() -> None:
    """Measures, prints one table, and writes it where it is asked for."""
    parser = argparse.ArgumentParser(description="How fast text becomes tokens and tokens become batches.")
    parser.add_argument("folder", help="prepared by recipes/prepare_data.py")
    parser.add_argument("--source", help="of the folder (default: the first)")
    parser.add_argument("--megabytes", type=float, default=8.0, help="text to measure with (default 8)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", help="file for the table, too")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    manifest = read_manifest(asked.folder)
    name = asked.source or next(iter(manifest.sources))
    tokenizer = ExtendedTokenizer.load(Path(asked.folder) / "tokenizer.json")
    with open_source(asked.folder, source=name, split="train", tokenizer=tokenizer.fingerprint) as source:
        texts = read_texts(source, tokenizer, size=asked.megabytes * 1e6)
        lines = table(measure(jobs(source, tokenizer, texts), rounds=asked.rounds), texts, name=name)
    print(lines)
    if asked.output:
        Path(asked.output).write_text(lines + "\n", encoding="utf-8")


def read_texts(source: TokenSource, tokenizer: ExtendedTokenizer, *, size: float) -> list[str]:
    """The first documents of a source, at most `size` bytes and at least one."""
    texts: list[str] = []
    for span in source.documents():
        texts.append(tokenizer.decode(source.read(*span).tolist()))
        size -= len(texts[-1].encode())
        if size < 0:
            break
    return texts


def jobs(source: TokenSource, tokenizer: ExtendedTokenizer, texts: Sequence[str]) -> dict[str, Callable[[], float]]:
    """What is measured, by name: each does its work and returns the bytes of text that it stands for."""
    size = float(sum(len(text.encode()) for text in texts))
    ids = [document.tokens for document in encode_documents(tokenizer, texts)]
    assert [tokenizer.decode(each) for each in ids] == list(texts)

    def whole(job: Callable[[], object]) -> Callable[[], float]:
        def run() -> float:
            job()
            return size

        return run

    found = {
        "hymo encode": whole(lambda: list(encode_documents(tokenizer, texts))),
        "hymo decode": whole(lambda: [tokenizer.decode(each) for each in ids]),
        "filters": whole(lambda: [refusal(text, FilterConfig()) for text in texts]),
        "MinHash": whole(lambda: [signature(text) for text in texts]),
        "batches of 8 x 1,024": lambda: load(source, bytes_per_token=size / sum(map(len, ids))),
    }
    if (encoding := tiktoken_encoding(tokenizer)) is not None:
        assert [encoding.encode_ordinary(text) for text in texts] == ids
        found["tiktoken encode"] = whole(lambda: [encoding.encode_ordinary(text) for text in texts])
        found["tiktoken decode"] = whole(lambda: [encoding.decode(each) for each in ids])
    return found


def load(source: TokenSource, *, bytes_per_token: float, steps: int = 64) -> float:
    """Reads batches as a run does; bytes of text in them."""
    mixture = mix_sources([source], weights={source.name: 1.0}, seq_len=1024, seed=0)
    loader = BatchLoader([source], mixture=mixture, seq_len=1024, accumulation=1, micro_batch=8)
    for _ in range(steps):
        next(loader)
    loader.close()
    return steps * 8 * 1024 * bytes_per_token


def tiktoken_encoding(tokenizer: ExtendedTokenizer) -> Any:
    """tiktoken with the same vocabulary and pattern; None if it is not installed."""
    try:
        import tiktoken
    except ImportError:
        return None
    layout = json.loads(tokenizer._tokenizer.to_str())
    pattern = layout["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    special = set(range(len(SPECIALS))) | set(tokenizer.suppressed_ids)
    # It wants ranks in order of merging: bytes come first, as its own vocabularies have them.
    order = [*range(tokenizer.byte_offset, tokenizer.byte_offset + BYTE_TOKENS), *range(tokenizer.byte_offset)]
    ids = [i for i in order if i not in special]
    ranks = {tokenizer.decode_bytes([i]): rank for rank, i in enumerate(ids)}
    encoding = tiktoken.Encoding("hymo", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return _Renumbered(encoding, ids)


class _Renumbered:
    """tiktoken's ranks as hymo's ids."""

    def __init__(self, encoding: Any, ids: Sequence[int]) -> None:
        self._encoding, self._ids = encoding, ids
        self._ranks = {i: rank for rank, i in enumerate(ids)}

    def encode_ordinary(self, text: str) -> list[int]:
        return [self._ids[rank] for rank in self._encoding.encode_ordinary(text)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._encoding.decode([self._ranks[i] for i in ids]))


def measure(found: dict[str, Callable[[], float]], *, rounds: int) -> dict[str, list[float]]:
    """MB per CPU-second of each job in each round; rounds are interleaved."""
    speeds: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(rounds):
        for name, job in found.items():
            begun = time.process_time()
            size = job()
            speeds[name].append(size / 1e6 / (time.process_time() - begun))
    return speeds


def table(speeds: dict[str, list[float]], texts: Sequence[str], *, name: str) -> str:
    """One line a job."""
    size = sum(len(text.encode()) for text in texts)
    lines = [
        f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, one core",
        f"source {name}: {len(texts):,} documents, {size:,} bytes",
        f"{'':22} {'MB/CPU-s':>10} {'least':>8} {'most':>8}",
    ]
    lines += [
        f"{job:22} {statistics.median(each):10.2f} {min(each):8.2f} {max(each):8.2f}" for job, each in speeds.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
