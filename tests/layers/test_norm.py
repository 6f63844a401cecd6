"""Normalisations against their formulas in fp64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from hymo.layers.norm import gated_rms_norm, rms_norm


@given(st.integers(0, 2**31), st.integers(1, 33), st.sampled_from([1e-4, 1.0, 1e4]))
def test_rms_norm_is_its_formula(seed: int, width: int, scale: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    x, weight = scale * torch.randn(2, 3, width, generator=draw), torch.randn(width, generator=draw)
    wide = x.double()
    expected = weight.double() * wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(rms_norm(x, weight, eps=1e-6).double(), expected, rtol=1e-5, atol=1e-6)


def test_a_head_is_read_out_normed_and_gated() -> None:
    draw = torch.Generator().manual_seed(0)
    x, gate, weight = (torch.randn(s, generator=draw) for s in ((4, 5, 8), (4, 5, 8), (8,)))
    expected = rms_norm(x.double(), weight.double(), eps=1e-6).double() * F.silu(gate.double())
    torch.testing.assert_close(gated_rms_norm(x, gate, weight, eps=1e-6).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1e-3, 300.0])
def test_bf16_inputs_are_normed_in_fp32_and_rounded_once(size: float) -> None:
    x = (size * torch.randn(64, 256, generator=torch.Generator().manual_seed(1))).bfloat16()
    weight = torch.full((256,), 1.0 + 2**-10)
    normed = rms_norm(x, weight, eps=1e-6)
    assert normed.dtype == torch.bfloat16
    assert torch.equal(normed, rms_norm(x.float(), weight, eps=1e-6).bfloat16())
    assert torch.equal(
        gated_rms_norm(x, x, weight, eps=1e-6), gated_rms_norm(x.float(), x.float(), weight, eps=1e-6).bfloat16()
    )


def test_zero_has_norm_zero_and_a_finite_gradient() -> None:
    grad = torch.func.grad(lambda x: rms_norm(x, torch.ones(8), eps=1e-6).sum())(torch.zeros(8))
    torch.testing.assert_close(grad, torch.full((8,), 1e3))
