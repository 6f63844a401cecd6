"""The loss: cross-entropy of softcapped logits for the next token and, by the MTP heads, for those after it.

Everything is a weighted sum of nats per token with weights fixed before the first forward pass, so that micro-batches
and ranks simply add up.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hymo.backend import EAGER, Backend
from hymo.batch import IGNORED, Batch
from hymo.config import ModelConfig
from hymo.distributed import ALONE, Ranks
from hymo.layers.embedding import embed, unembed
from hymo.layers.moe import Load
from hymo.layers.mtp import mtp
from hymo.layers.norm import rms_norm
from hymo.model import ModelParams, gather_ends, head_table, trunk


class CrossEntropy(torch.autograd.Function):
    """`sum_i weight_i * nll_i` of softcapped logits, a chunk of tokens at a time.

    The gradient with respect to hidden states and table is computed beside the loss, chunk by chunk, since the weights
    are known: logits are made once, never kept, and the backward only scales.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        hidden: Tensor, table: Tensor, labels: Tensor, weight: Tensor, cap: float, chunk: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The weighted sum and its gradients; the gradients are outputs only so that the backward can keep them."""
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        d_table = torch.zeros_like(table, dtype=torch.float32)
        d_hidden = []
        for h, y, w in zip(*(torch.split(x, chunk) for x in (hidden, labels, weight)), strict=True):
            squashed = torch.tanh((h @ table.mT).float() / cap)
            log_p = torch.log_softmax(cap * squashed, dim=-1)
            picked = log_p.gather(-1, y[:, None])
            total = total - (w * picked[:, 0]).sum()
            slope = w[:, None] * (1 - squashed.square())
            d_logits = log_p.exp().scatter_add(-1, y[:, None], -torch.ones_like(picked)) * slope
            d_logits = d_logits.to(h.dtype)
            d_hidden.append(d_logits @ table)
            d_table = d_table + (d_logits.mT @ h).float()
        return total, torch.cat(d_hidden), d_table

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _, d_hidden, d_table = output
        ctx.save_for_backward(d_hidden, d_table)
        ctx.dtypes = inputs[0].dtype, inputs[1].dtype
        ctx.mark_non_differentiable(d_hidden, d_table)

    @staticmethod
    def backward(ctx: Any, scale: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_table = ctx.saved_tensors
        hidden_dtype, table_dtype = ctx.dtypes
        return (scale * d_hidden).to(hidden_dtype), (scale * d_table).to(table_dtype), None, None, None, None


def weighted_cross_entropy(
    hidden: Float[Tensor, "n d"],
    table: Float[Tensor, "u d"],
    labels: Int[Tensor, " n"],
    weight: Float[Tensor, " n"],
    *,
    cap: float,
    logit_budget: int,
) -> Float[Tensor, ""]:
    """`sum_i weight_i * -log softmax(softcap(hidden_i table^T))[labels_i]`, in nats, fp32.

    Differentiable once, in `hidden` and `table`. A weight of zero ignores a token, whatever its label.

    Args:
        cap: bound of the logits, in nats.
        logit_budget: how many fp32 logits may exist at once; at least one token's are made.
    """
    chunk = max(1, logit_budget // table.shape[0])
    apply: Any = CrossEntropy.apply
    total: Tensor = apply(hidden, table, labels.clamp(min=0), weight, cap, chunk)[0]
    return total


class Losses(NamedTuple):
    """Beside the loss that is trained: its parts, in nats per token, and the experts' loads."""

    main: Float[Tensor, ""]
    mtp: Float[Tensor, " depth"]
    loads: tuple[Load, ...]


def label_masks(batch: Batch, depth: int) -> tuple[Bool[Tensor, "*b t"], ...]:
    """Which labels count, for the next token and for each MTP depth k.

    A label k tokens beyond the next one counts if the window holds it and the k tokens between are of one document;
    a delimiter that ends the document is a label like any other.
    """
    masks = [batch.labels != IGNORED]
    for k in range(1, depth + 1):
        same = batch.position[..., k:] >= k
        masks.append(F.pad(same & (batch.labels[..., k:] != IGNORED), (0, k)))
    return tuple(masks)


def label_counts(batch: Batch, depth: int, *, ranks: Ranks = ALONE) -> Float[Tensor, " k"]:
    """How many labels count for each head, over all micro-batches and ranks; at least 1, so that it can divide."""
    counts = torch.stack([mask.sum() for mask in label_masks(batch, depth)]).float()
    return ranks.sum(counts).clamp(min=1.0)


def loss(
    params: ModelParams,
    batch: Batch,
    counts: Float[Tensor, " k"],
    *,
    cfg: ModelConfig,
    backend: Backend = EAGER,
    capacity: int | None = None,
) -> tuple[Float[Tensor, ""], Losses]:
    """This micro-batch's part of the step's loss: nats summed over its labels, over the step's number of labels.

        main + sum_k mtp_loss_weights[k] * mtp_k

    Args:
        counts: labels of the whole step, for the next token and each MTP depth (`label_counts`).
        capacity: tokens of a row that one expert serves.
    """
    ends = gather_ends(params, cfg=cfg, backend=backend)
    embedded = embed(ends.table, batch.tokens)
    out = trunk(params, embedded, cfg=cfg, position=batch.position, backend=backend, capacity=capacity)

    def nats(hidden: Tensor, mask: Tensor, count: Tensor, k: int) -> Tensor:
        normed = rms_norm(hidden, ends.norm, eps=cfg.norm_eps)
        return weighted_cross_entropy(
            rearrange(normed, "b t d -> (b t) d"),
            head_table(ends),
            batch.labels.roll(-k, dims=-1).flatten(),
            (mask.float() / count).flatten(),
            cap=cfg.logit_softcap,
            logit_budget=backend.logit_budget,
        )

    masks = label_masks(batch, cfg.mtp_depth)
    main = nats(out.hidden, masks[0], counts[0], 0)
    hidden, total, ahead = out.hidden, main, []
    for k, (p, factor) in enumerate(zip(ends.mtp, cfg.mtp_loss_weights, strict=True), start=1):
        hidden = mtp(p, hidden, embedded.roll(-k, dims=1), cfg=cfg)
        ahead.append(nats(hidden, masks[k], counts[k], k))
        total = total + factor * ahead[-1]
    depths = torch.stack(ahead) if ahead else main.new_zeros(0)
    return total, Losses(main, depths, out.loads)


def token_nats(
    params: ModelParams, batch: Batch, *, cfg: ModelConfig, backend: Backend = EAGER
) -> Float[Tensor, "b t"]:
    """Nats of every label by the main head, every token served by all its experts; 0 where a label is ignored."""
    ends = gather_ends(params, cfg=cfg, backend=backend)
    x = embed(ends.table, batch.tokens)
    hidden = trunk(params, x, cfg=cfg, position=batch.position, backend=backend).hidden
    normed = rearrange(rms_norm(hidden, ends.norm, eps=cfg.norm_eps), "b t d -> (b t) d")
    labels = batch.labels.flatten()
    chunk = max(1, backend.logit_budget // cfg.vocab_size)
    nats = [
        F.cross_entropy(unembed(h, head_table(ends), cap=cfg.logit_softcap), y, ignore_index=IGNORED, reduction="none")
        for h, y in zip(torch.split(normed, chunk), torch.split(labels, chunk), strict=True)
    ]
    return torch.cat(nats).view(batch.labels.shape)
