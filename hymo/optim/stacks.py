"""Parameters of one shape as one: an update of hundreds becomes that of a few stacks.

A training state is kept joined. Layers and checkpoints see its parts, which are views, so that from step to step no
parameter and no moment is copied to join or to split it; only gradients are.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from hymo import tree
from hymo.params import is_spec
from hymo.stacked import stack, unstack

T = TypeVar("T")

ALIGNED = 4
"""Elements of fp32 in the 16 bytes at whose multiples kernels want what they read to begin."""


class Stacks:
    """Leaves that are moved together: those whose declarations have one shape and one role, if they are not large.

    Where they are joined, the first of them holds the stack and the others are holes, so that a joined tree is worked
    on like any other. What is joined or split is every tree of the declarations' structure within what is given.

    Args:
        spec: the declarations of all leaves, a NamedTuple; its buffers stay by themselves.
        largest: elements of a leaf that is still worth copying: gradients are joined in every step.
    """

    def __init__(self, spec: Any, *, largest: int) -> None:
        self.spec = spec
        self.names = list(tree.paths(spec, is_leaf=is_spec))
        self.specs = tree.leaves(spec, is_leaf=is_spec)
        classes: dict[Any, list[int]] = {}
        for i, leaf in enumerate(self.specs):
            if leaf.role != "buffer" and leaf.size <= largest:
                classes.setdefault((leaf.shape, leaf.role), []).append(i)
        self.classes = [members for members in classes.values() if len(members) > 1]

    def join(self, state: T) -> T:
        """The members of a class stacked, holes allowed."""

        def join(values: list[Any]) -> None:
            for first, *others in self.classes:
                if not tree.is_hole(values[first]):
                    values[first] = stack([values[first], *(values[i] for i in others)])
                    for i in others:
                        values[i] = ()

        return self._everywhere(join, state)

    def split(self, state: T) -> T:
        """What `join` was given, as views of what it made.

        Raises:
            ValueError: if a class is not joined.
        """
        return self._everywhere(lambda values: self._split(values, copied=lambda leaf: False), state)

    def parts(self, state: T) -> T:
        """Likewise, as kernels want it: where a member would not begin at a multiple of 16 bytes, copies of a class."""
        return self._everywhere(lambda values: self._split(values, copied=lambda leaf: leaf.size % ALIGNED != 0), state)

    def _split(self, values: list[Any], *, copied: Callable[[Any], bool]) -> None:
        for members in self.classes:
            joined, leaf = values[members[0]], self.specs[members[0]]
            if tree.is_hole(joined):
                continue
            if joined.ndim == len(leaf.shape):
                raise ValueError(
                    f"{self.names[members[0]]} {list(joined.shape)} is not joined with the {len(members) - 1} others of"
                    " its shape and role: make the state with `init_train_state` for the same backend"
                )
            parts = unstack(joined) if copied(leaf) else joined.unbind()
            for i, part in zip(members, parts, strict=True):
                values[i] = part

    def _everywhere(self, change: Callable[[list[Any]], None], state: T) -> T:
        kind = type(self.spec)

        def changed(node: Any) -> Any:
            if not isinstance(node, kind):
                return node
            values: list[Any] = []
            tree.map(lambda leaf, value: values.append(value), self.spec, node, is_leaf=is_spec)
            change(values)
            places = iter(values)
            return tree.map(lambda leaf: next(places), self.spec, is_leaf=is_spec)

        everywhere: T = tree.map(changed, state, is_leaf=lambda node: isinstance(node, kind))
        return everywhere
