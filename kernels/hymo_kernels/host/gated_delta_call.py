"""One call of the gated delta rule: its sizes, its options, and what passes between its kernels."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from torch import Tensor

CHUNK = 64
"""Tokens a chunk, of 16-bit numbers."""

FP32_CHUNK = 32
"""Of fp32 numbers, whose tiles take twice the room."""

FORGOTTEN, FP32_FORGOTTEN = 12.0, 17.0
"""How much decay, in nats, makes a start from nothing as good as the true one: e^-12 is 6e-6, far below bf16; e^-17 is
4e-8, below fp32."""

Precision = Literal["tf32x3", "ieee"]
"""How fp32 products are formed: as three products of 10-bit parts on the tensor cores, or in fp32 without them."""


class Shape(NamedTuple):
    """Sizes of one call, and how its sequences are cut."""

    b: int
    t: int
    h: int
    hv: int
    k: int
    v: int
    sequences: int  # of one batch row
    slots: int  # chunks kept per batch row and head
    packed: bool
    chunk: int  # tokens


class Prepared(NamedTuple):
    """What `prepare_kernel` makes of a call, for the forward and the backward."""

    inverse: Tensor
    attention: Tensor
    total: Tensor
    segment: Tensor
    strength: Tensor
    q_unit: Tensor
    k_unit: Tensor
    forget: Tensor


STATIC = (
    'float scale, bool norm, bool gate, bool sigmoid, float beta_max, bool keep_end, str precision="tf32x3", '
    "bool keep_states=False"
)
"""`Options` in the schema of an op."""


class Options(NamedTuple):
    """The static arguments of a call."""

    scale: float
    norm: bool  # q and k are divided by their lengths
    gate: bool  # g is what A_log and dt_bias make a gate of
    sigmoid: bool  # beta is a logit
    beta_max: float
    keep_end: bool
    precision: Precision = "tf32x3"  # of fp32 products
    keep_states: bool = False  # the backward is left the states before each chunk


def shape_of(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, chunk: int | None = None) -> Shape:
    """The shape of a call whose sequences are cut into chunks of so many tokens, or as many as their dtype has."""
    b, t, h, k = q.shape
    sequences = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if chunk is None:
        chunk = FP32_CHUNK if q.dtype == torch.float32 else CHUNK
    slots = -(-t // chunk) if cu_seqlens is None else t // chunk + sequences + 1
    return Shape(b, t, h, v.shape[2], k, v.shape[3], sequences, slots, cu_seqlens is not None, chunk)


def aligned(x: Tensor, chunk: int = CHUNK) -> Tensor:
    """x with the features of a head side by side, and chunks that 32-bit offsets reach across."""
    return x if x.stride(-1) == 1 and chunk * x.stride(1) < 2**31 else x.contiguous()


@functools.cache
def multiprocessors(device: int | None) -> int:
    """How many programs a GPU runs at once, at one each."""
    return torch.cuda.get_device_properties(device).multi_processor_count


class Gradients(NamedTuple):
    """Of one call, of the log retention and the write strength as they are used, whatever made them."""

    q: Tensor
    k: Tensor
    v: Tensor
    retention: Tensor
    strength: Tensor
    start: Tensor


def backward_outputs(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, ...]:
    """`Gradients`, empty."""
    b, t, h, hv, key, value, *_ = shape_of(q, v, cu_seqlens)

    def new(*size: int | torch.SymInt, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=q.device)

    return (
        new(b, t, h, key, dtype=q.dtype),
        new(b, t, h, key, dtype=k.dtype),
        new(b, t, hv, value, dtype=v.dtype),
        new(b, t, hv),
        new(b, t, hv),
        new(*start.shape) if start is not None else new(b, 0),
    )


@contextmanager
def over_groups(grads: Gradients, shape: Shape) -> Iterator[tuple[Tensor, Tensor]]:
    """dq and dk of every value head; those of the key heads, their sums, are filled afterwards."""
    if shape.h == shape.hv:
        yield grads.q, grads.k
        return
    like_v = (shape.b, shape.t, shape.hv, shape.k)
    dq, dk = grads.q.new_empty(like_v), grads.k.new_empty(like_v)
    if shape.packed:
        dq.zero_(), dk.zero_()
    yield dq, dk
    for whole, each in ((grads.q, dq), (grads.k, dk)):
        torch.sum(each.view(*whole.shape[:3], -1, shape.k), 3, out=whole)
