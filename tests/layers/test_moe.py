"""The mixture of experts against a loop over tokens: who is chosen, with what weight, and who is dropped."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hymo import tree
from hymo.backend import EAGER
from hymo.config import ModelConfig
from hymo.layers.moe import MoeParams, moe, moe_spec, rebalance, route
from hymo.params import initialize
from tests.configs import tiny_config

Assignments = list[list[dict[int, float]]]


def case(seed: int, rows: int, time: int, **model: Any) -> tuple[ModelConfig, MoeParams, Tensor]:
    """A layer whose router has opinions, a bias that matters, and an input."""
    cfg = tiny_config(model=model).model
    p = initialize(moe_spec(cfg), seed)
    draw = torch.Generator().manual_seed(seed)
    p = p._replace(router=100 * p.router, bias=0.3 * torch.randn(p.bias.shape, generator=draw))
    return cfg, p, torch.randn(rows, time, cfg.dim, generator=draw)


def assignments(p: MoeParams, x: Tensor, k: int) -> Assignments:
    """For each row and token, its experts and their weights."""
    found: Assignments = []
    for row in x:
        found.append([])
        for token in row:
            score = torch.sigmoid(token @ p.router)
            chosen = sorted(range(len(score)), key=lambda e: float(score[e] + p.bias[e]), reverse=True)[:k]
            total = sum(float(score[e]) for e in chosen)
            found[-1].append({e: float(score[e]) / total for e in chosen})
    return found


def drop(found: Assignments, experts: int, capacity: int) -> int:
    """Takes from every expert all but its `capacity` heaviest tokens of a row; returns how many."""
    dropped = 0
    for row in found:
        for e in range(experts):
            wanting = sorted((t for t in range(len(row)) if e in row[t]), key=lambda t: -row[t][e])
            for t in wanting[capacity:]:
                del row[t][e]
                dropped += 1
    return dropped


def defined(p: MoeParams, x: Tensor, found: Assignments) -> Tensor:
    """Shared expert plus the weighted assigned ones, token by token."""

    def swiglu(gate: Tensor, up: Tensor, down: Tensor, token: Tensor) -> Tensor:
        return (F.silu(token @ gate) * (token @ up)) @ down

    routed, shared = p.routed, p.shared
    return torch.stack(
        [
            torch.stack(
                [
                    (swiglu(*shared, token) if shared else torch.zeros_like(token))
                    + sum(w * swiglu(routed.gate[e], routed.up[e], routed.down[e], token) for e, w in mine.items())
                    for token, mine in zip(row, assigned, strict=True)
                ]
            )
            for row, assigned in zip(x, found, strict=True)
        ]
    )


@given(
    seed=st.integers(0, 2**31),
    time=st.integers(1, 12),
    experts=st.sampled_from([(1, 1), (4, 1), (4, 2), (5, 3), (3, 3)]),
    shared=st.integers(0, 2),
    capacity=st.one_of(st.none(), st.integers(1, 12)),
)
def test_the_layer_is_a_loop_over_tokens(
    seed: int, time: int, experts: tuple[int, int], shared: int, capacity: int | None
) -> None:
    cfg, p, x = case(
        seed, 2, time, n_routed_experts=experts[0], n_activated_experts=experts[1], n_shared_experts=shared
    )
    wide = tree.map(Tensor.double, p)
    found = assignments(wide, x.double(), experts[1])
    chosen = [sum(e in token for row in found for token in row) for e in range(experts[0])]
    dropped = drop(found, experts[0], time if capacity is None else capacity)
    y, load = moe(p, x, cfg=cfg, capacity=capacity)
    torch.testing.assert_close(y.double(), defined(wide, x.double(), found), rtol=1e-4, atol=1e-6)
    assert load.assigned.tolist() == chosen
    assert load.dropped.item() == dropped


@pytest.mark.parametrize("capacity", [None, 3])
def test_every_gradient_is_that_of_a_loop_over_tokens(capacity: int | None) -> None:
    cfg, p, x = case(1, 2, 9)
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    wide = tree.map(Tensor.double, p)
    found = assignments(wide, x.double(), cfg.n_activated_experts)
    before = [[dict(token) for token in row] for row in found]
    drop(found, cfg.n_routed_experts, 9 if capacity is None else capacity)

    def layer(p: MoeParams, x: Tensor) -> Tensor:
        return (moe(p, x, cfg=cfg, capacity=capacity)[0] * weight).sum()

    def definition(p: MoeParams, x: Tensor) -> Tensor:
        total: Any = 0
        for b in range(2):
            for t in range(9):
                score = torch.sigmoid(x[b, t] @ p.router)
                norm = sum(score[e] for e in before[b][t])
                mine: Any = {e: score[e] / norm for e in found[b][t]}
                total = total + (defined(p, x[b : b + 1, t : t + 1], [[mine]])[0, 0] * weight[b, t].double()).sum()
        return total

    grads = tree.paths(torch.func.grad(layer, argnums=(0, 1))(p, x))
    expected = tree.paths(torch.func.grad(definition, argnums=(0, 1))(wide, x.double()))
    for name, found_grad in grads.items():
        assert (found_grad - expected[name]).norm() <= 1e-5 * expected[name].norm(), name
    assert (grads["0.bias"] == 0).all()
    assert (grads["0.load"] == 0).all()
    assert grads["0.router"].norm() > 0


@given(st.integers(0, 2**31))
def test_the_bias_changes_who_is_chosen_and_never_a_weight(seed: int) -> None:
    _, p, x = case(seed, 2, 8, n_routed_experts=6)
    plain = route(p._replace(bias=torch.zeros(6)), x, k=2)
    pushed = route(p._replace(bias=torch.tensor([10.0, 0, 0, 0, 0, 0])), x, k=2)
    assert (pushed.expert == 0).any(-1).all()
    score = torch.sigmoid(x @ p.router)
    for routing in (plain, pushed):
        unbiased = score.gather(-1, routing.expert)
        torch.testing.assert_close(routing.weight, unbiased / unbiased.sum(-1, keepdim=True))
        torch.testing.assert_close(routing.weight.sum(-1), torch.ones(2, 8))
    everyone = route(p._replace(bias=torch.full((6,), 7.0)), x, k=2)
    assert torch.equal(everyone.weight, plain.weight)
    assert torch.equal(everyone.assigned, plain.assigned)


def test_weights_stay_finite_where_no_expert_is_wanted() -> None:
    _, p, x = case(0, 1, 4)
    far = p._replace(router=torch.full_like(p.router, -10.0), bias=torch.zeros(4))
    routing = route(far, x.abs() + 1, k=2)
    torch.testing.assert_close(routing.weight.sum(-1), torch.ones(1, 4))


@given(st.integers(0, 2**31), st.integers(1, 6))
def test_who_is_dropped_depends_on_weights_and_never_on_position(seed: int, capacity: int) -> None:
    cfg, p, x = case(seed, 2, 10)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(seed))
    y, load = moe(p, x, cfg=cfg, capacity=capacity)
    shuffled, same = moe(p, x[:, order], cfg=cfg, capacity=capacity)
    torch.testing.assert_close(shuffled, y[:, order], rtol=1e-5, atol=1e-6)
    assert torch.equal(same.dropped, load.dropped)


@given(st.integers(0, 2**31), st.integers(1, 9))
def test_capacity_is_of_a_row_whatever_the_other_rows(seed: int, capacity: int) -> None:
    cfg, p, x = case(seed, 3, 10)
    y, load = moe(p, x, cfg=cfg, capacity=capacity)
    alone = [moe(p, row[None], cfg=cfg, capacity=capacity) for row in x]
    torch.testing.assert_close(torch.cat([each for each, _ in alone]), y, rtol=1e-5, atol=1e-6)
    assert load.dropped == sum(each.dropped for _, each in alone)


def test_room_for_all_is_dropless() -> None:
    cfg, p, x = case(4, 2, 10)
    dropless, load = moe(p, x, cfg=cfg)
    busiest = max(int(route(p, row[None], k=2).assigned.max()) for row in x)
    assert busiest < 10
    for capacity in (busiest, 10, 1000):
        y, same = moe(p, x, cfg=cfg, capacity=capacity)
        torch.testing.assert_close(y, dropless, rtol=1e-5, atol=1e-6)
        assert same.dropped == load.dropped == 0
    assert moe(p, x, cfg=cfg, capacity=busiest - 1)[1].dropped > 0


def test_a_capacity_is_served_by_the_experts_of_the_backend() -> None:
    cfg, p, x = case(4, 2, 10)
    y, load = moe(p, x, cfg=cfg, capacity=3)
    asked: list[int] = []

    def experts(*tensors: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        asked.append(capacity)
        return EAGER.experts(*tensors, capacity=capacity)

    for capacity in (3, None, 10):
        again, same = moe(p, x, cfg=cfg, backend=EAGER._replace(experts=experts), capacity=capacity)
        assert torch.equal(again, y) == torch.equal(same.dropped, load.dropped) == (capacity == 3)
    assert asked == [3]


def test_without_capacity_a_token_sees_no_other_bit() -> None:
    cfg, p, x = case(5, 2, 10)
    y, _ = moe(p, x, cfg=cfg)
    changed, _ = moe(p, torch.cat([x[:, :4], -x[:, 4:]], dim=1), cfg=cfg)
    torch.testing.assert_close(changed[:, :4], y[:, :4], rtol=1e-6, atol=1e-7)


@given(st.integers(0, 2**31), st.integers(2, 9), st.sampled_from([0.02, 1.0]))
def test_balance_moves_against_the_load_and_has_mean_zero(seed: int, experts: int, alpha: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    bias, assigned = torch.randn(experts, generator=draw), torch.randint(0, 50, (experts,), generator=draw).float()
    assigned[0] += 1
    load = torch.full((experts,), 1 / experts)
    after, smoothed = rebalance(bias, load, assigned, speed=0.001, alpha=alpha)
    share = assigned / assigned.sum()
    torch.testing.assert_close(smoothed, (1 - alpha) * load + alpha * share)
    change = after - bias
    torch.testing.assert_close(change.mean(), torch.zeros(()), rtol=0, atol=1e-6)
    assert change.abs().max() <= 0.002 + 1e-6
    if share.max() - share.min() > 1e-3:
        assert change[share.argmax()] < change[share.argmin()] - 0.0009


def test_an_even_load_leaves_the_balance_and_no_tokens_leave_it_too() -> None:
    bias = torch.tensor([0.1, -0.2, 0.3, -0.2])
    even = torch.full((4,), 0.25)
    after, load = rebalance(bias, even, torch.full((4,), 8.0), speed=0.001, alpha=0.5)
    assert torch.equal(after, bias)
    assert torch.equal(load, even)
    after, load = rebalance(bias, even, torch.zeros(4), speed=0.001, alpha=0.5)
    assert torch.equal(after, bias)


def test_balancing_evens_out_a_router_with_a_favourite() -> None:
    _, p, x = case(6, 4, 64, n_activated_experts=1)
    p = p._replace(router=p.router / 50, bias=torch.tensor([0.2, 0.0, 0.0, 0.0]))
    start = route(p, x, k=1).assigned.max().item()
    bias, load = p.bias, p.load
    for _ in range(200):
        bias, load = rebalance(bias, load, route(p._replace(bias=bias), x, k=1).assigned, speed=0.004, alpha=0.5)
    assert start == 256
    assert route(p._replace(bias=bias), x, k=1).assigned.max().item() < 96
