"""Tokens in, logits out."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from hymo.layers.embedding import embed, softcap, unembed


def test_embedding_reads_rows_and_its_gradient_counts_them() -> None:
    table = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[4, 0, 4]])
    assert torch.equal(embed(table, tokens), table[tokens])
    grad = torch.func.grad(lambda table: embed(table, tokens).sum())(table)
    assert grad.tolist() == [[1.0] * 3, [0.0] * 3, [0.0] * 3, [0.0] * 3, [2.0] * 3]


@given(st.integers(0, 2**31), st.sampled_from([1.0, 15.0, 30.0]), st.sampled_from([0.1, 10.0, 1e6]))
def test_softcap_is_bounded_odd_and_close_to_the_identity_near_zero(seed: int, cap: float, scale: float) -> None:
    x = scale * torch.randn(100, generator=torch.Generator().manual_seed(seed))
    y = softcap(x, cap)
    assert y.abs().max() <= cap
    assert torch.equal(softcap(-x, cap), -y)
    assert (y.abs() <= x.abs() * (1 + 1e-6)).all()
    small = x / scale * cap / 100
    torch.testing.assert_close(softcap(small, cap), small, rtol=2e-3, atol=1e-6)


def test_logits_are_made_in_the_given_dtype_and_capped_in_fp32() -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, table = torch.randn(4, 8, generator=draw).bfloat16(), torch.randn(6, 8, generator=draw).bfloat16()
    logits = unembed(hidden, table, cap=2.0)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, 2.0 * torch.tanh((hidden @ table.mT).float() / 2.0))
