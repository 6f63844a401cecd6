"""The convolution of queries, keys and values on NVIDIA GPUs: what is launched, and on how many programs."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hymo_kernels.host.triton_causal_conv1d import walks_of
from hymo_kernels.primitive import define, differentiable


class Plan(NamedTuple):
    """What one warp works on."""

    pairs: int  # of features that it rotates, or
    block: int  # features that it passes on
    ahead: int  # rows that it loads ahead of their use
    registers: int  # of a thread, at most: what it needs at 16 bits and 4 taps


FORWARD_PLAN = Plan(pairs=64, block=128, ahead=8, registers=112)
BACKWARD_PLAN = Plan(pairs=64, block=128, ahead=4, registers=128)
"""The backward's is the fastest of twelve on an H200 (Triton 3.6) at 4 x 4096 x 14 heads of 128, 202 us; the forward's
of eight, 123 us."""

SUMMED, SUMMED_ROWS = 32, 64
"""Weights whose gradients a program adds up, and rows of terms that it loads at once: the fastest of five, 9 us."""


class Heads(NamedTuple):
    """Sizes of heads: what a row is cut into."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    half: int  # pairs that are rotated

    @property
    def keys(self) -> int:
        """Features of all keys, and of all queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Features of all values."""
        return self.value_heads * self.value_dim


def heads_of(x: Tensor, cos: Tensor, key_heads: int, key_dim: int, value_heads: int) -> Heads:
    """The sizes of a call's heads."""
    values = x.shape[2] - 2 * key_heads * key_dim
    return Heads(key_heads, key_dim, value_heads, values // value_heads, cos.shape[-1])


def _lanes(most: int, features: int) -> int:
    """Of a program: no more than there are features for, and at least one a thread."""
    return min(most, max(32, 1 << (features - 1).bit_length()))


def _launch(x: Tensor, weight: Tensor, position: Tensor | None, heads: Heads, plan: Plan) -> tuple[Any, int, int, Any]:
    """Grid, tokens a program walks, programs along time, and the sizes that a kernel is compiled for."""
    turned, passed = heads.key_heads * heads.half, heads.key_heads * (heads.key_dim - 2 * heads.half)
    pairs, block = _lanes(plan.pairs, turned), _lanes(plan.block, max(passed, heads.values))
    parts = 2 * -(-turned // pairs) + 2 * -(-passed // block) + -(-heads.values // block)
    length, chunks = walks_of(x.shape[0] * parts, x.shape[1], x.device.index)
    sizes = {
        "HEADS": heads.key_heads,
        "DIM": heads.key_dim,
        "HALF": heads.half,
        "VALUE_HEADS": heads.value_heads,
        "VALUE_DIM": heads.value_dim,
        "W": weight.shape[1],
        "PAIRS": pairs,
        "BLOCK": block,
        "UNROLL": plan.ahead,
        "MASKED": position is not None,
        "num_warps": 1,
        "maxnreg": plan.registers if x.element_size() == 2 and weight.shape[1] <= 4 else None,
    }
    return (x.shape[0] * chunks * parts,), length, chunks, sizes


def _inputs(x: Tensor, position: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As the kernels read them: features side by side, angles without gaps, and anything for a position not read."""
    x = _aligned(x)
    return x, x if position is None else position, cos.contiguous(), sin.contiguous()


def _aligned(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def forward(
    x: Tensor,
    weight: Tensor,
    position: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    key_heads: int,
    key_dim: int,
    value_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values by heads."""
    from hymo_kernels.device.convolution_heads import conv_heads_forward_kernel

    heads = heads_of(x, cos, key_heads, key_dim, value_heads)
    q, k, v = _outputs(x, heads)
    if x.numel() == 0:
        return q, k, v
    x, at, cos, sin = _inputs(x, position, cos, sin)
    with torch.cuda.device(x.get_device()):
        grid, length, chunks, sizes = _launch(x, weight, position, heads, FORWARD_PLAN)
        conv_heads_forward_kernel[grid](
            x,
            weight,
            at,
            cos,
            sin,
            q,
            k,
            v,
            *x.stride()[:2],
            *weight.stride(),
            *at.stride()[:2],
            x.shape[1],
            length,
            chunks,
            **sizes,
        )
    return q, k, v


def _outputs(x: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    key, value = (heads.key_heads, heads.key_dim), (heads.value_heads, heads.value_dim)
    q, k, v = (torch.empty(*x.shape[:2], *sizes, dtype=x.dtype, device=x.device) for sizes in (key, key, value))
    return q, k, v


def backward(
    x: Tensor,
    weight: Tensor,
    position: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> tuple[Tensor, Tensor]:
    """The gradients of `forward`: of x and weight."""
    from hymo_kernels.device.convolution_heads import conv_heads_backward_kernel, sum_taps_kernel

    heads = heads_of(x, cos, dq.shape[2], dq.shape[3], dv.shape[2])
    dx, d_weight = _gradients_like(x, weight)
    if x.numel() == 0:
        return dx, d_weight.zero_()
    x, at, cos, sin = _inputs(x, position, cos, sin)
    dq, dk, dv = (_aligned(each) for each in (dq, dk, dv))
    with torch.cuda.device(x.get_device()):
        grid, length, chunks, sizes = _launch(x, weight, position, heads, BACKWARD_PLAN)
        by_tap = torch.empty(x.shape[0] * chunks, weight.shape[1], x.shape[2], dtype=torch.float32, device=x.device)
        conv_heads_backward_kernel[grid](
            x,
            weight,
            at,
            cos,
            sin,
            dq,
            dk,
            dv,
            dx,
            by_tap,
            *x.stride()[:2],
            *weight.stride(),
            *at.stride()[:2],
            *dq.stride()[:3],
            *dk.stride()[:3],
            *dv.stride()[:3],
            x.shape[1],
            length,
            chunks,
            **sizes,
        )
        # Not by PyTorch, which takes two launches and twice the time.
        sum_taps_kernel[(-(-weight.numel() // SUMMED),)](
            by_tap,
            d_weight,
            by_tap.shape[0],
            C=x.shape[2],
            W=weight.shape[1],
            BLOCK=SUMMED,
            ROWS=SUMMED_ROWS,
            num_warps=4,
        )
    return dx, d_weight


def _gradients_like(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    dx, d_weight = (torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (x, weight))
    return dx, d_weight


INPUTS = "Tensor x, Tensor weight, Tensor? position, Tensor cos, Tensor sin"
FORWARD = define(
    f"causal_conv1d_heads_forward({INPUTS}, int key_heads, int key_dim, int value_heads) -> (Tensor, Tensor, Tensor)",
    fake=lambda x, weight, position, cos, sin, *sizes: _outputs(x, heads_of(x, cos, *sizes)),
    cuda=forward,
)
BACKWARD = define(
    f"causal_conv1d_heads_backward({INPUTS}, Tensor dq, Tensor dk, Tensor dv) -> (Tensor, Tensor)",
    fake=lambda x, weight, *others: _gradients_like(x, weight),
    cuda=backward,
)


def _causal_conv1d_heads(*arguments: Any) -> tuple[Tensor, ...]:
    q, k, v = FORWARD(*arguments)
    return q, k, v


def _gradients(
    needs: tuple[bool, ...], arguments: tuple[Any, ...], outputs: tuple[Any, ...], grads: tuple[Any, ...]
) -> tuple[Tensor | None, ...]:
    x, _, _, cos, _, *sizes = arguments
    heads = heads_of(x, cos, *sizes)
    key, value = (heads.key_heads, heads.key_dim), (heads.value_heads, heads.value_dim)
    given = (
        x.new_zeros(*x.shape[:2], *shape) if grad is None else grad
        for grad, shape in zip(grads, (key, key, value), strict=True)
    )
    dx, d_weight = BACKWARD(*arguments[:5], *given)
    return dx, d_weight, *(None,) * 6


triton_causal_conv1d_heads = differentiable(_causal_conv1d_heads, _gradients, save=(0, 1, 2, 3, 4), shared=(1,))
