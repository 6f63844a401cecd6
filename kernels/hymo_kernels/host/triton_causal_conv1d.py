"""The causal convolution on NVIDIA GPUs: what is launched, and on how many programs."""

import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hymo_kernels.host.gated_delta_call import multiprocessors
from hymo_kernels.primitive import define, differentiable

HAS_TRITON = importlib.util.find_spec("triton") is not None

CHANNELS = 128
"""Of one program, a single warp: 8 bytes a thread and row for 16-bit numbers."""

FORWARD_AHEAD, BACKWARD_AHEAD = 8, 4
"""Rows that a program loads ahead of their use: as many as keep a multiprocessor's warps in registers."""

WIDEST = 8
"""Taps."""

LONGEST, SHORTEST, PROGRAMS = 128, 16, 16
"""Tokens a program walks at most and at least, and programs a multiprocessor that it walks fewer for."""


class Shape(NamedTuple):
    """Sizes of one call, and how its tokens are cut."""

    b: int
    t: int
    c: int
    w: int
    sequences: int  # of one batch row
    packed: bool


def shape_of(x: Tensor, weight: Tensor, cu_seqlens: Tensor | None) -> Shape:
    """The shape of a call."""
    sequences = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    b, t, c = x.shape
    return Shape(b, t, c, weight.shape[1], sequences, cu_seqlens is not None)


def unavailable(x: Tensor, weight: Tensor) -> str | None:
    """Why there is no kernel for these tensors; None if there is one."""
    if x.device.type != "cuda":
        return f"it needs tensors on an NVIDIA GPU, these are on {x.device.type}"
    if not HAS_TRITON:
        return "Triton is not installed"
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it computes bfloat16, float16 and float32, x is {x.dtype}"
    if not 2 <= weight.shape[1] <= WIDEST:
        return f"it has 2 to {WIDEST} taps, weight has {weight.shape[1]}"
    return None


def chunks_of(shape: Shape, device: int | None) -> tuple[int, int]:
    """Tokens a program walks, and programs along time."""
    return walks_of(shape.b * -(-shape.c // _block(shape)), shape.t, device)


def walks_of(columns: int, time: int, device: int | None) -> tuple[int, int]:
    """How `time` is cut: long walks, but enough of them to fill the card with `columns` programs along each."""
    length = LONGEST
    while length > SHORTEST and columns * -(-time // length) < PROGRAMS * multiprocessors(device):
        length //= 2
    return length, -(-time // length)


def _block(shape: Shape) -> int:
    return min(CHANNELS, max(32, 1 << (shape.c - 1).bit_length()))


def _aligned(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _places(shape: Shape, position: Tensor | None, cu_seqlens: Tensor | None, like: Tensor) -> tuple[Any, ...]:
    """The furthest live tap of each token, its strides, and its sequence; tensors that are not read where all live."""
    from hymo_kernels.device.convolution import offsets_kernel

    if cu_seqlens is None:
        return (like, 0, 0, like) if position is None else (position, *position.stride(), like)
    offset, sequence = (torch.empty(shape.t, dtype=torch.int32, device=like.device) for _ in range(2))
    offsets_kernel[(-(-shape.t // 128),)](
        cu_seqlens, offset, sequence, shape.t, shape.sequences, BLOCK=128, num_warps=4
    )
    return offset, 0, 1, sequence


def _sizes(shape: Shape, position: Tensor | None, bias: Tensor | None, silu: bool) -> dict[str, Any]:
    return {
        "C": shape.c,
        "W": shape.w,
        "BLOCK": _block(shape),
        "PACKED": shape.packed,
        "MASKED": shape.packed or position is not None,
        "HAS_BIAS": bias is not None,
        "SILU": silu,
        "num_warps": 1,
    }


def forward(
    x: Tensor,
    weight: Tensor,
    position: Tensor | None,
    bias: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    silu: bool,
    keep_end: bool,
) -> tuple[Tensor, Tensor]:
    """The filtered sequence, and the last inputs (an empty tensor unless kept)."""
    from hymo_kernels.device.convolution import end_kernel, forward_kernel

    x, state = _aligned(x), state if state is None else _aligned(state)
    shape = shape_of(x, weight, cu_seqlens)
    y, end = _forward_outputs(x, weight, cu_seqlens, keep_end)
    strides_s = (0, 0) if state is None else state.stride()[:2]
    sizes, blocks = _sizes(shape, position, bias, silu), -(-shape.c // _block(shape))
    if shape.packed and shape.sequences == 0:
        return y.zero_(), end
    with torch.cuda.device(x.get_device()):
        if y.numel() > 0:
            at, stride_ab, stride_at, sequence = _places(shape, position, cu_seqlens, x)
            length, chunks = chunks_of(shape, x.device.index)
            forward_kernel[(shape.b * chunks * blocks,)](
                x,
                weight,
                x if bias is None else bias,
                at,
                sequence,
                x if state is None else state,
                y,
                *x.stride()[:2],
                *weight.stride(),
                stride_ab,
                stride_at,
                *strides_s,
                shape.t,
                length,
                chunks,
                shape.sequences,
                **sizes,
                UNROLL=FORWARD_AHEAD,
                HAS_STATE=state is not None,
            )
        if keep_end and end.numel() > 0:
            end_kernel[(shape.b * shape.sequences * blocks,)](
                x,
                x if state is None else state,
                x if cu_seqlens is None else cu_seqlens,
                end,
                *x.stride()[:2],
                *strides_s,
                shape.t,
                shape.sequences,
                **{name: sizes[name] for name in ("C", "W", "BLOCK", "PACKED", "num_warps")},
                HAS_STATE=state is not None,
            )
    return y, end


def _forward_outputs(x: Tensor, weight: Tensor, cu_seqlens: Tensor | None, keep_end: bool) -> tuple[Tensor, Tensor]:
    shape = shape_of(x, weight, cu_seqlens)
    count = (shape.b * shape.sequences, shape.w - 1, shape.c) if keep_end else (shape.b, 0)
    return (
        torch.empty(shape.b, shape.t, shape.c, dtype=x.dtype, device=x.device),
        torch.empty(count, dtype=x.dtype, device=x.device),
    )


def backward(
    x: Tensor,
    weight: Tensor,
    position: Tensor | None,
    bias: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    dy: Tensor,
    d_end: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `forward`: of x, weight, bias and state, empty where there is none."""
    from hymo_kernels.device.convolution import backward_kernel, start_kernel

    x, dy = _aligned(x), _aligned(dy)
    state, d_end = (each if each is None else _aligned(each) for each in (state, d_end))
    shape = shape_of(x, weight, cu_seqlens)
    dx, d_weight, d_bias, d_state = _backward_outputs(x, weight, bias, state, cu_seqlens)
    strides_s, strides_e = ((0, 0) if each is None else each.stride()[:2] for each in (state, d_end))
    sizes, blocks = _sizes(shape, position, bias, silu), -(-shape.c // _block(shape))
    if shape.packed and shape.sequences == 0:
        return dx.zero_(), d_weight.zero_(), d_bias.zero_(), d_state
    with torch.cuda.device(x.get_device()):
        at, stride_ab, stride_at, sequence = (x, 0, 0, x)
        if dx.numel() > 0:
            at, stride_ab, stride_at, sequence = _places(shape, position, cu_seqlens, x)
            length, chunks = chunks_of(shape, x.device.index)
            by_tap = torch.empty(shape.b * chunks, shape.w, shape.c, dtype=torch.float32, device=x.device)
            by_bias = torch.empty(shape.b * chunks, d_bias.shape[0], dtype=torch.float32, device=x.device)
            backward_kernel[(shape.b * chunks * blocks,)](
                x,
                weight,
                x if bias is None else bias,
                at,
                sequence,
                x if state is None else state,
                dy,
                dy if d_end is None else d_end,
                x if cu_seqlens is None else cu_seqlens,
                dx,
                by_tap,
                by_bias,
                *x.stride()[:2],
                *weight.stride(),
                stride_ab,
                stride_at,
                *strides_s,
                *dy.stride()[:2],
                *strides_e,
                shape.t,
                length,
                chunks,
                shape.sequences,
                **sizes,
                UNROLL=BACKWARD_AHEAD,
                HAS_STATE=state is not None,
                HAS_END=d_end is not None,
            )
            d_weight.copy_(by_tap.sum(0).mT)
            d_bias.copy_(by_bias.sum(0))
        else:
            d_weight.zero_()
            d_bias.zero_()
        if state is not None and state.numel() > 0:
            start_kernel[(shape.b * shape.sequences * blocks,)](
                x,
                weight,
                x if bias is None else bias,
                at,
                state,
                dy,
                dy if d_end is None else d_end,
                x if cu_seqlens is None else cu_seqlens,
                d_state,
                *x.stride()[:2],
                *weight.stride(),
                stride_ab,
                stride_at,
                *strides_s,
                *dy.stride()[:2],
                *strides_e,
                shape.t,
                shape.sequences,
                **sizes,
                HAS_END=d_end is not None,
            )
    return dx, d_weight, d_bias, d_state


def _backward_outputs(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def new(shape: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    return (
        new(x.shape, x.dtype),
        new(weight.shape, weight.dtype),
        new(0, x.dtype) if bias is None else new(bias.shape, bias.dtype),
        new((x.shape[0], 0), x.dtype) if state is None else new(state.shape, state.dtype),
    )


INPUTS = "Tensor x, Tensor weight, Tensor? position, Tensor? bias, Tensor? state, Tensor? cu_seqlens"
FORWARD = define(
    f"causal_conv1d_forward({INPUTS}, bool silu, bool keep_end) -> (Tensor, Tensor)",
    fake=lambda x, weight, position, bias, state, cu_seqlens, silu, keep_end: _forward_outputs(
        x, weight, cu_seqlens, keep_end
    ),
    cuda=forward,
)
BACKWARD = define(
    f"causal_conv1d_backward({INPUTS}, Tensor dy, Tensor? d_end, bool silu) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=lambda x, weight, position, bias, state, cu_seqlens, *others: _backward_outputs(
        x, weight, bias, state, cu_seqlens
    ),
    cuda=backward,
)


def _causal_conv1d(*arguments: Any) -> tuple[Tensor, ...]:
    y, end = FORWARD(*arguments)
    return y, end


def _gradients(
    needs: tuple[bool, ...], arguments: tuple[Any, ...], outputs: tuple[Any, ...], grads: tuple[Any, ...]
) -> tuple[Tensor | None, ...]:
    x, weight, position, bias, state, cu_seqlens, silu, keep_end = arguments
    dy = torch.zeros_like(x) if grads[0] is None else grads[0]
    d_end = grads[1] if keep_end else None
    dx, d_weight, d_bias, d_state = BACKWARD(x, weight, position, bias, state, cu_seqlens, dy, d_end, silu)
    return (
        dx,
        d_weight,
        None,
        None if bias is None else d_bias,
        None if state is None else d_state,
        None,
        None,
        None,
    )


triton_causal_conv1d = differentiable(_causal_conv1d, _gradients, save=(0, 1, 2, 3, 4, 5), shared=(1, 3, 5))
