"""Multi-head latent attention: keys and values are read out of one small latent per token."""

from typing import NamedTuple

import torch
from einops import einsum, rearrange, repeat
from jaxtyping import Float, Int
from torch import Tensor

from hymo.backend import EAGER, Backend
from hymo.config import ModelConfig
from hymo.layers.norm import rms_norm
from hymo.layers.rope import Rotary, rotary, rotate
from hymo.params import constant, declare, matrix, vector
from hymo_kernels import naive_document_attention


class MlaParams(NamedTuple):
    """Weights of one attention layer. l: query latent; r: key/value latent; p: rotary features; n: the others."""

    q_down: Float[Tensor, "d l"] = matrix(inputs="d")
    q_norm: Float[Tensor, " l"] = vector(constant(1.0))
    q_up: Float[Tensor, "l hq"] = matrix(inputs="l")
    kv_down: Float[Tensor, "d r"] = matrix(inputs="d")
    kv_norm: Float[Tensor, " r"] = vector(constant(1.0))
    k_rope: Float[Tensor, "d p"] = matrix(inputs="d")
    k_up: Float[Tensor, "r gn"] = matrix(inputs="r")
    v_up: Float[Tensor, "r gv"] = matrix(inputs="r")
    out: Float[Tensor, "hv d"] = matrix(inputs="hv", residual=True)


class MlaState(NamedTuple):
    """The cache: `r + p` numbers per token, for all heads; `length` slots of it are filled."""

    latent: Float[Tensor, "b s r"]
    k_rope: Float[Tensor, "b s p"]
    length: Int[Tensor, ""]


def mla_spec(cfg: ModelConfig) -> MlaParams:
    """The weights of one attention layer."""
    sizes = {
        "d": cfg.dim,
        "l": cfg.q_lora_rank,
        "r": cfg.kv_lora_rank,
        "p": cfg.qk_rope_head_dim,
        "hq": cfg.n_heads * (cfg.qk_nope_head_dim + cfg.qk_rope_head_dim),
        "gn": cfg.n_kv_groups * cfg.qk_nope_head_dim,
        "gv": cfg.n_kv_groups * cfg.v_head_dim,
        "hv": cfg.n_heads * cfg.v_head_dim,
    }
    return declare(MlaParams, sizes, depth=cfg.n_layers)


def mla_state(cfg: ModelConfig, batch: int, slots: int, *, dtype: torch.dtype, device: torch.device) -> MlaState:
    """An empty cache for `slots` tokens."""
    return MlaState(
        latent=torch.zeros(batch, slots, cfg.kv_lora_rank, dtype=dtype, device=device),
        k_rope=torch.zeros(batch, slots, cfg.qk_rope_head_dim, dtype=dtype, device=device),
        length=torch.zeros((), dtype=torch.int64, device=device),
    )


def mla(
    p: MlaParams,
    x: Float[Tensor, "b t {cfg.dim}"],
    *,
    cfg: ModelConfig,
    position: Int[Tensor, "b t"],
    angles: Rotary | None = None,
    backend: Backend = EAGER,
    state: MlaState | None = None,
) -> tuple[Float[Tensor, "b t {cfg.dim}"], MlaState | None]:
    """Attention to the tokens of one's own document, through latents.

        q = [q_nope; rope(q_rope)] = rms_norm(x W_qd) W_qu        per head
        k = [c W_ku; rope(x W_kr)],  v = c W_vu                   per group, c = rms_norm(x W_kvd)
        y = softmax(q k / sqrt(n + p)) v W_out

    With a cache the up-projections of keys and values are applied to queries and read-outs instead, so that attention
    runs over the latents themselves: the same numbers, `r + p` of them per token.

    Args:
        position: index of each token in its document.
        angles: of its `qk_rope_head_dim` features, if they are known.
        state: the cache before the first token, in a dtype of its own, which it keeps; None attends within `x` and
            returns no state.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1. Departs from it: several query heads share a key/value group.
    """
    nope, rope = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim
    scale = (nope + rope) ** -0.5
    q = rearrange(rms_norm(x @ p.q_down, p.q_norm, eps=cfg.norm_eps) @ p.q_up, "b t (h k) -> b t h k", h=cfg.n_heads)
    q_nope, q_rope = torch.split(q, [nope, rope], dim=-1)
    angles = angles or rotary(position, dims=rope, theta=cfg.rope_theta)
    q_rope = rotate(q_rope, angles)
    latent = rms_norm(x @ p.kv_down, p.kv_norm, eps=cfg.norm_eps)
    k_rope = rotate((x @ p.k_rope)[:, :, None], angles)[:, :, 0]

    if state is None:
        k_nope, v = (rearrange(latent @ up, "b t (g k) -> b t g k", g=cfg.n_kv_groups) for up in (p.k_up, p.v_up))
        k = torch.cat([k_nope, repeat(k_rope, "b t p -> b t g p", g=cfg.n_kv_groups)], dim=-1)
        o = backend.attend(torch.cat([q_nope, q_rope], dim=-1), k, v, position=position, scale=scale)
        return rearrange(o, "b t h v -> b t (h v)") @ p.out, None

    state, slot = _remember(state, latent, k_rope), state.length
    k_up = rearrange(p.k_up, "r (g n) -> g n r", g=cfg.n_kv_groups)
    v_up = rearrange(p.v_up, "r (g v) -> g r v", g=cfg.n_kv_groups)
    q_latent = einsum(
        rearrange(q_nope, "b t (g i) n -> b t g i n", g=cfg.n_kv_groups), k_up, "b t g i n, g n r -> b t g i r"
    )
    q = torch.cat([rearrange(q_latent, "b t g i r -> b t (g i) r"), q_rope], dim=-1)
    cached = state.latent.to(latent.dtype)[:, :, None]
    k = torch.cat([cached, state.k_rope.to(k_rope.dtype)[:, :, None]], dim=-1)
    o = naive_document_attention(q, k, cached, position=position, slot=slot, scale=scale)
    o = einsum(rearrange(o, "b t (g i) r -> b t g i r", g=cfg.n_kv_groups), v_up, "b t g i r, g r v -> b t g i v")
    return rearrange(o, "b t g i v -> b t (g i v)") @ p.out, state


def _remember(state: MlaState, latent: Float[Tensor, "b t r"], k_rope: Float[Tensor, "b t p"]) -> MlaState:
    slots = state.length + torch.arange(latent.shape[1], device=latent.device)
    return MlaState(
        latent=state.latent.index_copy(1, slots, latent.to(state.latent.dtype)),
        k_rope=state.k_rope.index_copy(1, slots, k_rope.to(state.k_rope.dtype)),
        length=state.length + latent.shape[1],
    )
