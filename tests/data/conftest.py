"""A tiny fixed corpus, its tokenizer and its prepared folder."""

import random
from pathlib import Path

import pytest

from hymo.data import ExtendedTokenizer, PreparedCorpus, prepare_corpus, train_bpe_tokenizer

_SENTENCE = "the gate of each memory decays and writes a key with its value at step 10 20 30 naïve 東京 x+=1;\n"
_WORDS = _SENTENCE.split(" ")


def make_documents(count: int, *, seed: int, words: int = 60) -> list[str]:
    """Documents that share words but no lines."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(_WORDS, k=draw.randint(8, words))) + f" end {seed}.{i}" for i in range(count)]


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return make_documents(200, seed=1)


@pytest.fixture(scope="session")
def tokenizer(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> ExtendedTokenizer:
    return train_bpe_tokenizer(
        texts, vocab_size=120, output_path=tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    )


@pytest.fixture(scope="session")
def sources() -> dict[str, list[str]]:
    return {"tales": make_documents(60, seed=2), "notes": make_documents(25, seed=3, words=30)}


@pytest.fixture(scope="session")
def prepared(sources: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> PreparedCorpus:
    folder: Path = tmp_path_factory.mktemp("prepared") / "data"
    return prepare_corpus(folder, sources, vocab_size=120, val_bytes=600)
