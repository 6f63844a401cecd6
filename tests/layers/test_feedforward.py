"""SwiGLU against its formula, gradients included."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hymo import tree
from hymo.layers.feedforward import SwigluParams, swiglu
from hymo.params import declare, initialize


@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 9))
def test_swiglu_is_its_formula_with_its_gradients(seed: int, d: int, f: int) -> None:
    p = tree.map(Tensor.double, initialize(declare(SwigluParams, {"d": d, "f": f}), seed))
    x = torch.randn(2, 3, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    def formula(p: SwigluParams, x: Tensor) -> Tensor:
        gate = torch.stack([x @ column for column in p.gate.unbind(1)], dim=-1)
        hidden = gate / (1 + (-gate).exp()) * (x @ p.up)
        return (hidden[..., None] * p.down).sum(-2)

    torch.testing.assert_close(swiglu(p, x), formula(p, x))
    grads, expected = (
        torch.func.grad(lambda p, x, f=f: f(p, x).square().sum(), argnums=(0, 1))(p, x) for f in (swiglu, formula)
    )
    tree.map(torch.testing.assert_close, grads, expected)
