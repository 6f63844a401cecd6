"""Which products of a graph leave it in fp32, and what they are then."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from hymo.exact_products import exact_products
from hymo.region import region

aten = torch.ops.aten


class OnCpu(fx.Interpreter):
    """Runs a graph where products with an fp32 result have no kernel."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in (aten.mm.dtype, aten.bmm.dtype):
            a, b, dtype = args
            return a.to(dtype) @ b.to(dtype)
        return super().call_function(target, args, kwargs)


def traced(f: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    graph: fx.GraphModule = make_fx(f, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)
    graph.graph.eliminate_dead_code()
    return graph


def targets(graph: fx.GraphModule) -> list[Any]:
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def matrices(*shape: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=draw).to(dtype), torch.randn(shape, generator=draw).to(dtype)


CHANGED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a product": lambda a, b: [(a.mT @ b).float()],
    "two products": lambda a, b: [(a.mT @ b).float(), a.float().sum(), (b.mT @ a).float()],
    "a view of one": lambda a, b: [(a.mT @ b).reshape(4, -1, 2).permute(2, 0, 1).float()],
    "one that is used again as it leaves": lambda a, b: [y := (a.mT @ b).float(), y.square().sum()],
}
KEPT: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "one that is read in 16 bits too": lambda a, b: [(y := a.mT @ b).float(), y + 1],
    "one that is given back in 16 bits too": lambda a, b: [(y := a.mT @ b).float(), y],
    "one that is computed with before": lambda a, b: [(a.mT @ b).relu().float()],
    "one that is computed with after": lambda a, b: [(a.mT @ b).float() + 1],
    "parts of one": lambda a, b: [part.float() for part in (a.mT @ b).split(4, dim=-1)],
    "one that leaves as it is": lambda a, b: [a.mT @ b],
    "a cast of something else": lambda a, b: [(a + b).float()],
    "a cast of an input": lambda a, b: [a.float()],
    "one of fp64": lambda a, b: [(a.double().mT @ b.double()).float()],
    "one that leaves in fp64": lambda a, b: [(a.mT @ b).double()],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(16, 8), (3, 16, 8)], ids=str)
@pytest.mark.parametrize("case", CHANGED)
def test_a_product_that_leaves_in_fp32_is_one(case: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    f, (a, b) = CHANGED[case], matrices(*shape, dtype=dtype)
    graph = traced(f, a, b)
    plain, wide = (aten.mm.default, aten.mm.dtype) if len(shape) == 2 else (aten.bmm.default, aten.bmm.dtype)
    before = targets(graph).count(plain)
    exact_products(graph.graph)
    assert plain not in targets(graph)
    assert targets(graph).count(wide) == before > 0
    got, want = OnCpu(graph).run(a, b), f(a.double(), b.double())
    for node, x, y in zip(graph.graph.output_node().args[0], got, want, strict=True):
        val = node.meta["val"]
        assert (val.dtype, val.shape, val.stride()) == (x.dtype, x.shape, x.stride())
        # fp32 sums; one rounding to 16 bits would be a hundred times as much.
        torch.testing.assert_close(x.double(), y.float().double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(16, 8), (3, 16, 8)], ids=str)
@pytest.mark.parametrize("case", KEPT)
def test_every_other_graph_stays_as_it_is(case: str, shape: tuple[int, ...]) -> None:
    graph = traced(KEPT[case], *matrices(*shape))
    before = str(graph.graph)
    exact_products(graph.graph)
    assert str(graph.graph) == before


@pytest.mark.gpu
@pytest.mark.parametrize("compile", ["aot_eager", "inductor"])
def test_a_region_gives_masters_their_gradient_unrounded(compile: Any) -> None:
    def layer(w: Tensor, experts: Tensor, x: Tensor) -> Tensor:
        return 2 * ((x @ w.to(x.dtype)) @ experts.to(x.dtype))

    def loss(w: Tensor, experts: Tensor) -> Tensor:
        return (region(layer, compile=compile)(w, experts, x).float() * dy).sum()

    # Of small integers everything before the gradients is exact in bf16, and they are exact in fp32 only.
    draw = torch.Generator().manual_seed(0)
    shapes = (64, 32), (3, 32, 16), (3, 48, 64), (3, 48, 16)
    w, experts, x, dy = (torch.randint(-2, 3, shape, generator=draw).to("cuda", torch.float32) for shape in shapes)
    x = x.bfloat16()
    got = torch.func.grad(loss, argnums=(0, 1))(w, experts)
    want = torch.func.grad(lambda *a: (layer(*a, x.double()) * dy).sum(), argnums=(0, 1))(w.double(), experts.double())
    for found, right in zip(got, want, strict=True):
        assert torch.equal(found.double(), right)
        assert not torch.equal(right.bfloat16().double(), right)
