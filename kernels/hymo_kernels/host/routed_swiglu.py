"""What the experts of a mixture answer: each a SwiGLU of the tokens that chose it, within its capacity."""

from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from hymo_kernels.host.gated import HAS_TRITON, gated
from hymo_kernels.host.grouped_linear import grouped_linear
from hymo_kernels.host.seats import assign_seats, combine, dispatch, pack_seats

ROW = 8
"""Numbers of 16 bits that a row of a grouped product's matrices is a multiple of."""


def routed_swiglu(
    x: Float[Tensor, "b t d"],
    expert: Int[Tensor, "b t k"],
    weight: Float[Tensor, "b t k"],
    gate: Float[Tensor, "e d g"],
    up: Float[Tensor, "e d f"] | None,
    down: Float[Tensor, "e f d"],
    *,
    capacity: int,
    backend: Literal["eager", "grouped"] | None = None,
) -> tuple[Float[Tensor, "b t d"], Float[Tensor, ""]]:
    """For each token the sum of its experts' answers `down(silu(gate x) * up x)` by its weights, and how many are lost.

    Args:
        expert: the different experts that each token chose.
        weight: of each choice, >= 0; answers are weighed and added up in fp32.
        gate: of width f, or with `up` beside it, which then is None: what "grouped" multiplies by, without a copy.
        capacity: how many tokens of one row an expert serves, from 1 on: those with the highest weights, among equals
            the first. The others lose its answer.
        backend: "eager", the definition, in which every expert multiplies as many rows as it has capacity for, filled
            or not; "grouped", in which it multiplies the filled ones only (bf16, d and f multiples of 8, on a Hopper
            GPU with Triton or a CPU); None is "grouped" on a GPU where that serves, else "eager".

    Raises:
        ValueError: for an unknown backend, or if "grouped" is asked for and cannot serve.
        NotImplementedError: for a second derivative.

    Source: Gale et al. 2022, arXiv:2211.15841, for products over filled rows only.
    """
    tokens = rearrange(x, "b t d -> 1 (b t) d")
    if _takes_groups(x, down, backend=backend):
        seats, ends = pack_seats(expert, weight, experts=gate.shape[0], capacity=capacity)
        rows = dispatch(tokens, seats)
        # As one product that is twice as wide: rows are read once, and their gradient is one sum.
        both = gate if up is None else torch.cat([gate, up], dim=-1)
        y = grouped_linear(gated(grouped_linear(rows, both, ends), ends), down, ends)
    else:
        gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
        seats = assign_seats(expert, weight, experts=gate.shape[0], capacity=capacity)
        rows = dispatch(tokens, seats)
        y = _linear(F.silu(_linear(rows, gate)) * _linear(rows, up), down)
    answered = combine(y, rearrange(weight, "b t k -> 1 (b t) k"), seats)
    lost = (seats.of_choice == y.shape[1]).sum().float()
    return rearrange(answered, "1 (b t) d -> b t d", b=x.shape[0]), lost


def groups_serve(x: Float[Tensor, "b t d"], down: Float[Tensor, "e f d"]) -> bool:
    """Whether there are grouped products of such numbers, on a device that has any."""
    return x.dtype == down.dtype == torch.bfloat16 and all(size % ROW == 0 for size in down.shape[1:])


def _takes_groups(x: Tensor, down: Tensor, *, backend: str | None) -> bool:
    if backend not in (None, "eager", "grouped"):
        raise ValueError(f"routed_swiglu: backend must be 'eager', 'grouped' or None; got {backend!r}")
    on_gpu = x.device.type == "cuda" and HAS_TRITON and torch.cuda.get_device_capability(x.device)[0] == 9
    served = groups_serve(x, down) and (on_gpu or x.device.type == "cpu")
    if backend == "grouped" and not served:
        raise ValueError(
            f"routed_swiglu: backend='grouped' takes bfloat16 on a Hopper GPU with Triton or a CPU, d and f that "
            f"{ROW} divides; x is {x.dtype} on {x.device}, d and f are {down.shape[2]} and {down.shape[1]}; "
            "'eager' takes all of them"
        )
    return backend == "grouped" or (backend is None and served and on_gpu)


def _linear(x: Float[Tensor, "1 s d"], w: Float[Tensor, "e d f"]) -> Float[Tensor, "1 s f"]:
    """The seats of each expert times its matrix: those of all rows at once, for which no matrix is copied."""
    rows = rearrange(x, "1 (e s) d -> e s d", e=w.shape[0])
    return rearrange(rows @ w, "e s f -> 1 (e s) f")
