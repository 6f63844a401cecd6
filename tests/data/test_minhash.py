"""Signatures estimate what two documents have in common; near copies are found, others are left."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hymo.data.minhash import BANDS, NOTHING, PLACES, band_keys, has_runs, near_in_band, short_signatures, signature

WORDS = [f"word{i}x" for i in range(3000)]


def words(seed: int, count: int = 300) -> list[str]:
    return random.Random(seed).choices(WORDS, k=count)


def changed(text: list[str], places: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    result = list(text)
    for place in draw.sample(range(len(text)), places):
        result[place] = "another"
    return result


def common(one: list[str], other: list[str]) -> float:
    a, b = ({tuple(text[i : i + 5]) for i in range(len(text) - 4)} for text in (one, other))
    return len(a & b) / len(a | b)


def near(texts: list[list[str]], threshold: float = 0.8) -> list[bool]:
    signatures = torch.stack([signature(" ".join(text)) for text in texts])
    short, keys = short_signatures(signatures), band_keys(signatures)
    alive = has_runs(short)
    found = [near_in_band(keys[band], short, alive=alive, threshold=threshold) for band in range(BANDS)]
    return torch.stack(found).any(0).tolist()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**16), places=st.integers(0, 60))
def test_places_agree_as_often_as_runs_are_common(seed: int, places: int) -> None:
    one = words(seed)
    other = changed(one, places, seed)
    signatures = torch.stack([signature(" ".join(text)) for text in (one, other)])
    expected = common(one, other)
    # Four standard deviations of a mean of 120 draws.
    margin = 4 * (expected * (1 - expected) / PLACES) ** 0.5 + 1e-6
    assert (signatures[0] == signatures[1]).float().mean().item() == pytest.approx(expected, abs=margin)
    short = short_signatures(signatures)
    assert (short[0] == short[1]).float().mean().item() == pytest.approx(expected, abs=margin)


def test_a_near_copy_of_an_earlier_document_is_found() -> None:
    one, two = words(1), words(2)
    assert common(one, changed(one, 3)) > 0.9
    assert near([one, two, changed(one, 3), changed(two, 3), words(3)]) == [False, False, True, True, False]


def test_documents_with_less_in_common_are_kept() -> None:
    one = words(4)
    half = one[:150] + words(5, 150)
    assert 0.2 < common(one, half) < 0.5
    assert near([one, half, words(6)]) == [False] * 3


def test_case_punctuation_and_layout_do_not_matter() -> None:
    text = words(7)
    signatures = [signature(each) for each in (" ".join(text), "\n\n".join(text).upper(), ", ".join(text) + "!")]
    assert all(torch.equal(each, signatures[0]) for each in signatures)


def test_scripts_without_spaces_have_runs_of_characters() -> None:
    one = "".join(random.Random(0).choices([chr(0x4E00 + i) for i in range(500)], k=400))
    other = one[:200] + "猫" + one[201:]
    agreed = (signature(one) == signature(other)).float().mean().item()
    assert agreed == pytest.approx(391 / 401, abs=0.06)


def test_documents_shorter_than_a_run_are_like_no_other() -> None:
    for text in ("", "one two three four", "!!! ..."):
        assert (signature(text) == NOTHING).all()
    assert near([["a", "b"], ["a", "b"], *[words(9)] * 2]) == [False, False, False, True]


def test_a_signature_is_the_same_everywhere() -> None:
    # A change of these would make a preparation that goes on differ from one that began anew.
    expected = [1092685491, 1535796667, 1409944399]
    assert signature("the quick brown fox jumps over the lazy dog")[:3].tolist() == expected
