"""Token shards on disk: written once as a stream, then read a window at a time.

A split of a source is one stream of tokens, cut into shards at document boundaries:

    0 document 0 document | 0 document 0 document 0

The delimiter (id 0) opens each document and, as the next token, ends the one before; each shard begins with one and
the stream ends with one.

    NAME_00000.bin   256 little-endian int32, then the tokens (uint16; int32 above 65,536 ids)
    NAME_00000.idx   uint64 end of each document (exclusive, its opening delimiter counted)
    manifest.json    what belongs together; written last, so a folder with a manifest is whole

The header begins as llm.c's (magic, version 1, number of tokens), so its readers take the files as they are.
Source: github.com/karpathy/llm.c, dev/data/data_common.py.
"""

import hashlib
import json
import os
import struct
import sys
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from glob import glob
from itertools import accumulate, pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from hymo.config import DELIMITER
from hymo.data.record import expect, expect_format, expect_keys, read_json

MANIFEST = "manifest.json"
_MAGIC = 20240520
_HEADER_BYTES = 1024
_MANIFEST_FORMAT = 1
_VERIFIED_TOGETHER = 1_000_000


class Document(NamedTuple):
    """The tokens of one document without a delimiter, and the bytes of text that they stand for."""

    tokens: Sequence[int]
    text_bytes: int


class Shard(NamedTuple):
    """One finished shard: tokens count the delimiters, bytes are of text, sha256 is of the token bytes."""

    file: str
    tokens: int
    documents: int
    bytes: int
    sha256: str


class Manifest(NamedTuple):
    """What a folder of shards holds.

    Attributes:
        tokenizer: fingerprint of the tokenizer that made every shard.
        vocab_size: every id is below it.
        sources: source -> split ("train", "val") -> shards in order.
        notes: whatever the maker of the folder wants to find again; plain JSON.
    """

    tokenizer: str
    vocab_size: int
    sources: Mapping[str, Mapping[str, tuple[Shard, ...]]]
    notes: Mapping[str, Any]

    @property
    def identity(self) -> str:
        """sha256 of the data that the folder holds: equal exactly when every token of every split is equal."""
        content = {
            "tokenizer": self.tokenizer,
            "sources": {
                source: {split: [shard.sha256 for shard in shards] for split, shards in splits.items()}
                for source, splits in self.sources.items()
            },
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_shards(
    directory: Path,
    documents: Iterable[Document],
    *,
    name: str,
    vocab_size: int,
    tokenizer: str,
    shard_tokens: int = 100_000_000,
) -> tuple[Shard, ...]:
    """Write `documents` as the stream `name`, one in memory at a time; a failure leaves no file behind.

    Args:
        vocab_size: ids of a document are 1 to vocab_size - 1.
        tokenizer: fingerprint of the tokenizer that made the ids, 64 hex digits.
        shard_tokens: a shard that has reached this size is closed at the next document.

    Raises:
        ValueError: if there is no document, a document is empty, or an id is out of range (named, with its position).
    """
    directory.mkdir(parents=True, exist_ok=True)
    finished: list[Shard] = []
    writing: _OpenShard | None = None
    try:
        for number, document in enumerate(documents):
            _check_ids(document.tokens, name=name, number=number, vocab_size=vocab_size)
            if writing is not None and writing.num_tokens >= shard_tokens:
                finished.append(writing.finish())
                writing = None
            if writing is None:
                path = directory / f"{name}_{len(finished):05d}.bin"
                writing = _OpenShard(path, vocab_size=vocab_size, tokenizer=tokenizer, first_document=number)
            writing.append(document)
        if writing is None:
            raise ValueError(f"write_shards: {name} has no documents; at least one is needed")
        writing.extend((DELIMITER,))
        finished.append(writing.finish())
        return tuple(finished)
    except BaseException:
        if writing is not None:
            writing.discard()
        for shard in finished:
            (directory / shard.file).unlink(missing_ok=True)
            (directory / shard.file).with_suffix(".idx").unlink(missing_ok=True)
        raise


def write_shard(
    path: Path,
    documents: Iterable[Document],
    *,
    vocab_size: int,
    tokenizer: str,
    first_document: int = 0,
    ends_stream: bool = True,
) -> Shard:
    """Write one shard of a stream whose others are written apart; a failure leaves no file behind.

    Args:
        first_document: its number in the stream.
        ends_stream: whether it is the last, which has the delimiter that ends the stream.

    Raises:
        ValueError: like `write_shards`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    writing = _OpenShard(path, vocab_size=vocab_size, tokenizer=tokenizer, first_document=first_document)
    try:
        for number, document in enumerate(documents, first_document):
            _check_ids(document.tokens, name=path.stem, number=number, vocab_size=vocab_size)
            writing.append(document)
        if not writing.num_tokens:
            raise ValueError(f"write_shard: {path.name} has no documents; at least one is needed")
        if ends_stream:
            writing.extend((DELIMITER,))
        return writing.finish()
    except BaseException:
        writing.discard()
        raise


def find_shard(path: Path, *, text_bytes: int, vocab_size: int, tokenizer: str) -> Shard | None:
    """The finished shard at `path`, None if there is none; the bytes of its text are taken as given.

    Raises:
        ValueError: if it is foreign, cut short, or was made with another tokenizer.
    """
    if not path.exists():
        return None
    header = _read_header(path)
    shard = Shard(path.name, header.tokens, header.documents, text_bytes, header.sha256)
    _check_shard(path, shard, vocab_size=vocab_size, tokenizer=tokenizer)
    return shard


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `manifest.json`, whole or not at all; call it when every shard is finished."""
    record = {
        "format": _MANIFEST_FORMAT,
        "tokenizer": manifest.tokenizer,
        "vocab_size": manifest.vocab_size,
        "sources": {
            source: {split: [shard._asdict() for shard in shards] for split, shards in splits.items()}
            for source, splits in manifest.sources.items()
        },
        "notes": manifest.notes,
    }
    partial = directory / f"{MANIFEST}.{os.getpid()}.tmp"
    partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, directory / MANIFEST)


def read_manifest(directory: str | Path) -> Manifest:
    """The manifest of a folder of shards.

    Raises:
        ValueError: if there is none, or it is not one of this format.
    """
    path = Path(directory) / MANIFEST
    try:
        record = read_json(path)
        expect_format(_MANIFEST_FORMAT, record, "manifest")
        expect_keys({"tokenizer": str, "vocab_size": int, "sources": dict, "notes": dict}, record, "manifest")
        sources = {
            source: {
                split: _shards(shards, f"sources.{source}.{split}")
                for split, shards in expect(dict, splits, f"sources.{source}").items()
            }
            for source, splits in record["sources"].items()
        }
        return Manifest(record["tokenizer"], record["vocab_size"], sources, record["notes"])
    except FileNotFoundError:
        raise ValueError(f"data {path}: no such file; a folder of finished token shards has one") from None
    except OSError as error:
        raise ValueError(f"data {path}: it cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"data {path}: not a manifest of token shards ({error}); prepare the data again") from None


class TokenSource:
    """One split of one source: the stream of its shards, read by position; `close` or a `with` frees its open files.

    Attributes:
        name: the source.
        num_tokens: tokens of the whole stream.
        vocab_size: every id is below it.
        sha256: of the sha256 of its shards, so of its content.
    """

    def __init__(self, directory: Path, name: str, shards: Sequence[Shard], *, vocab_size: int, tokenizer: str) -> None:
        self.name = name
        self.num_tokens = sum(shard.tokens for shard in shards)
        self.vocab_size = vocab_size
        self.sha256 = hashlib.sha256("".join(shard.sha256 for shard in shards).encode()).hexdigest()
        self._item = _item_size(vocab_size)
        self._shards = tuple(shards)
        self._paths = [directory / shard.file for shard in shards]
        # Python integers: an offset beyond 4 GB must not wrap.
        self._starts = [0, *accumulate(shard.tokens for shard in shards)]
        for path, shard in zip(self._paths, shards, strict=True):
            _check_shard(path, shard, vocab_size=vocab_size, tokenizer=tokenizer)
        self._files = [os.open(path, os.O_RDONLY) for path in self._paths]
        self._finalizer = weakref.finalize(self, _close_files, self._files)

    def read(self, start: int, count: int) -> Int[Tensor, " n"]:
        """Tokens `start` to `start + count - 1` of the stream; safe from several threads.

        Raises:
            ValueError: if that leaves the stream, or a stored id is not below the vocabulary size.
        """
        if start < 0 or count < 0 or start + count > self.num_tokens:
            raise ValueError(
                f"source {self.name}: tokens {start} to {start + count} asked, it has 0 to {self.num_tokens}"
            )
        return self._ids(self._bytes(start, count), start)

    def documents(self) -> Iterator[tuple[int, int]]:
        """Where each document's first token stands and how many it has, delimiters left out."""
        for path, begin in zip(self._paths, self._starts, strict=False):
            ends = array("Q")
            ends.frombytes(path.with_suffix(".idx").read_bytes())
            for start, end in pairwise((0, *_native(ends))):
                yield begin + start + 1, end - start - 1

    def digest(self, start: int, count: int) -> bytes:
        """sha256 of tokens as they are stored."""
        return hashlib.sha256(self._bytes(start, count)).digest()

    def verify(self) -> None:
        """Reads every token once.

        Raises:
            ValueError: naming the first shard whose tokens are not those that it was written with, by their sha256, or
                the first id that is not below the vocabulary size.
        """
        for path, shard, begin in zip(self._paths, self._shards, self._starts, strict=False):
            digest = hashlib.sha256()
            for start in range(begin, begin + shard.tokens, _VERIFIED_TOGETHER):
                data = self._bytes(start, min(_VERIFIED_TOGETHER, begin + shard.tokens - start))
                self._ids(data, start)
                digest.update(data)
            if (found := digest.hexdigest()) != shard.sha256:
                raise ValueError(
                    f"shard {path}: its tokens have sha256 {found[:12]}, {shard.sha256[:12]} expected; they were "
                    "changed, make the shard again"
                )

    def _bytes(self, start: int, count: int) -> bytearray:
        """Tokens of the stream as they are stored."""
        buffer = bytearray()
        while (have := len(buffer) // self._item) < count:
            k = bisect_right(self._starts, start + have) - 1
            wanted = min(start + count, self._starts[k + 1]) - (start + have)
            offset = _HEADER_BYTES + (start + have - self._starts[k]) * self._item
            buffer += _pread(self._files[k], wanted * self._item, offset, self._paths[k])
        return buffer

    def _ids(self, buffer: bytearray, start: int) -> Int[Tensor, " n"]:
        """Stored tokens, the first at `start`, as checked ids."""
        if not buffer:
            return torch.empty(0, dtype=torch.int64)
        # A mapping would be as fast, but its resident memory grows with everything ever touched.
        dtype = torch.uint16 if self._item == 2 else torch.int32
        tokens = torch.frombuffer(buffer, dtype=dtype).to(torch.int64)
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            position = int(((tokens < 0) | (tokens >= self.vocab_size)).nonzero()[0])
            raise ValueError(
                f"source {self.name}: token id {int(tokens[position])} at position {start + position} is not in "
                f"0 to {self.vocab_size - 1}; a shard is damaged, make it again"
            )
        return tokens

    def close(self) -> None:
        """Close the files; reading afterwards fails."""
        self._finalizer()

    def __enter__(self) -> "TokenSource":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_source(directory: str | Path, *, source: str, split: str, tokenizer: str) -> TokenSource:
    """The stream of one split of one source, its headers and sizes checked (microseconds a shard).

    Args:
        tokenizer: fingerprint of the tokenizer that the reader uses.

    Raises:
        ValueError: if the source or split is not there, the tokenizer differs (both are named), or a shard is missing,
            cut short or foreign.
    """
    manifest = read_manifest(directory)
    if source not in manifest.sources:
        raise ValueError(f"data {directory}: no source {source!r}; it has {', '.join(map(repr, manifest.sources))}")
    splits = manifest.sources[source]
    if split not in splits:
        raise ValueError(
            f"data {directory}: source {source!r} has no split {split!r}; it has {', '.join(map(repr, splits))}"
        )
    if manifest.tokenizer != tokenizer:
        raise ValueError(
            f"data {directory}: its shards were made with tokenizer {manifest.tokenizer}, this run's tokenizer is "
            f"{tokenizer}; use the tokenizer of the shards or make the shards again"
        )
    return TokenSource(
        Path(directory), source, splits[split], vocab_size=manifest.vocab_size, tokenizer=manifest.tokenizer
    )


def open_shards(location: str | Path, *, name: str, tokenizer: str) -> TokenSource:
    """The stream of shards without a manifest: those of a folder, or those that a glob finds, in order of their names.

    Raises:
        ValueError: as `open_source`, and if there are none or their vocabularies differ.
    """
    paths = sorted(Path(location).glob("*.bin") if Path(location).is_dir() else map(Path, glob(str(location))))
    if not paths:
        raise ValueError(f"source {name}: no token shards at {location}; give a folder of .bin files or a glob")
    headers = [_read_header(path) for path in paths]
    shards = [
        Shard(str(path.absolute()), header.tokens, header.documents, 0, header.sha256)
        for path, header in zip(paths, headers, strict=True)
    ]
    return TokenSource(Path(), name, shards, vocab_size=headers[0].vocab_size, tokenizer=tokenizer)


def verify_shards(directory: str | Path) -> None:
    """Read every shard of a folder; raises ValueError as `open_source` and `TokenSource.verify` do."""
    manifest = read_manifest(directory)
    for source, splits in manifest.sources.items():
        for split in splits:
            with open_source(directory, source=source, split=split, tokenizer=manifest.tokenizer) as stream:
                stream.verify()


class _Header(NamedTuple):
    """What a shard says of itself."""

    tokens: int
    vocab_size: int
    documents: int
    sha256: str
    tokenizer: str


class _OpenShard:
    """A shard being written under a temporary name; `finish` gives it its own."""

    def __init__(self, path: Path, *, vocab_size: int, tokenizer: str, first_document: int) -> None:
        self.num_tokens = 0
        self._path = path
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._first_document = first_document
        self._partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        self._typecode = "H" if _item_size(vocab_size) == 2 else "i"
        self._ends = array("Q")
        self._text_bytes = 0
        self._hash = hashlib.sha256()
        self._file = self._partial.open("wb", buffering=1 << 20)
        self._file.write(bytes(_HEADER_BYTES))

    def append(self, document: Document) -> None:
        self.extend((DELIMITER,))
        self.extend(document.tokens)
        self._ends.append(self.num_tokens)
        self._text_bytes += document.text_bytes

    def extend(self, tokens: Sequence[int]) -> None:
        data = _little_endian(array(self._typecode, tokens))
        self._hash.update(data)
        self._file.write(data)
        self.num_tokens += len(tokens)

    def finish(self) -> Shard:
        digest = self._hash.digest()
        version, item = _version(self._vocab_size), _item_size(self._vocab_size)
        counts = (_MAGIC, version, self.num_tokens, self._vocab_size, DELIMITER, len(self._ends), item, 0)
        identity = (digest, bytes.fromhex(self._tokenizer), self._first_document)
        header = struct.pack("<8i32s32sq", *counts, *identity)
        self._file.seek(0)
        self._file.write(header)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._path.with_suffix(".idx").write_bytes(_little_endian(self._ends))
        os.replace(self._partial, self._path)
        return Shard(self._path.name, self.num_tokens, len(self._ends), self._text_bytes, digest.hex())

    def discard(self) -> None:
        self._file.close()
        for path in (self._partial, self._path, self._path.with_suffix(".idx")):
            path.unlink(missing_ok=True)


def _shards(records: Any, where: str) -> tuple[Shard, ...]:
    """The shards of one split of the manifest."""
    listed = enumerate(expect(list, records, where))
    found = [expect_keys(Shard.__annotations__, record, f"{where}[{k}]") for k, record in listed]
    return tuple(Shard(*(record[key] for key in Shard._fields)) for record in found)


def _check_ids(tokens: Sequence[int], *, name: str, number: int, vocab_size: int) -> None:
    """An id that does not fit would wrap around in 16 bits; a delimiter inside a document would cut it in two."""
    if not len(tokens):
        raise ValueError(f"write_shards: document {number} of {name} is empty; leave empty documents out")
    if min(tokens) <= DELIMITER or max(tokens) >= vocab_size:
        position = next(i for i, token in enumerate(tokens) if not DELIMITER < token < vocab_size)
        raise ValueError(
            f"write_shards: document {number} of {name} has token id {tokens[position]} at position {position}; "
            f"ids of a document are 1 to {vocab_size - 1} (0 is the delimiter)"
        )


def _read_header(path: Path) -> _Header:
    """The header of a shard whose sizes on disk agree with it; raises ValueError if it is missing, foreign or cut."""
    index = path.with_suffix(".idx")
    try:
        with path.open("rb") as file:
            data = file.read(_HEADER_BYTES)
        size, index_size = path.stat().st_size, index.stat().st_size
    except FileNotFoundError as error:
        raise ValueError(f"shard {error.filename} is missing; make the shard again") from None
    if len(data) < _HEADER_BYTES or struct.unpack_from("<i", data)[0] != _MAGIC:
        raise ValueError(f"shard {path}: no token shard, it does not begin with a header of magic number {_MAGIC}")
    _, version, num_tokens, vocab_size, delimiter, documents, item = struct.unpack_from("<7i", data)
    if (version, delimiter, item) != (_version(vocab_size), DELIMITER, _item_size(vocab_size)):
        raise ValueError(
            f"shard {path}: version {version}, delimiter {delimiter}, {item} bytes a token for {vocab_size} ids; "
            f"expected version {_version(vocab_size)}, delimiter {DELIMITER}, {_item_size(vocab_size)} bytes a token"
        )
    for part, got, wanted in ((path, size, _HEADER_BYTES + num_tokens * item), (index, index_size, 8 * documents)):
        if got != wanted:
            raise ValueError(f"shard {part}: {got} bytes, {wanted} expected; it was cut short, make the shard again")
    return _Header(num_tokens, vocab_size, documents, data[32:64].hex(), data[64:96].hex())


def _check_shard(path: Path, shard: Shard, *, vocab_size: int, tokenizer: str) -> None:
    """Header and sizes against what the shard should be; raises ValueError naming what differs."""
    header = _read_header(path)
    expected = _Header(shard.tokens, vocab_size, shard.documents, shard.sha256, tokenizer)
    for field, got, wanted in zip(_Header._fields, header, expected, strict=True):
        if got != wanted:
            raise ValueError(f"shard {path}: made with {field} {got}, expected {wanted}; make the shard again")


def _item_size(vocab_size: int) -> int:
    return 2 if vocab_size <= 65_536 else 4


def _version(vocab_size: int) -> int:
    return _item_size(vocab_size) // 2


def _pread(file: int, count: int, offset: int, path: Path) -> bytes:
    """`count` bytes at `offset`; the system may give fewer at a time."""
    data = os.pread(file, count, offset)
    while len(data) < count:
        more = os.pread(file, count - len(data), offset + len(data))
        if not more:
            raise ValueError(
                f"shard {path}: it ends at byte {offset + len(data)}, {offset + count} expected; it was cut short"
            )
        data += more
    return data


def _close_files(files: list[int]) -> None:
    while files:
        os.close(files.pop())


def _little_endian(values: "array[int]") -> bytes:
    return _native(values).tobytes()


def _native(values: "array[int]") -> "array[int]":
    """Little-endian integers as this machine has them, and the other way round."""
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values
