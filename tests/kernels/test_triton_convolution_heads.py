"""The Triton convolution of queries, keys and values: interpreted on the CPU, and run where there is a GPU."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hymo_kernels import causal_conv1d_heads
from hymo_kernels.host import triton_causal_conv1d as walks
from hymo_kernels.host import triton_causal_conv1d_heads as kernels
from tests.close import assert_same_bits
from tests.kernels.convolution_heads_cases import GRADS, INPUTS, Case, check_documents_are_alone, errors, inputs
from tests.kernels.interpreter import interpret

# Three times the rounding of a result; sums are in fp32 whatever the inputs.
BUDGET = {torch.bfloat16: 5e-3, torch.float16: 6e-4, torch.float32: 2e-6}
dtypes = pytest.mark.parametrize("dtype", list(BUDGET), ids=str)
GPU_CASES = [
    *(Case(2, 300, (6, 128), (6, 128), 16, w, lengths=(1, 2, 140, 157)) for w in (2, 4, 8)),
    Case(3, 700, (2, 64), (8, 96), 32, lengths=(300, 400), strided=True),
    Case(1, 129, (5, 40), (5, 24), 0),
    Case(1, 130, (3, 20), (6, 5), 3, lengths=(129, 1)),
    Case(70, 1, (14, 128), (14, 128), 16),
    Case(2, 0, (2, 8), (2, 8), 2),
]
USUAL = Case(3, 300, (2, 64), (4, 64), 8, lengths=(100, 200))


@pytest.mark.parametrize("part", ["kernels", pytest.param("surrounds", marks=pytest.mark.heavy)])
def test_interpreted_kernels_equal_the_definition(part: str) -> None:
    interpret("convolution_heads_cases", part)


def _arguments(case: Case, dtype: torch.dtype) -> list[Tensor]:
    made = inputs(case, "cuda", dtype)
    return [x for x in (made[name] for name in INPUTS) if x is not None]


def _gradients(
    x: Tensor, weight: Tensor, *places: Tensor, sizes: tuple[int, ...], **options: Any
) -> tuple[Tensor, ...]:
    position, cos, sin = places
    named = dict(zip(("key_heads", "key_dim", "value_heads"), sizes, strict=True))

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        q, k, v, _ = causal_conv1d_heads(x, weight, cos, sin, position=position, **named, **options)
        return q.float().sin().sum() + k.float().cos().sum() + (v.float() * v.float().sin()).sum()

    found: tuple[Tensor, ...] = torch.func.grad(loss, (0, 1))(x, weight)
    return found


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize("processors", [1, 10**6])
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_kernels_equal_the_definition(
    case: Case, processors: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With long and with short walks."""
    monkeypatch.setattr(walks, "multiprocessors", lambda device: processors)
    found = errors(case, "cuda", dtype)
    wrong = {name: error for name, error in found.items() if not error < BUDGET[dtype]}
    assert not wrong, found


@pytest.mark.gpu
def test_kernels_are_bitwise_repeatable_and_taken_where_nothing_is_said() -> None:
    tensors = _arguments(USUAL, torch.bfloat16)
    first = _gradients(*tensors, sizes=USUAL.sizes, backend="triton")
    for _ in range(50):
        for got, want in zip(_gradients(*tensors, sizes=USUAL.sizes), first, strict=True):
            assert_same_bits(got, want)


@pytest.mark.gpu
def test_vmap_and_compiled_gradients_equal_eager_ones() -> None:
    x, weight, *places = _arguments(USUAL, torch.bfloat16)
    gradients = partial(_gradients, sizes=USUAL.sizes)
    each = [gradients(x[i : i + 1], weight, *(y[i : i + 1] for y in places)) for i in range(len(x))]
    mapped = torch.func.vmap(gradients, in_dims=(0, None, 0, 0, 0))(x[:, None], weight, *(y[:, None] for y in places))
    for found, want in zip(mapped, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(found, torch.stack(want), rtol=1e-2, atol=1e-3)
    traced = torch._dynamo.nonstrict_trace(gradients)
    compiled = torch.compile(lambda *y: traced(*y), fullgraph=True)(x, weight, *places)
    for found, want in zip(compiled, gradients(x, weight, *places), strict=True):
        # What is around the kernels is rounded once where it was rounded at every operation.
        assert (found - want).norm() < 1e-2 * want.norm()


@pytest.mark.gpu
def test_documents_are_alone() -> None:
    check_documents_are_alone("cuda")


@pytest.mark.gpu
def test_offsets_beyond_two_billion_elements() -> None:
    """A view whose last rows start beyond 2^31 elements of its storage."""
    x, *others = _arguments(Case(1, 65, (1, 32), (1, 32), 8, lengths=(65,)), torch.bfloat16)
    stride = 2**31 // 64 + 128
    room = torch.empty(stride * 65, dtype=torch.bfloat16, device="cuda")
    far = room.as_strided(x.shape, (room.numel(), stride, 1))
    far.copy_(x)
    got, want = (_gradients(y, *others, sizes=(1, 32, 1)) for y in (far, x))
    for each in zip(got, want, strict=True):
        assert_same_bits(*each)


@pytest.mark.gpu
def test_nothing_is_kept_for_the_backward_but_the_inputs() -> None:
    x, weight, position, cos, sin = _arguments(Case(4, 2048, (4, 64), (4, 64), 8, lengths=(2048,)), torch.bfloat16)
    before = torch.cuda.memory_allocated()
    outputs = causal_conv1d_heads(
        x.requires_grad_(), weight, cos, sin, key_heads=4, key_dim=64, value_heads=4, position=position
    )
    assert torch.cuda.memory_allocated() - before <= x.numel() * x.element_size() + 2**20
    assert outputs[0].requires_grad


@pytest.mark.gpu
def test_new_lengths_and_batches_compile_nothing() -> None:
    from triton.runtime import driver

    from hymo_kernels.device import convolution_heads

    def compiled() -> int:
        device = driver.active.get_current_device()
        each = (convolution_heads.conv_heads_forward_kernel, convolution_heads.conv_heads_backward_kernel)
        return sum(len(kernel.device_caches[device][0]) for kernel in each)

    def run(b: int, t: int) -> None:
        case = Case(b, t, (2, 64), (2, 64), 8, lengths=(t,))
        _gradients(*_arguments(case, torch.bfloat16), sizes=case.sizes)

    run(2, 100)
    before = compiled()
    for b, t in ((2, 1), (1, 101), (3, 128), (5, 1000), (1, 16)):
        run(b, t)
    assert compiled() == before


@pytest.mark.gpu
def test_declared_outputs_of_the_raw_ops_are_true() -> None:
    x = inputs(USUAL, "cuda", torch.bfloat16)
    plain = [x[name] for name in INPUTS]
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(kernels.FORWARD, (*plain, *USUAL.sizes), test_utils=utils)
    torch.library.opcheck(kernels.BACKWARD, (*plain, *(x[name] for name in GRADS)), test_utils=utils)
