"""Products of groups of rows, each group with a matrix of its own."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from hymo_kernels.primitive import define, differentiable


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


def _product(x: Tensor, w: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    x, w = x.contiguous(), w.contiguous()
    each = w.mT if transposed else w
    return _stacked([F.grouped_mm(x[i], each, offs=ends[i]) for i in range(len(x))])


def _product_like(x: Tensor, w: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    return x.new_empty(*x.shape[:2], w.shape[1 if transposed else 2])


def _weight_gradient(x: Tensor, dy: Tensor, ends: Tensor) -> Tensor:
    x, dy = x.contiguous(), dy.contiguous()
    return functools.reduce(torch.add, [F.grouped_mm(x[i].mT, dy[i], offs=ends[i]) for i in range(len(x))])


def _weight_gradient_like(x: Tensor, dy: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[-1], x.shape[-1], dy.shape[-1])


# Raw ops: a compiler that chose in which order a transposed operand lies would have its groups begin anywhere, which
# the library's kernel refuses.
product = define(
    "grouped_product(Tensor x, Tensor w, Tensor ends, bool transposed) -> Tensor",
    fake=_product_like,
    cpu=_product,
    cuda=_product,
)
weight_gradient = define(
    "grouped_weight_gradient(Tensor x, Tensor dy, Tensor ends) -> Tensor",
    fake=_weight_gradient_like,
    cpu=_weight_gradient,
    cuda=_weight_gradient,
)


def _forward(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    y: Tensor = product(x, w, ends, False)
    return y


def _backward(
    needs: tuple[bool, ...], arguments: tuple[Any, ...], outputs: tuple[Any, ...], grads: tuple[Any, ...]
) -> tuple[Tensor | None, ...]:
    x, w, ends = arguments
    dx = product(grads[0], w, ends, True) if needs[0] else None
    dw = weight_gradient(x, grads[0], ends) if needs[1] else None
    return dx, dw, None


def _stacked(each: list[Tensor]) -> Tensor:
    """Without a copy where there is but one."""
    return torch.stack(each) if len(each) > 1 else each[0][None]


_grouped = differentiable(_forward, _backward, save=(0, 1, 2), shared=(1,))
