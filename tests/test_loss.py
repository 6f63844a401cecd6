"""The loss: cross-entropy against its definition in fp64, and which label belongs to which token."""

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
from hymo.loss import label_counts, label_masks, loss, token_nats, weighted_cross_entropy
from hymo.model import forward, model_spec, trunk
from hymo.params import initialize
from tests.configs import tiny_config, windows

CFG = tiny_config().model


def defined(hidden: Tensor, table: Tensor, labels: Tensor, weight: Tensor, cap: float) -> Tensor:
    """The sum over tokens, one at a time."""
    total = torch.zeros((), dtype=hidden.dtype)
    for h, y, w in zip(hidden, labels.tolist(), weight, strict=True):
        if w != 0:
            logits = cap * torch.tanh(table @ h / cap)
            total = total + w * (torch.logsumexp(logits, 0) - logits[y])
    return total


def case(seed: int, n: int, d: int, u: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, table, labels and weights, a third of which are ignored."""
    draw = torch.Generator().manual_seed(seed)
    hidden, table = scale * torch.randn(n, d, generator=draw), torch.randn(u, d, generator=draw)
    labels, weight = torch.randint(0, u, (n,), generator=draw), torch.rand(n, generator=draw)
    ignored = torch.rand(n, generator=draw) < 1 / 3
    return hidden, table, labels.masked_fill(ignored, IGNORED), weight.masked_fill(ignored, 0.0)


@given(
    seed=st.integers(0, 2**31),
    n=st.integers(1, 12),
    d=st.integers(1, 6),
    u=st.integers(2, 20),
    cap=st.sampled_from([1.0, 15.0]),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    budget=st.sampled_from([1, 20, 37, 50, 2**20]),
)
def test_cross_entropy_and_its_gradients_are_the_definition_whatever_the_chunks(
    seed: int, n: int, d: int, u: int, cap: float, scale: float, budget: int
) -> None:
    hidden, table, labels, weight = case(seed, n, d, u, scale)

    def chunked(hidden: Tensor, table: Tensor) -> Tensor:
        return weighted_cross_entropy(hidden, table, labels, weight, cap=cap, logit_budget=budget)

    wide = hidden.double(), table.double()
    expected = defined(*wide, labels, weight.double(), cap)
    torch.testing.assert_close(chunked(hidden, table).double(), expected, rtol=1e-5, atol=1e-5)
    true = torch.func.grad(lambda h, w: defined(h, w, labels, weight.double(), cap), argnums=(0, 1))(*wide)
    for factor in (1.0, -2.5):
        found = torch.func.grad(lambda h, w, c=factor: c * chunked(h, w), argnums=(0, 1))(hidden, table)
        for x, y in zip(found, true, strict=True):
            torch.testing.assert_close(x.double(), factor * y, rtol=1e-4, atol=1e-5)


def test_ordinary_autograd_gives_the_same_gradients() -> None:
    hidden, table, labels, weight = case(0, 9, 4, 11)

    def total(h: Tensor, w: Tensor) -> Tensor:
        return 3 * weighted_cross_entropy(h, w, labels, weight, cap=15.0, logit_budget=22)

    expected = torch.func.grad(total, argnums=(0, 1))(hidden, table)
    hidden.requires_grad_()
    table.requires_grad_()
    total(hidden, table).backward()  # type: ignore[no-untyped-call]
    assert torch.equal(hidden.grad, expected[0])  # type: ignore[arg-type]
    assert torch.equal(table.grad, expected[1])  # type: ignore[arg-type]


@pytest.mark.parametrize(("hidden_dim", "table_dim"), [(0, None), (None, 0), (0, 0)])
def test_mapped_cross_entropy_is_one_at_a_time(hidden_dim: int | None, table_dim: int | None) -> None:
    hidden, table, labels, weight = case(1, 8, 4, 11)
    other = case(2, 8, 4, 11)
    hiddens = torch.stack([hidden, other[0]]) if hidden_dim == 0 else hidden
    tables = torch.stack([table, other[1]]) if table_dim == 0 else table

    def total(h: Tensor, w: Tensor) -> Tensor:
        return weighted_cross_entropy(h, w, labels, weight, cap=15.0, logit_budget=33)

    mapped = torch.func.vmap(torch.func.grad_and_value(total, argnums=(0, 1)), in_dims=(hidden_dim, table_dim))
    for i in range(2):
        one = torch.func.grad_and_value(total, argnums=(0, 1))(
            hiddens[i] if hidden_dim == 0 else hidden, tables[i] if table_dim == 0 else table
        )
        tree.map(torch.testing.assert_close, tree.map(lambda x, i=i: x[i], mapped(hiddens, tables)), one)


def test_chunks_in_which_everything_is_ignored_give_nothing() -> None:
    hidden, table, labels, weight = case(3, 8, 4, 11)
    weight = torch.cat([torch.zeros(4), weight[4:] + 0.1])
    labels = torch.cat([torch.full((4,), IGNORED), labels[4:].clamp(min=0)])

    def total(h: Tensor, n: int) -> Tensor:
        return weighted_cross_entropy(h, table, labels[n:], weight[n:], cap=15.0, logit_budget=22)

    torch.testing.assert_close(total(hidden, 0), total(hidden[4:], 4))
    assert (torch.func.grad(total)(hidden, 0)[:4] == 0).all()
    nothing = weighted_cross_entropy(hidden, table, labels, torch.zeros(8), cap=15.0, logit_budget=22)
    assert nothing.item() == 0


def test_bf16_hidden_states_give_an_fp32_loss_and_bf16_gradients() -> None:
    hidden, table, labels, weight = case(4, 64, 16, 50)
    low = hidden.bfloat16(), table.bfloat16()

    def total(h: Tensor, w: Tensor) -> Tensor:
        return weighted_cross_entropy(h, w, labels, weight, cap=15.0, logit_budget=500)

    grads, value = torch.func.grad_and_value(total, argnums=(0, 1))(*low)
    true, expected = torch.func.grad_and_value(total, argnums=(0, 1))(*(x.double() for x in low))
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), expected.double(), rtol=1e-2, atol=0)
    for found, exact in zip(grads, true, strict=True):
        assert found.dtype == torch.bfloat16
        assert (found.double() - exact).norm() <= 2e-2 * exact.norm()


def test_the_gradient_of_a_full_budget_equals_pytorch_without_a_cap() -> None:
    hidden, table, labels, _ = case(5, 20, 4, 11)
    labels = labels.clamp(min=0)
    ours = torch.func.grad(
        lambda h: weighted_cross_entropy(h, table, labels, torch.full((20,), 1 / 20), cap=1e4, logit_budget=2**20)
    )(hidden)
    theirs = torch.func.grad(lambda h: torch.nn.functional.cross_entropy(h @ table.mT, labels))(hidden)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


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
    module = import_module("hymo.loss")
    monkeypatch.setattr(module, "weighted_cross_entropy", reading)
    monkeypatch.setattr(module, "mtp", looking)
    params = initialize(model_spec(CFG), 0)
    batch = make_batch(1 + torch.arange(33)[None])
    loss(params, batch, label_counts(batch, 2), cfg=CFG)
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
    backend = EAGER._replace(logit_budget=512 * 10)
    found, parts = loss(params, batch, label_counts(batch, 2), cfg=CFG, backend=backend)
    total, means = by_hand(params, batch, CFG)
    torch.testing.assert_close(found.double(), total, rtol=1e-5, atol=0)
    torch.testing.assert_close(parts.main.double(), means[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(parts.mtp.double(), torch.stack(means[1:]), rtol=1e-5, atol=0)


def test_token_nats_are_the_main_loss_label_by_label() -> None:
    params = initialize(model_spec(CFG), 2)
    batch = make_batch(windows(8, 2, 65))
    batch = batch._replace(labels=batch.labels.index_fill(1, torch.tensor([3, 4, 60]), IGNORED))
    nats = token_nats(params, batch, cfg=CFG, backend=EAGER._replace(logit_budget=512 * 7))
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
