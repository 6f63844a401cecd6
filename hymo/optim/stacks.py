"""Tensors of one shape as one: an update of hundreds of parameters becomes that of a few stacks.

Stacking and unstacking are operations that a compiler does not look into: it would write a kernel of its own for each
place in each stack, and compile for minutes.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from hymo import tree
from hymo.params import is_spec
from hymo_kernels.primitive import define

T = TypeVar("T")


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


class Stacks:
    """Leaves that are moved together: those whose declarations have one shape and one role, if they are not large.

    Where they are joined, the first of them holds the stack and the others are holes, so that a joined tree is worked
    on like any other.

    Args:
        spec: the declarations of all leaves.
        largest: elements of a leaf that is still worth copying.
    """

    def __init__(self, spec: Any, *, largest: int) -> None:
        self.spec = spec
        classes: dict[Any, list[int]] = {}
        for i, leaf in enumerate(tree.leaves(spec, is_leaf=is_spec)):
            if leaf.size <= largest:
                classes.setdefault((leaf.shape, leaf.role), []).append(i)
        self.classes = [members for members in classes.values() if len(members) > 1]

    def join(self, each: T) -> T:
        """A tree of the declarations' structure, holes allowed, with the members of a class stacked."""
        values = self._values(each)
        for first, *others in self.classes:
            if not tree.is_hole(values[first]):
                values[first] = stack([values[i] for i in (first, *others)])
                values |= dict.fromkeys(others, ())
        joined: T = self._tree(values)
        return joined

    def split(self, each: T) -> T:
        """What `join` was given."""
        values = self._values(each)
        for members in self.classes:
            if not tree.is_hole(values[members[0]]):
                values |= zip(members, unstack(values[members[0]]), strict=True)
        apart: T = self._tree(values)
        return apart

    def _values(self, each: Any) -> dict[int, Any]:
        values: list[Any] = []
        tree.map(lambda leaf, value: values.append(value), self.spec, each, is_leaf=is_spec)
        return dict(enumerate(values))

    def _tree(self, values: dict[int, Any]) -> Any:
        places = iter(range(len(values)))
        return tree.map(lambda leaf: values[next(places)], self.spec, is_leaf=is_spec)


def everywhere(f: Callable[[T], T], state: Any, kind: type[T]) -> Any:
    """A tree in which `f` has been applied to every subtree of a kind."""

    def is_kind(node: Any) -> bool:
        return isinstance(node, kind)

    return tree.map(lambda node: f(node) if is_kind(node) else node, state, is_leaf=is_kind)
