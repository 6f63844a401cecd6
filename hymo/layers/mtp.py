"""Multi-token prediction: a chain of small heads, each looking one token further ahead."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from hymo.config import ModelConfig
from hymo.layers.feedforward import SwigluParams, swiglu
from hymo.layers.norm import rms_norm
from hymo.params import constant, declare, matrix, vector


class MtpParams(NamedTuple):
    """Weights of one depth; embedding, final norm and head are the model's own."""

    hidden_norm: Float[Tensor, " d"] = vector(constant(1.0))
    embed_norm: Float[Tensor, " d"] = vector(constant(1.0))
    merge: Float[Tensor, "dd d"] = matrix(inputs="dd")
    ffn_norm: Float[Tensor, " d"] = vector(constant(1.0))
    ffn: SwigluParams | tuple[()] = ()


def mtp_spec(cfg: ModelConfig) -> MtpParams:
    """The weights of one depth."""
    ffn = declare(SwigluParams, {"d": cfg.dim, "f": cfg.mtp_inter_dim}, depth=cfg.n_layers)
    return declare(MtpParams, {"d": cfg.dim, "dd": 2 * cfg.dim}, ffn=ffn)


def mtp(
    p: MtpParams, hidden: Float[Tensor, "b t {cfg.dim}"], ahead: Float[Tensor, "b t {cfg.dim}"], *, cfg: ModelConfig
) -> Float[Tensor, "b t {cfg.dim}"]:
    """The hidden state of depth k from that of depth k - 1.

        h' = [norm(hidden); norm(ahead)] W,    h = h' + swiglu(norm(h'))

    Args:
        hidden: of depth k - 1 at token i (depth 0: the model's, before its final norm).
        ahead: embedding of token i + k, the last one before the token that depth k predicts.

    Source: DeepSeek-V3, arXiv:2412.19437, section 2.2. Departs from it: a SwiGLU in place of the transformer block.
    """
    assert isinstance(p.ffn, SwigluParams)
    norms = rms_norm(hidden, p.hidden_norm, eps=cfg.norm_eps), rms_norm(ahead, p.embed_norm, eps=cfg.norm_eps)
    merged = torch.cat(norms, dim=-1) @ p.merge
    return merged + swiglu(p.ffn, rms_norm(merged, p.ffn_norm, eps=cfg.norm_eps))
