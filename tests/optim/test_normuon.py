"""NorMuon against its equations, and the properties that its users rely on."""

import math
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hymo import tree
from hymo.optim import POLAR_EXPRESS, QUINTIC, GradientTransform, orthogonalize, scale_by_normuon
from hymo.params import ParamSpec

STEP = torch.tensor(0)
Scale = Literal["spectral", "rms"]
Shape = tuple[int, ...]

sides = st.integers(2, 24)
seeds = st.integers(0, 2**16)
scales: Any = st.sampled_from(["spectral", "rms"])


def spec_of(*shapes: Shape) -> dict[str, ParamSpec]:
    axes = ("e", "m", "n")
    return {f"w{i}": ParamSpec(axes[3 - len(s) :], s, "matrix", "m") for i, s in enumerate(shapes)}


def draw(seed: int, *shapes: Shape, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{i}": torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for i, s in enumerate(shapes)}


def normuon(*shapes: Shape, scale: Scale = "spectral") -> GradientTransform:
    return scale_by_normuon(spec_of(*shapes), 0.95, beta2=0.9, eps=1e-8, scale=scale)


def first_update(transform: GradientTransform, grads: dict[str, Tensor]) -> dict[str, Tensor]:
    updates: dict[str, Tensor] = transform.update(grads, transform.init(grads), grads, STEP)[0]
    return updates


def written_out(grads: list[Tensor], scale: Scale) -> Tensor:
    """The last update of a run, from the equations of the (out, in) sources, one scalar loop at a time."""
    out, inputs = grads[0].mT.shape
    moving, square = torch.zeros(out, inputs, dtype=torch.float64), [0.0] * out
    for grad in grads:
        g = grad.mT
        moving = 0.95 * moving + 0.05 * g
        x = 0.05 * g + 0.95 * moving
        x = x / (math.sqrt(sum(float(a) ** 2 for a in x.flatten())) + 1e-7)
        for _ in range(5):
            a = x @ x.mT
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        square = [0.9 * v + 0.1 * sum(float(a) ** 2 for a in row) / inputs for v, row in zip(square, x, strict=True)]
        u = torch.stack([row / (math.sqrt(v) + 1e-8) for v, row in zip(square, x, strict=True)])
        if scale == "spectral":
            u = u * (x.norm() / (u.norm() + 1e-8)) * math.sqrt(max(1.0, out / inputs))
        else:
            u = u * 0.2 * math.sqrt(out * inputs) / (u.norm() + 1e-8)
    return u.mT


@given(seed=seeds, shape=st.sampled_from([(2, 3), (3, 2), (3, 3), (1, 4)]), steps=st.integers(1, 4), scale=scales)
def test_normuon_equals_its_equations(seed: int, shape: Shape, steps: int, scale: Scale) -> None:
    transform, grads = normuon(shape, scale=scale), [draw(seed + i, shape) for i in range(steps)]
    state = transform.init(grads[0])
    for grad in grads:
        updates, state = transform.update(grad, state, grad, STEP)
    torch.testing.assert_close(updates["w0"], written_out([g["w0"] for g in grads], scale), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("coefficients", "low", "high"), [(QUINTIC, 0.68, 1.135), (POLAR_EXPRESS, 0.858, 1.142)])
def test_singular_values_of_the_norms_last_two_decades_end_near_one(
    coefficients: tuple[tuple[float, float, float], ...], low: float, high: float
) -> None:
    left, _ = torch.linalg.qr(draw(0, (40, 40))["w0"])
    right, _ = torch.linalg.qr(draw(1, (60, 40))["w0"])
    values = torch.logspace(-1.5, 0, 40, dtype=torch.float64)
    x = left @ values.diag() @ right.mT
    assert values.min() / x.norm() > 0.01
    for form in (x, x.mT, 1e-3 * x, 1e3 * x):
        ends = torch.linalg.svdvals(orthogonalize(form, coefficients))
        assert low < ends.min() <= ends.max() < high


def test_bf16_iteration_stays_near_orthogonal() -> None:
    x = draw(0, (64, 160), dtype=torch.float32)["w0"]
    y = orthogonalize(x, dtype=torch.bfloat16)
    ends = torch.linalg.svdvals(y)
    assert 0.66 < ends.min() <= ends.max() < 1.15
    wanted = orthogonalize(x.double())
    # Five iterations of roundings to 2^-8; a polynomial that is rounded term by term is out by more.
    assert (y - wanted).norm() < 0.02 * wanted.norm()


@given(rows=sides, columns=sides, seed=seeds)
def test_orthogonalize_keeps_singular_vectors_and_commutes_with_transposing(rows: int, columns: int, seed: int) -> None:
    x = draw(seed, (rows, columns))["w0"]
    y = orthogonalize(x)
    torch.testing.assert_close(orthogonalize(x.mT), y.mT, rtol=1e-10, atol=1e-12)
    # y = p(x x^T) x for a polynomial p: then x^T y is symmetric.
    torch.testing.assert_close(x.mT @ y, y.mT @ x, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [(48, 12), (12, 48), (32, 32)])
def test_first_update_is_near_orthogonal_at_its_spectral_scale(shape: Shape) -> None:
    inputs, out = shape
    grads = draw(3, shape)
    values = torch.linalg.svdvals(first_update(normuon(shape), grads)["w0"]) / math.sqrt(max(1.0, out / inputs))
    # Equal neurons cost some orthogonality; a Gaussian square has singular values near 0 that stay there.
    assert values.max() < 1.25
    assert values.min() > 0.6 or inputs == out


@given(rows=sides, columns=sides, seed=seeds, scale=scales)
def test_first_update_moves_every_neuron_by_the_same_length(rows: int, columns: int, seed: int, scale: Scale) -> None:
    lengths = first_update(normuon((rows, columns), scale=scale), draw(seed, (rows, columns)))["w0"].norm(dim=0)
    torch.testing.assert_close(lengths, lengths.mean().expand_as(lengths), rtol=1e-4, atol=0.0)


def test_update_rms_of_a_square_matrix_of_width_896_is_a_thirtieth_of_the_learning_rate() -> None:
    grads = draw(0, (896, 896), dtype=torch.float32)
    spectral = 0.02 * first_update(normuon((896, 896)), grads)["w0"].square().mean().sqrt().item()
    # 0.02 / sqrt(896) = 0.00067 if all singular values were 1; the quintic leaves an RMS of 0.92.
    assert spectral == pytest.approx(0.00067, rel=0.1)
    rms = first_update(normuon((896, 896), scale="rms"), grads)["w0"].square().mean().sqrt().item()
    assert rms == pytest.approx(0.2, rel=1e-5)


@given(rows=sides, columns=sides, seed=seeds, scale=scales, factor=st.sampled_from([10.0, 1e4]))
def test_update_does_not_depend_on_the_gradients_scale(
    rows: int, columns: int, seed: int, scale: Scale, factor: float
) -> None:
    transform, grads = normuon((rows, columns), scale=scale), draw(seed, (rows, columns))
    scaled = tree.map(lambda g: factor * g, grads)
    # The 1e-7 beside the norm is seen through the iteration's slope at 0.
    torch.testing.assert_close(
        first_update(transform, scaled)["w0"], first_update(transform, grads)["w0"], rtol=0.0, atol=1e-3
    )


@pytest.mark.parametrize("scale", ["spectral", "rms"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_gradients_give_zero_updates_then_normal_ones(scale: Scale, dtype: torch.dtype) -> None:
    shape = (4, 6)
    transform, grads = normuon(shape, scale=scale), draw(0, shape, dtype=dtype)
    zeros = tree.map(torch.zeros_like, grads)
    updates, state = transform.update(zeros, transform.init(zeros), zeros, STEP)
    assert torch.equal(updates["w0"], zeros["w0"])
    torch.testing.assert_close(
        transform.update(grads, state, grads, STEP)[0]["w0"], first_update(transform, grads)["w0"]
    )


@pytest.mark.parametrize("scale", ["spectral", "rms"])
def test_neurons_and_inputs_without_gradient_stay_finite_and_still(scale: Scale) -> None:
    grads = draw(0, (6, 5), dtype=torch.float32)
    grads["w0"][:, 2] = 0.0
    grads["w0"][4] = 0.0
    update = first_update(normuon((6, 5), scale=scale), grads)["w0"]
    assert torch.isfinite(update).all()
    assert not update[:, 2].any()
    assert not update[4].any()


@given(rows=sides, columns=sides, seed=seeds, scale=scales)
def test_matrices_moved_together_equal_matrices_moved_one_by_one(
    rows: int, columns: int, seed: int, scale: Scale
) -> None:
    shapes = (
        (rows, columns),
        (columns, rows),
        (rows, columns),
        (3, rows, columns),
        (rows, columns),
        (3, rows, columns),
    )
    together, grads = normuon(*shapes, scale=scale), draw(seed, *shapes)
    updates, state = together.update(grads, together.init(grads), grads, STEP)
    updates, state = together.update(grads, state, grads, STEP)
    for name, grad in grads.items():
        for i in range(3 if grad.ndim == 3 else 1):
            matrix = {"w0": grad[i] if grad.ndim == 3 else grad}
            alone = normuon(tuple(matrix["w0"].shape), scale=scale)
            _, memory = alone.update(matrix, alone.init(matrix), matrix, STEP)
            wanted, memory = alone.update(matrix, memory, matrix, STEP)
            got = updates[name][i] if grad.ndim == 3 else updates[name]
            torch.testing.assert_close(got, wanted["w0"], rtol=1e-9, atol=1e-11)


def test_experts_keep_a_second_moment_for_each_neuron_of_each_expert() -> None:
    transform, grads = normuon((3, 4, 6)), draw(0, (3, 4, 6), dtype=torch.float32)
    state = transform.init(grads)
    assert state.square["w0"].shape == (3, 1, 6)
    changed = {"w0": torch.cat([grads["w0"][:1], 7 * grads["w0"][1:].flip(0)])}
    before, after = first_update(transform, grads)["w0"], first_update(transform, changed)["w0"]
    assert torch.equal(before[0], after[0])
    assert not torch.allclose(before[1], after[1])


@pytest.mark.parametrize(
    "leaf",
    [
        ParamSpec(("n", "m"), (4, 3), "matrix", "m"),
        ParamSpec(("d", "h", "k"), (4, 2, 3), "matrix", "d"),
        ParamSpec(("d",), (4,), "vector", "d"),
    ],
)
def test_parameter_that_is_not_stored_in_out_is_an_error(leaf: ParamSpec) -> None:
    with pytest.raises(ValueError, match=r"parameter odd has the axes .* give it to another group"):
        scale_by_normuon({"odd": leaf}, 0.95, beta2=0.95, eps=1e-8)
