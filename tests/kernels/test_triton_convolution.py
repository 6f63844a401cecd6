"""The Triton convolution: interpreted on the CPU, and run where there is a GPU."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hymo_kernels import causal_conv1d
from hymo_kernels.host import triton_causal_conv1d as kernels
from tests.close import assert_same_bits
from tests.kernels.convolution_cases import Case, errors, inputs
from tests.kernels.interpreter import interpret

# Three times the rounding of a result; sums are in fp32 whatever the inputs.
BUDGET = {torch.bfloat16: 5e-3, torch.float16: 6e-4, torch.float32: 2e-6}
dtypes = pytest.mark.parametrize("dtype", list(BUDGET), ids=str)
GPU_CASES = [
    *(Case(2, 300, 336, w, lengths=(1, 2, 140, 157)) for w in range(2, 9)),
    Case(3, 700, 1344, 4, lengths=(300, 400), state=False, bias=False, strided=True),
    Case(2, 129, 100, 4, silu=False),
    Case(1, 700, 144, 4, bounds=(0, 1, 3, 3, 128, 129, 500, 690)),
    Case(1, 700, 144, 4, bounds=(0, 1, 3, 3, 128, 129, 500, 690), state=False, bias=False),
    Case(1, 260, 48, 8, bounds=(0, 0, 5, 60, 260, 260)),
    Case(70, 1, 1344, 4),
    Case(2, 0, 64, 4),
    Case(1, 4, 1, 4),
]
LEAVES = ("x", "weight", "bias", "state")


def test_interpreted_kernels_equal_the_definition() -> None:
    interpret("convolution_cases")


def test_asking_for_kernels_that_are_not_there_is_an_error() -> None:
    x, weight = torch.randn(1, 4, 8), torch.randn(8, 4)
    with pytest.raises(ValueError, match=r"backend='triton' is not available, it needs tensors on an NVIDIA GPU"):
        causal_conv1d(x, weight, backend="triton")


def _loss(*x: Tensor, position: Tensor | None, **options: Any) -> Tensor:
    y, end = causal_conv1d(
        *x[:2],
        position=position,
        bias=x[2],
        initial_state=x[3],
        activation="silu",
        output_final_state=True,
        **options,
    )
    assert end is not None
    return y.float().sin().sum() + end.float().cos().sum()


def _arguments(case: Case, dtype: torch.dtype) -> tuple[list[Tensor], Tensor | None]:
    made = inputs(case, "cuda", dtype)
    return [x for x in (made[name] for name in LEAVES) if x is not None], made["position"]


def _gradients(position: Tensor | None, *x: Tensor, **options: Any) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = torch.func.grad(partial(_loss, position=position, **options), (0, 1, 2, 3))(*x)
    return found


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("processors", [1, 10**6])
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_kernels_equal_the_definition(
    case: Case, processors: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With long and with short walks."""
    monkeypatch.setattr(kernels, "multiprocessors", lambda device: processors)
    found = errors(case, "cuda", dtype)
    wrong = {name: error for name, error in found.items() if not error < BUDGET[dtype]}
    assert not wrong, found


@pytest.mark.gpu
def test_gpu_tensors_take_the_kernels_where_nothing_is_said() -> None:
    x, position = _arguments(Case(2, 300, 336, 4, lengths=(100, 200)), torch.bfloat16)
    for got, want in zip(_gradients(position, *x), _gradients(position, *x, backend="triton"), strict=True):
        assert_same_bits(got, want)


@pytest.mark.gpu
def test_kernels_are_bitwise_repeatable() -> None:
    x, position = _arguments(Case(4, 2000, 512, 4, lengths=(300, 1700)), torch.bfloat16)
    first = _gradients(position, *x)
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(first, _gradients(position, *x), strict=True))


@pytest.mark.gpu
def test_vmap_and_compiled_gradients_equal_eager_ones() -> None:
    x, position = _arguments(Case(3, 300, 336, 4, lengths=(100, 200)), torch.bfloat16)
    assert position is not None
    whole, weight, bias, states = x
    samples = [(position[:1], whole[i : i + 1], weight, bias, states[i : i + 1]) for i in range(3)]
    each = [_gradients(*sample) for sample in samples]
    mapped = torch.func.vmap(_gradients, in_dims=(None, 0, None, None, 0))(
        position[:1], whole[:, None], weight, bias, states[:, None]
    )
    for found, want in zip(mapped, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(found, torch.stack(want), rtol=1e-2, atol=1e-3)
    traced = torch._dynamo.nonstrict_trace(_gradients)
    compiled = torch.compile(lambda *y: traced(*y), fullgraph=True)(position, *x)
    for found, want in zip(compiled, _gradients(position, *x), strict=True):
        torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-3)


@pytest.mark.gpu
def test_a_document_reads_nothing_of_the_one_before() -> None:
    x, position = _arguments(Case(1, 100, 64, 4, lengths=(37, 63)), torch.float32)
    clean = causal_conv1d(*x[:2], position=position)[0]
    poisoned = x[0].clone()
    poisoned[:, :37] = torch.nan
    found = causal_conv1d(poisoned, x[1], position=position)[0]
    assert_same_bits(found[:, 37:], clean[:, 37:])
    grad = torch.func.grad(lambda y: causal_conv1d(y, x[1], position=position)[0][:, 37:].sum())(poisoned)
    assert (grad[:, :37] == 0).all()
    assert grad[:, 37:].isfinite().all()


@pytest.mark.gpu
def test_offsets_beyond_two_billion_elements() -> None:
    """A view whose last rows start beyond 2^31 elements of its storage."""
    (x, weight, bias, states), _ = _arguments(Case(1, 65, 64, 4), torch.bfloat16)
    stride = 2**31 // 64 + 128
    room = torch.empty(stride * 65, dtype=torch.bfloat16, device="cuda")
    far = room.as_strided(x.shape, (room.numel(), stride, 1))
    far.copy_(x)
    for got, want in zip(
        _gradients(None, far, weight, bias, states), _gradients(None, x, weight, bias, states), strict=True
    ):
        assert_same_bits(got, want)


@pytest.mark.gpu
def test_nothing_is_kept_for_the_backward_but_the_inputs() -> None:
    x = torch.randn(4, 4096, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(1024, 4, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    before = torch.cuda.memory_allocated()
    y, _ = causal_conv1d(x, weight, activation="silu")
    assert torch.cuda.memory_allocated() - before <= y.numel() * y.element_size() + 2**20


@pytest.mark.gpu
def test_new_lengths_and_batches_compile_nothing() -> None:
    from triton.runtime import driver

    from hymo_kernels.device import convolution

    names = ("forward_kernel", "backward_kernel", "start_kernel", "end_kernel")

    def compiled() -> int:
        device = driver.active.get_current_device()
        return sum(len(getattr(convolution, name).device_caches[device][0]) for name in names)

    def run(b: int, t: int) -> None:
        x, position = _arguments(Case(b, t, 336, 4, lengths=(t,)), torch.bfloat16)
        _gradients(position, *x)

    run(2, 100)
    before = compiled()
    for b, t in ((2, 1), (1, 101), (3, 128), (5, 1000), (1, 16)):
        run(b, t)
    assert compiled() == before


@pytest.mark.gpu
def test_a_captured_graph_replays() -> None:
    (x, weight, _, _), _ = _arguments(Case(1, 300, 336, 4), torch.bfloat16)
    bounds = torch.tensor([0, 100, 290], device="cuda")
    want = causal_conv1d(x, weight, cu_seqlens=bounds, activation="silu")[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = causal_conv1d(x, weight, cu_seqlens=bounds, activation="silu")[0]
    y.zero_()
    graph.replay()
    assert_same_bits(y, want)


@pytest.mark.gpu
def test_declared_outputs_of_the_raw_ops_are_true() -> None:
    x = inputs(Case(2, 60, 64, 4, lengths=(20, 40)), "cuda", torch.bfloat16)
    plain = [x[name] for name in ("x", "weight", "position", "bias", "state", "bounds")]
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(kernels.FORWARD, (*plain, True, True), test_utils=utils)
    torch.library.opcheck(kernels.BACKWARD, (*plain, x["dy"], x["d_end"], True), test_utils=utils)
