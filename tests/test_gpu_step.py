"""A whole step on a GPU: Triton's kernels inside one compiled graph."""

from typing import Any

import pytest
import torch

from hymo import tree
from hymo.backend import EAGER, TRITON, Backend, with_compute_dtype
from tests.configs import Setup, micro_batches, setup, tiny_config
from tests.test_step import recording

pytestmark = pytest.mark.gpu
STEPS = 4


def parts_of(rule: str, width: int) -> Setup:
    model = {"gdn_rule": rule, "gdn_key_dim": width, "gdn_value_dim": width, "dim": 64}
    return setup(tiny_config(model=model, training={"max_seq_len": 64}))


def run(
    parts: Setup, backend: Backend, dtype: torch.dtype, compile: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loss of every step, and the parameters after the last."""
    state = tree.map(lambda x: x.cuda(), parts.state())
    step = parts.step(compile, backend=with_compute_dtype(backend, dtype))
    losses = []
    for i in range(STEPS):
        batch = tree.map(lambda x: x.cuda(), micro_batches(parts.cfg, i))
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    return losses, tree.paths(state.params)


@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("rule", ["gated_delta", "delta", "gated_linear"])
def test_kernels_in_a_compiled_step_learn_what_plain_pytorch_learns(rule: str, width: int) -> None:
    torch._dynamo.reset()
    parts = parts_of(rule, width)
    exact, _ = run(parts, EAGER, torch.float32, "none")
    plain, _ = run(parts, EAGER, torch.bfloat16, "none")
    kernels, params = run(parts, TRITON, torch.bfloat16, "inductor")
    noise = max(abs(a - b) for a, b in zip(exact, plain, strict=True))
    assert max(abs(a - b) for a, b in zip(exact, kernels, strict=True)) < 3 * noise + 2e-3, (exact, plain, kernels)
    assert exact[-1] != exact[0]
    assert all(x.isfinite().all() for x in params.values())


def test_the_compiled_gradient_of_kernels_is_theirs() -> None:
    """A compiled step that lost the kernels' backward would leave a GDN layer's gradient wrong, silently."""
    torch._dynamo.reset()
    parts = parts_of("gated_delta", 64)
    parts = parts._replace(optimizer=recording(parts.optimizer))
    gradients = {}
    for compile in ("none", "inductor"):
        state = tree.map(lambda x: x.cuda(), parts.state())
        batch = tree.map(lambda x: x.cuda(), micro_batches(parts.cfg, 0))
        after, _ = parts.step(compile, backend=with_compute_dtype(TRITON, torch.bfloat16))(state, batch)
        gradients[compile] = after.optimizer["gradient"]
    found, wanted = (tree.paths(gradients[compile]) for compile in ("inductor", "none"))
    for name, want in wanted.items():
        assert (found[name] - want).norm() <= 0.05 * want.norm() + 1e-6, name
        assert want.norm() > 0, name
