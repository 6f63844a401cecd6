"""Stacking and unstacking as operations, and parts that are written where they are wanted."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from hymo import tree
from hymo.jit import jit
from hymo.stacked import stack, unstack, write_in_place

hymo, copy = torch.ops.hymo, torch.ops.aten.copy_.default


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


def traced(f: Callable[..., Any]) -> fx.GraphModule:
    graph: fx.GraphModule = make_fx(f, tracing_mode="fake")([torch.zeros(2, 3) for _ in range(3)], torch.zeros(3, 2, 3))
    graph.graph.eliminate_dead_code()
    return graph


def copied(into: list[Tensor], parts: list[Tensor], order: tuple[int, ...] = (0, 1, 2)) -> None:
    for i in order:
        into[i].copy_(parts[i])


def backwards(into: list[Tensor], x: Tensor) -> list[Tensor]:
    copied(into, unstack(2 * x), (2, 0, 1))
    return [x + 1]


def given_back_too(into: list[Tensor], x: Tensor) -> list[Tensor]:
    copied(into, parts := unstack(2 * x))
    return [parts[1]]


def read_too(into: list[Tensor], x: Tensor) -> list[Tensor]:
    parts = unstack(2 * x)
    total = parts[2].sum()
    copied(into, parts)
    return [total]


def one_left_out(into: list[Tensor], x: Tensor) -> list[Tensor]:
    copied(into, unstack(2 * x), (0, 2))
    return [x + 1]


def targets(graph: fx.GraphModule) -> list[Any]:
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def test_parts_that_are_only_copied_are_written_at_once_and_last() -> None:
    graph = traced(backwards)
    assert targets(graph).count(copy) == 3
    write_in_place(graph.graph)
    graph.graph.lint()
    graph.recompile()
    assert targets(graph)[-1] is hymo.unstack_into.default
    assert not {copy, hymo.unstack.default} & set(targets(graph))
    into, x = [torch.zeros(2, 3) for _ in range(3)], torch.randn(3, 2, 3)
    assert torch.equal(graph(into, x)[0], x + 1)
    assert torch.equal(torch.stack(into), 2 * x)


@pytest.mark.parametrize("f", [given_back_too, read_too, one_left_out])
def test_a_stack_with_a_part_that_is_used_otherwise_stays_as_it_is(f: Callable[..., Any]) -> None:
    graph = traced(f)
    before = str(graph.graph)
    write_in_place(graph.graph)
    assert str(graph.graph) == before


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


def test_inductor_writes_every_stack_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[fx.Graph] = []
    # A program from a cache would be seen by no pass.
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    monkeypatch.setattr("hymo.stacked.write_in_place", lambda graph: seen.append(graph) or write_in_place(graph))
    leaves = [torch.ones(2, 7) for _ in range(6)]
    jit(lambda state: (unstack(3 * stack(state)),), donate=True)(leaves)
    (graph,) = seen
    called = [node.target for node in graph.nodes if node.op == "call_function"]
    assert called.count(hymo.unstack_into.default) == 1
    assert copy not in called
    assert all(torch.equal(leaf, torch.full((2, 7), 3.0)) for leaf in leaves)
