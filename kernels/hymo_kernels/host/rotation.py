"""Rotary positions applied to heads."""

import torch
from jaxtyping import Float
from torch import Tensor


def rotated(
    x: Float[Tensor, "b t h k"], cos: Float[Tensor, "b t 1 i"], sin: Float[Tensor, "b t 1 i"]
) -> Float[Tensor, "b t h k"]:
    """Rotates the first features of every head, as many as there are angles for, in fp32 or wider; the rest pass.

    Feature i is paired with i + half, of half angles.

    Args:
        cos, sin: of every token's angles; they get no gradient.

    Source: Su et al. 2021, arXiv:2104.09864.
    """
    half = cos.shape[-1]
    if half == 0:
        return x
    cos, sin = cos.detach(), sin.detach()
    first, second, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    a, b = (each.to(torch.promote_types(x.dtype, torch.float32)) for each in (first, second))
    return torch.cat([(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), rest], dim=-1)
