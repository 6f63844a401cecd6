"""A whole step on a GPU: Triton's kernels inside one compiled graph."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hymo import tree
from hymo.backend import EAGER, TRITON, Backend, with_compute_dtype
from tests.configs import Setup, micro_batches, setup, smallest_config
from tests.test_step import recording

pytestmark = [pytest.mark.gpu, pytest.mark.whole_step]
STEPS = 4


class Run(NamedTuple):
    """What some steps gave: the loss of each, the gradient of the first, the parameters after the last."""

    losses: list[float]
    gradient: dict[str, Tensor]
    params: dict[str, Tensor]


def parts_of(rule: str, width: int) -> Setup:
    model = {"gdn_rule": rule, "gdn_key_dim": width, "gdn_value_dim": width, "dim": 64, "max_seq_len": 64}
    parts = setup(smallest_config(model=model, training={"max_seq_len": 64}))
    return parts._replace(optimizer=recording(parts.optimizer))


def run(parts: Setup, backend: Backend, dtype: torch.dtype, compile: Any) -> Run:
    state = tree.map(lambda x: x.cuda(), parts.state())
    step = parts.step(compile, backend=with_compute_dtype(backend, dtype))
    losses, gradients = [], []
    for i in range(STEPS):
        state, metrics = step(state, tree.map(lambda x: x.cuda(), micro_batches(parts.cfg, i)))
        losses.append(float(metrics.loss))
        gradients.append(tree.paths(state.optimizer["gradient"]))
    return Run(losses, gradients[0], tree.paths(state.params))


# Every rule at one width, and every width, each of which has kernels of its own, with one rule.
@pytest.mark.parametrize(
    ("rule", "width"),
    [("gated_delta", 32), ("gated_delta", 64), ("gated_delta", 128), ("delta", 64), ("gated_linear", 64)],
)
def test_kernels_in_a_compiled_step_learn_what_plain_pytorch_learns(rule: str, width: int) -> None:
    """A compiled step that lost the kernels' backward would leave a GDN layer's gradient wrong, silently."""
    parts = parts_of(rule, width)
    exact = run(parts, EAGER, torch.float32, "none")
    plain = run(parts, EAGER, torch.bfloat16, "none")
    compiled = run(parts, TRITON, torch.bfloat16, "inductor")
    noise = max(abs(a - b) for a, b in zip(exact.losses, plain.losses, strict=True))
    apart = max(abs(a - b) for a, b in zip(exact.losses, compiled.losses, strict=True))
    assert apart < 3 * noise + 2e-3, (exact.losses, plain.losses, compiled.losses)
    assert exact.losses[-1] != exact.losses[0]
    assert all(x.isfinite().all() for x in compiled.params.values())
    for name, want in exact.gradient.items():
        # What rounding to bf16 does to it, in plain PyTorch too, is no fault of a kernel.
        noise = (plain.gradient[name] - want).norm()
        assert (compiled.gradient[name] - want).norm() <= 2 * noise + 0.03 * want.norm() + 1e-6, name
        assert want.norm() > 2 * noise, name
