"""Cases of the kernel's gradient of silu(gate) * up against fp64, for the interpreter and for a GPU.

Run as a program, the interpreter's: `TRITON_INTERPRET=1 python tests/kernels/gated_cases.py`, in a process of its own,
since Triton looks at that variable when it is imported.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hymo_kernels.host import gated

Inputs = tuple[Tensor, Tensor, Tensor]
STEEP = (-1e37, -1e5, -100.0, -1e-30, 0.0, 1e-30, 100.0, 1e5, 1e37)
"""Gates where an exponential or a square overflows, and where nothing is left."""


@dataclass(frozen=True)
class Case:
    """One call: rows and columns of each group, and where the filled rows of each end."""

    rows: int
    width: int
    filled: tuple[int, ...]


INTERPRETED = (
    Case(7, 24, (5,)),
    Case(16, 256, (16,)),
    Case(9, 264, (0,)),
    Case(6, 512, (6, 1, 0)),
)


def inputs(case: Case, device: str, dtype: torch.dtype) -> Inputs:
    """Gate and up, the gradient, and ends; what lies behind the last of them is NaN."""
    draw = torch.Generator().manual_seed(case.rows * 131 + case.width)
    groups = len(case.filled)
    y, dh = (torch.randn(groups, case.rows, i * case.width, generator=draw) for i in (2, 1))
    y[:, 0, : len(STEEP)] = torch.tensor(STEEP)
    for i, end in enumerate(case.filled):
        y[i, end:], dh[i, end:] = torch.nan, torch.nan
    ends = torch.tensor([[end // 2, end] for end in case.filled], dtype=torch.int32)
    return y.to(device, dtype), dh.to(device, dtype), ends.to(device)


def by_fp64(y: Tensor, dh: Tensor) -> Tensor:
    """The gradient by differentiation."""
    wide = y.double().requires_grad_()
    gate, up = wide.chunk(2, dim=-1)
    h = torch.nn.functional.silu(gate) * up
    (dy,) = torch.autograd.grad(h, wide, dh.double())
    return dy


def error(case: Case, device: str, dtype: torch.dtype) -> float:
    """The largest error of an element of a filled row, relative to its own size or to 0.01; NaN counts as infinite."""
    y, dh, ends = inputs(case, device, dtype)
    got = gated.backward(y, dh, ends)
    assert (got.shape, got.dtype) == (y.shape, dtype)
    want = by_fp64(y, dh)
    largest = 0.0
    for i, end in enumerate(case.filled):
        off = (got[i, :end].double() - want[i, :end]).abs() / want[i, :end].abs().clamp(min=1e-2)
        largest = max([largest, *off.nan_to_num(float("inf")).flatten().tolist()])
    return largest


def main() -> None:
    for case in INTERPRETED:
        found = error(case, "cpu", torch.float32)
        print(case, f"{found:.1e}")
        assert found < 1e-5, (case, found)


if __name__ == "__main__":
    main()
