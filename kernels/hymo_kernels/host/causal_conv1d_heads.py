"""Queries, keys and values of a linear-attention layer out of its projected rows: convolution, SiLU, rotation."""

from typing import Literal

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from hymo_kernels.host.causal_conv1d import causal_conv1d, takes_triton
from hymo_kernels.host.rotation import rotated
from hymo_kernels.host.triton_causal_conv1d_heads import triton_causal_conv1d_heads


def causal_conv1d_heads(
    x: Float[Tensor, "b t c"],
    weight: Float[Tensor, "c w"],
    cos: Float[Tensor, "b t 1 half"],
    sin: Float[Tensor, "b t 1 half"],
    *,
    key_heads: int,
    key_dim: int,
    value_heads: int,
    position: Int[Tensor, "b t"] | None = None,
    initial_state: Float[Tensor, "b w-1 c"] | None = None,
    output_final_state: bool = False,
    backend: Literal["eager", "triton"] | None = None,
) -> tuple[
    Float[Tensor, "b t {key_heads} {key_dim}"],
    Float[Tensor, "b t {key_heads} {key_dim}"],
    Float[Tensor, "b t {value_heads} v"],
    Float[Tensor, "b w-1 c"] | None,
]:
    """`q, k, v = split(silu(causal_conv1d(x, weight)))` by heads, q and k rotated on their first `2 half` features.

    Args:
        x: of every token all heads' queries, then keys, then values.
        cos, sin: of every token's angles, fp32; no angles is no rotation. They get no gradient.
        position, initial_state, output_final_state: as of `causal_conv1d`.
        backend: "triton" (one kernel for 2 to 8 taps of 16-bit or fp32 numbers on an NVIDIA GPU, which rounds once,
            writes q, k and v as they are read, and keeps nothing but its inputs for the backward; with a state the
            convolution's kernel, then PyTorch), or "eager", plain PyTorch for anything; None is "triton" wherever it
            is available.

    Returns:
        q, k and v in x's dtype, and the state or None.

    Raises:
        ValueError: if the features are not those of the heads, or a backend is not available.
    """
    half, keys = cos.shape[-1], key_heads * key_dim
    values = x.shape[2] - 2 * keys
    if values <= 0 or values % value_heads:
        raise ValueError(
            f"causal_conv1d_heads: x needs 2 * {key_heads} * {key_dim} features and a multiple of {value_heads} "
            f"values; got {x.shape[2]}"
        )
    if 2 * half > key_dim:
        raise ValueError(f"causal_conv1d_heads: a key of {key_dim} features has no {half} pairs to rotate")
    without_state = initial_state is None and not output_final_state
    if without_state and takes_triton(x, weight, backend=backend):
        q, k, v = triton_causal_conv1d_heads(
            x, weight, position, cos.detach(), sin.detach(), key_heads, key_dim, value_heads
        )
        return q, k, v, None
    y, end = causal_conv1d(
        x,
        weight,
        position=position,
        activation="silu",
        initial_state=initial_state,
        output_final_state=output_final_state,
        backend=backend,
    )
    q, k, v = torch.split(y, [keys, keys, values], dim=-1)
    q, k = (rotated(rearrange(each, "b t (g k) -> b t g k", g=key_heads), cos, sin) for each in (q, k))
    return q, k, rearrange(v, "b t (h v) -> b t h v", h=value_heads), end
