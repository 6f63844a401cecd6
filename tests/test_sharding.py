"""A step on several ranks: the step of one, bit by bit, with no rank doing another's work."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import sharded_programs as programs
import torch
from configs import setup, smallest_config, tiny_config
from several_ranks import on_ranks

from hymo import tree
from hymo.distributed import ALONE
from hymo.params import initialize, is_spec
from hymo.sharding import is_placement, placements
from hymo.step import init_train_state

PEAK = {"warmup_frac": 0.0, "stable_frac": 0.5, "decay_frac": 0.5}
ROWS, STEPS = 12, 3


def config(**changes: Any) -> Any:
    """Every kind of layer, experts with less room than they are asked for, at the peak learning rates."""
    model = {"moe_capacity_factor": 1.0, **changes.pop("model", {})}
    return tiny_config(scheduler=PEAK, model=model, training={"grad_clip": 0.5}, **changes)


def small(**changes: Any) -> Any:
    """A layer of each kind."""
    return smallest_config(scheduler=PEAK, **changes)


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def by_one() -> programs.Trained:
    torch.use_deterministic_algorithms(True)
    return programs.train_on(ALONE, config(), 3, steps=STEPS)


def assert_near(found: dict[str, torch.Tensor], true: dict[str, torch.Tensor], tolerance: float) -> None:
    """Every tensor within `tolerance` of the true one's norm."""
    assert found.keys() == true.keys()
    for name, x in found.items():
        assert (x.double() - true[name].double()).norm() <= tolerance * true[name].double().norm() + 1e-9, name


def assert_same(found: dict[str, torch.Tensor], true: dict[str, torch.Tensor]) -> None:
    assert found.keys() == true.keys()
    for name, x in found.items():
        assert torch.equal(x, true[name]), name


def test_three_ranks_are_one_bit_by_bit(by_one: programs.Trained) -> None:
    """Neither 512 rows of the table nor 2 or 4 heads divide by 3."""
    for found in on_ranks(3, partial(programs.train, config(), 3, steps=STEPS)):
        assert_same(found.state, by_one.state)
        for ours, true in zip(found.metrics, by_one.metrics, strict=True):
            assert_same(ours, true)
    assert by_one.metrics[0]["dropped"] > 0
    assert by_one.metrics[0]["grad_norm"] > 0.5


# Compiled or not, sharded or copied: by default each once.
@pytest.mark.parametrize(
    ("shards", "compile"),
    [
        (1, "none"),
        (2, "aot_eager"),
        pytest.param(2, "none", marks=pytest.mark.heavy),
        pytest.param(1, "aot_eager", marks=pytest.mark.heavy),
    ],
)
def test_layers_that_are_regions_gather_and_scatter_as_others_do(shards: int, compile: Any) -> None:
    one = programs.alone(small(), 4, steps=2)
    run = partial(programs.train, small(), 4, steps=2, shards=shards, compile=compile, regions="aot_eager")
    for found in on_ranks(2, run):
        assert_near(found.state, one.state, 1e-4)
        for ours, true in zip(found.metrics, one.metrics, strict=True):
            assert_near(ours, true, 1e-5)


@pytest.mark.parametrize(("world", "shards"), [(2, 1), (4, 2)])
def test_copies_of_shards_are_the_same_step_too(world: int, shards: int) -> None:
    """Without sharding, and both: gradients are then added up in another order."""
    cfg = small(optimizer={"normuon_experts": True})
    one = programs.alone(cfg, 4, steps=2)
    first, *others = on_ranks(world, partial(programs.train, cfg, 4, steps=2, shards=shards))
    assert_near(first.state, one.state, 1e-4)
    assert_near(first.metrics[-1], one.metrics[-1], 1e-5)
    for other in others:
        assert_same(other.state, first.state)


@pytest.mark.parametrize(("world", "shards"), [(2, None), (4, 2)])
def test_the_gradient_is_that_of_a_module_under_fully_shard_and_autograd(world: int, shards: int | None) -> None:
    for ours, theirs in on_ranks(world, partial(programs.gradient_and_twin, config(), 4, shards)):
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=0)
        assert len(ours[1]) > 50
        assert_near(ours[1], theirs[1], 2e-6)


def test_each_matrix_is_orthogonalised_by_one_rank() -> None:
    cfg = config(optimizer={"normuon_experts": True})
    leaves = [leaf for leaf in tree.leaves(setup(cfg).spec, is_leaf=is_spec) if leaf.role in ("matrix", "expert")]
    matrices = [leaf.shape[-2:] for leaf in leaves for _ in range(leaf.shape[0] if len(leaf.shape) == 3 else 1)]
    for world, shards in ((2, None), (4, 2)):
        worked = on_ranks(world, partial(programs.matrices_worked_on, cfg, shards))
        assert Counter(shape for rank in worked for shape in rank) == Counter(matrices)
        effort = [sum(m * n * min(m, n) for m, n in rank) for rank in worked]
        assert max(effort) <= 1.5 * min(effort)


def test_a_rank_that_is_not_finite_makes_all_skip_and_nothing_move() -> None:
    cfg = small()
    before = programs.alone(cfg, 2, steps=1)
    clean = programs.alone(cfg, 2, steps=3)
    for skipped, after in on_ranks(2, partial(programs.spoil, cfg, 2, 1)):
        assert [bool(metrics["finite"]) for metrics in after.metrics] == [True, False, True]
        assert [int(metrics["skipped"]) for metrics in after.metrics] == [0, 1, 0]
        counters = ("step", "samples", "skipped")
        assert_same(*({k: v for k, v in each.state.items() if k not in counters} for each in (skipped, before)))
        assert (after.state["step"], after.state["samples"]) == (3, 6)
        assert after.metrics[2]["loss"] != clean.metrics[2]["loss"]


@pytest.mark.parametrize("compile", ["aot_eager", pytest.param("inductor", marks=pytest.mark.heavy)])
def test_the_compiled_step_of_two_ranks_is_one_graph_and_the_same(compile: Any) -> None:
    model = {"n_layers": 1, "mla_every": 1, "mtp_depth": 0, "mtp_loss_weights": []} if compile == "aot_eager" else {}
    cfg = small(model=model)
    one = programs.alone(cfg, 2, steps=2)
    for found in on_ranks(2, partial(programs.train, cfg, 2, steps=2, compile=compile), timeout=900):
        assert found.runs == 1
        assert_near(found.state, one.state, 1e-6 if compile == "aot_eager" else 1e-4)


def test_moments_are_split_like_their_parameters_and_counters_are_not() -> None:
    parts = setup(config(optimizer={"normuon_experts": True}))
    init = partial(init_train_state, spec=parts.spec, optimizer=parts.optimizer)
    placed = tree.paths(placements(parts.spec, init), is_leaf=is_placement)
    true = tree.paths(init(initialize(parts.spec, 0)))
    assert {name: place.shape for name, place in placed.items()} == {name: tuple(x.shape) for name, x in true.items()}
    whole = {name for name, place in placed.items() if not place.split}
    assert {name.split(".")[-1] for name in whole if not name.startswith("optimizer.normuon.0.square")} == {
        *("step", "samples", "skipped", "taken", "peak"),
        *("bias", "load"),
    }
    assert placed["optimizer.normuon.0.momentum.blocks.0.mixer.out"].split
    assert not placed["optimizer.normuon.0.square.blocks.0.mixer.out"].split
    assert placed["optimizer.normuon.0.square.blocks.0.ffn.routed.up"].split


def test_ranks_agree_around_the_step() -> None:
    for told in on_ranks(3, programs.agreements):
        assert told == {
            "everywhere": [0, 1, 2],
            "worst": 10,
            "led": 0,
            "together": "FileNotFoundError: [Errno 2] No such file: 'shard'",
            "led fails": "ValueError: no folder",
            "lead first": "ValueError: rank 0",
        }
