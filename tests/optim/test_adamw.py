"""Adam and weight decay against torch and against their definitions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hymo.optim import add_weight_decay, apply_updates, chain, scale_by_adam, scale_by_learning_rate
from hymo.optim.adamw import filled

STEP = torch.tensor(0)


@given(
    seed=st.integers(0, 2**16),
    betas=st.sampled_from([(0.9, 0.95), (0.9, 0.999), (0.0, 0.99)]),
    decay=st.sampled_from([0.0, 0.1]),
    scale=st.sampled_from([1e-6, 1.0, 1e3]),
)
def test_adamw_equals_torch_over_twenty_steps(
    seed: int, betas: tuple[float, float], decay: float, scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rate = 2.0**-7  # exact in fp32
    params = {
        "w": torch.randn(3, 4, generator=generator, dtype=torch.float64),
        "b": torch.randn(5, generator=generator, dtype=torch.float64),
    }
    theirs = [x.clone().requires_grad_() for x in params.values()]
    adamw = torch.optim.AdamW(theirs, lr=rate, betas=betas, eps=1e-8, weight_decay=decay)
    ours = chain(
        scale_by_adam(*betas, eps=1e-8),
        add_weight_decay(decay, cautious=False),
        scale_by_learning_rate(rate, lambda step: torch.ones(())),
    )
    state = ours.init(params)
    for _ in range(20):
        grads = {k: scale * torch.randn(x.shape, generator=generator, dtype=x.dtype) for k, x in params.items()}
        for leaf, grad in zip(theirs, grads.values(), strict=True):
            leaf.grad = grad
        adamw.step()
        updates, state = ours.update(grads, state, params, STEP)
        params = apply_updates(params, updates)
    for mine, leaf in zip(params.values(), theirs, strict=True):
        # The bias corrections are fp32, everything else is fp64.
        torch.testing.assert_close(mine, leaf.detach(), rtol=1e-6, atol=1e-7)


def test_bias_correction_is_exact_for_beta_near_one() -> None:
    for beta in (0.9, 0.95, 0.999, 0.999999):
        for taken in (1, 2, 100, 10**6):
            exact = 1 - beta**taken
            assert filled(beta, torch.tensor(taken, dtype=torch.int32)).item() == pytest.approx(exact, rel=1e-6)


def test_moments_and_count_are_fp32_and_int32_for_any_narrow_parameter() -> None:
    state = scale_by_adam(0.9, 0.95, eps=1e-8).init({"w": torch.zeros(2, dtype=torch.bfloat16)})
    assert (state.taken.dtype, state.mean["w"].dtype, state.square["w"].dtype) == (
        torch.int32,
        torch.float32,
        torch.float32,
    )


def test_zero_gradient_gives_zero_adam_update() -> None:
    params = {"w": torch.ones(3)}
    adam = scale_by_adam(0.9, 0.95, eps=1e-8)
    updates, _ = adam.update({"w": torch.zeros(3)}, adam.init(params), params, STEP)
    assert torch.equal(updates["w"], torch.zeros(3))


def test_cautious_decay_leaves_out_what_the_update_pulls_away_from_zero() -> None:
    # The parameter moves against u: with u x > 0 it shrinks and decays too, with u x < 0 it grows and does not decay.
    u = {"w": torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0, 0.0, 1.0])}
    x = {"w": torch.tensor([2.0, -2.0, -2.0, 2.0, 2.0, -2.0, 0.0])}
    decay = add_weight_decay(0.5, cautious=True)
    updates, _ = decay.update(u, decay.init(x), x, STEP)
    assert updates["w"].tolist() == [2.0, -2.0, 1.0, -1.0, 1.0, -1.0, 1.0]


def test_plain_decay_takes_every_entry() -> None:
    u, x = {"w": torch.tensor([1.0, 1.0, 0.0])}, {"w": torch.tensor([2.0, -2.0, 2.0])}
    updates, _ = add_weight_decay(0.5, cautious=False).update(u, (), x, STEP)
    assert updates["w"].tolist() == [2.0, 0.0, 1.0]


def test_decay_shrinks_by_learning_rate_times_rate_where_nothing_else_moves() -> None:
    params = {"w": torch.tensor([4.0, -4.0])}
    transform = chain(add_weight_decay(0.5, cautious=True), scale_by_learning_rate(0.25, lambda step: torch.ones(())))
    updates, _ = transform.update({"w": torch.zeros(2)}, transform.init(params), params, STEP)
    assert apply_updates(params, updates)["w"].tolist() == [3.5, -3.5]
