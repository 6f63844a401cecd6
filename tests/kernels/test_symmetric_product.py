"""Symmetric products and their polynomials: plain, and by the kernel where there is a Hopper GPU."""

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import hymo
from hymo.optim import orthogonalize
from hymo_kernels import symmetric_polynomial, symmetric_product
from hymo_kernels.host import symmetric_product as host
from tests.close import assert_same_bits
from tests.kernels.symmetric_cases import COEFFICIENTS, Case, by_kernel, errors, inputs

BUDGET = 1.01 * 2**-8
"""One rounding to bf16 errs by 2^-8 of a number at most, by 1.7e-3 of a matrix's norm; two roundings by up to 5e-3."""

SQUARE = (0.0, 0.0, 1.0)

GPU_CASES = [
    Case(3, 896, 1792),
    Case(3, 896, 1792, transposed=True),
    Case(2, 896, 896),
    Case(3, 200, 136),
    Case(3, 136, 200, transposed=True),
    Case(2, 40, 64),
    Case(2, 8, 8),
    Case(1, 128, 64),
    Case(1, 136, 8, transposed=True),
    # More tiles than one round of all programs, and an odd number of rounds.
    Case(150, 264, 72),
]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every bf16 matrix goes to the raw ops, which have plain implementations on the CPU."""
    monkeypatch.setattr(host, "_is_hopper", lambda device: True)
    monkeypatch.setattr(host, "_has_groups_of_warps", lambda: True)


@pytest.fixture
def hopper() -> None:
    reason = host.unavailable(torch.zeros(1, 8, 8, dtype=torch.bfloat16, device="cuda"))
    if reason is not None:
        pytest.skip(reason)


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


@given(b=st.integers(1, 3), m=st.integers(1, 9), n=st.integers(1, 9), transposed=st.booleans())
def test_products_and_polynomials_are_those_written_out(b: int, m: int, n: int, transposed: bool) -> None:
    x, s = drawn(b, m, n), 1 + torch.arange(b, dtype=torch.float64)
    gram, (one, two, three) = symmetric_product(x, transposed=transposed), COEFFICIENTS
    plain, scaled = symmetric_polynomial(gram, COEFFICIENTS), symmetric_polynomial(gram, COEFFICIENTS, s)
    for i in range(b):
        want = x[i].mT @ x[i] if transposed else x[i] @ x[i].mT
        identity = torch.eye(len(want), dtype=torch.float64)
        torch.testing.assert_close(gram[i], want)
        torch.testing.assert_close(plain[i], one * identity + two * want + three * want @ want)
        y = s[i] ** 2 * want
        torch.testing.assert_close(scaled[i], s[i] * (one * identity + two * y + three * y @ y))


def test_the_scale_of_a_norm_as_large_as_allowed_loses_nothing() -> None:
    """Its fifth power is less than fp32 holds."""
    gram = drawn(1, 16, 16, dtype=torch.float32)
    gram = gram + gram.mT
    got = symmetric_polynomial(gram * 2.0**60, SQUARE, torch.tensor([2.0**-30]))
    assert torch.equal(got * 2.0**30, symmetric_polynomial(gram, SQUARE))


@pytest.mark.parametrize(
    ("x", "backend", "message"),
    [
        (torch.ones(1, 8, 8), "triton", "must be 'eager', 'hopper' or None; got 'triton'"),
        (torch.ones(1, 8, 8, dtype=torch.bfloat16), "hopper", "needs matrices on a Hopper GPU, these are on cpu"),
    ],
)
@pytest.mark.parametrize(
    "run", [symmetric_product, lambda x, **k: inspect.unwrap(symmetric_polynomial)(x, (1,) * 3, **k)]
)
def test_what_is_not_served_is_an_error(run: Any, x: Tensor, backend: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(run)(x, backend=backend)


@pytest.mark.usefixtures("taken")
def test_the_kernel_takes_nonempty_bf16_of_whole_lines() -> None:
    bf16 = torch.bfloat16
    assert host.unavailable(torch.ones(1, 16, 8, dtype=bf16)) is None
    for x in (torch.ones(1, 8, 8), *(torch.ones(*shape, dtype=bf16) for shape in ((1, 8, 12), (1, 12, 8), (0, 8, 8)))):
        assert "it " in (host.unavailable(x) or "")


def check_schemas(device: str) -> None:
    x = drawn(3, 16, 24, dtype=torch.bfloat16).to(device)
    product, polynomial = torch.ops.hymo.symmetric_product.default, torch.ops.hymo.symmetric_polynomial.default
    calls: list[tuple[Any, tuple[Any, ...]]] = [(product, (y, t)) for y in (x, x.mT) for t in (False, True)]
    gram = x @ x.mT
    calls += [(polynomial, (gram, *COEFFICIENTS, scale)) for scale in (None, torch.ones(3, device=device))]
    for op, arguments in calls:
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


def test_raw_ops_are_what_their_schemas_say() -> None:
    check_schemas("cpu")


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize("shape", [(2, 16, 24), (24, 16)], ids=str)
@pytest.mark.parametrize("mode", ["none", "aot_eager", "inductor"])
def test_newton_schulz_in_a_traced_program_calls_the_raw_ops(
    mode: Any, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    for name in ("_product", "_polynomial"):
        op = getattr(host, name)

        def counted(*arguments: Any, op: Any = op, name: str = name) -> Any:
            called.append(name)
            return op(*arguments)

        monkeypatch.setattr(host, name, counted)
    x = drawn(*shape, dtype=torch.float32)
    got = hymo.jit(lambda x: orthogonalize(x, dtype=torch.bfloat16), compile=mode, donate=False)(x)
    assert called == ["_product", "_polynomial"] * 5
    monkeypatch.undo()
    # Each of five steps rounds to 2^-8, a compiler elsewhere.
    want = orthogonalize(x.double())
    assert (got - want).norm() < 0.02 * want.norm()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_the_kernel_rounds_once(case: Case) -> None:
    assert all(error < BUDGET for error in errors(case, "cuda").values()), errors(case, "cuda")


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_the_kernels_results_are_symmetric_and_the_same_again(case: Case) -> None:
    x, scale = inputs(case, "cuda")
    first = by_kernel(case, x, scale)
    for name, y in first.items():
        assert_same_bits(y, y.mT.contiguous(), name)
    for _ in range(20):
        for name, y in by_kernel(case, x, scale).items():
            assert_same_bits(y, first[name], name)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_the_kernel_reads_views_and_whatever_begins_between_two_lines() -> None:
    case = Case(2, 136, 72)
    x, _ = inputs(case, "cuda")
    want = symmetric_product(x, backend="hopper")
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape).copy_(x)
    assert_same_bits(symmetric_product(shifted, backend="hopper"), want)
    assert_same_bits(symmetric_product(x.mT.contiguous().mT, backend="hopper"), want)
    assert_same_bits(symmetric_product(x.repeat(2, 1, 1)[::2], backend="hopper"), want[[0, 0]])
    moved = torch.empty(want.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(want.shape).copy_(want)
    assert_same_bits(symmetric_polynomial(moved, COEFFICIENTS), symmetric_polynomial(want, COEFFICIENTS))
    check_schemas("cuda")


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_the_kernel_scales_by_the_inverse_of_the_largest_norm() -> None:
    gram = symmetric_product(inputs(Case(1, 64, 64), "cuda")[0])
    got = symmetric_polynomial(gram * 2.0**60, SQUARE, torch.tensor([2.0**-30], device="cuda"))
    assert torch.equal(got * 2.0**30, symmetric_polynomial(gram, SQUARE))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("mode", ["none", "inductor"])
@pytest.mark.parametrize("shape", [(3, 64, 160), (160, 64), (3, 136, 136)], ids=str)
def test_newton_schulz_on_a_gpu_launches_the_kernel(
    shape: tuple[int, ...], mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[bool] = []
    launch = host._launch

    def counted(x: Tensor, added: Tensor | None, *arguments: Any, **keys: Any) -> None:
        launched.append(added is not None)
        launch(x, added, *arguments, **keys)

    monkeypatch.setattr(host, "_launch", counted)
    x = drawn(*shape, dtype=torch.float32).cuda()
    got = hymo.jit(lambda x: orthogonalize(x, dtype=torch.bfloat16), compile=mode, donate=False)(x)
    assert launched == [False, True] * 5
    want = orthogonalize(x.cpu().double())
    assert (got.cpu() - want).norm() < 0.02 * want.norm()
