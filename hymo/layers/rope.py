"""Rotary positions, from the positions themselves: no table is kept, so there is none to be too short or too coarse."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hymo_kernels import rotated


class Rotary(NamedTuple):
    """Cosines and sines of the angles of every token's pairs of features; they carry no gradient."""

    cos: Float[Tensor, "b t 1 i"]
    sin: Float[Tensor, "b t 1 i"]


def rotary(position: Int[Tensor, "b t"], *, dims: int, theta: float) -> Rotary:
    """The angles `position * theta^(-2i/dims)`, in fp32: bf16 merges neighbouring positions beyond 256.

    Args:
        position: index of the token in its document.
        dims: even number of rotated features.
        theta: base of the wavelengths, in positions.
    """
    frequency = theta ** (-torch.arange(0, dims, 2, device=position.device, dtype=torch.float32) / max(dims, 1))
    angle = position[..., None, None].float() * frequency
    return Rotary(angle.cos(), angle.sin())


def rotate(x: Float[Tensor, "b t h k"], by: Rotary) -> Float[Tensor, "b t h k"]:
    """Rotates the first features of every head, as many as there are angles for, in fp32; the rest pass.

    Feature i is paired with i + dims/2.

    Source: Su et al. 2021, arXiv:2104.09864.
    """
    return rotated(x, *by)
