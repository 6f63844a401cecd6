"""The optimiser of a configuration, and what functional code buys: vmap, compilation, one table of groups."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from hymo import tree
from hymo.config import OptimizerConfig, SchedulerConfig
from hymo.optim import (
    GradientTransform,
    GroupRow,
    apply_updates,
    build_optimizer,
    build_schedule,
    group_paths,
    group_table,
    learning_rates,
)
from hymo.params import (
    buffer,
    constant,
    count,
    declare,
    embed,
    expert,
    gate,
    initialize,
    is_spec,
    matrix,
    normal,
    partition,
    vector,
)

SCHEDULER = SchedulerConfig(total_steps=10, warmup_frac=0.2, stable_frac=0.5, decay_frac=0.3, min_lr_ratio=0.1)


class LayerParams(NamedTuple):
    """Every role that a layer can have."""

    up: Float[Tensor, "d f"] = matrix(inputs="d")
    up_gate: Float[Tensor, "d f"] = matrix(inputs="d")
    down: Float[Tensor, "f d"] = matrix(inputs="f", residual=True)
    experts: Float[Tensor, "e d f"] = expert(inputs="d")
    router: Float[Tensor, "d e"] = gate(inputs="d")
    bias: Float[Tensor, "e"] = buffer(constant(0.0))
    scale: Float[Tensor, "d"] = vector(constant(1.0))


class ToyParams(NamedTuple):
    """A table and a few layers."""

    table: Float[Tensor, "s d"]
    layers: tuple[LayerParams, ...]


class TableParams(NamedTuple):
    """The token table."""

    table: Float[Tensor, "s d"] = embed(inputs="d", init=normal(0.1))


SIZES = {"s": 11, "d": 4, "f": 6, "e": 3}
SPEC: Any = ToyParams(declare(TableParams, SIZES).table, (declare(LayerParams, SIZES), declare(LayerParams, SIZES)))


def gradients(seed: int) -> ToyParams:
    return partition(SPEC, initialize(SPEC, seed))[0]


GRADIENTS = [gradients(seed) for seed in (1, 2, 3)]


def run(transform: GradientTransform, params: Any, state: Any) -> tuple[Any, Any]:
    for step, grads in enumerate(GRADIENTS):
        updates, state = transform.update(grads, state, params, torch.tensor(step))
        params = apply_updates(params, updates)
    return params, state


def assert_close(one: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    for path, leaf in tree.paths(one).items():
        torch.testing.assert_close(
            leaf, tree.paths(other)[path], rtol=rtol, atol=atol, msg=lambda m, p=path: f"{p}: {m}"
        )


@pytest.mark.parametrize("normuon_experts", [False, True])
def test_every_parameter_is_in_one_group_and_the_table_counts_them(normuon_experts: bool) -> None:
    cfg = OptimizerConfig(normuon_experts=normuon_experts)
    specs = {p: leaf for p, leaf in tree.paths(SPEC, is_leaf=is_spec).items() if leaf.role != "buffer"}
    groups = group_paths(SPEC, cfg)
    assert groups.keys() == specs.keys()
    assert groups["layers.1.experts"] == ("normuon" if normuon_experts else "adamw")
    assert (groups["table"], groups["layers.0.router"], groups["layers.0.down"]) == ("adamw_embed", "adamw", "normuon")
    table = group_table(SPEC, cfg)
    assert [row.optimiser for row in table] == ["NorMuon", "AdamW", "AdamW"]
    for row in table:
        members = [leaf.size for path, leaf in specs.items() if groups[path] == row.group]
        assert (row.tensors, row.scalars) == (len(members), sum(members))
    assert sum(row.scalars for row in table) == count(SPEC)


def test_group_without_parameters_is_left_out() -> None:
    spec = declare(TableParams, SIZES)
    assert group_table(spec, OptimizerConfig()) == [GroupRow("adamw_embed", "AdamW", 1, 44)]
    assert list(build_optimizer(OptimizerConfig(), SCHEDULER, spec).init(initialize(spec, 0))) == ["adamw_embed"]


def test_optimizer_moves_everything_but_buffers_each_group_at_its_rate() -> None:
    params = gradients(0)
    cfg = OptimizerConfig(muon_weight_decay=0.0, adamw_embed_weight_decay=0.0)
    transform = build_optimizer(cfg, SCHEDULER, SPEC)
    updates, _ = transform.update(gradients(1), transform.init(params), params, torch.tensor(4))
    assert updates.layers[0].bias == ()
    sizes = tree.paths(tree.map(lambda u: u.abs().mean().item(), updates))
    # The first step of Adam moves every entry by the learning rate.
    for path in ("table", "layers.0.experts", "layers.1.router", "layers.1.scale"):
        assert sizes[path] == pytest.approx(3e-4, rel=1e-3)
    assert 0.02 * 0.2 < sizes["layers.0.up"] < 0.02


@pytest.mark.parametrize("cautious", [False, True])
def test_zero_gradients_only_decay(cautious: bool) -> None:
    params = gradients(0)
    cfg = OptimizerConfig(cautious_wd=cautious)
    transform = build_optimizer(cfg, SCHEDULER, SPEC)
    zeros = tree.map(torch.zeros_like, params)
    updates, _ = transform.update(zeros, transform.init(params), params, torch.tensor(4))
    assert_close(updates.layers[0].up, -0.02 * 0.1 * params.layers[0].up)
    assert_close(updates.table, -3e-4 * 0.1 * params.table)
    assert not updates.layers[0].router.any()


def test_learning_rates_follow_the_schedule_from_the_peaks_in_the_state() -> None:
    state = build_optimizer(OptimizerConfig(), SCHEDULER, SPEC).init(gradients(0))
    for step, factor in ((0, 0.5), (1, 1.0), (6, 1.0), (9, 0.1), (50, 0.1)):
        rates = learning_rates(state, torch.tensor(step), schedule=build_schedule(SCHEDULER))
        wanted = {"normuon": 0.02 * factor, "adamw": 3e-4 * factor, "adamw_embed": 3e-4 * factor}
        assert {name: rate.item() for name, rate in rates.items()} == pytest.approx(wanted)


def test_vmap_over_learning_rates_equals_separate_runs() -> None:
    configs = [OptimizerConfig(muon_lr=0.02, adamw_lr=3e-4), OptimizerConfig(muon_lr=0.05, adamw_lr=1e-3)]
    transform, params = build_optimizer(configs[0], SCHEDULER, SPEC), gradients(0)
    starts = [build_optimizer(cfg, SCHEDULER, SPEC).init(params) for cfg in configs]
    run_many: Callable[..., Any] = torch.func.vmap(partial(run, transform))
    many, states = run_many(tree.stack([params, params]), tree.stack(starts))
    for i, start in enumerate(starts):
        params_alone, state_alone = run(transform, params, start)
        assert_close(params_alone, tree.map(lambda x, i=i: x[i], many))
        assert_close(state_alone, tree.map(lambda x, i=i: x[i], states))


def test_compiled_update_equals_eager_without_recompiling() -> None:
    transform, params = build_optimizer(OptimizerConfig(normuon_experts=True), SCHEDULER, SPEC), gradients(0)
    state = transform.init(params)
    flat, structure = tree.flatten((params, state, gradients(1)))

    def pure(leaves: list[Tensor], step: Tensor) -> list[Tensor]:
        p, s, grads = tree.unflatten(leaves, structure)
        updates, s = transform.update(grads, s, p, step)
        moved: list[Tensor] = tree.leaves((apply_updates(p, updates), s))
        return moved

    traced = torch._dynamo.nonstrict_trace(pure)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda leaves, step: traced(leaves, step), fullgraph=True, backend=counter)
    for i in range(3):
        step = torch.tensor(i)
        fast, slow = compiled(flat, step), pure(flat, step)
        for one, other in zip(fast, slow, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
        flat = [*slow, *flat[len(slow) :]]
    assert counter.frame_count == 1


def test_skipped_step_leaves_every_state_bitwise() -> None:
    transform, params = build_optimizer(OptimizerConfig(), SCHEDULER, SPEC), gradients(0)
    _, state = run(transform, params, transform.init(params))
    poisoned = tree.map(lambda x: torch.full_like(x, torch.nan), params)
    _, broken = transform.update(poisoned, state, params, torch.tensor(3))
    kept = tree.select(torch.tensor(False), broken, state)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(kept), tree.leaves(state), strict=True))
