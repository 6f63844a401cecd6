import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hymo.data import ExtendedTokenizer, train_bpe_tokenizer
from hymo.data.tokenizer import SPECIALS

CASES = settings(max_examples=60, deadline=None, derandomize=True)

HAZARDS = [
    "",
    "\0",
    "a\r\nb\rc\n",
    " leading and trailing  ",
    "\t\v\f\x1a",
    "e\u0301 \u0301",
    "👩‍👩‍👧 🇫🇷",
    "\ufeffbom",
    "\u2028\u2029\x85",
    "\ufffe\uffff\U0010ffff",
    "<|endoftext|>",
    "<|pad|><|reserved_0|>",
    "<0x41></s>",
    "▁Ġ Ċ",
    "1234567 3.14",
    "if x != y:\n    return  z",
]
texts_with_hazards = st.lists(
    st.one_of(st.text(st.characters(exclude_categories=("Cs",)), max_size=40), st.sampled_from(HAZARDS)), max_size=5
).map("".join)


@CASES
@given(text=texts_with_hazards)
@example(text="".join(HAZARDS))
@example(text=" " * 5_000 + "x" * 5_000)
def test_every_text_comes_back_and_makes_no_special(tokenizer: ExtendedTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, errors="strict") == text
    assert "".join(tokenizer.stream(ids)) == text
    assert not {tokenizer.eos_token_id, *tokenizer.suppressed_ids} & set(ids)
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.encode_batch([text, text]) == [ids, ids]
    assert tokenizer.count(text) == len(ids)
    assert tokenizer.encode_bytes(text.encode()) == ids
    assert int(tokenizer.token_bytes()[ids].sum()) == len(text.encode())


@CASES
@given(data=st.binary(max_size=80))
@example(data=bytes(range(256)))
@example(data=b"ok \xed\xa0\x80 \xff\xfe caf\xc3")
def test_all_bytes_come_back(tokenizer: ExtendedTokenizer, data: bytes) -> None:
    assert tokenizer.decode_bytes(tokenizer.encode_bytes(data)) == data


@CASES
@given(ids=st.lists(st.integers(0, 120 + 255), max_size=40), skip=st.booleans())
def test_streamed_pieces_join_to_the_decoded_text(tokenizer: ExtendedTokenizer, ids: list[int], skip: bool) -> None:
    assert "".join(tokenizer.stream(ids, skip_special=skip)) == tokenizer.decode(ids, skip_special=skip)


def test_a_character_is_streamed_when_its_last_byte_arrives(tokenizer: ExtendedTokenizer) -> None:
    ids = [tokenizer.byte_offset + byte for byte in "é→".encode()]
    arrived: list[int] = []

    def arriving():
        for i in ids:
            arrived.append(i)
            yield i

    assert [(piece, len(arrived)) for piece in tokenizer.stream(arriving())] == [("é", 2), ("→", 5)]


def test_ids_are_specials_then_merges_then_bytes(tokenizer: ExtendedTokenizer) -> None:
    assert tokenizer.vocab_size == 120 + 256
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id) == (0, 1, 2)
    assert [tokenizer.decode([i]) for i in range(5)] == list(SPECIALS)
    assert [tokenizer.decode_bytes([120 + byte]) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert tokenizer.token_bytes()[:5].tolist() == [0] * 5
    assert tokenizer.token_bytes()[120:].tolist() == [1] * 256
    assert min(tokenizer.token_bytes()[5:80].tolist()) >= 2
    assert tokenizer.suppressed_ids[:4] == (1, 2, 3, 4)


def test_specials_are_skipped_on_request(tokenizer: ExtendedTokenizer) -> None:
    ids = [0, *tokenizer.encode("gate"), 2]
    assert tokenizer.decode(ids) == "<|endoftext|>gate<|pad|>"
    assert tokenizer.decode(ids, skip_special=True) == "gate"


def test_the_tail_is_reserved_when_the_text_is_small(tmp_path: Path) -> None:
    tokenizer = train_bpe_tokenizer(["ab ab"], vocab_size=20, output_path=tmp_path / "t.json")
    assert tokenizer.vocab_size == 20 + 256
    assert tokenizer.suppressed_ids == (1, 2, 3, 4, *range(6, 20))
    assert tokenizer.decode([5, 6, 19]) == "ab<|reserved_0|><|reserved_13|>"
    assert tokenizer.encode("ab")[0] == 5
    assert ExtendedTokenizer.load(tmp_path / "t.json").suppressed_ids == tokenizer.suppressed_ids


@pytest.mark.parametrize("vocab_size", [5, 6])
def test_no_text_at_all_gives_a_byte_tokenizer(vocab_size: int, tmp_path: Path) -> None:
    tokenizer = train_bpe_tokenizer([], vocab_size=vocab_size, output_path=tmp_path / "t.json")
    assert tokenizer.encode("hi") == [vocab_size + 104, vocab_size + 105]


def test_digits_stay_together_by_two_in_a_small_vocabulary(tmp_path: Path) -> None:
    texts = ["123456 " * 50, "987654 " * 50]
    small = train_bpe_tokenizer(texts, vocab_size=64, output_path=tmp_path / "small.json")
    large = train_bpe_tokenizer(texts, vocab_size=8_193, output_path=tmp_path / "large.json")
    assert [small.decode([i]) for i in small.encode("123456")] == ["12", "34", "56"]
    assert [large.decode([i]) for i in large.encode("123456")] == ["123", "456"]


def test_the_same_texts_give_the_same_file(texts: list[str], tokenizer: ExtendedTokenizer, tmp_path: Path) -> None:
    again = train_bpe_tokenizer(iter(texts), vocab_size=120, output_path=tmp_path / "a.json")
    train_bpe_tokenizer(texts[::-1], vocab_size=120, output_path=tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert again.fingerprint == tokenizer.fingerprint


def test_a_saved_tokenizer_loads_as_itself(tokenizer: ExtendedTokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "deep" / "t.json")
    loaded = ExtendedTokenizer.load(tmp_path / "deep" / "t.json")
    text = "<|endoftext|> the gate 東京"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert list((tmp_path / "deep").iterdir()) == [tmp_path / "deep" / "t.json"]
    other = train_bpe_tokenizer(["other"], vocab_size=120, output_path=tmp_path / "other.json")
    assert other.fingerprint != tokenizer.fingerprint


def test_a_lone_surrogate_is_refused_with_its_index(tokenizer: ExtendedTokenizer, tmp_path: Path) -> None:
    bad = "café \ud800!"
    for refuse in (
        lambda: tokenizer.encode(bad),
        lambda: tokenizer.encode_batch(["fine", bad]),
        lambda: train_bpe_tokenizer(["fine", bad], vocab_size=64, output_path=tmp_path / "t.json"),
    ):
        with pytest.raises(ValueError, match=r"lone surrogate '\\ud800' at index 5"):
            refuse()
    assert not (tmp_path / "t.json").exists()


@pytest.mark.parametrize("bad", [-1, 376, 10**9])
def test_an_id_outside_the_vocabulary_is_named(bad: int, tokenizer: ExtendedTokenizer) -> None:
    for decode in (tokenizer.decode, tokenizer.decode_bytes, lambda ids: "".join(tokenizer.stream(ids))):
        with pytest.raises(ValueError, match=rf"id {bad} at position 2 is not in 0 to 375"):
            decode([120, 121, bad])


@pytest.mark.parametrize("text", [5, None, b"the gate", ["the gate"]])
def test_what_is_no_text_is_refused_by_its_type(text: Any, tokenizer: ExtendedTokenizer, tmp_path: Path) -> None:
    # Without the checks of the annotations, which only tests have.
    encode, encode_bytes = inspect.unwrap(ExtendedTokenizer.encode), inspect.unwrap(ExtendedTokenizer.encode_bytes)
    named = f"expected a str, got {type(text).__name__}"
    with pytest.raises(TypeError, match=f"^encode: {named}"):
        encode(tokenizer, text)
    with pytest.raises(TypeError, match=f"^encode: text 1: {named}"):
        train_bpe_tokenizer(iter(["fine", text]), vocab_size=64, output_path=tmp_path / "t.json")
    with pytest.raises(TypeError, match=r"^encode_bytes: expected bytes, got str"):
        encode_bytes(tokenizer, "the gate")
    assert not (tmp_path / "t.json").exists()


def test_one_string_is_no_list_of_texts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="texts is one str"):
        train_bpe_tokenizer("the gate", vocab_size=64, output_path=tmp_path / "t.json")


def test_a_vocabulary_without_room_for_the_specials_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocab_size 4 cannot hold the 5 specials"):
        train_bpe_tokenizer(["a"], vocab_size=4, output_path=tmp_path / "t.json")


def _edit(change):
    def edited(layout: dict) -> str:
        change(layout)
        return json.dumps(layout)

    return edited


def _swap_ids(layout: dict) -> None:
    vocab = layout["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda layout: "not json", "no JSON"),
        (lambda layout: "[" * 100_000, "nested too deeply"),
        (lambda layout: "[]", "laid out in another way"),
        (_edit(lambda layout: layout.pop("model")), "laid out in another way"),
        (_edit(lambda layout: layout["model"].update(merges=[5])), "laid out in another way"),
        (_edit(lambda layout: layout["model"].update(merges=["a b c"])), "laid out in another way"),
        (_edit(lambda layout: layout["model"].update(vocab=None)), "laid out in another way"),
        (_edit(_swap_ids), "token 'a' has id"),
        (_edit(lambda layout: layout["added_tokens"].pop()), "added tokens"),
        (_edit(lambda layout: layout["model"].update(byte_fallback=True)), "byte_fallback is True, expected False"),
        (_edit(lambda layout: layout.update(normalizer={"type": "NFC"})), "normalizer"),
        (_edit(lambda layout: layout["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True)), "pre_token"),
        (_edit(lambda layout: layout["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex=r"\w+")), "split"),
        (_edit(lambda layout: layout["model"]["merges"].insert(0, ["zzz", "a"])), "zzz"),
        (_edit(lambda layout: layout["model"]["vocab"].pop("a")), "do not fit|token"),
    ],
)
def test_a_foreign_file_is_refused_in_one_line(
    spoil, reason: str, tokenizer: ExtendedTokenizer, tmp_path: Path
) -> None:
    tokenizer.save(tmp_path / "t.json")
    (tmp_path / "t.json").write_text(spoil(json.loads((tmp_path / "t.json").read_text())))
    with pytest.raises(ValueError, match=reason) as caught:
        ExtendedTokenizer.load(tmp_path / "t.json")
    assert "t.json: not a file of train_bpe_tokenizer" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "Error" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.json: no such file"):
        ExtendedTokenizer.load(tmp_path / "nowhere.json")
    with pytest.raises(ValueError, match=r"cannot be read \(Is a directory\)"):
        ExtendedTokenizer.load(tmp_path)


def test_a_megabyte_of_one_letter_is_trained_on_in_no_time(tmp_path: Path) -> None:
    # In one piece it would take days: the trainer's time grows with the square of a word's length.
    texts = ["m" * 1_000_000, " " * 1_000_000, "words between " * 9]
    tokenizer = train_bpe_tokenizer(texts, vocab_size=400, output_path=tmp_path / "tokenizer.json")
    assert len(tokenizer.encode("m" * 512)) <= 2
    assert tokenizer.decode(tokenizer.encode(texts[2])) == texts[2]
