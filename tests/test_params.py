"""Parameters: what their declarations say, how they start, how they split, and what is checked."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Float
from torch import Tensor

from hymo import tree
from hymo.model import model_spec
from hymo.params import (
    ParamSpec,
    abstract,
    buffer,
    check,
    constant,
    count,
    declare,
    embed,
    expert,
    for_compute,
    gate,
    initialize,
    is_spec,
    matrix,
    normal,
    normal_fan_in,
    partition,
    power,
    vector,
)
from tests.configs import tiny_config


class Toy(NamedTuple):
    """A parameter of every role."""

    table: Float[Tensor, "u d"] = embed(inputs="d", init=normal_fan_in(0.3))
    weight: Float[Tensor, "d f"] = matrix(inputs="d")
    stack: Float[Tensor, "e d f"] = expert(inputs="d")
    steer: Float[Tensor, "d e"] = gate(inputs="d", init=normal(0.006))
    scale: Float[Tensor, " d"] = vector(constant(1.0))
    bias: Float[Tensor, " e"] = buffer(power(-1.0), of="e")
    extra: Float[Tensor, "d d"] | tuple[()] = matrix(inputs="d", residual=True)


class Reordered(NamedTuple):
    """Two of them, the other way round, and one more."""

    first: Float[Tensor, "d d"] = matrix(inputs="d")
    stack: Float[Tensor, "e d f"] = expert(inputs="d")
    weight: Float[Tensor, "d f"] = matrix(inputs="d")


SIZES = {"u": 300, "d": 64, "f": 48, "e": 4}
SPEC = declare(Toy, SIZES, depth=8)


def test_a_declaration_is_read_with_its_sizes() -> None:
    assert SPEC.stack == ParamSpec(
        axes=("e", "d", "f"), shape=(4, 64, 48), role="expert", inputs="d", fan_in=64, init=SPEC.stack.init
    )
    assert (SPEC.extra.shape, SPEC.extra.gain) == ((64, 64), 0.25)  # type: ignore[union-attr]
    assert SPEC.stack.size == 4 * 64 * 48


def test_inputs_are_axes_that_are_contracted_and_others_only_set_the_size() -> None:
    spec = model_spec(tiny_config(model={"gdn_value_skip": True, "gdn_ffn_dim": 32, "tie_embeddings": False}).model)
    for name, leaf in tree.paths(spec, is_leaf=is_spec).items():
        assert set(leaf.inputs.split()) <= set(leaf.axes), name
        assert not (leaf.inputs and leaf.of), name
        assert bool(leaf.inputs) == (len(leaf.axes) > 1 and not name.endswith("A_log")), name


def test_what_is_given_is_not_read() -> None:
    spec = declare(Toy, SIZES, extra=(), weight=SPEC)
    assert spec.extra == ()
    assert spec.weight is SPEC


@given(st.integers(0, 2**31))
def test_a_weight_depends_on_its_name_and_the_seed_alone(seed: int) -> None:
    whole, part = initialize(SPEC, seed), initialize(declare(Reordered, SIZES), seed)
    assert torch.equal(whole.weight, part.weight)
    assert torch.equal(whole.stack, part.stack)
    other = initialize(SPEC, seed + 1)
    assert not torch.equal(whole.weight, other.weight)
    assert not torch.equal(whole.weight[:, :48].flatten()[:100], whole.stack.flatten()[:100])


def test_no_two_weights_of_the_model_share_their_draws() -> None:
    leaves = tree.paths(initialize(model_spec(tiny_config().model), 0))
    drawn = {name: leaf.flatten() for name, leaf in leaves.items() if leaf.numel() > 1 and leaf.std() > 0}
    # Scaled to the same spread, what comes from one stream of random numbers is equal.
    starts = {name: tuple((x[:2] / x[0]).tolist()) for name, x in drawn.items()}
    assert len(set(starts.values())) == len(starts) > 50


def test_initialisation_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    initialize(SPEC, 0)
    assert torch.equal(torch.rand(3), expected)


def assert_std(x: Tensor, std: float) -> None:
    """Within five standard errors of a normal sample (a uniform one has less)."""
    assert abs(x.std().item() / std - 1) < 5 / math.sqrt(2 * x.numel())
    assert abs(x.mean().item()) < 5 * std / math.sqrt(x.numel())


def test_weights_start_with_the_declared_spread() -> None:
    p = initialize(SPEC, 3)
    bound = 64**-0.5
    assert_std(p.weight, bound / math.sqrt(3))
    assert bound * 0.99 < p.weight.abs().max() <= bound
    for each in p.stack:
        assert_std(each, bound / math.sqrt(3))
    assert_std(p.table, 0.3 * bound)
    assert_std(p.steer, 0.006)
    assert_std(p.extra, bound / math.sqrt(3) / math.sqrt(2 * 8))
    assert torch.equal(p.scale, torch.ones(64))
    assert torch.equal(p.bias, torch.full((4,), 0.25))
    assert all(leaf.dtype == torch.float32 for leaf in tree.leaves(p))


def test_the_model_starts_as_its_sources_say() -> None:
    cfg = tiny_config(model={"dim": 128, "gdn_value_skip": True, "gdn_n_heads": 64, "gdn_n_key_heads": 64}).model
    p = initialize(model_spec(cfg), 0)
    mla, gdn = p.blocks[0], p.blocks[1].mixer
    assert_std(p.table, 0.3 / math.sqrt(128))
    assert_std(mla.ffn.router, 0.006)
    assert torch.equal(mla.ffn.load, torch.full((4,), 0.25))
    assert torch.equal(mla.ffn.bias, torch.zeros(4))
    assert 1 <= gdn.A_log.exp().min() < 2 < 15 < gdn.A_log.exp().max() <= 16
    step = torch.nn.functional.softplus(gdn.dt_bias)
    assert 0.001 * 0.999 <= step.min() < 0.002 < 0.05 < step.max() <= 0.1 * 1.001
    assert abs(step.log().mean().item() - math.log(0.01)) < 0.5
    assert torch.equal(gdn.skip, torch.full((64,), 16**-0.5))
    assert torch.equal(gdn.norm, torch.ones(8))
    assert 0.4 < gdn.q_conv.abs().max() <= 0.5
    assert_std(gdn.out, (64 * 8) ** -0.5 / math.sqrt(3) / math.sqrt(2 * 4))
    assert_std(p.mtp[0].merge, 256**-0.5 / math.sqrt(3))


def test_every_output_into_the_residual_stream_is_smaller_and_none_is_zero() -> None:
    spec = model_spec(tiny_config(model={"gdn_ffn_dim": 32}).model)
    small = {name for name, leaf in tree.paths(spec, is_leaf=is_spec).items() if leaf.residual}
    outputs = ("mixer.out", "ffn.down", "ffn.shared.down", "ffn.routed.down")
    assert small == {name for name in tree.paths(spec, is_leaf=is_spec) if name.endswith(outputs)}
    assert all(leaf.any() for name, leaf in tree.paths(initialize(spec, 0)).items() if name in small)


def test_partition_and_combine_are_inverse() -> None:
    params = initialize(SPEC, 0)
    trainable, buffers = partition(SPEC, params)
    assert (trainable.bias, buffers.bias) == ((), params.bias)
    assert list(tree.paths(buffers)) == ["bias"]
    assert "bias" not in tree.paths(trainable)
    back = tree.combine(trainable, buffers)
    assert all(a is b for a, b in zip(back, params, strict=True))


def test_partition_and_combine_are_inverse_on_the_model() -> None:
    spec = model_spec(tiny_config().model)
    params = initialize(spec, 0)
    trainable, buffers = partition(spec, params)
    back = tree.combine(trainable, buffers)
    assert tree.flatten(back)[1] == tree.flatten(params)[1]
    assert all(a is b for a, b in zip(tree.leaves(back), tree.leaves(params), strict=True))
    assert set(tree.paths(buffers)) == {"blocks.0.ffn.bias", "blocks.0.ffn.load"}


def test_compute_keeps_gates_vectors_and_buffers_in_fp32() -> None:
    low = for_compute(SPEC, initialize(SPEC, 0), torch.bfloat16)
    kept = {name for name, leaf in tree.paths(low).items() if leaf.dtype == torch.float32}
    assert kept == {"steer", "scale", "bias"}
    assert torch.equal(low.weight, initialize(SPEC, 0).weight.bfloat16())


def test_count_is_by_role_and_leaves_buffers_out_unless_asked() -> None:
    assert count(SPEC, "buffer") == 4
    assert count(SPEC, "matrix") == 64 * 48 + 64 * 64
    assert count(SPEC, "matrix", "gate") == 64 * 48 + 64 * 64 + 64 * 4
    assert count(SPEC) == sum(leaf.numel() for leaf in tree.leaves(initialize(SPEC, 0))) - 4


def test_abstract_parameters_have_shapes_and_no_storage() -> None:
    meta = abstract(SPEC)
    assert meta.stack.shape == (4, 64, 48)
    assert all(leaf.is_meta for leaf in tree.leaves(meta))


def test_check_accepts_what_initialize_makes() -> None:
    spec = model_spec(tiny_config().model)
    check(spec, initialize(spec, 0))


def wrong(**leaves: Any) -> Toy:
    return initialize(SPEC, 0)._replace(**leaves)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (wrong(weight=()), r"weight is missing; the configuration asks for \[64, 48\]"),
        (wrong(weight=torch.zeros(48, 64)), r"weight has shape \[48, 64\], the configuration asks for \[64, 48\]"),
        (wrong(scale=torch.ones(64).bfloat16()), r"scale is torch.bfloat16, masters are torch.float32"),
        (wrong(weight=(torch.zeros(64, 48),)), r"weight is missing"),
    ],
)
def test_check_names_the_parameter_and_what_was_asked(params: Toy, message: str) -> None:
    with pytest.raises(ValueError, match=f"^parameter {message}$" if ";" in message or "is t" in message else message):
        check(SPEC, params)


def test_check_names_a_parameter_that_the_configuration_does_not_have() -> None:
    with pytest.raises(ValueError, match=r"^parameter extra \[64, 64\] is unknown to the configuration$"):
        check(SPEC._replace(extra=()), initialize(SPEC, 0))


def test_check_names_the_leaf_inside_the_model() -> None:
    large, small = (model_spec(tiny_config(model={"moe_inter_dim": f}).model) for f in (48, 32))
    with pytest.raises(ValueError, match=r"blocks\.0\.ffn\.routed\.gate has shape \[4, 32, 32\].*\[4, 32, 48\]"):
        check(large, initialize(small, 0))
