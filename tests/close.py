"""How far two tensors are apart, judged head by head: one bad head cannot hide in the norm of the good ones."""

import torch
from torch import Tensor


def rms(x: Tensor, keep: int) -> Tensor:
    """Root mean square over every axis but `keep`, in fp64."""
    return x.double().movedim(keep, 0).flatten(1).square().mean(1).sqrt()


def worst_error(got: Tensor, want: Tensor, *, head: int, floor: float) -> float:
    """The largest relative RMS error of a head; below `floor` (absolute RMS) the true value counts as `floor`."""
    assert got.shape == want.shape, f"{list(got.shape)} is not {list(want.shape)}"
    if want.numel() == 0:
        return 0.0
    assert got.isfinite().all(), f"{int((~got.isfinite()).sum())} of {got.numel()} values are not finite"
    return float((rms(got.double() - want.double(), head) / rms(want, head).clamp(min=floor)).max())


def assert_heads_close(got: Tensor, want: Tensor, *, head: int, within: float, floor: float, name: str = "") -> None:
    """Every head's relative RMS error is at most `within`."""
    error = worst_error(got, want, head=head, floor=floor)
    assert error <= within, f"{name}: relative RMS error {error:.2e} in the worst head, at most {within:.1e} allowed"


def assert_same_bits(got: Tensor, want: Tensor, name: str = "") -> None:
    """Equal values, NaN equal to NaN."""
    same = (got == want) | (got.isnan() & want.isnan())
    assert got.dtype == want.dtype, f"{name}: {got.dtype} is not {want.dtype}"
    assert same.all(), f"{name}: {int((~same).sum())} of {same.numel()} values differ"


def gaussian(generator: torch.Generator, *shape: int) -> Tensor:
    """Standard normal numbers in fp64."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)
