"""Queries, keys and values out of projected rows, against a loop over heads, tokens and taps."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hymo_kernels import causal_conv1d_heads

SIZES = {"key_heads": 2, "key_dim": 6, "value_heads": 3}
CHANNELS, STARTS = 2 * 2 * 6 + 3 * 4, (0, 3, 4)
POSITION = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3, 4, 5, 6]])


def defined(x: Tensor, weight: Tensor, angle: Tensor) -> list[Tensor]:
    """q, k and v of one batch row [t, c], written out; a document begins at each of STARTS."""
    width, half, rows = weight.shape[1], angle.shape[-1], []
    for t in range(len(x)):
        start = max(s for s in STARTS if s <= t)
        live = [weight[:, width - 1 - j] * x[t - j] for j in range(min(width, t - start + 1))]
        rows.append(F.silu(sum(live, torch.zeros(()))))
    q, k, v = torch.stack(rows).split([12, 12, 12], dim=1)
    turned = []
    for heads in (q.unflatten(1, (2, 6)), k.unflatten(1, (2, 6))):
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]
        pairs = torch.complex(heads[..., :half], heads[..., half : 2 * half]) * turn
        turned.append(torch.cat([pairs.real, pairs.imag, heads[..., 2 * half :]], dim=-1))
    return [*turned, v.unflatten(1, (3, 4))]


def drawn(seed: int, width: int, half: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(*shape, generator=draw).double() for shape in ((1, 11, CHANNELS), (CHANNELS, width)))
    return x, weight, torch.randn(1, 11, 1, half, generator=draw).double()


@given(st.integers(0, 2**31), st.integers(1, 5), st.integers(0, 3))
def test_heads_are_their_definition(seed: int, width: int, half: int) -> None:
    x, weight, angle = drawn(seed, width, half)
    found = causal_conv1d_heads(x, weight, angle.cos(), angle.sin(), position=POSITION, **SIZES)
    assert found[3] is None
    for got, want in zip(found[:3], defined(x[0], weight, angle[0, :, 0]), strict=True):
        torch.testing.assert_close(got[0], want, rtol=1e-12, atol=1e-12)


@given(st.integers(0, 2**31), st.integers(1, 10))
def test_a_state_continues_a_sequence(seed: int, cut: int) -> None:
    x, weight, angle = drawn(seed, 4, 2)
    angles, state, parts = (angle.cos(), angle.sin()), None, []
    for rows in (slice(0, cut), slice(cut, None)):
        *part, state = causal_conv1d_heads(
            x[:, rows],
            weight,
            *(each[:, rows] for each in angles),
            position=POSITION[:, rows],
            initial_state=state,
            output_final_state=True,
            **SIZES,
        )
        parts.append(part)
    assert state is not None
    torch.testing.assert_close(state, x[:, -3:])
    whole = causal_conv1d_heads(x, weight, *angles, position=POSITION, **SIZES)
    for *pieces, want in zip(*parts, whole[:3], strict=True):
        torch.testing.assert_close(torch.cat(pieces, dim=1), want)


def test_sizes_that_do_not_fit_are_an_error() -> None:
    x, weight, angle = drawn(0, 4, 4)
    with pytest.raises(ValueError, match=r"2 \* 2 \* 6 features and a multiple of 5 values; got 36"):
        causal_conv1d_heads(x, weight, angle, angle, **{**SIZES, "value_heads": 5})
    with pytest.raises(ValueError, match="a key of 6 features has no 4 pairs to rotate"):
        causal_conv1d_heads(x, weight, angle, angle, **SIZES)
    with pytest.raises(ValueError, match=r"backend='triton' is not available, it needs tensors on an NVIDIA GPU"):
        causal_conv1d_heads(x, weight, angle[..., :2], angle[..., :2], backend="triton", **SIZES)
