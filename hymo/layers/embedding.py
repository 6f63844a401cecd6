"""Tokens in, logits out: one table for both when they are tied."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def embed(table: Float[Tensor, "u d"], tokens: Int[Tensor, "*b"]) -> Float[Tensor, "*b d"]:
    """The rows of `table` named by `tokens`."""
    return F.embedding(tokens, table)


def softcap(logits: Float[Tensor, "*b u"], cap: float) -> Float[Tensor, "*b u"]:
    """`cap * tanh(logits / cap)`: smooth, and inside (-cap, cap)  (Gemma 2, arXiv:2408.00118)."""
    return cap * torch.tanh(logits / cap)


def unembed(hidden: Float[Tensor, "*b d"], table: Float[Tensor, "u d"], *, cap: float) -> Float[Tensor, "*b u"]:
    """Softcapped logits in fp32, in nats."""
    return softcap((hidden @ table.mT).float(), cap)
