"""Turn text into a prepared folder: `prepare_data.py [CONFIG] [section.key=value ...] [--workers N]`.

    python recipes/prepare_data.py corpus.folder=prepared 'corpus.sources=[{name: own, files: [texts/*.txt]}]'
    python recipes/prepare_data.py recipes/configs/mixture.yaml corpus.folder=prepared

Copies are left out, exact and near, across all sources; documents are filtered, split by their hash, and encoded. What
was killed goes on where it was, what is finished is left alone. What is asked wrongly is a line a problem, exit code 2.
"""

import json
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from command_line import Parser, available_cores, execute, user_errors

from hymo.config_yaml import load_sections
from hymo.data import PreparedCorpus, prepare
from hymo.data.preparation import PrepareConfig

# What YAML reads as no text.
_WORDS = ("null", "true", "false", "yes", "no", "on", "off", "y", "n")


def main(argv: Sequence[str] | None = None) -> int:
    """Prepares, and returns the exit code."""
    return execute("prepare_data", lambda: run(list(sys.argv[1:] if argv is None else argv)))


@user_errors()
def run(arguments: Sequence[str]) -> None:
    """Reads the command line, prepares, and tells what came of it."""
    parser = Parser("Turn text into a prepared folder.")
    parser.add_argument("values", nargs="*", metavar="[CONFIG] section.key=value")
    parser.add_argument("--workers", type=int, default=available_cores(), help="processes that read (default: cores)")
    asked = parser.parse_intermixed_args(arguments)
    if asked.workers < 1:
        raise ValueError(f"--workers: expected at least 1, got {asked.workers}")
    is_named = bool(asked.values) and "=" not in asked.values[0]
    config = load_sections(PrepareConfig, asked.values[0] if is_named else None, asked.values[is_named:])
    begun = time.perf_counter()
    prepared = prepare(config, workers=asked.workers, tell=lambda line: print(line, flush=True))
    report(config, prepared, seconds=time.perf_counter() - begun)


def report(config: PrepareConfig, prepared: PreparedCorpus, *, seconds: float) -> None:
    """Prints what is there, and how to train on it."""
    print("finished before" if prepared.reused else f"finished in {seconds:.0f} s")
    totals = {}
    for source, splits in prepared.manifest.sources.items():
        for split, shards in splits.items():
            tokens, documents, size = (
                sum(getattr(each, key) for each in shards) for key in ("tokens", "documents", "bytes")
            )
            totals[source, split] = tokens
            print(f"{source:>20} {split:5} {documents:>12,} documents {tokens:>16,} tokens {size:>18,} bytes")
    print(f"\ntrain on it: python recipes/pretrain.py CONFIG {shlex.join(training_keys(config, prepared, totals))}")


def training_keys(config: PrepareConfig, prepared: PreparedCorpus, totals: Mapping[tuple[str, str], int]) -> list[str]:
    """The keys that make a training run read the folder; sources without a weight have that of their tokens."""
    tokens = {each.name: totals[each.name, "train"] for each in config.corpus.sources}
    given = {
        each.name: each.weight or max(round(tokens[each.name] / sum(tokens.values()), 4), 1e-4)
        for each in config.corpus.sources
    }
    # What rounding leaves goes to the largest.
    largest = max(given, key=lambda name: given[name])
    given[largest] += 1 - sum(given.values())
    sources = ", ".join(
        f"{{name: {_quoted(name)}, weight: {given[name]:.6g}, tokens: {tokens[name]}}}" for name in tokens
    )
    return [
        "data.corpus=null",
        f"data.folder={Path(prepared.directory).absolute()}",
        f"data.sources=[{sources}]",
        f"model.vocab_size={prepared.tokenizer.vocab_size}",
    ]


def _quoted(name: str) -> str:
    """As YAML has a text: in quotes if it would be something else without."""
    is_plain = re.fullmatch(r"[A-Za-z_][\w-]*", name) and name.lower() not in _WORDS
    return name if is_plain else json.dumps(name, ensure_ascii=False)


if __name__ == "__main__" and (code := main()):
    sys.exit(code)
