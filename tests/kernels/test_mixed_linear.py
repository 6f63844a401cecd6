"""A product of bf16 rows and fp32 weights: fp32 by way of bf16 parts, in every mode of torch."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from hymo_kernels import mixed_linear
from hymo_kernels.host.mixed_linear import _parts

BITS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Numbers whose sizes differ by orders of magnitude."""
    draw = torch.Generator().manual_seed(seed)
    size = torch.randn(shape, generator=draw).mul(2).exp()
    return (size * torch.randn(shape, generator=draw)).to(device, dtype)


def gradients(run: Callable[..., Tensor], x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    def loss(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = run(x, w)
        return (y * dy).sum(), y

    (dx, dw), y = torch.func.grad(loss, argnums=(0, 1), has_aux=True)(x, w)
    return y, dx, dw


def errors(found: tuple[Tensor, ...], x: Tensor, w: Tensor, dy: Tensor) -> list[float]:
    """Of y, dx and dw: the largest, in units of what the sum of all terms' sizes would be rounded by."""
    x, w, dy = x.double(), w.double(), dy.double()
    pairs = ((x, w), (dy, w.mT), (x.mT, dy))
    return [
        float(((got.double() - a @ b).abs() / (a.abs() @ b.abs()).clamp(min=1e-30)).max()) / BITS[got.dtype]
        for got, (a, b) in zip(found, pairs, strict=True)
    ]


def parts(x: Tensor, w: Tensor) -> Tensor:
    return mixed_linear(x, w, backend="parts")


@given(st.integers(0, 1000), st.floats(2.0**-100, 2.0**100))
def test_the_parts_of_a_number_add_up_to_it_exactly(seed: int, scale: float) -> None:
    x = drawn(seed, 64) * scale
    first, second, third = (part.double() for part in _parts(x))
    assert torch.equal(first + second + third, x.double())
    assert bool((second.abs() <= first.abs() * 2.0**-7).all())


@given(st.integers(0, 1000), st.integers(1, 33), st.integers(1, 65), st.integers(1, 5))
def test_values_and_gradients_are_those_of_the_product(seed: int, n: int, d: int, e: int) -> None:
    x, w, dy = drawn(seed, n, d, dtype=torch.bfloat16), drawn(seed + 1, d, e), drawn(seed + 2, n, e)
    y, dx, dw = gradients(parts, x, w, dy)
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    # A sum of so many terms in fp32, then rounded; a part that is left out would be 2^8 and more.
    y_error, dx_error, dw_error = errors((y, dx, dw), x, w, dy)
    assert y_error <= 2 + 3 * d**0.5
    assert dx_error <= 1.1
    assert dw_error <= 2 + 3 * n**0.5


@pytest.mark.parametrize("compile", ["aot_eager", "inductor"])
def test_a_compiler_leaves_the_parts_apart(compile: str) -> None:
    """Told to round and go on, it would go on with what was not rounded."""
    x, w, dy = drawn(0, 9, 40, dtype=torch.bfloat16), drawn(1, 40, 6), drawn(2, 9, 6)
    traced = torch._dynamo.nonstrict_trace(lambda x, w, dy: gradients(parts, x, w * 1.5, dy * 0.75))
    run = torch.compile(lambda *a: traced(*a), fullgraph=True, backend=compile)
    assert max(errors(run(x, w, dy), x, w * 1.5, dy * 0.75)[::2]) <= 20


@pytest.mark.parametrize("e", [1, 14, 16, 28])
def test_rows_of_its_products_are_multiples_of_16_bytes(e: int) -> None:
    """Of bf16 matrices: others go to kernels of twice the time."""
    x, w, dy = drawn(0, 48, 32, dtype=torch.bfloat16), drawn(1, 32, e), drawn(2, 48, e)
    graph = make_fx(lambda *given: gradients(parts, *given))(x, w, dy)
    products = [node for node in graph.graph.nodes if node.target is torch.ops.aten.mm.default]
    assert len(products) == 3
    assert all(size % 8 == 0 for product in products for size in product.meta["val"].shape)


def test_vmap_maps_rows_and_weights() -> None:
    xs, ws = drawn(0, 3, 2, 4, 8, dtype=torch.bfloat16), drawn(1, 3, 8, 5)
    for dims in ((0, None), (0, 0), (None, 0)):
        x, w = (a if dim == 0 else a[0] for a, dim in zip((xs, ws), dims, strict=True))
        got = torch.func.vmap(parts, in_dims=dims)(x, w)
        want = [parts(*(a[i] if dim == 0 else a for a, dim in zip((x, w), dims, strict=True))) for i in range(3)]
        torch.testing.assert_close(got, torch.stack(want))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_cpu_multiplies_in_fp32(dtype: torch.dtype) -> None:
    x, w = drawn(0, 64, 8, dtype=dtype), drawn(1, 8, 3)
    assert torch.equal(mixed_linear(x, w), x.float() @ w)


@pytest.mark.parametrize(
    ("x", "w", "backend", "message"),
    [
        (torch.bfloat16, torch.float32, "triton", "must be 'eager', 'parts' or None; got 'triton'"),
        (torch.float16, torch.float32, "parts", "x is torch.float16, w torch.float32"),
        (torch.bfloat16, torch.bfloat16, "parts", "x is torch.bfloat16, w torch.bfloat16"),
    ],
)
def test_what_it_does_not_serve_is_an_error(x: Any, w: Any, backend: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(mixed_linear)(torch.ones(2, 3, dtype=x), torch.ones(3, 1, dtype=w), backend=backend)


@pytest.mark.gpu
@pytest.mark.parametrize("e", [16, 28])
def test_on_a_gpu_it_is_a_sum_in_fp32(e: int) -> None:
    x, w, dy = (
        drawn(0, 2048, 896, dtype=torch.bfloat16, device="cuda"),
        drawn(1, 896, e, device="cuda"),
        drawn(2, 2048, e, device="cuda"),
    )
    y_error, dx_error, dw_error = errors(gradients(mixed_linear, x, w, dy), x, w, dy)
    assert y_error <= 2 + 3 * 896**0.5
    assert dx_error <= 1.1
    assert dw_error <= 2 + 3 * 2048**0.5
