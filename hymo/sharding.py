"""FSDP-2's storage for a pure step: each parameter split along its first axis, gathered where a layer uses it.

`fully_shard` makes the shards of a module that has parameters and nothing else; its runtime is not used. A step works
on them as plain tensors, so that `torch.func` and the compiler see nothing special: shard s of a parameter of n rows is
rows [s c, (s + 1) c) with c = ceil(n / shards), filled up with zeros where there are fewer. Every rank therefore
compiles the same graph; rows of zeros have no gradient and stay zero. Moments are split like their parameters.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from hymo import tree
from hymo.backend import Backend, keep
from hymo.distributed import SHARDS, Ranks
from hymo.model import ModelParams
from hymo.params import COMPUTE_ROLES, ParamSpec, is_spec
from hymo_kernels.primitive import differentiable

T = TypeVar("T")


def gather_forward(shard: Float[Tensor, " n"], dtype: torch.dtype, shards: int, group: str) -> Float[Tensor, " all"]:
    """The shards of all ranks of `group`, one after another, in `dtype`; the gradient is added up over them in fp32."""
    ops = torch.ops._c10d_functional
    whole: Tensor = ops.wait_tensor(ops.all_gather_into_tensor(shard.to(dtype), shards, group))
    return whole


def _gather_backward(
    needs: tuple[bool, ...], arguments: tuple[Any, ...], outputs: tuple[Any, ...], grads: tuple[Any, ...]
) -> tuple[Tensor | None, ...]:
    _, _, shards, group = arguments
    return reduce_scatter(grads[0].float(), shards, group), None, None, None


def reduce_scatter(x: Float[Tensor, " all"], shards: int, group: str) -> Float[Tensor, " n"]:
    """This rank's part of the sum over all ranks of `group`.

    On a CPU it is added up in the order of the ranks, which makes one run of one seed, bit by bit, of any number of
    ranks with the same micro-batches; on a GPU in whatever order is fastest.
    """
    ops = torch.ops._c10d_functional
    if x.device.type != "cpu":
        fast: Tensor = ops.wait_tensor(ops.reduce_scatter_tensor(x.contiguous(), "sum", shards, group))
        return fast
    parts = [x.shape[0] // shards] * shards
    of_ranks: Tensor = ops.wait_tensor(ops.all_to_all_single(x.contiguous(), parts, parts, group)).view(shards, -1)
    return reduce(torch.add, of_ranks.unbind())


# Not a batch: under vmap each sample has a message of its own.
gather: Callable[..., Tensor] = differentiable(gather_forward, _gather_backward, save=(), shared=(0,))


def gather_params(params: Any, spec: Any, *, dtype: torch.dtype, ranks: Ranks) -> Any:
    """Shards made whole, as layers use them: matrices, experts and the table in `dtype`, all else in fp32.

    One message for each of the two; buffers are whole already.
    """
    stored, structure = tree.flatten(params)
    specs: list[ParamSpec] = tree.leaves(spec, is_leaf=is_spec)
    trained = [i for i, leaf in enumerate(specs) if leaf.role != "buffer"]
    types = {i: dtype if specs[i].role in COMPUTE_ROLES else torch.float32 for i in trained}
    whole = dict(enumerate(stored))
    for wanted in sorted(set(types.values()), key=str):
        members = [i for i in trained if types[i] == wanted]
        flat = torch.cat([stored[i].reshape(-1) for i in members])
        rows = gather(flat, wanted, ranks.shards, ranks.group(SHARDS)).view(ranks.shards, -1)
        parts = torch.split(rows, [stored[i].numel() for i in members], dim=1)
        for i, part in zip(members, parts, strict=True):
            whole[i] = part.reshape(-1, *stored[i].shape[1:])[: specs[i].shape[0]]
    return tree.unflatten([whole[i] for i in range(len(stored))], structure)


def sharded_backend(backend: Backend, dtype: torch.dtype, ranks: Ranks) -> Backend:
    """`backend` for parameters of which each rank has its shards, its layers computing in `dtype`."""
    if ranks.world == 1:
        return backend
    # The work on matrices is dealt to ranks one by one.
    backend = backend._replace(stacked=0)
    if ranks.shards == 1:
        return backend
    return backend._replace(lend=keep, gather=partial(gather_params, dtype=dtype, ranks=ranks))


def whole_params(params: ModelParams, spec: ModelParams, ranks: Ranks) -> ModelParams:
    """The fp32 masters, whole, on every rank; all must ask for them."""
    if ranks.shards == 1:
        return params
    gathered = partial(gather_params, dtype=torch.float32, ranks=ranks)
    blocks = tuple(gathered(*each) for each in zip(params.blocks, spec.blocks, strict=True))
    ends: ModelParams = gathered(params._replace(blocks=()), spec._replace(blocks=()))
    return ends._replace(blocks=blocks)


class Shell(nn.Module):
    """A parameter, and nothing that computes with it."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.parameter = nn.Parameter(value)


def shard_params(params: T, spec: T, ranks: Ranks) -> T:
    """This rank's shards of whole parameters, in FSDP-2's storage on the training device; buffers are kept whole."""
    mesh = ranks.mesh
    assert mesh is not None
    device = torch.device(mesh.device_type, torch.cuda.current_device()) if mesh.device_type == "cuda" else "cpu"

    def split(leaf: ParamSpec, value: Tensor) -> Tensor:
        if leaf.role == "buffer" or ranks.shards == 1:
            return value.detach().to(device, copy=True)
        shell = Shell(value.detach())
        fully_shard(shell, mesh=mesh if ranks.copies > 1 else mesh[SHARDS])
        parameter = shell.parameter
        assert isinstance(parameter, DTensor)
        return _padded(parameter.to_local().detach(), _rows(leaf.shape[0], ranks))

    sharded: T = tree.map(split, spec, params, is_leaf=is_spec)
    return sharded


def _rows(size: int, ranks: Ranks) -> int:
    """Rows of a shard, those of zeros included."""
    return -(-size // ranks.shards)


def _padded(shard: Tensor, rows: int) -> Tensor:
    """The shard with the zeros behind it, which fully_shard allocates with it so that messages are of one size."""
    shape = (rows, *shard.shape[1:])
    bytes_needed = math.prod(shape) * shard.element_size()
    assert shard.untyped_storage().nbytes() >= bytes_needed, "fully_shard has allocated no zeros behind a shard"
    stride = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return shard.as_strided(shape, stride)


@dataclass(frozen=True)
class Placement:
    """Where a leaf of a state is: split along its first axis, or the same on every rank.

    Args:
        shape: of the whole.
        split: whether a rank holds a part.
    """

    shape: tuple[int, ...]
    split: bool


def placements(spec: Any, init: Callable[[Any], T]) -> T:
    """The placement of every leaf of the state `init(params)`: split if its first axis grows with the parameters'."""

    def state(rows: int) -> T:
        def empty(leaf: ParamSpec) -> Tensor:
            factor = 1 if leaf.role == "buffer" else rows
            return torch.empty(leaf.shape[0] * factor, *leaf.shape[1:], device="meta")

        return init(tree.map(empty, spec, is_leaf=is_spec))

    one, two = state(1), state(2)
    placed: T = tree.map(lambda x, y: Placement(tuple(x.shape), x.shape != y.shape), one, two)
    return placed


def is_placement(node: Any) -> bool:
    """Whether a node is a leaf of a tree of placements."""
    return isinstance(node, Placement)


def whole_views(state: T, placed: Any, ranks: Ranks) -> T:
    """The state as whole tensors of which each rank has a part: DTensors on the hosts, as checkpoints take them.

    On a CPU they are views of the state's storage, on a GPU copies.
    """
    if ranks.shards == 1:
        return tree.map(lambda leaf: leaf.cpu(), state)

    def view(place: Placement, leaf: Tensor) -> Tensor:
        if not place.split:
            return leaf.cpu()
        rows = _rows(place.shape[0], ranks)
        own = max(0, min(rows, place.shape[0] - ranks.shard * rows))
        return DTensor.from_local(
            leaf[:own].cpu(),
            ranks.host_mesh,
            [Replicate(), Shard(0)],
            run_check=False,
            shape=torch.Size(place.shape),
            stride=torch.empty(place.shape, device="meta").stride(),
        )

    views: T = tree.map(view, placed, state, is_leaf=is_placement)
    return views


def own_shards(views: T, *, like: T) -> T:
    """The state of `whole_views`, back in the form in which a step has it."""

    def own(view: Tensor, leaf: Tensor) -> Tensor:
        shard = view.to_local() if isinstance(view, DTensor) else view
        missing = leaf.shape[0] - shard.shape[0] if leaf.ndim else 0
        return (
            F.pad(shard, (0, 0) * (leaf.ndim - 1) + (0, missing)).to(leaf.device) if missing else shard.to(leaf.device)
        )

    shards: T = tree.map(own, views, like)
    return shards
