"""Products of groups of rows, each group with a matrix of its own."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from hymo_kernels.primitive import differentiable


def grouped_linear(
    x: Float[Tensor, "g r d"], w: Float[Tensor, "e d f"], ends: Int[Tensor, "g e"]
) -> Float[Tensor, "g r f"]:
    """The rows before the first of `ends` times the first matrix, those from there to the second times the second, ...

    A group may be empty. Rows behind the last one belong to none: whatever they hold enters nothing, and what the
    result and the gradient of `x` hold there is undefined, NaN included, so that nothing may read it.

    Args:
        x: dense, rows a multiple of 16 bytes long, as are those of `w`. The leading axis is where `vmap` folds its own.
        ends: int32, ascending, at most r.

    Source: `torch.nn.functional.grouped_mm`, which waits for the CPU on a GPU that is not a Hopper or a Blackwell, and
    on a Blackwell gives an empty group a gradient that is not zero (pytorch#172439).
    """
    y: Tensor = _grouped(x, w, ends)
    return y


def _forward(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return _stacked([F.grouped_mm(x[i], w, offs=ends[i]) for i in range(len(x))])


def _backward(
    needs: tuple[bool, ...], arguments: tuple[Any, ...], outputs: tuple[Any, ...], grads: tuple[Any, ...]
) -> tuple[Tensor | None, ...]:
    x, w, ends = arguments
    dy = grads[0].contiguous()
    dx = dw = None
    if needs[0]:
        dx = _forward(dy, w.mT, ends)
    if needs[1]:
        products = [F.grouped_mm(x[i].mT, dy[i], offs=ends[i]) for i in range(len(x))]
        dw = functools.reduce(torch.add, products)
    return dx, dw, None


def _stacked(each: list[Tensor]) -> Tensor:
    """Without a copy where there is but one."""
    return torch.stack(each) if len(each) > 1 else each[0][None]


_grouped = differentiable(_forward, _backward, save=(0, 1, 2), shared=(1,))
