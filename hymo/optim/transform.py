"""Optimisers as pairs of pure functions, chained, and routed by the role of each parameter.

A gradient tree has the structure of the parameters, with the hole `()` where a leaf belongs to another group or is a
buffer. A state is a tree too: it is checkpointed, donated and mapped over like everything else.
"""

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hymo import tree
from hymo.params import ParamSpec, Role, is_spec

T = TypeVar("T")
Step = Int[Tensor, ""]


class GradientTransform(NamedTuple):
    """What turns gradients into updates.

    `init(params)` is the state before the first step. `update(grads, state, params, step)` is the updates, which are
    added to the parameters, and the next state; `step` counts the optimiser steps attempted, from 0.
    """

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any, Step], tuple[Any, Any]]


class Group(NamedTuple):
    """The roles that one transform moves."""

    roles: tuple[Role, ...]
    transform: GradientTransform


def stateless(update: Callable[[Any, Any], Any]) -> GradientTransform:
    """The transform `update(grads, params)`; its state is the hole."""
    return GradientTransform(lambda params: (), lambda grads, state, params, step: (update(grads, params), state))


def chain(*transforms: GradientTransform) -> GradientTransform:
    """The transforms one after another; the state is the tuple of their states."""

    def init(params: Any) -> tuple[Any, ...]:
        return tuple(transform.init(params) for transform in transforms)

    def update(grads: Any, state: tuple[Any, ...], params: Any, step: Step) -> tuple[Any, tuple[Any, ...]]:
        after = []
        for transform, before in zip(transforms, state, strict=True):
            grads, now = transform.update(grads, before, params, step)
            after.append(now)
        return grads, tuple(after)

    return GradientTransform(init, update)


def by_group(spec: Any, groups: Mapping[str, Group]) -> GradientTransform:
    """One transform out of several, each for the parameters of its roles; the state is a dict by group.

    Raises:
        ValueError: unless every trainable parameter of `spec` is in exactly one group and every group has one.
    """
    owner = owners(spec, {name: group.roles for name, group in groups.items()})

    def init(params: Any) -> dict[str, Any]:
        return {name: group.transform.init(pick(spec, params, owner, name)) for name, group in groups.items()}

    def update(grads: Any, state: dict[str, Any], params: Any, step: Step) -> tuple[Any, dict[str, Any]]:
        moved = {
            name: group.transform.update(
                pick(spec, grads, owner, name), state[name], pick(spec, params, owner, name), step
            )
            for name, group in groups.items()
        }
        updates = reduce(tree.combine, (part for part, _ in moved.values()))
        return updates, {name: after for name, (_, after) in moved.items()}

    return GradientTransform(init, update)


def owners(spec: Any, roles: Mapping[str, tuple[Role, ...]]) -> dict[Role, str]:
    """The group of each role, from the roles of each group.

    Raises:
        ValueError: unless every trainable parameter of `spec` is in exactly one group and every group has one.
    """
    table = ", ".join(f"{name} ({', '.join(taken)})" for name, taken in roles.items())
    owner: dict[Role, str] = {}
    for name, taken in roles.items():
        for role in taken:
            if role in owner:
                raise ValueError(f"role {role} is in the groups {owner[role]} and {name}; give it to one of them")
            owner[role] = name
    trained = {path: leaf.role for path, leaf in tree.paths(spec, is_leaf=is_spec).items() if leaf.role != "buffer"}
    for path, role in trained.items():
        if role not in owner:
            raise ValueError(f"parameter {path} has role {role}, which is in no group; there are {table}")
    for name in roles:
        if name not in {owner[role] for role in trained.values()}:
            raise ValueError(f"group {name} has no parameter; remove it or one of its roles from {table}")
    return owner


def pick(spec: Any, values: T, owner: Mapping[Role, str], name: str) -> T:
    """The leaves of `values` whose role belongs to group `name`, holes elsewhere."""

    def keep(leaf: ParamSpec, value: Any) -> Any:
        return value if leaf.role != "buffer" and owner[leaf.role] == name else ()

    picked: T = tree.map(keep, spec, values, is_leaf=is_spec)
    return picked


def accumulators(params: T) -> T:
    """Zeros to average in: of the parameters' shapes, in fp32 or wider."""
    return tree.map(lambda x: torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)), params)


def clip(grads: T, norm: Float[Tensor, ""], max_norm: float) -> T:
    """`grads * min(1, max_norm / norm)`, where `norm` is the global norm that the step also reports.

    Source: Pascanu, Mikolov, Bengio 2013, arXiv:1211.5063; the 1e-6 is that of `torch.nn.utils.clip_grad_norm_`.
    """
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return tree.map(lambda grad: grad * factor, grads)


def apply_updates(params: T, updates: Any) -> T:
    """`params + updates`; a parameter without an update stays."""
    moved: T = tree.map(
        lambda update, param: param if tree.is_hole(update) else torch.add(param, update),
        updates,
        params,
        is_leaf=tree.is_hole,
    )
    return moved
