"""A batch is rows of packed documents, and one tensor, `position`, says where each document begins."""

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from hymo.config import DELIMITER

IGNORED = -100
"""The label of a token whose prediction does not count."""


class Batch(NamedTuple):
    """Rows of packed documents.

    Args:
        tokens: inputs; a delimiter opens each document.
        labels: the token after each input, or IGNORED.
        position: index of each input in its document; 0 at the first token of a row.
    """

    tokens: Int[Tensor, "*b t"]
    labels: Int[Tensor, "*b t"]
    position: Int[Tensor, "*b t"]


def make_batch(windows: Int[Tensor, "*b window"]) -> Batch:
    """The batch of windows of t + 1 tokens: inputs are all but the last, labels all but the first."""
    tokens = windows[..., :-1].contiguous()
    return Batch(tokens, windows[..., 1:].contiguous(), document_position(tokens))


def document_position(tokens: Int[Tensor, "*b t"], start: Int[Tensor, "*b"] | None = None) -> Int[Tensor, "*b t"]:
    """The index of every token in its document: 0 at each delimiter, which belongs to the document that it opens.

    This one tensor isolates documents everywhere: memories reset at 0, a convolution tap j is live from j on, a query
    sees as many tokens back as its position says, and a label k tokens ahead counts if its token is at k or later.

    Args:
        start: position of the first token of each row if it is no delimiter; 0 by default.
    """
    index = torch.arange(tokens.shape[-1], device=tokens.device).expand(tokens.shape)
    opened = torch.where(tokens == DELIMITER, index, -1).cummax(dim=-1).values
    before = index if start is None else index + start[..., None]
    return torch.where(opened < 0, before, index - opened)
