"""Experts' products over filled rows against their definition over all seats; unused rows hold NaN."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from hymo.jit import jit
from hymo.region import region
from hymo_kernels import routed_swiglu

Inputs = tuple[Tensor, ...]
ROWS, TIME, WIDE, HIDDEN, EXPERTS = 2, 12, 16, 24, 4


def inputs(k: int = 2, *, banned: int | None = None, favourite: bool = False, seed: int = 0) -> Inputs:
    """Tokens, their gradient, choices, weights of few values, so that some tie, and matrices of bf16.

    Args:
        banned: an expert that nobody chooses.
        favourite: whether everybody chooses the first.
    """
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).bfloat16()

    liking = torch.rand(ROWS, TIME, EXPERTS, generator=draw)
    liking[..., 0] += favourite
    if banned is not None:
        liking[..., banned] = -1.0
    weight = torch.randint(1, 4, (ROWS, TIME, k), generator=draw) / 4
    matrices = normal(EXPERTS, WIDE, HIDDEN), normal(EXPERTS, WIDE, HIDDEN), normal(EXPERTS, HIDDEN, WIDE)
    return normal(ROWS, TIME, WIDE), normal(ROWS, TIME, WIDE), liking.topk(k, dim=-1).indices, weight, *matrices


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that a product leaves as they were hold NaN."""
    product = F.grouped_mm

    def poisoning(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        y, rows = product(a, b, offs=offs), torch.arange(len(a), device=a.device)
        return y if y.ndim == 3 else y.masked_fill(rows[:, None] >= offs[-1], torch.nan)

    monkeypatch.setattr(F, "grouped_mm", poisoning)


def gradients(backend: Any, *, capacity: int = 5, run: Callable[..., Any] = routed_swiglu) -> Callable[..., Any]:
    """From `inputs` to the answers, what is lost, and the gradients of all that has one."""

    def of(x: Tensor, dy: Tensor, expert: Tensor, *others: Tensor) -> tuple[Any, Any]:
        def loss(x: Tensor, *others: Tensor) -> tuple[Tensor, Any]:
            y, lost = run(x, expert, *others, capacity=capacity, backend=backend)
            return (y.float() * dy.float()).sum(), (y, lost)

        grads, (y, lost) = torch.func.grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True)(x, *others)
        return (y, *grads), lost

    return of


def assert_near(got: Any, want: Any, within: float = 0.01) -> None:
    """The same up to bf16 rounding, in every quantity and, of what experts have, in every expert."""
    assert torch.equal(got[1], want[1])
    for name, found, wanted in zip(("y", "x", "weight", "gate", "up", "down"), got[0], want[0], strict=True):
        assert found.dtype == wanted.dtype
        for i, (one, other) in enumerate(zip(found.float(), wanted.float(), strict=True)):
            assert (one - other).norm() <= within * other.norm(), f"{name}[{i}]"


CASES: dict[str, tuple[dict[str, Any], int]] = {
    "room for all": ({}, 12),
    "some lost": ({}, 5),
    "most lost": ({}, 1),
    "an expert that nobody chose": ({"banned": 0}, 6),
    "the last expert nobody chose": ({"banned": 3}, 6),
    "all choose one": ({"k": 1, "favourite": True}, 7),
    "all choose all": ({"k": 4}, 7),
}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", CASES)
def test_filled_rows_answer_what_all_seats_do(case: str) -> None:
    how, capacity = CASES[case]
    given = inputs(**how)
    got, want = (gradients(backend, capacity=capacity)(*given) for backend in ("grouped", "eager"))
    assert_near(got, want)
    assert (want[1] > 0) == (case != "room for all")
    if "banned" in how:
        assert all((each[how["banned"]] == 0).all() for each in got[0][3:])


def residual(x: Tensor, *others: Tensor, capacity: int, backend: Any) -> tuple[Tensor, Tensor]:
    y, lost = routed_swiglu(x, *others, capacity=capacity, backend=backend)  # type: ignore[arg-type]
    return x + y, lost


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("compile", ["aot_eager", pytest.param("inductor", marks=pytest.mark.heavy)])
@pytest.mark.parametrize("way", ["jit", "region", "region in jit"])
def test_compiled_gradients_are_eager_ones(way: str, compile: Any) -> None:
    given, run = inputs(banned=2), residual
    if "region" in way:
        inner = region(partial(residual, capacity=5, backend="grouped"), compile=compile)
        run = lambda *tensors, capacity, backend: inner(*tensors)  # noqa: E731
    compiled = gradients("grouped", run=run)
    want = gradients("eager", run=residual)(*given)
    assert_near((jit(compiled, compile=compile) if "jit" in way else compiled)(*given), want)


@pytest.mark.usefixtures("poisoned")
def test_each_of_a_population_has_its_own_gradients() -> None:
    several = [inputs(seed=seed) for seed in range(3)]
    stacked = tuple(torch.stack(x) for x in zip(*several, strict=True))
    got = torch.func.vmap(gradients("grouped"))(*stacked)
    for i, one in enumerate(several):
        mine = torch.utils._pytree.tree_map(lambda x, i=i: x[i], got)
        assert_near(mine, gradients("eager")(*one))
    matrices = several[0][4:]
    shared = torch.func.vmap(gradients("grouped"), in_dims=(0, 0, 0, 0, None, None, None))(*stacked[:4], *matrices)
    for i, one in enumerate(several):
        mine = torch.utils._pytree.tree_map(lambda x, i=i: x[i], shared)
        assert_near(mine, gradients("eager")(*one[:4], *matrices))


def test_nothing_waits_for_a_count_and_nothing_is_larger_than_all_choices() -> None:
    k = 2
    graph = make_fx(gradients("grouped", capacity=9), tracing_mode="fake")(*inputs(k))
    names = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    assert {name for name in names if "grouped" in name} == {
        "hymo.grouped_product.default",
        "hymo.grouped_weight_gradient.default",
    }
    assert not any(word in name for name in names for word in ("_local_scalar_dense", "nonzero", "bmm", "index_put"))
    made = [node.meta["val"] for node in graph.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    matrices, rows = EXPERTS * WIDE * 2 * HIDDEN, ROWS * TIME * k * 2 * HIDDEN
    assert max(each.untyped_storage().nbytes() // each.itemsize for each in made) == max(matrices, rows)
    products = [node for node in graph.graph.nodes if "hymo.grouped_" in str(node.target)]
    # Forward two, gate and up being one, backward twice as many, and none of them is done again.
    assert len(products) == 6


def test_a_cpu_takes_the_definition_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    x, _, *others = inputs()
    calls: list[int] = []
    product = F.grouped_mm
    monkeypatch.setattr(F, "grouped_mm", lambda *a, **k: calls.append(1) or product(*a, **k))
    for backend, count in ((None, 0), ("eager", 0), ("grouped", 2)):
        routed_swiglu(x, *others, capacity=4, backend=backend)  # type: ignore[arg-type]
        assert len(calls) == count


@pytest.mark.parametrize(
    ("dtype", "wide", "backend", "message"),
    [
        (torch.bfloat16, 16, "triton", "must be 'eager', 'grouped' or None; got 'triton'"),
        (torch.float32, 16, "grouped", "x is torch.float32 on cpu"),
        (torch.bfloat16, 12, "grouped", "d and f are 12 and 24; 'eager' takes"),
    ],
)
def test_what_it_does_not_serve_is_an_error(dtype: Any, wide: int, backend: Any, message: str) -> None:
    x, _, expert, weight, *_ = inputs()
    into, out = torch.ones(4, wide, 24, dtype=dtype), torch.ones(4, 24, wide, dtype=dtype)
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(routed_swiglu)(
            x[..., :wide].to(dtype), expert, weight, into, into, out, capacity=3, backend=backend
        )


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_takes_filled_rows(case: str) -> None:
    how, capacity = CASES[case]
    given = [each.cuda() for each in inputs(**how)]
    got, want = (gradients(backend, capacity=capacity)(*given) for backend in ("grouped", "eager"))
    assert_near(got, want, within=0.02)
    assert torch.equal(gradients(None, capacity=capacity)(*given)[0][0], got[0][0])


@pytest.mark.gpu
def test_a_gpu_replays_it_with_other_counts() -> None:
    """Nothing of it runs on the CPU: a recorded graph answers for an expert that was empty when it was recorded."""
    given = [each.cuda() for each in inputs(banned=1)]
    run = jit(gradients("grouped"), compile="aot_eager", replay=True)
    run(*given)
    run(*given)
    other = [each.cuda() for each in inputs(banned=2, seed=1)]
    assert_near(run(*other), gradients("eager")(*other), within=0.02)
