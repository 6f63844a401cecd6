"""Document-isolated attention on NVIDIA GPUs: what is launched, on how many programs, and with which tiles."""

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hymo_kernels.primitive import define, differentiable


class Tiles(NamedTuple):
    """How one kernel is cut: pairs of token and query head, and keys, at a time; warps, software pipeline stages."""

    pairs: int
    keys: int
    warps: int
    stages: int


class Plan(NamedTuple):
    """The tiles of every kernel."""

    forward: Tiles
    query_backward: Tiles
    key_backward: Tiles


PLANS: dict[int, Plan] = {
    64: Plan(Tiles(128, 64, 4, 3), Tiles(128, 64, 8, 2), Tiles(64, 64, 4, 2)),
    128: Plan(Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
    256: Plan(Tiles(128, 32, 8, 2), Tiles(64, 32, 8, 2), Tiles(32, 64, 8, 1)),
}
"""By the width of keys or of values, whichever is wider, that they are made for at most. Pairs are powers of two.

128: the fastest of 22 tilings on an H200 (Triton 3.6), in documents of 800 tokens, while a program copied its queries
into registers; since then they stand in shared memory, and two stages of keys in `query_backward` leave room for two
programs there. 64 and 256 are not measured."""

PADDING = 128
"""Sums are kept for a multiple of so many pairs, as the device expects: the most of any tile."""

WIDEST = 256
DTYPES = (torch.bfloat16, torch.float16)

# Looked up once: a compiler cannot trace it.
HAS_TRITON = importlib.util.find_spec("triton") is not None


class Shape(NamedTuple):
    """Sizes of one call."""

    b: int
    t: int
    g: int  # key heads
    r: int  # query heads of each
    k: int
    v: int


def shape_of(q: Tensor, v: Tensor) -> Shape:
    """The shape of a call."""
    b, t, h, k = q.shape
    return Shape(b, t, v.shape[2], h // v.shape[2], k, v.shape[3])


def unavailable(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why there is no kernel for these tensors; None if there is one."""
    if q.device.type != "cuda":
        return f"it needs tensors on an NVIDIA GPU, these are on {q.device.type}"
    if not HAS_TRITON:
        return "Triton is not installed"
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"q, k and v must be all bfloat16 or all float16, got {q.dtype}, {k.dtype} and {v.dtype}"
    if not all(0 < width <= WIDEST for width in (q.shape[-1], v.shape[-1])):
        return f"keys and values are 1 to {WIDEST} wide, got {q.shape[-1]} and {v.shape[-1]}"
    return None


def plan_of(shape: Shape) -> Plan:
    """The tiles of a call."""
    return next(plan for widest, plan in PLANS.items() if max(shape.k, shape.v) <= widest)


def _block(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


@functools.cache
def _has_copy_engine(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def copied(q: Tensor, shape: Shape, plan: Plan) -> bool:
    """Whether the copy engine brings the tiles of loops: of whole tokens, in rows that start where 16 bytes do."""
    whole = plan.key_backward.pairs % shape.r == 0
    return whole and shape.k % 8 == 0 and shape.v % 8 == 0 and _has_copy_engine(q.device)


def _aligned(x: Tensor, copied: bool) -> Tensor:
    """The same numbers in dense rows, which for the copy engine start where 16 bytes do."""
    placed = not copied or (x.data_ptr() % 16 == 0 and all(s > 0 and s % 8 == 0 for s in x.stride()[:-1]))
    return x if x.stride(-1) == 1 and placed else x.clone(memory_format=torch.contiguous_format)


def _as_read(shape: Shape, tiles: Tiles, copied: bool) -> tuple[Callable[[Tensor], Any], ...]:
    """How a loop is given what belongs to query heads, what to key heads, and sums of pairs."""
    if not copied:
        return (lambda x: x,) * 3
    from triton.tools.tensor_descriptor import TensorDescriptor

    def told(x: Tensor, *block: int) -> Any:
        return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))

    return (
        lambda x: told(x, 1, tiles.pairs // shape.r, shape.r, _block(x.shape[-1])),
        lambda x: told(x, 1, tiles.keys, 1, _block(x.shape[-1])),
        lambda x: told(x.flatten(0, 1), 1, tiles.pairs),
    )


def _cut(shape: Shape, tiles: Tiles, copied: bool) -> dict[str, Any]:
    return {
        "B": shape.b,
        "T": shape.t,
        "G": shape.g,
        "R": shape.r,
        "K": shape.k,
        "V": shape.v,
        "BLOCK_K": _block(shape.k),
        "BLOCK_V": _block(shape.v),
        "PAIRS": tiles.pairs,
        "KEYS": tiles.keys,
        "COPIED": copied,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }


def _strides(*tensors: Tensor) -> list[int]:
    """Of the first three axes, or of both of `position`."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def forward(q: Tensor, k: Tensor, v: Tensor, position: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Read-outs, and the logarithm (base 2) of the sum of exponentials behind each."""
    from hymo_kernels.device.attention import forward_kernel

    shape = shape_of(q, v)
    o, lse = _forward_outputs(q, v)
    plan = plan_of(shape)
    if o.numel() > 0:
        tiles, by_copy = plan.forward, copied(q, shape, plan)
        _, keys, _ = _as_read(shape, tiles, by_copy)
        q, k, v = (_aligned(x, by_copy) for x in (q, k, v))
        with torch.cuda.device(q.get_device()):
            forward_kernel[(shape.b * shape.g * -(-shape.t * shape.r // tiles.pairs),)](
                *(q, keys(k), keys(v), position, o, lse),
                *_strides(q, k, v, position),
                scale * math.log2(math.e),
                **_cut(shape, tiles, by_copy),
            )
    return o, lse


def _forward_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    shape = shape_of(q, v)
    padded = -(-shape.t * shape.r // PADDING) * PADDING
    return (
        torch.empty(shape.b, shape.t, shape.g * shape.r, shape.v, dtype=q.dtype, device=q.device),
        torch.empty(shape.b, shape.g, padded, dtype=torch.float32, device=q.device),
    )


def backward(
    q: Tensor, k: Tensor, v: Tensor, position: Tensor, o: Tensor, lse: Tensor, do: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `forward`: of q, k and v."""
    from hymo_kernels.device.attention import key_backward_kernel, query_backward_kernel

    shape = shape_of(q, v)
    dq, dk, dv = _backward_outputs(q, k, v)
    plan, scales = plan_of(shape), (scale * math.log2(math.e), scale)
    if o.numel() > 0:
        by_copy = copied(q, shape, plan)
        q, k, v, o, do = (_aligned(x, by_copy) for x in (q, k, v, o, do))
        delta = torch.empty_like(lse)
        with torch.cuda.device(q.get_device()):
            tiles = plan.query_backward
            _, keys, _ = _as_read(shape, tiles, by_copy)
            query_backward_kernel[(shape.b * shape.g * -(-shape.t * shape.r // tiles.pairs),)](
                *(q, keys(k), keys(v), position, o, lse, do, dq, delta),
                *_strides(q, k, v, position, o, do),
                *scales,
                **_cut(shape, tiles, by_copy),
            )
            tiles = plan.key_backward
            queries, _, sums = _as_read(shape, tiles, by_copy)
            key_backward_kernel[(shape.b * shape.g * -(-shape.t // tiles.keys),)](
                *(queries(q), k, v, position, sums(lse), queries(do), sums(delta), dk, dv),
                *_strides(q, k, v, position, do),
                *scales,
                **_cut(shape, tiles, by_copy),
            )
    return dq, dk, dv


def _backward_outputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return dq, dk, dv


FORWARD = define(
    "document_attention_forward(Tensor q, Tensor k, Tensor v, Tensor position, float scale) -> (Tensor, Tensor)",
    fake=lambda q, k, v, position, scale: _forward_outputs(q, v),
    cuda=forward,
)
BACKWARD = define(
    "document_attention_backward(Tensor q, Tensor k, Tensor v, Tensor position, Tensor o, Tensor lse, Tensor do, "
    "float scale) -> (Tensor, Tensor, Tensor)",
    fake=lambda q, k, v, *others: _backward_outputs(q, k, v),
    cuda=backward,
)


def _document_attention(*arguments: Any) -> tuple[Tensor, ...]:
    o, lse = FORWARD(*arguments)
    return o, lse


def _gradients(
    needs: tuple[bool, ...], arguments: tuple[Any, ...], outputs: tuple[Any, ...], grads: tuple[Any, ...]
) -> tuple[Tensor | None, ...]:
    *tensors, scale = arguments
    dq, dk, dv = BACKWARD(*tensors, *outputs, grads[0], scale)
    return dq, dk, dv, None, None


triton_attention = differentiable(_document_attention, _gradients, save=(0, 1, 2, 3, 5, 6), residuals=1)
"""(q, k, v, position, scale) -> o."""
