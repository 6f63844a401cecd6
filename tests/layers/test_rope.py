"""Rotary positions: exact far out, relative, and harmless to what is not rotated."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hymo.layers.rope import rotary, rotate


def rotated(x: Tensor, position: Tensor, dims: int, theta: float) -> Tensor:
    """The definition in fp64: feature pairs (i, i + dims / 2) as complex numbers."""
    x = x.double()
    i = torch.arange(dims // 2, dtype=torch.float64)
    angle = position.double()[..., None, None] * theta ** (-2 * i / dims)
    turn = torch.polar(torch.ones_like(angle), angle)
    pairs = torch.complex(x[..., : dims // 2], x[..., dims // 2 : dims]) * turn
    return torch.cat([pairs.real, pairs.imag, x[..., dims:]], dim=-1)


@given(st.integers(0, 2**31), st.integers(1, 8), st.integers(0, 4), st.sampled_from([100.0, 1e4, 1e6]))
def test_rotation_is_its_definition(seed: int, half: int, rest: int, theta: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 5, 3, 2 * half + rest, generator=draw)
    position = torch.randint(0, 4096, (2, 5), generator=draw)
    y = rotate(x, rotary(position, dims=2 * half, theta=theta))
    torch.testing.assert_close(y.double(), rotated(x, position, 2 * half, theta), rtol=0, atol=2e-3)
    assert torch.equal(y[..., 2 * half :], x[..., 2 * half :])


def test_position_4095_is_as_exact_as_fp32_angles_allow_and_unlike_4094() -> None:
    x = torch.randn(1, 2, 1, 32, generator=torch.Generator().manual_seed(0))
    x[:, 1] = x[:, 0]
    position = torch.tensor([[4094, 4095]])
    y = rotate(x, rotary(position, dims=32, theta=1e4))
    torch.testing.assert_close(y.double(), rotated(x, position, 32, 1e4), rtol=0, atol=5e-4)
    low = rotate(x.bfloat16(), rotary(position, dims=32, theta=1e4))
    torch.testing.assert_close(low.double(), rotated(x.bfloat16(), position, 32, 1e4), rtol=2**-8, atol=5e-4)
    assert (low[:, 0] - low[:, 1]).abs().max() > 0.5


def test_position_zero_and_no_dims_change_nothing() -> None:
    x = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rotate(x, rotary(torch.zeros(2, 3, dtype=torch.int64), dims=8, theta=1e4)), x)
    assert torch.equal(rotate(x, rotary(torch.full((2, 3), 7), dims=0, theta=1e4)), x)


@given(st.integers(0, 2**31), st.integers(0, 3000))
def test_a_score_depends_on_the_distance_alone(seed: int, shift: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 1, 6, 1, 16, generator=draw)
    position = torch.arange(6)[None]

    def scores(start: int) -> Tensor:
        a, b = (rotate(x, rotary(position + start, dims=16, theta=1e4))[0, :, 0] for x in (q, k))
        return a @ b.mT

    torch.testing.assert_close(scores(shift), scores(0), rtol=0, atol=1e-2)


@given(st.integers(0, 2**31))
def test_rotation_keeps_lengths(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    x, position = torch.randn(1, 6, 2, 8, generator=draw), torch.randint(0, 4096, (1, 6), generator=draw)
    y = rotate(x, rotary(position, dims=4, theta=1e4))
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
