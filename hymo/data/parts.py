"""Parts: the documents that one input gave, on disk between reading and writing, with what decides about each.

A part is a folder. It is made under another name and renamed, so one that is there is whole:

    texts.bin        the documents, UTF-8, one behind the other
    sizes.i64        bytes of each
    digests.i64      the first 16 bytes of its sha256, as two integers
    numbers.i64      its split number
    signatures.i16   its MinHash signature, short, and
    keys.i64         the keys of its bands, band by band; both only if near copies are looked for
    counts.json      what was read, by reason, and where each reason was met first

Memory does not grow with a part, only its files do.
"""

import hashlib
import json
import shutil
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from io import BufferedWriter
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int, Int16
from torch import Tensor

from hymo.data.corpus import SPLIT_NUMBERS
from hymo.data.minhash import BANDS, PLACES, band_keys, short_signatures, signature
from hymo.data.preparation import FilterConfig
from hymo.data.quality import refusal
from hymo.data.readers import BYTE_ORDER_MARK, Read
from hymo.data.record import expect_keys, read_json

READ, PASSED = "read", "passed"
_COUNTS = "counts.json"
_TOGETHER = 1_024
_CODES = {torch.int64: "q", torch.int16: "h", torch.uint8: "B"}


class Part(NamedTuple):
    """A finished part, its numbers mapped from disk.

    Attributes:
        counts: records read, documents that passed, and records that did not by reason.
        places: where each reason was met first.
        sizes: bytes of each document.
        digests: 16 bytes of its sha256.
        numbers: its split number.
    """

    path: Path
    counts: dict[str, int]
    places: dict[str, str]
    sizes: Int[Tensor, " n"]
    digests: Int[Tensor, "n 2"]
    numbers: Int[Tensor, " n"]

    def keys(self, band: int) -> Int[Tensor, " n"]:
        """The keys of a band."""
        return map_numbers(self.path / "keys.i64", torch.int64, BANDS * len(self.sizes)).reshape(BANDS, -1)[band]

    def texts(self, chosen: Bool[Tensor, " n"]) -> Iterator[str]:
        """The documents that are chosen, in their order."""
        with (self.path / "texts.bin").open("rb") as file:
            for size, is_chosen in zip(self.sizes.tolist(), chosen.tolist(), strict=True):
                if is_chosen:
                    yield file.read(size).decode()
                else:
                    file.seek(size, 1)


def write_part(path: Path, reads: Iterable[Read], *, filters: FilterConfig, near: bool) -> None:
    """Makes the part `path` of the documents that pass the filters; whole or not at all.

    Raises:
        ValueError: if `reads` does.
    """
    partial = path.with_name(f"{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    counts: Counter[str] = Counter({READ: 0, PASSED: 0})
    places: dict[str, str] = {}

    def passing() -> Iterator[str]:
        for read in reads:
            reason = read.reason or refusal(read.text or "", filters)
            counts[READ] += reason != BYTE_ORDER_MARK
            counts[reason or PASSED] += 1
            if reason:
                places.setdefault(reason, read.place)
            else:
                assert read.text is not None
                yield read.text

    _write_documents(partial, passing(), near=near)
    record = {"counts": dict(sorted(counts.items())), "places": places}
    (partial / _COUNTS).write_text(json.dumps(record), encoding="utf-8")
    partial.rename(path)


def open_part(path: Path) -> Part:
    """The finished part at `path`."""
    record = expect_keys({"counts": dict, "places": dict}, read_json(path / _COUNTS), _COUNTS)
    count = record["counts"][PASSED]
    return Part(
        path,
        record["counts"],
        record["places"],
        sizes=map_numbers(path / "sizes.i64", torch.int64, count),
        digests=map_numbers(path / "digests.i64", torch.int64, 2 * count).reshape(-1, 2),
        numbers=map_numbers(path / "numbers.i64", torch.int64, count),
    )


def map_signatures(parts: Sequence[Part], path: Path) -> Int16[Tensor, "n places"]:
    """The signatures of all parts in one mapped file, made at `path`."""
    with path.open("wb") as whole:
        for part in parts:
            with (part.path / "signatures.i16").open("rb") as file:
                shutil.copyfileobj(file, whole, 1 << 20)
    count = sum(len(part.sizes) for part in parts)
    return map_numbers(path, torch.int16, count * PLACES).reshape(-1, PLACES)


def _write_documents(folder: Path, texts: Iterator[str], *, near: bool) -> None:
    sizes, digests, numbers = array("q"), array("q"), array("q")
    waiting: list[Tensor] = []
    rows = folder / "rows.i64"
    with (
        (folder / "texts.bin").open("wb") as text_file,
        (folder / "signatures.i16").open("wb") as signature_file,
        rows.open("wb") as row_file,
    ):

        def write_signatures() -> None:
            if waiting:
                stacked = torch.stack(waiting)
                append_numbers(signature_file, short_signatures(stacked))
                append_numbers(row_file, band_keys(stacked).T)
                waiting.clear()

        for text in texts:
            data = text.encode()
            digest = hashlib.sha256(data).digest()
            text_file.write(data)
            sizes.append(len(data))
            digests.frombytes(digest[:16])
            numbers.append(int.from_bytes(digest) % SPLIT_NUMBERS)
            if near:
                waiting.append(signature(text))
            if len(waiting) == _TOGETHER:
                write_signatures()
        write_signatures()
    for name, values in (("sizes", sizes), ("digests", digests), ("numbers", numbers)):
        (folder / f"{name}.i64").write_bytes(values.tobytes())
    if near:
        by_document = map_numbers(rows, torch.int64, BANDS * len(sizes)).reshape(-1, BANDS)
        with (folder / "keys.i64").open("wb") as key_file:
            for band in range(BANDS):
                append_numbers(key_file, by_document[:, band])
    rows.unlink()


def append_numbers(file: BufferedWriter, values: Tensor) -> None:
    """Writes int64, int16 or uint8 numbers as they are in memory."""
    # Not through numpy, which hymo does not need otherwise.
    for some in torch.split(values.flatten(), 1 << 16):
        array(_CODES[values.dtype], some.tolist()).tofile(file)


def map_numbers(path: Path, dtype: torch.dtype, count: int) -> Tensor:
    """A file of numbers, of which memory holds what is touched and the system wants to keep."""
    if not count:
        return torch.empty(0, dtype=dtype)
    return torch.from_file(str(path), shared=False, size=count, dtype=dtype)
