"""From documents to a prepared folder (tokenizer and shards), and the corpus that every Python carries.

The embedded corpus is read from the running interpreter: the language reference of `pydoc_data.topics` (source `prose`)
and the standard library's files (source `code`). It differs between Python versions: good for a first run, never for a
number to be compared.
"""

import hashlib
import importlib
import json
import lzma
import math
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hymo.data.encoding import encode_documents
from hymo.data.record import expect, expect_keys
from hymo.data.shards import MANIFEST, Manifest, read_manifest, write_manifest, write_shards
from hymo.data.tokenizer import ExtendedTokenizer, train_bpe_tokenizer

TOKENIZER = "tokenizer.json"
SPLIT_NUMBERS = 1_000_000

# Tests, installed packages, and what the `prose` source already holds; folders of the standard library.
_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data"})
# Lines shorter than this ("return None") are shared by unrelated documents.
_TELLING_LINE = 30
# Part of the identity of a prepared folder; raise it when the same documents would be prepared differently.
_RECIPE = 1


class Floor(NamedTuple):
    """A text's size, and the bits per byte that it costs without a language model: what a model has to beat."""

    bytes: int
    order0_bits_per_byte: float
    xz_bits_per_byte: float


class PreparedCorpus(NamedTuple):
    """A finished folder of data.

    Attributes:
        directory: holds tokenizer.json, manifest.json and the shards; splits are "train" and "val".
        validation: what a model has to beat on the validation text, per source and "all" for the whole.
        reused: the folder was there already.
    """

    directory: Path
    tokenizer: ExtendedTokenizer
    manifest: Manifest
    validation: Mapping[str, Floor]
    reused: bool


def prepare_embedded(
    directory: str | Path, *, vocab_size: int = 4_096, code_bytes: int = 4_000_000, val_bytes: int = 50_000
) -> PreparedCorpus:
    """Prepare the embedded corpus in `directory`, or reuse it when it is the same; a few CPU-seconds.

    Args:
        vocab_size: V of the tokenizer, which has V + 256 ids.
        code_bytes: the source `code` is cut at this many bytes of text, whole documents.
        val_bytes: validation text of each source, at least.

    Raises:
        ValueError: if this Python has no such texts, or the folder holds other data.
    """
    return prepare_corpus(
        directory, embedded_documents(), vocab_size=vocab_size, val_bytes=val_bytes, max_bytes={"code": code_bytes}
    )


def prepare_corpus(
    directory: str | Path,
    sources: Mapping[str, Sequence[str]],
    *,
    vocab_size: int,
    val_bytes: int,
    max_bytes: Mapping[str, int] | None = None,
) -> PreparedCorpus:
    """Copies dropped, split, tokenizer trained on the training split, encoded and written; whole or not at all.

    Args:
        sources: name -> documents.
        max_bytes: per source, bytes of text to keep: whole documents, the first by split number.

    Raises:
        ValueError: if the folder holds other data, or a source is too small to split.
    """
    target = Path(directory)
    made_from = _identity(sources, vocab_size, val_bytes, max_bytes or {})
    if _holds(target, made_from):
        return open_prepared(target, reused=True)
    splits = {
        name: split_documents(_prefix(documents, (max_bytes or {}).get(name)), val_bytes=val_bytes, name=name)
        for name, documents in drop_copies(sources).items()
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.name}.") as parent:
        # A TemporaryDirectory is private to the user; the folder inside gets the usual permissions.
        partial = Path(parent) / "data"
        texts = [text for train, _ in splits.values() for text in train]
        tokenizer = train_bpe_tokenizer(texts, vocab_size=vocab_size, output_path=partial / TOKENIZER)
        shards = {
            name: {
                split: write_shards(
                    partial,
                    encode_documents(tokenizer, documents),
                    name=f"{name}_{split}",
                    vocab_size=tokenizer.vocab_size,
                    tokenizer=tokenizer.fingerprint,
                )
                for split, documents in (("train", train), ("val", val))
            }
            for name, (train, val) in splits.items()
        }
        validation_text = {name: "".join(val).encode() for name, (_, val) in splits.items()}
        validation_text["all"] = b"".join(validation_text.values())
        notes = {
            "made_from": made_from,
            "validation": {
                name: Floor(len(text), order0_entropy(text), xz_bits_per_byte(text))._asdict()
                for name, text in validation_text.items()
            },
        }
        write_manifest(partial, Manifest(tokenizer.fingerprint, tokenizer.vocab_size, shards, notes))
        # Another process may have been faster; then it wrote the same.
        if not _holds(target, made_from):
            partial.rename(target)
    return open_prepared(target, reused=False)


def read_floors(directory: str | Path) -> dict[str, Floor]:
    """What a model has to beat on the validation text of a prepared folder; empty if its notes do not say.

    Raises:
        ValueError: as `read_manifest`, and if what they say are no numbers.
    """
    noted = read_manifest(directory).notes.get("validation", {})
    try:
        floors = expect(dict, noted, "notes.validation")
        numbers = {
            name: expect_keys(Floor.__annotations__, floor, f"notes.validation.{name}")
            for name, floor in floors.items()
        }
    except ValueError as error:
        raise ValueError(f"data {Path(directory) / MANIFEST}: {error}; prepare the data again") from None
    return {name: Floor(*(each[key] for key in Floor._fields)) for name, each in numbers.items()}


def embedded_documents() -> dict[str, list[str]]:
    """The texts of the running interpreter, by source.

    Raises:
        ValueError: if it was installed without them; the message says which Pythons have them.
    """
    works = "pyenv's and Debian's python3 have it; or name your own shards in the `data` section"
    try:
        # Some distributions leave it out, so it is looked for only when it is asked for.
        topics: Mapping[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise ValueError(f"embedded corpus: this Python has no pydoc_data.topics ({error}); {works}") from None
    root = Path(sysconfig.get_path("stdlib"))
    code = [text for path in sorted(root.rglob("*.py")) if (text := _library_text(path, root))]
    if not code:
        raise ValueError(f"embedded corpus: no source files of the standard library under {root}; {works}")
    return {"prose": [text for _, text in sorted(topics.items()) if text], "code": code}


def drop_copies(sources: Mapping[str, Sequence[str]], *, threshold: float = 0.5) -> dict[str, list[str]]:
    """The documents that are no copies, in order of their hash.

    Longest first, a document is left out when at least `threshold` of its text (characters in lines of 30 or more)
    stands in those kept. A fifth of the language reference and most code pages in `encodings` are excerpts or siblings
    of others: split by their own hash alone, validation text would stand in training.
    """
    everything = sorted(
        ((name, text) for name, documents in sources.items() for text in set(documents)),
        key=lambda item: (-len(item[1]), _hash(item[1])),
    )
    seen: set[str] = set()
    kept: dict[str, list[str]] = {name: [] for name in sources}
    whole: set[str] = set()
    for name, text in everything:
        lines = [line for line in map(str.strip, text.splitlines()) if len(line) >= _TELLING_LINE]
        copied = sum(len(line) for line in lines if line in seen)
        if text and text not in whole and (not lines or copied < threshold * sum(map(len, lines))):
            kept[name].append(text)
            whole.add(text)
            seen.update(lines)
    return {name: sorted(documents, key=_hash) for name, documents in kept.items()}


def split_number(text: str) -> int:
    """sha256 of the text modulo 10^6: where it stands in any split, wherever it comes from."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()) % SPLIT_NUMBERS


def split_documents(documents: Sequence[str], *, val_bytes: int, name: str) -> tuple[list[str], list[str]]:
    """(train, val): validation is every document below the smallest split number that gives it `val_bytes` bytes.

    Raises:
        ValueError: if nothing would be left to train on.
    """
    ordered = sorted(documents, key=lambda text: (split_number(text), text))
    val: list[str] = []
    total = 0
    for text in ordered:
        if total >= val_bytes and split_number(text) != split_number(val[-1]):
            break
        val.append(text)
        total += len(text.encode())
    train = ordered[len(val) :]
    if not train or not val:
        raise ValueError(
            f"split: {name} has {len(documents)} documents of {sum(len(text.encode()) for text in documents)} bytes, "
            f"too few for {val_bytes} bytes of validation and something to train on; lower val_bytes or give more text"
        )
    return train, val


def order0_entropy(data: bytes) -> float:
    """Bits per byte of an ideal code that knows only how often each byte occurs; 0 for no bytes."""
    return math.fsum(n / len(data) * math.log2(len(data) / n) for n in Counter(data).values())


def xz_bits_per_byte(data: bytes) -> float:
    """Bits per byte of `xz -9e`.

    Raises:
        ValueError: if there are no bytes.
    """
    if not data:
        raise ValueError("xz_bits_per_byte: no bytes; at least one is needed")
    # A dictionary that holds all of the data finds as much as one of 64 MiB, in a fraction of its 700 MB.
    size = min(1 << 26, max(1 << 12, len(data)))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": size}]
    return 8 * len(lzma.compress(data, filters=filters)) / len(data)


def _library_text(path: Path, root: Path) -> str:
    """The text of a file of the standard library; empty if it is not to be used."""
    relative = path.relative_to(root)
    # _sysconfigdata holds the paths of the machine that built Python.
    if _SKIPPED_FOLDERS & set(relative.parts) or relative.name.startswith("_sysconfigdata"):
        return ""
    try:
        # Bytes, so that line ends stay as they are.
        return path.read_bytes().decode()
    except UnicodeDecodeError:
        return ""


def _prefix(documents: Sequence[str], max_bytes: int | None) -> list[str]:
    """The documents with the lowest split numbers that together have at most `max_bytes` bytes."""
    kept: list[str] = []
    total = 0
    for text in sorted(documents, key=lambda text: (split_number(text), text)):
        total += len(text.encode())
        if max_bytes is not None and total > max_bytes:
            break
        kept.append(text)
    return kept


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _identity(
    sources: Mapping[str, Sequence[str]], vocab_size: int, val_bytes: int, max_bytes: Mapping[str, int]
) -> str:
    """sha256 of everything that decides what the folder will hold."""
    content = {
        "recipe": _RECIPE,
        "vocab_size": vocab_size,
        "val_bytes": val_bytes,
        "max_bytes": dict(max_bytes),
        "sources": {name: sorted(_hash(text).hex() for text in documents) for name, documents in sources.items()},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _holds(directory: Path, made_from: str) -> bool:
    """True if the folder is the finished one that is wanted, False if it is free; never in between."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return False
    if not (directory / MANIFEST).exists():
        raise ValueError(f"data {directory}: it is there and holds no prepared data; give a new folder, or remove it")
    if read_manifest(directory).notes.get("made_from") != made_from:
        # A run that was trained on it may still need it.
        raise ValueError(f"data {directory}: prepared from other texts or settings; give a new folder, or remove it")
    return True


def open_prepared(directory: Path, *, reused: bool) -> PreparedCorpus:
    """A finished folder.

    Raises:
        ValueError: if its tokenizer is not the one that made its shards.
    """
    manifest = read_manifest(directory)
    tokenizer = ExtendedTokenizer.load(directory / TOKENIZER)
    if tokenizer.fingerprint != manifest.tokenizer or tokenizer.vocab_size != manifest.vocab_size:
        raise ValueError(
            f"data {directory}: its {TOKENIZER} has fingerprint {tokenizer.fingerprint}, its shards were made with "
            f"{manifest.tokenizer}; remove the folder and prepare it again"
        )
    return PreparedCorpus(directory, tokenizer, manifest, read_floors(directory), reused)
