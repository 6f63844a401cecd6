"""The learning rate: a peak, which is state, times a factor, which is a pure function of the step."""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from hymo import tree
from hymo.optim.transform import GradientTransform, Step

Schedule = Callable[[Step], Float[Tensor, ""]]
Decay = Literal["linear", "cosine", "1-sqrt"]

DECAYS: dict[Decay, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + torch.cos(math.pi * x)) / 2,
    "1-sqrt": lambda x: 1 - x.sqrt(),
}
"""Height of the decay at progress x in [0, 1]; 1-sqrt: Hägele et al. 2024, arXiv:2405.18392."""


class LearningRateState(NamedTuple):
    """The peak learning rate, fp32: as state it is checkpointed, and a population can hold many."""

    peak: Float[Tensor, ""]


def wsd(
    total_steps: int, warmup_steps: int, *, stable_steps: int, decay_steps: int, min_ratio: float, decay: Decay
) -> Schedule:
    """The factor on the peak at a step counted from 0: warm-up, stable, decay.

    Warm-up ends at 1 on its last step and never gives 0, the decay ends at `min_ratio` on the last step of the run,
    and every step after it has `min_ratio`. Any of the three parts may be empty.

    Args:
        total_steps: length of the run, the sum of the three parts.

    Raises:
        ValueError: if the parts are negative or do not add up to `total_steps`.

    Source: Hu et al. 2024 (MiniCPM), arXiv:2404.06395.
    """
    parts = {"warm-up": warmup_steps, "stable": stable_steps, "decay": decay_steps}
    if min(parts.values()) < 0 or sum(parts.values()) != total_steps:
        raise ValueError(f"wsd: the parts {parts} must be at least 0 and add up to {total_steps} steps")
    height = DECAYS[decay]

    def factor(step: Step) -> Float[Tensor, ""]:
        done = step.float() + 1
        warm = (done / max(warmup_steps, 1)).clamp(max=1.0)
        progress = ((done - (total_steps - decay_steps)) / max(decay_steps, 1)).clamp(0.0, 1.0)
        return warm * (min_ratio + (1 - min_ratio) * height(progress))

    return factor


def scale_by_learning_rate(peak: float, schedule: Schedule) -> GradientTransform:
    """`-peak * schedule(step) * u`: what is added to the parameters."""

    def init(params: Any) -> LearningRateState:
        return LearningRateState(torch.tensor(peak, dtype=torch.float32, device=tree.leaves(params)[0].device))

    def update(updates: Any, state: LearningRateState, params: Any, step: Step) -> tuple[Any, LearningRateState]:
        del params
        rate = -state.peak * schedule(step)
        return tree.map(lambda u: u * rate, updates), state

    return GradientTransform(init, update)
