"""Where documents begin: one rule, from tokens to positions."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from hymo.batch import document_position, make_batch
from hymo.config import DELIMITER
from tests.configs import windows


def counted(tokens: list[int], start: int) -> list[int]:
    """The definition, by counting."""
    positions, at = [], start
    for token in tokens:
        at = 0 if token == DELIMITER else at
        positions.append(at)
        at += 1
    return positions


@given(st.integers(0, 2**31), st.integers(1, 40), st.integers(1, 12), st.booleans())
def test_position_counts_from_each_delimiter(seed: int, time: int, document: int, continued: bool) -> None:
    tokens = windows(seed, 3, time, document=document)
    start = torch.tensor([0, 5, 1000]) if continued else None
    expected = [
        counted(row, begin) for row, begin in zip(tokens.tolist(), [0, 5, 1000] if continued else [0] * 3, strict=True)
    ]
    assert document_position(tokens, start).tolist() == expected


def test_position_can_be_continued_token_by_token() -> None:
    tokens = windows(1, 2, 30, document=6)
    at, positions = torch.zeros(2, dtype=torch.int64), []
    for t in range(30):
        positions.append(document_position(tokens[:, t : t + 1], at))
        at = positions[-1][:, -1] + 1
    assert torch.equal(torch.cat(positions, dim=1), document_position(tokens))


def test_a_window_gives_each_token_the_next_as_label() -> None:
    window = torch.tensor([[7, 8, 0, 9, 10]])
    batch = make_batch(window)
    assert batch.tokens.tolist() == [[7, 8, 0, 9]]
    assert batch.labels.tolist() == [[8, 0, 9, 10]]
    assert batch.position.tolist() == [[0, 1, 0, 1]]


def test_a_delimiter_ends_a_document_as_label_and_opens_one_as_input() -> None:
    batch = make_batch(torch.tensor([5, 0, 0, 6]))
    assert batch.labels.tolist() == [0, 0, 6]
    assert batch.position.tolist() == [0, 0, 0]


def test_batches_keep_all_leading_axes() -> None:
    window = windows(0, 2, 3, 9)
    batch = make_batch(window)
    assert torch.equal(batch.position[1, 2], document_position(window[1, 2, :-1]))
    assert all(leaf.is_contiguous() and leaf.shape == (2, 3, 8) for leaf in batch)
