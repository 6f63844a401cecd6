"""The kernel's cross-entropy: interpreted on the CPU, and run where there is a GPU."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hymo_kernels import linear_cross_entropy
from hymo_kernels.host import triton_cross_entropy as kernels
from tests.close import assert_same_bits
from tests.kernels.cross_entropy_cases import Case, check_forms_agree, errors, inputs, is_kept
from tests.kernels.interpreter import interpret

# Of the nats, which are fp32 of the rounded logits, and of the gradients: the rounding of a result and of d_logits.
BUDGET = {torch.bfloat16: (2e-3, 6e-3), torch.float32: (2e-5, 2e-5)}
GPU_CASES = [
    Case(256, 896, 64_256, scale=0.1, chunk=128),
    Case(300, 64, 50_257, chunk=128, indices=torch.int32),
    Case(129, 64, 1000, scale=10.0),
    Case(64, 32, 16_384 * 2, cap=1.0),
    Case(5, 16, 37, cap=64.0, strided=True),
    Case(1, 8, 2),
    Case(140, 32, 65_536, cap=1.0, chunk=128),
    Case(64, 32, 32_770, cap=32.0, scale=10.0),
    Case(64, 32, 50_258, cap=32.0, scale=10.0, low=True),
]


def test_the_interpreted_kernel_equals_the_definition() -> None:
    interpret("cross_entropy_cases")


def test_chunks_are_equal_whole_tiles_within_the_budget() -> None:
    for tokens, budget in ((16_384, 2**30), (16_384, 2**31), (16_384, 2**28), (16_384, 1), (1000, 2**30), (1, 1)):
        chunk = kernels.chunk_of(tokens, 64_256, 2, budget)
        assert chunk <= tokens
        assert chunk == tokens or chunk % kernels.TILE == 0
        assert chunk * 64_256 * 2 <= max(budget, kernels.TILE * 64_256 * 2)
        assert -(-tokens // chunk) * chunk - tokens < max(kernels.TILE * (-(-tokens // chunk)), 1)
    assert kernels.chunk_of(16_384, 64_256, 2, 2**30) == 8192


def test_rows_are_read_once_at_the_size_of_the_vocabulary_and_where_codes_suffice() -> None:
    for case, kept in (
        (Case(1, 1, 64_256), True),
        (Case(1, 1, 65_536, cap=32.0), True),
        (Case(1, 1, 65_538), False),
        (Case(1, 1, 50_257), False),
        (Case(1, 1, 32_768), False),
        (Case(1, 1, 64_256, cap=32.5), False),
    ):
        assert is_kept(case, torch.bfloat16) is kept
        assert not is_kept(case, torch.float32)


def test_what_the_kernel_does_not_serve_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "HAS_TRITON", True)
    with FakeTensorMode() as mode:
        half, single = (
            FakeTensor(mode, torch.empty(1, dtype=dtype, device="meta"), torch.device("cuda:0"))
            for dtype in (torch.float16, torch.float32)
        )
    reasons = kernels.unavailable
    assert "bfloat16 and float32, hidden is torch.float16" in str(reasons(half, half, 15.0))
    assert "table torch.float16" in str(reasons(single, half, 15.0))
    assert "caps up to 64, this is 65.0" in str(reasons(single, single, 65.0))
    assert reasons(single, single, 64.0) is None


def _loss(hidden: Tensor, table: Tensor, *x: Tensor, **options: Any) -> Tensor:
    return 3 * linear_cross_entropy(hidden, table, *x, cap=15.0, **options)


def _gradients(*x: Tensor, **options: Any) -> tuple[tuple[Tensor, Tensor], Tensor]:
    found: tuple[tuple[Tensor, Tensor], Tensor] = torch.func.grad_and_value(partial(_loss, **options), (0, 1))(*x)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(BUDGET), ids=str)
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_the_kernel_equals_the_definition(case: Case, dtype: torch.dtype) -> None:
    found = errors(case, "cuda", dtype)
    of_nats, of_gradients = BUDGET[dtype]
    assert found.pop("nats") < of_nats, found
    assert all(error < of_gradients for error in found.values()), found


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [64_256, 32_770, 65_536])
def test_both_forms_agree_on_rows_of_full_size(vocabulary: int) -> None:
    check_forms_agree(vocabulary, "cuda")


@pytest.mark.gpu
def test_full_size_is_finite_repeatable_and_the_same_in_any_chunks() -> None:
    x = inputs(Case(16_384, 896, 64_256, scale=0.1), "cuda", torch.bfloat16)
    whole = _gradients(*x, backend="triton", logit_bytes=2**32)
    torch.testing.assert_close(whole, _gradients(*x, backend="triton", logit_bytes=2**32), rtol=0, atol=0)
    (d_hidden, d_table), value = _gradients(*x, backend="triton", logit_bytes=2**29)
    assert all(each.isfinite().all() for each in (d_hidden, d_table, value))
    torch.testing.assert_close(value, whole[1], rtol=1e-5, atol=0)
    for got, want in zip((d_hidden, d_table), whole[0], strict=True):
        assert (got.float() - want.float()).norm() <= 3e-3 * want.float().norm()


@pytest.mark.gpu
def test_gpu_tensors_take_the_kernel_where_nothing_is_said() -> None:
    x = inputs(Case(64, 32, 1000), "cuda", torch.bfloat16)
    for got, want in zip(_gradients(*x)[0], _gradients(*x, backend="triton")[0], strict=True):
        assert_same_bits(got, want)


@pytest.mark.gpu
def test_vmap_and_compiled_gradients_equal_eager_ones() -> None:
    hidden, table, labels, weight = inputs(Case(64, 32, 1000), "cuda", torch.bfloat16)
    both = torch.stack([hidden, -hidden])
    (d_hidden, d_table), values = torch.func.vmap(_gradients, in_dims=(0, None, None, None))(
        both, table, labels, weight
    )
    for i in range(2):
        one = _gradients(both[i], table, labels, weight)
        torch.testing.assert_close(((d_hidden[i], d_table[i]), values[i]), one)
    traced = torch._dynamo.nonstrict_trace(_gradients)
    compiled = torch.compile(lambda *x: traced(*x), fullgraph=True)(hidden, table, labels, weight)
    torch.testing.assert_close(compiled, _gradients(hidden, table, labels, weight))


@pytest.mark.gpu
def test_memory_is_one_chunk_of_logits_and_the_gradients() -> None:
    x = inputs(Case(4096, 64, 32_768), "cuda", torch.bfloat16)
    kernels.forward(*x, 15.0, 512, True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kernels.forward(*x, 15.0, 512, True)
    kept = 2 * x[0].numel() + 4 * x[1].numel()
    assert torch.cuda.max_memory_allocated() - before <= kept + 2 * 512 * 32_768 + 2**20


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [1000, 64_256])
def test_new_numbers_of_tokens_compile_nothing(vocabulary: int) -> None:
    from triton.runtime import driver

    from hymo_kernels.device.cross_entropy import cross_entropy_kernel, kept_cross_entropy_kernel

    kernel = kept_cross_entropy_kernel if vocabulary == 64_256 else cross_entropy_kernel

    def compiled() -> int:
        return len(kernel.device_caches[driver.active.get_current_device()][0])

    _gradients(*inputs(Case(300, 32, vocabulary), "cuda", torch.bfloat16), backend="triton")
    before = compiled()
    assert before
    for n in (1, 17, 300, 301):
        _gradients(*inputs(Case(n, 32, vocabulary), "cuda", torch.bfloat16), backend="triton", logit_bytes=2**18)
    assert compiled() == before


@pytest.mark.gpu
def test_offsets_beyond_two_billion_elements() -> None:
    """The last of 40,000 rows of 64,256 logits against the same row alone."""
    hidden, table, labels, weight = inputs(Case(40_000, 8, 64_256), "cuda", torch.bfloat16)
    labels[-1], weight[-1] = 64_255, 1.0
    nats, d_hidden, _ = kernels.forward(hidden, table, labels, weight, 15.0, 40_000, True)
    alone = kernels.forward(hidden[-1:], table, labels[-1:], weight[-1:], 15.0, 1, True)
    torch.testing.assert_close(nats[-1:], alone[0], rtol=1e-3, atol=0)
    torch.testing.assert_close(d_hidden[-1:], alone[1], rtol=2e-2, atol=1e-4)


@pytest.mark.gpu
def test_a_captured_graph_replays() -> None:
    x = inputs(Case(300, 32, 1000), "cuda", torch.bfloat16)
    want = linear_cross_entropy(*x, cap=15.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = linear_cross_entropy(*x, cap=15.0)
    total.zero_()
    graph.replay()
    assert_same_bits(total, want)


@pytest.mark.gpu
def test_declared_outputs_of_the_raw_op_are_true() -> None:
    x = inputs(Case(60, 32, 1000), "cuda", torch.bfloat16)
    for gradient in (True, False):
        torch.library.opcheck(kernels.FORWARD, (*x, 15.0, 32, gradient), test_utils=("test_schema", "test_faketensor"))
