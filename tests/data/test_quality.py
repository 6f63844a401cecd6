"""Filters keep real text and drop what is none."""

import pydoc_data.topics
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hymo.data.preparation import FilterConfig
from hymo.data.quality import refusal, unique_ratio

NONE = FilterConfig(1.0, 1.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("12345 67890 and", "digits"),
        ("٠١٢٣٤٥ ab", "digits"),
        ("== != ++ -- a", "punctuation"),
        ("。、！？a", "punctuation"),
        ("a   \n\t b", "whitespace"),
        (" " * 1_000_000, "whitespace"),
        ("a" * 5000, "few_different_characters"),
        ("ab" * 3000, "few_different_characters"),
        ("hello " * 500, "few_different_characters"),
        ("The quick brown fox jumps over the lazy dog. " * 100, None),
        ("吾輩は猫である。名前はまだ無い。", None),
    ],
)
def test_a_document_is_told_the_filter_that_it_does_not_pass(text: str, reason: str | None) -> None:
    assert refusal(text, FilterConfig()) == reason
    assert refusal(text, NONE) == (None if text else "empty")


def test_a_ratio_at_its_bound_passes() -> None:
    assert refusal("12ab", FilterConfig(max_digit_ratio=0.5)) is None
    assert refusal("12ab", FilterConfig(max_digit_ratio=0.49)) == "digits"


def test_unique_ratios_are_the_measured_ones() -> None:
    assert unique_ratio("a" * 5000) == pytest.approx(0.004, abs=5e-4)
    assert unique_ratio("ab" * 3000) == pytest.approx(0.008, abs=5e-4)
    assert unique_ratio("hello " * 500) == pytest.approx(0.020, abs=5e-4)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**16), times=st.integers(1, 40))
def test_the_unique_ratio_does_not_fall_with_the_length(seed: int, times: int) -> None:
    letters = random.Random(seed).choices("abcdefghij klm", k=512)
    assert unique_ratio("".join(letters) * times) == unique_ratio("".join(letters))


def test_prose_passes_whole() -> None:
    # Over the whole document 0.05 would drop nearly all of it.
    documents = list(pydoc_data.topics.topics.values())
    assert sum(refusal(text, FilterConfig()) is not None for text in documents) <= 1
    whole = "".join(documents)
    assert len(set(whole)) / len(whole) < 0.05 < unique_ratio(whole)
