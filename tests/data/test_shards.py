import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hymo.data import (
    Document,
    ExtendedTokenizer,
    Manifest,
    PreparedCorpus,
    TokenSource,
    open_shards,
    open_source,
    read_manifest,
    verify_shards,
    write_manifest,
    write_shards,
)

CASES = settings(max_examples=25, deadline=None, derandomize=True)
FINGERPRINT = "ab" * 32


def documents(count: int, *, vocab_size: int = 300, seed: int = 0) -> list[Document]:
    draw = random.Random(seed)
    return [
        Document([draw.randrange(1, vocab_size) for _ in range(draw.randint(1, 12))], draw.randint(1, 40))
        for _ in range(count)
    ]


def stream_of(docs: list[Document]) -> list[int]:
    return [token for doc in docs for token in (0, *doc.tokens)] + [0]


def written(folder: Path, docs: list[Document], *, vocab_size: int = 300, shard_tokens: int = 20) -> TokenSource:
    shards = write_shards(
        folder, docs, name="s", vocab_size=vocab_size, tokenizer=FINGERPRINT, shard_tokens=shard_tokens
    )
    write_manifest(folder, Manifest(FINGERPRINT, vocab_size, {"s": {"train": shards}}, {}))
    return open_source(folder, source="s", split="train", tokenizer=FINGERPRINT)


@CASES
@given(
    count=st.integers(1, 12),
    shard_tokens=st.sampled_from([1, 7, 1000]),
    vocab_size=st.sampled_from([300, 65_536, 70_000]),
    seed=st.integers(0, 2**31),
)
def test_any_window_of_the_stream_comes_back(
    count: int, shard_tokens: int, vocab_size: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    docs = documents(count, vocab_size=vocab_size, seed=seed)
    expected = stream_of(docs)
    with written(tmp_path_factory.mktemp("s"), docs, vocab_size=vocab_size, shard_tokens=shard_tokens) as source:
        assert source.num_tokens == len(expected)
        assert source.read(0, len(expected)).tolist() == expected
        draw = random.Random(seed)
        for _ in range(10):
            start = draw.randint(0, len(expected))
            length = draw.randint(0, len(expected) - start)
            assert source.read(start, length).tolist() == expected[start : start + length]


def test_each_shard_begins_with_a_delimiter_and_no_document_is_split(tmp_path: Path) -> None:
    docs = documents(30)
    written(tmp_path, docs).close()
    shards = read_manifest(tmp_path).sources["s"]["train"]
    assert len(shards) > 3
    remaining = list(docs)
    for number, shard in enumerate(shards):
        data = (tmp_path / shard.file).read_bytes()
        tokens = list(struct.unpack(f"<{shard.tokens}H", data[1024:]))
        ends = struct.unpack(f"<{shard.documents}Q", (tmp_path / shard.file).with_suffix(".idx").read_bytes())
        here, remaining = remaining[: shard.documents], remaining[shard.documents :]
        closing = [0] if number == len(shards) - 1 else []
        assert tokens == stream_of(here)[:-1] + closing
        assert [tokens[start:end] for start, end in zip((0, *ends), ends, strict=False)] == [
            [0, *doc.tokens] for doc in here
        ]
        assert shard.bytes == sum(doc.text_bytes for doc in here)
    assert not remaining


def test_no_document_is_preceded_by_two_delimiters_and_the_stream_ends_with_one(prepared: PreparedCorpus) -> None:
    for name in prepared.manifest.sources:
        with open_source(
            prepared.directory, source=name, split="train", tokenizer=prepared.tokenizer.fingerprint
        ) as source:
            tokens = source.read(0, source.num_tokens)
        assert int(tokens[0]) == int(tokens[-1]) == 0
        assert not ((tokens[1:] == 0) & (tokens[:-1] == 0)).any()


def test_a_reader_of_llm_c_files_reads_them(tmp_path: Path) -> None:
    docs = documents(5)
    written(tmp_path, docs, shard_tokens=1000).close()
    path = str(tmp_path / "s_00000.bin")
    header = torch.from_file(path, shared=False, size=256, dtype=torch.int32)
    assert header[:2].tolist() == [20240520, 1]
    tokens = torch.from_file(path, shared=False, size=512 + int(header[2]), dtype=torch.uint16)[512:]
    assert tokens.tolist() == stream_of(docs)
    assert header[3:7].tolist() == [300, 0, 5, 2]


@pytest.mark.parametrize("bad", [-1, 0, 300, 70_000])
def test_an_id_out_of_range_is_named_and_nothing_is_left(bad: int, tmp_path: Path) -> None:
    docs = [*documents(9), Document([5, 6, bad], 3)]
    with pytest.raises(ValueError, match=rf"document 9 of s has token id {bad} at position 2; .* 1 to 299"):
        write_shards(tmp_path, docs, name="s", vocab_size=300, tokenizer=FINGERPRINT, shard_tokens=10)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("docs", "reason"), [([], "no documents"), ([Document([], 0)], "document 0 of s is empty")])
def test_nothing_to_write_is_refused(docs: list[Document], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        write_shards(tmp_path, docs, name="s", vocab_size=300, tokenizer=FINGERPRINT)
    assert not list(tmp_path.iterdir())


def test_a_failing_reader_of_documents_leaves_no_file(tmp_path: Path) -> None:
    def failing():
        yield from documents(10)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        write_shards(tmp_path, failing(), name="s", vocab_size=300, tokenizer=FINGERPRINT, shard_tokens=10)
    assert not list(tmp_path.iterdir())


def test_another_tokenizer_is_refused_naming_both(tmp_path: Path) -> None:
    written(tmp_path, documents(3)).close()
    other = "cd" * 32
    with pytest.raises(ValueError, match=rf"{FINGERPRINT}.*{other}"):
        open_source(tmp_path, source="s", split="train", tokenizer=other)
    with pytest.raises(ValueError, match=rf"tokenizer {FINGERPRINT}, expected {other}"):
        open_shards(tmp_path, name="s", tokenizer=other)


def test_a_shard_of_another_tokenizer_among_them_is_refused(tmp_path: Path) -> None:
    written(tmp_path, documents(30)).close()
    other = "cd" * 32
    write_shards(tmp_path / "o", documents(30), name="s", vocab_size=300, tokenizer=other, shard_tokens=20)
    (tmp_path / "o" / "s_00001.bin").replace(tmp_path / "s_00001.bin")
    with pytest.raises(ValueError, match=rf"s_00001.bin: made with tokenizer {other}, expected {FINGERPRINT}"):
        open_source(tmp_path, source="s", split="train", tokenizer=FINGERPRINT)


def _cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda folder: _cut(folder / "s_00001.bin", 2), "s_00001.bin: .* bytes, .* expected; it was cut short"),
        (lambda folder: _cut(folder / "s_00001.idx", 8), "s_00001.idx: .* bytes, .* expected; it was cut short"),
        (lambda folder: (folder / "s_00001.bin").write_bytes(b"hello"), "s_00001.bin: no token shard"),
        (lambda folder: (folder / "s_00001.bin").unlink(), "s_00001.bin is missing"),
        (lambda folder: (folder / "s_00001.idx").unlink(), "s_00001.idx is missing"),
        (lambda folder: (folder / "s_00002.bin").replace(folder / "s_00001.bin"), "s_00001"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json: no such file"),
        (lambda folder: (folder / "manifest.json").write_text('{"format": 9}'), "format 9, this version reads 1"),
        (lambda folder: (folder / "manifest.json").write_text("{}"), "format is missing"),
        (lambda folder: (folder / "manifest.json").write_text("[" * 100_000), "nested too deeply"),
        (lambda folder: (folder / "manifest.json").write_bytes(b"\xff"), "no JSON"),
    ],
)
def test_a_damaged_folder_is_refused(spoil, reason: str, tmp_path: Path) -> None:
    written(tmp_path, documents(30)).close()
    spoil(tmp_path)
    with pytest.raises(ValueError, match=reason) as refused:
        open_source(tmp_path, source="s", split="train", tokenizer=FINGERPRINT)
    assert str(refused.value).count(str(tmp_path)) == 1
    assert "\n" not in str(refused.value)


def places(tree: Any) -> list[tuple[Any, ...]]:
    """The paths to everything in a JSON value but its root."""
    steps = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path for step, below in steps for path in ((step,), *((step, *rest) for rest in places(below)))]


@pytest.mark.parametrize("wrong", [None, True, [7], {"x": 7}, "1280", 1.5])
def test_a_manifest_with_a_value_of_another_type_is_refused_in_one_line(wrong: Any, tmp_path: Path) -> None:
    written(tmp_path, documents(3)).close()
    path = tmp_path / "manifest.json"
    content = path.read_text()
    for *above, last in places(json.loads(content)):
        manifest = json.loads(content)
        section = manifest
        for step in above:
            section = section[step]
        if type(section[last]) is type(wrong):
            continue
        section[last] = wrong
        path.write_text(json.dumps(manifest))
        with pytest.raises(
            ValueError, match=r"^data .*manifest.json: not a manifest of token shards \(.*expected"
        ) as error:
            read_manifest(tmp_path)
        assert "\n" not in str(error.value)
        assert "Error" not in str(error.value)


def test_verify_finds_a_changed_token(tmp_path: Path) -> None:
    written(tmp_path, documents(30)).close()
    verify_shards(tmp_path)
    data = bytearray((tmp_path / "s_00001.bin").read_bytes())
    data[1024 + 4] ^= 1
    (tmp_path / "s_00001.bin").write_bytes(data)
    damaged = r"s_00001.bin: its tokens have sha256 [0-9a-f]{12}, [0-9a-f]{12} expected"
    with pytest.raises(ValueError, match=damaged):
        verify_shards(tmp_path)
    with open_shards(tmp_path, name="s", tokenizer=FINGERPRINT) as source, pytest.raises(ValueError, match=damaged):
        source.verify()


def test_a_stored_id_outside_the_vocabulary_is_named_when_read(tmp_path: Path) -> None:
    written(tmp_path, documents(3), shard_tokens=1000).close()
    data = bytearray((tmp_path / "s_00000.bin").read_bytes())
    data[1024 + 4 : 1024 + 6] = struct.pack("<H", 60_000)
    (tmp_path / "s_00000.bin").write_bytes(data)
    with open_shards(tmp_path, name="s", tokenizer=FINGERPRINT) as source:
        assert source.read(0, 2).shape == (2,)
        with pytest.raises(ValueError, match="token id 60000 at position 2 is not in 0 to 299"):
            source.read(1, 3)


@pytest.mark.parametrize(("source", "split", "reason"), [("x", "train", "no source 'x'"), ("s", "y", "no split 'y'")])
def test_an_unknown_source_or_split_names_those_there_are(source: str, split: str, reason: str, tmp_path: Path) -> None:
    written(tmp_path, documents(3)).close()
    with pytest.raises(ValueError, match=reason + "; it has '(s|train)'"):
        open_source(tmp_path, source=source, split=split, tokenizer=FINGERPRINT)


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (0, 10_000), (10_000, 1)])
def test_reading_outside_the_stream_is_refused(start: int, count: int, tmp_path: Path) -> None:
    with written(tmp_path, documents(3)) as source, pytest.raises(ValueError, match="asked, it has 0 to"):
        source.read(start, count)


def test_shards_without_a_manifest_open_by_folder_and_by_glob(tmp_path: Path) -> None:
    docs = documents(30)
    written(tmp_path, docs).close()
    for location in (tmp_path, tmp_path / "s_*.bin"):
        with open_shards(location, name="s", tokenizer=FINGERPRINT) as source:
            assert source.read(0, source.num_tokens).tolist() == stream_of(docs)
    with pytest.raises(ValueError, match="no token shards at"):
        open_shards(tmp_path / "nowhere", name="s", tokenizer=FINGERPRINT)


def test_the_identity_of_a_folder_is_its_content(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        written(tmp_path / name, documents(9, seed=seed)).close()
    a, b, c = (read_manifest(tmp_path / name).identity for name in "abc")
    assert a == b != c


def test_tokens_in_shards_are_the_documents_in_order(prepared: PreparedCorpus, tokenizer: ExtendedTokenizer) -> None:
    name = "tales"
    with open_source(prepared.directory, source=name, split="val", tokenizer=prepared.tokenizer.fingerprint) as source:
        text = prepared.tokenizer.decode(source.read(0, source.num_tokens).tolist(), skip_special=True)
    assert len(text.encode()) == sum(shard.bytes for shard in prepared.manifest.sources[name]["val"])
