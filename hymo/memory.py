"""Memory of a training step on one rank, before anything is allocated: its layers run on fake tensors, watched."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hymo import tree
from hymo.backend import EAGER, GPU_LOGIT_BYTES, LOGIT_BYTES, Backend, with_compute_dtype
from hymo.batch import Batch
from hymo.config import HyMoConfig, ModelConfig, derive_config
from hymo.footprint import Footprint, Ledger, footprint, uncompiled_peak
from hymo.loss import loss
from hymo.model import ModelParams, lent, model_spec, trunk
from hymo.optim import build_optimizer
from hymo.params import COMPUTE_ROLES, ROLES, abstract, count, is_spec, partition
from hymo_kernels import routed_swiglu
from hymo_kernels.host.routed_swiglu import groups_serve
from hymo_kernels.host.triton_cross_entropy import chunk_of, triton_cross_entropy

SCAN_CHUNK = 64
"""Tokens that the scan kernel treats as one matrix product: it keeps a row of this size per token, and a state each."""
LOGIT = torch.float32
"""Of plain PyTorch; a kernel's logits are in the compute dtype."""
MOST_CHUNKS = 8
"""Chunks of the loss that are watched; more of them keep nothing more."""


class Memory(NamedTuple):
    """Bytes on one rank at the fullest moment of a step.

    Args:
        masters: fp32 parameters and buffers.
        moments: the optimiser's state, by group.
        gradients: those that exist at that moment, in fp32 but for the experts' in a compiled step of lower precision.
        copies: parameters in the compute dtype, and those gathered from other ranks.
        activations: what one micro-batch keeps for its backward, and what is being worked on.
        logits: what is made of one chunk of logits.
    """

    masters: int
    moments: dict[str, int]
    gradients: int
    copies: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.masters + sum(self.moments.values()) + self.gradients + self.copies + self.activations + self.logits


class Moment(NamedTuple):
    """Bytes that exist at one moment of a step, beside parameters and optimiser state."""

    activations: int
    gradients: int
    logits: int


def step_memory(config: HyMoConfig, world_size: int = 1) -> Memory:
    """Memory of a step at its fullest moment: when the loss is known, or while a layer's gradient is pulled back.

    A compiled step frees each tensor after its last use, and inductor fuses elementwise operations (`Ledger`). Without
    compilation, all that a micro-batch makes stays until its gradient is complete. Gathered parameters are taken to
    stay for the whole step.

    Args:
        world_size: ranks, of which `training.shard_ranks` share masters, moments and gradients if sharding is fsdp2.
    """
    spec, trained = model_spec(config.model), config.training
    ranks = (trained.shard_ranks or world_size) if trained.sharding == "fsdp2" else 1
    copied = () if _dtype(config) == torch.float32 else COMPUTE_ROLES
    gathered = tuple(role for role in ROLES if role not in copied) if ranks > 1 else ()
    copies = [_dtype(config).itemsize * _count(spec, copied), 4 * _count(spec, gathered)]
    fullest = max(_moments_of_a_step(config, ranks), key=sum)
    return Memory(
        masters=4 * count(spec, *ROLES) // ranks,
        moments={group: size // ranks for group, size in _optimizer_state(config, spec).items()},
        gradients=fullest.gradients,
        copies=sum(copies),
        activations=fullest.activations,
        logits=fullest.logits,
    )


def uses_kernels(config: HyMoConfig) -> bool:
    """Whether the estimate is for Triton's kernels and grouped products of experts, as on a Hopper GPU: asked for, or
    what `auto` means where inductor compiles."""
    trained = config.training
    return trained.backend == "triton" or (trained.backend == "auto" and trained.compile == "inductor")


def _moments_of_a_step(config: HyMoConfig, ranks: int) -> list[Moment]:
    spec = model_spec(config.model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        kinds = {kind: _layer(config, one) for kind, one in _one_layer_models(config).items()}
        ends = _ends(config, kinds)
        logits = _logits(config)
    layers = [kinds["mla" if index in config.model.mla_layers else "gdn"] for index in range(config.model.n_layers)]
    blocks = [gradient_bytes(config, block, ranks) for block in spec.blocks]
    whole = gradient_bytes(config, spec, ranks)
    summed = 4 * count(spec) // ranks if config.training.gradient_accumulation_steps > 1 else 0

    kept = ends.kept + sum(layer.kept for layer in layers)
    if config.training.compile == "none":
        return [Moment(kept, summed, 0)]
    moments = [Moment(kept, summed, logits)]
    for index, layer in enumerate(layers):
        before = sum(each.kept for each in layers[:index])
        moments.append(Moment(before + layer.backward, summed + whole - sum(blocks[: index + 1]), 0))
    return moments


def gradient_bytes(config: HyMoConfig, spec: Any, ranks: int) -> int:
    """Bytes of a gradient on one rank. Inductor converts an expert's where it is used, if it is not for other ranks."""
    narrow = 4 - _dtype(config).itemsize if config.training.compile == "inductor" and ranks == 1 else 0
    return (4 * count(spec) - narrow * _count(spec, ("expert",))) // ranks


def _one_layer_models(config: HyMoConfig) -> dict[str, ModelConfig]:
    """The kinds of layers in the model, each as a model of one such layer."""
    model = config.model
    alone = {
        "mla": (model.mla_layers, {"n_layers": 1, "mla_offset": 0, "mla_every": 1}),
        "gdn": (model.gdn_layers, {"n_layers": 1, "mla_offset": 1, "mla_every": 2}),
    }
    return {kind: derive_config(config, model=keys).model for kind, (layers, keys) in alone.items() if layers}


def _layer(config: HyMoConfig, one: ModelConfig) -> Footprint:
    """What one layer takes, the residual stream that leaves it included."""
    spec = ModelParams(table=(), blocks=model_spec(one).blocks, norm=(), head=())  # type: ignore[arg-type]
    moving, buffers = partition(spec, _fake(config, spec))
    x = torch.empty(config.training.micro_batch_size, config.training.max_seq_len, one.dim, dtype=_dtype(config))
    ledger, batch = _ledger(config), _batch(config)
    backend, capacity = _implementation(config, ledger), one.moe_capacity(x.shape[1])

    def through(moving: ModelParams, x: Tensor) -> Tensor:
        whole = tree.combine(moving, buffers)
        return trunk(whole, x, cfg=one, position=batch.position, backend=backend, capacity=capacity).hidden

    if config.training.compile != "none":
        return footprint(through, moving, x, ledger=ledger)
    # What stays cannot be seen once the gradient is there, but a second layer adds it.
    once = uncompiled_peak(through, moving, x)
    twice = uncompiled_peak(lambda moving, x: through(moving, through(moving, x)), moving, x)
    return Footprint(once, twice - once, once)


def _ends(config: HyMoConfig, kinds: dict[str, Footprint]) -> Footprint:
    """What embedding, heads and loss take beside the layers: a model of one layer, without the layer."""
    kind, one = next(iter(_one_layer_models(config).items()))
    spec, layer, batch = model_spec(one), kinds[kind], _batch(config)
    moving, buffers = partition(spec, _fake(config, spec))
    counts, capacity, ledger = torch.ones(one.mtp_depth + 1), one.moe_capacity(batch.tokens.shape[1]), _ledger(config)
    implementation = _implementation(config, ledger)
    if not uses_kernels(config):
        budget = max(LOGIT_BYTES, LOGIT.itemsize * batch.tokens.numel() * one.vocab_size // MOST_CHUNKS)
        implementation = implementation._replace(cross_entropy=partial(EAGER.cross_entropy, logit_bytes=budget))

    def objective(moving: ModelParams) -> Tensor:
        whole = tree.combine(moving, buffers)
        return loss(whole, batch, counts, cfg=one, backend=implementation, capacity=capacity)[0]

    if config.training.compile == "none":
        peak = uncompiled_peak(objective, moving)
        return Footprint(peak, peak - layer.kept, peak)
    whole = footprint(objective, moving, ledger=ledger)
    return Footprint(*(both - of_layer for both, of_layer in zip(whole, layer, strict=True)))


def _logits(config: HyMoConfig) -> int:
    """What one chunk of logits takes, beside what it leaves for the backward."""
    model, tokens = config.model, _batch(config).tokens.numel()
    if uses_kernels(config):
        size = _dtype(config).itemsize
        return size * model.vocab_size * chunk_of(tokens, model.vocab_size, size, GPU_LOGIT_BYTES)
    chunk = min(max(1, LOGIT_BYTES // (LOGIT.itemsize * model.vocab_size)), tokens)
    labels, weight = torch.zeros(chunk, dtype=torch.int64), torch.ones(chunk)
    hidden, table = (torch.empty(rows, model.dim, dtype=_dtype(config)) for rows in (chunk, model.vocab_size))

    def nats(hidden: Tensor, table: Tensor) -> Tensor:
        return EAGER.cross_entropy(hidden, table, labels, weight, cap=model.logit_softcap)

    head = footprint(nats, hidden, table, ledger=_ledger(config))
    return head.forward - head.kept


def _dtype(config: HyMoConfig) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, config.training.precision)
    return dtype


def _count(spec: Any, roles: tuple[Any, ...]) -> int:
    return count(spec, *roles) if roles else 0


def _fake(config: HyMoConfig, spec: ModelParams) -> ModelParams:
    """Parameters as the layers' regions are given them, in the dtype in which they are used."""

    def empty(leaf: Any) -> Tensor:
        return torch.empty(leaf.shape, dtype=_dtype(config) if leaf.role in COMPUTE_ROLES else torch.float32)

    params, backend = tree.map(empty, spec, is_leaf=is_spec), with_compute_dtype(EAGER, _dtype(config))
    return lent(params, spec, backend=backend)


def _batch(config: HyMoConfig) -> Batch:
    ids = torch.zeros(config.training.micro_batch_size, config.training.max_seq_len, dtype=torch.int64)
    return Batch(ids, ids, ids)


def _ledger(config: HyMoConfig) -> Ledger:
    return Ledger(fused=config.training.compile == "inductor")


def _implementation(config: HyMoConfig, ledger: Ledger) -> Backend:
    return _kernels(ledger) if uses_kernels(config) else EAGER


def _optimizer_state(config: HyMoConfig, spec: ModelParams) -> dict[str, int]:
    """Bytes of the optimiser's state, by group."""
    trainable, _ = partition(spec, abstract(spec))
    state = build_optimizer(config.optimizer, config.scheduler, spec).init(trainable)
    return {group: sum(leaf.nbytes for leaf in tree.leaves(part)) for group, part in state.items()}


class Opaque(torch.autograd.Function):
    """A kernel as memory sees it: it reads and keeps its inputs, makes and keeps results, and makes gradients."""

    @staticmethod
    def forward(run: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        return run(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.inputs = len(inputs) - 1
        ctx.save_for_backward(*inputs[1:], *output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *(x.new_empty(x.shape) for x in ctx.saved_tensors[: ctx.inputs])


def _kernels(ledger: Ledger) -> Backend:
    """Stand-ins for the kernels: they take and keep the memory that those do, and compute nothing. Experts are real."""

    def all_of(run: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        def read(*inputs: Tensor) -> tuple[Tensor, ...]:
            ledger.materialize(inputs)
            return run(*inputs)

        results: tuple[Tensor, ...] = Opaque.apply(read, *inputs)  # type: ignore[no-untyped-call]
        return results

    def call(run: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> Tensor:
        return all_of(run, *inputs)[0]

    def heads(x: Tensor, *inputs: Tensor, key_heads: int, key_dim: int, value_heads: int) -> tuple[Tensor, ...]:
        values = x.shape[2] - 2 * key_heads * key_dim
        shapes = (key_heads, key_dim), (key_heads, key_dim), (value_heads, values // value_heads)
        return tuple(x.new_empty(*x.shape[:2], *shape) for shape in shapes)

    def conv(*inputs: Tensor, position: Tensor, initial_state: None, output_final_state: bool, **sizes: Any) -> Any:
        return *all_of(partial(heads, **sizes), *inputs), None

    def delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        b, t, heads, features = v.shape
        states = v.new_empty(b, -(-t // SCAN_CHUNK), heads, k.shape[-1], features)
        return v.new_empty(v.shape), v.new_empty(b, t, heads, SCAN_CHUNK), states

    def linear(v: Tensor, b: Tensor, c: Tensor, g: Tensor, A_log: Tensor) -> tuple[Tensor, ...]:
        return (v.new_empty(v.shape),)

    def softmax(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return v.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)

    def experts(x: Tensor, *others: Any, capacity: int) -> Any:
        backend: Any = "grouped" if groups_serve(x, others[-1]) else "eager"
        return routed_swiglu(x, *others, capacity=capacity, backend=backend)

    return EAGER._replace(
        scan=lambda *inputs, **options: (call(delta, *inputs), None),
        conv=conv,
        linear_scan=lambda *inputs, **options: (call(linear, *inputs), None),
        attend=lambda *inputs, **options: call(softmax, *inputs),
        experts=experts,
        # Its chunk of logits is inside, and counted by `_logits`.
        cross_entropy=lambda *inputs, cap: triton_cross_entropy(*inputs, cap, 1),
    )
