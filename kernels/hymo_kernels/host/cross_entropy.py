"""Cross-entropy of the softcapped logits of a linear head, whose logits never exist all at once."""

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from hymo_kernels.host.triton_cross_entropy import (
    SHARED,
    chunk_of,
    refused,
    scaled,
    triton_cross_entropy,
    triton_nats,
    unavailable,
)
from hymo_kernels.primitive import differentiable

IGNORED = -1
"""A label of no token."""


def linear_cross_entropy(
    hidden: Float[Tensor, "n d"],
    table: Float[Tensor, "u d"],
    labels: Int[Tensor, " n"],
    weight: Float[Tensor, " n"] | None = None,
    *,
    cap: float,
    reduction: Literal["sum", "none"] = "sum",
    logit_bytes: int = 2**30,
    backend: Literal["eager", "triton"] | None = None,
) -> Float[Tensor, ""] | Float[Tensor, " n"]:
    """`weight_i * -log softmax(cap tanh(hidden_i table^T / cap))[labels_i]` in nats, fp32, summed over tokens.

    fp64 inputs compute in fp64. The sum is differentiable once, in `hidden` and `table`: both gradients are computed
    beside it, wanted or not, since the weights are known, and the backward only scales them. The table's is summed over
    chunks in fp32.

    Args:
        labels: a negative one ignores its token, and so does a weight of zero, whatever the label.
        weight: of each token; None is 1. It is a constant: it gets no gradient.
        cap: bound of the logits, in nats, > 0.
        reduction: "sum", or "none" for each token's nats, 0 where ignored, without a gradient.
        logit_bytes: how much of the logits exists at once: in fp32 (eager) or in hidden's dtype (triton), but at least
            one token's (128 tokens').
        backend: "triton" (an NVIDIA GPU, bf16 or fp32, caps up to 64), or "eager", plain PyTorch for anything; None is
            "triton" where that is available, else "eager".

    Raises:
        ValueError: for an unknown reduction, or a backend that is not available.
        NotImplementedError: for a gradient of "none".
        RuntimeError: eager, if a label that counts is not below u. The kernels make that token's nats NaN instead,
            since raising would have to wait for the GPU.
    """
    if reduction not in ("sum", "none"):
        raise ValueError(f"linear_cross_entropy: reduction must be 'sum' or 'none'; got {reduction!r}")
    weight = torch.ones_like(labels, dtype=torch.float32) if weight is None else weight
    inputs = (hidden, table, labels, weight.detach(), cap)
    if _takes_triton(hidden, table, cap, backend=backend):
        chunk = chunk_of(hidden.shape[0], table.shape[0], hidden.dtype.itemsize, logit_bytes)
        run = triton_cross_entropy if reduction == "sum" else triton_nats
    else:
        chunk = max(1, logit_bytes // (_wide(hidden.dtype).itemsize * table.shape[0]))
        run = _eager_sum if reduction == "sum" else _eager_nats
    result: Tensor = run(*inputs, chunk)
    return result


def _takes_triton(hidden: Tensor, table: Tensor, cap: float, *, backend: str | None) -> bool:
    """Whether the Triton kernel computes this call; an error if it is asked for and cannot."""
    if backend not in (None, "eager", "triton"):
        raise ValueError(f"linear_cross_entropy: backend must be 'eager', 'triton' or None; got {backend!r}")
    reason = unavailable(hidden, table, cap)
    if reason and backend == "triton":
        raise ValueError(
            f"linear_cross_entropy: backend='triton' is not available, {reason}; use backend='eager' or None"
        )
    return reason is None and backend != "eager"


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def eager_cross_entropy(
    hidden: Tensor, table: Tensor, labels: Tensor, weight: Tensor, cap: float, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum over tokens, and its gradients."""
    wide = _wide(hidden.dtype)
    total = torch.zeros((), dtype=wide, device=hidden.device)
    d_table = torch.zeros_like(table, dtype=wide)
    d_hidden = []
    counts = (labels >= 0) & (weight != 0)
    labels, weight = torch.where(counts, labels, 0), torch.where(counts, weight, 0)
    for h, y, w in zip(*(torch.split(x, chunk) for x in (hidden, labels, weight)), strict=True):
        squashed = torch.tanh((h @ table.mT).to(wide) / cap)
        log_p = torch.log_softmax(cap * squashed, dim=-1)
        picked = log_p.gather(-1, y[:, None])
        total = total - (w * picked[:, 0]).sum()
        slope = w[:, None] * (1 - squashed.square())
        d_logits = log_p.exp().scatter_add(-1, y[:, None], -torch.ones_like(picked)) * slope
        d_logits = d_logits.to(h.dtype)
        d_hidden.append(d_logits @ table)
        d_table = d_table + (d_logits.mT @ h).to(wide)
    return total, torch.cat(d_hidden), d_table


def eager_nats(hidden: Tensor, table: Tensor, labels: Tensor, weight: Tensor, cap: float, chunk: int) -> Tensor:
    """Token by token."""
    wide, nats = _wide(hidden.dtype), []
    labels = torch.where((labels >= 0) & (weight != 0), labels, IGNORED)
    for h, y in zip(*(torch.split(x, chunk) for x in (hidden, labels)), strict=True):
        logits = cap * torch.tanh((h @ table.mT).to(wide) / cap)
        nats.append(F.cross_entropy(logits, y, ignore_index=IGNORED, reduction="none"))
    return weight * torch.cat(nats)


_eager_sum = differentiable(eager_cross_entropy, scaled, save=(7, 8), shared=SHARED, residuals=2)
_eager_nats = differentiable(eager_nats, refused, save=(), shared=SHARED)
