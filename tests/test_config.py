"""The configuration: v1.0's numbers, what follows from them, and one clear line for each thing that is wrong."""

import math
from dataclasses import Field, FrozenInstanceError, fields, replace
from itertools import product
from typing import Any

import pytest
from configs import tiny_config
from hypothesis import example, given
from hypothesis import strategies as st

from hymo.accounting import describe as describe_run
from hymo.config import (
    BYTE_TOKENS,
    DataConfig,
    HyMoConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    SchedulerConfig,
    SourceConfig,
    TrainingConfig,
    derive_config,
)
from hymo.config_reference import REFERENCE, reference
from hymo.section import ConfigError, describe

V1 = HyMoConfig()
SECTIONS = [ModelConfig, OptimizerConfig, SchedulerConfig, TrainingConfig, DataConfig, RunConfig]


def test_sections_and_their_keys_are_the_specification() -> None:
    assert {each.name: " ".join(key.name for key in fields(getattr(V1, each.name))) for each in fields(V1)} == {
        "model": (
            "vocab_size max_seq_len tie_embeddings n_layers dim mla_every mla_offset n_heads n_kv_groups q_lora_rank"
            " kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim rope_theta gdn_n_heads gdn_n_key_heads"
            " gdn_key_dim gdn_value_dim gdn_conv gdn_rule gdn_rope_fraction gdn_ffn_dim gdn_value_skip"
            " gdn_allow_neg_eigval n_routed_experts n_shared_experts n_activated_experts moe_inter_dim"
            " moe_capacity_factor moe_ema_alpha moe_bias_speed mtp_depth mtp_loss_weights mtp_inter_dim logit_softcap"
            " norm_eps"
        ),
        "optimizer": (
            "muon_lr muon_momentum muon_beta2 muon_eps muon_weight_decay muon_scale normuon_experts adamw_lr"
            " adamw_betas adamw_eps adamw_weight_decay adamw_embed_weight_decay cautious_wd"
        ),
        "scheduler": "total_steps warmup_frac stable_frac decay_frac min_lr_ratio decay",
        "training": (
            "micro_batch_size gradient_accumulation_steps global_batch_size max_seq_len precision compile cuda_graph"
            " backend sharding shard_ranks grad_clip nan_skip_budget save_interval keep_last keep_every async_save"
            " log_interval eval_interval seed"
        ),
        "data": "corpus sources folder tokenizer validation val_tokens",
        "run": "name output_dir trackers profile",
    }


def test_every_key_has_a_meaning_and_every_number_a_range() -> None:
    for section in [*SECTIONS, SourceConfig]:
        assert section.__doc__
        for each in fields(section):
            assert each.metadata["doc"].endswith("."), each.name
            if {"int", "float"} & set(describe(each.type).split()):
                assert each.metadata["within"], each.name


def test_reference_page_is_fresh() -> None:
    assert REFERENCE.read_text(encoding="utf-8") == reference(), "stale: run `python -m hymo.config_reference`"


def test_v1_has_eight_attention_layers_among_thirty_two() -> None:
    assert V1.model.mla_layers == (0, 4, 8, 12, 16, 20, 24, 28)
    assert len(V1.model.gdn_layers) == 24
    assert V1.model.qk_head_dim == 128
    assert V1.model.gdn_rope_dim == 32
    assert V1.model.tokenizer_vocab_size == 64000


def test_v1_trains_thirty_billion_tokens_on_four_ranks() -> None:
    assert V1.training.rows_per_step(4) == 128
    assert V1.training.tokens_per_step(4) == 524_288
    assert V1.total_tokens(4) == 57_220 * 524_288
    epochs = V1.epochs(4)
    assert list(epochs) == [each.name for each in V1.data.sources]
    assert epochs["fineweb_edu_q3"] == pytest.approx(0.15, rel=1e-3)
    assert epochs["stack_python"] is None


@given(n_layers=st.integers(1, 40), every=st.integers(1, 6), data=st.data())
def test_each_layer_is_of_one_kind(n_layers: int, every: int, data: st.DataObject) -> None:
    offset = data.draw(st.integers(0, every - 1))
    model = ModelConfig(n_layers=n_layers, mla_every=every, mla_offset=offset)
    assert sorted(model.mla_layers + model.gdn_layers) == list(range(n_layers))
    assert all((layer - offset) % every == 0 for layer in model.mla_layers)
    assert all((layer - offset) % every for layer in model.gdn_layers)


@given(total=st.integers(1, 100_000), warmup=st.integers(0, 1000), decay=st.integers(0, 1000))
@example(total=3, warmup=500, decay=500)
def test_phases_of_the_schedule_sum_to_the_run(total: int, warmup: int, decay: int) -> None:
    warmup = min(warmup, 1000 - decay)
    config = SchedulerConfig(
        total_steps=total,
        warmup_frac=warmup / 1000,
        stable_frac=(1000 - warmup - decay) / 1000,
        decay_frac=decay / 1000,
    )
    phases = (config.warmup_steps, config.stable_steps, config.decay_steps)
    assert min(phases) >= 0
    assert sum(phases) == total
    assert all(
        abs(steps - share * total / 1000) <= 1 for steps, share in zip(phases[::2], (warmup, decay), strict=True)
    )


@given(tokens=st.integers(1, 4096), routed=st.integers(1, 32), tenths=st.integers(1, 40), data=st.data())
@example(tokens=10, routed=1, tenths=11, data=None)
def test_capacity_is_the_share_rounded_up_and_never_more_than_the_row(
    tokens: int, routed: int, tenths: int, data: st.DataObject | None
) -> None:
    activated = data.draw(st.integers(1, routed)) if data else 1
    model = ModelConfig(n_routed_experts=routed, n_activated_experts=activated, moe_capacity_factor=tenths / 10)
    assert model.moe_capacity(tokens) == min(tokens, -(-tenths * tokens * activated // (10 * routed)))


def test_an_expert_always_serves_a_token() -> None:
    assert ModelConfig(moe_capacity_factor=1e-9).moe_capacity(64) == 1


NUMBERS = [
    pytest.param(f"{section.name}.{each.name}", each, id=f"{section.name}.{each.name}")
    for section in fields(HyMoConfig)
    for each in fields(section.type)  # type: ignore[arg-type]
    if describe(each.type) in ("int", "int or null", "float")
]


@pytest.mark.parametrize(("name", "number"), NUMBERS)
def test_a_number_of_any_size_is_a_configuration_or_one_line(name: str, number: Field[Any]) -> None:
    low, high = map(float, number.metadata["within"][1:-1].split(", "))
    assert low > -math.inf
    assert high < math.inf or name == "training.grad_clip", "grad_clip: .inf is documented"
    for size in (10**400, -(10**400), 10**5000, 1e39 if high < 1e39 else -1e39, math.nan, -1):
        with pytest.raises(ConfigError) as error:
            derive_config(tiny_config(), **{name: size})
        assert str(error.value).startswith(f"{name}: expected {describe(number.type)}")
        assert len(str(error.value).splitlines()) == 1
        assert len(str(error.value)) < 200


# By default every compiler, rule and shape; what else they can be together is heavy.
BY_DEFAULT = [("none", "gated_linear", 1), ("aot_eager", "gated_delta", 2**24), ("inductor", "gated_linear", 2**24)]
LARGEST = [
    pytest.param(*kind, marks=[] if kind in BY_DEFAULT else [pytest.mark.heavy])
    for kind in product(("none", "aot_eager", "inductor"), ("gated_delta", "gated_linear"), (1, 2**24))
]


@pytest.mark.parametrize(("compile", "rule", "rows"), LARGEST)
def test_the_largest_sizes_of_all_at_once_can_still_be_described(compile: str, rule: str, rows: int) -> None:
    largest = {}
    for param in NUMBERS:
        name, number = param.values
        high = number.metadata["within"].split(", ")[1]
        is_free = name.startswith(("model", "training")) and not name.endswith(("fraction", "global_batch_size"))
        if is_free and high.endswith("]"):
            largest[name] = float(high[:-1])
    few = {"model.n_layers": 2, "model.mla_every": 2, "model.mtp_depth": 1, "model.mtp_loss_weights": [1]}
    shape = {"training.micro_batch_size": min(rows, 10**6), "training.max_seq_len": 2**24 // rows + 1 - (rows == 1)}
    kind = {"training.compile": compile, "model.gdn_rule": rule, "data.val_tokens": 10**18}
    assert "parameters stored" in describe_run(derive_config(V1, **largest | few | shape | kind))


def test_config_is_frozen_and_hashable() -> None:
    with pytest.raises(FrozenInstanceError):
        V1.model.dim = 3  # type: ignore[misc]
    assert hash(V1) == hash(HyMoConfig())
    assert {V1: 1}[derive_config(V1)] == 1


def test_numbers_take_the_declared_type() -> None:
    model = derive_config(V1, model={"rope_theta": 500_000, "dim": 3e2, "mtp_loss_weights": [1, 0.5]}).model
    assert isinstance(model.rope_theta, float)
    assert isinstance(model.dim, int)
    assert model.mtp_loss_weights == (1.0, 0.5)


def test_derive_config_replaces_keys_and_sections() -> None:
    run = RunConfig("trial", trackers=("wandb",))
    derived = derive_config(V1, model={"dim": 512, "n_layers": 8}, run=run, **{"optimizer.muon_lr": 0.01})
    assert derived.model == replace(V1.model, dim=512, n_layers=8)
    assert derived.optimizer == replace(V1.optimizer, muon_lr=0.01)
    assert (derived.run, derived.data) == (run, V1.data)
    assert HyMoConfig() == V1


def test_derive_config_judges_changes_together() -> None:
    derived = derive_config(V1, **{"model.mtp_depth": 1, "model.mtp_loss_weights": [0.3]})
    assert derived.model.mtp_loss_weights == (0.3,)


def test_derive_config_reports_everything_at_once() -> None:
    changes: dict[str, Any] = {"optimizer.muon_lr": "x", "model.dmi": 3, "optimzer": {}, "run.name": "a"}
    with pytest.raises(ConfigError) as error:
        derive_config(V1, **changes)
    assert str(error.value).splitlines() == [
        "optimzer: unknown key (did you mean 'optimizer'?)",
        "model.dmi: unknown key (did you mean 'dim'?)",
        "optimizer.muon_lr: expected float, got str 'x'",
    ]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model.dim": 0}, "model.dim: expected int in [1, 65536], got 0"),
        ({"model.dim": True}, "model.dim: expected int, got bool True"),
        ({"model.dim": 3.5}, "model.dim: expected int, got float 3.5"),
        ({"model.dim": None}, "model.dim: expected int, got null"),
        ({"model.vocab_size": 5 + BYTE_TOKENS}, "model.vocab_size: expected int in [262, 16777216], got 261"),
        (
            {"model.n_kv_groups": 5},
            "model.n_kv_groups: expected a divisor of n_heads (16), got 5; 1, 2, 4, 8, 16 would work",
        ),
        (
            {"model.gdn_n_key_heads": 4},
            "model.gdn_n_key_heads: expected a divisor of gdn_n_heads (14), got 4; 1, 2, 7, 14 would work",
        ),
        ({"model.qk_rope_head_dim": 3}, "model.qk_rope_head_dim: expected an even number, got 3"),
        (
            {"model.qk_rope_head_dim": 0, "model.qk_nope_head_dim": 0},
            "model.qk_nope_head_dim: expected at least 1 dim with qk_rope_head_dim, got 0 + 0",
        ),
        (
            {"model.gdn_rope_fraction": 0.3},
            "model.gdn_rope_fraction: expected an even number of the 128 key dims, got 0.3 of them, 38.4;"
            " 0.296875 would work",
        ),
        (
            {"model.n_activated_experts": 17},
            "model.n_activated_experts: expected at most n_routed_experts (16), got 17",
        ),
        ({"model.mla_offset": 4}, "model.mla_offset: expected less than mla_every (4), got 4"),
        (
            {"model.mtp_depth": 3},
            "model.mtp_loss_weights: expected one weight for each of mtp_depth (3) heads, got 2",
        ),
        ({"model.logit_softcap": 0}, "model.logit_softcap: expected float in [1e-6, 1e6], got 0.0"),
        (
            {"model.gdn_rule": "linear"},
            "model.gdn_rule: expected one of gated_delta, delta, gated_linear, got str 'linear'",
        ),
        ({"optimizer.adamw_betas": [0.9, 1.0]}, "optimizer.adamw_betas[1]: expected float in [0, 1), got 1.0"),
        ({"optimizer.adamw_betas": [0.9]}, "optimizer.adamw_betas: expected list of 2 float, got a list of 1"),
        ({"optimizer.muon_lr": math.nan}, "optimizer.muon_lr: expected float in [0, 1e6], got nan"),
        ({"optimizer.cautious_wd": 1}, "optimizer.cautious_wd: expected true or false, got int 1"),
        (
            {"scheduler.warmup_frac": 0.1},
            "scheduler.stable_frac: expected warmup_frac + stable_frac + decay_frac = 1, got 1.08; 0.75 would work",
        ),
        (
            {"training.compile": "jit"},
            "training.compile: expected one of inductor, aot_eager, none, got str 'jit'",
        ),
        (
            {"training.max_seq_len": 8192},
            "training.max_seq_len: expected at most model.max_seq_len (4096), got 8192",
        ),
        ({"training.max_seq_len": 2}, "training.max_seq_len: expected more than model.mtp_depth (2), got 2"),
        (
            {"data.val_tokens": 100},
            "data.val_tokens: expected at least training.max_seq_len (4096), one row, got 100",
        ),
        ({"data.sources": []}, "data.sources: expected at least one source, got none"),
        ({"data.sources": [{"name": "a", "weight": 0.5}]}, "data.sources: expected weights that sum to 1, got 0.5"),
        ({"data.sources": [{"name": "a"}]}, "data.sources[0].weight: missing; it has no default"),
        (
            {"data.sources": [{"name": "a", "weight": 0.5}] * 2},
            "data.sources[1].name: expected a name of its own, got 'a' again",
        ),
        (
            {"data.corpus": "embedded", "data.sources": [{"name": "web", "weight": 1}]},
            "data.sources[0].name: expected prose or code, got 'web'",
        ),
        ({"data.corpus": "none"}, "data.corpus: expected embedded or null, got str 'none'"),
        ({"run.name": "a/b"}, "run.name: expected a name that can be a folder's, got 'a/b'"),
        ({"run.trackers": ["mlflow"]}, "run.trackers[0]: expected one of tensorboard, wandb, got str 'mlflow'"),
        ({"run.profile": [5, 3]}, "run.profile: expected a first step and one not before it, got [5, 3]"),
        ({"run": 3}, "run: expected mapping, got int 3"),
    ],
)
def test_bad_value_is_one_line_that_names_it(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the whole message is compared
        derive_config(V1, **changes)
    assert str(error.value) == line


def test_global_batch_is_checked_against_the_ranks() -> None:
    training = TrainingConfig(global_batch_size=128)
    assert training.rows_per_step(4) == 128
    with pytest.raises(ConfigError) as error:
        training.tokens_per_step(2)
    assert str(error.value) == (
        "training.global_batch_size: expected micro_batch_size x gradient_accumulation_steps x ranks"
        " = 4 x 8 x 2 = 64, got 128"
    )
