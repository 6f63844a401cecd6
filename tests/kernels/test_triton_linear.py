"""The Triton linear scan: interpreted on the CPU, and run where there is a GPU."""

import inspect
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hymo_kernels import gated_linear_scan, naive_gated_linear_scan
from hymo_kernels.host import triton_gated_linear_scan as kernels
from tests.close import assert_same_bits
from tests.kernels.interpreter import interpret
from tests.kernels.linear_cases import Case, inputs, worst_heads
from tests.strategies import lengths, seeds

NAMES = ("v", "b", "c", "g", "A_log", "start")

# Three times what a correct kernel errs: operands of that dtype, sums in fp32.
BUDGET = {torch.bfloat16: 9e-3, torch.float16: 2e-3, torch.float32: 3e-6}
WIDTHS = [(16, 16), (32, 32), (24, 40), (64, 64), (128, 128), (96, 192), (256, 256)]
SIZES = [Case(2, 300, 2, s, v, resets=(66, 153)) for s, v in WIDTHS]
OPTIONS = [
    Case(1, 700, 2, 128, 128, bounds=(0, 64, 64, 193, 650)),
    Case(1, 1000, 2, 32, 32, bounds=(0, 1, 3, 500, 500, 990)),
    Case(1, 1, 2, 128, 128),
    Case(1, 129, 2, 64, 64, gate=16.0),
    Case(1, 129, 2, 32, 32, gate=1e4),
    Case(1, 2000, 1, 64, 64, gate=0.001, state=False),
]
# One text of each kernel serves all numbers: of the widths and options each is tried with some, those that matter most
# for what is rounded with all.
GPU_CASES = [
    *((case, torch.bfloat16) for case in (*SIZES, *OPTIONS)),
    *((case, dtype) for case in (SIZES[2], SIZES[4], SIZES[6]) for dtype in (torch.float16, torch.float32)),
    *((case, torch.float32) for case in OPTIONS[-2:]),
]
triton = partial(gated_linear_scan, backend="triton")
dtypes = pytest.mark.parametrize("dtype", list(BUDGET), ids=str)


def arguments(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """v, b, c, g, A_log and the initial state on the GPU."""
    made = inputs(case, "cuda", dtype)
    return [x for x in (made[name] for name in NAMES) if x is not None]


def both(*x: Tensor) -> Tensor:
    """A scalar of the read-outs and of the final state."""
    o, end = triton(*x, output_final_state=True)
    assert end is not None
    return o.float().sin().sum() + end.cos().sum()


gradients = torch.func.grad(both, tuple(range(6)))


def test_interpreted_kernels_equal_the_definition() -> None:
    interpret("linear_cases")


def test_asking_for_kernels_that_are_not_there_is_an_error() -> None:
    x = torch.randn(1, 4, 1, 16)
    with pytest.raises(ValueError, match=r"backend='triton' is not available, it needs tensors on an NVIDIA GPU"):
        triton(x, x, x, torch.rand(1, 4, 1), torch.zeros(1, 16))
    with pytest.raises(ValueError, match=r"backend must be 'eager', 'triton' or None; got 'cuda'"):
        inspect.unwrap(gated_linear_scan)(x, x, x, torch.rand(1, 4, 1), torch.zeros(1, 16), backend="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "dtype"), GPU_CASES, ids=str)
def test_kernels_equal_the_definition(case: Case, dtype: torch.dtype) -> None:
    assert set(kernels.PLANS) == set(BUDGET)
    errors = worst_heads(case, "cuda", dtype)
    # dg and dA_log are sums of many products that may cancel.
    wrong = {n: e for n, e in errors.items() if not e < BUDGET[dtype] * (3 if n in ("dg", "dA_log") else 1)}
    assert not wrong, errors


@pytest.mark.gpu
@given(
    seed=seeds(), lens=lengths(longest=150), tail=st.sampled_from([0, 5]), gate=st.sampled_from([0.0, 0.1, 2.0, 40.0])
)
@settings(max_examples=20)
def test_packed_sequences_equal_the_definition(seed: int, lens: list[int], tail: int, gate: float) -> None:
    bounds = torch.tensor([0, *lens]).cumsum(0)
    resets = (seed % max(1, sum(lens)),) if sum(lens) else ()
    case = Case(1, sum(lens) + tail, 2, 32, 32, gate=gate, resets=resets, bounds=tuple(bounds.tolist()))
    if sum(lens):
        assert max(worst_heads(case, "cuda", torch.float32).values()) < 9e-6


@pytest.mark.gpu
@dtypes
def test_kernels_are_bitwise_repeatable(dtype: torch.dtype) -> None:
    x = arguments(Case(2, 2000, 4, 128, 128), dtype)
    first = gradients(*x)
    for _ in range(30):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(*x), strict=True))


@pytest.mark.gpu
def test_vmap_and_compiled_gradients_equal_eager_ones() -> None:
    cases = [arguments(Case(2, t, 2, 64, 32, resets=(70,)), torch.bfloat16) for t in (200, 200, 200)]
    each = [gradients(*x) for x in cases]
    mapped = torch.func.vmap(gradients)(*(torch.stack(t) for t in zip(*cases, strict=True)))
    for found, want in zip(mapped, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(found, torch.stack(want), rtol=1e-2, atol=1e-4)
    traced = torch._dynamo.nonstrict_trace(gradients)
    compiled = torch.compile(lambda *x: traced(*x), fullgraph=True)(*cases[0])
    for found, want in zip(compiled, each[0], strict=True):
        torch.testing.assert_close(found, want, rtol=2e-2, atol=1e-3)


@pytest.mark.gpu
def test_only_the_gradients_asked_for_are_computed_and_equal_all() -> None:
    x = arguments(Case(1, 130, 2, 64, 64), torch.bfloat16)
    every = gradients(*x)
    for i in range(6):
        assert_same_bits(torch.func.grad(both, i)(*x), every[i], NAMES[i])


@pytest.mark.gpu
def test_what_surrounds_the_inputs_is_not_read() -> None:
    """Strided views into NaN, and NaN past the last sequence: bits as with clean contiguous copies."""
    clean = arguments(Case(1, 200, 2, 48, 40, state=False), torch.bfloat16)
    bounds = torch.tensor([0, 70, 190], device="cuda")

    def poisoned(x: Tensor) -> Tensor:
        room = torch.full((x.shape[0], x.shape[1] + 70, x.shape[2] + 2, *(n + 24 for n in x.shape[3:])), torch.nan)
        view = room.to(x)[:, 3 : 3 + x.shape[1], 1:-1]
        view = view[..., 8 : 8 + x.shape[3]] if x.ndim == 4 else view
        view.copy_(x)
        view[:, 190:] = torch.nan
        return view

    def run(*x: Tensor) -> tuple[Tensor, ...]:
        def loss(*x: Tensor) -> tuple[Tensor, Tensor]:
            o, _ = triton(*x, cu_seqlens=bounds)
            return o.float().sin().sum(), o

        grads, o = torch.func.grad(loss, tuple(range(5)), has_aux=True)(*x)
        return (o, *grads)

    got = run(*(poisoned(x) for x in clean[:4]), clean[4])
    for g, w in zip(got, run(*clean), strict=True):
        assert g.isfinite().all()
        assert_same_bits(g, w)
    assert all((x[:, 190:] == 0).all() for x in got[:5])


@pytest.mark.gpu
def test_what_precedes_a_reset_changes_no_bit_and_gets_no_gradient() -> None:
    case = Case(1, 200, 2, 32, 32, resets=(90,))
    x = arguments(case, torch.bfloat16)
    changed = [torch.cat([3 - t[:, :90], t[:, 90:]], 1) for t in x[:3]] + [x[3], x[4], 9 * x[5]]
    for t, u in zip(triton(*x, output_final_state=True), triton(*changed, output_final_state=True), strict=True):
        assert_same_bits(*((t[:, 90:], u[:, 90:]) if t.shape[1] == 200 else (t, u)))
    grads = torch.func.grad(lambda *x: triton(*x)[0][:, 90:].float().sum(), tuple(range(6)))(*x)
    assert all((grad[:, :90] == 0).all() for grad in grads[:4])
    assert (grads[3][:, 90] == 0).all()
    assert (grads[5] == 0).all()


@pytest.mark.gpu
def test_large_states_of_small_numbers_stay_finite() -> None:
    """fp16 has no number above 65504; states and their gradients do."""
    x = arguments(Case(1, 100, 1, 32, 32), torch.float16)
    x[5] = 1e6 * x[5].sign()
    x = [*x[:2], 1e-3 * x[2], *x[3:]]
    # That of c is as large as the state.
    assert all(grad.isfinite().all() for i, grad in enumerate(gradients(*x)) if i != 2)
    want = naive_gated_linear_scan(*x)[0]
    assert (triton(*x)[0] - want).norm() < 1e-2 * want.norm()


@pytest.mark.gpu
def test_raw_ops_are_what_their_schemas_say() -> None:
    made = inputs(Case(1, 100, 2, 32, 32), "cuda", torch.bfloat16)
    tensors = [made[name] for name in (*NAMES, "bounds")]
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(kernels.FORWARD, (*tensors, True), test_utils=utils)
    pairs = kernels.FORWARD(*tensors, True)[2]
    torch.library.opcheck(kernels.BACKWARD, (*tensors, pairs, made["do"], None, True, True), test_utils=utils)


@pytest.mark.gpu
def test_offsets_beyond_two_billion_elements() -> None:
    """A view whose last row starts beyond 2^31 elements of its storage."""
    stride = 2**31 // 64 + 128
    room = torch.empty(stride * 65, dtype=torch.bfloat16, device="cuda")
    x = arguments(Case(1, 65, 1, 32, 32), torch.bfloat16)
    far = room.as_strided(x[0].shape, (room.numel(), stride, 32, 1))
    far.copy_(x[0])
    for got, want in zip(gradients(far, *x[1:]), gradients(*x), strict=True):
        assert_same_bits(got, want)


@pytest.mark.gpu
def test_grids_beyond_65535() -> None:
    x = arguments(Case(70_000, 2, 1, 16, 16), torch.bfloat16)
    whole = gradients(*x)
    last = gradients(*(t if t.ndim == 2 else t[-3:] for t in x))
    for i in (0, 1, 2, 3, 5):
        assert_same_bits(whole[i][-3:], last[i], NAMES[i])
