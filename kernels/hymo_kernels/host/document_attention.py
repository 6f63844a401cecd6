"""Softmax attention inside documents: its entry and its definition."""

from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hymo_kernels.host.triton_attention import triton_attention, unavailable


def document_attention(
    q: Float[Tensor, "b t h k"],
    k: Float[Tensor, "b t g k"],
    v: Float[Tensor, "b t g v"],
    *,
    position: Int[Tensor, "b t"],
    scale: float,
    backend: Literal["eager", "triton"] | None = None,
) -> Float[Tensor, "b t h v"]:
    """Causal softmax attention of every token to its own document; query head i uses key head i // (h / g).

        o_t = sum_s softmax_s(scale <q_t, k_s>) v_s,   t - position_t <= s <= t

    As long as numbers are finite, nothing of one document changes a bit of another's outputs or gradients.

    Args:
        position: index of each token in its document, >= 0. The first token that a token sees, `t - position_t`, never
            decreases along a row; where it is below 0 the document began before the row.
        scale: multiplies the scores; > 0.
        backend: "triton" (an NVIDIA GPU; bf16 or fp16 with keys and values at most 256 wide; weights are rounded to
            that dtype, sums are in fp32), whose work grows with the length of documents, not of rows; or "eager", plain
            PyTorch for anything; None is "triton" where that is available, else "eager".

    Raises:
        ValueError: for shapes that do not fit, a scale that is not positive, and a backend that is not available.

    Source: FlashAttention-2, arXiv:2307.08691.
    """
    if backend not in (None, "eager", "triton"):
        raise ValueError(f"document_attention: backend must be 'eager', 'triton' or None; got {backend!r}")
    _check(q, k, v, position, keys=q.shape[1], scale=scale)
    reason = unavailable(q, k, v)
    if reason and backend == "triton":
        raise ValueError(
            f"document_attention: backend='triton' is not available, {reason}; use backend='eager' or None"
        )
    if reason or backend == "eager":
        return naive_document_attention(q, k, v, position=position, scale=scale)
    o: Tensor = triton_attention(q, k, v, position, scale)
    return o


def naive_document_attention(
    q: Float[Tensor, "b t h k"],
    k: Float[Tensor, "b s g k"],
    v: Float[Tensor, "b s g v"],
    *,
    position: Int[Tensor, "b t"],
    scale: float,
    slot: Int[Tensor, ""] | None = None,
) -> Float[Tensor, "b t h v"]:
    """The definition of `document_attention`, by a mask over all pairs: for proofs, and for decoding.

    Args:
        slot: index of the first query among the keys, which may be a cache; None is 0.
    """
    _check(q, k, v, position, keys=k.shape[1], scale=scale)
    q, k, v = (rearrange(x, "b t h k -> b h t k") for x in (q, k, v))
    mask = _visible(position, k.shape[2], slot)[:, None]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return rearrange(out, "b h t v -> b t h v")


def _visible(position: Int[Tensor, "b t"], slots: int, slot: Int[Tensor, ""] | None) -> Bool[Tensor, "b t s"]:
    """Which of `slots` keys each query sees: those of its own document, up to itself."""
    key = torch.arange(slots, device=position.device)
    query = torch.arange(position.shape[1], device=position.device)
    query = query if slot is None else slot + query
    return (key <= query[:, None]) & (key >= (query - position)[..., None])


def _check(q: Tensor, k: Tensor, v: Tensor, position: Tensor, *, keys: int, scale: float) -> None:
    """Raises ValueError, naming the shapes, unless the arguments fit together."""
    b, _, h, width = q.shape
    g = k.shape[2]
    if k.shape != (b, keys, g, width) or v.shape[:3] != k.shape[:3] or position.shape != q.shape[:2] or g == 0 or h % g:
        raise ValueError(
            "document_attention: q must be [b, t, h, k] with k [b, t, g, k], v [b, t, g, v], position [b, t] and h a "
            f"multiple of g; got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}, "
            f"position {list(position.shape)}"
        )
    # The highest product must be the highest score.
    if not scale > 0:
        raise ValueError(f"document_attention: scale must be > 0; got {scale}")
