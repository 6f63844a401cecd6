"""Tensors of one shape as one and back, by operations that a compiler does not look into.

It would write a kernel of its own for each place in each stack, and compile for minutes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hymo_kernels.primitive import define


def _stack_mapped(info: Any, dims: Any, parts: list[Tensor]) -> tuple[Tensor, int]:
    every = [
        part.expand(info.batch_size, *part.shape) if dim is None else part.movedim(dim, 0)
        for part, dim in zip(parts, dims[0], strict=True)
    ]
    return stack(every), 1


def _parts(x: Tensor) -> list[Tensor]:
    parts = [x.new_empty(x.shape[1:]) for _ in range(x.shape[0])]
    # One launch for many, where a copy of each would be a launch of its own.
    torch._foreach_copy_(parts, list(x.unbind()))
    return parts


def _unstack_mapped(info: Any, dims: Any, x: Tensor) -> tuple[list[Tensor], list[int]]:
    parts = unstack(x.movedim(dims[0], 1))
    return parts, [0] * len(parts)


_stack = define(
    "stack(Tensor[] parts) -> Tensor",
    fake=lambda parts: parts[0].new_empty(len(parts), *parts[0].shape),
    cpu=torch.stack,
    cuda=torch.stack,
    vmap=_stack_mapped,
)
_unstack = define(
    "unstack(Tensor stack) -> Tensor[]",
    fake=lambda x: [x.new_empty(x.shape[1:]) for _ in range(x.shape[0])],
    cpu=_parts,
    cuda=_parts,
    vmap=_unstack_mapped,
)


def stack(parts: Sequence[Tensor]) -> Tensor:
    """`torch.stack`, opaque to compilers and without a gradient."""
    stacked: Tensor = _stack(list(parts))
    return stacked


def unstack(x: Tensor) -> list[Tensor]:
    """The tensors of a stack, each in storage of its own; opaque to compilers and without a gradient."""
    parts: list[Tensor] = _unstack(x)
    return parts
