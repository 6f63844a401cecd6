"""Products and polynomials that are symmetric matrices, whose one half need not be computed: on Hopper it is not.

A kernel in Gluon for bf16 on Hopper with Triton 3.6 or later (before, programs of several groups of warps are written
in another way), plain PyTorch for everything else.
"""

import functools
import importlib.util
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from hymo_kernels.host.gated_delta_call import multiprocessors
from hymo_kernels.primitive import define

Backend = Literal["eager", "hopper"]

TILE, STEP, STAGES = 128, 64, 5
"""Side of a tile, how much of what is summed over comes at once, and how often ahead.

Of seven settings the fastest on an H200 (Triton 3.6); the others take 3 to 70 % longer. 96 matrices of 896 by 1792: 219
us, where cuBLAS's whole product takes 364; the polynomial of 96 of 896 by 896: 126 us, cuBLAS's square alone 188."""

ALIGNED = 8
"""The copy engine takes rows of a multiple of 16 bytes."""


def symmetric_product(
    x: Float[Tensor, "b m n"], *, transposed: bool = False, backend: Backend | None = None
) -> Float[Tensor, "b s s"]:
    """`x x^T` of each matrix, or `x^T x` if `transposed`, rounded to x's dtype once.

    Args:
        backend: "hopper", a kernel for bf16 whose sizes are multiples of 8, on a Hopper GPU with Triton 3.6 or later,
            whose results are symmetric bit by bit and carry no gradient; or "eager", plain PyTorch for anything; None
            is "hopper" wherever it is available.

    Raises:
        ValueError: if the backend is unknown or not available.
    """
    if _takes_kernel("symmetric_product", x, backend):
        y: Tensor = _product(x, transposed)
        return y
    return _plain_product(x, transposed)


def symmetric_polynomial(
    x: Float[Tensor, "b n n"],
    coefficients: tuple[float, float, float],
    scale: Float[Tensor, " b"] | None = None,
    *,
    backend: Backend | None = None,
) -> Float[Tensor, "b n n"]:
    """`a I + b x + c x x` of each symmetric matrix, in x's dtype; or with a scale s `s (a I + b s^2 x + c s^4 x x)`.

    The kernel rounds the sum alone, plain PyTorch x x too.

    Args:
        coefficients: (a, b, c).
        scale: fp32 at least; its fourth power and all terms are numbers of that dtype, its fifth need not be.
        backend: as of `symmetric_product`.

    Raises:
        ValueError: if the backend is unknown or not available.
    """
    if _takes_kernel("symmetric_polynomial", x, backend):
        y: Tensor = _polynomial(x, *coefficients, scale)
        return y
    return _plain_polynomial(x, *coefficients, scale)


def _takes_kernel(name: str, x: Tensor, backend: str | None) -> bool:
    if backend not in (None, "eager", "hopper"):
        raise ValueError(f"{name}: backend must be 'eager', 'hopper' or None; got {backend!r}")
    if backend == "eager":
        return False
    reason = unavailable(x)
    if backend == "hopper" and reason is not None:
        raise ValueError(f"{name}: backend='hopper' is not available here: {reason}")
    return reason is None


def unavailable(x: Tensor) -> str | None:
    """Why there is no kernel for these matrices; None if there is one."""
    if not _is_hopper(x.device):
        return f"it needs matrices on a Hopper GPU, these are on {x.device}"
    if not _has_groups_of_warps():
        return "Triton 3.6 or later is not installed"
    if x.dtype != torch.bfloat16:
        return f"it multiplies bfloat16, the matrices are {x.dtype}"
    if x.numel() == 0 or x.shape[1] % ALIGNED or x.shape[2] % ALIGNED:
        return f"it takes sizes that are multiples of {ALIGNED}, the matrices are {list(x.shape)}"
    return None


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def _has_groups_of_warps() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    major, minor = triton.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (3, 6)


def _plain_product(x: Tensor, transposed: bool) -> Tensor:
    return x.mT @ x if transposed else x @ x.mT


def _plain_polynomial(x: Tensor, a: float, b: float, c: float, scale: Tensor | None) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    linear, square, size = x, x @ x, None
    if scale is not None:
        size = scale[:, None, None]
        linear, square = x * size.square(), square * size.square() * size.square()
    identity = torch.eye(x.shape[-1], dtype=wide, device=x.device)
    polynomial = torch.add(torch.add(a * identity, linear, alpha=b), square, alpha=c)
    return (polynomial if size is None else polynomial * size).to(x.dtype)


def launch_product(x: Tensor, transposed: bool) -> Tensor:
    """`symmetric_product` by the kernel."""
    out = _product_like(x, transposed)
    _launch(x, None, out, None, (1.0, 0.0, 0.0), transposed=transposed)
    return out


def launch_polynomial(x: Tensor, a: float, b: float, c: float, scale: Tensor | None) -> Tensor:
    """`symmetric_polynomial` by the kernel."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    x = _in_lines(x)
    _launch(x, x, out, None if scale is None else scale.float().contiguous(), (c, b, a), transposed=False)
    return out


def _launch(
    x: Tensor,
    added: Tensor | None,
    out: Tensor,
    scale: Tensor | None,
    factors: tuple[float, float, float],
    *,
    transposed: bool,
) -> None:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from hymo_kernels.device.symmetric import symmetric_product_kernel

    layout = NVMMASharedLayout(128, 16, 3)

    def tiles(y: Tensor, rows: int, columns: int) -> Any:
        return TensorDescriptor(y, list(y.shape), list(y.stride()), [1, rows, columns], layout)

    x = _in_lines(x)
    summed = x.shape[1 if transposed else 2]
    side = -(-out.shape[1] // TILE)
    each = side * (side + 1) // 2
    count = out.shape[0] * each
    with torch.cuda.device(x.get_device()):
        symmetric_product_kernel[(min(count, multiprocessors(x.device.index)),)](
            tiles(x, STEP, TILE) if transposed else tiles(x, TILE, STEP),
            tiles(out if added is None else added, TILE, TILE),
            tiles(out, TILE, TILE),
            out if scale is None else scale,
            *factors,
            count,
            each,
            -(-summed // STEP),
            TALL=transposed,
            STAGES=STAGES,
            C=TILE,
            K=STEP,
            ADD=added is not None,
            SCALED=scale is not None,
            num_warps=4,
            maxnreg=168,
        )


def _in_lines(x: Tensor) -> Tensor:
    """With every row where the copy engine finds it."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _product_like(x: Tensor, transposed: bool) -> Tensor:
    size = x.shape[2 if transposed else 1]
    return x.new_empty(x.shape[0], size, size)


def _polynomial_like(x: Tensor, a: float, b: float, c: float, scale: Tensor | None) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_product = define(
    "symmetric_product(Tensor x, bool transposed) -> Tensor",
    fake=_product_like,
    cpu=_plain_product,
    cuda=launch_product,
)
_polynomial = define(
    "symmetric_polynomial(Tensor x, float a, float b, float c, Tensor? scale) -> Tensor",
    fake=_polynomial_like,
    cpu=_plain_polynomial,
    cuda=launch_polynomial,
)
