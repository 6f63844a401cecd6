"""Gated DeltaNet: a layer whose memory is one matrix per head, written by the delta rule and forgotten by a gate."""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Float, Int
from torch import Tensor

from hymo.backend import EAGER, Backend
from hymo.config import ModelConfig
from hymo.layers.norm import gated_rms_norm
from hymo.layers.rope import Rotary, rotary
from hymo.params import constant, declare, gate, matrix, power, uniform_fan_in, vector
from hymo_kernels import mixed_linear


def log_decay_rate(generator: torch.Generator, shape: tuple[int, ...], fan_in: int) -> Tensor:
    """log A with A ~ U(1, 16), as in Mamba-2 (arXiv:2405.21060)."""
    return torch.empty(shape).uniform_(1.0, 16.0, generator=generator).log()


def step_bias(generator: torch.Generator, shape: tuple[int, ...], fan_in: int) -> Tensor:
    """The inverse softplus of a step that is log-uniform in [0.001, 0.1]."""
    step = torch.empty(shape).uniform_(math.log(0.001), math.log(0.1), generator=generator).exp()
    return step + torch.log(-torch.expm1(-step))


class GdnParams(NamedTuple):
    """Weights of one mixer. gk: all key heads' features; hv: all value heads' features; s: decays of a head."""

    q: Float[Tensor, "d gk"] = matrix(inputs="d")
    k: Float[Tensor, "d gk"] = matrix(inputs="d")
    v: Float[Tensor, "d hv"] = matrix(inputs="d")
    output_gate: Float[Tensor, "d hv"] = matrix(inputs="d")
    q_conv: Float[Tensor, "gk w"] = vector(uniform_fan_in, inputs="w")
    k_conv: Float[Tensor, "gk w"] = vector(uniform_fan_in, inputs="w")
    v_conv: Float[Tensor, "hv w"] = vector(uniform_fan_in, inputs="w")
    write: Float[Tensor, "d h"] | tuple[()] = gate(inputs="d")
    decay: Float[Tensor, "d h"] | tuple[()] = gate(inputs="d")
    dt_bias: Float[Tensor, " h"] | tuple[()] = vector(step_bias)
    A_log: Float[Tensor, "h s"] | tuple[()] = vector(log_decay_rate)
    skip: Float[Tensor, " h"] | tuple[()] = vector(power(-0.5), of="k")
    norm: Float[Tensor, " v"] = vector(constant(1.0))
    out: Float[Tensor, "hv d"] = matrix(inputs="hv", residual=True)


class GdnState(NamedTuple):
    """What continues a sequence: the last inputs of the convolution and the memory of every head."""

    conv: Float[Tensor, "b w1 c"]
    memory: Float[Tensor, "b h k v"]


def gdn_spec(cfg: ModelConfig) -> GdnParams:
    """The weights that `cfg.gdn_rule` uses."""
    key_features, value_features = cfg.gdn_n_key_heads * cfg.gdn_key_dim, cfg.gdn_n_heads * cfg.gdn_value_dim
    sizes = {
        "d": cfg.dim,
        "h": cfg.gdn_n_heads,
        "k": cfg.gdn_key_dim,
        "v": cfg.gdn_value_dim,
        "gk": key_features,
        "hv": value_features,
        "w": cfg.gdn_conv,
        "s": cfg.gdn_key_dim if cfg.gdn_rule == "gated_linear" else 1,
    }
    left_out: dict[str, Any] = {} if cfg.gdn_value_skip else {"skip": ()}
    if cfg.gdn_rule == "delta":
        left_out |= {"decay": (), "dt_bias": (), "A_log": ()}
    if cfg.gdn_rule == "gated_linear":
        left_out |= {"write": ()}
    return declare(GdnParams, sizes, depth=cfg.n_layers, **left_out)


def gdn_state(cfg: ModelConfig, batch: int, *, dtype: torch.dtype, device: torch.device) -> GdnState:
    """The empty state: no inputs seen, nothing remembered."""
    channels = 2 * cfg.gdn_n_key_heads * cfg.gdn_key_dim + cfg.gdn_n_heads * cfg.gdn_value_dim
    memory = (batch, cfg.gdn_n_heads, cfg.gdn_key_dim, cfg.gdn_value_dim)
    return GdnState(
        conv=torch.zeros(batch, cfg.gdn_conv - 1, channels, dtype=dtype, device=device),
        memory=torch.zeros(memory, dtype=torch.float32, device=device),
    )


def gdn(
    p: GdnParams,
    x: Float[Tensor, "b t {cfg.dim}"],
    *,
    cfg: ModelConfig,
    position: Int[Tensor, "b t"],
    angles: Rotary | None = None,
    backend: Backend = EAGER,
    state: GdnState | None = None,
) -> tuple[Float[Tensor, "b t {cfg.dim}"], GdnState | None]:
    """Reads and writes a memory per head, forgetting at every document start.

        q, k, v = silu(conv(x W))         q, k rotated on their first features and of unit length
        g = -exp(A_log) softplus(x W_decay + dt_bias),   beta = sigmoid(x W_write)
        y = (rms_norm(scan(q, k, v, g, beta)) * silu(x W_gate)) W_out

    Args:
        position: index of each token in its document; 0 resets memory and convolution.
        angles: of its `gdn_rope_dim` features, if they are known.
        state: what came before the first token, in a dtype of its own, which it keeps; None trains from the start of
            a sequence and returns no state.

    Source: Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464. Departs from it: rotary positions on a part of the keys.
    """
    # Two products, not one that is split: the gradients of their results then need not be joined.
    qkv = x @ torch.cat([p.q, p.k, p.v], dim=1)
    output_gate = x @ p.output_gate
    angles = angles or rotary(position, dims=cfg.gdn_rope_dim, theta=cfg.rope_theta)
    q, k, v, conv = backend.conv(
        qkv,
        torch.cat([p.q_conv, p.k_conv, p.v_conv]),
        *angles,
        key_heads=cfg.gdn_n_key_heads,
        key_dim=cfg.gdn_key_dim,
        value_heads=cfg.gdn_n_heads,
        position=position,
        initial_state=state.conv.to(qkv.dtype) if state else None,
        output_final_state=state is not None,
    )

    recur = _add if cfg.gdn_rule == "gated_linear" else _write
    o, memory = recur(p, x, q, k, v, cfg=cfg, position=position, backend=backend, state=state)
    if isinstance(p.skip, Tensor):
        o = o + (p.skip[:, None] * v).to(o.dtype)
    o = gated_rms_norm(o, rearrange(output_gate, "b t (h v) -> b t h v", h=cfg.gdn_n_heads), p.norm, eps=cfg.norm_eps)
    y = rearrange(o, "b t h v -> b t (h v)") @ p.out
    if state is None or conv is None or memory is None:
        return y, None
    return y, GdnState(conv.to(state.conv.dtype), memory)


def _write(
    p: GdnParams,
    x: Float[Tensor, "b t d"],
    q: Float[Tensor, "b t g k"],
    k: Float[Tensor, "b t g k"],
    v: Float[Tensor, "b t h v"],
    *,
    cfg: ModelConfig,
    position: Int[Tensor, "b t"],
    backend: Backend,
    state: GdnState | None,
) -> tuple[Float[Tensor, "b t h v"], Float[Tensor, "b h k v"] | None]:
    """The rules that erase before they write: `gated_delta`, and `delta`, which forgets only between documents."""
    if cfg.gdn_rule == "gated_delta":
        gates = mixed_linear(x, torch.cat([_weight(p.write), _weight(p.decay)], dim=1))
        write, decay = gates.chunk(2, dim=-1)
        g = F.softplus(decay + _weight(p.dt_bias)) * -_weight(p.A_log).exp()[:, 0]
    else:
        write = mixed_linear(x, _weight(p.write))
        g = torch.zeros_like(write)
    beta = torch.sigmoid(write) * (2.0 if cfg.gdn_allow_neg_eigval else 1.0)
    return backend.scan(
        q,
        k,
        v,
        g.masked_fill((position == 0)[..., None], -math.inf),
        beta,
        initial_state=state.memory if state else None,
        output_final_state=state is not None,
        use_qk_l2norm_in_kernel=True,
    )


def _add(
    p: GdnParams,
    x: Float[Tensor, "b t d"],
    q: Float[Tensor, "b t g k"],
    k: Float[Tensor, "b t g k"],
    v: Float[Tensor, "b t h v"],
    *,
    cfg: ModelConfig,
    position: Int[Tensor, "b t"],
    backend: Backend,
    state: GdnState | None,
) -> tuple[Float[Tensor, "b t h v"], Float[Tensor, "b h k v"] | None]:
    """The rule that never erases, `gated_linear`: a decay per key feature, unit keys and queries."""
    shared = cfg.gdn_n_heads // cfg.gdn_n_key_heads
    q, k = (F.normalize(y.float(), dim=-1, eps=1e-6).to(y.dtype) for y in (q, k))
    q, k = (repeat(y, "b t g k -> b t (g i) k", i=shared) for y in (q, k))
    step = F.softplus(mixed_linear(x, _weight(p.decay)) + _weight(p.dt_bias))
    return backend.linear_scan(
        v,
        k,
        q,
        step.masked_fill((position == 0)[..., None], math.inf),
        _weight(p.A_log),
        initial_state=state.memory if state else None,
        output_final_state=state is not None,
    )


def _weight(leaf: Tensor | tuple[()]) -> Tensor:
    """A weight that the rule at hand has declared."""
    assert isinstance(leaf, Tensor)
    return leaf
