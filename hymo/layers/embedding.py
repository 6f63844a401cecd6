"""Tokens in, logits out: one table for both when they are tied."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from hymo_kernels.primitive import define, differentiable

# A compiler would add up the gradients of a token's occurrences in whatever order they come; sorted, it is always one.
_sum_by_token = define(
    "sum_by_token(Tensor grad, Tensor tokens, int rows) -> Tensor",
    fake=lambda grad, tokens, rows: grad.new_empty(rows, grad.shape[-1]),
    cpu=lambda grad, tokens, rows: torch.ops.aten.embedding_dense_backward(grad, tokens, rows, -1, False),
    cuda=lambda grad, tokens, rows: torch.ops.aten.embedding_dense_backward(grad, tokens, rows, -1, False),
)


def _rows_of(table: Tensor, tokens: Tensor, rows: int) -> Tensor:
    return F.embedding(tokens, table)


def _rows_backward(
    needs: tuple[bool, ...], arguments: tuple[Any, ...], outputs: tuple[Any, ...], grads: tuple[Any, ...]
) -> tuple[Tensor | None, ...]:
    _, tokens, rows = arguments
    return _sum_by_token(grads[0].contiguous(), tokens, rows), None, None


_embed: Callable[..., Tensor] = differentiable(_rows_of, _rows_backward, save=(1,), shared=(0,))


def embed(table: Float[Tensor, "u d"], tokens: Int[Tensor, "*b"]) -> Float[Tensor, "*b d"]:
    """The rows of `table` named by `tokens`; the gradient of a run is the same to the bit every time."""
    return _embed(table, tokens, table.shape[0])


def softcap(logits: Float[Tensor, "*b u"], cap: float) -> Float[Tensor, "*b u"]:
    """`cap * tanh(logits / cap)`: smooth, and inside (-cap, cap)  (Gemma 2, arXiv:2408.00118)."""
    return cap * torch.tanh(logits / cap)


def unembed(hidden: Float[Tensor, "*b d"], table: Float[Tensor, "u d"], *, cap: float) -> Float[Tensor, "*b u"]:
    """Softcapped logits in fp32, in nats."""
    return softcap((hidden @ table.mT).float(), cap)
