"""Adam and decoupled weight decay."""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hymo import tree
from hymo.optim.transform import GradientTransform, Step, accumulators, stateless


class AdamState(NamedTuple):
    """What Adam remembers of the gradients."""

    taken: Int[Tensor, ""]  # steps, int32: unlike the global step, without those that were skipped
    mean: Any  # of the gradient, fp32 at least
    square: Any  # of the squared gradient, fp32 at least


def scale_by_adam(b1: float, b2: float, *, eps: float) -> GradientTransform:
    """The gradient's running mean over the root of its running square, both corrected for their start at 0.

        m = b1 m + (1 - b1) g
        v = b2 v + (1 - b2) g^2
        u = m / (1 - b1^n) / (sqrt(v / (1 - b2^n)) + eps)      n = steps taken

    Args:
        b1: retention of the mean, in [0, 1).
        b2: retention of the square, in [0, 1).
        eps: keeps u finite; in units of the gradient.

    Source: Kingma, Ba 2015, arXiv:1412.6980.
    """

    def init(params: Any) -> AdamState:
        taken = torch.zeros((), dtype=torch.int32, device=tree.leaves(params)[0].device)
        return AdamState(taken, accumulators(params), accumulators(params))

    def update(grads: Any, state: AdamState, params: Any, step: Step) -> tuple[Any, AdamState]:
        del params, step
        taken = state.taken + 1
        mean = tree.map(lambda m, g: torch.lerp(m, g, 1 - b1), state.mean, grads)
        square = tree.map(lambda v, g: torch.addcmul(v * b2, g, g, value=1 - b2), state.square, grads)
        filled_mean, filled_square = filled(b1, taken), filled(b2, taken)
        updates = tree.map(lambda m, v: (m / filled_mean) / ((v / filled_square).sqrt() + eps), mean, square)
        return updates, AdamState(taken, mean, square)

    return GradientTransform(init, update)


def add_weight_decay(rate: float, *, cautious: bool) -> GradientTransform:
    """`u + rate x`, where cautious decay leaves out the entries that the update already pulls away from 0.

    Put it after everything that sets the direction and before the learning rate, which scales both: the parameter
    moves by `-lr (u + rate 1[u x >= 0] x)`. At u = 0 it decays.

    Args:
        rate: fraction of a parameter that a step of learning rate 1 removes.

    Source: Loshchilov, Hutter 2019, arXiv:1711.05101; cautious: arXiv:2510.12402, Algorithm 1.
    """

    def decay(u: Tensor, x: Tensor) -> Tensor:
        decayed = torch.add(u, x, alpha=rate)
        return torch.where(u * x >= 0, decayed, u) if cautious else decayed

    return stateless(lambda updates, params: tree.map(decay, updates, params) if rate else updates)


def filled(beta: float, taken: Int[Tensor, ""]) -> Float[Tensor, ""]:
    """`1 - beta^taken`: the weight of all gradients so far in a running mean that starts at 0, which has the rest."""
    # The difference of powers would lose digits for beta near 1.
    return -torch.expm1(taken * (math.log(beta) if beta else -math.inf))
