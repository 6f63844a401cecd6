"""How much a compiler is given to read: a step of v1.0, 32 layers deep, is a program that it can finish."""

from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch

from hymo import build_optimizer, init_train_state, jit, load_config, make_batch, model_spec, train_step, tree
from hymo.backend import EAGER_ON_GPU, STACKED, with_compute_dtype
from hymo.params import is_spec
from hymo.region import once, region


class Enough(Exception):
    """The graph has been seen."""


def nodes_of_a_step(layers: int, micro_batches: int = 1) -> int:
    """Nodes of the program that `jit` compiles, for v1.0 with so many layers; no number is computed."""
    keys = [
        f"model.n_layers={layers}",
        f"training.gradient_accumulation_steps={micro_batches}",
        "training.micro_batch_size=1",
    ]
    config = load_config("recipes/configs/hymo_750m.yaml", keys)
    spec = model_spec(config.model)
    optimizer = build_optimizer(config.optimizer, config.scheduler, spec)
    compiled = {"region": partial(region, compile="aot_eager"), "once": partial(once, compile="aot_eager")}
    backend = EAGER_ON_GPU._replace(**compiled, stacked=STACKED)
    backend = with_compute_dtype(backend, torch.bfloat16)
    # Memory that nobody touches is not taken.
    params = tree.map(lambda leaf: torch.empty(leaf.shape), spec, is_leaf=is_spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "zeros_like", lambda x, **keys: torch.empty_like(x, **keys))
        state = init_train_state(params, spec=spec, optimizer=optimizer, backend=backend)
    batch = make_batch(torch.ones(micro_batches, 1, config.training.max_seq_len + 1, dtype=torch.int64))
    seen: list[int] = []

    def see(graph: torch.fx.GraphModule, *args: Any, **keys: Any) -> Any:
        seen.append(len(graph.graph.nodes))
        raise Enough

    step = partial(train_step, cfg=config, spec=spec, optimizer=optimizer, backend=backend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("hymo.jit"), "compiled", see)
        with pytest.raises(Enough):
            jit(step, compile="aot_eager", donate=True)(state, batch)
    return seen[0]


@pytest.mark.heavy
def test_a_step_of_32_layers_is_a_program_that_a_compiler_finishes() -> None:
    """With every layer inline it had 26,901 nodes, and inductor did not come to an end in seven minutes."""
    shallow, deep = nodes_of_a_step(4), nodes_of_a_step(32)
    assert shallow < deep < 12_000
    # A layer more is a call, its backward, and the leaves of its parameters: nothing that needs thought.
    assert (deep - shallow) / 28 < 300


@pytest.mark.heavy
def test_a_micro_batch_more_is_a_call_more() -> None:
    two, four = (nodes_of_a_step(4, micro_batches) for micro_batches in (2, 4))
    assert two < four < two + 2 * 100
