"""The loss: cross-entropy of softcapped logits for the next token and, by the MTP heads, for those after it.

Everything is a weighted sum of nats per token with weights fixed before the first forward pass, so that micro-batches
and ranks simply add up.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from hymo.backend import EAGER, Backend
from hymo.batch import IGNORED, Batch
from hymo.config import ModelConfig
from hymo.distributed import ALONE, Ranks
from hymo.layers.embedding import embed
from hymo.layers.moe import Load
from hymo.layers.mtp import mtp
from hymo.layers.norm import rms_norm
from hymo.model import ModelParams, gather_ends, head_table, trunk


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
        return backend.cross_entropy(
            rearrange(normed, "b t d -> (b t) d"),
            head_table(ends),
            batch.labels.roll(-k, dims=-1).flatten(),
            (mask.float() / count).flatten(),
            cap=cfg.logit_softcap,
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
    counts = (labels != IGNORED).float()
    nats = backend.cross_entropy(normed, head_table(ends), labels, counts, cap=cfg.logit_softcap, reduction="none")
    return nats.view(batch.labels.shape)
