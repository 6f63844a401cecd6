"""Seats against their definitions: who gets one, and rows that move as if multiplied by a matrix of zeros and ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from hymo.jit import jit
from hymo.region import region
from hymo_kernels.host.seats import Seats, assign_seats, combine, dispatch, pack_seats

Gradients = Callable[..., tuple[tuple[Tensor, ...], Tensor]]
# Rows, tokens, experts, experts a token, capacity.
SIZES = st.tuples(
    st.integers(1, 3), st.integers(1, 9), st.sampled_from([(1, 1), (4, 1), (4, 2), (3, 3), (6, 2)]), st.integers(1, 9)
)


def choices(seed: int, rows: int, time: int, experts: int, k: int) -> tuple[Tensor, Tensor]:
    """Different experts for each token, more often the first ones, and weights of few values, so that some tie."""
    draw = torch.Generator().manual_seed(seed)
    liking = torch.rand(rows, time, experts, generator=draw) + torch.arange(experts, 0, -1) / experts
    weight = torch.randint(0, 4, (rows, time, k), generator=draw) / 4
    return liking.topk(k, dim=-1).indices, weight


def matrix(seats: Seats) -> Tensor:
    """1 where a choice of a token has a seat, in fp64."""
    return F.one_hot(seats.of_choice[0], seats.of_seat.shape[1] + 1)[..., :-1].double()


@given(seed=st.integers(0, 2**31), sizes=SIZES)
def test_seats_go_to_those_who_want_them_most(seed: int, sizes: Any) -> None:
    rows, time, (experts, k), capacity = sizes
    expert, weight = choices(seed, rows, time, experts, k)
    seats = assign_seats(expert, weight, experts=experts, capacity=capacity)
    want = torch.full((experts, rows, capacity), rows * time * k)
    for b in range(rows):
        for e in range(experts):
            wanting = [(t, i) for t in range(time) for i in range(k) if expert[b, t, i] == e]
            heaviest = sorted(wanting, key=lambda place: -float(weight[b, place[0], place[1]]))[:capacity]
            for seat, (t, i) in enumerate(heaviest):
                want[e, b, seat] = (b * time + t) * k + i
    assert torch.equal(seats.of_seat, want.view(1, -1))
    lost = torch.full((1, rows * time * k + 1), experts * rows * capacity)
    of_choice = lost.scatter(1, seats.of_seat, torch.arange(seats.of_seat.shape[1])[None])[:, :-1]
    assert torch.equal(seats.of_choice.flatten(1), of_choice)


@given(seed=st.integers(0, 2**31), sizes=SIZES)
def test_packed_seats_are_the_same_without_the_empty_ones(seed: int, sizes: Any) -> None:
    rows, time, (experts, k), capacity = sizes
    expert, weight = choices(seed, rows, time, experts, k)
    seats = assign_seats(expert, weight, experts=experts, capacity=capacity)
    packed, ends = pack_seats(expert, weight, experts=experts, capacity=capacity)
    taken = seats.of_seat[0] < rows * time * k
    filled = int(taken.sum())
    most = min(rows * time * k, experts * rows * capacity)
    assert ends.dtype == torch.int32
    assert ends.tolist() == [taken.view(experts, -1).sum(1).cumsum(0).tolist()]
    assert packed.of_seat.tolist() == [seats.of_seat[0, taken].tolist() + [rows * time * k] * (most - filled)]
    lost = torch.full((1, rows * time * k + 1), most)
    of_choice = lost.scatter(1, packed.of_seat, torch.arange(most)[None])[:, :-1]
    assert torch.equal(packed.of_choice.flatten(1), of_choice)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@given(seed=st.integers(0, 2**31), sizes=SIZES)
def test_rows_and_their_gradients_are_products_with_a_matrix(dtype: torch.dtype, seed: int, sizes: Any) -> None:
    rows, time, (experts, k), capacity = sizes
    expert, weight = choices(seed, rows, time, experts, k)
    seats = assign_seats(expert, weight, experts=experts, capacity=capacity)
    draw = torch.Generator().manual_seed(seed)
    (n, s), wide = (rows * time, seats.of_seat.shape[1]), torch.promote_types(dtype, torch.float32)
    weight = rearrange(weight, "b t k -> 1 (b t) k").to(wide)
    x, of_rows = (torch.randn(1, n, 5, generator=draw).to(dtype) for _ in range(2))
    y, of_seats = (torch.randn(1, s, 5, generator=draw).to(dtype) for _ in range(2))
    moved, back = matrix(seats), weight[0].double()
    tolerance = {torch.bfloat16: 1e-2, torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
    near = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)

    seated, pull = torch.func.vjp(lambda x: dispatch(x, seats), x)
    assert seated.dtype == dtype
    near(seated[0].double(), einsum(moved, x[0].double(), "n k s, n d -> s d"))
    near(pull(of_seats)[0][0].double(), einsum(moved, of_seats[0].double(), "n k s, s d -> n d"))

    answered, pull = torch.func.vjp(lambda y, weight: combine(y, weight, seats), y, weight)
    d_y, d_weight = pull(of_rows)
    assert (answered.dtype, d_y.dtype, d_weight.dtype) == (dtype, dtype, wide)
    near(answered[0].double(), einsum(back, moved, y[0].double(), "n k, n k s, s d -> n d"))
    near(d_y[0].double(), einsum(back, moved, of_rows[0].double(), "n k, n k s, n d -> s d"))
    products = einsum(moved, y[0].double(), of_rows[0].double(), "n k s, s d, n d -> n k")
    near(d_weight[0].double(), products)


def served(x: Tensor, weight: Tensor, matrices: Tensor, expert: Tensor, capacity: int = 3) -> Tensor:
    """A residual mixture of small experts."""
    seats = assign_seats(expert, weight, experts=matrices.shape[0], capacity=capacity)
    seated = dispatch(rearrange(x, "b t d -> 1 (b t) d"), seats)
    y = rearrange(
        torch.tanh(rearrange(seated, "1 (e s) d -> e s d", e=matrices.shape[0]) @ matrices), "e s d -> 1 (e s) d"
    )
    answered = combine(y, rearrange(weight, "b t k -> 1 (b t) k"), seats)
    return x + rearrange(answered, "1 (b t) d -> b t d", b=x.shape[0])


def scattered(x: Tensor, weight: Tensor, matrices: Tensor, expert: Tensor, capacity: int = 3) -> Tensor:
    """The same by gathers whose gradients are torch's own, with empty seats for tokens that did not ask."""

    def over(index: Tensor) -> Tensor:
        return index[..., None].expand(*index.shape, x.shape[-1])

    experts = matrices.shape[0]
    wish = torch.zeros(*x.shape[:2], experts, dtype=weight.dtype).scatter(-1, expert, weight.detach())
    order = wish.mT.argsort(dim=-1, descending=True, stable=True)
    chosen = order[..., :capacity]
    seated = x[:, None].expand(-1, experts, -1, -1).gather(2, over(chosen))
    y = torch.tanh(seated @ matrices).flatten(1, 2)
    seat = order.argsort(dim=-1).mT.gather(-1, expert)
    weight = weight * (seat < capacity)
    seat = expert * capacity + seat.clamp(max=capacity - 1)
    answers = [weight[..., i, None] * y.gather(1, over(seat[..., i])) for i in range(seat.shape[-1])]
    return x + torch.stack(answers).sum(0)


def gradients(of: Callable[..., Tensor]) -> Gradients:
    return torch.func.grad_and_value(lambda *x: of(*x).sin().sum(), argnums=(0, 1, 2))


def mixture(seed: int = 0, time: int = 9) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    expert = choices(seed, 2, time, 4, 2)[0]
    weight = torch.rand(2, time, 2, generator=draw) + 0.1
    return torch.randn(2, time, 6, generator=draw), weight, torch.randn(4, 6, 6, generator=draw), expert


@pytest.mark.parametrize("capacity", [1, 3, 9])
def test_it_is_what_scattered_gradients_were(capacity: int) -> None:
    """With an expert that nobody chose, and one that more chose than it serves."""
    x, weight, matrices, expert = mixture()
    expert = torch.where(expert == 3, 0, expert)
    expert[..., 1] = torch.where(expert[..., 0] == expert[..., 1], 2 - (expert[..., 0] == 2).long(), expert[..., 1])
    assert (expert[..., 0] != expert[..., 1]).all()
    assert (expert == 0).sum(1).amax() > 3
    got, want = (gradients(partial(of, capacity=capacity))(x, weight, matrices, expert) for of in (served, scattered))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


WAYS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.heavy)]


@pytest.mark.parametrize("compile", WAYS)
@pytest.mark.parametrize("way", ["jit", "region", "region in jit"])
def test_compiled_gradients_are_eager_ones(way: str, compile: Any) -> None:
    inputs = mixture()
    run = gradients(region(served, compile=compile) if "region" in way else served)
    if "jit" in way:
        run = jit(run, compile=compile)
    torch.testing.assert_close(run(*inputs), gradients(served)(*inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compile", ["none", "aot_eager"])
def test_each_of_a_population_has_its_own_gradients(compile: Any) -> None:
    several = [mixture(seed) for seed in range(3)]
    stacked = tuple(torch.stack(x) for x in zip(*several, strict=True))
    of_each = [gradients(served)(*one) for one in several]
    want = torch.utils._pytree.tree_map(lambda *x: torch.stack(x), *of_each)
    torch.testing.assert_close(jit(torch.func.vmap(gradients(served)), compile=compile)(*stacked), want)
    together = torch.func.grad(lambda *x: torch.func.vmap(served)(*x).sin().sum(), argnums=(0, 1, 2))
    torch.testing.assert_close(together(*stacked), want[0])
    # One set of experts and one choice of them for several inputs.
    many = torch.stack([several[0][0], 2 * several[0][0]])
    shared = torch.func.vmap(gradients(served), in_dims=(0, None, None, None))(many, *several[0][1:])
    for i in range(2):
        one = gradients(served)(many[i], *several[0][1:])
        torch.testing.assert_close(torch.utils._pytree.tree_map(lambda x, i=i: x[i], shared), one)


def test_no_tensor_is_larger_than_all_seats_or_all_choices() -> None:
    time, capacity = 64, 40
    x, weight, matrices, expert = mixture(time=time)

    def largest(of: Callable[..., Tensor]) -> int:
        graph = make_fx(gradients(partial(of, capacity=capacity)))(x, weight, matrices, expert)
        made = [node.meta["val"] for node in graph.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
        return max(each.untyped_storage().nbytes() // each.itemsize for each in made)

    assert largest(scattered) == 2 * 4 * time * 6
    assert largest(served) == max(2 * 4 * capacity * 6, 2 * time * 2 * 6)
