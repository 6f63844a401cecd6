"""One call of the gated delta rule: its sizes, its options, and what passes between its kernels."""

import functools
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


STATIC = 'float scale, bool norm, bool gate, bool sigmoid, float beta_max, bool keep_end, str precision="tf32x3"'
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


def shape_of(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Shape:
    """The shape of a call."""
    b, t, h, k = q.shape
    sequences = 1 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    chunk = FP32_CHUNK if q.dtype == torch.float32 else CHUNK
    slots = -(-t // chunk) if cu_seqlens is None else t // chunk + sequences + 1
    return Shape(b, t, h, v.shape[2], k, v.shape[3], sequences, slots, cu_seqlens is not None, chunk)


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
