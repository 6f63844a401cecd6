"""The gated delta rule: its definition by hand, its forms against the definition, and what must hold of any form."""

import inspect
import math
from collections.abc import Callable
from itertools import pairwise

import jaxtyping
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from hymo_kernels import (
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    gated_delta_rule,
    naive_gated_delta_rule,
    naive_recurrent_gated_delta_rule,
)
from hymo_kernels.host.gated_delta_rule import check_shapes
from tests.close import assert_heads_close, assert_same_bits, gaussian
from tests.strategies import ScanCase, ScanInputs, lengths, scan_cases, seeds

FORMS = {"chunk": chunk_gated_delta_rule, "recurrent": fused_recurrent_gated_delta_rule}
NAMES = ("o", "final", "dq", "dk", "dv", "dg", "dbeta", "dinitial")
HEAD = {"final": 1, "dinitial": 1}
PLAIN = ScanCase(
    batch=2, time=70, heads=2, group=2, key=8, value=12, gates="reset", keys="random", betas="below 2", seed=0
)
forms = pytest.mark.parametrize("form", FORMS)


def run(rule: Callable[..., tuple[Tensor, Tensor]], x: ScanInputs, *, seed: int = 0) -> tuple[Tensor, ...]:
    """o, the final state, and every gradient of a random linear functional of both."""
    generator = torch.Generator().manual_seed(seed)
    d_o, d_final = gaussian(generator, *x.v.shape), gaussian(generator, *x.initial_state.shape)

    def loss(*x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        o, final = rule(*x[:5], initial_state=x[5], output_final_state=True)
        return (o * d_o.to(o.dtype)).sum() + (final * d_final.to(final.dtype)).sum(), (o, final)

    grads, outputs = torch.func.grad(loss, argnums=tuple(range(6)), has_aux=True)(*x)
    return (*outputs, *grads)


def assert_matches(got: tuple[Tensor, ...], want: tuple[Tensor, ...], *, within: float, floor: float) -> None:
    for name, g, w in zip(NAMES, got, want, strict=True):
        # dg and dbeta are one number a token, a sum of many products that may cancel: the floor is that of the terms.
        least = 10 * floor if name in ("dg", "dbeta") else floor
        assert_heads_close(g, w, head=HEAD.get(name, 2), within=within, floor=least, name=name)


def fp32_error(case: ScanCase) -> float:
    """Three times the fp32 error of a correct kernel in the case's regime (relative RMS)."""
    alike = case.keys in ("identical", "cos .99")
    if (case.betas == "two" and case.keys != "random") or (case.betas == "below 2" and alike):
        return 3 * 6e-5
    if alike:
        return 3 * 2e-6
    return 3 * (1e-6 if case.keys == "cos .9" or case.betas in ("below 2", "two") else 5e-7)


# The definition


def test_definition_by_hand():
    """Two tokens, two dimensions, decay 1/2: S_1 = e1 (3, 4)^T; the second corrects half of what e1 + e2 recalls."""
    x = torch.tensor
    o, state = naive_gated_delta_rule(
        q=x([[1.0, 0.0], [1.0, 1.0]]).view(1, 2, 1, 2),
        k=x([[1.0, 0.0], [0.6, 0.8]]).view(1, 2, 1, 2),
        v=x([[3.0, 4.0], [1.9, 0.2]]).view(1, 2, 1, 2),
        g=x([0.0, math.log(0.5)]).view(1, 2, 1),
        beta=x([1.0, 0.5]).view(1, 2, 1),
        scale=1.0,
        output_final_state=True,
    )
    # Decayed S = [[1.5, 2], [0, 0]] recalls (0.9, 1.2) for k; the error (1, -1) is written by half along k.
    torch.testing.assert_close(state, x([[1.8, 1.7], [0.4, -0.4]]).view(1, 1, 2, 2))
    torch.testing.assert_close(o, x([[3.0, 4.0], [2.2, 1.3]]).view(1, 2, 1, 2))


def test_definition_has_second_derivatives():
    x = ScanCase(1, 4, 1, 1, 3, 2, "gentle", "random", "below 2", 0).build()

    def o(*x: Tensor) -> Tensor:
        return naive_gated_delta_rule(*x[:5], initial_state=x[5])[0]

    leaves = [t.requires_grad_() for t in x]
    assert torch.autograd.gradgradcheck(o, leaves)


@pytest.mark.parametrize("form", ["chunk"])
def test_second_derivative_of_a_fast_form_is_an_error(form: str):
    x = PLAIN.build()
    first = torch.func.grad(lambda q: FORMS[form](q, *x[1:5])[0].square().sum())
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.func.grad(lambda q: first(q).sum())(x.q)


# The forms against the definition


@forms
@given(case=scan_cases())
@settings(max_examples=16)
@example(case=PLAIN)
@example(case=PLAIN._replace(gates="strong", time=33, group=1))
@example(case=PLAIN._replace(gates="zero", keys="identical", betas="one"))
@example(case=PLAIN._replace(gates="zero", keys="random", betas="two", time=100))
def test_form_equals_definition_in_fp64(form: str, case: ScanCase):
    x = case.build()
    assert_matches(run(FORMS[form], x), run(naive_gated_delta_rule, x), within=1e-9, floor=1e-6)


@forms
@given(case=scan_cases())
@settings(max_examples=16)
@example(case=PLAIN)
@example(case=PLAIN._replace(gates="strong"))
@example(case=PLAIN._replace(gates="gentle", keys="identical", betas="two"))
@example(case=PLAIN._replace(gates="zero", keys="identical", betas="one"))
def test_form_in_fp32_errs_no_more_than_its_regime_allows(form: str, case: ScanCase):
    x = case.build().to(torch.float32)
    want = run(naive_gated_delta_rule, x.to(torch.float64))
    # Where the true value is about 0 the error is judged against a tenth of the size of v and of the state.
    assert_matches(run(FORMS[form], x), want, within=fp32_error(case), floor=0.1)


@pytest.mark.heavy
@forms
@given(case=scan_cases(max_time=700))
@settings(max_examples=60)
def test_long_form_equals_definition(form: str, case: ScanCase):
    x = case.build().to(torch.float32)
    want = run(naive_gated_delta_rule, x.to(torch.float64))
    assert_matches(run(FORMS[form], x.to(torch.float64)), want, within=1e-9, floor=1e-6)
    assert_matches(run(FORMS[form], x), want, within=fp32_error(case), floor=0.1)


@pytest.mark.parametrize("time", [31, 200])
@forms
def test_gate_gradient_survives_strong_decay(form: str, time: int):
    """A row sum minus a column sum would leave 5e-3 here; the gates' gradient is added up without cancellation."""
    x = (
        PLAIN._replace(gates="strong", time=time)
        .build()
        ._replace(initial_state=torch.zeros(2, 4, 8, 12))
        .to(torch.float32)
    )
    got, want = run(FORMS[form], x)[5], run(naive_gated_delta_rule, x.to(torch.float64))[5]
    assert_heads_close(got, want, head=2, within=1e-5, floor=0.0, name="dg")


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_chunk_size_changes_only_rounding(chunk_size: int):
    x = PLAIN._replace(time=150).build()

    def rule(*a: Tensor, **k: object) -> tuple[Tensor, Tensor]:
        return chunk_gated_delta_rule(*a, chunk_size=chunk_size, **k)

    assert_matches(run(rule, x), run(naive_gated_delta_rule, x), within=1e-9, floor=1e-6)


@pytest.mark.parametrize("time", [1, 8, 9, 40])
def test_auto_form_equals_definition(time: int):
    x = PLAIN._replace(time=time).build()
    assert_matches(run(gated_delta_rule, x), run(naive_gated_delta_rule, x), within=1e-9, floor=1e-6)


def test_transformers_computes_the_same():
    reason = "transformers (extra `dev`) is not installed: nothing to compare with"
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next", reason=reason)
    x = PLAIN._replace(gates="gentle", betas="below 1", time=150, key=16).build().to(torch.float32)
    want = module.torch_chunk_gated_delta_rule(
        *x[:5], initial_state=x.initial_state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    for rule in FORMS.values():
        got = rule(*x[:5], initial_state=x.initial_state, output_final_state=True, use_qk_l2norm_in_kernel=True)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5)


# Packed sequences


def packed(case: ScanCase, lens: list[int], tail: int) -> tuple[ScanInputs, Tensor]:
    """One row of sequences of these lengths, then `tail` rows of NaN that belong to none; and the bounds."""
    x = case._replace(batch=1, time=sum(lens) + tail).build()
    if tail:
        used = torch.arange(sum(lens) + tail) < sum(lens)
        rows = [torch.where(used.view(1, -1, *[1] * (t.ndim - 2)), t, torch.nan) for t in x[:5]]
        x = ScanInputs(*rows, initial_state=x.initial_state)
    state = gaussian(torch.Generator().manual_seed(case.seed), len(lens), *x.initial_state.shape[1:])
    return x._replace(initial_state=state), torch.tensor([0, *lens]).cumsum(0)


@forms
@given(case=scan_cases(), lens=lengths(), tail=st.sampled_from([0, 3]))
@settings(max_examples=15)
@example(case=PLAIN, lens=[0, 37, 0, 0, 1, 33, 0], tail=3)
@example(case=PLAIN, lens=[0, 0], tail=2)
@example(case=PLAIN, lens=[0], tail=0)
def test_packed_sequences_equal_each_alone(form: str, case: ScanCase, lens: list[int], tail: int):
    x, bounds = packed(case, lens, tail)

    def rule(*a: Tensor, **k: object) -> tuple[Tensor, Tensor]:
        return FORMS[form](*a, cu_seqlens=bounds, **k)

    def alone(*a: Tensor, initial_state: Tensor, output_final_state: bool) -> tuple[Tensor, Tensor]:
        outs, finals = [], []
        for i, (start, end) in enumerate(pairwise(bounds.tolist())):
            part = [t[:, start:end] for t in a]
            o, final = part[2], initial_state[i : i + 1]
            if start != end:
                o, final = naive_gated_delta_rule(*part, initial_state=final, output_final_state=True)
            outs.append(o)
            finals.append(final)
        return torch.cat([*outs, torch.zeros(1, tail, *a[2].shape[2:], dtype=a[2].dtype)], 1), torch.cat(finals)

    got, want = run(rule, x), run(alone, x)
    assert_matches(got, want, within=1e-9, floor=1e-6)
    for name, t in zip(NAMES, got, strict=True):
        if name not in HEAD and tail:
            assert_same_bits(t[:, -tail:], torch.zeros_like(t[:, -tail:]), name)


def test_packed_with_the_longest_length_given_reads_nothing_on_the_host():
    x, bounds = packed(PLAIN, [5, 0, 40], 2)
    f = torch._dynamo.nonstrict_trace(
        lambda q, k, v, g, beta, bounds: chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=bounds, max_seqlen=40)[0]
    )
    got = torch.compile(lambda *a: f(*a), fullgraph=True, backend="aot_eager")(*x[:5], bounds)
    torch.testing.assert_close(got, chunk_gated_delta_rule(*x[:5], cu_seqlens=bounds)[0])


@pytest.mark.parametrize("form", [*FORMS.values(), naive_gated_delta_rule])
def test_no_tokens_leave_the_state(form: Callable[..., tuple[Tensor, Tensor]]):
    x = PLAIN.build()
    x = ScanInputs(*(t[:, :0] for t in x[:5]), initial_state=x.initial_state)
    got = run(form, x)
    assert got[0].shape == (2, 0, 4, 12)
    assert_same_bits(got[1], x.initial_state)
    o, final = form(*x[:5], output_final_state=True, cu_seqlens=None)
    assert_same_bits(final, torch.zeros_like(final))
    o, final = form(*(t[:1] for t in x[:5]), output_final_state=True, cu_seqlens=torch.tensor([0]))
    assert o.shape == (1, 0, 4, 12)
    assert final.shape == (0, 4, 8, 12)


# What holds of any form


@forms
@given(case=scan_cases())
@settings(max_examples=15)
@example(case=PLAIN)
def test_gradient_identities(form: str, case: ScanCase):
    """q.dq = o.do; sum v.dv + <S0, dS0> = sum o.do + <S, dS>; dg is a suffix sum; the first dg is 0 without a state."""
    x = case.build()
    generator = torch.Generator().manual_seed(0)
    d_o, d_final = gaussian(generator, *x.v.shape), gaussian(generator, *x.initial_state.shape)
    o, final, d_q, _, d_v, d_g, _, d_initial = run(FORMS[form], x)
    read, kept, written = (o * d_o).sum(-1), (final * d_final).sum((-2, -1)), (x.v * d_v).sum(-1)

    grouped = read.unflatten(2, (case.heads, case.group)).sum(3)
    torch.testing.assert_close((x.q * d_q).sum(-1), grouped, rtol=1e-9, atol=1e-9)
    started = (x.initial_state * d_initial).sum((-2, -1))
    torch.testing.assert_close(written.sum(1) + started, read.sum(1) + kept, rtol=1e-9, atol=1e-8)
    suffix = (read - written).flip(1).cumsum(1).flip(1) + kept[:, None]
    if case.gates != "reset":  # a reset's own dg is 0 by definition, as is the sum behind it
        torch.testing.assert_close(d_g, suffix, rtol=1e-9, atol=1e-8)

    zero = x._replace(initial_state=torch.zeros_like(x.initial_state))
    assert_same_bits(run(FORMS[form], zero)[5][:, 0], torch.zeros_like(d_g[:, 0]), "dg of the first token")


@forms
@given(case=scan_cases(), share=st.floats(0, 1))
@settings(max_examples=15)
def test_split_anywhere_gives_same_state(form: str, case: ScanCase, share: float):
    x, at = case.build(), round(share * case.time)
    whole = FORMS[form](*x[:5], initial_state=x.initial_state, output_final_state=True)
    first, state = FORMS[form](*(t[:, :at] for t in x[:5]), initial_state=x.initial_state, output_final_state=True)
    second, state = FORMS[form](*(t[:, at:] for t in x[:5]), initial_state=state, output_final_state=True)
    torch.testing.assert_close(torch.cat([first, second], 1), whole[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(state, whole[1], rtol=1e-9, atol=1e-9)


def _disturbed(x: ScanInputs, rows: slice, seed: int) -> ScanInputs:
    """Every input of some tokens changed; gates stay gates."""
    generator = torch.Generator().manual_seed(seed + 1)
    mask = torch.zeros(x.v.shape[1], dtype=torch.bool)
    mask[rows] = True

    def change(t: Tensor) -> Tensor:
        noise = gaussian(generator, *t.shape).to(t.dtype)
        return torch.where(mask.view(1, -1, *[1] * (t.ndim - 2)), noise, t)

    changed = ScanInputs(*(change(t) for t in x[:5]), initial_state=x.initial_state)
    return changed._replace(g=torch.where(x.g.isinf(), x.g, -changed.g.abs()))


@forms
@given(case=scan_cases(), share=st.floats(0, 1))
@settings(max_examples=15)
def test_the_future_changes_no_bit(form: str, case: ScanCase, share: float):
    x, at = case.build().to(torch.float32), round(share * (case.time - 1))
    changed = _disturbed(x, slice(at, None), case.seed)
    o, other = (FORMS[form](*t[:5], initial_state=t.initial_state)[0] for t in (x, changed))
    assert_same_bits(other[:, :at], o[:, :at])


@forms
@given(case=scan_cases(), share=st.floats(0, 1))
@settings(max_examples=15)
@example(case=PLAIN._replace(gates="strong", time=64), share=0.5)
@example(case=PLAIN._replace(gates="gentle", time=64), share=40 / 63)
def test_what_precedes_a_reset_changes_no_bit_and_gets_no_gradient(form: str, case: ScanCase, share: float):
    x, at = case.build().to(torch.float32), round(share * (case.time - 1))
    reset = torch.where((torch.arange(case.time) == at)[:, None], -torch.inf, x.g)
    x = x._replace(g=reset)
    changed = _disturbed(x, slice(0, at), case.seed)._replace(initial_state=1e3 * x.initial_state)
    got, other = run(FORMS[form], x), run(FORMS[form], changed)
    for name, g, w in zip(NAMES, got, other, strict=True):
        if name not in HEAD:
            assert_same_bits(w[:, at:], g[:, at:], name)
    assert_same_bits(other[1], got[1], "final")

    def after(*x: Tensor) -> Tensor:
        return FORMS[form](*x[:5], initial_state=x[5])[0][:, at:].sum()

    before = torch.func.grad(after, argnums=tuple(range(6)))(*x)
    for name, g in zip(NAMES[2:], before, strict=True):
        past = g if name == "dinitial" else g[:, :at]
        assert_same_bits(past, torch.zeros_like(past), name)
    assert_same_bits(before[3][:, at], torch.zeros_like(before[3][:, at]), "dg of the reset")


@forms
def test_reset_equals_a_fresh_start(form: str):
    x = PLAIN._replace(gates="gentle", time=90).build()
    g = torch.where(torch.isin(torch.arange(90), torch.tensor([0, 37, 38, 80]))[:, None], -torch.inf, x.g)
    o = FORMS[form](*x[:3], g, x.beta)[0]
    for start, end in ((0, 37), (37, 38), (38, 80), (80, 90)):
        part = FORMS[form](*(t[:, start:end] for t in x[:5]))[0]
        torch.testing.assert_close(o[:, start:end], part, rtol=1e-11, atol=1e-11)


@forms
def test_a_nan_stays_in_its_batch_row_and_head(form: str):
    x = PLAIN._replace(gates="gentle").build().to(torch.float32)
    clean = run(FORMS[form], x)
    for i in range(5):
        poisoned = list(x)
        poisoned[i] = x[i].clone()
        poisoned[i][0, 5, 0] = torch.nan
        for name, g, w in zip(NAMES, run(FORMS[form], ScanInputs(*poisoned)), clean, strict=True):
            assert_same_bits(g[1], w[1], f"{name}, other row")
            axis = HEAD.get(name, 2) - 1
            assert_same_bits(g[0].select(axis, -1), w[0].select(axis, -1), f"{name}, other head")


@forms
@given(seed=seeds(), time=st.integers(1, 70))
@settings(max_examples=10)
def test_zero_beta_never_writes(form: str, seed: int, time: int):
    x = PLAIN._replace(seed=seed, time=time, gates="zero").build()
    o, state = FORMS[form](
        *x[:4], torch.zeros_like(x.beta), 1.0, initial_state=x.initial_state, output_final_state=True
    )
    assert_same_bits(state, x.initial_state)
    q = x.q.repeat_interleave(2, 2)
    torch.testing.assert_close(o, torch.einsum("bthk,bhkv->bthv", q, x.initial_state), rtol=1e-12, atol=1e-12)


@forms
def test_orthonormal_keys_recall_exactly(form: str):
    """Written once with beta = 1 and no decay, every value comes back for its key."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.linalg.qr(gaussian(generator, 1, 1, 40, 40))[0].movedim(1, 2)
    v, beta = gaussian(generator, 1, 40, 1, 8), torch.ones(1, 40, 1, dtype=torch.float64)
    _, state = FORMS[form](keys, keys, v, None, beta, output_final_state=True)
    torch.testing.assert_close(torch.einsum("bthk,bhkv->bthv", keys, state), v, rtol=1e-12, atol=1e-12)


@forms
def test_linear_in_values_and_state(form: str):
    x = PLAIN.build()
    want = [3 * t for t in FORMS[form](*x[:5], initial_state=x.initial_state, output_final_state=True)]
    tripled = x._replace(v=3 * x.v, initial_state=3 * x.initial_state)
    got = FORMS[form](*tripled[:5], initial_state=tripled.initial_state, output_final_state=True)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)


@forms
def test_batch_order_does_not_matter(form: str):
    x = PLAIN._replace(batch=3).build().to(torch.float32)
    order = torch.tensor([2, 0, 1])
    for g, w in zip(run_forward(form, x), run_forward(form, ScanInputs(*(t[order] for t in x))), strict=True):
        assert_same_bits(w, g[order])


def run_forward(form: str, x: ScanInputs) -> tuple[Tensor, Tensor]:
    return FORMS[form](*x[:5], initial_state=x.initial_state, output_final_state=True)


@forms
def test_value_heads_share_key_heads_in_order(form: str):
    x = PLAIN.build()
    repeated = x._replace(q=x.q.repeat_interleave(2, 2), k=x.k.repeat_interleave(2, 2))
    for g, w in zip(run_forward(form, x), run_forward(form, repeated), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)


# Options


@forms
def test_no_gate_is_a_zero_gate_forward_and_backward(form: str):
    x = PLAIN._replace(gates="zero").build()
    with_gate = run(FORMS[form], x)

    def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        return FORMS[form](q, k, v, None, beta, **options)

    for name, g, w in zip(NAMES, run(rule, x), with_gate, strict=True):
        assert_same_bits(g, torch.zeros_like(g) if name == "dg" else w, name)


@pytest.mark.parametrize("form", [*FORMS, "definition"])
def test_options_equal_the_same_done_outside(form: str):
    rule = {**FORMS, "definition": naive_gated_delta_rule}[form]
    x = PLAIN._replace(gates="gentle", time=20).build()
    generator = torch.Generator().manual_seed(1)
    A_log, dt_bias = gaussian(generator, 4), gaussian(generator, 4)
    logit, gate = gaussian(generator, *x.beta.shape), gaussian(generator, *x.g.shape)
    q, k = 2 * x.q, torch.where(torch.arange(20)[:, None, None] == 3, 0, 5 * x.k)
    inside = rule(
        q, k, x.v, gate, logit, 0.3, x.initial_state.mT, True, True, True, True, True,
        use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias, chunk_indices=torch.zeros(1, 2, dtype=torch.long),
    )  # fmt: skip
    outside = rule(
        q * (q.square().sum(-1, keepdim=True) + 1e-6).rsqrt(),
        k * (k.square().sum(-1, keepdim=True) + 1e-6).rsqrt(),
        x.v,
        -A_log.exp() * torch.nn.functional.softplus(gate + dt_bias),
        2 * logit.sigmoid(),
        0.3,
        x.initial_state,
        True,
    )
    torch.testing.assert_close(inside[0], outside[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(inside[1].mT, outside[1], rtol=1e-12, atol=1e-12)


@forms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_low_precision_is_computed_in_fp32(form: str, dtype: torch.dtype):
    x = PLAIN.build().to(dtype)
    o, state, *grads = run(FORMS[form], x)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert o.dtype == dtype
    assert state.dtype == wide
    assert [g.dtype for g in grads] == [dtype] * 6
    exact = FORMS[form](*(t.to(wide) for t in x[:5]), initial_state=x.initial_state.to(wide), output_final_state=True)
    assert_same_bits(o, exact[0].to(dtype))
    assert_same_bits(state, exact[1])


@forms
def test_strides_do_not_matter(form: str):
    x = PLAIN.build().to(torch.float32)
    strided = ScanInputs(*(t.movedim(1, 0).contiguous().movedim(0, 1) for t in x))
    for name, g, w in zip(NAMES, run(FORMS[form], strided), run(FORMS[form], x), strict=True):
        assert_same_bits(g, w, name)


# torch.func and torch.compile


def _loss(rule: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    def loss(*x: Tensor) -> Tensor:
        o, final = rule(*x[:5], initial_state=x[5], output_final_state=True)
        return o.square().sum() + final.sin().sum()

    return loss


@forms
def test_vmap_of_gradient_equals_a_loop(form: str):
    """Over three problems, with k shared by all of them."""
    cases = [PLAIN._replace(seed=i, time=40).build() for i in range(3)]
    x = [torch.stack(t) for t in zip(*cases, strict=True)]
    x[1] = cases[0].k
    grad = torch.func.grad(_loss(FORMS[form]), argnums=tuple(range(6)))
    got = torch.func.vmap(grad, in_dims=(0, None, 0, 0, 0, 0))(*x)
    want = [grad(*(t if i == 1 else t[n] for i, t in enumerate(x))) for n in range(3)]
    for g, w in zip(got, zip(*want, strict=True), strict=True):
        torch.testing.assert_close(g, torch.stack(w), rtol=1e-9, atol=1e-9)


@pytest.fixture
def unchecked():
    """Dynamo's strict tracing cannot enter a function that jaxtyping checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("how", ["strict", "nonstrict"])
@pytest.mark.parametrize("batched", [False, True], ids=["grad", "vmap(grad)"])
@pytest.mark.parametrize("form", ["chunk", pytest.param("recurrent", marks=pytest.mark.heavy)])
def test_compiled_gradient_equals_eager(form: str, batched: bool, how: str, unchecked: None):
    x = PLAIN.build()
    f = torch.func.grad(_loss(FORMS[form]), argnums=tuple(range(6)))
    arguments = tuple(x)
    if batched:
        f, arguments = torch.func.vmap(f), tuple(torch.stack([t, t.sin() if t is x.v else t]) for t in x)
    want = f(*arguments)
    torch._dynamo.reset()
    traced = torch._dynamo.nonstrict_trace(f) if how == "nonstrict" else f
    got = torch.compile(lambda *a: traced(*a), fullgraph=True, backend="aot_eager")(*arguments)
    for name, g, w in zip(NAMES[2:], got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


def test_graph_grows_with_the_logarithm_of_time():
    def nodes(time: int) -> int:
        x = ScanCase(1, time, 1, 1, 4, 4, "gentle", "random", "below 1", 0).build()
        return len(make_fx(torch.func.grad(_loss(chunk_gated_delta_rule), argnums=(0, 1, 2, 3, 4)))(*x).graph.nodes)

    short, long = nodes(512), nodes(4096)
    assert long < 1.7 * short, f"{short} nodes at 512 tokens, {long} at 4096"


def test_only_wanted_gradients_are_returned():
    x = PLAIN.build()
    full = torch.func.grad(_loss(chunk_gated_delta_rule), argnums=tuple(range(6)))(*x)
    for i in range(6):
        assert_same_bits(torch.func.grad(_loss(chunk_gated_delta_rule), argnums=i)(*x), full[i], NAMES[i + 2])


# Names and errors


def test_argument_order_is_that_of_fla():
    order = ["q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel"]
    order += ["use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first", "cu_seqlens", "cu_seqlens_cpu"]
    order += ["chunk_indices", "cp_context"]
    keywords = ["use_gate_in_kernel", "A_log", "dt_bias", "chunk_size", "state_indices", "precision", "max_seqlen"]
    keywords += ["backend"]
    for rule in (*FORMS.values(), gated_delta_rule, naive_gated_delta_rule):
        parameters = inspect.signature(rule).parameters
        assert list(parameters)[: len(order)] == order
        assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in keywords)
    assert naive_recurrent_gated_delta_rule is naive_gated_delta_rule
    assert chunk_gated_delta_rule.__name__ == "chunk_gated_delta_rule"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_first": True}, r"head_first=True .* pass \[b, t, h, d\]"),
        ({"gk": torch.zeros(1)}, r"unknown or unsupported arguments \['gk'\]"),
        ({"headfirst": 1}, r"unknown or unsupported arguments \['headfirst'\]"),
        (
            {"backend": "triton"},
            "backend='triton' is not available, it needs tensors on an NVIDIA GPU, these are on cpu",
        ),
        ({"state_indices": torch.arange(2)}, r"state_indices must be \[2\], .* got \[2\] and initial_state None"),
        ({"cp_context": object()}, "cp_context .* pass None"),
        ({"chunk_size": 48}, "chunk_size must be 16, 32, 64 or None; got 48"),
        ({"allow_neg_eigval": True}, r"pass 2 \* beta"),
        ({"use_gate_in_kernel": True}, "needs A_log, one number a value head; got None"),
        ({"cu_seqlens": torch.tensor([0, 70])}, "one batch row; got 2 rows"),
        ({"initial_state": torch.zeros(2, 4, 12, 8)}, r"initial_state must be \[2, 4, 8, 12\]; got \[2, 4, 12, 8\]"),
    ],
)
def test_errors_say_what_was_received_and_what_would_work(options: dict[str, object], message: str):
    x = PLAIN.build()
    with pytest.raises(ValueError, match=message):
        gated_delta_rule(*x[:5], **options)


@pytest.mark.parametrize("bounds", [[1, 5], [0, 5, 3], [0, 71]])
def test_bad_bounds_are_named(bounds: list[int]):
    x = PLAIN._replace(batch=1).build()
    with pytest.raises(ValueError, match=r"never decrease and end within the 70 rows; got \[" + str(bounds[0])):
        gated_delta_rule(*x[:5], cu_seqlens=torch.tensor(bounds))


def test_shapes_that_do_not_fit_are_named():
    def check(q: list[int], v: list[int], beta: list[int]) -> None:
        check_shapes(
            torch.zeros(q), torch.zeros(q), torch.zeros(v), g=None, beta=torch.zeros(beta),
            initial_state=None, cu_seqlens=None, v_first=False,
        )  # fmt: skip

    check([2, 128, 4, 64], [2, 128, 8, 64], [2, 128, 8])
    with pytest.raises(ValueError, match=r"6 value heads cannot share 4 key heads; .* v \[2, 128, 6, 64\]"):
        check([2, 128, 4, 64], [2, 128, 6, 64], [2, 128, 6])
    with pytest.raises(ValueError, match=r"beta must be \[2, 128, 4\], as v has; got \[2, 128, 8\]"):
        check([2, 128, 4, 64], [2, 128, 4, 64], [2, 128, 8])
    with pytest.raises(ValueError, match=r"q and k must be \[b, t, h, k\]"):
        check([2, 128, 64], [2, 128, 4, 64], [2, 128, 4])
