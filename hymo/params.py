"""Parameters, declared once: `q: Float[Tensor, "d k"] = matrix(inputs="d")` beside the layer that uses it.

The class read with sizes (`declare`) is a tree of `ParamSpec`. Initial values, counts, optimiser groups, compute
dtypes and checkpoint names are all derived from that tree; nothing about a weight is written down twice.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from hymo import tree

T = TypeVar("T")
Role = Literal["matrix", "expert", "gate", "embed", "vector", "buffer"]
Initializer = Callable[[torch.Generator, tuple[int, ...], int], Tensor]

ROLES: tuple[Role, ...] = get_args(Role)
COMPUTE_ROLES: tuple[Role, ...] = ("matrix", "expert", "embed")
"""Roles used in the compute dtype; gates, vectors and buffers stay in fp32."""


def uniform_fan_in(generator: torch.Generator, shape: tuple[int, ...], fan_in: int) -> Tensor:
    """U(-1/sqrt(fan_in), 1/sqrt(fan_in))."""
    bound = fan_in**-0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def normal(std: float) -> Initializer:
    """N(0, std^2)."""
    return lambda generator, shape, fan_in: torch.empty(shape).normal_(0.0, std, generator=generator)


def normal_fan_in(std: float) -> Initializer:
    """N(0, std^2 / fan_in)."""
    return lambda generator, shape, fan_in: torch.empty(shape).normal_(0.0, std * fan_in**-0.5, generator=generator)


def constant(value: float) -> Initializer:
    """Every entry `value`."""
    return lambda generator, shape, fan_in: torch.full(shape, value)


def power(exponent: float) -> Initializer:
    """Every entry `size ** exponent`, for the axis `of` the declaration."""
    return lambda generator, shape, size: torch.full(shape, float(size) ** exponent)


@dataclass(frozen=True)
class ParamSpec:
    """What one parameter is, before it has values.

    Args:
        axes: one letter (or word) per dimension, as in the annotation.
        shape: sizes of the axes.
        role: decides optimiser group, weight decay and compute dtype. `matrix`: a 2-D map inside a layer; `expert`: a
            stack of them; `gate`: a small map whose output steers the layer (router, decay, write strength), kept in
            fp32; `embed`: the token table; `vector`: norms, convolutions, per-head scalars; `buffer`: no gradient.
        inputs: the axes that a token is contracted with, separated by spaces; empty if it is not multiplied and summed.
        of: instead, an axis that only the initial value depends on; it need not be one of `axes`.
        fan_in: what the initialiser is told: product of the sizes of `inputs`, or the size `of`, or 1.
        init: draws the initial value.
        residual: whether the output is added to the residual stream, which divides the draw by sqrt(2 depth).
        gain: the factor on the draw.
    """

    axes: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    role: Role = "vector"
    inputs: str = ""
    of: str = ""
    fan_in: int = 1
    init: Initializer = uniform_fan_in
    residual: bool = False
    gain: float = 1.0

    @property
    def size(self) -> int:
        """Number of scalars."""
        return math.prod(self.shape)

    def draw(self, generator: torch.Generator) -> Tensor:
        """The initial value, fp32."""
        return self.init(generator, self.shape, self.fan_in) * self.gain


def matrix(inputs: str, init: Initializer = uniform_fan_in, residual: bool = False) -> Any:
    """Declares a weight `(in, out)` applied as `x @ w`."""
    return ParamSpec(role="matrix", inputs=inputs, init=init, residual=residual)


def expert(inputs: str, residual: bool = False) -> Any:
    """Declares a stack of weights `(experts, in, out)`."""
    return ParamSpec(role="expert", inputs=inputs, residual=residual)


def gate(inputs: str, init: Initializer = uniform_fan_in) -> Any:
    """Declares a small map that is used in fp32."""
    return ParamSpec(role="gate", inputs=inputs, init=init)


def embed(inputs: str, init: Initializer) -> Any:
    """Declares a token table `(vocabulary, dim)`; `inputs` is the axis contracted when it is the output head."""
    return ParamSpec(role="embed", inputs=inputs, init=init)


def vector(init: Initializer, inputs: str = "", of: str = "") -> Any:
    """Declares norms, per-head scalars, convolution taps: whatever is not a matrix, used in fp32."""
    return ParamSpec(role="vector", inputs=inputs, of=of, init=init)


def buffer(init: Initializer, of: str = "") -> Any:
    """Declares state of the model that is checkpointed but not moved by a gradient."""
    return ParamSpec(role="buffer", of=of, init=init)


def is_spec(node: Any) -> bool:
    """Whether a node is a leaf of a spec tree."""
    return isinstance(node, ParamSpec)


def declare(params: type[T], sizes: Mapping[str, int], *, depth: int = 1, **given: Any) -> T:
    """The specs of a parameter class: its annotations and declarations, read with `sizes`.

    Args:
        params: a NamedTuple class whose fields have a jaxtyping annotation and a declaration.
        sizes: the length of each axis letter.
        depth: number of layers of the residual stream.
        given: fields that are not read: sub-trees, and `()` for what a configuration leaves out.
    """
    fields: Any = params

    def read(name: str) -> ParamSpec:
        hint = next(h for h in (fields.__annotations__[name], *get_args(fields.__annotations__[name])) if is_array(h))
        axes = tuple(hint.dim_str.split())
        declared: ParamSpec = fields._field_defaults[name]
        return replace(
            declared,
            axes=axes,
            shape=tuple(sizes[axis] for axis in axes),
            fan_in=math.prod(sizes[axis] for axis in (declared.inputs or declared.of).split()),
            gain=(2 * depth) ** -0.5 if declared.residual else 1.0,
        )

    return params(**{name: given[name] if name in given else read(name) for name in fields._fields})


def is_array(hint: Any) -> bool:
    """Whether an annotation is a jaxtyping array with a shape."""
    return hasattr(hint, "dim_str")


def initialize(spec: T, seed: int, *, device: torch.device | str = "cpu") -> T:
    """Initial values of a spec tree.

    Each leaf has its own generator, seeded by `seed` and the leaf's path: a weight depends neither on which other
    weights exist nor on their order.
    """
    names = iter(tree.paths(spec, is_leaf=is_spec))

    def draw(leaf: ParamSpec) -> Tensor:
        digest = hashlib.sha256(f"{seed}/{next(names)}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        return leaf.draw(generator).to(device)

    return tree.map(draw, spec, is_leaf=is_spec)


def abstract(spec: T) -> T:
    """The tree of tensors without storage (device `meta`)."""
    return tree.map(lambda leaf: torch.empty(leaf.shape, device="meta"), spec, is_leaf=is_spec)


def check(spec: Any, params: Any) -> None:
    """Raises ValueError naming the first leaf that is missing, unknown, or of another shape or dtype."""
    wanted, found = tree.paths(spec, is_leaf=is_spec), tree.paths(params)
    for name in wanted:
        if name not in found:
            raise ValueError(f"parameter {name} is missing; the configuration asks for {list(wanted[name].shape)}")
    for name, leaf in found.items():
        if name not in wanted:
            raise ValueError(f"parameter {name} {list(leaf.shape)} is unknown to the configuration")
        if tuple(leaf.shape) != wanted[name].shape:
            asked = list(wanted[name].shape)
            raise ValueError(f"parameter {name} has shape {list(leaf.shape)}, the configuration asks for {asked}")
        if leaf.dtype != torch.float32:
            raise ValueError(f"parameter {name} is {leaf.dtype}, masters are torch.float32")


def partition(spec: T, params: T) -> tuple[T, T]:
    """`(trainable, buffers)`: two trees of one structure, each with `()` where the other holds the leaf."""

    def keep(wanted: bool) -> T:
        return tree.map(
            lambda leaf, value: value if (leaf.role == "buffer") is wanted else (), spec, params, is_leaf=is_spec
        )

    return keep(False), keep(True)


def for_compute(spec: Any, params: T, dtype: torch.dtype) -> T:
    """The parameters as layers use them: matrices, experts and the table in `dtype`, all else in fp32; holes stay."""

    def cast(leaf: ParamSpec, value: Any) -> Any:
        return value.to(dtype) if leaf.role in COMPUTE_ROLES and not tree.is_hole(value) else value

    result: T = tree.map(cast, spec, params, is_leaf=is_spec)
    return result


def count(spec: Any, *roles: Role) -> int:
    """Number of scalars with one of `roles`, by default of everything that is trained."""
    wanted = roles or tuple(role for role in ROLES if role != "buffer")
    return sum(leaf.size for leaf in tree.leaves(spec, is_leaf=is_spec) if leaf.role in wanted)
