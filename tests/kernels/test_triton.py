"""The Triton scan: interpreted on the CPU, compiled for a GPU that is not there, and run where there is one."""

import inspect
from dataclasses import replace

import pytest
import torch

from hymo_kernels import chunk_gated_delta_rule, gated_delta_rule, naive_gated_delta_rule
from hymo_kernels.host.gated_delta_call import Precision
from hymo_kernels.host.triton_gated_delta_rule import FP32_PLANS, PLANS
from tests.kernels.interpreter import interpret
from tests.kernels.triton_cases import Case, worst_heads

# Three times what a correct bf16 kernel errs for mild gates, random keys and beta below 1.5.
BUDGET = {"dg": 2e-2, "dbeta": 1.5e-2}
# Of fp32 numbers, by how products are formed.
FP32_BUDGET: dict[Precision, float] = {"tf32x3": 3e-6, "ieee": 1.5e-6}
SQUARE = [(16, 16), (32, 32), (64, 64), (128, 128), (256, 256)]
OBLONG = [(96, 128), (128, 64), (96, 192), (128, 256), (160, 64), (192, 192)]
SQUARES, OBLONGS = ([Case(2, 500, 2, 2, k, v, resets=(166, 253)) for k, v in widths] for widths in (SQUARE, OBLONG))
PACKED = Case(1, 700, 1, 3, 128, 128, bounds=(0, 64, 64, 193, 650))
PACKED_NARROW = Case(1, 1000, 1, 2, 32, 32, bounds=(0, 1, 3, 500, 500, 990))
IN_KERNEL = Case(2, 300, 2, 4, 64, 64, in_kernel=True, resets=(70,))
SEGMENTS = Case(1, 64 * 40, 1, 1, 32, 32, gate=-0.01)
FORGETFUL = Case(1, 129, 1, 1, 128, 128, gate=-16.0)
OPTIONS = [
    PACKED,
    PACKED_NARROW,
    IN_KERNEL,
    SEGMENTS,
    FORGETFUL,
    *(Case(2, 300, 2, 2, width, width, gated=False) for width in (32, 64, 128)),
    Case(1, 700, 1, 3, 192, 96, bounds=(0, 64, 64, 193, 650)),
    Case(2, 300, 2, 4, 256, 64, in_kernel=True, resets=(70,)),
    Case(1, 64 * 40, 1, 1, 192, 192, gate=-0.5, state=False),
    Case(1, 64 * 40, 1, 1, 128, 128, gate=-0.5, state=False),
    Case(2, 300, 2, 4, 24, 32, in_kernel=True, resets=(70,)),
    Case(1, 129, 1, 1, 32, 32, gate=-16.0),
    Case(1, 1, 2, 2, 128, 128),
    Case(2, 500, 2, 2, 128, 128, resets=(166, 253), keep=True),
    Case(2, 500, 2, 2, 32, 32, resets=(166, 253), keep=True),
    Case(1, 700, 2, 6, 64, 64, bounds=(0, 64, 64, 193, 650), keep=True),
    Case(1, 300, 1, 1, 192, 192, keep=True),
]
# One text of each kernel serves all numbers: every width and option is tried with some, every table entry with all.
GPU_CASES = [
    *((case, torch.bfloat16) for case in (*SQUARES, *OBLONGS, *OPTIONS)),
    *((case, torch.float16) for case in SQUARES),
]
FP32_CASES = [
    *((case, "tf32x3") for case in (*SQUARES, *OBLONGS[::2], PACKED, PACKED_NARROW, IN_KERNEL, SEGMENTS, FORGETFUL)),
    *((case, "ieee") for case in SQUARES),
]


@pytest.mark.parametrize("part", ["16 bits", pytest.param("fp32", marks=pytest.mark.heavy)])
def test_interpreted_kernels_equal_the_definition(part: str) -> None:
    interpret("triton_cases", part)


def test_asking_for_kernels_that_are_not_there_is_an_error() -> None:
    q = torch.randn(1, 4, 1, 16)
    with pytest.raises(ValueError, match=r"backend='triton' is not available, it needs tensors on an NVIDIA GPU"):
        chunk_gated_delta_rule(q, q, q, None, torch.rand(1, 4, 1), backend="triton")


def test_an_unknown_precision_is_an_error() -> None:
    q = torch.randn(1, 4, 1, 16)
    with pytest.raises(ValueError, match=r"precision must be 'tf32x3' or 'ieee'; got 'tf32'"):
        inspect.unwrap(gated_delta_rule)(q, q, q, None, torch.rand(1, 4, 1), precision="tf32")


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "dtype"), GPU_CASES, ids=str)
def test_kernels_equal_the_definition(case: Case, dtype: torch.dtype) -> None:
    assert set(PLANS) == {64, 128, 256}
    errors = worst_heads(case, "cuda", dtype)
    wrong = {name: error for name, error in errors.items() if not error < BUDGET.get(name, 1e-2)}
    assert not wrong, errors


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "precision"), FP32_CASES, ids=str)
def test_fp32_kernels_equal_the_definition(case: Case, precision: Precision) -> None:
    assert set(FP32_PLANS) == {32, 64, 128, 256}
    errors = worst_heads(replace(case, precision=precision), "cuda", torch.float32)
    wrong = {name: error for name, error in errors.items() if not error < FP32_BUDGET[precision]}
    assert not wrong, errors


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("width", "dtype"),
    [(32, torch.bfloat16), (128, torch.bfloat16), (256, torch.bfloat16), (64, torch.float32)],
    ids=str,
)
def test_kernels_are_bitwise_repeatable(width: int, dtype: torch.dtype) -> None:
    x = [torch.randn(1, 4096, 4, width, device="cuda", dtype=dtype) for _ in range(3)]
    g, beta = -torch.rand(1, 4096, 4, device="cuda"), torch.rand(1, 4096, 4, device="cuda")

    def gradient() -> tuple[torch.Tensor, ...]:
        return torch.func.grad(
            lambda *y: (
                chunk_gated_delta_rule(*y, use_qk_l2norm_in_kernel=True, backend="triton")[0].float().square().sum()
            ),
            (0, 1, 2, 3, 4),
        )(*x, g, beta)

    first = gradient()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, gradient(), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [32, 128, 256])
def test_states_that_are_kept_are_those_that_would_be_computed_again(width: int) -> None:
    q, k, v = (torch.randn(2, 300, 2, width, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    g, beta = -torch.rand(2, 300, 2, device="cuda"), torch.rand(2, 300, 2, device="cuda")

    def gradient(keep: bool) -> tuple[torch.Tensor, ...]:
        def loss(*x: torch.Tensor) -> torch.Tensor:
            o, _ = chunk_gated_delta_rule(*x, use_qk_l2norm_in_kernel=True, backend="triton", keep_states=keep)
            return o.float().square().sum()

        return torch.func.grad(loss, (0, 1, 2, 3, 4))(q, k, v, g, beta)

    assert all(torch.equal(a, b) for a, b in zip(gradient(True), gradient(False), strict=True))


@pytest.mark.gpu
@pytest.mark.usefixtures("unchecked")
def test_kernels_compile_and_vmap() -> None:
    q, k, v = (torch.randn(3, 2, 200, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    g, beta = -torch.rand(3, 2, 200, 2, device="cuda"), torch.rand(3, 2, 200, 2, device="cuda")

    def loss(*x: torch.Tensor) -> torch.Tensor:
        return chunk_gated_delta_rule(*x, use_qk_l2norm_in_kernel=True, backend="triton")[0].float().square().mean()

    each = [torch.func.grad(loss, (0, 1, 2, 3, 4))(*(x[i] for x in (q, k, v, g, beta))) for i in range(3)]
    mapped = torch.func.vmap(torch.func.grad(loss, (0, 1, 2, 3, 4)))(q, k, v, g, beta)
    compiled = torch.compile(torch.func.grad(loss, (0, 1, 2, 3, 4)), fullgraph=True)(
        *(x[0] for x in (q, k, v, g, beta))
    )
    for i, found in enumerate(mapped):
        for j in range(3):
            torch.testing.assert_close(found[j], each[j][i], rtol=0, atol=0)
        torch.testing.assert_close(compiled[i], each[0][i], rtol=1e-2, atol=1e-6)


@pytest.mark.gpu
def test_nan_stays_in_its_row_and_head() -> None:
    q = torch.randn(2, 130, 2, 64, device="cuda", dtype=torch.bfloat16)
    g, beta = -torch.rand(2, 130, 2, device="cuda"), torch.rand(2, 130, 2, device="cuda")
    clean = chunk_gated_delta_rule(q, q, q, g, beta, use_qk_l2norm_in_kernel=True, backend="triton")[0]
    poisoned = q.clone()
    poisoned[0, 100, 0] = float("nan")
    found = chunk_gated_delta_rule(
        poisoned, poisoned, poisoned, g, beta, use_qk_l2norm_in_kernel=True, backend="triton"
    )[0]
    assert torch.equal(found[1], clean[1])
    assert torch.equal(found[0, :, 1], clean[0, :, 1])
    # Chunks before the one that holds it.
    assert torch.equal(found[0, :64], clean[0, :64])


@pytest.mark.gpu
def test_the_first_step_after_a_prefill_continues_it() -> None:
    q = torch.randn(1, 200, 2, 128, device="cuda", dtype=torch.bfloat16)
    g, beta = -torch.rand(1, 200, 2, device="cuda"), torch.rand(1, 200, 2, device="cuda")
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    whole, state = naive_gated_delta_rule(q, q, q, g, beta, **options)
    _, half = chunk_gated_delta_rule(*(x[:, :150] for x in (q, q, q, g, beta)), backend="triton", **options)
    rest, end = chunk_gated_delta_rule(
        *(x[:, 150:] for x in (q, q, q, g, beta)), initial_state=half, backend="triton", **options
    )
    assert (rest - whole[:, 150:]).norm() < 1e-2 * whole[:, 150:].norm()
    assert (end - state).norm() < 1e-2 * state.norm()
