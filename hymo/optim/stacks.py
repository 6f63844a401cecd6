"""Tensors of one shape as one: an update of hundreds of parameters becomes that of a few stacks.

Stacking and unstacking are operations that a compiler does not look into: it would write a kernel of its own for each
place in each stack, and compile for minutes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hymo import tree
from hymo.optim.transform import GradientTransform, Step
from hymo_kernels.primitive import define


def _stack_mapped(info: Any, dims: Any, parts: list[Tensor]) -> tuple[Tensor, int]:
    every = [
        part.expand(info.batch_size, *part.shape) if dim is None else part.movedim(dim, 0)
        for part, dim in zip(parts, dims[0], strict=True)
    ]
    return stack(every), 1


def _parts(x: Tensor) -> list[Tensor]:
    return [part.clone(memory_format=torch.contiguous_format) for part in x.unbind()]


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


def stacked(transform: GradientTransform, *, largest: int) -> GradientTransform:
    """The same transform of the same numbers, given leaves of one shape and dtype as one stack; its state is unstacked.

    For transforms that treat every number alike, wherever it stands.

    Args:
        largest: elements of a leaf that is still worth copying; larger ones stay by themselves.
    """

    def update(grads: Any, state: Any, params: Any, step: Step) -> tuple[Any, Any]:
        leaves, structure = tree.flatten(grads)
        stacks: dict[Any, list[int]] = {}
        for i, leaf in enumerate(leaves):
            stacks.setdefault((leaf.shape, leaf.dtype) if leaf.numel() <= largest else i, []).append(i)

        def together(each: Any) -> dict[int, Tensor]:
            found = tree.leaves(each)
            return {m[0]: stack([found[i] for i in m]) if m[1:] else found[m[0]] for m in stacks.values()}

        def apart(held: dict[int, Tensor]) -> Any:
            parts = {
                i: part
                for m in stacks.values()
                for i, part in zip(m, unstack(held[m[0]]) if m[1:] else (held[m[0]],), strict=True)
            }
            return tree.unflatten([parts[i] for i in range(len(leaves))], structure)

        def unstacked(node: Any) -> bool:
            return bool(tree.flatten(node)[1] == structure)

        def held(node: Any) -> bool:
            return isinstance(node, dict) and list(node) == [m[0] for m in stacks.values()]

        before = tree.map(lambda node: together(node) if unstacked(node) else node, state, is_leaf=unstacked)
        updates, after = transform.update(together(grads), before, together(params), step)
        return apart(updates), tree.map(lambda node: apart(node) if held(node) else node, after, is_leaf=held)

    return GradientTransform(transform.init, update)
