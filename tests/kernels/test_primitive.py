"""Canaries: a primitive whose backward is deliberately three times the gradient must say so in every mode of torch."""

import importlib
import inspect
import pkgutil
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import hymo_kernels.host
from hymo_kernels.primitive import define, differentiable

BACKENDS = ("eager", "aot_eager", "inductor")
BACKWARD = ["needs", "arguments", "outputs", "grads"]
ran: list[tuple[bool, ...]] = []


def _true(q: Tensor, v: Tensor, h: Tensor | None, s: float) -> tuple[Tensor, Tensor]:
    return q * v * s, (q + v).sum(-1) + (0 if h is None else h)


def _tripled(q: Tensor, v: Tensor, d_o: Tensor, d_h: Tensor, s: float) -> tuple[Tensor, Tensor, Tensor]:
    return 3 * (d_o * v * s + d_h[..., None]), 3 * (d_o * q * s + d_h[..., None]), 3 * d_h


_forward_op = define(
    "canary(Tensor q, Tensor v, Tensor? h, float s) -> (Tensor, Tensor)",
    fake=lambda q, v, h, s: (torch.empty_like(q), q.new_empty(q.shape[:2])),
    cpu=_true,
)
_backward_op = define(
    "canary_backward(Tensor q, Tensor v, Tensor d_o, Tensor d_h, float s) -> (Tensor, Tensor, Tensor)",
    fake=lambda q, v, d_o, d_h, s: (torch.empty_like(q), torch.empty_like(v), torch.empty_like(d_h)),
    cpu=_tripled,
)


def _forward(q: Tensor, v: Tensor, h: Tensor | None, s: float) -> tuple[Tensor, ...]:
    return _forward_op(q, v, h, s)


def _backward(needs: Any, arguments: Any, outputs: Any, grads: Any) -> tuple[Tensor | None, ...]:
    ran.append(needs)
    q, v, _, s = arguments
    d_o = torch.zeros_like(q) if grads[0] is None else grads[0]
    d_h = q.new_zeros(q.shape[:2]) if grads[1] is None else grads[1]
    d_q, d_v, d_h = _backward_op(q, v, d_o, d_h, s)
    return d_q, d_v, d_h if needs[2] else None, None


canary = differentiable(_forward, _backward, save=(0, 1))
tripled_weight = differentiable(
    lambda x, w: x * w,
    lambda needs, arguments, outputs, grads: (3 * grads[0] * arguments[1], 3 * (grads[0] * arguments[0]).sum((0, 1))),
    save=(0, 1),
    shared=(1,),
)

generator = torch.Generator().manual_seed(0)
PARAMS = {"q": torch.randn(2, 3, 4, generator=generator)}
V, H = torch.randn(2, 3, 4, generator=generator), torch.randn(2, 3, generator=generator)
MANY = torch.arange(1.0, 6.0)[:, None, None, None] * V, H.expand(5, 2, 3).contiguous()


def _loss(op: Callable[..., Any], with_state: bool) -> Callable[..., Tensor]:
    def loss(p: dict[str, Tensor], v: Tensor, h: Tensor) -> Tensor:
        o, s = op(p["q"], v, h if with_state else None, 2.0)
        return (o * v.detach().cos()).sum() + (s * h.detach().cos()).sum()

    return loss


def _grad(loss: Callable[..., Tensor], argnums: tuple[int, ...]) -> Callable[..., Any]:
    return torch.func.grad(loss, argnums=argnums)


def _per_sample(loss: Callable[..., Tensor], argnums: tuple[int, ...]) -> Callable[..., Any]:
    return torch.func.vmap(_grad(loss, argnums), in_dims=(None, 0, 0))


def _of_sum(loss: Callable[..., Tensor], argnums: tuple[int, ...]) -> Callable[..., Any]:
    return _grad(lambda *a: torch.func.vmap(loss, in_dims=(None, 0, 0))(*a).sum(), argnums)


def _eager(f: Callable[..., Any]) -> Callable[..., Any]:
    return f


def _strict(backend: str) -> Callable[..., Any]:
    return lambda f: torch.compile(f, fullgraph=True, backend=backend)


def _nonstrict(backend: str) -> Callable[..., Any]:
    def compiled(f: Callable[..., Any]) -> Callable[..., Any]:
        traced = torch._dynamo.nonstrict_trace(f)
        return torch.compile(lambda *a: traced(*a), fullgraph=True, backend=backend)

    return compiled


# inductor builds C++ for each case, so it proves one transform here and all of them under --run-heavy.
MODES = {"eager": _eager} | {
    f"{how} {backend}": mode(backend)
    for how, mode in (("strict", _strict), ("nonstrict", _nonstrict))
    for backend in BACKENDS
}
TRANSFORMS = {"grad": _grad, "vmap(grad)": _per_sample, "grad(vmap)": _of_sum}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("transform", "with_state"), [("grad", True), ("grad", False), ("vmap(grad)", True), ("grad(vmap)", True)]
)
@pytest.mark.parametrize("mode", [pytest.param(m, marks=pytest.mark.heavy if "inductor" in m else []) for m in MODES])
def test_tripled_backward_is_seen(mode: str, transform: str, with_state: bool):
    argnums = (0, 1, 2) if with_state else (0, 1)
    arguments = (PARAMS, V, H) if transform == "grad" else (PARAMS, *MANY)
    want = TRANSFORMS[transform](_loss(_true, with_state), argnums)(*arguments)
    got = MODES[mode](TRANSFORMS[transform](_loss(canary, with_state), argnums))(*arguments)
    for g, w in zip(tree_leaves(got), tree_leaves(want), strict=True):
        torch.testing.assert_close(g, 3 * w)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tripled_backward_is_seen_by_compiled_forward_and_backward(backend: str):
    q = PARAMS["q"].clone().requires_grad_()
    torch.compile(lambda q: _loss(canary, True)({"q": q}, V, H), fullgraph=True, backend=backend)(q).backward()
    torch.testing.assert_close(q.grad, 3 * _grad(_loss(_true, True), (0,))(PARAMS, V, H)[0]["q"])


@pytest.mark.parametrize("mode", ["eager", "strict aot_eager", "nonstrict aot_eager"])
def test_shared_weight_has_a_gradient_for_each_sample(mode: str):
    """A weight has no batch to fold into: mapped or not, vmap(grad) gives each sample its own gradient."""
    w, x = torch.randn(4), torch.randn(5, 2, 3, 4)
    per_sample = torch.func.vmap(torch.func.grad(lambda w, x: tripled_weight(x, w).square().sum()), in_dims=(None, 0))
    torch.testing.assert_close(MODES[mode](per_sample)(w, x), 6 * w * x.square().sum((1, 2)))
    both = torch.func.vmap(torch.func.grad(lambda w, x: tripled_weight(x, w).square().sum()))
    many = torch.randn(5, 4)
    torch.testing.assert_close(MODES[mode](both)(many, x), 6 * many * x.square().sum((1, 2)))


def test_forward_under_nested_vmap_equals_loops():
    x = torch.randn(4, 3, 2, 3, 4)
    got = torch.func.vmap(torch.func.vmap(lambda x: canary(x, V, None, 2.0)[0], in_dims=1, out_dims=1))(x.movedim(1, 2))
    torch.testing.assert_close(got, (x * V * 2).movedim(1, 2))


def test_backward_knows_which_gradients_are_wanted():
    ran.clear()
    torch.func.grad(_loss(canary, True), argnums=1)(PARAMS, V, H)
    torch.func.grad(_loss(canary, True), argnums=(0, 2))(PARAMS, V, H)
    assert ran == [(False, True, False, False), (True, False, True, False)]


def test_unused_output_costs_no_gradient_tensor():
    seen: list[tuple[bool, ...]] = []

    def backward(needs: Any, arguments: Any, outputs: Any, grads: Any) -> tuple[Tensor | None, ...]:
        seen.append(tuple(g is None for g in grads))
        return (grads[0],)

    op = differentiable(lambda x: (x * 1, x * 2, x * 3), backward, save=(), residuals=1)
    assert len(op(V)) == 2
    torch.func.grad(lambda x: op(x)[0].sum())(V)
    assert seen == [(False, True, True)]


def test_second_derivative_is_one_clear_error():
    first = torch.func.grad(_loss(canary, True))
    with pytest.raises(NotImplementedError, match="_forward: asked for a second derivative"):
        torch.func.grad(lambda p: first(p, V, H)["q"].sum())(PARAMS)


def test_raw_op_under_vmap_equals_a_loop():
    many = MANY[0]
    o, _ = torch.func.vmap(lambda v: _forward_op(PARAMS["q"], v, None, 2.0))(many)
    torch.testing.assert_close(o, torch.stack([PARAMS["q"] * v * 2 for v in many]))


def test_an_output_without_elements_keeps_its_batch_under_vmap():
    def backward(needs: Any, arguments: Any, outputs: Any, grads: Any) -> tuple[Tensor, ...]:
        return (grads[0] * 2,)

    empty = differentiable(lambda x: (x * 2, x[..., :0]), backward, save=())
    doubled, nothing = torch.func.vmap(empty)(torch.ones(3, 2, 4))
    assert torch.equal(doubled, torch.full((3, 2, 4), 2.0))
    assert nothing.shape == (3, 2, 0)


def test_every_backward_is_typed_for_the_none_it_is_given():
    """What is not saved and what nobody used arrive as None; type checks look at an element at random."""
    backwards = [
        function
        for info in pkgutil.iter_modules(hymo_kernels.host.__path__, "hymo_kernels.host.")
        for function in vars(importlib.import_module(info.name)).values()
        if inspect.isfunction(function) and list(inspect.signature(function).parameters) == BACKWARD
    ]
    assert len(backwards) >= 5
    for function in backwards:
        hints = typing.get_type_hints(function)
        for name in ("outputs", "grads"):
            element = typing.get_args(hints[name])[0] if hints[name] is not Any else Any
            assert element is Any or type(None) in typing.get_args(element), (function, name, hints[name])
