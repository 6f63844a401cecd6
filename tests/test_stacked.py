"""Stacking and unstacking as operations, and in a step whose state is written in place."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hymo import tree
from hymo.jit import jit
from hymo.stacked import stack, unstack


def test_stack_and_unstack_are_torchs() -> None:
    parts = [torch.randn(2, 3).T for _ in range(4)]
    assert torch.equal(stack(parts), torch.stack(parts))
    found = unstack(torch.stack(parts))
    assert all(torch.equal(a, b) for a, b in zip(found, parts, strict=True))
    assert len({x.untyped_storage().data_ptr() for x in found}) == 4


@pytest.mark.parametrize("dims", [(0, 0), (1, None), (None, 2)])
def test_under_vmap_they_are_a_loop(dims: tuple[int | None, ...]) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first, second = unstack(3 * stack([x, y]))
        return first - second

    x, y = (torch.randn(2, 3) if dim is None else torch.randn(4, 2, 3).movedim(0, dim) for dim in dims)
    want = [
        f(x if dims[0] is None else x.select(dims[0], i), y if dims[1] is None else y.select(dims[1], i))
        for i in range(4)
    ]
    assert torch.equal(torch.func.vmap(f, in_dims=dims)(x, y), torch.stack(want))


def step(state: Any, x: Tensor) -> Any:
    """Moves two lists of leaves as stacks, and returns what there was before in many ways."""
    weights, moments, count = state
    w, m = stack(weights), stack(moments)
    m = 0.9 * m + x.sum()
    moved = w - m
    beside = {
        "a leaf": weights[1],
        "a sum": weights[2].sum(),
        "a choice": torch.where(x.sum() > 0, 2 * weights[0], weights[0]),
        "of the new": (moved.sum(), moved[0] * 1.0, torch.linalg.vector_norm(m)),
        "a count": 0.1 * count,
    }
    return (unstack(moved), unstack(m), count + 1), beside


@pytest.mark.parametrize("mode", ["none", "aot_eager", "inductor"])
def test_a_donated_state_is_written_and_what_was_there_before_is_returned(mode: Any) -> None:
    def state() -> Any:
        draw = torch.Generator().manual_seed(0)
        first, second = ([torch.randn(3, 4, generator=draw) for _ in range(5)] for _ in range(2))
        return first, second, torch.tensor(3)

    compiled, wanted, found = jit(step, compile=mode, donate=True), state(), state()
    places = [leaf.data_ptr() for leaf in tree.leaves(found)]
    for i in range(3):
        x = torch.full((3,), i - 1.0)
        wanted, beside = step(wanted, x)
        found, got = compiled(found, x)
        assert [leaf.data_ptr() for leaf in tree.leaves(found)] == places
        tree.map(torch.testing.assert_close, (found, got), (wanted, beside))
