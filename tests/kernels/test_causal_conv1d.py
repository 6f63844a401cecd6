"""The causal depthwise convolution against a loop over taps, with a state, documents and packed sequences."""

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hymo_kernels import causal_conv1d
from tests.close import assert_same_bits, gaussian
from tests.strategies import lengths, seeds

times, widths = st.integers(0, 12), st.integers(1, 5)


def by_loop(x: Tensor, weight: Tensor, state: Tensor, position: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One sequence [t, c], token by token and tap by tap; and the last inputs."""
    width = weight.shape[1]
    past = [*state, *x]
    y = []
    for t in range(x.shape[0]):
        live = [lag for lag in range(width) if position is None or position[t] >= lag]
        y.append(sum((past[t + width - 1 - lag] * weight[:, width - 1 - lag] for lag in live), torch.zeros_like(x[0])))
    return torch.stack(y) if y else x, torch.stack([*past, x.new_zeros(x.shape[1])])[x.shape[0] : -1]


def draw(seed: int, time: int, width: int, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return gaussian(generator, batch, time, 3), gaussian(generator, 3, width), gaussian(generator, batch, width - 1, 3)


def positions(lens: list[int]) -> Tensor:
    return torch.cat([torch.arange(n) for n in lens])[None]


@given(seed=seeds(), time=times, width=widths, with_position=st.booleans())
def test_equals_a_loop_forward_and_backward(seed: int, time: int, width: int, with_position: bool):
    x, weight, state = draw(seed, time, width)
    generator = torch.Generator().manual_seed(seed)
    position = torch.randint(0, 7, (2, time), generator=generator) if with_position else None
    d_y, d_state = gaussian(generator, *x.shape), gaussian(generator, *state.shape)

    def loss(x: Tensor, weight: Tensor, state: Tensor, looped: bool) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if looped:
            rows = [by_loop(x[i], weight, state[i], None if position is None else position[i]) for i in range(2)]
            y, final = (torch.stack(t) for t in zip(*rows, strict=True))
        else:
            y, final = causal_conv1d(x, weight, position=position, initial_state=state, output_final_state=True)
        return (y * d_y).sum() + (final * d_state).sum(), (y, final)

    grads, outputs = torch.func.grad(loss, argnums=(0, 1, 2), has_aux=True)(x, weight, state, False)
    want_grads, want = torch.func.grad(loss, argnums=(0, 1, 2), has_aux=True)(x, weight, state, True)
    for g, w in zip((*outputs, *grads), (*want, *want_grads), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)


def test_equals_conv1d_with_bias_and_activation():
    x, weight, _ = draw(0, 11, 4)
    bias = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    padded = torch.nn.functional.pad(x.mT, (3, 0))
    want = torch.nn.functional.silu(torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=3)).mT
    got, state = causal_conv1d(x, weight, bias=bias, activation="silu")
    torch.testing.assert_close(got, want)
    assert state is None


@given(seed=seeds(), lens=lengths(longest=6), width=widths)
def test_a_document_reads_nothing_of_the_one_before(seed: int, lens: list[int], width: int):
    """Bitwise, values and gradients: each document among others equals itself among changed others."""
    x, weight, _ = draw(seed, sum(lens), width, batch=1)
    x, position = x.float(), positions(lens)
    y = causal_conv1d(x, weight.float(), position=position)[0]
    start = 0
    for n in lens:
        rows = slice(start, start + n)
        inside = torch.zeros(sum(lens), 1, dtype=torch.bool)
        inside[rows] = True
        other = causal_conv1d(torch.where(inside, x, torch.nan), weight.float(), position=position)[0]
        assert_same_bits(other[:, rows], y[:, rows])
        d_x = torch.func.grad(
            lambda x, rows=rows: causal_conv1d(x, weight.float(), position=position)[0][:, rows].sum()
        )(x)
        assert_same_bits(torch.where(inside, 0, d_x), torch.zeros_like(d_x))
        start += n


@given(seed=seeds(), time=times, width=widths, share=st.floats(0, 1))
def test_split_anywhere_gives_same_state(seed: int, time: int, width: int, share: float):
    x, weight, state = draw(seed, time, width)
    at, position = round(share * time), torch.arange(time).expand(2, time) + 1
    y, final = causal_conv1d(x, weight, position=position, initial_state=state, output_final_state=True)
    first, state = causal_conv1d(
        x[:, :at], weight, position=position[:, :at], initial_state=state, output_final_state=True
    )
    second, state = causal_conv1d(
        x[:, at:], weight, position=position[:, at:], initial_state=state, output_final_state=True
    )
    assert_same_bits(torch.cat([first, second], 1), y)
    assert_same_bits(state, final)


@given(seed=seeds(), lens=lengths(longest=6), tail=st.integers(0, 2), width=widths)
@settings(max_examples=30)
@example(seed=0, lens=[1, 2, 0, 6], tail=1, width=4)
@example(seed=0, lens=[0], tail=0, width=4)
def test_packed_sequences_equal_each_alone(seed: int, lens: list[int], tail: int, width: int):
    """With initial states, and sequences shorter than the taps reach."""
    x, weight, _ = draw(seed, sum(lens) + tail, width, batch=1)
    states = gaussian(torch.Generator().manual_seed(seed), len(lens), width - 1, 3)
    bounds = torch.tensor([0, *lens]).cumsum(0)
    x = torch.where((torch.arange(sum(lens) + tail) < bounds[-1])[:, None], x, torch.nan)

    def loss(x: Tensor, weight: Tensor, states: Tensor, packed: bool) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if packed:
            y, final = causal_conv1d(x, weight, cu_seqlens=bounds, initial_state=states, output_final_state=True)
        else:
            parts = [
                by_loop(x[0, start:end], weight, states[i]) for i, (start, end) in enumerate(pairwise(bounds.tolist()))
            ]
            y = torch.cat([*(part[0] for part in parts), x.new_zeros(tail, 3)])[None]
            final = torch.stack([part[1] for part in parts])
        return y.square().sum() + final.square().sum(), (y, final)

    grads, outputs = torch.func.grad(loss, argnums=(0, 1, 2), has_aux=True)(x, weight, states, True)
    want_grads, want = torch.func.grad(loss, argnums=(0, 1, 2), has_aux=True)(x, weight, states, False)
    for g, w in zip((*outputs, *grads), (*want, *want_grads), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)


def test_low_precision_is_summed_in_fp32():
    x, weight, _ = draw(0, 20, 4)
    y, state = causal_conv1d(x.bfloat16(), weight.bfloat16(), output_final_state=True)
    assert state is not None
    assert y.dtype == state.dtype == torch.bfloat16
    assert_same_bits(y, causal_conv1d(x.bfloat16().float(), weight.bfloat16().float())[0].bfloat16())


def test_vmap_of_gradient_and_compiled_gradient_equal_eager():
    cases = [draw(i, 9, 4) for i in range(3)]
    position = positions([4, 5]).expand(2, 9)
    grad = torch.func.grad(
        lambda x, w, s: causal_conv1d(x, w, position=position, initial_state=s, activation="silu")[0].square().sum(),
        argnums=(0, 1, 2),
    )
    want = [torch.stack(t) for t in zip(*(grad(*x) for x in cases), strict=True)]
    stacked = [torch.stack(t) for t in zip(*cases, strict=True)]
    traced = torch._dynamo.nonstrict_trace(torch.func.vmap(grad))
    for f in (torch.func.vmap(grad), torch.compile(lambda *a: traced(*a), fullgraph=True, backend="aot_eager")):
        for g, w in zip(f(*stacked), want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)


def test_errors_say_what_was_received():
    x, weight, _ = draw(0, 5, 4)
    with pytest.raises(ValueError, match=r"one batch row and replaces position; got x \[2, 5, 3\]"):
        causal_conv1d(x, weight, cu_seqlens=torch.tensor([0, 5]))
