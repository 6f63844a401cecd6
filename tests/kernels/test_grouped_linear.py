"""Products of groups of rows against a loop over the groups; what no group holds is NaN and enters nothing."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from hymo_kernels.host.grouped_linear import grouped_linear

Ends = list[int]
ENDS = [[3, 4, 11, 16], [0, 5, 5, 9], [0, 0, 0, 0], [9, 9, 9, 9]]
NAN = float("nan")


def looped(x: Tensor, w: Tensor, ends: Ends) -> Tensor:
    groups = [x[:, start:end] @ each for start, end, each in zip([0, *ends], ends, w, strict=False)]
    return torch.cat([*groups, torch.zeros(x.shape[0], x.shape[1] - ends[-1], w.shape[2])], dim=1)


def matrices(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=draw) for shape in ((1, 16, 8), (4, 8, 4), (1, 16, 4)))  # type: ignore[return-value]


def pulled(of: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y, pull = torch.func.vjp(of, x, w)
    return y, *pull(dy)


@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_values_and_gradients_are_those_of_a_loop_over_groups(ends: Ends) -> None:
    (x, w, dy), last = matrices(), ends[-1]
    want = pulled(partial(looped, ends=ends), x, w, dy)
    x[:, last:], dy[:, last:] = NAN, NAN
    y, dx, dw = pulled(partial(grouped_linear, ends=torch.tensor([ends], dtype=torch.int32)), x, w, dy)
    torch.testing.assert_close((y[:, :last], dx[:, :last], dw), (want[0][:, :last], want[1][:, :last], want[2]))


def test_a_gradient_of_ones_that_are_one_number_in_memory() -> None:
    x, w, _ = matrices()
    ends = torch.tensor([[3, 4, 11, 16]], dtype=torch.int32)
    got = torch.func.grad(lambda w: grouped_linear(x, w, ends).sum())(w)
    torch.testing.assert_close(got, torch.func.grad(lambda w: looped(x, w, ends[0].tolist()).sum())(w))


def test_vmap_maps_rows_matrices_and_groups() -> None:
    several = [matrices(seed) for seed in range(3)]
    x, w, dy = (torch.stack(each) for each in zip(*several, strict=True))
    ends = torch.tensor(ENDS[:1] + ENDS[3:] + [[4, 8, 12, 16]], dtype=torch.int32)[:, None]

    def ours(x: Tensor, w: Tensor, ends: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return pulled(partial(grouped_linear, ends=ends), x, w, dy)

    for shared in (False, True):
        of_weights = w[0] if shared else w
        got = torch.func.vmap(ours, in_dims=(0, None if shared else 0, 0, 0))(x, of_weights, ends, dy)
        for i in range(3):
            last = int(ends[i, 0, -1])
            want = pulled(partial(looped, ends=ends[i, 0].tolist()), x[i], w[0] if shared else w[i], dy[i])
            torch.testing.assert_close(got[0][i][:, :last], want[0][:, :last])
            torch.testing.assert_close(got[1][i][:, :last], want[1][:, :last])
            torch.testing.assert_close(got[2][i], want[2])
    # Of one set of matrices the gradient of all samples together is the sum of theirs.
    together = torch.func.grad(lambda w: (torch.func.vmap(grouped_linear, in_dims=(0, None, 0))(x, w, full) * dy).sum())
    full = torch.tensor([[[3, 4, 11, 16]], [[4, 8, 12, 16]], [[0, 0, 0, 16]]], dtype=torch.int32)
    want_w = sum(pulled(partial(looped, ends=full[i, 0].tolist()), x[i], w[0], dy[i])[2] for i in range(3))
    torch.testing.assert_close(together(w[0]), want_w)
