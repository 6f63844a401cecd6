"""Normalisations, computed in fp32 and returned in the input's dtype."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def rms_norm(x: Float[Tensor, "*b d"], weight: Float[Tensor, " d"], *, eps: float) -> Float[Tensor, "*b d"]:
    """`weight * x / sqrt(mean(x^2) + eps)`  (Zhang, Sennrich 2019, arXiv:1910.07467)."""
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight).to(x.dtype)


def gated_rms_norm(
    x: Float[Tensor, "*b d"], gate: Float[Tensor, "*b d"], weight: Float[Tensor, " d"], *, eps: float
) -> Float[Tensor, "*b d"]:
    """`rms_norm(x) * silu(gate)`: how a linear-attention head is read out  (arXiv:2412.06464, section 3.4)."""
    return (rms_norm(x.float(), weight, eps=eps) * F.silu(gate.float())).to(x.dtype)
