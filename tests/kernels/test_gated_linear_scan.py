"""The additive recurrence: its definition by hand, and its chunked form against the definition."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hymo_kernels import gated_linear_scan, naive_gated_linear_scan
from tests.close import assert_heads_close, assert_same_bits, gaussian
from tests.strategies import lengths, seeds

NAMES = ("o", "final", "dv", "db", "dc", "dg", "dA_log", "dinitial")
HEAD = {"final": 1, "dinitial": 1, "dA_log": 0}
GATES = ("gentle", "strong", "zero", "reset")
both = pytest.mark.parametrize("scan", [gated_linear_scan, naive_gated_linear_scan])


def build(time: int, gates: str, seed: int, *, batch: int = 2, state: int = 5) -> list[Tensor]:
    """v, b, c, g, A_log and the initial state, in fp64."""
    generator = torch.Generator().manual_seed(seed)
    size = {"gentle": 0.1, "strong": 16.0, "zero": 0.0, "reset": 0.5}[gates]
    g = size * torch.rand(batch, time, 3, generator=generator, dtype=torch.float64)
    if gates == "reset":
        g = torch.where(torch.rand(batch, time, 1, generator=generator) < 0.1, torch.inf, g)
    v, b, c = (gaussian(generator, batch, time, 3, n) for n in (4, state, state))
    return [v, b, c, g, gaussian(generator, 3, state), gaussian(generator, batch, 3, state, 4)]


def run(scan: Callable[..., tuple[Tensor, Tensor]], x: list[Tensor]) -> tuple[Tensor, ...]:
    """o, the final state, and every gradient of a random linear functional of both."""
    generator = torch.Generator().manual_seed(0)
    d_o, d_final = gaussian(generator, *x[0].shape), gaussian(generator, *x[5].shape)

    def loss(*x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        o, final = scan(*x, output_final_state=True)
        return (o * d_o.to(o.dtype)).sum() + (final * d_final.to(final.dtype)).sum(), (o, final)

    grads, outputs = torch.func.grad(loss, argnums=tuple(range(6)), has_aux=True)(*x)
    return (*outputs, *grads)


def assert_matches(got: tuple[Tensor, ...], want: tuple[Tensor, ...], *, within: float, floor: float) -> None:
    for name, g, w in zip(NAMES, got, want, strict=True):
        assert_heads_close(g, w, head=HEAD.get(name, 2), within=within, floor=floor, name=name)


def test_definition_by_hand():
    """Rates 1 and 2 decay the two channels to 1/2 and 1/4 over a step of log 2."""
    x = torch.tensor
    o, state = naive_gated_linear_scan(
        v=x([[3.0], [10.0]]).view(1, 2, 1, 1),
        b=x([[1.0, 4.0], [1.0, 0.0]]).view(1, 2, 1, 2),
        c=x([[1.0, 1.0], [2.0, 1.0]]).view(1, 2, 1, 2),
        g=x([5.0, math.log(2)]).view(1, 2, 1),
        A_log=x([[0.0, math.log(2)]]),
        output_final_state=True,
    )
    torch.testing.assert_close(state, x([11.5, 3.0]).view(1, 1, 2, 1))
    torch.testing.assert_close(o, x([15.0, 26.0]).view(1, 2, 1, 1))


@given(time=st.integers(1, 90), gates=st.sampled_from(GATES), seed=seeds())
@settings(max_examples=20)
@example(time=50, gates="reset", seed=0)
@example(time=300, gates="strong", seed=0)
def test_chunked_equals_definition(time: int, gates: str, seed: int):
    x = build(time, gates, seed)
    want = run(naive_gated_linear_scan, x)
    assert_matches(run(gated_linear_scan, x), want, within=1e-9, floor=1e-6)
    single = [t.float() for t in x]
    want = run(naive_gated_linear_scan, [t.double() for t in single])
    assert_matches(run(gated_linear_scan, single), want, within=3e-6, floor=0.1)


@given(time=st.integers(1, 60), share=st.floats(0, 1), gates=st.sampled_from(GATES), seed=seeds())
@settings(max_examples=15)
def test_split_anywhere_gives_same_state(time: int, share: float, gates: str, seed: int):
    *x, A_log, state = build(time, gates, seed)
    at = round(share * time)
    o, final = gated_linear_scan(*x, A_log, state, True)
    first, state = gated_linear_scan(*(t[:, :at] for t in x), A_log, state, True)
    second, state = gated_linear_scan(*(t[:, at:] for t in x), A_log, state, True)
    torch.testing.assert_close(torch.cat([first, second], 1), o, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(state, final, rtol=1e-10, atol=1e-10)


@both
@given(time=st.integers(1, 50), share=st.floats(0, 1), seed=seeds())
@settings(max_examples=10)
def test_what_precedes_a_reset_changes_no_bit_and_gets_no_gradient(scan: Callable, time: int, share: float, seed: int):
    at = round(share * (time - 1))
    x = [t.float() for t in build(time, "gentle", seed)]
    x[3] = torch.where((torch.arange(time) == at)[:, None], torch.inf, x[3])
    past = (torch.arange(time) < at)[:, None, None]
    changed = [torch.where(past, 3 - t, t) for t in x[:3]]
    changed += [torch.where(past[..., 0], 2 * x[3], x[3]), x[4], 9 * x[5]]
    for name, g, w in zip(NAMES, run(scan, changed), run(scan, x), strict=True):
        if name == "final":
            assert_same_bits(g, w, name)
        elif name not in HEAD:
            assert_same_bits(g[:, at:], w[:, at:], name)
    grads = torch.func.grad(lambda *x: scan(*x)[0][:, at:].sum(), argnums=tuple(range(6)))(*x)
    for i in (0, 1, 2, 3):
        assert_same_bits(grads[i][:, :at], torch.zeros_like(grads[i][:, :at]), NAMES[i + 2])
    assert_same_bits(grads[3][:, at], torch.zeros_like(grads[3][:, at]), "dg of the reset")
    assert_same_bits(grads[5], torch.zeros_like(grads[5]), "dinitial")


def test_the_future_changes_no_bit():
    x = [t.float() for t in build(50, "gentle", 0)]
    later = (torch.arange(50) >= 20)[:, None, None]
    changed = [torch.where(later, 3 - t, t) for t in x[:3]] + [torch.where(later[..., 0], 2 * x[3], x[3]), *x[4:]]
    assert_same_bits(gated_linear_scan(*changed)[0][:, :20], gated_linear_scan(*x)[0][:, :20])


@given(lens=lengths(), tail=st.sampled_from([0, 3]), seed=seeds())
@settings(max_examples=10)
@example(lens=[0, 17, 0, 0, 1, 20], tail=3, seed=0)
@example(lens=[0], tail=0, seed=0)
def test_packed_sequences_equal_each_alone(lens: list[int], tail: int, seed: int):
    *x, A_log, _ = build(sum(lens) + tail, "gentle", seed, batch=1)
    bounds = torch.tensor([0, *lens]).cumsum(0)
    x = [
        torch.where((torch.arange(sum(lens) + tail) < bounds[-1]).view(1, -1, *[1] * (t.ndim - 2)), t, torch.nan)
        for t in x
    ]
    states = gaussian(torch.Generator().manual_seed(seed), len(lens), 3, 5, 4)

    def loss(*x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        o, final = gated_linear_scan(*x, output_final_state=True, cu_seqlens=bounds)
        return o.square().sum(), (o, final)

    grads, (o, final) = torch.func.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(*x, A_log, states)
    for i, (start, end) in enumerate(pairwise(bounds.tolist())):
        part = [t[:, start:end] for t in x]
        alone, state = (
            naive_gated_linear_scan(*part, A_log, states[i : i + 1], True)
            if start < end
            else (part[0], states[i : i + 1])
        )
        torch.testing.assert_close(o[:, start:end], alone, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(final[i : i + 1], state, rtol=1e-10, atol=1e-10)
    for t in (o, *grads):
        assert t.isfinite().all()
        assert_same_bits(t[:, sum(lens) :], torch.zeros_like(t[:, sum(lens) :]))


@both
def test_no_tokens_leave_the_state(scan: Callable):
    *x, A_log, state = build(0, "gentle", 0)
    o, final = scan(*x, A_log, state, True)
    assert o.shape == (2, 0, 3, 4)
    assert_same_bits(final, state)


def test_vmap_of_gradient_equals_a_loop():
    """Over three seeds of every argument, the decay rates among them."""
    cases = [build(20, "reset", i) for i in range(3)]
    grad = torch.func.grad(lambda *x: gated_linear_scan(*x)[0].square().sum(), argnums=tuple(range(6)))
    got = torch.func.vmap(grad)(*(torch.stack(t) for t in zip(*cases, strict=True)))
    for g, w in zip(got, zip(*(grad(*x) for x in cases), strict=True), strict=True):
        torch.testing.assert_close(g, torch.stack(w), rtol=1e-9, atol=1e-9)


def test_compiled_gradient_equals_eager():
    x = build(40, "reset", 0)
    grad = torch.func.grad(lambda *x: gated_linear_scan(*x)[0].square().sum(), argnums=tuple(range(6)))
    traced = torch._dynamo.nonstrict_trace(grad)
    got = torch.compile(lambda *x: traced(*x), fullgraph=True, backend="aot_eager")(*x)
    for g, w in zip(got, grad(*x), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_computed_in_fp32(dtype: torch.dtype):
    x = [t.to(dtype) for t in build(40, "gentle", 0)]
    o, state = gated_linear_scan(*x, output_final_state=True)
    exact, exact_state = gated_linear_scan(*(t.float() for t in x), output_final_state=True)
    assert_same_bits(o, exact.to(dtype))
    assert_same_bits(state, exact_state)


def test_errors_say_what_was_received():
    *x, A_log, state = build(6, "gentle", 0)
    with pytest.raises(ValueError, match=r"initial_state must be \[2, 3, 5, 4\]; got \[1, 3, 5, 4\]"):
        gated_linear_scan(*x, A_log, state[:1])
    with pytest.raises(ValueError, match="one batch row; got 2 rows"):
        gated_linear_scan(*x, A_log, cu_seqlens=torch.tensor([0, 6]))
