"""What the experts of a mixture answer: each a SwiGLU of the tokens that chose it, within its capacity."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from hymo_kernels.host.grouped_linear import grouped_linear
from hymo_kernels.host.seats import assign_seats, combine, dispatch, pack_seats

ROW = 8
"""Numbers of 16 bits that a row of a grouped product's matrices is a multiple of."""


def routed_swiglu(
    x: Float[Tensor, "b t d"],
    expert: Int[Tensor, "b t k"],
    weight: Float[Tensor, "b t k"],
    gate: Float[Tensor, "e d f"],
    up: Float[Tensor, "e d f"],
    down: Float[Tensor, "e f d"],
    *,
    capacity: int,
    backend: Literal["eager", "grouped"] | None = None,
) -> tuple[Float[Tensor, "b t d"], Float[Tensor, ""]]:
    """For each token the sum of its experts' answers `down(silu(gate x) * up x)` by its weights, and how many are lost.

    Args:
        expert: the different experts that each token chose.
        weight: of each choice, >= 0; answers are weighed and added up in fp32.
        capacity: how many tokens of one row an expert serves, from 1 on: those with the highest weights, among equals
            the first. The others lose its answer.
        backend: "eager", the definition, in which every expert multiplies as many rows as it has capacity for, filled
            or not; "grouped", in which it multiplies the filled ones only (bf16, d and f multiples of 8, on a Hopper
            GPU or a CPU); None is "grouped" on a GPU where that serves, else "eager".

    Raises:
        ValueError: for an unknown backend, or if "grouped" is asked for and cannot serve.
        NotImplementedError: for a second derivative.

    Source: Gale et al. 2022, arXiv:2211.15841, for products over filled rows only.
    """
    linear: Callable[[Tensor, Tensor], Tensor] = _linear
    if _takes_groups(x, gate, backend=backend):
        seats, ends = pack_seats(expert, weight, experts=gate.shape[0], capacity=capacity)
        linear = partial(grouped_linear, ends=ends)
    else:
        seats = assign_seats(expert, weight, experts=gate.shape[0], capacity=capacity)
    rows = dispatch(rearrange(x, "b t d -> 1 (b t) d"), seats)
    y = linear(F.silu(linear(rows, gate)) * linear(rows, up), down)
    answered = combine(y, rearrange(weight, "b t k -> 1 (b t) k"), seats)
    lost = (seats.of_choice == y.shape[1]).sum().float()
    return rearrange(answered, "1 (b t) d -> b t d", b=x.shape[0]), lost


def groups_serve(x: Float[Tensor, "b t d"], gate: Float[Tensor, "e d f"]) -> bool:
    """Whether there are grouped products of such numbers, on a device that has any."""
    return x.dtype == gate.dtype == torch.bfloat16 and all(size % ROW == 0 for size in gate.shape[1:])


def _takes_groups(x: Tensor, gate: Tensor, *, backend: str | None) -> bool:
    if backend not in (None, "eager", "grouped"):
        raise ValueError(f"routed_swiglu: backend must be 'eager', 'grouped' or None; got {backend!r}")
    on_gpu = x.device.type == "cuda" and torch.cuda.get_device_capability(x.device)[0] == 9
    served = groups_serve(x, gate) and (on_gpu or x.device.type == "cpu")
    if backend == "grouped" and not served:
        raise ValueError(
            f"routed_swiglu: backend='grouped' takes bfloat16 on a Hopper GPU or a CPU, d and f that {ROW} divides; "
            f"x is {x.dtype} on {x.device}, d and f are {gate.shape[1]} and {gate.shape[2]}; 'eager' takes all of them"
        )
    return backend == "grouped" or (backend is None and served and on_gpu)


def _linear(x: Float[Tensor, "1 s d"], w: Float[Tensor, "e d f"]) -> Float[Tensor, "1 s f"]:
    """The seats of each expert times its matrix: those of all rows at once, for which no matrix is copied."""
    rows = rearrange(x, "1 (e s) d -> e s d", e=w.shape[0])
    return rearrange(rows @ w, "e s f -> 1 (e s) f")
