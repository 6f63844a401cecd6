"""Documents come out as they are stored, or are told by a reason."""

import bz2
import gzip
import importlib
import json
import lzma
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hymo.data.preparation import ConditionConfig, TextConfig
from hymo.data.readers import read_file

SOURCE = TextConfig("own", files=("*",))
HOSTILE = {
    "empty": "",
    "a million letters in one line": "abcdefghij" * 100_000,
    "NUL": "a\0b",
    "CRLF": "one\r\ntwo\rthree\n",
    "line separators": "one\u2028two\u2029three\x85four\x0b\x0c\x1c",
    "special tokens": "<|endoftext|> <|pad|></s><0x41>",
    "a million spaces": " " * 1_000_000,
    "byte order mark inside": "a\ufeffb",
    "noncharacters": "\ufffe\uffff\U0010ffff",
    "not normalised": "e\u0301 \u00e9",
}


def texts(path: Path, source: TextConfig = SOURCE, limit: int = 10**7) -> list[str | None]:
    return [read.text for read in read_file(path, source, limit=limit)]


def reasons(path: Path, source: TextConfig = SOURCE, limit: int = 10**7) -> list[str]:
    return [read.reason for read in read_file(path, source, limit=limit)]


def lines(*records: Any) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_kept_to_the_byte(name: str, tmp_path: Path) -> None:
    text = HOSTILE[name]
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "a.jsonl").write_bytes(lines({"text": text}, {"text": "last"}))
    raw = json.dumps({"text": text}, ensure_ascii=False).encode()
    (tmp_path / "b.jsonl").write_bytes(raw + b"\r\n" + raw)
    assert texts(tmp_path / "a.txt") == [text]
    assert texts(tmp_path / "a.jsonl") == [text, "last"]
    assert texts(tmp_path / "b.jsonl") == [text, text]


@pytest.mark.parametrize(
    ("suffix", "compress"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)]
)
def test_compressed_files_are_read_like_plain_ones(
    suffix: str, compress: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    data = lines({"text": "one"}, {"text": "two\r\n"})
    (tmp_path / f"a.jsonl{suffix}").write_bytes(compress(data))
    (tmp_path / f"a.txt{suffix}").write_bytes(compress(b"\xef\xbb\xbfone\r\n"))
    assert texts(tmp_path / f"a.jsonl{suffix}") == ["one", "two\r\n"]
    assert texts(tmp_path / f"a.txt{suffix}") == [None, "one\r\n"]
    if suffix:
        whole = (tmp_path / f"a.jsonl{suffix}").read_bytes()
        for damaged in (whole[:-6], whole[:4] + bytes([whole[4] ^ 255]) + whole[5:-9] + bytes(9)):
            (tmp_path / f"b.jsonl{suffix}").write_bytes(damaged)
            with pytest.raises(ValueError, match=rf"b.jsonl{suffix}: it is damaged .*; get it again"):
                texts(tmp_path / f"b.jsonl{suffix}")


def test_zstandard_is_read_or_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(b"")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "backports.zstd", None)
        without.setitem(sys.modules, "compression.zstd", None)
        if sys.version_info < (3, 14):
            with pytest.raises(ValueError, match=r'backports.zstd is not installed; `pip install "hymo\[zstd\]"`'):
                texts(path)
    zstd: Any = pytest.importorskip("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    whole = zstd.compress(lines({"text": "one"}, {"text": "two"}))
    path.write_bytes(whole)
    assert texts(path) == ["one", "two"]
    path.write_bytes(whole[:-3])
    with pytest.raises(ValueError, match="it is damaged"):
        texts(path)
    path.write_bytes(b"x" * 50)
    with pytest.raises(ValueError, match="it is damaged"):
        texts(path)


def test_what_is_no_document_has_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf"
        + lines({"text": "fine"}, {"text": 3}, {"body": "x"}, {"text": None}, ["text"])
        + b'{"text": "\\ud83d"}\n\n  \n{"text": "a\xff"}\n{"text": \n'
        + b'{"text": "x", "n": '
        + b"9" * 5000
        + b"}\n"
        + b"[" * 100_000
        + b"\n"
        + lines({"text": "fine too"})
    )
    assert reasons(path) == [
        "byte_order_mark",
        "",
        *["no_text"] * 4,
        "lone_surrogate",
        "invalid_utf8",
        *["invalid_json"] * 3,
        "",
    ]
    places = [read.place for read in read_file(path, SOURCE, limit=10**6)]
    assert places[6] == f"{path}:6"
    assert places[7] == f"{path}:9"
    (tmp_path / "b.txt").write_bytes(b"a\xff")
    assert reasons(tmp_path / "b.txt") == ["invalid_utf8"]


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_what_is_too_long_is_passed_over_without_being_held(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{suffix}"
    source = TextConfig("own", files=("*",), separator="\n")
    short, long = (
        (b"short", b"x" * 3_000_000) if suffix == "txt" else (b'{"text": "short"}', b'{"text": "' + b"x" * 3_000_000)
    )
    path.write_bytes(b"\n".join([short, long, short, long]))
    found = list(read_file(path, source, limit=100))
    assert [read.text for read in found] == ["short", None, "short", None]
    assert [read.reason for read in found] == ["", "too_long", "", "too_long"]
    (tmp_path / "b.txt").write_bytes(b"x" * 101)
    assert reasons(tmp_path / "b.txt", limit=100) == ["too_long"]
    assert reasons(tmp_path / "b.txt", limit=101) == [""]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**16), separator=st.sampled_from(["\n", "--", "<|endoftext|>\n"]), chunk=st.integers(1, 7))
def test_a_text_file_is_cut_at_its_separator(
    seed: int, separator: str, chunk: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    draw = random.Random(seed)
    # Pieces that end with the first half of a separator.
    pieces = [draw.choice("ab-<\n|") * draw.randint(0, 9) + separator[: len(separator) // 2] for _ in range(6)]
    whole = separator.join(pieces)
    path = tmp_path_factory.mktemp("cut") / "a.txt"
    path.write_bytes(whole.encode())
    source = TextConfig("own", files=("*",), separator=separator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hymo.data.readers._CHUNK", chunk)
        found = texts(path, source)
    expected = whole.split(separator)
    assert found == (expected if expected[-1] else expected[:-1])


def test_conditions_choose_records(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        lines(
            {"content": "a", "score": 3, "meta": {"set": "Web"}},
            {"content": "b", "score": 2.9, "meta": {"set": "Web"}},
            {"content": "c", "score": 4, "meta": {"set": "Books"}},
            {"content": "d", "score": 4},
            {"content": "e", "score": "4", "meta": {"set": "Web"}},
        )
    )
    where = (ConditionConfig("score", at_least=3.0), ConditionConfig("meta.set", differs="Books"))
    source = TextConfig("own", files=("*",), column="content", where=where)
    assert texts(path, source) == ["a", None, None, None, None]
    assert set(reasons(path, source)) == {"", "not_wanted"}
    equals = TextConfig("own", files=("*",), column="content", where=(ConditionConfig("meta.set", equals="Books"),))
    assert texts(path, equals) == [None, None, "c", None, None]


def test_other_files_are_refused(tmp_path: Path) -> None:
    for name in ("a.pdf", "a.gz", "a.parquet.gz", "jsonl"):
        with pytest.raises(ValueError, match=r"expected .txt, .jsonl, .parquet, the first two also .gz .xz .bz2 .zst"):
            list(read_file(tmp_path / name, SOURCE, limit=9))


def test_parquet_is_read_by_groups_of_rows(tmp_path: Path) -> None:
    pa: Any = pytest.importorskip("pyarrow")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    text = ["one", "", None, "two\r\n\0\u2028", "bad"]
    scores = [5, 5, 5, 1, 5]
    raw = pa.array([None if each is None else each.encode() for each in text[:-1]] + [b"a\xff"], pa.binary())
    table = pa.table({"text": raw.view(pa.string()), "meta": [{"score": score} for score in scores]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    assert texts(tmp_path / "a.parquet") == ["one", "", None, "two\r\n\0\u2028", None]
    assert reasons(tmp_path / "a.parquet")[-1] == "invalid_utf8"
    source = TextConfig("own", files=("*",), where=(ConditionConfig("meta.score", at_least=2.0),))
    assert texts(tmp_path / "a.parquet", source)[3] is None
    with pytest.raises(ValueError, match=r"a.parquet: expected the column body, got text, meta"):
        texts(tmp_path / "a.parquet", TextConfig("own", files=("*",), column="body"))
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"b.parquet: it is damaged"):
        texts(tmp_path / "b.parquet")


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r'pyarrow is not installed; `pip install "hymo\[parquet\]"` would work'):
        texts(tmp_path / "a.parquet")
