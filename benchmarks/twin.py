"""A plain PyTorch twin of hymo's training step, for one GPU: the peer that the step is timed against.

The same function of the same parameters, written as one writes PyTorch: modules, autograd, `torch.compile` for each
block, optimisers that write in place. Choices are what is fastest there: documents as `cu_seqlens`, FlashQLA's or fla's
scan, fla's convolution, variable-length flash attention, experts by grouped products without capacity (so fewer rows
than hymo's, and nothing dropped), all logits of a head at once. A step that is not finite is not skipped.
"""

import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from hymo.batch import IGNORED, Batch
from hymo.config import HyMoConfig, ModelConfig, OptimizerConfig
from hymo.layers.feedforward import SwigluParams
from hymo.layers.gdn import GdnParams
from hymo.layers.mla import MlaParams
from hymo.layers.moe import ExpertParams, MoeParams
from hymo.layers.mtp import MtpParams
from hymo.loss import label_masks
from hymo.model import Block, ModelParams
from hymo.optim import build_schedule, group_paths
from hymo.optim.normuon import QUINTIC
from hymo_kernels import causal_conv1d

Rule = Callable[..., tuple[Tensor, Tensor | None]]

CAUSAL: dict[str, Any] = {
    name: value
    for name, value in {"window_size": (-1, 0), "is_causal": True, "enable_gqa": True}.items()
    if name in inspect.signature(varlen_attn).parameters
}
"""How causal attention with grouped heads is asked for, which differs between versions of torch."""


class Documents(NamedTuple):
    """Where documents lie in the rows of a micro-batch, laid end to end: what a data loader would say of them."""

    position: Tensor  # (rows, tokens): index of each token in its document
    bounds: Tensor  # (documents + 1), int32
    longest: int


class MicroBatch(NamedTuple):
    """One forward pass: for every head its labels and what a nat of one of them weighs in the loss of the step."""

    tokens: Tensor  # (rows, tokens)
    labels: Tensor  # (heads, rows * tokens)
    weights: Tensor  # (heads)
    documents: Documents


def passes(batch: Batch, cfg: ModelConfig) -> list[MicroBatch]:
    """The forward passes of a step."""
    masks = torch.stack(label_masks(batch, cfg.mtp_depth))
    counts = masks.sum((1, 2, 3)).clamp(min=1)
    ahead = torch.stack([batch.labels.roll(-k, dims=-1) for k in range(cfg.mtp_depth + 1)])
    labels = ahead.masked_fill(~masks, IGNORED)
    weights = torch.tensor([1.0, *cfg.mtp_loss_weights], device=counts.device) / counts

    def documents(position: Tensor) -> Documents:
        starts = (position.flatten() == 0).nonzero().flatten()
        bounds = torch.cat([starts, starts.new_tensor([position.numel()])]).int()
        return Documents(position, bounds, int(bounds.diff().max()))

    return [
        MicroBatch(batch.tokens[i], labels[:, i].flatten(1), weights, documents(batch.position[i]))
        for i in range(batch.tokens.shape[0])
    ]


# The model: x is (rows * tokens, features), weights are (in, out).


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)


def rotate(x: Tensor, position: Tensor, dims: int, theta: float) -> Tensor:
    """The first `dims` features of every head rotated, in fp32."""
    frequency = theta ** (-torch.arange(0, dims, 2, device=x.device, dtype=torch.float32) / dims)
    angle = position.flatten()[:, None, None].float() * frequency
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., : dims // 2].float(), x[..., dims // 2 : dims].float()
    return torch.cat([(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), x[..., dims:]], dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """Causal attention inside documents, (tokens, heads, features), fewer key heads than query heads."""
    if q.is_cuda and q.dtype != torch.float32:
        bounds, longest = documents.bounds, documents.longest
        return varlen_attn(q, k, v, bounds, bounds, longest, longest, **CAUSAL)
    position = documents.position
    index = torch.arange(position.shape[1], device=q.device)
    seen = (index <= index[:, None]) & (index >= (index - position)[..., None])
    q, k, v = (x.unflatten(0, position.shape).transpose(1, 2) for x in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], enable_gqa=True)
    return o.transpose(1, 2).flatten(0, 1)


class Permute(torch.autograd.Function):
    """`x[order]` of a permutation, whose gradient is a gather as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return dy[ctx.saved_tensors[0]], None, None


def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows times the weight of their group: (rows, in), (groups, in, out), the end of every group."""
    if x.dtype == torch.bfloat16 or not torch.compiler.is_compiling():
        return torch._grouped_mm(x, weight, offs=ends)
    # It cannot be traced in fp32: every row times every weight.
    row = torch.arange(x.shape[0], device=x.device)
    return (x @ weight)[torch.searchsorted(ends, row, right=True), row]


class Mirror(nn.Module):
    """The parameters of one of hymo's tuples, under the same names; a tuple inside is a module of its own."""

    COMPILED: tuple[str, ...] = ()
    BUFFERS: tuple[str, ...] = ()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, params: Any, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        for name, leaf in params._asdict().items():
            if isinstance(leaf, Tensor) and name in self.BUFFERS:
                self.register_buffer(name, leaf.clone())
            elif isinstance(leaf, Tensor):
                self.register_parameter(name, nn.Parameter(leaf.clone()))
            elif type(leaf) in MIRRORS:
                self.add_module(name, MIRRORS[type(leaf)](leaf, cfg))
            elif leaf:
                self.add_module(name, nn.ModuleList(MIRRORS[type(each)](each, cfg) for each in leaf))

    def norm_of(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.cfg.norm_eps)


class Swiglu(Mirror):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = linear(x, torch.cat([self.gate, self.up], dim=1)).chunk(2, dim=-1)
        return linear(F.silu(gate) * up, self.down)


class Gdn(Mirror):
    """Graphs before the convolution, between it and the scan, and after; the kernels between are not traced."""

    COMPILED = ("project", "turn", "read")
    rule: Rule
    convolution: Rule

    def forward(self, x: Tensor, norm: Tensor, documents: Documents) -> Tensor:
        mixed, taps, gate, g, beta = self.project(x, norm)
        mixed = self.convolution(mixed[None], taps, activation="silu", cu_seqlens=documents.bounds)[0][0]
        q, k, v = self.turn(mixed, documents.position)
        values = (y[None] for y in (q, k, v, g, beta))
        o = self.rule(*values, cu_seqlens=documents.bounds, use_qk_l2norm_in_kernel=True)[0][0]
        return self.read(x, o, v, gate)

    def project(self, x: Tensor, norm: Tensor) -> tuple[Tensor, ...]:
        h = self.norm_of(x, norm)
        taps = torch.cat([self.q_conv, self.k_conv, self.v_conv])
        mixed = linear(h, torch.cat([self.q, self.k, self.v, self.output_gate], dim=1))
        mixed, gate = mixed.split([taps.shape[0], self.output_gate.shape[1]], dim=-1)
        step, write = (h.float() @ torch.cat([self.decay, self.write], dim=1)).chunk(2, dim=-1)
        g = -self.A_log.exp()[:, 0] * F.softplus(step + self.dt_bias)
        return mixed, taps, gate, g, torch.sigmoid(write) * (2.0 if self.cfg.gdn_allow_neg_eigval else 1.0)

    def turn(self, mixed: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cfg = self.cfg
        keys, values = (cfg.gdn_n_key_heads, cfg.gdn_key_dim), (cfg.gdn_n_heads, cfg.gdn_value_dim)
        q, k, v = mixed.split([math.prod(keys), math.prod(keys), math.prod(values)], dim=-1)
        q, k = (rotate(y.unflatten(-1, keys), position, cfg.gdn_rope_dim, cfg.rope_theta) for y in (q, k))
        return q, k, v.unflatten(-1, values).contiguous()

    def read(self, x: Tensor, o: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        if self.cfg.gdn_value_skip:
            o = o + (self.skip[:, None] * v).to(o.dtype)
        gate = gate.view(o.shape).float()
        o = (self.norm_of(o.float(), self.norm) * F.silu(gate)).to(o.dtype)
        return x + linear(o.flatten(1), self.out)


class Mla(Mirror):
    def forward(self, x: Tensor, norm: Tensor, documents: Documents) -> Tensor:
        cfg, h = self.cfg, self.norm_of(x, norm)
        widths = [cfg.q_lora_rank, cfg.kv_lora_rank, cfg.qk_rope_head_dim]
        down = torch.cat([self.q_down, self.kv_down, self.k_rope], dim=1)
        q_latent, latent, k_rope = linear(h, down).split(widths, dim=-1)
        q = linear(self.norm_of(q_latent, self.q_norm), self.q_up).unflatten(-1, (cfg.n_heads, -1))
        up = linear(self.norm_of(latent, self.kv_norm), torch.cat([self.k_up, self.v_up], dim=1))
        k, v = (
            y.unflatten(-1, (cfg.n_kv_groups, -1)) for y in up.split([self.k_up.shape[1], self.v_up.shape[1]], dim=-1)
        )
        turn = partial(rotate, position=documents.position, dims=cfg.qk_rope_head_dim, theta=cfg.rope_theta)
        q = torch.cat([q[..., : cfg.qk_nope_head_dim], turn(q[..., cfg.qk_nope_head_dim :])], dim=-1)
        k = torch.cat([k, turn(k_rope[:, None]).expand(-1, cfg.n_kv_groups, -1)], dim=-1)
        return x + linear(attend(q, k, v.contiguous(), documents).flatten(1), self.out)


class Moe(Mirror):
    BUFFERS = ("bias", "load")

    def __init__(self, params: MoeParams, cfg: ModelConfig) -> None:
        super().__init__(params, cfg)
        self.register_buffer("assigned", torch.zeros_like(params.bias))

    def forward(self, x: Tensor) -> Tensor:
        cfg = self.cfg
        logits = x.float() @ self.router
        chosen = (logits.sigmoid() + self.bias).detach().topk(cfg.n_activated_experts, dim=-1).indices
        weight = F.logsigmoid(logits).gather(-1, chosen).softmax(-1).to(x.dtype)
        order = chosen.flatten().argsort(stable=True)
        inverse = torch.empty_like(order).scatter(0, order, torch.arange(order.numel(), device=x.device))
        count = (chosen.flatten()[:, None] == torch.arange(cfg.n_routed_experts, device=x.device)).sum(0)
        self.assigned += count

        product = partial(grouped, ends=count.cumsum(0).int())
        copies = x[:, None].expand(-1, cfg.n_activated_experts, -1).flatten(0, 1)
        both = torch.cat([self.routed.gate, self.routed.up], dim=2).to(x.dtype)
        gate, up = product(Permute.apply(copies, order, inverse), both).chunk(2, dim=-1)
        y = product(F.silu(gate) * up, self.routed.down.to(x.dtype))
        y = (Permute.apply(y, inverse, order).view(*chosen.shape, -1) * weight[..., None]).sum(1)
        return y + self.shared(x) if cfg.n_shared_experts else y

    def rebalance(self) -> None:
        """Moves the bias towards an even load, from the counts of the step."""
        share = self.assigned / self.assigned.sum().clamp(min=1.0)
        self.load.lerp_(share, self.cfg.moe_ema_alpha)
        change = self.cfg.moe_bias_speed * torch.sign(self.load.mean() - self.load)
        self.bias += change - change.mean()
        self.assigned.zero_()


class Layer(Mirror):
    def forward(self, x: Tensor, documents: Documents) -> Tensor:
        x = self.mixer(x, self.mixer_norm, documents)
        return self.feed(x) if hasattr(self, "ffn") else x

    def feed(self, x: Tensor) -> Tensor:
        return x + self.ffn(self.norm_of(x, self.ffn_norm))


class Mtp(Mirror):
    COMPILED = ("forward",)

    def forward(self, hidden: Tensor, ahead: Tensor) -> Tensor:
        norms = self.norm_of(hidden, self.hidden_norm), self.norm_of(ahead, self.embed_norm)
        merged = linear(torch.cat(norms, dim=-1), self.merge)
        return merged + self.ffn(self.norm_of(merged, self.ffn_norm))


class Twin(Mirror):
    """Loss of a micro-batch: its part of the step's."""

    COMPILED = ("embed", "nats")
    dtype = torch.float32

    def forward(self, batch: MicroBatch) -> Tensor:
        # Once, so that the gradients of its uses add up in this dtype.
        table = self.table.to(self.dtype)
        head = table if self.cfg.tie_embeddings else self.head.to(self.dtype)
        embedded = self.embed(batch.tokens, table)
        hidden = embedded.flatten(0, 1)
        for layer in self.blocks:
            hidden = layer(hidden, batch.documents)
        total = batch.weights[0] * self.nats(hidden, head, batch.labels[0])
        for k in range(1, self.cfg.mtp_depth + 1):
            hidden = self.mtp[k - 1](hidden, embedded.roll(-k, dims=1).flatten(0, 1))
            total = total + batch.weights[k] * self.nats(hidden, head, batch.labels[k])
        return total

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        return F.embedding(tokens, table)

    def nats(self, hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
        logits = (self.norm_of(hidden, self.norm) @ head.mT).float()
        capped = self.cfg.logit_softcap * torch.tanh(logits / self.cfg.logit_softcap)
        return F.cross_entropy(capped, labels, ignore_index=IGNORED, reduction="sum")


MIRRORS: dict[type, type[Mirror]] = {
    SwigluParams: Swiglu,
    ExpertParams: Mirror,
    GdnParams: Gdn,
    MlaParams: Mla,
    MoeParams: Moe,
    Block: Layer,
    MtpParams: Mtp,
    ModelParams: Twin,
}


def build_twin(params: ModelParams, config: HyMoConfig, rule: Rule, convolution: Rule, compile: Any = "none") -> Twin:
    """The twin of a model, with copies of its parameters; a GDN layer is compiled in parts, any other as a whole."""
    if config.model.gdn_rule != "gated_delta":
        raise ValueError(f"the twin has the rule gated_delta only, got model.gdn_rule={config.model.gdn_rule}")
    twin = Twin(params, config.model)
    twin.dtype = getattr(torch, config.training.precision)
    for module in twin.modules():
        names: tuple[str, ...] = getattr(module, "COMPILED", ())
        if isinstance(module, Gdn):
            module.rule, module.convolution = rule, convolution
        if isinstance(module, Layer):
            names = ("feed",) if isinstance(module.mixer, Gdn) else ("forward",)
        for name in names if compile != "none" else ():
            setattr(module, name, torch.compile(getattr(module, name), backend=compile))
    return twin


def choose_convolution(device: str) -> tuple[Rule, str]:
    """The convolution there is, and whose it is."""
    if device == "cuda" and importlib.util.find_spec("fla"):
        return importlib.import_module("fla.modules.causal_conv1d").causal_conv1d, "fla"
    return causal_conv1d, "hymo"


# The optimisers


def orthogonalize(x: Tensor) -> Tensor:
    """Newton-Schulz of a stack of matrices, in bf16 on a GPU."""
    if x.shape[-2] > x.shape[-1]:
        return orthogonalize(x.mT).mT
    y = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    y = y.bfloat16() if x.is_cuda else y
    for a, b, c in QUINTIC:
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.to(x.dtype)


class Normuon:
    """NorMuon of matrices, those of one shape stacked; all of it one graph."""

    def __init__(self, params: list[nn.Parameter], cfg: OptimizerConfig, compile: Any) -> None:
        self.cfg, shapes = cfg, sorted({p.shape for p in params})
        self.groups = [[p for p in params if p.shape == shape] for shape in shapes]
        self.momentum = [torch.stack([torch.zeros_like(p) for p in group]) for group in self.groups]
        self.square = [torch.zeros_like(m[..., :1, :]) for m in self.momentum]
        self.rate = torch.zeros((), device=params[0].device)
        self.update = self._update if compile == "none" else torch.compile(self._update, backend=compile)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        self.rate.fill_(rate)
        grads = [[p.grad for p in group] for group in self.groups]
        self.update(self.groups, grads, self.momentum, self.square, self.rate)

    def _update(self, groups: Any, grads: Any, momenta: Any, squares: Any, rate: Tensor) -> None:
        cfg = self.cfg
        for params, each, momentum, square in zip(groups, grads, momenta, squares, strict=True):
            grad = torch.stack(each)
            momentum.lerp_(grad, 1 - cfg.muon_momentum)
            polar = orthogonalize(grad.lerp(momentum, cfg.muon_momentum))
            rows, columns = polar.shape[-2:]
            square.lerp_(polar.square().mean(-2, keepdim=True), 1 - cfg.muon_beta2)
            update = polar / (square.sqrt() + cfg.muon_eps)
            size: Any = polar.norm(dim=(-2, -1), keepdim=True) * math.sqrt(max(1.0, columns / rows))
            if cfg.muon_scale == "rms":
                size = 0.2 * math.sqrt(rows * columns)
            update = update * (size / (update.norm(dim=(-2, -1), keepdim=True) + cfg.muon_eps))
            for p, u in zip(params, update, strict=True):
                decayed = torch.where(u * p >= 0, p, 0.0) if cfg.cautious_wd else p
                p.sub_(rate * (u + cfg.muon_weight_decay * decayed))


def decay_(moved: list[Tensor], before: list[Tensor], rate: Tensor, *, cautious: bool) -> None:
    """Takes from each entry `rate` of what it was before its update, where that shrank it too if cautious."""
    for x, old in zip(moved, before, strict=True):
        x.sub_(rate * (torch.where((old - x) * old >= 0, old, 0.0) if cautious else old))


class TwinStep:
    """A training step of the twin, in place: call it with the micro-batches; the result is the loss."""

    def __init__(self, twin: Twin, config: HyMoConfig, spec: ModelParams, compile: Any = "none") -> None:
        cfg, named = config.optimizer, dict(twin.named_parameters())
        owner = group_paths(spec, cfg)
        groups = {name: [named[path] for path in named if owner[path] == name] for name in set(owner.values())}
        rest = [p for name in groups if name != "normuon" for p in groups[name]]
        adam: dict[str, Any] = {"betas": cfg.adamw_betas, "eps": cfg.adamw_eps, "weight_decay": 0.0, "fused": True}
        adam["capturable"] = rest[0].is_cuda
        self.twin, self.config, self.params, self.taken = twin, config, list(named.values()), 0
        self.normuon = Normuon(groups["normuon"], cfg, compile)
        self.adamw = torch.optim.AdamW(rest, lr=cfg.adamw_lr, **adam)
        decays = {"adamw": cfg.adamw_weight_decay, "adamw_embed": cfg.adamw_embed_weight_decay}
        self.decays = [(groups[name], decay) for name, decay in decays.items() if name in groups and decay]
        decay = partial(decay_, cautious=cfg.cautious_wd)
        self.decay = decay if compile == "none" else torch.compile(decay, backend=compile)
        self.rate = torch.zeros((), device=rest[0].device)
        self.schedule = build_schedule(config.scheduler)

    def gradients(self, batches: list[MicroBatch]) -> Tensor:
        """Adds the gradients of a step to those of the parameters; returns the loss."""
        total = torch.zeros((), device=self.params[0].device)
        for batch in batches:
            loss = self.twin(batch)
            loss.backward()
            total = total + loss.detach()
        return total

    def __call__(self, batches: list[MicroBatch]) -> Tensor:
        cfg, factor = self.config.optimizer, float(self.schedule(torch.tensor(self.taken)))
        loss = self.gradients(batches)
        torch.nn.utils.clip_grad_norm_(self.params, self.config.training.grad_clip)
        self.normuon.step(cfg.muon_lr * factor)
        self.adamw.param_groups[0]["lr"] = cfg.adamw_lr * factor
        with torch.no_grad():
            before = [[p.clone() for p in params] for params, _ in self.decays]
            self.adamw.step()
            for (params, decay), old in zip(self.decays, before, strict=True):
                self.decay(params, old, self.rate.fill_(cfg.adamw_lr * factor * decay))
            for module in self.twin.modules():
                if isinstance(module, Moe):
                    module.rebalance()
        self.twin.zero_grad()
        self.taken += 1
        return loss
