"""The step: the same whatever the micro-batches, the compiler and the population, and unmoved by what is not finite."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial, reduce
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hymo import tree
from hymo.backend import EAGER, Backend, with_compute_dtype
from hymo.batch import IGNORED, Batch, make_batch
from hymo.config import HyMoConfig, derive_config
from hymo.jit import jit
from hymo.layers.moe import rebalance
from hymo.loss import label_counts, token_nats
from hymo.optim import GradientTransform
from hymo.step import Metrics, TrainState, experts, gradients
from tests.configs import Setup, micro_batches, setup, smallest_config, tiny_config, windows

PEAK = {"warmup_frac": 0.0, "stable_frac": 0.5, "decay_frac": 0.5}


def assert_near(found: Any, true: Any, tolerance: float, floor: float = 0.0) -> None:
    """Every tensor within `tolerance` of the true one's norm."""
    for name, x in tree.paths(found).items():
        y = tree.paths(true)[name]
        assert (x.double() - y.double()).norm() <= tolerance * y.double().norm() + floor, name


def assert_same(found: Any, true: Any) -> None:
    """Every bit, NaN included."""
    assert tree.flatten(found)[1] == tree.flatten(true)[1]
    for name, x in tree.paths(found).items():
        assert torch.equal(x.nan_to_num(1e30), tree.paths(true)[name].nan_to_num(1e30)), name


def copy(x: Any) -> Any:
    return tree.map(Tensor.clone, x)


def recording(optimizer: GradientTransform) -> GradientTransform:
    """The same optimiser, whose state also shows the gradient that it was given."""

    def init(params: Any) -> Any:
        return {**optimizer.init(params), "gradient": (tree.map(torch.zeros_like, params),)}

    def update(grads: Any, state: Any, params: Any, step: Tensor) -> Any:
        before = {name: part for name, part in state.items() if name != "gradient"}
        updates, after = optimizer.update(grads, before, params, step)
        return updates, {**after, "gradient": (grads,)}

    return GradientTransform(init, update)


Poison = Callable[[Tensor, Tensor], Tensor]
POISONS: dict[str, Poison] = {
    "a value that is NaN": lambda x, spoil: x * torch.where(spoil, torch.nan, 1.0),
    "a value that is infinite": lambda x, spoil: x + torch.where(spoil, torch.inf, 0.0),
    # The root of 0 is 0 with an infinite slope, times 0.
    "a gradient alone that is NaN": lambda x, spoil: x + (torch.where(spoil, x * 0, 1.0).sqrt() - (~spoil).float()),
}


def poisoned(poison: Poison) -> Backend:
    """Attention that spoils micro-batches in which a document fills a whole row, and no others."""

    def spoiled(q: Tensor, k: Tensor, v: Tensor, *, position: Tensor, scale: float) -> Tensor:
        out = EAGER.attend(q, k, v, position=position, scale=scale)
        return poison(out, position.max() == position.shape[-1] - 1)

    return EAGER._replace(attend=spoiled)


def unmarked(batch: Batch) -> Batch:
    """The batch with a document start at the tenth token of every row."""
    return make_batch(torch.cat([batch.tokens, batch.labels[..., -1:]], dim=-1).index_fill(-1, torch.tensor(9), 0))


def marked(batch: Batch, index: int) -> Batch:
    """The same, except for one micro-batch, of which each row is one document."""
    whole = make_batch(torch.cat([batch.tokens, batch.labels[..., -1:]], dim=-1).clamp(min=1))
    return tree.map(lambda x, y: torch.cat([x[:index], y[index : index + 1], x[index + 1 :]]), unmarked(batch), whole)


def step_setup(**changes: Any) -> Setup:
    """The smallest model, at its peak learning rates, with the gradient on show."""
    cfg = derive_config(smallest_config(scheduler=PEAK, training={"gradient_accumulation_steps": 1}), **changes)
    parts = setup(cfg)
    return parts._replace(optimizer=recording(parts.optimizer))


# Accumulation


def accumulated(cfg: HyMoConfig, batch: Batch, parts: int) -> Any:
    spec = setup(cfg).spec
    split = tree.map(lambda leaf: leaf.unflatten(0, (parts, -1)), batch)
    return gradients(setup(cfg).state().params, split, cfg=cfg, spec=spec)


def test_micro_batches_give_the_gradient_of_the_whole_whatever_their_sizes() -> None:
    """Labels are unevenly spread, and experts have less capacity than they are asked for."""
    cfg = smallest_config(model={"moe_capacity_factor": 1.0})
    batch = make_batch(windows(0, 16, 33, document=8))
    share = torch.linspace(0.02, 0.98, 16)[:, None]
    ignored = torch.rand(batch.labels.shape, generator=torch.Generator().manual_seed(0)) < share
    batch = batch._replace(labels=batch.labels.masked_fill(ignored, IGNORED))
    whole, value, losses = accumulated(cfg, batch, 1)
    assert losses.loads[0].dropped > 0
    for parts in (4, 16):
        grads, same, others = accumulated(cfg, batch, parts)
        assert_near(grads, whole, 1e-5)
        torch.testing.assert_close(same, value, rtol=1e-6, atol=0)
        assert_near(others, losses, 1e-6)


def test_gradients_of_micro_batches_are_added_up_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit, though those of experts are bf16 each."""
    monkeypatch.setattr(import_module("hymo.step"), "label_counts", lambda batch, depth, ranks: torch.ones(depth + 1))
    cfg = smallest_config(model={"moe_capacity_factor": 1.0})
    spec, params, backend = setup(cfg).spec, setup(cfg).state().params, with_compute_dtype(EAGER, torch.bfloat16)
    batch = tree.map(lambda leaf: leaf.unflatten(0, (3, 2)), make_batch(windows(0, 6, 33)))
    run = partial(gradients, params, cfg=cfg, spec=spec, backend=backend)
    first, *others = (run(tree.map(lambda leaf, i=i: leaf[i : i + 1], batch))[0] for i in range(3))
    want = tree.paths(reduce(tree.add, others, first))
    for name, got in tree.paths(run(batch)[0]).items():
        assert got.dtype == torch.float32
        assert torch.equal(got, want[name]), name


def test_a_micro_batch_without_labels_changes_nothing() -> None:
    cfg = smallest_config()
    batch = make_batch(windows(0, 2, 33))
    spec, params = setup(cfg).spec, setup(cfg).state().params
    silent = batch._replace(labels=torch.full_like(batch.labels, IGNORED))
    alone = gradients(params, tree.map(lambda x: x[None], batch), cfg=cfg, spec=spec)
    both = gradients(params, tree.map(lambda a, b: torch.stack([a, b]), batch, silent), cfg=cfg, spec=spec)
    assert_near(both[0], alone[0], 1e-6)
    torch.testing.assert_close(both[1], alone[1])


def test_the_gradient_that_arrives_is_clipped_and_the_norm_reported_is_not() -> None:
    parts = step_setup(training={"grad_clip": 0.01})
    state, metrics = parts.pure()(parts.state(), micro_batches(parts.cfg, 0))
    assert metrics.grad_norm > 0.1
    torch.testing.assert_close(tree.global_norm(state.optimizer["gradient"]), torch.tensor(0.01), rtol=1e-3, atol=0)


# What is not finite


@pytest.mark.parametrize(("poison", "index"), [*zip(POISONS, [0, 1, 1], strict=True)])
def test_one_spoiled_micro_batch_moves_counters_and_nothing_else(poison: str, index: int) -> None:
    parts = step_setup(training={"gradient_accumulation_steps": 2})
    pure = parts.pure(poisoned(POISONS[poison]))
    state, _ = pure(parts.state(), unmarked(micro_batches(parts.cfg, 0)))
    before = copy(state)
    assert all(moment.any() for moment in tree.leaves(before.optimizer))

    after, metrics = pure(state, marked(micro_batches(parts.cfg, 1), index))
    assert not metrics.finite
    assert_same((after.params, after.optimizer), (before.params, before.optimizer))
    assert (after.step, after.samples, after.skipped) == (before.step + 1, before.samples + 4, 1)
    assert metrics.skipped == 1
    assert torch.equal(metrics.bias, torch.stack([moe.bias for moe in experts(before.params)]))
    again, metrics = pure(after, marked(micro_batches(parts.cfg, 1), index))
    assert (again.step, again.skipped, metrics.skipped) == (before.step + 2, 2, 2)
    assert_same(again.params, before.params)

    good = unmarked(micro_batches(parts.cfg, 2))
    healed, metrics = pure(again, good)
    expected, wanted = pure(before._replace(step=again.step, samples=again.samples), good)
    assert metrics.finite
    assert healed.skipped == metrics.skipped == 0
    assert_same(healed, expected)
    assert_same(metrics, wanted)


# Python, compiled, and populations


@pytest.fixture(scope="module", params=["aot_eager", pytest.param("inductor", marks=pytest.mark.heavy)])
def compiled(request: pytest.FixtureRequest) -> Iterator[tuple[Setup, Callable[..., Any]]]:
    """One compiled, donating step for all tests of it, deterministic as the recipe asks for on a CPU.

    Without that, inductor adds up gradients of a repeated token by atomic additions, in whatever order threads come.
    """
    torch.use_deterministic_algorithms(True)
    parts = step_setup()
    yield parts, parts.step(request.param, donate=True, backend=poisoned(POISONS["a value that is NaN"]))
    torch.use_deterministic_algorithms(False)


def run(step: Callable[..., Any], parts: Setup, steps: int, seed: int = 0) -> tuple[TrainState, list[Metrics]]:
    """State and metrics after some steps."""
    state, seen = parts.state(seed), []
    for i in range(steps):
        state, metrics = step(state, unmarked(micro_batches(parts.cfg, i)))
        seen.append(copy(metrics))
    return state, seen


def test_compiled_and_python_agree(compiled: tuple[Setup, Callable[..., Any]]) -> None:
    parts, step = compiled
    pure = parts.pure()
    (one, (metrics,)), (expected, (wanted,)) = run(step, parts, 1), run(pure, parts, 1)
    torch.testing.assert_close(metrics.loss, wanted.loss, rtol=1e-5, atol=0)
    assert_near(metrics, wanted, 1e-5)
    assert_near(one.optimizer["gradient"], expected.optimizer["gradient"], 1e-5)
    (three, _), (expected, _) = run(step, parts, 3), run(pure, parts, 3)
    for name, x in tree.paths(three.params).items():
        assert (x - tree.paths(expected.params)[name]).abs().max() <= 2e-4, name


def test_nothing_is_compiled_after_the_first_step_and_the_first_evaluation(
    compiled: tuple[Setup, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, step = compiled
    evaluate = jit(partial(token_nats, cfg=parts.cfg.model), compile="aot_eager")
    state, _ = run(step, parts, 1)
    batch = tree.map(lambda x: x[0], micro_batches(parts.cfg, 0))
    nats = evaluate(state.params, batch)
    monkeypatch.setattr(import_module("hymo.jit"), "trace", None)
    for i in range(3):
        state, _ = step(state, unmarked(micro_batches(parts.cfg, i)))
        after = evaluate(state.params, batch)
    assert not torch.equal(after, nats)
    torch.testing.assert_close(after, token_nats(state.params, batch, cfg=parts.cfg.model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("clip", [1.0, float("inf")])
def test_a_gradient_that_overflows_the_optimiser_moves_nothing(clip: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its norm is finite, its fourth power is not; clipped, it is a gradient like others."""

    def steep(*args: Any, **keys: Any) -> Any:
        grads, value, losses = gradients(*args, **keys)
        return tree.map(lambda x: x * 1e11, grads), value, losses

    monkeypatch.setattr(import_module("hymo.step"), "gradients", steep)
    parts = setup(smallest_config(training={"grad_clip": clip}))
    before, after = parts.state(), parts.state()
    after, metrics = parts.step("none")(after, micro_batches(parts.cfg, 0))
    assert metrics.grad_norm.isfinite()
    assert metrics.finite == (clip == 1.0)
    assert all(leaf.isfinite().all() for leaf in tree.leaves(after))
    moved = [not torch.equal(a, b) for a, b in zip(tree.leaves(after.params), tree.leaves(before.params), strict=True)]
    assert any(moved) == (clip == 1.0)


def test_a_compiled_step_skips_what_is_not_finite(compiled: tuple[Setup, Callable[..., Any]]) -> None:
    parts, step = compiled
    state, _ = run(step, parts, 1)
    before = copy(state)
    after, metrics = step(state, marked(micro_batches(parts.cfg, 1), 0))
    assert not metrics.finite
    assert_same((after.params, after.optimizer), (before.params, before.optimizer))
    assert (after.step, after.samples, after.skipped) == (2, 4, 1)


def live_bytes() -> int:
    """Bytes of all tensors that exist, each storage once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) is Tensor and thing.device.type == "cpu" and thing.layout == torch.strided:
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.filterwarnings("ignore")
def test_a_donated_state_exists_once(compiled: tuple[Setup, Callable[..., Any]]) -> None:
    parts, step = compiled
    run(step, parts, 1)
    state, batch = parts.state(), unmarked(micro_batches(parts.cfg, 0))
    size = sum(leaf.nbytes for leaf in tree.leaves(state))
    places, before = [leaf.data_ptr() for leaf in tree.leaves(state)], live_bytes()
    for _ in range(2):
        state, _metrics = step(state, batch)
        assert [leaf.data_ptr() for leaf in tree.leaves(state)] == places
        assert live_bytes() - before < size / 10


def test_two_runs_are_equal_to_the_bit(compiled: tuple[Setup, Callable[..., Any]]) -> None:
    parts, step = compiled
    for each in (step, parts.step(donate=True)):
        (first, seen), (second, same) = run(each, parts, 3), run(each, parts, 3)
        assert_same(first, second)
        assert_same(seen, same)


@pytest.fixture(scope="module")
def single() -> Setup:
    return step_setup(model={"mtp_depth": 0, "mtp_loss_weights": []})


Stepped = tuple[TrainState, tuple[TrainState, Metrics]]


@pytest.fixture(scope="module")
def populations(single: Setup) -> dict[str, list[Stepped]]:
    """Two states that differ in their seed, and two that differ in their learning rates; each with its own step."""
    first, slow, batch = single.state(), single.state(), micro_batches(single.cfg, 0)
    optimizer = {
        name: tuple(part._replace(peak=part.peak / 3) if hasattr(part, "peak") else part for part in group)
        for name, group in slow.optimizer.items()
    }
    first, other, slow = (
        (state, single.pure()(state, batch)) for state in (first, single.state(1), slow._replace(optimizer=optimizer))
    )
    return {"seeds": [first, other], "learning rates": [first, slow]}


@pytest.mark.parametrize("mode", ["none", "aot_eager", pytest.param("inductor", marks=pytest.mark.heavy)])
def test_a_population_is_its_members_one_by_one(
    mode: Any, single: Setup, populations: dict[str, list[Stepped]]
) -> None:
    together = jit(torch.func.vmap(single.pure(), in_dims=(0, None)), compile=mode)
    for name, members in populations.items():
        state, metrics = together(tree.stack([member for member, _ in members]), micro_batches(single.cfg, 0))
        for i, (_, expected) in enumerate(members):
            assert_near(tree.map(lambda x, i=i: x[i], (state, metrics)), expected, 1e-5, 1e-9)
        first, second = tree.map(lambda x: x[0], state), tree.map(lambda x: x[1], state)
        assert (first.params.table - second.params.table).abs().max() > 1e-4, name
        same = torch.equal(first.optimizer["gradient"][0].table, second.optimizer["gradient"][0].table)
        assert same == (name == "learning rates")


# Balance and metrics


def test_the_balance_moves_once_a_step_by_the_counts_of_all_micro_batches() -> None:
    cfg = smallest_config(training={"gradient_accumulation_steps": 4, "micro_batch_size": 1}, scheduler=PEAK)
    parts, batch = setup(cfg), micro_batches(cfg, 0)
    state = parts.state()
    _, _, losses = gradients(state.params, batch, cfg=cfg, spec=parts.spec)
    after, metrics = parts.pure()(state, batch)
    count = losses.loads[0].assigned
    assert count.sum() == 4 * 32 * 2
    (moe,), (start,) = experts(after.params), experts(state.params)
    bias, load = rebalance(start.bias, start.load, count, speed=0.001, alpha=0.02)
    assert torch.equal(moe.bias, bias)
    assert torch.equal(moe.load, load)
    assert moe.bias[count.argmax()] < 0 < moe.bias[count.argmin()]
    assert moe.bias.sum().abs() < 1e-8
    torch.testing.assert_close(metrics.load, (count / count.sum())[None])
    assert torch.equal(metrics.bias, bias[None])
    for i in range(1, 3):
        after, metrics = parts.pure()(after, micro_batches(cfg, i))
    assert metrics.bias.sum().abs() < 1e-8
    assert metrics.bias.abs().max() > 0.001


def test_metrics_say_what_was_done() -> None:
    cfg = tiny_config(model={"moe_capacity_factor": 0.75})
    parts, batch = setup(cfg), micro_batches(cfg, 0)
    batch = batch._replace(labels=batch.labels.masked_fill(batch.labels % 3 == 0, IGNORED))
    state, metrics = parts.pure()(parts.state(), batch)
    grads, value, losses = gradients(parts.state().params, batch, cfg=cfg, spec=parts.spec)
    assert metrics.tokens == (batch.labels != IGNORED).sum() == label_counts(batch, 0)[0]
    assert torch.equal(metrics.loss, value)
    assert torch.equal(metrics.main, losses.main)
    torch.testing.assert_close(metrics.loss, metrics.main + 0.3 * metrics.mtp[0] + 0.1 * metrics.mtp[1])
    assert torch.equal(metrics.grad_norm, tree.global_norm(grads))
    assert metrics.dropped.tolist() == [(losses.loads[0].dropped / (4 * 64 * 2)).item()]
    assert 0.2 < metrics.dropped.item() < 1
    # The first of two warm-up steps.
    torch.testing.assert_close(metrics.muon_lr, torch.tensor(0.01))
    torch.testing.assert_close(metrics.adamw_lr, torch.tensor(1.5e-4))
    assert (state.step, state.samples, state.skipped) == (1, 4, 0)


def test_every_parameter_moves_and_the_loss_of_a_batch_falls() -> None:
    parts = setup(smallest_config(scheduler=PEAK, optimizer={"adamw_lr": 3e-3}))
    pure, batch, state = parts.pure(), micro_batches(parts.cfg, 0), parts.state()
    moved, first = pure(state, batch)
    still = [name for name, x in tree.paths(moved.params).items() if torch.equal(x, tree.paths(state.params)[name])]
    assert still == []
    for _ in range(8):
        moved, metrics = pure(moved, batch)
    assert metrics.main < first.main - 0.3


def test_weights_moments_and_gradients_stay_fp32_under_bf16() -> None:
    parts = step_setup()
    batch = micro_batches(parts.cfg, 0)
    low, metrics = parts.pure(with_compute_dtype(EAGER, torch.bfloat16))(parts.state(), batch)
    true, wanted = parts.pure()(parts.state(), batch)
    assert {x.dtype for x in tree.leaves(low) if x.is_floating_point()} == {torch.float32}
    torch.testing.assert_close(metrics.loss, wanted.loss, rtol=2e-3, atol=0)
    found, exact = (each.optimizer["gradient"] for each in (low, true))
    assert tree.global_norm(tree.map(torch.sub, found, exact)) <= 0.06 * tree.global_norm(exact)


# Any configuration


# One seed and one flag more or less say nothing: a failure is not worth minutes of shrinking.
@settings(max_examples=12, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    seed=st.integers(0, 2**31),
    layout=st.sampled_from([(1, 1, 0), (1, 4, 3), (2, 4, 2), (2, 2, 1), (3, 1, 0), (3, 2, 0)]),
    rule=st.sampled_from(["gated_delta", "delta", "gated_linear"]),
    heads=st.sampled_from([(1, 1), (4, 1), (4, 2)]),
    groups=st.sampled_from([(4, 1), (4, 4), (2, 1)]),
    dims=st.sampled_from([(8, 8), (0, 4), (4, 0)]),
    experts=st.sampled_from([(1, 1), (4, 1), (3, 3)]),
    shared=st.integers(0, 2),
    capacity=st.sampled_from([0.1, 1.0, 100.0]),
    depth=st.integers(0, 3),
    conv=st.sampled_from([1, 4]),
    options=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
)
def test_every_configuration_takes_a_step(
    seed: int,
    layout: tuple[int, int, int],
    rule: str,
    heads: tuple[int, int],
    groups: tuple[int, int],
    dims: tuple[int, int],
    experts: tuple[int, int],
    shared: int,
    capacity: float,
    depth: int,
    conv: int,
    options: tuple[bool, bool, bool, bool],
) -> None:
    tied, skip, negative, normuon = options
    model = {
        "n_layers": layout[0],
        "mla_every": layout[1],
        "mla_offset": layout[2],
        "gdn_rule": rule,
        "gdn_n_heads": heads[0],
        "gdn_n_key_heads": heads[1],
        "n_heads": groups[0],
        "n_kv_groups": groups[1],
        "qk_nope_head_dim": dims[0],
        "qk_rope_head_dim": dims[1],
        "n_routed_experts": experts[0],
        "n_activated_experts": experts[1],
        "n_shared_experts": shared,
        "moe_capacity_factor": capacity,
        "mtp_depth": depth,
        "mtp_loss_weights": [0.3] * depth,
        "gdn_conv": conv,
        "tie_embeddings": tied,
        "gdn_value_skip": skip,
        "gdn_allow_neg_eigval": negative,
        "gdn_ffn_dim": 16 * skip,
        "max_seq_len": 16,
    }
    cfg = tiny_config(
        model=model,
        training={"max_seq_len": 16, "gradient_accumulation_steps": 1},
        optimizer={"normuon_experts": normuon},
        scheduler=PEAK,
    )
    parts = setup(cfg)
    state, metrics = parts.pure()(parts.state(seed % 1000), micro_batches(cfg, seed % 1000))
    assert metrics.finite
    assert abs(metrics.main - 6.238) < 0.3
    assert all(leaf.isfinite().all() for leaf in tree.leaves(state))


# Memory at a size where the state is what counts


MEASURE = """
import sys
import torch
from tests.configs import micro_batches, setup, smallest_config
from hymo import tree

torch.set_num_threads(1)

def memory(kind):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(kind))

experts = {"dim": 256, "n_routed_experts": 32, "moe_inter_dim": 1024}
cfg = smallest_config(model=experts, training={"gradient_accumulation_steps": 1})
parts = setup(cfg)
step, state, batch = parts.step(sys.argv[1], donate=True), parts.state(), micro_batches(cfg, 0)
size = sum(leaf.nbytes for leaf in tree.leaves(state))
state, metrics = step(state, batch)
resident = memory("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
state, metrics = step(state, batch)
print((memory("VmHWM") - resident) / size)
"""


@pytest.mark.heavy
def test_a_generated_step_adds_about_its_gradient_to_memory_and_no_second_state(request: pytest.FixtureRequest) -> None:
    """The state is weights and two moments: the gradient is 1/3 of it, a copy of it would be 1."""
    measured = subprocess.run(
        [sys.executable, "-c", MEASURE, "inductor"],
        capture_output=True,
        text=True,
        cwd=request.config.rootpath,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert measured.returncode == 0, measured.stderr
    assert float(measured.stdout.splitlines()[-1]) < 0.6
