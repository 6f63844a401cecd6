"""The optimiser of a configuration: which transform moves which parameters, and at what rate."""

from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from hymo import tree
from hymo.config import OptimizerConfig, SchedulerConfig
from hymo.distributed import ALONE, Ranks
from hymo.optim.adamw import add_weight_decay, scale_by_adam
from hymo.optim.normuon import scale_by_normuon
from hymo.optim.schedule import LearningRateState, Schedule, scale_by_learning_rate, wsd
from hymo.optim.stacks import stacked
from hymo.optim.transform import GradientTransform, Group, Step, by_group, chain, owners, pick
from hymo.optim.whole_matrices import spread
from hymo.params import Role, is_spec

SMALL = 2**16
"""Elements of a leaf that AdamW moves together with others of its shape: vectors and gates, not experts."""

OPTIMISERS = {"normuon": "NorMuon", "adamw": "AdamW", "adamw_embed": "AdamW"}


class GroupRow(NamedTuple):
    """One line of the table of groups."""

    group: str
    optimiser: str
    tensors: int
    scalars: int


def build_optimizer(
    optimizer: OptimizerConfig, scheduler: SchedulerConfig, spec: Any, *, ranks: Ranks = ALONE
) -> GradientTransform:
    """NorMuon for matrices and AdamW for everything else, with decay and one schedule for both.

    The state is a dict by group name; in each group every transform keeps its own.

    Args:
        spec: of the whole parameters.
        ranks: among which they are split.
    """
    cfg, schedule, roles = optimizer, build_schedule(scheduler), roles_of(spec, optimizer)

    def moved_by(direction: GradientTransform, *, rate: float, decay: float) -> GradientTransform:
        return chain(
            direction, add_weight_decay(decay, cautious=cfg.cautious_wd), scale_by_learning_rate(rate, schedule)
        )

    matrices = pick(spec, spec, owners(spec, roles), "normuon")
    shapes = [leaf.shape for leaf in tree.leaves(matrices, is_leaf=is_spec)]
    normuon = scale_by_normuon(
        matrices,
        cfg.muon_momentum,
        beta2=cfg.muon_beta2,
        eps=cfg.muon_eps,
        scale=cfg.muon_scale,
        work=partial(spread, shapes=shapes, ranks=ranks) if ranks.world > 1 else None,
    )
    adam = scale_by_adam(*cfg.adamw_betas, eps=cfg.adamw_eps)
    transforms = {
        "normuon": moved_by(normuon, rate=cfg.muon_lr, decay=cfg.muon_weight_decay),
        "adamw": stacked(moved_by(adam, rate=cfg.adamw_lr, decay=cfg.adamw_weight_decay), largest=SMALL),
        "adamw_embed": moved_by(adam, rate=cfg.adamw_lr, decay=cfg.adamw_embed_weight_decay),
    }
    return by_group(spec, {name: Group(taken, transforms[name]) for name, taken in roles.items()})


def build_schedule(scheduler: SchedulerConfig) -> Schedule:
    """The schedule of a configuration."""
    return wsd(
        scheduler.total_steps,
        scheduler.warmup_steps,
        stable_steps=scheduler.stable_steps,
        decay_steps=scheduler.decay_steps,
        min_ratio=scheduler.min_lr_ratio,
        decay=scheduler.decay,
    )


def learning_rates(state: dict[str, Any], step: Step, *, schedule: Schedule) -> dict[str, Float[Tensor, ""]]:
    """The learning rate of each group at a step, read from an optimiser's state."""
    factor = schedule(step)
    return {
        name: part.peak * factor
        for name, parts in state.items()
        for part in parts
        if isinstance(part, LearningRateState)
    }


def roles_of(spec: Any, optimizer: OptimizerConfig) -> dict[str, tuple[Role, ...]]:
    """The roles of each group; a group without parameters in `spec` is left out."""
    experts: tuple[Role, ...] = ("expert",)
    roles: dict[str, tuple[Role, ...]] = {
        "normuon": ("matrix", *(experts if optimizer.normuon_experts else ())),
        "adamw": (*(() if optimizer.normuon_experts else experts), "gate", "vector"),
        "adamw_embed": ("embed",),
    }
    present = {leaf.role for leaf in tree.leaves(spec, is_leaf=is_spec)}
    return {name: taken for name, taken in roles.items() if present.intersection(taken)}


def group_paths(spec: Any, optimizer: OptimizerConfig) -> dict[str, str]:
    """The group of each trainable parameter, by its path."""
    owner = owners(spec, roles_of(spec, optimizer))
    leaves = tree.paths(spec, is_leaf=is_spec)
    return {path: owner[leaf.role] for path, leaf in leaves.items() if leaf.role != "buffer"}


def group_table(spec: Any, optimizer: OptimizerConfig) -> list[GroupRow]:
    """Group, optimiser, number of tensors, number of scalars: one row a group."""
    roles, leaves = roles_of(spec, optimizer), tree.leaves(spec, is_leaf=is_spec)

    def row(name: str) -> GroupRow:
        sizes = [leaf.size for leaf in leaves if leaf.role in roles[name]]
        return GroupRow(name, OPTIMISERS[name], len(sizes), sum(sizes))

    return [row(name) for name in roles]
