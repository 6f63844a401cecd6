"""Products of low-precision activations with fp32 weights, in fp32: gates and routers, whose errors would add up."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from hymo_kernels.primitive import differentiable

HIGH = -(1 << 16)
"""The bits of an fp32 number that are a bf16 number: sign, exponent, and the first 8 significant bits."""

WIDTH = 16
"""Rows of bf16 numbers are a multiple of this long: at 84, no multiple of 16 bytes, cuBLAS takes kernels for Ampere
that read 4 bytes at a time, in about twice the time."""


def mixed_linear(
    x: Float[Tensor, "*b d"], w: Float[Tensor, "d e"], *, backend: Literal["eager", "parts"] | None = None
) -> Float[Tensor, "*b e"]:
    """`x.float() @ w`, in fp32.

    A bf16 `x` needs no fp32 units: every fp32 number is the sum of three bf16 numbers, so that one product of bf16
    numbers, accumulated in fp32, with the parts of `w` side by side has the same terms. So have the gradients, of which
    that of `w` is fp32 too, and that of `x` is rounded to bf16 once.

    Args:
        w: fp32.
        backend: "parts" (a bf16 `x`), or "eager", the product itself, for anything; None is "parts" for a bf16 `x` on a
            GPU that has more rows than `w`, which then costs less to split than `x` to convert, else "eager".

    Raises:
        ValueError: for an unknown backend, or if "parts" is asked for and cannot serve.
        NotImplementedError: for a second derivative of "parts".

    Source: Henry, Tang, Heinecke 2019, arXiv:1904.06376. Departs from it: only one factor has to be split.
    """
    rows = math.prod(x.shape[:-1])
    if not _takes_parts(x, w, rows, backend=backend):
        return x.float() @ w
    y: Tensor = _by_parts(x.reshape(rows, x.shape[-1]), w)
    return y.reshape(*x.shape[:-1], w.shape[1])


def _takes_parts(x: Tensor, w: Tensor, rows: int, *, backend: str | None) -> bool:
    if backend not in (None, "eager", "parts"):
        raise ValueError(f"mixed_linear: backend must be 'eager', 'parts' or None; got {backend!r}")
    served = x.dtype == torch.bfloat16 and w.dtype == torch.float32
    if backend == "parts" and not served:
        raise ValueError(f"mixed_linear: backend='parts' multiplies bfloat16 by float32; x is {x.dtype}, w {w.dtype}")
    if backend is None:
        return served and x.device.type == "cuda" and rows > w.shape[0]
    return backend == "parts"


def _parts(x: Float[Tensor, "*n"]) -> tuple[Tensor, Tensor, Tensor]:
    """Three bf16 tensors that add up to an fp32 one, the largest first.

    The bits are cut by hand: a compiler keeps the fp32 number where it is told to round one and to go on with it.
    """
    rest, found = x, []
    for _ in range(3):
        part = (rest.view(torch.int32) & HIGH).view(torch.float32)
        found.append(part.to(torch.bfloat16))
        rest = rest - part
    first, second, third = found
    return first, second, third


def _product(a: Float[Tensor, "m k"], b: Float[Tensor, "k n"]) -> Float[Tensor, "m n"]:
    """Of bf16 matrices, in fp32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.device.type == "cuda" else a.float() @ b.float()


def _joined(parts: Sequence[Float[Tensor, "m n"]], *, dim: int) -> Tensor:
    """Matrices side by side along `dim`, and zeros up to a multiple of `WIDTH`."""
    missing, (rows, columns) = -sum(part.shape[dim] for part in parts) % WIDTH, parts[0].shape
    zeros = parts[0].new_zeros((missing, columns) if dim == 0 else (rows, missing))
    return torch.cat([*parts, zeros] if missing else [*parts], dim=dim)


def _summed(y: Float[Tensor, "n e3"], e: int) -> Float[Tensor, "n e"]:
    """The sum of the first three blocks of `e` columns, smallest first."""
    return y[:, :e] + (y[:, e : 2 * e] + y[:, 2 * e : 3 * e])


def _forward(x: Tensor, w: Tensor) -> Tensor:
    # Stored by columns, whose length is one that fast products take.
    return _summed(_product(x, _joined(_parts(w.mT), dim=0).mT), w.shape[1])


def _backward(
    needs: tuple[bool, ...], arguments: tuple[Any, ...], outputs: tuple[Any, ...], grads: tuple[Any, ...]
) -> tuple[Tensor | None, ...]:
    x, w = arguments
    first, second, third = _parts(grads[0])
    dy = _joined([first, second, third, first], dim=1)
    high, low, _ = _parts(w.mT)
    return (
        # All but the products of low parts: 2^-13 of a result that is rounded to 2^-8.
        dy @ _joined([high, high, high, low], dim=0) if needs[0] else None,
        # The fourth block too, which is not looked at: fewer columns would not be faster.
        _summed(_product(x.mT, dy), w.shape[1]) if needs[1] else None,
    )


_by_parts = differentiable(_forward, _backward, save=(0, 1), shared=(1,))
