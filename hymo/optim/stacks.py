"""Parameters of one shape as one: an update of hundreds becomes that of a few stacks."""

from collections.abc import Callable
from typing import Any, TypeVar

from hymo import tree
from hymo.params import is_spec
from hymo.stacked import stack, unstack

T = TypeVar("T")


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
