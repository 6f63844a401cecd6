"""A region is its function: the same values and gradients, traced and compiled once for all calls of one signature."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

import hymo.region
from hymo import tree
from hymo.backend import EAGER, keep, with_compute_dtype
from hymo.footprint import INDEX_MAPS
from hymo.jit import jit
from hymo.layers.moe import MoeParams
from hymo.region import once, region
from hymo.step import stacks_of
from hymo_kernels.primitive import OPERATIONS
from tests.configs import micro_batches, setup, smallest_config

WAYS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.heavy)]


def inputs(layers: int = 3) -> tuple[list[dict[str, Tensor]], Tensor]:
    draw = torch.Generator().manual_seed(0)

    def layer() -> dict[str, Tensor]:
        return {
            "w": torch.randn(8, 8, generator=draw) / 3,
            "scale": torch.randn(8, generator=draw),
            "unused": torch.randn(2, generator=draw),
        }

    return [layer() for _ in range(layers)], torch.randn(2, 4, 8, generator=draw)


def block(p: dict[str, Tensor], x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A residual layer with views of its arguments, a count that has no gradient, and an argument handed back."""
    left, right = torch.split(x @ p["w"].mT, 4, dim=-1)
    y = torch.cat([torch.tanh(left) * right.transpose(0, 1).transpose(0, 1), right], dim=-1) * p["scale"]
    return x + y * (position > 0)[..., None], (x > 0).sum(), p["scale"]


def descend(run: Callable[..., Any], layers: list[dict[str, Tensor]], x: Tensor) -> tuple[Any, Any]:
    """Gradients with respect to everything, and the value, through all layers."""
    position = torch.arange(4).expand(2, 4)

    def loss(layers: list[dict[str, Tensor]], x: Tensor) -> tuple[Tensor, Tensor]:
        count, scales = torch.zeros((), dtype=torch.int64), torch.zeros(())
        for p in layers:
            x, found, scale = run(p, x, position)
            count, scales = count + found, scales + scale.sum()
        return x.square().sum() + scales, count

    return torch.func.grad_and_value(loss, argnums=(0, 1), has_aux=True)(layers, x)


@pytest.mark.parametrize("around", ["none", "aot_eager"])
@pytest.mark.parametrize("compile", WAYS)
def test_a_region_has_the_values_and_gradients_of_its_function(compile: Any, around: Any) -> None:
    layers, x = inputs()
    want = descend(block, layers, x)
    got = jit(partial(descend, region(block, compile=compile)), compile=around)(layers, x)
    for a, b in zip(tree_leaves(got), tree_leaves(want), strict=True):
        torch.testing.assert_close(a, b)


def test_it_is_traced_once_for_all_layers() -> None:
    traced = []

    def counted(p: dict[str, Tensor], x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        traced.append(x.shape)
        return block(p, x, position)

    run = region(counted, compile="aot_eager")
    descend(run, *inputs(2))
    once = len(traced)
    descend(run, *inputs(9))
    jit(partial(descend, run), compile="aot_eager")(*inputs(5))
    assert len(traced) == once > 0
    layers, x = inputs()
    descend(run, layers, torch.cat([x, x], dim=-2)[:, :4].contiguous())
    assert len(traced) == once
    assert region(counted, compile="aot_eager") is run
    assert region(counted, compile="none") is counted


def test_results_own_their_memory() -> None:
    layers, x = inputs(1)
    y, _, scale = region(block, compile="aot_eager")(layers[0], x, torch.arange(4).expand(2, 4))
    assert torch.equal(scale, layers[0]["scale"])
    owners = [t.untyped_storage().data_ptr() for t in (y, scale, x, *layers[0].values())]
    assert len(set(owners)) == len(owners)


@pytest.mark.parametrize("compile", WAYS)
def test_only_what_lies_otherwise_is_copied(compile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[torch.Size] = []
    monkeypatch.setattr("hymo.region._placed", lambda x, like: copied.append(x.shape) or x.contiguous())
    run, x = region(lambda x, angle: x * angle, compile=compile), torch.randn(2, 3, 4)
    lying = torch.randn(2, 3, 1, 5).as_strided((2, 1, 3), (15, 2, 5)).mT
    assert lying.stride() != torch.empty(2, 3, 1).stride()
    for angle, copies in ((lying, 1), (torch.randn(2, 3).as_strided((2, 3, 1), (3, 1, 99)), 0)):
        copied.clear()
        torch.testing.assert_close(run(x, angle), x * angle)
        assert len(copied) == copies


def test_vmap_runs_it_for_every_sample() -> None:
    layers, x = inputs(1)
    position = torch.arange(4).expand(2, 4)
    many = torch.stack([x, 2 * x, -x])
    run = region(block, compile="aot_eager")
    got = torch.func.vmap(lambda x: run(layers[0], x, position)[0])(many)
    torch.testing.assert_close(got, torch.stack([block(layers[0], x, position)[0] for x in many]))


def test_an_error_of_the_function_comes_out_as_it_is() -> None:
    def wrong(x: Tensor) -> Tensor:
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        region(wrong, compile="aot_eager")(torch.ones(2))


@pytest.mark.parametrize("compile", WAYS)
def test_a_step_of_regions_and_stacks_is_the_step(compile: Any) -> None:
    parts = setup(smallest_config())
    compiled = {"region": partial(region, compile=compile), "once": partial(once, compile=compile)}
    backends = {
        "plain": EAGER,
        "stacks": EAGER._replace(stacked=2**21),
        "both": EAGER._replace(**compiled, stacked=2**21),
    }
    after = {}
    for name, backend in backends.items():
        state, losses = parts.state(backend=backend), []
        step = parts.step(compile if name == "both" else "none", backend=backend)
        for i in range(3):
            state, metrics = step(state, micro_batches(parts.cfg, i))
            losses.append((metrics.loss, metrics.grad_norm))
        after[name] = losses, stacks_of(parts.spec, backend).split(state)
    for name in ("stacks", "both"):
        torch.testing.assert_close(after[name][0], after["plain"][0], rtol=1e-4, atol=1e-5)
        for path, x in tree.paths(after["plain"][1].params).items():
            found = tree.paths(after[name][1].params)[path]
            assert (found - x).norm() <= 1e-3 * x.norm() + 1e-6, (name, path)


def test_a_gradient_that_is_the_one_given_is_a_tensor_of_its_own() -> None:
    """Also if the first one given lay otherwise and was copied."""
    _, pull = torch.func.vjp(region(lambda a, b: a + b, compile="aot_eager"), torch.ones(2, 3), torch.ones(2, 3))
    for given in (torch.ones(()).expand(2, 3), torch.ones(2, 3)):
        places = {x.untyped_storage().data_ptr() for x in (given, *pull(given))}
        assert len(places) == 3


def test_a_region_is_called_by_what_it_does() -> None:
    """A program is found in a cache by the names that it calls, whatever regions were made before."""
    layers, x = inputs(1)
    position = torch.arange(4).expand(2, 4)

    def names(scale: float) -> set[str]:
        def scaled(p: dict[str, Tensor], x: Tensor, position: Tensor) -> Tensor:
            return block(p, x, position)[0] * scale

        before = {op.__name__ for op in OPERATIONS}
        region(scaled, compile="aot_eager")(layers[0], x, position)
        return {op.__name__ for op in OPERATIONS} - before

    first, other, again = names(2.5), names(3.5), names(2.5)
    assert len(first) == len(other) == 2
    assert {name.replace("_2.", ".").replace("_2_backward", "_backward") for name in again} == first
    assert not first & other


EXPERTS = {(4, 32, 40), (4, 40, 32), (4, 32, 80)}


def unfused(graph: torch.fx.Graph) -> set[str]:
    """The operations that make fp32 tensors of an expert's shape, or read one that is made, and are no loop over it."""
    aten = torch.ops.aten
    found = set()

    def is_wide(node: Any) -> bool:
        val = node.meta.get("val")
        return isinstance(val, Tensor) and val.dtype == torch.float32 and tuple(val.shape) in EXPERTS

    for node in graph.nodes:
        made = any(is_wide(each) and each.op != "placeholder" for each in node.all_input_nodes)
        if node.op != "call_function" or not (made or is_wide(node)):
            continue
        op = getattr(node.target, "overloadpacket", node.target)
        fused = (*INDEX_MAPS, aten.linalg_vector_norm, aten.zeros_like, torch.ops.prims.convert_element_type)
        if op not in fused and not (op is not node.target and (node.target.is_view or pointwise(node.target))):
            found.add(str(op))
    return found


def joined(graph: torch.fx.Graph) -> int:
    """How often a graph makes gate and up in bf16, side by side."""
    made = [node.meta["val"] for node in graph.nodes if node.target is torch.ops.aten.cat.default]
    return sum(val.dtype == torch.bfloat16 and tuple(val.shape) == (4, 32, 80) for val in made)


def pointwise(target: Any) -> bool:
    return torch.Tag.pointwise in target.tags or target.overloadpacket is torch.ops.aten.lerp


@pytest.mark.parametrize("micro", [1, pytest.param(2, marks=pytest.mark.heavy)])
def test_no_gradient_of_an_expert_is_stored_in_fp32(micro: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm, update and the sum over micro-batches convert what a region gives back where they read it."""
    training = {"gradient_accumulation_steps": micro, "precision": "bfloat16"}
    alone = {"n_layers": 1, "mla_every": 1, "mtp_depth": 0, "mtp_loss_weights": [], "moe_inter_dim": 40}
    parts = setup(smallest_config(model=alone, training=training))
    around: list[torch.fx.Graph] = []
    compiled = hymo.region.compiled

    def record(graph: torch.fx.GraphModule, *args: Any, **keys: Any) -> Any:
        if any("hymo.region" in str(node.target) for node in graph.graph.nodes):
            around.append(graph.graph)
        return compiled(graph, *args, **keys)

    def graphs_of_a_step(**changes: Any) -> list[torch.fx.Graph]:
        around.clear()
        ways = {"region": partial(region, compile="aot_eager"), "once": partial(once, compile="aot_eager")}
        backend = with_compute_dtype(EAGER._replace(**ways), torch.bfloat16)._replace(**changes)
        step = make_fx(parts.pure(backend), tracing_mode="fake")
        return [step(parts.state(), micro_batches(parts.cfg, 0)).graph, *around]

    monkeypatch.setattr(hymo.region, "compiled", record)
    graphs = graphs_of_a_step()
    assert len(graphs) == micro
    assert unfused(graphs[-1]) == set()
    layers = sum(isinstance(block.ffn, MoeParams) for block in parts.spec.blocks)
    # In the step, once for all micro-batches.
    assert [joined(graph) for graph in graphs] == [layers] + [0] * (micro - 1)
    assert unfused(graphs_of_a_step(lend=keep)[-1])


PROGRAM = """
import torch
from torch._dynamo.utils import counters
from hymo.jit import jit
from hymo.region import once, region
{before}
layer = region(lambda x: torch.tanh(x) * 2, compile="inductor")
part = once(lambda p, x: torch.func.grad(lambda p: layer(p * x).sum())(p), compile="inductor")
step = jit(lambda p, x: (p - part(p, x) - part(x, p), x.sum()), donate=True)
step(torch.ones(3), torch.ones(3))
print(counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"],
      counters["inductor"]["fxgraph_cache_bypass"])
"""


@pytest.mark.heavy
def test_a_second_process_finds_all_that_the_first_compiled(tmp_path: Path) -> None:
    """Whatever regions it makes before: a warm start is a trace and nothing else."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    other = "region(lambda x: x.cos(), compile='aot_eager')(torch.ones(5))"
    found = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM.format(before=before)],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=300,
        ).stdout.split()
        for before in ("", other)
    ]
    assert found == [["4", "0", "0"], ["0", "4", "0"]]
