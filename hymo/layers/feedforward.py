"""The gated feed-forward."""

from typing import NamedTuple

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from hymo.params import matrix


class SwigluParams(NamedTuple):
    """Weights of one SwiGLU feed-forward."""

    gate: Float[Tensor, "d f"] = matrix(inputs="d")
    up: Float[Tensor, "d f"] = matrix(inputs="d")
    down: Float[Tensor, "f d"] = matrix(inputs="f", residual=True)


def swiglu(p: SwigluParams, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    """`down(silu(gate x) * up x)`  (Shazeer 2020, arXiv:2002.05202)."""
    return (F.silu(x @ p.gate) * (x @ p.up)) @ p.down
