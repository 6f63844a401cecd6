"""The cross-entropy of a linear head in plain PyTorch, against its definition in fp64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hymo_kernels import linear_cross_entropy


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
    return hidden, table, labels.masked_fill(ignored, -100), weight.masked_fill(ignored, 0.0)


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
        return linear_cross_entropy(hidden, table, labels, weight, cap=cap, logit_bytes=4 * budget)

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
        return 3 * linear_cross_entropy(h, w, labels, weight, cap=15.0, logit_bytes=4 * 22)

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
        return linear_cross_entropy(h, w, labels, weight, cap=15.0, logit_bytes=4 * 33)

    mapped = torch.func.vmap(torch.func.grad_and_value(total, argnums=(0, 1)), in_dims=(hidden_dim, table_dim))
    for i in range(2):
        one = torch.func.grad_and_value(total, argnums=(0, 1))(
            hiddens[i] if hidden_dim == 0 else hidden, tables[i] if table_dim == 0 else table
        )
        found, value = mapped(hiddens, tables)
        torch.testing.assert_close((tuple(x[i] for x in found), value[i]), one)


def test_chunks_in_which_everything_is_ignored_give_nothing() -> None:
    hidden, table, labels, weight = case(3, 8, 4, 11)
    weight = torch.cat([torch.zeros(4), weight[4:] + 0.1])
    labels = torch.cat([torch.full((4,), -100), labels[4:].clamp(min=0)])

    def total(h: Tensor, n: int) -> Tensor:
        return linear_cross_entropy(h, table, labels[n:], weight[n:], cap=15.0, logit_bytes=4 * 22)

    torch.testing.assert_close(total(hidden, 0), total(hidden[4:], 4))
    assert (torch.func.grad(total)(hidden, 0)[:4] == 0).all()
    nothing = linear_cross_entropy(hidden, table, labels, torch.zeros(8), cap=15.0, logit_bytes=4 * 22)
    assert nothing.item() == 0


def test_bf16_hidden_states_give_an_fp32_loss_and_bf16_gradients() -> None:
    hidden, table, labels, weight = case(4, 64, 16, 50)
    low = hidden.bfloat16(), table.bfloat16()

    def total(h: Tensor, w: Tensor) -> Tensor:
        return linear_cross_entropy(h, w, labels, weight, cap=15.0, logit_bytes=4 * 500)

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
        lambda h: linear_cross_entropy(h, table, labels, torch.full((20,), 1 / 20), cap=1e4, logit_bytes=2**22)
    )(hidden)
    theirs = torch.func.grad(lambda h: torch.nn.functional.cross_entropy(h @ table.mT, labels))(hidden)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("logit_bytes", [1, 4 * 33, 2**30])
def test_token_by_token_nats_are_the_parts_of_the_sum(logit_bytes: int) -> None:
    hidden, table, labels, weight = case(6, 8, 4, 11)
    nats, bare = (
        linear_cross_entropy(hidden, table, labels, w, cap=15.0, reduction="none", logit_bytes=logit_bytes)
        for w in (weight, None)
    )
    total = linear_cross_entropy(hidden, table, labels, weight, cap=15.0)
    torch.testing.assert_close(nats.sum(), total)
    torch.testing.assert_close(nats, weight * bare)
    assert ((bare == 0) == (labels < 0)).all()


def test_a_negative_label_is_ignored_whatever_its_weight() -> None:
    hidden, table, labels, weight = case(7, 8, 4, 11)
    some = labels.masked_fill(torch.arange(8) < 3, -1)
    without = weight.masked_fill(torch.arange(8) < 3, 0.0)
    for reduction in ("sum", "none"):
        found, want = (
            linear_cross_entropy(hidden, table, y, w, cap=15.0, reduction=reduction)
            for y, w in ((some, weight), (labels, without))
        )
        torch.testing.assert_close(found, want)


def test_what_it_cannot_do_is_an_error() -> None:
    hidden, table, labels, weight = case(8, 8, 4, 11)

    def call(labels: Tensor = labels, **how: object) -> Tensor:
        return linear_cross_entropy(hidden, table, labels, weight + 1, cap=15.0, **how)  # type: ignore[arg-type]

    for reduction in ("sum", "none"):
        with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
            call(torch.full_like(labels, 11), reduction=reduction)
    with pytest.raises(NotImplementedError, match="reduction='none' has no gradient"):
        torch.func.grad(lambda h: linear_cross_entropy(h, table, labels, weight, cap=15.0, reduction="none").sum())(
            hidden
        )
    with pytest.raises(ValueError, match="backend='triton' is not available, it needs tensors on an NVIDIA GPU"):
        call(backend="triton")
