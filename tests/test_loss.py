"""The loss: which label belongs to which token, and the heads' sum against its definition in fp64."""

from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hymo import tree
from hymo.backend import EAGER
from hymo.batch import IGNORED, Batch, make_batch
from hymo.config import ModelConfig
from hymo.layers.embedding import unembed
from hymo.layers.mtp import mtp
from hymo.layers.norm import rms_norm
from hymo.loss import label_counts, label_masks, loss, token_nats
from hymo.model import forward, model_spec, trunk
from hymo.params import initialize
from hymo_kernels import linear_cross_entropy
from tests.configs import tiny_config, windows

CFG = tiny_config().model


def documents(batch: Batch) -> list[list[tuple[int, int]]]:
    """Of each row, begin and end of its documents."""
    rows = []
    for at in batch.position.tolist():
        starts = [t for t, p in enumerate(at) if p == 0]
        rows.append(list(zip(starts, [*starts[1:], len(at)], strict=True)))
    return rows


@given(st.integers(0, 2**31), st.integers(4, 40), st.integers(0, 3))
def test_a_label_counts_if_all_tokens_up_to_it_are_of_one_document(seed: int, time: int, depth: int) -> None:
    batch = make_batch(windows(seed, 2, time + 1, document=6))
    holes = torch.rand(2, time, generator=torch.Generator().manual_seed(seed)) < 0.2
    batch = batch._replace(labels=batch.labels.masked_fill(holes, IGNORED))
    for k, mask in enumerate(label_masks(batch, depth)):
        for b, row in enumerate(documents(batch)):
            for begin, end in row:
                for i in range(begin, end):
                    # Input i + k is the last one that head k is given, and must be of i's document; its label follows.
                    assert mask[b, i].item() == (i + k < end and not holes[b, i + k])
    counts = label_counts(batch, depth)
    assert counts.tolist() == [max(1, int(mask.sum())) for mask in label_masks(batch, depth)]


def test_every_label_of_the_next_token_counts_the_first_and_the_end_of_documents_too() -> None:
    batch = make_batch(windows(0, 4, 33, document=5))
    assert label_masks(batch, 0)[0].all()


def test_head_k_is_given_token_i_plus_k_and_asked_for_the_one_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that name their own index show which embedding and which label each head gets."""
    asked: list[tuple[Tensor, Tensor]] = []
    given_: list[Tensor] = []

    def reading(hidden: Tensor, table: Tensor, labels: Tensor, weight: Tensor, **how: Any) -> Tensor:
        asked.append((labels, weight))
        return hidden.sum() * 0

    def looking(p: Any, hidden: Tensor, ahead: Tensor, **how: Any) -> Tensor:
        given_.append(ahead)
        return hidden

    # `hymo.loss` the function hides `hymo.loss` the module.
    monkeypatch.setattr(import_module("hymo.loss"), "mtp", looking)
    params = initialize(model_spec(CFG), 0)
    batch = make_batch(1 + torch.arange(33)[None])
    loss(params, batch, label_counts(batch, 2), cfg=CFG, backend=EAGER._replace(cross_entropy=reading))
    for k, (labels, weight) in enumerate(asked):
        valid = 32 - k
        assert labels[:valid].tolist() == [1 + i + k + 1 for i in range(valid)]
        torch.testing.assert_close(weight[:valid], torch.full((valid,), 1 / valid))
        assert (weight[valid:] == 0).all()
    for k, ahead in enumerate(given_, start=1):
        assert torch.equal(ahead[0, : 32 - k], params.table[1 + k : 33])


def by_hand(params: Any, batch: Batch, cfg: ModelConfig) -> tuple[Tensor, list[Tensor]]:
    """Nats of every label that counts, for the next token and for each head, document by document."""
    nats: list[list[Tensor]] = [[] for _ in range(cfg.mtp_depth + 1)]
    for b, row in enumerate(documents(batch)):
        for begin, end in row:
            tokens, labels = batch.tokens[b : b + 1, begin:end], batch.labels[b, begin:end]
            x = params.table[tokens]
            hidden = trunk(params, x, cfg=cfg, position=torch.arange(end - begin)[None]).hidden
            for k in range(cfg.mtp_depth + 1):
                if k and end - begin <= k:
                    break
                hidden = mtp(params.mtp[k - 1], hidden[:, :-1], x[:, k:], cfg=cfg) if k else hidden
                logits = unembed(rms_norm(hidden, params.norm, eps=cfg.norm_eps), params.table, cap=cfg.logit_softcap)
                log_p = logits.double().log_softmax(-1)[0]
                nats[k].append(-log_p[torch.arange(end - begin - k), labels[k:]])
    means = [torch.cat(each).mean() for each in nats]
    weighted = zip(cfg.mtp_loss_weights, means[1:], strict=True)
    return means[0] + sum(w * m for w, m in weighted), means


def test_the_whole_loss_is_its_definition_document_by_document() -> None:
    params = initialize(model_spec(CFG), 1)
    params = tree.map(lambda x: x if x.ndim == 1 else 2 * x, params)
    batch = make_batch(windows(7, 3, 65, document=12))
    backend = EAGER._replace(cross_entropy=partial(linear_cross_entropy, logit_bytes=4 * 512 * 10))
    found, parts = loss(params, batch, label_counts(batch, 2), cfg=CFG, backend=backend)
    total, means = by_hand(params, batch, CFG)
    torch.testing.assert_close(found.double(), total, rtol=1e-5, atol=0)
    torch.testing.assert_close(parts.main.double(), means[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(parts.mtp.double(), torch.stack(means[1:]), rtol=1e-5, atol=0)


def test_token_nats_are_the_main_loss_label_by_label() -> None:
    params = initialize(model_spec(CFG), 2)
    batch = make_batch(windows(8, 2, 65))
    batch = batch._replace(labels=batch.labels.index_fill(1, torch.tensor([3, 4, 60]), IGNORED))
    backend = EAGER._replace(cross_entropy=partial(linear_cross_entropy, logit_bytes=4 * 512 * 7))
    nats = token_nats(params, batch, cfg=CFG, backend=backend)
    logits, _ = forward(params, batch.tokens, cfg=CFG)
    log_p = logits.double().log_softmax(-1).gather(-1, batch.labels.clamp(min=0)[..., None])[..., 0]
    expected = torch.where(batch.labels == IGNORED, 0.0, -log_p)
    torch.testing.assert_close(nats.double(), expected, rtol=1e-5, atol=1e-6)
    _, parts = loss(params, batch, label_counts(batch, 2), cfg=CFG)
    torch.testing.assert_close(nats.sum() / (2 * 61), parts.main)


def test_an_untied_head_is_used_by_every_depth() -> None:
    cfg = tiny_config(model={"tie_embeddings": False}).model
    params = initialize(model_spec(cfg), 0)
    batch = make_batch(windows(0, 1, 65))
    counts = label_counts(batch, 2)
    grads = torch.func.grad(lambda p: loss(p, batch, counts, cfg=cfg)[0])(params)
    absent = torch.ones(512, dtype=torch.bool).index_fill(0, batch.tokens.flatten(), False)
    assert (grads.table[absent] == 0).all()
    assert (grads.head[absent] != 0).any(-1).all()
    zero = params._replace(head=torch.zeros_like(params.head))
    _, parts = loss(zero, batch, counts, cfg=cfg)
    torch.testing.assert_close(torch.stack([parts.main, *parts.mtp]), torch.full((3,), 512.0).log())


def test_loss_weights_scale_each_depth() -> None:
    cfg = tiny_config(model={"mtp_loss_weights": [0.7, 0.0]}).model
    params = initialize(model_spec(cfg), 0)
    batch = make_batch(windows(0, 2, 65))
    total, parts = loss(params, batch, label_counts(batch, 2), cfg=cfg)
    torch.testing.assert_close(total, parts.main + 0.7 * parts.mtp[0])


@pytest.mark.parametrize("depth", [0, 1])
def test_heads_are_optional(depth: int) -> None:
    cfg = tiny_config(model={"mtp_depth": depth, "mtp_loss_weights": [0.3] * depth}).model
    params = initialize(model_spec(cfg), 0)
    batch = make_batch(windows(0, 2, 65))
    total, parts = loss(params, batch, label_counts(batch, depth), cfg=cfg)
    assert parts.mtp.shape == (depth,)
    torch.testing.assert_close(total, parts.main + 0.3 * parts.mtp.sum())


def test_tokens_without_a_label_have_no_say() -> None:
    params = initialize(model_spec(CFG), 0)
    batch = make_batch(windows(0, 2, 65))
    batch = batch._replace(labels=torch.full_like(batch.labels, IGNORED))
    grads, (value, _) = torch.func.grad_and_value(
        lambda p: loss(p, batch, label_counts(batch, 2), cfg=CFG), has_aux=True
    )(params)
    assert value.item() == 0
    assert all((leaf == 0).all() for leaf in tree.leaves(grads))
