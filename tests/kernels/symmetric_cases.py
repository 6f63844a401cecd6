"""Cases of the kernel for symmetric products, against the definition in fp64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hymo_kernels import symmetric_polynomial, symmetric_product

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True)
class Case:
    """Matrices [b, side, summed], or [b, summed, side] if transposed."""

    b: int
    side: int
    summed: int
    transposed: bool = False


def inputs(case: Case, device: str) -> tuple[Tensor, Tensor]:
    """bf16 matrices of norms about 1, 2, ..., and what divides each by its norm."""
    draw = torch.Generator().manual_seed(case.side * 131 + case.summed)
    shape = (case.summed, case.side) if case.transposed else (case.side, case.summed)
    sizes = torch.arange(1, case.b + 1)
    x = torch.randn(case.b, *shape, generator=draw) * (sizes / (case.side * case.summed) ** 0.5)[:, None, None]
    return x.to(device, torch.bfloat16), (1 / sizes).to(device)


def by_kernel(case: Case, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """The product, and polynomials of it."""
    gram = symmetric_product(x, transposed=case.transposed, backend="hopper")
    return {
        "product": gram,
        "polynomial": symmetric_polynomial(gram, COEFFICIENTS, backend="hopper"),
        "scaled": symmetric_polynomial(gram, COEFFICIENTS, scale, backend="hopper"),
    }


def by_definition(case: Case, x: Tensor, gram: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """The same in fp64 on the CPU, polynomials of the product that the kernel has rounded."""
    x, gram, s = x.cpu().double(), gram.cpu().double(), scale.cpu().double()[:, None, None]
    (a, b, c), identity = COEFFICIENTS, torch.eye(case.side, dtype=torch.float64)
    return {
        "product": x.mT @ x if case.transposed else x @ x.mT,
        "polynomial": a * identity + b * gram + c * gram @ gram,
        "scaled": s * (a * identity + b * s**2 * gram + c * s**4 * (gram @ gram)),
    }


def errors(case: Case, device: str) -> dict[str, float]:
    """Relative error beside the diagonal and on it, the worst matrix's; NaN counts as infinite."""
    x, scale = inputs(case, device)
    found = by_kernel(case, x, scale)
    wanted, worst = by_definition(case, x, found["product"], scale), {}
    for name, want in wanted.items():
        got = found[name].cpu().double()
        assert got.shape == want.shape, (name, got.shape, want.shape)
        for part, of in (("beside", lambda y: y - y.diagonal(dim1=1, dim2=2).diag_embed()), ("on", _diagonal)):
            error = of(got - want).norm(dim=(1, 2)) / of(want).norm(dim=(1, 2))
            worst[f"{name} {part}"] = float(error.nan_to_num(float("inf")).max())
    return worst


def _diagonal(y: Tensor) -> Tensor:
    return y.diagonal(dim1=1, dim2=2)[:, None]
