"""What a configuration costs: counts against real trees, arithmetic against torch's counter, memory against a run."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from hymo import tree
from hymo.accounting import (
    BACKWARD,
    account,
    attention_flops,
    describe,
    flops_per_token,
    model_parts,
    parameter_counts,
    peak_flops,
    scan_flops,
)
from hymo.backend import EAGER
from hymo.batch import make_batch
from hymo.config import HyMoConfig, ModelConfig, derive_config
from hymo.config_yaml import load_config
from hymo.footprint import Ledger, footprint
from hymo.jit import Compile, jit
from hymo.memory import gradient_bytes, step_memory
from hymo.model import forward, model_spec
from hymo.optim import build_optimizer
from hymo.params import abstract, count, initialize, partition
from hymo.step import gradients

CONFIGS = Path(__file__).parent.parent / "recipes" / "configs"
SMALL = {
    "vocab_size": 320,
    "dim": 32,
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_groups": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "gdn_n_heads": 4,
    "gdn_n_key_heads": 2,
    "gdn_key_dim": 8,
    "gdn_value_dim": 16,
    "n_routed_experts": 4,
    "moe_inter_dim": 40,
    "mtp_inter_dim": 48,
}


def small(**keys: object) -> ModelConfig:
    return derive_config(HyMoConfig(), model={**SMALL, **keys}).model


@pytest.mark.parametrize("name", ["tiny", "hymo_100m", "hymo_750m", "hymo_750m_small_heads"])
def test_parts_and_groups_add_up_to_a_model_without_storage(name: str) -> None:
    config = load_config(CONFIGS / f"{name}.yaml")
    trainable, buffers = partition(model_spec(config.model), abstract(model_spec(config.model)))
    stored = sum(leaf.numel() for leaf in tree.leaves(trainable))
    parts = model_parts(config.model, config.training.max_seq_len)

    assert sum(part.stored for part in parts) == stored == parameter_counts(config.model)["stored"]
    it = account(config)
    assert it.stored == sum(row.scalars for row in it.groups) == stored
    assert it.buffers == sum(leaf.numel() for leaf in tree.leaves(buffers))
    assert it.memory.masters == 4 * (stored + it.buffers)


def test_v1_costs_what_was_decided() -> None:
    counts = parameter_counts(ModelConfig())

    assert counts["stored"] == 1_131_417_120
    assert counts["active"] == 437_784_096
    assert round(counts["active_without_mtp"] / 1e6) == 422
    assert counts["embedding"] == 64_256 * 896
    assert flops_per_token(ModelConfig(), 4096) == pytest.approx(3.885e9, rel=1e-3)


def test_scan_arithmetic_is_that_of_a_fused_kernel() -> None:
    # Per token and head: 3 products of state size, 4 of chunk size, 2 FLOPs a multiply-add.
    assert scan_flops(ModelConfig()) == 14 * (3 * 2 * 128 * 128 + 4 * 2 * 64 * 128) == 14 * 163_840
    assert scan_flops(small(gdn_n_key_heads=4, gdn_key_dim=32, gdn_value_dim=32)) == 4 * 22_528


@pytest.mark.parametrize("untied", [False, True])
def test_products_with_parameters_are_those_that_torch_counts(untied: bool) -> None:
    # Without capacity every expert sees every token; then all of them are active.
    cfg = small(n_activated_experts=4, tie_embeddings=not untied, mtp_depth=0, mtp_loss_weights=(), gdn_ffn_dim=24)
    tokens = torch.arange(2 * 16).view(2, 16)
    idle = EAGER._replace(
        scan=lambda q, k, v, g, beta, **options: (v, None),
        attend=lambda q, k, v, **options: q.new_zeros(*q.shape[:3], v.shape[3]),
    )

    with FlopCounterMode(display=False) as counter:
        forward(initialize(model_spec(cfg), 0), tokens, cfg=cfg, backend=idle)

    elsewhere = {"  scan", "  attention"}
    products = sum(part.flops for part in model_parts(cfg, 16) if part.name not in elsewhere) / (1 + BACKWARD)
    channels = 2 * cfg.gdn_n_key_heads * cfg.gdn_key_dim + cfg.gdn_n_heads * cfg.gdn_value_dim
    # torch does not count the convolutions, which are sums of shifted copies, but the sum over the experts' answers.
    taps = len(cfg.gdn_layers) * 2 * channels * cfg.gdn_conv
    answers = len(cfg.mla_layers) * 2 * cfg.n_routed_experts * cfg.dim
    assert products - taps + answers == counter.get_total_flops() / tokens.numel()


def test_attention_arithmetic_is_half_of_the_full_square() -> None:
    cfg, rows, time = small(), 2, 64
    q = torch.zeros(rows, cfg.n_heads, time, cfg.qk_head_dim)
    v = torch.zeros(rows, cfg.n_heads, time, cfg.v_head_dim)

    with FlopCounterMode(display=False) as counter:
        torch.softmax(q @ q.mT, -1) @ v

    assert 2 * attention_flops(cfg, time) == counter.get_total_flops() / (rows * time)


def test_mtp_pays_for_its_modules_and_its_logits() -> None:
    without, with_mtp = (small(mtp_depth=n, mtp_loss_weights=(0.1,) * n) for n in (0, 2))
    merge_and_swiglu = 2 * 32 * 32 + 3 * 32 * 48

    extra = flops_per_token(with_mtp, 64) - flops_per_token(without, 64)

    assert extra == 2 * 6 * (merge_and_swiglu + 320 * 32)


def test_cost_of_a_token_is_linear_in_the_length_of_its_row() -> None:
    cfg = small()
    slope = 3 * len(cfg.mla_layers) * cfg.n_heads * (cfg.qk_head_dim + cfg.v_head_dim)

    for tokens in (16, 64, 1024):
        assert flops_per_token(cfg, 2 * tokens) - flops_per_token(cfg, tokens) == slope * tokens


def test_fewer_experts_cost_less_but_are_stored_all_the_same() -> None:
    one, two = small(n_activated_experts=1), small(n_activated_experts=2)
    expert = 3 * 32 * 40 * len(one.mla_layers)

    assert flops_per_token(two, 8) - flops_per_token(one, 8) == 6 * expert
    assert parameter_counts(two)["active"] - parameter_counts(one)["active"] == expert
    assert parameter_counts(two)["stored"] == parameter_counts(one)["stored"]


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362.05e12),
        ("Apple M3", None),
    ],
)
def test_peaks_are_known_by_whole_words(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_a_gradient_is_counted_as_long_as_it_is_needed() -> None:
    def twice_cosine(x: torch.Tensor) -> torch.Tensor:
        return x.cos().cos()

    with FakeTensorMode():
        x = torch.empty(1024)
        one_by_one = footprint(twice_cosine, x, ledger=Ledger(fused=False))
        fused = footprint(twice_cosine, x, ledger=Ledger(fused=True))

    # The inner cosine is kept for the backward beside the result; fused, both are computed from x when they are read.
    assert one_by_one.kept == 2 * 4096
    assert fused.kept == 0


def tiny(**keys: object) -> HyMoConfig:
    return derive_config(load_config(CONFIGS / "tiny.yaml"), **keys)


def one_layer(**keys: object) -> HyMoConfig:
    """The tiny configuration with nothing but a layer of attention and experts."""
    alone = {"n_layers": 1, "mla_every": 1, "mtp_depth": 0, "mtp_loss_weights": []}
    return derive_config(tiny(model=alone), **keys)


CASES = {
    "four layers": {},
    "eight narrow layers, two micro-batches": {
        "model": {"n_layers": 8, "dim": 64, "mla_offset": 3},
        "training": {"micro_batch_size": 4, "max_seq_len": 128, "gradient_accumulation_steps": 2},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_memory_of_an_uncompiled_step_is_what_a_profiler_sees(case: str) -> None:
    assert_estimate_is_right(tiny(**CASES[case]), "none")


@pytest.mark.heavy
@pytest.mark.parametrize("case", CASES)
def test_memory_of_a_compiled_step_is_what_a_profiler_sees(case: str) -> None:
    assert_estimate_is_right(tiny(**CASES[case]), "aot_eager")


def assert_estimate_is_right(config: HyMoConfig, compile: Compile) -> None:
    config = derive_config(config, training={"compile": compile})
    spec, training = model_spec(config.model), config.training
    shape = (training.gradient_accumulation_steps, training.micro_batch_size, training.max_seq_len + 1)
    windows = torch.randint(0, config.model.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    params, batch = initialize(spec, 0), make_batch(windows)
    step = jit(partial(gradients, cfg=config, spec=spec), compile=compile)
    if compile != "none":
        step(params, batch)

    measured = measured_peak(lambda: step(params, batch))

    estimate = step_memory(config)
    assert estimate.gradients + estimate.activations + estimate.logits == pytest.approx(measured, rel=0.15)


def measured_peak(f: Callable[[], object]) -> int:
    """The most bytes that `f` had allocated at once on the CPU, by the profiler's list of allocations."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        f()
    events = profile.profiler.kineto_results.events()
    live = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize(
    ("precision", "compile", "ranks", "size"),
    [
        ("bfloat16", "inductor", 1, 2),
        ("float32", "inductor", 1, 4),
        ("bfloat16", "aot_eager", 1, 4),
        ("bfloat16", "inductor", 2, 4),
    ],
)
def test_an_experts_gradient_is_as_narrow_as_a_compiled_step_leaves_it(
    precision: str, compile: str, ranks: int, size: int
) -> None:
    config = load_config(CONFIGS / "hymo_750m.yaml")
    config = derive_config(config, training={"precision": precision, "compile": compile})
    spec = model_spec(config.model)
    experts = count(spec, "expert")
    assert gradient_bytes(config, spec, ranks) == (4 * (count(spec) - experts) + size * experts) // ranks


def test_moments_are_those_that_the_optimiser_makes() -> None:
    config = one_layer(model={"mtp_depth": 1, "mtp_loss_weights": [0.1]}, training={"compile": "aot_eager"})
    spec = model_spec(config.model)
    params, _ = partition(spec, initialize(spec, 0))
    state = build_optimizer(config.optimizer, config.scheduler, spec).init(params)

    assert sum(step_memory(config).moments.values()) == sum(leaf.nbytes for leaf in tree.leaves(state))


def test_ranks_share_what_is_sharded() -> None:
    split = {"sharding": "fsdp2", "compile": "aot_eager"}
    alone, of_four = (step_memory(one_layer(training=split), ranks) for ranks in (1, 4))

    assert of_four.masters == alone.masters // 4
    assert sum(of_four.moments.values()) == pytest.approx(sum(alone.moments.values()) / 4, abs=8)
    assert of_four.activations == alone.activations
    assert of_four.copies == alone.masters
    assert step_memory(one_layer(training={**split, "sharding": "none"}), 4) == alone
    halves = step_memory(one_layer(training={**split, "shard_ranks": 2}), 4)
    assert halves.masters == alone.masters // 2


def test_half_precision_copies_what_the_layers_multiply_with() -> None:
    full = one_layer(training={"compile": "aot_eager"})
    config = derive_config(full, training={"precision": "bfloat16"})
    memory = step_memory(config)

    assert memory.copies == 2 * count(model_spec(config.model), "matrix", "expert", "embed")
    assert memory.activations < step_memory(full).activations


def test_grouped_experts_keep_what_tokens_chose_whatever_the_capacity() -> None:
    def activations(backend: str, capacity: float) -> int:
        keys = {"precision": "bfloat16", "compile": "inductor", "backend": backend}
        return step_memory(one_layer(training=keys, model={"moe_capacity_factor": capacity})).activations

    # Little more than the bounds between groups, against the seats that may stay empty.
    assert activations("auto", 1.5) == pytest.approx(activations("auto", 1.0), rel=1e-3)
    assert activations("eager", 1.5) > 1.05 * activations("eager", 1.0)


def test_a_loss_by_kernels_has_one_chunk_of_logits_and_the_gradients_of_its_table() -> None:
    low = {"precision": "bfloat16", "compile": "inductor"}
    config = one_layer(training={**low, "backend": "triton"})
    deeper = derive_config(config, model={"mtp_depth": 1, "mtp_loss_weights": [0.1]})
    deepest = derive_config(config, model={"mtp_depth": 2, "mtp_loss_weights": [0.1] * 2})
    model, training = config.model, config.training
    tokens = training.micro_batch_size * training.max_seq_len

    memory, more, most = (step_memory(each) for each in (config, deeper, deepest))

    assert memory.logits == more.logits == 2 * tokens * model.vocab_size
    # A head keeps its table's gradient in fp32, and that of its hidden states.
    assert most.activations - more.activations >= (4 * model.vocab_size + 2 * tokens) * model.dim


def test_the_table_of_v1_says_what_a_person_asks() -> None:
    text = describe(load_config(CONFIGS / "hymo_750m.yaml"), 4)

    for words in ("1.13 B", "438 M", "3,885.1", "attention causal", "524,288", "57,220", "29,999,759,360", "normuon"):
        assert words in text
    assert "unknown size" in text
    assert "warning" not in text
    assert max(map(len, text.splitlines())) <= 120


def test_repeating_a_source_too_often_is_a_warning() -> None:
    source = {"name": "prose", "weight": 1.0, "tokens": 100_000}

    text = describe(one_layer(data={"sources": [source]}))

    assert "6.14" in text
    assert "warning: more than 4 epochs of prose" in text


def test_rows_per_step_are_checked() -> None:
    with pytest.raises(ValueError, match=r"global_batch_size: expected .* = 8, got 9"):
        describe(tiny(training={"global_batch_size": 9}))
