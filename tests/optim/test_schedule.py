"""The schedule as a table: exact at every boundary, a pure function of the step tensor."""

import math
from typing import Literal

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hymo.optim import scale_by_learning_rate, wsd

Decay = Literal["linear", "cosine", "1-sqrt"]


def expected(step: int, warmup: int, stable: int, decay: int, low: float, shape: Decay) -> float:
    """The definition, with branches."""
    if step < warmup:
        return (step + 1) / warmup
    if step < warmup + stable:
        return 1.0
    if step >= warmup + stable + decay:
        return low
    x = (step - warmup - stable + 1) / decay
    height = {"linear": 1 - x, "cosine": (1 + math.cos(math.pi * x)) / 2, "1-sqrt": 1 - math.sqrt(x)}[shape]
    return low + (1 - low) * height


@given(
    warmup=st.integers(0, 40),
    stable=st.integers(0, 40),
    decay=st.integers(0, 40),
    low=st.sampled_from([0.0, 0.05, 1.0]),
    shape=st.sampled_from(["linear", "cosine", "1-sqrt"]),
)
@example(warmup=0, stable=0, decay=1, low=0.05, shape="linear")
@example(warmup=0, stable=1, decay=0, low=0.05, shape="linear")
@example(warmup=1, stable=0, decay=0, low=0.05, shape="linear")
def test_schedule_equals_its_definition_at_every_step(
    warmup: int, stable: int, decay: int, low: float, shape: Decay
) -> None:
    total = warmup + stable + decay
    factor = wsd(total, warmup, stable_steps=stable, decay_steps=decay, min_ratio=low, decay=shape)
    for step in range(total + 3):
        wanted = expected(step, warmup, stable, decay, low, shape)
        assert factor(torch.tensor(step)).item() == pytest.approx(wanted, abs=2e-7)


@pytest.mark.parametrize("shape", ["linear", "cosine", "1-sqrt"])
def test_boundaries_of_the_full_run_are_exact(shape: Decay) -> None:
    factor = wsd(57220, 1144, stable_steps=47493, decay_steps=8583, min_ratio=0.25, decay=shape)
    at = {step: factor(torch.tensor(step)).item() for step in (0, 1142, 1143, 1144, 48636, 48700, 57218, 57219, 10**7)}
    assert at[0] == pytest.approx(1 / 1144)
    assert at[1142] < at[1143] == at[1144] == at[48636] == 1.0 > at[48700]
    assert at[57218] > at[57219] == at[10**7] == 0.25


@pytest.mark.parametrize("parts", [(10, 3, 3, 3), (10, -1, 8, 3), (10, 11, 0, 0)])
def test_parts_that_are_not_the_whole_run_are_an_error(parts: tuple[int, int, int, int]) -> None:
    total, warmup, stable, decay = parts
    with pytest.raises(ValueError, match="add up to 10 steps"):
        wsd(total, warmup, stable_steps=stable, decay_steps=decay, min_ratio=0.0, decay="linear")


def test_learning_rate_is_peak_times_factor_and_moves_against_the_update() -> None:
    schedule = wsd(10, 4, stable_steps=4, decay_steps=2, min_ratio=0.0, decay="linear")
    transform = scale_by_learning_rate(0.5, schedule)
    params = {"w": torch.tensor([1.0, -2.0])}
    state = transform.init(params)
    assert state.peak.dtype == torch.float32
    for step, rate in ((0, 0.125), (3, 0.5), (8, 0.25), (9, 0.0)):
        updates, state = transform.update(params, state, params, torch.tensor(step))
        assert updates["w"].tolist() == [-rate, 2 * rate]
