"""`silu(gate) * up` of gate and up side by side, in rows of which only the first are filled."""

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from hymo_kernels.primitive import define, differentiable

HAS_TRITON = importlib.util.find_spec("triton") is not None

BLOCK_R, BLOCK_F, WARPS = 4, 256, 4
"""Rows and columns of a program: of each of its tensors a thread has 16 bytes."""


def gated(y: Float[Tensor, "g r ff"], ends: Int[Tensor, "g e"]) -> Float[Tensor, "g r f"]:
    """`silu(gate) * up` of gate and up side by side; its gradient needs Triton on a GPU.

    Args:
        ends: int32; rows from the last of them on are empty. What the gradient of `y` holds there is undefined, NaN
            included, so that nothing may read it.
    """
    h: Tensor = _gated(y, ends)
    return h


def _forward(y: Tensor, ends: Tensor) -> Tensor:
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate) * up


def definition(y: Tensor, dh: Tensor, ends: Tensor) -> Tensor:
    """The gradient of `y`, computed in fp32, of all rows."""
    gate, up = y.float().chunk(2, dim=-1)
    s = torch.sigmoid(gate)
    # The slope of silu first: it is finite for all gates.
    return torch.cat([dh * up * (s * (1 + gate * (1 - s))), dh * (gate * s)], dim=-1).to(y.dtype)


def backward(y: Tensor, dh: Tensor, ends: Tensor) -> Tensor:
    """The same of filled rows, on a GPU."""
    from hymo_kernels.device.gated import gated_backward_kernel

    y, dh, ends = y.contiguous(), dh.contiguous(), ends.contiguous()
    (rows, width), dy = dh.shape[1:], torch.empty_like(y)
    grid = (-(-rows // BLOCK_R) * -(-width // BLOCK_F),)
    sizes = {"E": ends.shape[1], "F": width, "BLOCK_R": BLOCK_R, "BLOCK_F": BLOCK_F, "num_warps": WARPS}
    with torch.cuda.device(y.get_device()):
        for group in zip(y, dh, ends, dy, strict=True):
            gated_backward_kernel[grid](*group, **sizes)
    return dy


# A raw op: a compiler that joins both halves computes both for either.
BACKWARD = define(
    "gated_backward(Tensor y, Tensor dh, Tensor ends) -> Tensor",
    fake=lambda y, dh, ends: y.new_empty(y.shape),
    cpu=definition,
    cuda=backward,
)


def _backward(
    needs: tuple[bool, ...], arguments: tuple[Any, ...], outputs: tuple[Any, ...], grads: tuple[Any, ...]
) -> tuple[Tensor | None, ...]:
    y, ends = arguments
    return BACKWARD(y, grads[0], ends), None


_gated = differentiable(_forward, _backward, save=(0, 1))
