"""NorMuon: orthogonalised momentum, with steps of equal size for every neuron.

Weights are stored (in, out) and used as `x @ w`: a neuron is a column. The sources store (out, in).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from hymo import tree
from hymo.optim.transform import GradientTransform, Step, accumulators
from hymo.params import is_spec
from hymo.stacked import stack, unstack
from hymo_kernels import symmetric_polynomial, symmetric_product

Coefficients = tuple[tuple[float, float, float], ...]
Scale = Literal["spectral", "rms"]
Direction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Work = Callable[[Direction, Sequence[Tensor], Sequence[Tensor]], tuple[list[Tensor], list[Tensor]]]

QUINTIC: Coefficients = ((3.4445, -4.7750, 2.0315),) * 5
"""Steep at 0 and never converging to 1: singular values from 0.01 of the norm to 1 end in [0.68, 1.14].

Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/."""

POLAR_EXPRESS: Coefficients = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
"""The best polynomial for each of five steps, with 2 % of safety: the same singular values end in [0.85, 1.15].

Source: Amsel et al. 2025, arXiv:2505.16932; digits as in https://github.com/KellerJordan/modded-nanogpt."""

LARGEST_NORM = 1e9
"""Of a gradient: squares of squares of what is orthogonalised must be numbers that fp32 and bf16 hold."""


class NormuonState(NamedTuple):
    """What NorMuon remembers."""

    momentum: Any  # running mean of the gradient, fp32 at least
    square: Any  # (..., 1, out): running mean square of each neuron's orthogonalised direction


def scale_by_normuon(
    spec: Any,
    momentum: float,
    *,
    beta2: float,
    eps: float,
    scale: Scale = "spectral",
    coefficients: Coefficients = QUINTIC,
    work: Work | None = None,
) -> GradientTransform:
    """The orthogonalised Nesterov momentum, each neuron divided by the root of its running mean square.

        M = mu M + (1 - mu) G
        O = orthogonalize((1 - mu) G + mu M)
        v = beta2 v + (1 - beta2) mean_in(O^2)
        U = O / (sqrt(v) + eps)
        spectral:  u = sqrt(max(1, out / in)) |O| / |U| U      rms:  u = 0.2 sqrt(in out) / |U| U

    with Frobenius norms over the last two axes; axes before them stack independent matrices. Matrices of one shape
    are worked on together. A zero gradient gives a zero update.

    Args:
        spec: the specs of what is moved, holes elsewhere.
        momentum: mu, in [0, 1).
        beta2: retention of v, in [0, 1).
        eps: keeps U finite; O has entries of about max(in, out)^-0.5.
        scale: `spectral` is the official code's, for learning rates about 0.02; `rms` is the paper's, whose updates
            have RMS 0.2, for learning rates as for AdamW.
        work: who works on which matrix, by default one process on all of them (`by_shape`).

    Raises:
        ValueError: if a spec is not a stack of matrices stored (in, out).

    Source: Li et al. 2025, arXiv:2510.05491, and its code, which differs from the paper by Nesterov and `spectral`.
    """
    for path, leaf in tree.paths(spec, is_leaf=is_spec).items():
        if len(leaf.shape) < 2 or leaf.inputs != leaf.axes[-2]:
            raise ValueError(
                f"NorMuon moves matrices stored (..., in, out), where the inputs are the last axis but one; parameter "
                f"{path} has the axes {' '.join(leaf.axes)!r} and the inputs {leaf.inputs!r}: give it to another group"
            )

    def init(params: Any) -> NormuonState:
        return NormuonState(accumulators(params), accumulators(tree.map(lambda x: x[..., :1, :], params)))

    def direction(ahead: Float[Tensor, "*b m n"], square: Float[Tensor, "*b 1 n"]) -> tuple[Tensor, Tensor]:
        polar = orthogonalize(ahead, coefficients, dtype=polar_dtype(ahead))
        square, scales = neuron_scales(polar, square, beta2=beta2, eps=eps, scale=scale)
        return polar * scales, square

    def update(grads: Any, state: NormuonState, params: Any, step: Step) -> tuple[Any, NormuonState]:
        del params, step
        moving = tree.map(lambda m, g: torch.lerp(m, g, 1 - momentum), state.momentum, grads)
        ahead, structure = tree.flatten(tree.map(lambda m, g: torch.lerp(g, m, momentum), moving, grads))
        updates, squares = (work or by_shape)(direction, ahead, tree.leaves(state.square))
        return tree.unflatten(updates, structure), NormuonState(moving, tree.unflatten(squares, structure))

    return GradientTransform(init, update)


def orthogonalize(
    x: Float[Tensor, "*b m n"], coefficients: Coefficients = QUINTIC, *, dtype: torch.dtype | None = None
) -> Float[Tensor, "*b m n"]:
    """Nearly the orthogonal factor of each matrix: its singular vectors, with singular values pushed towards 1.

        X = x / (|x| + 1e-7);  repeat  A = X X^T,  X = (a I + b A + c A^2) X

    or A = X^T X and X = X (a I + b A + c A^2) where that A is the smaller. The polynomial is rounded to `dtype` once,
    with a on its diagonal (A^2 before too, where no kernel makes both: `symmetric_polynomial`). Were a X added to the
    product instead, bf16 would err less, by 1 % for gradients and up to a fifth for noise, but X would be copied each
    time: a product adds to what it overwrites.

    The norm is the root of the first A's trace, and divides the first polynomial rather than x: x is read once, by what
    rounds it to `dtype`, and no reduction is in the way of what else is made of x there.

    Args:
        x: of norms below `LARGEST_NORM`, whose fourth powers `dtype` holds.
        coefficients: (a, b, c) of each iteration, at least one.
        dtype: of the iteration, by default that of x.
    """
    is_tall = x.shape[-2] > x.shape[-1]
    matrices = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    y = matrices.to(dtype or x.dtype)
    for i, coefficient in enumerate(coefficients):
        gram = symmetric_product(y, transposed=is_tall)
        if i == 0:
            wide = torch.promote_types(y.dtype, torch.float32)
            inverse = 1 / (gram.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=wide).sqrt() + 1e-7)
        factor = symmetric_polynomial(gram, coefficient, inverse if i == 0 else None)
        y = y @ factor if is_tall else factor @ y
    return y.reshape(x.shape).to(x.dtype)


def polar_dtype(x: Tensor) -> torch.dtype:
    """What matrix products are fast in: bf16 on a GPU, where the iteration tolerates it, else x's own dtype."""
    return torch.bfloat16 if x.device.type == "cuda" else x.dtype


def neuron_scales(
    polar: Float[Tensor, "*b m n"], square: Float[Tensor, "*b 1 n"], *, beta2: float, eps: float, scale: Scale
) -> tuple[Float[Tensor, "*b 1 n"], Float[Tensor, "*b 1 n"]]:
    """The next mean squares of the neurons, and the factor on each neuron's direction."""
    rows, columns = polar.shape[-2:]
    now = polar.square().mean(-2, keepdim=True)
    square = torch.lerp(square, now, 1 - beta2)
    scales = 1 / (square.sqrt() + eps)
    # |O| and |U| follow from the neurons' mean squares, without another pass over the matrices.
    norm = (rows * (now * scales.square()).sum(-1, keepdim=True)).sqrt()
    if scale == "rms":
        wanted = torch.full_like(norm, 0.2 * math.sqrt(rows * columns))
    else:
        wanted = (rows * now.sum(-1, keepdim=True)).sqrt() * math.sqrt(max(1.0, columns / rows))
    return square, scales * (wanted / (norm + eps))


def by_shape(f: Direction, first: Sequence[Tensor], second: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """`f` of every pair of tensors, called once for all pairs whose `first` has one shape, stacked on a new axis."""
    members: dict[torch.Size, list[int]] = {}
    for index, x in enumerate(first):
        members.setdefault(x.shape, []).append(index)
    done: dict[int, tuple[Tensor, Tensor]] = {}
    for indices in members.values():
        if len(indices) == 1:
            left, right = f(first[indices[0]][None], second[indices[0]][None])
            done[indices[0]] = left[0], right[0]
            continue
        left, right = f(stack([first[i] for i in indices]), stack([second[i] for i in indices]))
        done |= zip(indices, zip(unstack(left), unstack(right), strict=True), strict=True)
    return [done[i][0] for i in range(len(first))], [done[i][1] for i in range(len(first))]
