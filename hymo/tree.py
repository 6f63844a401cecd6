"""Trees: NamedTuples, tuples and dicts of tensors, addressed by dotted paths. The hole in a tree is `()`."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

T = TypeVar("T")

leaves = pytree.tree_leaves
flatten = pytree.tree_flatten
unflatten = pytree.tree_unflatten


def map(f: Callable[..., Any], tree: T, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> T:
    """The tree of `f(leaf, *rest_leaves)`, of `tree`'s structure."""
    mapped: T = pytree.tree_map(f, tree, *rest, is_leaf=is_leaf)
    return mapped


def path_of(keys: tuple[Any, ...]) -> str:
    """The dotted name of a leaf, e.g. `layers.3.mixer.q`: what checkpoints, tables and errors call it."""
    return ".".join(str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in keys)


def paths(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Leaves by dotted path, in the tree's order."""
    return {path_of(keys): leaf for keys, leaf in pytree.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]}


def is_hole(node: Any) -> bool:
    """Whether a node is the empty tuple that `partition` leaves where another tree holds the leaf."""
    return type(node) is tuple and not node


def combine(first: T, second: Any) -> T:
    """Fills the holes of `first` with the leaves of `second`."""
    return map(lambda a, b: b if is_hole(a) else a, first, second, is_leaf=is_hole)


def select(condition: Tensor, new: T, old: T) -> T:
    """`new` where the scalar `condition` holds, else `old`, leaf by leaf and without a branch."""
    return map(lambda n, o: torch.where(condition, n, o), new, old)


def add(first: T, second: Any) -> T:
    """The sum of two trees."""
    return map(torch.add, first, second)


def global_norm(tree: Any) -> Tensor:
    """Euclidean norm of all leaves taken as one vector, rounded to fp32 once."""
    return sum_of_squares(tree).sqrt().float()


def sum_of_squares(tree: Any) -> Tensor:
    """Of all leaves; in fp64, so that it does not matter how they are split and in which order they are added."""
    norms = [torch.linalg.vector_norm(leaf, dtype=torch.float64) for leaf in leaves(tree)]
    return torch.stack(norms).square().sum()


def stack(trees: list[T]) -> T:
    """One tree whose leaves have a new first axis: what `vmap` maps over to train a population."""
    return map(lambda *leaves: torch.stack(leaves), trees[0], *trees[1:])


def write_into(old: Any, new: Any) -> None:
    """Copies `new` into the storage of `old`: the one in-place write of a step (donation)."""
    torch._foreach_copy_(leaves(old), leaves(new))
