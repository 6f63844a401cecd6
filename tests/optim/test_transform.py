"""Chaining, routing by role, clipping, and adding: the parts that every optimiser is made of."""

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Float
from torch import Tensor

from hymo import tree
from hymo.optim import Group, apply_updates, by_group, chain, clip, scale_by_adam
from hymo.optim.transform import stateless
from hymo.params import buffer, declare, embed, gate, initialize, matrix, normal, partition, vector

STEP = torch.tensor(0)


class Toy(NamedTuple):
    """One parameter of each of four roles."""

    table: Float[Tensor, "s d"] = embed(inputs="d", init=normal(0.1))
    weight: Float[Tensor, "d f"] = matrix(inputs="d")
    router: Float[Tensor, "d e"] = gate(inputs="d")
    scale: Float[Tensor, "d"] = vector(normal(1.0))


class Buffered(NamedTuple):
    """One buffer."""

    bias: Float[Tensor, "d"] = buffer(normal(1.0))


SPEC = declare(Toy, {"s": 5, "d": 3, "f": 4, "e": 2})


def times(factor: float) -> Any:
    return stateless(lambda grads, params: tree.map(lambda g: factor * g, grads))


def toy_groups() -> dict[str, Group]:
    return {
        "twice": Group(("matrix", "gate"), times(2.0)),
        "half": Group(("embed",), times(0.5)),
        "minus": Group(("vector",), chain(times(-0.5), times(2.0))),
    }


def test_each_leaf_is_moved_by_the_group_of_its_role() -> None:
    params = initialize(SPEC, 0)
    transform = by_group(SPEC, toy_groups())
    updates, state = transform.update(params, transform.init(params), params, STEP)
    assert torch.equal(updates.table, 0.5 * params.table)
    assert torch.equal(updates.weight, 2 * params.weight)
    assert torch.equal(updates.router, 2 * params.router)
    assert torch.equal(updates.scale, -params.scale)
    assert list(state) == ["twice", "half", "minus"]


def test_chain_applies_from_left_to_right_and_keeps_each_state() -> None:
    params = {"w": torch.ones(3)}
    transform = chain(
        stateless(lambda g, p: tree.map(lambda x: x + 1, g)), times(3.0), scale_by_adam(0.9, 0.9, eps=1.0)
    )
    _, state = transform.update(params, transform.init(params), params, STEP)
    assert state[:2] == ((), ())
    assert torch.allclose(state[2].mean["w"], torch.full((3,), 0.6))


def test_role_without_group_is_an_error_that_names_the_parameter() -> None:
    groups = {name: group for name, group in toy_groups().items() if name != "minus"}
    with pytest.raises(
        ValueError, match=r"parameter scale has role vector, which is in no group; there are twice \(mat"
    ):
        by_group(SPEC, groups)


def test_group_without_parameter_is_an_error() -> None:
    with pytest.raises(ValueError, match="group experts has no parameter"):
        by_group(SPEC, {**toy_groups(), "experts": Group(("expert",), times(1.0))})


def test_role_in_two_groups_is_an_error() -> None:
    with pytest.raises(ValueError, match="role gate is in the groups twice and again"):
        by_group(SPEC, {**toy_groups(), "again": Group(("gate",), times(1.0))})


def test_buffers_are_holes_that_keep_their_values() -> None:
    spec = SPEC._replace(scale=declare(Buffered, {"d": 3}).bias)
    groups = {name: group for name, group in toy_groups().items() if name != "minus"}
    params = initialize(spec, 0)
    trainable, _ = partition(spec, params)
    transform = by_group(spec, groups)
    updates, _ = transform.update(trainable, transform.init(trainable), trainable, STEP)
    assert updates.scale == ()
    assert apply_updates(trainable, updates).scale == ()
    moved = apply_updates(params, updates)
    assert torch.equal(moved.scale, params.scale)
    assert torch.equal(moved.weight, 3 * params.weight)


@given(seed=st.integers(0, 2**16), scale=st.sampled_from([1e-3, 1.0, 1e3]), max_norm=st.sampled_from([0.5, 1.0, 10.0]))
def test_clipped_norm_is_the_smaller_of_norm_and_bound(seed: int, scale: float, max_norm: float) -> None:
    grads = tree.map(lambda x: scale * x, initialize(SPEC, seed))
    norm = tree.global_norm(grads)
    clipped = clip(grads, norm, max_norm)
    assert tree.global_norm(clipped).item() == pytest.approx(min(norm.item(), max_norm), rel=1e-5)
    if norm < max_norm:
        assert all(torch.equal(a, b) for a, b in zip(tree.leaves(clipped), tree.leaves(grads), strict=True))


def test_clipping_matches_torch() -> None:
    weights = [torch.randn(3, 4, requires_grad=True), torch.randn(5, requires_grad=True)]
    grads = [torch.randn(3, 4), torch.randn(5)]
    for weight, grad in zip(weights, grads, strict=True):
        weight.grad = grad.clone()
    torch.nn.utils.clip_grad_norm_(weights, 0.7)
    for weight, grad in zip(weights, clip(grads, tree.global_norm(grads), 0.7), strict=True):
        torch.testing.assert_close(weight.grad, grad)


def test_zero_gradients_stay_zero_when_clipped() -> None:
    grads = [torch.zeros(3)]
    assert torch.equal(clip(grads, tree.global_norm(grads), 1.0)[0], torch.zeros(3))
