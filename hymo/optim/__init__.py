"""Optimisers: pairs of pure functions, chained, and routed by the role of each parameter."""

from hymo.optim.adamw import AdamState, add_weight_decay, scale_by_adam
from hymo.optim.groups import (
    GroupRow,
    build_optimizer,
    build_schedule,
    group_paths,
    group_table,
    learning_rates,
)
from hymo.optim.normuon import LARGEST_NORM, POLAR_EXPRESS, QUINTIC, NormuonState, orthogonalize, scale_by_normuon
from hymo.optim.schedule import LearningRateState, scale_by_learning_rate, wsd
from hymo.optim.transform import GradientTransform, Group, apply_updates, by_group, chain, clip

__all__ = [
    "LARGEST_NORM",
    "POLAR_EXPRESS",
    "QUINTIC",
    "AdamState",
    "GradientTransform",
    "Group",
    "GroupRow",
    "LearningRateState",
    "NormuonState",
    "add_weight_decay",
    "apply_updates",
    "build_optimizer",
    "build_schedule",
    "by_group",
    "chain",
    "clip",
    "group_paths",
    "group_table",
    "learning_rates",
    "orthogonalize",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_normuon",
    "wsd",
]
