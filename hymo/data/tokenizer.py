"""A lossless byte-level BPE tokenizer whose 256 byte tokens are the BPE alphabet itself.

    0 .. 4        specials: end of document, bos, pad, unk (never produced), mask
    5 .. V-1      merged tokens in merge order; a tail that the text was too small to fill is reserved
    V .. V+255    byte b is token V + b

What is not merged falls to its bytes, so every text and every byte string has ids, and only specials are never made.
"""

import codecs
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from torch import Tensor

from hymo.data.record import read_json

SPECIALS = ("<|endoftext|>", "<|bos|>", "<|pad|>", "<|unk|>", "<|mask|>")
NUM_BYTES = 256

# The split pattern of OpenAI's cl100k_base; the length of a group of digits is filled in.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,{digits}}}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# A small vocabulary has better uses for its merges than a thousand three-digit numbers.
_SMALL_VOCABULARY = 8_192
_LONGEST_RUN = 1_000
_LONG_RUN = re.compile(rf"\S{{{_LONGEST_RUN},}}|\s{{{_LONGEST_RUN},}}")


def _byte_characters() -> tuple[str, ...]:
    """The printable character that stands for each byte inside a byte-level BPE file (GPT-2's table)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    shifted = iter(range(256, 512))
    return tuple(chr(byte if byte in printable else next(shifted)) for byte in range(NUM_BYTES))


_CHARACTERS = _byte_characters()
_BYTES = {character: byte for byte, character in enumerate(_CHARACTERS)}


class ExtendedTokenizer:
    """Text and bytes to ids and back, exactly: `decode(encode(text)) == text` for every text, specials never from text.

    Args:
        merges: pairs of byte-level tokens, in the order in which they are applied.
        base_size: V, the number of ids below the byte tokens; at least the 5 specials and the distinct merged tokens.
        digits: longest run of digits that stays together, 2 or 3.
    """

    def __init__(self, merges: Sequence[tuple[str, str]], *, base_size: int, digits: int) -> None:
        self._merges = list(merges)
        self._digits = digits
        self._vocabulary = _vocabulary(self._merges, base_size)
        self._tokenizer = _assemble(self._vocabulary, self._merges, digits)
        self.byte_offset = base_size
        self.vocab_size = base_size + NUM_BYTES
        self.eos_token_id, self.bos_token_id, self.pad_token_id = range(3)
        text_tokens = base_size - sum(token.startswith("<|reserved_") for token in self._vocabulary)
        self._special_ids = frozenset((*range(len(SPECIALS)), *range(text_tokens, base_size)))
        self._table = [
            token.encode() if i in self._special_ids else bytes(_BYTES[character] for character in token)
            for token, i in sorted(self._vocabulary.items(), key=lambda item: item[1])
        ]

    @classmethod
    def load(cls, path: str | Path) -> "ExtendedTokenizer":
        """The tokenizer that `save` wrote.

        Raises:
            ValueError: if the file is missing or has another layout; the message says which rule it breaks.
        """
        try:
            layout = read_json(path)
        except FileNotFoundError:
            raise ValueError(f"tokenizer {path}: no such file; train_bpe_tokenizer writes one") from None
        except OSError as error:
            raise ValueError(f"tokenizer {path}: it cannot be read ({error.strerror})") from None
        except ValueError as error:
            raise _refusal(path, str(error)) from None
        try:
            model, added = layout["model"], [token["content"] for token in layout["added_tokens"]]
            split = layout["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
            merges = [(left, right) for left, right in (_pair(merge) for merge in model["merges"])]
            vocabulary = dict(model["vocab"])
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise _refusal(path, "its model, added_tokens or pre_tokenizer are laid out in another way") from None
        digits = next((n for n in (2, 3) if split == _SPLIT.format(digits=n)), None)
        if digits is None:
            raise _refusal(path, f"unknown split pattern {split!r}")
        if added != list(SPECIALS):
            raise _refusal(path, f"added tokens {added[:8]}, expected {list(SPECIALS)}")
        try:
            tokenizer = cls(merges, base_size=len(vocabulary) - NUM_BYTES, digits=digits)
        except (ValueError, KeyError) as error:
            raise _refusal(path, str(error)) from None
        for token, expected in tokenizer._vocabulary.items():
            if vocabulary.get(token) != expected:
                raise _refusal(path, f"token {token!r} has id {vocabulary.get(token)}, expected {expected}")
        # The encoder is rebuilt from the merges, so any other stage in the file would be dropped without a word.
        expected_layout = json.loads(tokenizer._tokenizer.to_str())
        for stage in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            if layout.get(stage) != expected_layout[stage]:
                raise _refusal(path, f"its {stage} is {json.dumps(layout.get(stage))[:120]}")
        for option, expected in expected_layout["model"].items():
            if option not in ("vocab", "merges") and model.get(option, expected) != expected:
                raise _refusal(path, f"its {option} is {model[option]!r}, expected {expected!r}")
        return tokenizer

    def save(self, path: str | Path) -> None:
        """Write the Hugging Face `tokenizer.json` at `path`, whole or not at all."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        try:
            partial.write_text(self._tokenizer.to_str(pretty=True), encoding="utf-8")
            os.replace(partial, target)
        except OSError:
            partial.unlink(missing_ok=True)
            raise

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the canonical JSON of what decides the ids: vocabulary, merges, split pattern; not of the file."""
        meaning = {"vocab": self._vocabulary, "merges": self._merges, "split": _SPLIT.format(digits=self._digits)}
        return hashlib.sha256(json.dumps(meaning, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @property
    def suppressed_ids(self) -> tuple[int, ...]:
        """Ids that generation never samples: every special but the end of a document."""
        return tuple(sorted(self._special_ids - {self.eos_token_id}))

    def encode(self, text: str) -> list[int]:
        """The ids of `text`.

        Raises:
            TypeError: if it is no str.
            ValueError: if it holds a lone surrogate; the message names its index.
        """
        _check_text(text)
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, encoded on every core."""
        for number, text in enumerate(texts):
            _check_text(text, where=f"text {number}: ")
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def count(self, text: str) -> int:
        """The number of ids of `text`."""
        return len(self.encode(text))

    def encode_bytes(self, data: bytes) -> list[int]:
        """The ids of any bytes: valid UTF-8 runs through the merges, every other byte is its own token."""
        if not isinstance(data, bytes):
            raise TypeError(f"encode_bytes: expected bytes, got {type(data).__name__}; encode takes a str")
        runs = re.split("([\udc80-\udcff]+)", data.decode("utf-8", "surrogateescape"))
        return [
            i
            for position, run in enumerate(runs)
            for i in ([self.byte_offset + ord(c) - 0xDC00 for c in run] if position % 2 else self.encode(run))
        ]

    def decode_bytes(self, ids: Iterable[int], *, skip_special: bool = False) -> bytes:
        """The bytes of `ids`; a special is the bytes of its name, or nothing.

        Raises:
            ValueError: if an id is outside [0, vocab_size); the message names it and its position.
        """
        return b"".join(self._pieces(ids, skip_special))

    def decode(self, ids: Iterable[int], *, skip_special: bool = False, errors: str = "replace") -> str:
        """The text of `ids`; `errors` says what becomes of bytes that are no UTF-8, as in `bytes.decode`."""
        return self.decode_bytes(ids, skip_special=skip_special).decode("utf-8", errors)

    def stream(self, ids: Iterable[int], *, skip_special: bool = False) -> Iterator[str]:
        """Pieces of text as ids arrive, a character when its last byte is there; joined they equal `decode(ids)`."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for piece in self._pieces(ids, skip_special):
            if text := decoder.decode(piece):
                yield text
        if text := decoder.decode(b"", final=True):
            yield text

    def token_bytes(self) -> Int[Tensor, " vocab"]:
        """The number of bytes of text that each id stands for; 0 for the specials."""
        return torch.tensor([0 if i in self._special_ids else len(piece) for i, piece in enumerate(self._table)])

    def _pieces(self, ids: Iterable[int], skip_special: bool) -> Iterator[bytes]:
        for position, i in enumerate(ids):
            # A negative id would silently index from the end.
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"decode: id {i} at position {position} is not in 0 to {self.vocab_size - 1}")
            yield b"" if skip_special and i in self._special_ids else self._table[i]


def train_bpe_tokenizer(
    texts: Iterable[str], *, vocab_size: int = 64_000, output_path: str | Path
) -> ExtendedTokenizer:
    """Train on `texts`, save at `output_path` and return the tokenizer; the same texts give the same file.

    Args:
        texts: documents; a special's name inside one is ordinary text.
        vocab_size: V, the ids below the 256 byte tokens; the tokenizer has `vocab_size + 256` ids whatever the texts.

    Raises:
        TypeError: if a text is no str.
        ValueError: if V leaves no room for the specials, `texts` is one string, or a text holds a lone surrogate.
    """
    if vocab_size < len(SPECIALS):
        raise ValueError(f"train_bpe_tokenizer: vocab_size {vocab_size} cannot hold the {len(SPECIALS)} specials")
    if isinstance(texts, str):
        raise ValueError("train_bpe_tokenizer: texts is one str; give an iterable of documents, e.g. [text]")
    digits = 2 if vocab_size <= _SMALL_VOCABULARY else 3
    draft = Tokenizer(BPE())
    draft.pre_tokenizer = _pre_tokenizer(digits)
    trainer = BpeTrainer(
        vocab_size=vocab_size - len(SPECIALS) + NUM_BYTES,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    draft.train_from_iterator(_trainable(texts), trainer)
    merges = [_pair(merge) for merge in json.loads(draft.to_str())["model"]["merges"]]
    tokenizer = ExtendedTokenizer(merges, base_size=vocab_size, digits=digits)
    tokenizer.save(output_path)
    return tokenizer


def _vocabulary(merges: Sequence[tuple[str, str]], base_size: int) -> dict[str, int]:
    """Token to id in the layout of this module; raises ValueError when the merges do not fit below `base_size`."""
    # Two merges may make the same token: it has one id.
    merged = list(dict.fromkeys(left + right for left, right in merges))
    num_reserved = base_size - len(SPECIALS) - len(merged)
    if num_reserved < 0:
        raise ValueError(f"{len(merged)} merged tokens and {len(SPECIALS)} specials do not fit below id {base_size}")
    reserved = [f"<|reserved_{k}|>" for k in range(num_reserved)]
    tokens = (*SPECIALS, *merged, *reserved, *_CHARACTERS)
    return {token: i for i, token in enumerate(tokens)}


def _pre_tokenizer(digits: int) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(_SPLIT.format(digits=digits)), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _assemble(vocabulary: dict[str, int], merges: list[tuple[str, str]], digits: int) -> Tokenizer:
    # The bindings raise a bare Exception for a merge of unknown tokens.
    unknown = next((pair for pair in merges if any(token not in vocabulary for token in pair)), None)
    if unknown is not None:
        raise ValueError(f"merge {unknown} joins a token that no earlier merge makes")
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(digits)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    # Without it the text "<|endoftext|>" becomes id 0. The JSON does not hold it, so every tokenizer is built here.
    tokenizer.encode_special_tokens = True
    return tokenizer


def _pair(merge: Any) -> tuple[str, str]:
    """A merge of the JSON: a pair, or in older files one string with a space."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return str(left), str(right)


def _trainable(texts: Iterable[str]) -> Iterator[str]:
    """The texts, those with very long runs of one kind in pieces.

    The trainer's time grows with the square of a word's length: a megabyte of letters would take it days.
    """
    for number, text in enumerate(texts):
        _check_text(text, where=f"text {number}: ")
        start = 0
        for run in _LONG_RUN.finditer(text):
            yield text[start : run.start()]
            yield from (text[at : at + _LONGEST_RUN] for at in range(run.start(), run.end(), _LONGEST_RUN))
            start = run.end()
        yield text[start:]


def _check_text(text: object, *, where: str = "") -> None:
    if not isinstance(text, str):
        raise TypeError(f"encode: {where}expected a str, got {type(text).__name__}; encode_bytes takes bytes")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"encode: {where}lone surrogate {text[error.start]!r} at index {error.start} is not Unicode text; "
            "encode_bytes takes any bytes"
        ) from None


def _refusal(path: str | Path, reason: str) -> ValueError:
    return ValueError(f"tokenizer {path}: not a file of train_bpe_tokenizer ({reason}); train one with it")
