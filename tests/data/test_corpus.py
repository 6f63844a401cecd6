import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from hymo.data import (
    ExtendedTokenizer,
    PreparedCorpus,
    embedded_documents,
    open_source,
    order0_entropy,
    prepare_corpus,
    read_floors,
    verify_shards,
    xz_bits_per_byte,
)
from hymo.data.corpus import drop_copies, split_documents, split_number


@pytest.fixture(scope="module")
def embedded() -> dict[str, list[str]]:
    return embedded_documents()


def texts_of(prepared: PreparedCorpus, name: str, split: str) -> list[str]:
    with open_source(prepared.directory, source=name, split=split, tokenizer=prepared.tokenizer.fingerprint) as source:
        text = prepared.tokenizer.decode(source.read(0, source.num_tokens).tolist())
    return text.split("<|endoftext|>")[1:-1]


def test_order_0_entropy_of_known_bytes() -> None:
    assert order0_entropy(b"") == 0
    assert order0_entropy(b"aaaa") == 0
    assert order0_entropy(b"abab") == 1
    assert order0_entropy(bytes(range(256))) == 8
    assert order0_entropy(b"aaab") == pytest.approx(2 - 0.75 * math.log2(3))


def test_xz_finds_what_repeats() -> None:
    assert xz_bits_per_byte(b"the gate decays " * 1000) < 0.1
    assert xz_bits_per_byte(bytes(i * i * 7919 % 251 for i in range(200))) > 4
    with pytest.raises(ValueError, match="no bytes"):
        xz_bits_per_byte(b"")


def test_the_split_follows_the_hash_of_the_text(sources: dict[str, list[str]]) -> None:
    documents = sources["tales"]
    train, val = split_documents(documents, val_bytes=800, name="s")
    assert sorted(train + val) == sorted(documents)
    assert max(map(split_number, val)) < min(map(split_number, train))
    assert sum(len(text.encode()) for text in val) >= 800
    assert sum(len(text.encode()) for text in val[:-1]) < 800
    assert split_documents(documents[::-1], val_bytes=800, name="s") == (train, val)
    # sha256("") begins e3b0c442; the number is that of the whole hash.
    assert split_number("") == int("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", 16) % 10**6


def test_a_source_too_small_to_split_is_named() -> None:
    with pytest.raises(ValueError, match="notes has 2 documents of 6 bytes, too few for 5 bytes of validation"):
        split_documents(["one", "two"], val_bytes=5, name="notes")


def test_copies_and_excerpts_are_dropped_across_sources() -> None:
    lines = [f"line {i} has some words that nothing else has" for i in range(20)]
    whole = "\n".join(lines)
    kept = drop_copies(
        {
            "a": [whole, whole, "short", ""],
            "b": ["\n".join(lines[:8]), "\n".join([*lines[:2], "something new that is long enough " * 5]), "short"],
        }
    )
    assert sorted(kept["a"] + kept["b"]) == sorted(
        [whole, "short", "\n".join([*lines[:2], "something new that is long enough " * 5])]
    )


def test_a_prepared_folder_holds_every_document_on_one_side(
    prepared: PreparedCorpus, sources: dict[str, list[str]]
) -> None:
    for name, documents in sources.items():
        train, val = texts_of(prepared, name, "train"), texts_of(prepared, name, "val")
        assert not set(train) & set(val)
        assert sorted(train + val) == sorted(documents)
        assert prepared.validation[name].bytes == len("".join(val).encode())
        assert prepared.validation[name].order0_bits_per_byte == pytest.approx(order0_entropy("".join(val).encode()))
    assert not prepared.reused
    verify_shards(prepared.directory)


@pytest.mark.parametrize("wrong", [None, [], "abc", True, 10**400])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_floors_that_are_no_numbers_are_refused_in_one_line(
    prepared: PreparedCorpus, wrong: Any, depth: int, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    shutil.copytree(prepared.directory, folder)
    assert read_floors(folder) == prepared.validation
    manifest = json.loads((folder / "manifest.json").read_text())
    section = manifest["notes"]
    *above, last = ("validation", "all", "order0_bits_per_byte")[:depth]
    for step in above:
        section = section[step]
    section[last] = wrong
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        ValueError, match=r"manifest.json: notes.validation.*: expected a (mapping|float), got"
    ) as error:
        read_floors(folder)
    assert "\n" not in str(error.value)
    manifest["notes"] = {}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert read_floors(folder) == {}


def test_a_finished_folder_is_reused_and_another_is_refused(
    prepared: PreparedCorpus, sources: dict[str, list[str]], tmp_path: Path
) -> None:
    before = {path: path.stat().st_mtime_ns for path in prepared.directory.iterdir()}
    again = prepare_corpus(prepared.directory, sources, vocab_size=120, val_bytes=600)
    assert again.reused
    assert again.manifest == prepared.manifest
    with pytest.raises(ValueError, match="prepared from other texts or settings"):
        prepare_corpus(prepared.directory, sources, vocab_size=121, val_bytes=600)
    assert before == {path: path.stat().st_mtime_ns for path in prepared.directory.iterdir()}
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(ValueError, match="holds no prepared data"):
        prepare_corpus(tmp_path, sources, vocab_size=120, val_bytes=600)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_preparing_twice_gives_the_same_files(
    prepared: PreparedCorpus, sources: dict[str, list[str]], tmp_path: Path
) -> None:
    shuffled = {name: documents[::-1] for name, documents in sources.items()}
    again = prepare_corpus(tmp_path / "again", shuffled, vocab_size=120, val_bytes=600)
    assert again.manifest.identity == prepared.manifest.identity
    for path in prepared.directory.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_a_failure_leaves_nothing_behind(sources: dict[str, list[str]], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too few for"):
        prepare_corpus(tmp_path / "data", sources, vocab_size=120, val_bytes=10**6)
    with pytest.raises(ValueError, match="cannot hold"):
        prepare_corpus(tmp_path / "data", sources, vocab_size=3, val_bytes=600)
    assert not list(tmp_path.iterdir())


def test_a_cap_keeps_whole_documents_of_the_lowest_numbers(sources: dict[str, list[str]], tmp_path: Path) -> None:
    capped = prepare_corpus(tmp_path / "data", sources, vocab_size=120, val_bytes=300, max_bytes={"tales": 3_000})
    kept = texts_of(capped, "tales", "val") + texts_of(capped, "tales", "train")
    assert kept == sorted(sources["tales"], key=split_number)[: len(kept)]
    assert 2_500 < sum(len(text.encode()) for text in kept) <= 3_000


def test_the_embedded_corpus_is_prose_and_code_without_tests(embedded: dict[str, list[str]]) -> None:
    assert list(embedded) == ["prose", "code"]
    prose, code = (sum(len(text.encode()) for text in embedded[name]) for name in ("prose", "code"))
    assert prose > 300_000
    assert code > 5_000_000
    # The language reference also lies in the library as a file: there it would show validation text in training.
    assert not any('The "assert" statement' in text for text in embedded["code"])


def test_no_long_part_of_embedded_validation_stands_in_training(embedded: dict[str, list[str]]) -> None:
    for name, documents in drop_copies(embedded).items():
        train, val = split_documents(documents, val_bytes=50_000, name=name)
        seen = {line.strip() for text in train for line in text.splitlines()}
        for text in val:
            lines = [line.strip() for line in text.splitlines() if len(line.strip()) >= 30]
            assert sum(line in seen for line in lines) <= max(1, 0.5 * len(lines))


def test_a_python_without_topics_is_told_what_would_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ValueError, match=r"no pydoc_data.topics .*; .* name your own shards"):
        embedded_documents()


def test_a_python_without_library_sources_is_told_what_would_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match="no source files of the standard library"):
        embedded_documents()


def test_a_folder_whose_tokenizer_was_exchanged_is_refused(
    sources: dict[str, list[str]], tokenizer: ExtendedTokenizer, tmp_path: Path
) -> None:
    prepare_corpus(tmp_path / "data", sources, vocab_size=120, val_bytes=600)
    tokenizer.save(tmp_path / "data" / "tokenizer.json")
    with pytest.raises(ValueError, match=f"fingerprint {tokenizer.fingerprint}, its shards were made with"):
        prepare_corpus(tmp_path / "data", sources, vocab_size=120, val_bytes=600)
