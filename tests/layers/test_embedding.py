"""Tokens in, logits out."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hymo.jit import jit
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


def drawn(dtype: torch.dtype = torch.float64, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    table, weight = torch.randn(50, 8, generator=draw), torch.randn(3, 40, 8, generator=draw)
    tokens = torch.randint(0, 7, (3, 40), generator=draw)
    return table.to(device, dtype), tokens.to(device), weight.to(device, dtype)


def gradient(table: Tensor, tokens: Tensor, weight: Tensor) -> Tensor:
    found: Tensor = torch.func.grad(lambda table: (embed(table, tokens) * weight).sum())(table)
    return found


@pytest.mark.parametrize("compile", ["none", "aot_eager"])
def test_the_gradient_is_that_of_the_rows(compile: str) -> None:
    table, tokens, weight = drawn()
    assert torch.equal(embed(table, tokens), table[tokens])
    wanted = torch.func.grad(lambda table: (F.embedding(tokens, table) * weight).sum())(table)
    found = jit(gradient, compile=compile)(table, tokens, weight)  # type: ignore[arg-type]
    torch.testing.assert_close(found, wanted)
    assert found[7:].abs().sum() == 0


def test_a_population_has_the_gradients_of_its_members() -> None:
    table, tokens, weight = drawn()
    tables = torch.stack([table, 2 * table])
    found = torch.func.vmap(gradient, in_dims=(0, None, None))(tables, tokens, weight)
    assert torch.equal(found, torch.stack([gradient(each, tokens, weight) for each in tables]))
    found = torch.func.vmap(gradient, in_dims=(None, 0, 0))(table, tokens[:, None], weight[:, None])
    each = [gradient(table, t[None], w[None]) for t, w in zip(tokens, weight, strict=True)]
    assert torch.equal(found, torch.stack(each))


@pytest.mark.gpu
def test_on_a_gpu_it_is_the_same_to_the_bit_every_time() -> None:
    draw = torch.Generator("cuda").manual_seed(0)
    table = torch.randn(64256, 896, generator=draw, device="cuda").bfloat16()
    tokens = torch.randint(0, 300, (4, 4096), generator=draw, device="cuda")
    weight = torch.randn(4, 4096, 896, generator=draw, device="cuda").bfloat16()
    first = gradient(table, tokens, weight)
    wide = torch.zeros(64256, 896, dtype=torch.float64, device="cuda")
    wide.index_add_(0, tokens.flatten(), weight.flatten(0, 1).double())
    assert (first.double() - wide).norm() < 4e-3 * wide.norm()
    assert all(torch.equal(first, gradient(table, tokens, weight)) for _ in range(20))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = gradient(table, tokens, weight)
    graph.replay()
    assert torch.equal(first, recorded)
