"""A mixture of experts whose load is balanced by a bias on the choice, not by a term in the loss."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from hymo import tree
from hymo.backend import EAGER, Backend
from hymo.config import ModelConfig
from hymo.layers.feedforward import SwigluParams, swiglu
from hymo.params import buffer, constant, declare, expert, gate, normal, power
from hymo_kernels import mixed_linear


class ExpertParams(NamedTuple):
    """The routed experts, SwiGLUs stacked along e; lent to a region `gate` has `up` beside it, which is a hole."""

    gate: Float[Tensor, "e d f"] = expert(inputs="d")
    up: Float[Tensor, "e d f"] = expert(inputs="d")
    down: Float[Tensor, "e f d"] = expert(inputs="f", residual=True)


class MoeParams(NamedTuple):
    """Router, its balance and the experts; `bias` and `load` are moved by counts, not by a gradient."""

    router: Float[Tensor, "d e"] = gate(inputs="d", init=normal(0.006))
    bias: Float[Tensor, " e"] = buffer(constant(0.0))
    load: Float[Tensor, " e"] = buffer(power(-1.0), of="e")
    routed: ExpertParams | tuple[()] = ()
    shared: SwigluParams | tuple[()] = ()


class Routing(NamedTuple):
    """For each token its experts, their weights (which sum to 1), and how many tokens each expert was chosen by."""

    expert: Int[Tensor, "b t k"]
    weight: Float[Tensor, "b t k"]
    assigned: Float[Tensor, " e"]


class Load(NamedTuple):
    """Assignments of one layer: chosen per expert, and how many of them were dropped for want of capacity."""

    assigned: Float[Tensor, " e"]
    dropped: Float[Tensor, ""]


def moe_spec(cfg: ModelConfig) -> MoeParams:
    """The weights of one mixture; the shared experts are one feed-forward of their summed width."""
    sizes = {"d": cfg.dim, "e": cfg.n_routed_experts, "f": cfg.moe_inter_dim}
    wide = {"d": cfg.dim, "f": cfg.moe_inter_dim * cfg.n_shared_experts}
    shared = declare(SwigluParams, wide, depth=cfg.n_layers) if cfg.n_shared_experts else ()
    routed = declare(ExpertParams, sizes, depth=cfg.n_layers)
    return declare(MoeParams, sizes, routed=routed, shared=shared)


def route(p: MoeParams, x: Float[Tensor, "b t d"], *, k: int) -> Routing:
    """Chooses `k` experts per token by `sigmoid(x router) + bias` and weighs them by the sigmoids alone.

    fp32 throughout. The bias steers the choice and never enters a weight  (arXiv:2408.15664, equation 3).
    """
    logit = mixed_linear(x, p.router)
    chosen = (torch.sigmoid(logit) + p.bias).detach().topk(k, dim=-1).indices
    # Sigmoids over their sum, by way of their logarithms: finite even where all of them underflow.
    weight = F.logsigmoid(logit).gather(-1, chosen).softmax(-1)
    experts = torch.arange(logit.shape[-1], device=x.device)
    assigned = (chosen[..., None] == experts).sum((0, 1, 2)).float()
    return Routing(chosen, weight, assigned)


def moe(
    p: MoeParams,
    x: Float[Tensor, "b t {cfg.dim}"],
    *,
    cfg: ModelConfig,
    backend: Backend = EAGER,
    capacity: int | None = None,
) -> tuple[Float[Tensor, "b t {cfg.dim}"], Load]:
    """The shared experts of every token plus the weighted sum of its chosen ones.

    Args:
        capacity: how many tokens of one row an expert serves; beyond that the tokens with the lowest weight lose that
            expert, wherever they stand, and their other weights stay as they are. None serves all: a token's output
            then depends on no other token.

    Source: DeepSeek-V3, arXiv:2412.19437, equations 12 to 16; sigmoid scores, weights renormalised over the chosen.
    """
    routing = route(p, x, k=cfg.n_activated_experts)
    if capacity is None or capacity >= x.shape[1]:
        y, dropped = _serve_all(p, x, routing), torch.zeros((), device=x.device)
    else:
        y, dropped = backend.experts(x, routing.expert, routing.weight, *_matrices(p), capacity=capacity)
    if isinstance(p.shared, SwigluParams):
        y = y + swiglu(p.shared, x)
    return y, Load(routing.assigned, dropped)


def rebalance(
    bias: Float[Tensor, " e"], load: Float[Tensor, " e"], assigned: Float[Tensor, " e"], *, speed: float, alpha: float
) -> tuple[Float[Tensor, " e"], Float[Tensor, " e"]]:
    """The next bias and smoothed load: experts chosen more than the mean become harder to choose, by `speed`.

    Once per optimiser step, from the counts of all micro-batches and ranks. The change has mean zero, so the bias does
    not drift.

    Args:
        load: exponential moving average of the fraction of assignments per expert.
        assigned: assignments of this step per expert.
        speed: step of the bias, in units of the sigmoid score.
        alpha: weight of this step in the average.

    Source: Wang et al. 2024, arXiv:2408.15664, algorithm 1. Departs from it: the sign is taken of the average.
    """
    load = load + alpha * (assigned / assigned.sum().clamp(min=1.0) - load)
    change = speed * torch.sign(load.mean() - load)
    return bias + change - change.mean(), load


def parted(p: MoeParams) -> MoeParams:
    """What was lent as it is stored: gate and up are views, each by itself."""
    assert isinstance(p.routed, ExpertParams)
    if not tree.is_hole(p.routed.up):
        return p
    both, width = p.routed.gate, p.routed.gate.shape[-1] // 2
    return p._replace(routed=p.routed._replace(gate=both[..., :width], up=both[..., width:]))


def _matrices(p: MoeParams) -> tuple[Tensor, Tensor | None, Tensor]:
    """Of the experts, as `hymo_kernels.routed_swiglu` takes them."""
    assert isinstance(p.routed, ExpertParams)
    gate, up, down = p.routed
    return gate, None if tree.is_hole(up) else up, down


def _serve_all(p: MoeParams, x: Float[Tensor, "b t d"], routing: Routing) -> Float[Tensor, "b t d"]:
    """Every expert sees every token; the weights of those not chosen are zero."""
    zeros = torch.zeros(*x.shape[:2], p.router.shape[1], dtype=routing.weight.dtype, device=x.device)
    weight = zeros.scatter(-1, routing.expert, routing.weight).to(x.dtype)
    gate, up, down = _matrices(p)
    gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
    y = torch.func.vmap(swiglu, in_dims=(0, None))(SwigluParams(gate, up, down), x)
    return einsum(y, weight, "e b t d, b t e -> b t d")
