"""The Triton scan token by token, interpreted on the CPU and run where there is a GPU; pools of states anywhere."""

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hymo_kernels import fused_recurrent_gated_delta_rule, gated_delta_rule, naive_gated_delta_rule
from hymo_kernels.host import triton_recurrent_delta_rule as kernels
from tests.close import assert_same_bits, gaussian
from tests.kernels.decode_cases import LEAVES, Case, errors, inputs, options_of, pool_errors
from tests.kernels.interpreter import interpret
from tests.strategies import lengths, seeds

# Three times the rounding of a result; sums are in fp32 whatever the inputs.
BUDGET = {torch.bfloat16: 5e-3, torch.float16: 6e-4, torch.float32: 1e-5}
dtypes = pytest.mark.parametrize("dtype", list(BUDGET), ids=str)
GPU_CASES = [
    *(
        Case(2, 5, 2, 4, k, v, resets=(2,))
        for k, v in [(16, 16), (32, 32), (64, 96), (96, 192), (128, 128), (256, 256)]
    ),
    *(Case(b, 1, 2, 4, 128, 128) for b in (1, 70)),
    Case(1, 8, 1, 3, 30, 18, norm=False, in_kernel=False),
    Case(3, 50, 1, 2, 64, 64, strided=True),
    Case(1, 20, 2, 2, 128, 128, in_kernel=False, gated=False, state=False),
    Case(1, 60, 2, 2, 64, 64, bounds=(0, 1, 1, 2, 30, 57)),
    Case(2, 0, 1, 1, 32, 32),
]
IN_KERNEL = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "allow_neg_eigval": True,
}
POOL_ROWS = 6


def test_interpreted_kernels_equal_the_definition() -> None:
    interpret("decode_cases")


def test_asking_for_kernels_that_are_not_there_is_an_error() -> None:
    q = torch.randn(1, 4, 1, 16)
    with pytest.raises(ValueError, match=r"backend='triton' is not available, it needs tensors on an NVIDIA GPU"):
        fused_recurrent_gated_delta_rule(q, q, q, None, torch.rand(1, 4, 1), backend="triton")


@given(
    seed=seeds(),
    lens=lengths(longest=4, most=POOL_ROWS),
    packed=st.booleans(),
    v_first=st.booleans(),
    form=st.sampled_from(["chunk", "recurrent", "definition"]),
)
def test_a_pool_is_updated_where_it_is_named_and_nowhere_else(
    seed: int, lens: list[int], packed: bool, v_first: bool, form: Any
) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = len(lens)
    rows = (1, sum(lens) + 1) if packed else (count, 3)
    q, k, v = (gaussian(generator, *rows, heads, width) for heads, width in ((1, 4), (1, 4), (2, 3)))
    g, beta = -gaussian(generator, *rows, 2).abs(), gaussian(generator, *rows, 2).sigmoid()
    index = torch.randperm(POOL_ROWS, generator=generator)[:count]
    index = torch.where(torch.rand(count, generator=generator) < 0.3, -1 - index, index)
    pool = gaussian(generator, POOL_ROWS, 2, *((3, 4) if v_first else (4, 3)))
    bounds = torch.tensor([0, *lens]).cumsum(0) if packed else None
    rule = partial(gated_delta_rule, output_final_state=True, cu_seqlens=bounds, state_v_first=v_first, form=form)

    before = pool.clone()
    o, same = rule(q, k, v, g, beta, initial_state=pool, state_indices=index)
    assert same is not None
    assert same.data_ptr() == pool.data_ptr()
    want, end = rule(q, k, v, g, beta, initial_state=before[index.clamp(min=0)])
    assert end is not None
    for i, row in enumerate(index.tolist()):
        if row >= 0:
            assert_same_bits(pool[row], end[i])
        elif bounds is None:
            want[i] = 0
        else:
            want[:, bounds[i] : bounds[i + 1]] = 0
    assert_same_bits(o, want)
    unnamed = [row for row in range(POOL_ROWS) if row not in index.tolist()]
    assert_same_bits(pool[unnamed], before[unnamed])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_indices": torch.arange(3)}, r"must be \[2\], one a sequence, into initial_state; got \[3\]"),
        ({"initial_state": None}, r"got \[2\] and initial_state None"),
        ({"initial_state": torch.zeros(5, 1, 4, 4).bfloat16()}, r"must be float32 .* got torch\.bfloat16"),
        ({"initial_state": torch.zeros(5, 1, 4, 5)}, r"initial_state must be \[5, 1, 4, 4\]; got \[5, 1, 4, 5\]"),
        ({"initial_state": torch.zeros(5, 1, 4, 4).requires_grad_()}, r"has no gradient, .* use torch\.no_grad"),
    ],
)
def test_a_pool_that_does_not_fit_is_an_error(options: dict[str, Any], message: str) -> None:
    q = torch.randn(2, 1, 1, 4)
    pooled = {"initial_state": torch.zeros(5, 1, 4, 4), "state_indices": torch.arange(2)}
    with pytest.raises(ValueError, match=message):
        fused_recurrent_gated_delta_rule(q, q, q, None, torch.rand(2, 1, 1), **(pooled | options))


def test_rows_of_no_sequence_may_be_nan_even_where_they_are_normalised() -> None:
    x = inputs(Case(1, 6, 1, 1, 8, 8, bounds=(0, 2, 4)), "cpu", torch.float64)
    leaves = [x[name].double().requires_grad_() for name in LEAVES]  # type: ignore[union-attr]
    weights = {"A_log": leaves[5], "dt_bias": leaves[6], "initial_state": leaves[7]}
    o, _ = fused_recurrent_gated_delta_rule(*leaves[:5], cu_seqlens=x["bounds"], **IN_KERNEL, **weights)
    grads = torch.autograd.grad(o.sum(), leaves)
    assert all(grad.isfinite().all() for grad in grads)
    assert all((grad[:, 4:] == 0).all() for grad in grads[:5])


def test_a_reset_by_an_infinite_step_gives_the_decay_rate_no_gradient() -> None:
    x = inputs(Case(1, 4, 1, 2, 8, 8, resets=(2,)), "cpu", torch.float64)
    leaves = [x[name].double().requires_grad_() for name in LEAVES]  # type: ignore[union-attr]
    weights = {"A_log": leaves[5], "dt_bias": leaves[6], "initial_state": leaves[7]}
    o, _ = fused_recurrent_gated_delta_rule(*leaves[:5], **IN_KERNEL, **weights)
    # What follows the reset depends on no gate before it, nor on its own.
    grads = torch.autograd.grad(o[:, 2:3].sum(), leaves)
    assert (grads[5] == 0).all()
    assert (grads[7] == 0).all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(_loss(*leaves), leaves))


def _loss(*x: Tensor, **options: Any) -> Tensor:
    weights = {"A_log": x[5], "dt_bias": x[6], "initial_state": x[7]}
    o, end = fused_recurrent_gated_delta_rule(*x[:5], output_final_state=True, **IN_KERNEL, **weights, **options)
    assert end is not None
    return o.sin().sum() + end.cos().sum()


def _arguments(case: Case, dtype: torch.dtype) -> list[Tensor]:
    made = inputs(case, "cuda", dtype)
    return [x for x in (made[name] for name in LEAVES) if x is not None]


_gradients = torch.func.grad(partial(_loss, backend="triton"), tuple(range(8)))


@pytest.mark.gpu
# Wide, middling and narrow tiles; all numbers with the middling ones.
@pytest.mark.parametrize(
    ("processors", "dtype"),
    [*((count, torch.bfloat16) for count in (1, 132)), *((20, dtype) for dtype in BUDGET)],
    ids=str,
)
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_kernels_equal_the_definition(
    case: Case, processors: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: processors)
    found = errors(case, "cuda", dtype)
    wrong = {name: error for name, error in found.items() if not error < BUDGET[dtype]}
    assert not wrong, found


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("bounds", [(), (0, 2, 3, 3, 7)], ids=str)
def test_kernels_update_a_pool(bounds: tuple[int, ...], dtype: torch.dtype) -> None:
    assert all(error < BUDGET[dtype] for error in pool_errors("cuda", dtype, bounds).values())


@pytest.mark.gpu
def test_a_pool_may_end_beyond_two_billion_elements() -> None:
    """Row 40,000 of states of 65,536 numbers, 10.5 GB, v-first and in place."""
    x = inputs(Case(1, 1, 1, 1, 256, 256), "cuda", torch.bfloat16)
    pool = torch.empty(40_001, 1, 256, 256, device="cuda")
    pool[40_000] = x["start"][0].mT  # type: ignore[index]
    index = torch.tensor([40_000], device="cuda")
    sequence = [x[name] for name in LEAVES[:5]]
    options = {"A_log": x["A_log"], "dt_bias": x["dt_bias"], "output_final_state": True, **IN_KERNEL}
    rule: Any = fused_recurrent_gated_delta_rule
    o, _ = rule(*sequence, initial_state=pool, state_indices=index, state_v_first=True, **options)
    want, end = rule(*sequence, initial_state=x["start"], **options)
    assert (o - want).norm() < 5e-3 * want.norm()
    torch.testing.assert_close(pool[40_000].mT, end[0], rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_more_heads_than_a_grid_axis_has_programs() -> None:
    b, h = 600, 128
    q = torch.randn(b, 1, h, 16, device="cuda", dtype=torch.bfloat16)
    beta = torch.rand(b, 1, h, device="cuda")
    o, _ = fused_recurrent_gated_delta_rule(q, q, q, None, beta)
    last, _ = naive_gated_delta_rule(q[-1:].double(), q[-1:].double(), q[-1:].double(), None, beta[-1:].double())
    assert (o[-1:] - last).norm() < 5e-3 * last.norm()


@pytest.mark.gpu
def test_gpu_tensors_take_the_kernels_where_nothing_is_said() -> None:
    x = _arguments(Case(2, 3, 1, 2, 64, 64), torch.bfloat16)
    for got, want in zip(torch.func.grad(_loss, tuple(range(8)))(*x), _gradients(*x), strict=True):
        assert_same_bits(got, want)


@pytest.mark.gpu
def test_kernels_are_bitwise_repeatable() -> None:
    x = _arguments(Case(8, 30, 2, 8, 128, 128), torch.bfloat16)
    first = _gradients(*x)
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(first, _gradients(*x), strict=True))


@pytest.mark.gpu
def test_vmap_and_compiled_gradients_equal_eager_ones() -> None:
    cases = [_arguments(Case(2, 5, 2, 4, 64, 32, resets=(i,)), torch.bfloat16) for i in range(3)]
    each = [_gradients(*x) for x in cases]
    stacked = [torch.stack(t) for t in zip(*cases, strict=True)]
    for found, want in zip(torch.func.vmap(_gradients)(*stacked), zip(*each, strict=True), strict=True):
        torch.testing.assert_close(found, torch.stack(want), rtol=1e-2, atol=1e-4)
    traced = torch._dynamo.nonstrict_trace(_gradients)
    compiled = torch.compile(lambda *x: traced(*x), fullgraph=True)(*cases[0])
    for found, want in zip(compiled, each[0], strict=True):
        torch.testing.assert_close(found, want, rtol=2e-2, atol=1e-3)


@pytest.mark.gpu
def test_a_compiled_step_and_a_captured_graph_update_the_pool() -> None:
    case = Case(4, 1, 2, 4, 128, 128)
    x, static = inputs(case, "cuda", torch.bfloat16), options_of(case)
    index = torch.tensor([3, -1, 0, 5], device="cuda")
    sequence = [x[name] for name in LEAVES[:7]]

    def step(pool: Tensor) -> Tensor:
        o: Tensor = kernels.UPDATE(*sequence, pool, index, None, *static)
        return o

    start = torch.randn(6, 4, 128, 128, device="cuda")
    pools = [start.clone() for _ in range(3)]
    want = step(pools[0])
    assert_same_bits(torch.compile(step, fullgraph=True)(pools[1]), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = step(pools[2])
    pools[2].copy_(start)
    graph.replay()
    assert_same_bits(o, want)
    for pool in pools[1:]:
        assert_same_bits(pool, pools[0])


@pytest.mark.gpu
def test_new_lengths_and_batches_compile_nothing() -> None:
    from triton.runtime import driver

    from hymo_kernels.device.recurrent import gather_kernel, recurrent_kernel, reverse_kernel

    def compiled() -> int:
        device = driver.active.get_current_device()
        return sum(len(kernel.device_caches[device][0]) for kernel in (recurrent_kernel, reverse_kernel, gather_kernel))

    def run(b: int, t: int) -> None:
        _gradients(*_arguments(Case(b, t, 2, 14, 64, 64), torch.bfloat16))

    for t in (4, 12):  # without and with states kept on the way
        run(64, t)
    before = compiled()
    for b, t in ((64, 1), (64, 5), (64, 8), (65, 16), (67, 17), (70, 33)):
        run(b, t)
    assert compiled() == before


@pytest.mark.gpu
def test_decoding_continues_a_prefill() -> None:
    x = _arguments(Case(2, 40, 2, 4, 128, 128), torch.bfloat16)
    options = {"A_log": x[5], "dt_bias": x[6], "output_final_state": True, **IN_KERNEL}
    rule: Any = fused_recurrent_gated_delta_rule
    whole, end = rule(*x[:5], initial_state=x[7], **options)
    state, parts = x[7].clone(), []
    for begin, stop in pairwise((0, 33, 34, 35, 38, 40)):
        o, state = rule(*(y[:, begin:stop] for y in x[:5]), initial_state=state, **options)
        parts.append(o)
    assert_same_bits(torch.cat(parts, 1), whole)
    assert_same_bits(state, end)


@pytest.mark.gpu
def test_declared_outputs_of_the_raw_ops_are_true() -> None:
    case = Case(2, 3, 2, 4, 64, 32)
    x, static = inputs(case, "cuda", torch.bfloat16), options_of(case)
    sequence, utils = [x[name] for name in LEAVES[:7]], ("test_schema", "test_faketensor")
    torch.library.opcheck(kernels.FORWARD, (*sequence, x["start"], None, *static), test_utils=utils)
    index = torch.arange(2, device="cuda")
    torch.library.opcheck(kernels.UPDATE, (*sequence, x["start"], index, None, *static), test_utils=utils)
    grads = (x["do"], x["d_end"])
    torch.library.opcheck(kernels.BACKWARD, (*sequence, x["start"], None, *grads, *static), test_utils=utils)
