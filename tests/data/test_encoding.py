"""Long documents are encoded in pieces, and nobody can tell."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hymo.data import ExtendedTokenizer
from hymo.data.encoding import cut, encode_documents

ATOMS = ["\n", "\n\n", "\r\n", " ", "  \n", "\t", "x", "end", "'s", " 12", "…", "。", "\u2028", "\x1c", "naïve", ") ;"]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**16), most=st.integers(3, 40))
def test_pieces_join_to_the_text_and_are_short(seed: int, most: int) -> None:
    text = "".join(random.Random(seed).choices(ATOMS, k=60))
    pieces = cut(text, most)
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= most for piece in pieces)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_ids_are_those_of_the_whole_where_lines_end(tokenizer: ExtendedTokenizer, seed: int) -> None:
    draw = random.Random(seed)
    text = "".join("".join(draw.choices(ATOMS, k=6)) + "\n" + draw.choice("a'.1 中") for _ in range(20))
    ids = [i for piece in cut(text, 60) for i in tokenizer.encode(piece)]
    assert ids == tokenizer.encode(text)


def test_a_line_that_is_too_long_is_cut_anywhere() -> None:
    assert cut("abcdefg", 3) == ["abc", "def", "g"]
    assert cut("\n\n\n\n", 3) == ["\n\n\n", "\n"]
    assert cut("a\nb\nc", 3) == ["a\n", "b\nc"]
    assert cut("", 3) == [""]


def test_documents_keep_their_order_and_their_bytes(
    tokenizer: ExtendedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["one", "naïve 東京\n" * 50, "<|endoftext|>", "x" * 300, "last"]
    whole = list(encode_documents(tokenizer, texts))
    assert [tokenizer.decode(document.tokens) for document in whole] == texts
    assert [document.text_bytes for document in whole] == [len(text.encode()) for text in texts]
    assert all(min(document.tokens) > 0 for document in whole)
    monkeypatch.setattr("hymo.data.encoding._TOGETHER", 7)
    assert list(encode_documents(tokenizer, iter(texts))) == whole
