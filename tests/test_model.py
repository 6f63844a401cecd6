"""The whole model: documents do not see each other, heads do not see the future, and it starts at ln(vocabulary)."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hymo import tree
from hymo.backend import EAGER
from hymo.batch import Batch, document_position, make_batch
from hymo.config import ModelConfig
from hymo.config_yaml import load_config
from hymo.layers.gdn import gdn, gdn_spec
from hymo.layers.mla import mla, mla_spec
from hymo.layers.moe import moe, moe_spec
from hymo.layers.norm import rms_norm
from hymo.layers.rope import rotary
from hymo.loss import label_counts, label_masks, loss, token_nats
from hymo.model import forward, model_spec, trunk
from hymo.params import initialize, partition
from tests.configs import setup, tiny_config, windows

CFG = tiny_config().model
# A row of three documents: A [0, 21), B [21, 50), C [50, 64); chunks of the scan begin elsewhere.
POSITION = torch.cat([torch.arange(21), torch.arange(29), torch.arange(14)])[None]
A, B = slice(0, 21), slice(21, 50)


def embeddings(seed: int, rows: int = 1, scale: float = 1.0, cfg: ModelConfig = CFG) -> Tensor:
    return scale * torch.randn(rows, 64, cfg.dim, generator=torch.Generator().manual_seed(seed))


def other_a(x: Tensor, seed: int = 99) -> Tensor:
    """The same row with another document A."""
    return torch.cat([embeddings(seed, scale=10.0)[:, A], x[:, A.stop :]], dim=1)


def mixer(kind: str) -> Any:
    """One part of the model as a function of its input alone."""
    if kind == "attention":
        p = initialize(mla_spec(CFG), 0)
        return lambda x: mla(p, x, cfg=CFG, position=POSITION)[0]
    if kind == "convolution":
        taps = torch.randn(CFG.dim, 4, generator=torch.Generator().manual_seed(0))
        sizes = {"key_heads": 1, "key_dim": CFG.dim // 4, "value_heads": 1}
        convolve = partial(EAGER.conv, position=POSITION, **sizes)
        angles = rotary(POSITION, dims=4, theta=1e4)
        return lambda x: torch.cat(convolve(x, taps, *angles)[:3], dim=-1).flatten(2)
    cfg = tiny_config(model={"gdn_rule": kind.removesuffix(" scan"), "gdn_conv": 1}).model
    p = initialize(gdn_spec(cfg), 0)
    return lambda x: gdn(p, x, cfg=cfg, position=POSITION)[0]


MIXERS = ["attention", "convolution", "gated_delta scan", "delta scan", "gated_linear scan"]


@pytest.mark.parametrize("kind", MIXERS)
def test_no_bit_of_another_document_enters(kind: str) -> None:
    f, x = mixer(kind), embeddings(0)
    weight = embeddings(1)
    y, pull = torch.func.vjp(f, x)
    changed, pull_changed = torch.func.vjp(f, other_a(x))
    assert torch.equal(changed[:, A.stop :], y[:, A.stop :])
    assert not torch.equal(changed[:, A], y[:, A])
    only_b = torch.zeros_like(weight)
    only_b[:, B] = weight[:, B]
    (grad,), (grad_changed,) = pull(only_b), pull_changed(only_b)
    assert torch.equal(grad[:, B], grad_changed[:, B])
    assert grad[:, B].abs().max() > 0
    assert (grad[:, A] == 0).all()
    assert (grad[:, B.stop :] == 0).all()


def test_no_label_reaches_into_another_document() -> None:
    """Heads that look k tokens ahead have a label only where all k are of the document, and that is all they need."""
    tokens = windows(0, 1, 65, document=10**9).masked_fill(torch.arange(65) == 21, 0)
    batch = make_batch(tokens)
    changed = make_batch(torch.cat([windows(1, 1, 21, document=10**9), tokens[:, 21:]], dim=1))
    for k, (mask, same) in enumerate(zip(label_masks(batch, 2), label_masks(changed, 2), strict=True)):
        assert torch.equal(mask, same)
        labels, others = (each.labels.roll(-k, dims=-1) for each in (batch, changed))
        assert torch.equal(labels[:, 21:][same[:, 21:]], others[:, 21:][same[:, 21:]])
        # The last label of A is the delimiter; looking further, A has none.
        assert mask[0, : 21 - k].all()
        assert labels[0, 20 - k] == 0
        assert not mask[0, 21 - k : 21].any()


def whole(x: Tensor, params: Any, cfg: ModelConfig = CFG, position: Tensor = POSITION) -> Tensor:
    """Logits of a row of embeddings."""
    hidden = trunk(params, x, cfg=cfg, position=position).hidden
    return rms_norm(hidden, params.norm, eps=cfg.norm_eps) @ params.table.mT


def assert_close(found: Tensor, true: Tensor, tolerance: float = 1e-6) -> None:
    assert (found - true).norm() <= tolerance * true.norm()


@pytest.mark.parametrize("rule", ["gated_delta", "gated_linear"])
def test_the_whole_model_keeps_documents_apart_in_logits_and_gradients(rule: str) -> None:
    cfg = tiny_config(model={"gdn_rule": rule, "gdn_ffn_dim": 16}).model
    params = initialize(model_spec(cfg), 0)
    x, weight = embeddings(0), torch.randn(29, 512, generator=torch.Generator().manual_seed(1))

    def of_b(x: Tensor) -> tuple[Tensor, Tensor]:
        logits = whole(x, params, cfg)[0, B]
        return (logits * weight).sum(), logits

    grad, logits = torch.func.grad(of_b, has_aux=True)(x)
    grad_changed, logits_changed = torch.func.grad(of_b, has_aux=True)(other_a(x))
    assert_close(logits_changed, logits)
    assert_close(grad_changed[:, B], grad[:, B])
    assert grad[:, B].norm() > 0
    assert (grad[:, A] == 0).all()
    assert (grad[:, B.stop :] == 0).all()


def test_experts_keep_documents_apart_when_none_is_dropped() -> None:
    p = initialize(moe_spec(CFG), 0)
    x = embeddings(0)
    f = lambda x: moe(p, x, cfg=CFG)[0]  # noqa: E731
    assert_close(f(other_a(x))[:, A.stop :], f(x)[:, A.stop :])
    only_b = torch.zeros_like(x)
    only_b[:, B] = 1
    assert (torch.func.vjp(f, x)[1](only_b)[0][:, A] == 0).all()


def test_a_packed_document_is_the_document_alone() -> None:
    params = initialize(model_spec(CFG), 0)
    x = embeddings(0)
    packed = whole(x, params)[:, B]
    alone = whole(x[:, B], params, position=torch.arange(29)[None])
    assert_close(packed, alone)

    def total(x: Tensor, position: Tensor, at: slice) -> Tensor:
        return whole(x, params, position=position)[:, at].square().sum()

    inside = torch.func.grad(total)(x, POSITION, B)[:, B]
    outside = torch.func.grad(total)(x[:, B], torch.arange(29)[None], slice(None))
    assert_close(inside, outside, 2e-6)


def test_losses_of_packed_documents_are_those_of_the_documents_alone() -> None:
    """All heads, and the gradient of every parameter."""
    params = initialize(model_spec(CFG), 0)
    tokens = windows(0, 1, 51, document=10**9).masked_fill(torch.arange(51) == 21, 0)
    packed = make_batch(tokens)
    parts = [make_batch(tokens[:, :22]), make_batch(tokens[:, 21:])]
    counts = label_counts(packed, 2)
    assert counts.tolist() == sum(label_counts(each, 2) for each in parts).tolist()  # type: ignore[union-attr]

    def gradient(batch: Batch) -> Any:
        return torch.func.grad_and_value(lambda p: loss(p, batch, counts, cfg=CFG)[0])(params)

    together, apart = gradient(packed), tree.add(*(gradient(each) for each in parts))
    for name, found in tree.paths(together).items():
        assert_close(found, tree.paths(apart)[name], 1e-5)


def test_rows_are_independent_and_their_order_is_free() -> None:
    params = initialize(model_spec(CFG), 0)
    tokens = windows(0, 3, 64, document=15)
    logits, _ = forward(params, tokens, cfg=CFG)
    swapped, _ = forward(params, tokens[[2, 0, 1]], cfg=CFG)
    assert_close(swapped, logits[[2, 0, 1]])
    changed, _ = forward(params, torch.cat([tokens[:1], windows(5, 2, 64)]), cfg=CFG)
    assert_close(changed[0], logits[0])


def test_what_follows_changes_nothing_before() -> None:
    params = initialize(model_spec(CFG), 0)
    tokens = windows(0, 1, 64, document=10**9)
    logits, _ = forward(params, tokens, cfg=CFG)
    for t in (1, 31, 63):
        changed, _ = forward(params, torch.cat([tokens[:, :t], windows(9, 1, 64 - t)], dim=1), cfg=CFG)
        assert_close(changed[:, :t], logits[:, :t])
        assert (changed[:, t] - logits[:, t]).norm() > 1e-3 * logits[:, t].norm()


def test_the_cap_bounds_the_logits_of_every_head() -> None:
    params = initialize(model_spec(CFG), 0)
    huge = params._replace(table=1e4 * params.table, norm=1e3 * params.norm)
    batch = make_batch(windows(0, 1, 65))
    logits, _ = forward(huge, batch.tokens, cfg=CFG)
    assert 14.9 < logits.abs().max() <= 15
    # Softmax of logits in [-15, 15] gives no label less than this; without a cap it would be thousands of nats.
    worst = 2 * CFG.logit_softcap + math.log(512)
    _, parts = loss(huge, batch, label_counts(batch, 2), cfg=CFG)
    free = tiny_config(model={"logit_softcap": 1e6}).model
    _, uncapped = loss(huge, batch, label_counts(batch, 2), cfg=free)
    for capped, wild in zip([parts.main, *parts.mtp], [uncapped.main, *uncapped.mtp], strict=True):
        assert capped <= worst < 100 < wild


def starting_loss(cfg: ModelConfig, rows: int, time: int) -> Tensor:
    """Losses of all heads on random tokens, untrained, and ln(vocabulary)."""
    params = initialize(model_spec(cfg), 0)
    batch = make_batch(windows(0, rows, time + 1, vocab=cfg.vocab_size))
    with torch.no_grad():
        _, parts = loss(params, batch, label_counts(batch, cfg.mtp_depth), cfg=cfg)
    return torch.stack([parts.main, *parts.mtp]) - math.log(cfg.vocab_size)


@pytest.mark.parametrize("size", ["tests", "tiny.yaml"])
def test_the_loss_starts_at_the_log_of_the_vocabulary(size: str, request: pytest.FixtureRequest) -> None:
    cfg = CFG if size == "tests" else load_config(request.config.rootpath / "recipes" / "configs" / size).model
    assert starting_loss(cfg, 2, 256).abs().max() < 0.1


def full_width(request: pytest.FixtureRequest, **changes: Any) -> ModelConfig:
    """v1.0 with one layer of each kind: 896 wide, 64,256 tokens."""
    full = load_config(request.config.rootpath / "recipes" / "configs" / "hymo_750m.yaml").model
    assert (full.dim, full.vocab_size, full.n_routed_experts) == (896, 64256, 16)
    return replace(full, n_layers=2, mla_every=2, **changes)


def test_the_loss_starts_at_the_log_of_the_vocabulary_at_full_width(request: pytest.FixtureRequest) -> None:
    cfg = full_width(request, n_routed_experts=2, mtp_depth=0, mtp_loss_weights=())
    batch = make_batch(windows(0, 1, 129, vocab=cfg.vocab_size))
    with torch.no_grad():
        nats = token_nats(initialize(model_spec(cfg), 0), batch, cfg=cfg)
    assert abs(nats.mean() - math.log(cfg.vocab_size)) < 0.1


@pytest.mark.heavy
def test_the_losses_of_all_heads_start_there_at_full_width_with_all_experts(request: pytest.FixtureRequest) -> None:
    assert starting_loss(full_width(request), 2, 128).abs().max() < 0.1


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "every option": {
        "gdn_value_skip": True,
        "gdn_allow_neg_eigval": True,
        "gdn_ffn_dim": 16,
        "tie_embeddings": False,
        "n_shared_experts": 2,
    },
    "delta": {"gdn_rule": "delta"},
    "gated_linear": {"gdn_rule": "gated_linear"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_gets_a_gradient(variant: str) -> None:
    cfg = tiny_config(model=VARIANTS[variant]).model
    spec = model_spec(cfg)
    trainable, buffers = partition(spec, initialize(spec, 0))
    batch = make_batch(windows(0, 4, 65))
    counts = label_counts(batch, 2)
    grads = torch.func.grad(lambda p: loss(tree.combine(p, buffers), batch, counts, cfg=cfg)[0])(trainable)
    dead = [name for name, grad in tree.paths(grads).items() if not (grad.norm() > 0)]
    assert dead == []
    # Nor is a part of one dead: no expert, no head, no feature.
    for name, grad in tree.paths(grads).items():
        if "table" not in name:
            assert (grad != 0).float().mean() > 0.99, name


def train_on_noise(steps: int, rows: int, **changes: Any) -> Tensor:
    """Losses of the three heads, step by step, on tokens that nobody can predict; relative to ln(vocabulary)."""
    cfg = tiny_config(
        training={"micro_batch_size": rows, "gradient_accumulation_steps": 1},
        scheduler={"total_steps": steps, "warmup_frac": 0.0, "stable_frac": 1.0, "decay_frac": 0.0},
        optimizer={"adamw_lr": 3e-3},
        **changes,
    )
    parts = setup(cfg)
    state, step, seen = parts.state(), parts.step(donate=True), []
    for i in range(steps):
        fresh = windows(1000 + i, 1, rows, 65, document=512)
        state, metrics = step(state, make_batch(fresh))
        seen.append(torch.stack([metrics.main, *metrics.mtp]))
    return torch.stack(seen) - math.log(cfg.model.vocab_size)


def test_nobody_predicts_noise() -> None:
    assert train_on_noise(20, 4).min() > -0.05


@pytest.mark.heavy
def test_nobody_predicts_noise_in_300_steps() -> None:
    assert train_on_noise(300, 8).min() > -0.05


def test_attention_may_be_any_implementation_of_the_record() -> None:
    calls: list[float] = []

    def counting(*args: Any, **how: Any) -> Tensor:
        calls.append(how["scale"])
        return EAGER.attend(*args, **how)

    params = initialize(model_spec(CFG), 0)
    tokens = windows(0, 1, 20)
    run = partial(forward, params, tokens, cfg=CFG)
    assert torch.equal(run(backend=EAGER._replace(attend=counting))[0], run()[0])
    assert calls == [CFG.qk_head_dim**-0.5]


def test_a_row_starts_a_document_whatever_its_first_token() -> None:
    params = initialize(model_spec(CFG), 0)
    tokens = windows(0, 1, 20, document=10**9)
    assert document_position(tokens)[0, 0] == 0
    logits, _ = forward(params, tokens, cfg=CFG)
    explicit = trunk(params, params.table[tokens], cfg=CFG, position=torch.arange(20)[None]).hidden
    normed = rms_norm(explicit, params.norm, eps=CFG.norm_eps)
    torch.testing.assert_close(logits, 15 * torch.tanh(normed @ params.table.mT / 15))
