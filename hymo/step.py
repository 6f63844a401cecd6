"""The step: `(state, batch) -> (state, metrics)`, pure, one graph from the tokens to the moved weights."""

from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hymo import tree
from hymo.backend import EAGER, Backend, keep
from hymo.batch import IGNORED, Batch
from hymo.config import HyMoConfig
from hymo.distributed import ALONE, Ranks
from hymo.layers.moe import Load, MoeParams, rebalance
from hymo.loss import Losses, label_counts, loss
from hymo.model import Block, ModelParams, given_back, lent
from hymo.optim import LARGEST_NORM, GradientTransform, apply_updates, build_schedule, clip, learning_rates
from hymo.optim.stacks import Stacks
from hymo.params import partition


class TrainState(NamedTuple):
    """All that training carries from step to step; what is checkpointed, once it is split.

    Parameters, and moments like them, are joined in the way of `hymo.optim.stacks` if the step's backend joins any.

    Args:
        params: fp32 masters and the buffers among them.
        optimizer: moments and peak learning rates.
        step: optimiser steps attempted.
        samples: rows of data seen; the data's only state.
        skipped: steps in a row, up to now, that were skipped because a gradient was not finite.
    """

    params: ModelParams
    optimizer: Any
    step: Int[Tensor, ""]
    samples: Int[Tensor, ""]
    skipped: Int[Tensor, ""]


class Metrics(NamedTuple):
    """What one step reports; per-layer rows are the layers with experts, in order.

    Args:
        loss: what is trained, nats.
        main: next-token loss, nats per label.
        mtp: loss of each MTP head, nats per label.
        grad_norm: of the whole gradient before clipping.
        muon_lr: NorMuon's learning rate in this step.
        adamw_lr: AdamW's learning rate in this step.
        tokens: labels that counted.
        finite: whether the step was taken.
        skipped: steps skipped in a row, this one included.
        load: fraction of a layer's assignments per expert.
        dropped: fraction of a layer's assignments lost to capacity.
        bias: balance of the router after the step.
    """

    loss: Float[Tensor, ""]
    main: Float[Tensor, ""]
    mtp: Float[Tensor, " depth"]
    grad_norm: Float[Tensor, ""]
    muon_lr: Float[Tensor, ""]
    adamw_lr: Float[Tensor, ""]
    tokens: Float[Tensor, ""]
    finite: Bool[Tensor, ""]
    skipped: Int[Tensor, ""]
    load: Float[Tensor, "layers e"]
    dropped: Float[Tensor, " layers"]
    bias: Float[Tensor, "layers e"]


def init_train_state(
    params: ModelParams, *, spec: ModelParams, optimizer: GradientTransform, backend: Backend = EAGER
) -> TrainState:
    """The state before the first step of a backend; what that does not join it shares with `params`."""
    zero = torch.zeros((), dtype=torch.int64, device=params.table.device)
    joined = stacks_of(spec, backend).join(params)
    trainable, _ = partition(spec, joined)
    return TrainState(joined, optimizer.init(trainable), zero, zero.clone(), zero.clone())


def stacks_of(spec: ModelParams, backend: Backend) -> Stacks:
    """How a backend's steps join a state."""
    return Stacks(spec, largest=backend.stacked)


def gradients(
    params: ModelParams,
    batch: Batch,
    *,
    cfg: HyMoConfig,
    spec: ModelParams,
    backend: Backend = EAGER,
    ranks: Ranks = ALONE,
) -> tuple[ModelParams, Float[Tensor, ""], Losses]:
    """The gradient of the step's loss, the loss, and its parts, added up over the micro-batches of all ranks.

    Every label of the step has the same weight, whichever micro-batch it is in.

    Args:
        batch: leaves of shape (micro-batches, rows, tokens), of this rank.
        ranks: among which parameters are split; the gradient then is, like them, this rank's shards.
    """
    counts = label_counts(batch, cfg.model.mtp_depth, ranks=ranks)
    capacity = cfg.model.moe_capacity(batch.tokens.shape[-1])
    # Once for all micro-batches, none of which lends again.
    params, backend = lent(params, spec, backend=backend), backend._replace(lend=keep)

    def of_part(params: ModelParams, part: Batch, counts: Tensor) -> tuple[ModelParams, Tensor, Losses]:
        trainable, buffers = partition(spec, params)

        def objective(moving: ModelParams) -> tuple[Tensor, Losses]:
            whole = tree.combine(moving, buffers)
            return loss(whole, part, counts, cfg=cfg.model, backend=backend, capacity=capacity)

        grads, (value, losses) = torch.func.grad_and_value(objective, has_aux=True)(trainable)
        return tree.map(torch.Tensor.float, grads), value, losses

    parts = [Batch(*leaves) for leaves in zip(*(leaf.unbind() for leaf in batch), strict=True)]
    if len(parts) == 1:
        grads, value, losses = of_part(params, parts[0], counts)
    else:
        add = backend.once(lambda before, *args: tree.add(before, of_part(*args)))
        so_far = _nothing(params, cfg=cfg, spec=spec)
        for part in parts:
            so_far = add(so_far, params, part, counts)
        grads, value, losses = so_far
    return ranks.sum_copies(given_back(grads)), *ranks.sum((value, losses))


def _nothing(params: ModelParams, *, cfg: HyMoConfig, spec: ModelParams) -> tuple[ModelParams, Tensor, Losses]:
    """The gradient, in fp32, loss and its parts of no micro-batch at all."""
    zeros = partial(torch.zeros, device=params.table.device)
    load = Load(zeros(cfg.model.n_routed_experts), zeros(()))
    losses = Losses(zeros(()), zeros(cfg.model.mtp_depth), (load,) * len(experts(params)))
    summed = tree.map(partial(torch.zeros_like, dtype=torch.float32), partition(spec, params)[0])
    return summed, zeros(()), losses


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    cfg: HyMoConfig,
    spec: ModelParams,
    optimizer: GradientTransform,
    backend: Backend = EAGER,
    ranks: Ranks = ALONE,
) -> tuple[TrainState, Metrics]:
    """One step: gradient, clipping, update, router balance.

    If loss or gradient is not finite, or the gradient is not clipped below `LARGEST_NORM`, nothing moves but the
    counters: parameters, moments and balance stay as they are. Loss and norm are those of all ranks, so that all find
    the same.

    Args:
        state: as `init_train_state` makes it for `backend`.
        batch: leaves of shape (micro-batches, rows, tokens), of this rank.
        ranks: among which the state is split, in the way of `hymo.sharding`; `backend` and `optimizer` know them too.

    Raises:
        ValueError: if the state is not joined as `backend` would.
    """
    stacks = stacks_of(spec, backend)
    of_parts, value, losses = gradients(
        stacks.parts(state.params), batch, cfg=cfg, spec=spec, backend=backend, ranks=ranks
    )
    trainable, buffers = partition(spec, state.params)
    grads = stacks.join(of_parts)
    norm = ranks.norm(grads)
    # Beyond that the optimiser would overflow.
    finite = torch.isfinite(value) & torch.isfinite(norm) & (norm.clamp(max=cfg.training.grad_clip) < LARGEST_NORM)

    clipped = clip(grads, norm, cfg.training.grad_clip)
    updates, after = optimizer.update(clipped, state.optimizer, trainable, state.step)
    moved, moments = tree.select(finite, (apply_updates(trainable, updates), after), (trainable, state.optimizer))
    balanced = tree.select(finite, _balanced(buffers, losses.loads, cfg=cfg), buffers)
    params = tree.combine(moved, balanced)

    rows = batch.tokens.shape[0] * batch.tokens.shape[1] * ranks.world
    skipped = torch.where(finite, 0, state.skipped + 1)
    reached = TrainState(params, moments, state.step + 1, state.samples + rows, skipped)
    return reached, _metrics(reached, state, batch, value, losses, norm, finite, cfg=cfg, ranks=ranks)


def experts(params: ModelParams) -> tuple[MoeParams, ...]:
    """The mixtures of experts, in the order of their layers."""
    return tuple(block.ffn for block in params.blocks if isinstance(block.ffn, MoeParams))


def _balanced(buffers: ModelParams, loads: tuple[Load, ...], *, cfg: HyMoConfig) -> ModelParams:
    remaining = iter(loads)

    def balance(block: Block) -> Block:
        if not isinstance(block.ffn, MoeParams):
            return block
        moe, speed, alpha = block.ffn, cfg.model.moe_bias_speed, cfg.model.moe_ema_alpha
        bias, load = rebalance(moe.bias, moe.load, next(remaining).assigned, speed=speed, alpha=alpha)
        return block._replace(ffn=moe._replace(bias=bias, load=load))

    return buffers._replace(blocks=tuple(balance(block) for block in buffers.blocks))


def _metrics(
    after: TrainState,
    before: TrainState,
    batch: Batch,
    value: Tensor,
    losses: Losses,
    norm: Tensor,
    finite: Tensor,
    *,
    cfg: HyMoConfig,
    ranks: Ranks,
) -> Metrics:
    rates = learning_rates(before.optimizer, before.step, schedule=build_schedule(cfg.scheduler))
    none = value.new_zeros(0, cfg.model.n_routed_experts)
    assigned = torch.stack([load.assigned for load in losses.loads]) if losses.loads else none
    dropped = torch.stack([load.dropped for load in losses.loads]) if losses.loads else none[:, 0]
    bias = torch.stack([moe.bias for moe in experts(after.params)]) if losses.loads else none
    total = assigned.sum(-1)
    return Metrics(
        loss=value,
        main=losses.main,
        mtp=losses.mtp,
        grad_norm=norm,
        muon_lr=rates["normuon"],
        adamw_lr=rates["adamw"],
        tokens=ranks.sum((batch.labels != IGNORED).sum().float()),
        finite=finite,
        skipped=after.skipped,
        load=assigned / total[:, None],
        dropped=dropped / total,
        bias=bias,
    )
