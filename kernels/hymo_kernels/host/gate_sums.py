"""Sums of gates inside a chunk, and the resets that cut them."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class GateSums(NamedTuple):
    """Exponents of the decay between the tokens of a chunk, and from the chunk's start."""

    between: Float[Tensor, "*n c c"]  # [i, j] = g_{j+1} + .. + g_i for j <= i, else 0
    linked: Bool[Tensor, "*n c c"]  # j <= i, and no reset after j up to i
    total: Float[Tensor, "*n c"]  # g_0 + .. + g_i
    open: Bool[Tensor, "*n c"]  # no reset up to i: the state that entered the chunk still counts


def gate_sums(g: Float[Tensor, "*n c"]) -> GateSums:
    """The sums of the finite gates; an infinite one is a reset, counts as 0 in every sum and gets no gradient.

    `between` adds up only the gates that it names. The usual difference of two running sums would carry the rounding of
    all gates before j (4e-4 after a gate of -1e4) and make its gradient a difference of a row and a column sum.
    """
    size = g.shape[-1]
    lower = torch.ones(size, size, dtype=torch.bool, device=g.device).tril()
    reset = g.isinf()
    segment = reset.cumsum(-1)
    g = torch.where(reset, 0, g)
    # Row i holds the gates up to i; the product with a constant adds up those after j.
    between = torch.where(lower, g[..., None, :], 0) @ lower.tril(-1).to(g.dtype)
    return GateSums(
        between=between,
        linked=lower & (segment[..., :, None] == segment[..., None, :]),
        total=g.cumsum(-1),
        open=segment == 0,
    )
