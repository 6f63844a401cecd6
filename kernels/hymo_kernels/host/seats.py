"""Seats of experts: who sits where, rows of tokens to their seats, and weighted rows of seats back to their tokens.

Seats and tokens know each other, so that both ways, and the gradients of both, are gathers: a token is added up from
its few seats, and nothing is scattered.
"""

from typing import Any, NamedTuple

import torch
from einops import rearrange, reduce
from jaxtyping import Float, Int
from torch import Tensor

from hymo_kernels.primitive import differentiable


class Seats(NamedTuple):
    """For each choice of a token its seat, `s` if it lost it, and for each seat its choice, `n k` if it is empty.

    Seats are those of expert 0 for the first row, for the second row and so on, then those of expert 1; tokens and
    choices are counted through all rows. The leading axis of length 1 is where `vmap` folds its own.
    """

    of_choice: Int[Tensor, "1 n k"]
    of_seat: Int[Tensor, "1 s"]


def assign_seats(expert: Int[Tensor, "b t k"], weight: Float[Tensor, "b t k"], *, experts: int, capacity: int) -> Seats:
    """Gives the `capacity` seats that each of `experts` has for a row to the tokens that want it most.

    Args:
        expert: the different experts that each token chose.
        weight: how much it wants each, >= 0; among equals the first token of a row comes first.
    """
    first = _queue(expert) * capacity
    return _seats(expert, weight, first, experts=experts, capacity=capacity, seats=experts * len(expert) * capacity)


def pack_seats(
    expert: Int[Tensor, "b t k"], weight: Float[Tensor, "b t k"], *, experts: int, capacity: int
) -> tuple[Seats, Int[Tensor, "1 e"]]:
    """The same tokens as `assign_seats` seats, in the same order, with the empty seats behind all others.

    Returns:
        The seats, as many as can be taken at most, and where those of each expert end.
    """
    chosen = (expert[..., None] == torch.arange(experts, device=expert.device)).sum((1, 2))
    taken = rearrange(chosen.clamp(max=capacity), "b e -> (e b)")
    end = taken.cumsum(0)
    first = (end - taken)[_queue(expert)]
    most = min(expert.numel(), experts * len(expert) * capacity)
    seats = _seats(expert, weight, first, experts=experts, capacity=capacity, seats=most)
    return seats, rearrange(end, "(e b) -> b e", e=experts)[-1:].int()


def _queue(expert: Int[Tensor, "b t k"]) -> Int[Tensor, "b t k"]:
    """Which queue a choice stands in: there is one for each expert and row."""
    rows = expert.shape[0]
    return expert * rows + torch.arange(rows, device=expert.device)[:, None, None]


def _seats(
    expert: Int[Tensor, "b t k"],
    weight: Float[Tensor, "b t k"],
    first: Int[Tensor, "b t k"],
    *,
    experts: int,
    capacity: int,
    seats: int,
) -> Seats:
    """The first `capacity` choices of each queue, heaviest first, from the `first` seat of that queue on."""
    (b, t, k), on, choices = expert.shape, expert.device, expert.numel()
    unwanted = torch.full((b, t, experts), -1.0, dtype=weight.dtype, device=on)
    wish = rearrange(unwanted.scatter(-1, expert, weight.detach()), "b t e -> b e t")
    order = wish.argsort(dim=-1, descending=True, stable=True)
    rank = torch.zeros_like(order).scatter(-1, order, torch.arange(t, device=on).expand_as(order))
    rank = rearrange(rank, "b e t -> b t e").gather(-1, expert)
    seat = rearrange(torch.where(rank < capacity, first + rank, seats), "b t k -> 1 (b t k)")
    # What lost its seat is written past the last one.
    empty = torch.full((1, seats + 1), choices, device=on)
    of_seat = empty.scatter(1, seat, torch.arange(choices, device=on)[None])[:, :seats]
    return Seats(rearrange(seat, "1 (n k) -> 1 n k", k=k), of_seat)


def dispatch(x: Float[Tensor, "1 n d"], seats: Seats) -> Float[Tensor, "1 s d"]:
    """The row of each seat's token; zeros where a seat is empty. A token's gradient is summed in fp32."""
    rows: Tensor = _dispatch(x, *seats)
    return rows


def combine(y: Float[Tensor, "1 s d"], weight: Float[Tensor, "1 n k"], seats: Seats) -> Float[Tensor, "1 n d"]:
    """For each token the sum of its seats' rows by its weights, in fp32; a lost seat adds nothing."""
    rows: Tensor = _combine(y, weight, *seats)
    return rows


def _rows(x: Float[Tensor, "g n d"], index: Int[Tensor, "g m"]) -> Float[Tensor, "g m d"]:
    """Rows by their indices; zeros for an index past the last."""
    inside = index < x.shape[1]
    taken = x.gather(1, index.clamp(max=x.shape[1] - 1)[..., None].expand(-1, -1, x.shape[-1]))
    return torch.where(inside[..., None], taken, 0)


def _seated(y: Float[Tensor, "g s d"], of_choice: Int[Tensor, "g n k"]) -> Float[Tensor, "g n k d"]:
    """Rows of the seats of each token, in what sums are computed in."""
    rows = _rows(y, rearrange(of_choice, "g n k -> g (n k)"))
    return _wide(rearrange(rows, "g (n k) d -> g n k d", k=of_choice.shape[-1]))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def dispatch_forward(
    x: Float[Tensor, "g n d"], of_choice: Int[Tensor, "g n k"], of_seat: Int[Tensor, "g s"]
) -> Float[Tensor, "g s d"]:
    return _rows(x, of_seat // of_choice.shape[-1])


def dispatch_backward(
    needs: tuple[bool, ...],
    arguments: tuple[Any, ...],
    outputs: tuple[Tensor | None, ...],
    grads: tuple[Tensor | None, ...],
) -> tuple[Tensor | None, ...]:
    (_, of_choice, _), (d_rows,) = arguments, grads
    if d_rows is None or not needs[0]:
        return None, None, None
    return reduce(_seated(d_rows, of_choice), "g n k d -> g n d", "sum").to(d_rows.dtype), None, None


def combine_forward(
    y: Float[Tensor, "g s d"],
    weight: Float[Tensor, "g n k"],
    of_choice: Int[Tensor, "g n k"],
    of_seat: Int[Tensor, "g s"],
) -> Float[Tensor, "g n d"]:
    return reduce(weight[..., None] * _seated(y, of_choice), "g n k d -> g n d", "sum").to(y.dtype)


def combine_backward(
    needs: tuple[bool, ...],
    arguments: tuple[Any, ...],
    outputs: tuple[Tensor | None, ...],
    grads: tuple[Tensor | None, ...],
) -> tuple[Tensor | None, ...]:
    (y, weight, of_choice, of_seat), (d_rows,) = arguments, grads
    d_y = d_weight = None
    if d_rows is not None and needs[0]:
        scale = _rows(rearrange(weight, "g n k -> g (n k) 1"), of_seat)
        d_y = (scale * _rows(d_rows, of_seat // weight.shape[-1])).to(y.dtype)
    if d_rows is not None and needs[1]:
        products = _wide(d_rows)[:, :, None] * _seated(y, of_choice)
        d_weight = reduce(products, "g n k d -> g n k", "sum").to(weight.dtype)
    return d_y, d_weight, None, None


_dispatch = differentiable(dispatch_forward, dispatch_backward, save=(1,))
_combine = differentiable(combine_forward, combine_backward, save=(0, 1, 2, 3))
