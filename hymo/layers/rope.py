"""Rotary positions, from the positions themselves: no table is kept, so there is none to be too short or too coarse."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def rotate(
    x: Float[Tensor, "b t h k"], position: Int[Tensor, "b t"], *, dims: int, theta: float
) -> Float[Tensor, "b t h k"]:
    """Rotates the first `dims` features of every head by angles `position * theta^(-2i/dims)`; the rest pass.

    Feature i is paired with i + dims/2. Angles and rotation are fp32: bf16 merges neighbouring positions beyond 256.

    Args:
        position: index of the token in its document.
        dims: even number of rotated features, at most k.
        theta: base of the wavelengths, in positions.

    Source: Su et al. 2021, arXiv:2104.09864.
    """
    if dims == 0:
        return x
    frequency = theta ** (-torch.arange(0, dims, 2, device=x.device, dtype=torch.float32) / dims)
    angle = position[..., None, None].float() * frequency
    cos, sin = angle.cos(), angle.sin()
    first, second, rest = torch.split(x, [dims // 2, dims // 2, x.shape[-1] - dims], dim=-1)
    a, b = first.float(), second.float()
    return torch.cat([(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), rest], dim=-1)
