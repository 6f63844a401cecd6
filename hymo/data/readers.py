"""Documents of local files: .txt, .jsonl (.gz .xz .bz2 .zst) and .parquet, exactly as they are stored.

Bytes go in, strict UTF-8 comes out; records end at the byte \\n and nowhere else. What is no text is told by a reason,
never mended. Only the byte order mark that a file may begin with is left out, and told as such.
"""

import bz2
import gzip
import importlib
import io
import json
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, cast

from hymo.data.preparation import ConditionConfig, TextConfig

BYTE_ORDER_MARK = "byte_order_mark"
_MARK = b"\xef\xbb\xbf"
_CHUNK = 1 << 20
_FORMATS = (".txt", ".jsonl", ".parquet")


class Read(NamedTuple):
    """What stood at one place of a file: a document, or the reason why there is none; `place` is for people."""

    text: str | None
    reason: str
    place: str


class Refused(Exception):
    """Why a record holds no document, in one word."""


def read_file(path: Path, source: TextConfig, *, limit: int) -> Iterator[Read]:
    """What stands in a file, in its order.

    Args:
        limit: bytes as stored; what is longer is told as `too_long` and never held in memory.

    Raises:
        ValueError: if the format is unknown, a package to read it is missing, the file is damaged, or a column is
            missing in all of it.
    """
    form, compression = format_of(path)
    if form == ".parquet":
        yield from _read_parquet(path, source, limit)
        return
    # What decompressors raise for a file that was cut or changed.
    damage: tuple[type[Exception], ...] = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
    if compression == ".zst":
        damage += (_zstd().ZstdError,)
    separator = b"\n" if form == ".jsonl" else source.separator.encode() if source.separator else None
    try:
        with closing(_OPENERS[compression](path)) as stream:
            if stream.peek(3)[:3] == _MARK:
                stream.read(3)
                yield Read(None, BYTE_ORDER_MARK, f"{path}:1")
            for number, piece in enumerate(_pieces(stream, separator, limit), 1):
                place = f"{path}:{number}"
                if form == ".txt":
                    yield _read(piece, place)
                elif piece is None or piece.strip():
                    yield _read_json(piece, source, place)
    except damage as error:
        raise ValueError(f"{path}: it is damaged ({error}); get it again") from None
    except OSError as error:
        if error.errno is None:
            raise ValueError(f"{path}: it is damaged ({error}); get it again") from None
        raise


def format_of(path: Path) -> tuple[str, str]:
    """The format and the compression that a file's name says, such as .jsonl and .gz.

    Raises:
        ValueError: if the format is unknown, or a package to read it is missing.
    """
    stem, compression = (path.stem, path.suffix) if path.suffix in _OPENERS else (path.name, "")
    form = Path(stem).suffix
    if form not in _FORMATS or (form == ".parquet" and compression):
        raise ValueError(
            f"{path}: expected {', '.join(_FORMATS)}, the first two also .gz .xz .bz2 .zst, got {path.name}"
        )
    if form == ".parquet":
        package("pyarrow", "parquet")
    if compression == ".zst":
        _zstd()
    return form, compression


def document_of(record: Any, source: TextConfig, *, limit: int) -> str:
    """The document of a record; raises Refused with the reason if it is not to be had."""
    if not all(_fulfils(record, condition) for condition in source.where):
        raise Refused("not_wanted")
    value = _field(record, source.column)
    if isinstance(value, bytes):
        return _decoded(value, limit)
    if not isinstance(value, str):
        raise Refused("no_text")
    if len(value) > limit:
        raise Refused("too_long")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise Refused("lone_surrogate") from None
    if size > limit:
        raise Refused("too_long")
    return value


def read_record(record: Any, source: TextConfig, *, limit: int, place: str) -> Read:
    """`document_of` as a `Read`."""
    try:
        return Read(document_of(record, source, limit=limit), "", place)
    except Refused as reason:
        return Read(None, str(reason), place)


def _read(piece: bytes | None, place: str) -> Read:
    if piece is None:
        return Read(None, "too_long", place)
    try:
        return Read(piece.decode(), "", place)
    except UnicodeDecodeError:
        return Read(None, "invalid_utf8", place)


def _read_json(line: bytes | None, source: TextConfig, place: str) -> Read:
    read = _read(line, place)
    if read.text is None or line is None:
        return read
    try:
        record = json.loads(read.text)
    # A number of thousands of digits is a ValueError too.
    except (ValueError, RecursionError):
        return Read(None, "invalid_json", place)
    return read_record(record, source, limit=len(line), place=place)


def _read_parquet(path: Path, source: TextConfig, limit: int) -> Iterator[Read]:
    pyarrow = package("pyarrow", "parquet")
    parquet = importlib.import_module("pyarrow.parquet")
    columns = [source.column, *(each.field for each in source.where)]
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            missing = [name for name in columns if name.split(".")[0] not in names]
            if missing:
                raise ValueError(f"{path}: expected the column {missing[0]}, got {', '.join(names)}")
            number = 0
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for record in _records(batch, source.column, pyarrow):
                    number += 1
                    yield read_record(record, source, limit=limit, place=f"{path}:{number}")
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: it is damaged ({error}); get it again") from None


def _records(batch: Any, column: str, pyarrow: Any) -> Iterator[dict[str, Any]]:
    """The rows of a batch, a column of text as bytes: it may hold what is no UTF-8."""
    texts = batch.column(column) if column in batch.schema.names else None
    if texts is None or not (pyarrow.types.is_string(texts.type) or pyarrow.types.is_large_string(texts.type)):
        yield from batch.to_pylist()
        return
    others = batch.drop_columns([column]).to_pylist()
    for text, record in zip(texts.cast(pyarrow.large_binary()).to_pylist(), others, strict=True):
        yield {**record, column: text}


def _pieces(stream: io.BufferedReader, separator: bytes | None, limit: int) -> Iterator[bytes | None]:
    """What stands between separators, None in place of what is longer than `limit`; nothing after the last one."""
    if separator is None:
        whole = stream.read(limit + 1)
        yield whole if len(whole) <= limit else None
        return
    rest, is_long = b"", False
    while chunk := stream.read(_CHUNK):
        found = (rest + chunk).split(separator)
        rest = found.pop()
        for piece in found:
            yield None if is_long or len(piece) > limit else piece
            is_long = False
        if len(rest) > limit + len(separator):
            # A separator may have begun at its end.
            rest, is_long = rest[-len(separator) :], True
    if rest or is_long:
        yield None if is_long or len(rest) > limit else rest


def _decoded(data: bytes, limit: int) -> str:
    if len(data) > limit:
        raise Refused("too_long")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise Refused("invalid_utf8") from None


def _fulfils(record: Any, condition: ConditionConfig) -> bool:
    value = _field(record, condition.field)
    if condition.at_least is not None:
        return isinstance(value, int | float) and value >= condition.at_least
    if condition.equals is not None:
        return bool(value == condition.equals)
    return value is not None and bool(value != condition.differs)


def _field(record: Any, name: str) -> Any:
    """The value of a field, by its name or by the steps of a dotted one; None if there is none."""
    if isinstance(record, Mapping) and name in record:
        return record[name]
    for step in name.split("."):
        record = record.get(step) if isinstance(record, Mapping) else None
    return record


def _zstd() -> Any:
    """The standard library's from Python 3.14 on."""
    return (
        importlib.import_module("compression.zstd")
        if sys.version_info >= (3, 14)
        else package("backports.zstd", "zstd")
    )


def package(name: str, extra: str) -> Any:
    """A package that is not always there."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(f'{name} is not installed; `pip install "hymo[{extra}]"` would work') from None


_OPENERS: dict[str, Callable[[Path], io.BufferedReader]] = {
    "": lambda path: path.open("rb"),
    ".gz": lambda path: io.BufferedReader(cast(Any, gzip.GzipFile(path))),
    ".xz": lambda path: io.BufferedReader(cast(Any, lzma.LZMAFile(path))),  # noqa: SIM115
    ".bz2": lambda path: io.BufferedReader(cast(Any, bz2.BZ2File(path))),
    ".zst": lambda path: io.BufferedReader(_zstd().ZstdFile(path)),
}
