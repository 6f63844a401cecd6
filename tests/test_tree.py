"""Trees: names, holes, and arithmetic on all leaves at once."""

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hymo import tree


class Pair(NamedTuple):
    """A node with two fields."""

    left: Any
    right: Any


def random_tree(seed: int) -> Pair:
    """Every kind of node, and a part that a configuration left out."""
    draw = torch.Generator().manual_seed(seed)
    return Pair(
        left=(torch.randn(3, generator=draw), {"a": torch.randn(2, 2, generator=draw)}, ()),
        right=Pair(torch.randn((), generator=draw), torch.randn(4, generator=draw)),
    )


def same(first: Any, second: Any) -> bool:
    pairs = zip(tree.leaves(first), tree.leaves(second), strict=True)
    return tree.flatten(first)[1] == tree.flatten(second)[1] and all(torch.equal(a, b) for a, b in pairs)


def test_paths_name_every_leaf_in_the_order_of_the_leaves() -> None:
    x = random_tree(0)
    assert list(tree.paths(x)) == ["left.0", "left.1.a", "right.left", "right.right"]
    assert all(a is b for a, b in zip(tree.paths(x).values(), tree.leaves(x), strict=True))


def test_paths_follow_an_order_of_keys_that_is_not_alphabetical() -> None:
    assert list(tree.paths({"b": torch.ones(1), "a": torch.ones(1)})) == ["b", "a"]


@given(st.integers(0, 2**31), st.integers(0, 15))
def test_combine_undoes_any_split_into_holes(seed: int, chosen: int) -> None:
    x = random_tree(seed)
    leaves, structure = tree.flatten(x)
    first = tree.unflatten([leaf if chosen >> i & 1 else () for i, leaf in enumerate(leaves)], structure)
    second = tree.unflatten([() if chosen >> i & 1 else leaf for i, leaf in enumerate(leaves)], structure)
    assert same(tree.combine(first, second), x)
    assert same(tree.combine(second, first), x)


def test_a_part_that_is_left_out_in_both_stays_left_out() -> None:
    combined = tree.combine(Pair(torch.ones(1), ()), Pair((), ()))
    assert tree.is_hole(combined.right)


def test_map_passes_over_holes_and_keeps_them() -> None:
    mapped = tree.map(lambda a, b: a + b, Pair(torch.ones(1), ()), Pair(torch.ones(1), ()))
    assert mapped.left.item() == 2
    assert mapped.right == ()


def test_a_named_tuple_without_leaves_is_not_a_hole() -> None:
    class Empty(NamedTuple):
        pass

    assert tree.is_hole(())
    assert not tree.is_hole(Empty())
    assert not tree.is_hole([])


@given(st.integers(0, 2**31))
def test_select_takes_one_tree_whole_even_if_the_other_is_nan(seed: int) -> None:
    good = random_tree(seed)
    bad = tree.map(lambda x: torch.full_like(x, torch.nan), good)
    assert same(tree.select(torch.tensor(True), good, bad), good)
    assert same(tree.select(torch.tensor(False), bad, good), good)


@given(st.integers(0, 2**31))
def test_add_and_stack_act_leaf_by_leaf(seed: int) -> None:
    a, b = random_tree(seed), random_tree(seed + 1)
    stacked = tree.stack([a, b])
    assert same(tree.map(lambda x: x.sum(0), stacked), tree.add(a, b))
    assert same(tree.map(lambda x: x[1], stacked), b)


@given(st.integers(0, 2**31))
def test_global_norm_is_that_of_one_long_vector(seed: int) -> None:
    x = random_tree(seed)
    flat = torch.cat([leaf.flatten() for leaf in tree.leaves(x)]).double()
    torch.testing.assert_close(tree.global_norm(x).double(), flat.norm(), rtol=1e-6, atol=0)


def test_global_norm_adds_up_small_types_in_fp32() -> None:
    x = torch.full((4096,), 1.0, dtype=torch.bfloat16)
    assert tree.global_norm((x, x)).item() == pytest.approx(8192**0.5, rel=1e-6)
    assert tree.global_norm((x,)).dtype == torch.float32


def test_write_into_keeps_storage_and_takes_values() -> None:
    old, new = random_tree(0), random_tree(1)
    places = [leaf.data_ptr() for leaf in tree.leaves(old)]
    tree.write_into(old, new)
    assert same(old, new)
    assert places == [leaf.data_ptr() for leaf in tree.leaves(old)]
    assert not set(places) & {leaf.data_ptr() for leaf in tree.leaves(new)}


def test_stacked_trees_can_be_mapped_over() -> None:
    def norm(x: Pair) -> Tensor:
        return tree.global_norm(x)

    trees = [random_tree(seed) for seed in range(3)]
    norms = torch.func.vmap(norm)(tree.stack(trees))
    torch.testing.assert_close(norms, torch.stack([norm(x) for x in trees]))
