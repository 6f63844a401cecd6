"""The ranks of a run, as each of them sees them: how many there are, what they add up, and what they agree on.

Inside a step ranks talk through functional collectives, which are ops of its graph; around it through the host's own
group (gloo), which needs no device and waits for none.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hymo import tree

T = TypeVar("T")

COPIES, SHARDS = "copies", "shards"
"""Dimensions of the mesh: rank r has shard r % shards of copy r // shards."""


@dataclass(frozen=True)
class Ranks:
    """All ranks, seen from one.

    Args:
        rank: this one, from 0; rank 0 leads: it alone prints, and writes what is of the whole run.
        world: how many there are.
        shards: how many of them hold one copy of the state together; there are world / shards copies.
        mesh: (copies, shards) on the training device; None for one rank.
        host_mesh: the same ranks on their hosts.
        saving: a group of its own for checkpoints, which are written while others talk.
    """

    rank: int = 0
    world: int = 1
    shards: int = 1
    mesh: DeviceMesh | None = None
    host_mesh: DeviceMesh | None = None
    host: dist.ProcessGroup | None = None
    saving: dist.ProcessGroup | None = None

    @property
    def is_lead(self) -> bool:
        """Whether this rank speaks for all."""
        return self.rank == 0

    @property
    def copies(self) -> int:
        """How many times the whole state exists."""
        return self.world // self.shards

    @property
    def shard(self) -> int:
        """Which part of the state this rank holds."""
        return self.rank % self.shards

    @property
    def copy(self) -> int:
        """Of which copy."""
        return self.rank // self.shards

    def group(self, dimension: str) -> str:
        """The name of the group of this rank along a dimension of the mesh, as ops in a graph want it."""
        assert self.mesh is not None
        return self.mesh.get_group(dimension).group_name

    def sum(self, values: T) -> T:
        """A tree of tensors of one dtype, added up over all ranks in one message."""
        return values if self.world == 1 else _summed(values, self.world, _everyone())

    def sum_copies(self, values: T) -> T:
        """A tree of shards, added up over the copies."""
        return values if self.copies == 1 else _summed(values, self.copies, self.group(COPIES))

    def norm(self, shards: Any) -> Float[Tensor, ""]:
        """Euclidean norm of a tree of which each rank has its shard."""
        if self.shards == 1:
            return tree.global_norm(shards)
        return _summed(tree.sum_of_squares(shards), self.shards, self.group(SHARDS)).sqrt().float()

    def worst(self, code: int) -> int:
        """The largest of the ranks' numbers."""
        if self.world == 1:
            return code
        codes = torch.tensor([code])
        dist.all_reduce(codes, dist.ReduceOp.MAX, group=self.host)
        return int(codes)

    def everywhere(self, value: T, *, group: dist.ProcessGroup | None = None) -> list[T]:
        """What each rank has, by rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=group or self.host)
        return values

    def together(self, job: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
        """What `job` returns; if it fails with a ValueError or OSError on one rank it fails with that on all."""
        if self.world == 1:
            return job()
        result, failure = _attempt(job)
        for found in self.everywhere(failure, group=group):
            _raise(found)
        value: T = result
        return value

    def led(self, job: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
        """What `job` returns on the lead, which alone does it; its ValueError or OSError is raised on all."""
        if self.world == 1:
            return job()
        outcome: list[Any] = [_attempt(job) if self.is_lead else None]
        dist.broadcast_object_list(outcome, src=0, group=group or self.host)
        result, failure = outcome[0]
        _raise(failure)
        value: T = result
        return value

    def lead_first(self, job: Callable[[], T]) -> T:
        """What `job` returns on each rank, the lead being done with it before the others begin; fails as `together`."""
        if self.world == 1:
            return job()
        done: list[T] = []
        self.led(lambda: done.append(job()))
        return self.together(lambda: done[0] if self.is_lead else job())


ALONE = Ranks()
"""The one rank of a run of one process."""


def world_size() -> int:
    """How many ranks the launcher has started; 1 without one.

    Raises:
        ValueError: if the environment says something else than a launcher would.
    """
    return _environment("WORLD_SIZE", 1)


@contextmanager
def joined(device: str, *, shards: int | None = None) -> Iterator[tuple[Ranks, torch.device]]:
    """Meets the other ranks that torchrun has started, and parts from them at the end; gives this one's device.

    Args:
        device: cpu or cuda.
        shards: ranks that hold one copy of the state together; None for all.

    Raises:
        ValueError: if the ranks do not divide into groups of `shards`, or the environment is not torchrun's.
    """
    world = world_size()
    if world == 1:
        yield ALONE, torch.device(device)
        return
    rank, local = _environment("RANK", 0, least=0), _environment("LOCAL_RANK", 0, least=0)
    together = world if shards is None else shards
    if world % together:
        works = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
        raise ValueError(f"training.shard_ranks: expected a divisor of the {world} ranks, got {together}; {works} work")
    own = torch.device(device, local) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(own)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    try:
        shape = (world // together, together)
        host_mesh = init_device_mesh("cpu", shape, mesh_dim_names=(COPIES, SHARDS))
        mesh = init_device_mesh(device, shape, mesh_dim_names=(COPIES, SHARDS)) if device != "cpu" else host_mesh
        host, saving = (dist.new_group(backend="gloo") for _ in range(2))
        yield Ranks(rank, world, together, mesh, host_mesh, host, saving), own
    finally:
        dist.destroy_process_group()


def _everyone() -> str:
    world = dist.group.WORLD
    assert world is not None
    return world.group_name


def _summed(values: T, size: int, group: str) -> T:
    """Added up over a group of `size` ranks; on a CPU in their order, like `hymo.sharding.reduce_scatter`."""
    leaves, structure = tree.flatten(values)
    ops = torch.ops._c10d_functional
    flat = torch.cat([leaf.reshape(-1) for leaf in leaves])
    if flat.device.type == "cpu":
        summed = reduce(
            torch.add, ops.wait_tensor(ops.all_gather_into_tensor(flat, size, group)).view(size, -1).unbind()
        )
    else:
        summed = ops.wait_tensor(ops.all_reduce(flat, "sum", group))
    parts = torch.split(summed, [leaf.numel() for leaf in leaves])
    result: T = tree.unflatten([part.view(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)], structure)
    return result


def _environment(name: str, default: int, *, least: int = 1) -> int:
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise ValueError(f"{name}: expected a number of at least {least}, as torchrun sets it, got {text!r}")
    return int(text)


def _attempt(job: Callable[[], Any]) -> tuple[Any, tuple[Any, ...] | None]:
    """A job's result, or what it failed with in a form that travels."""
    try:
        return job(), None
    except OSError as error:
        return None, (OSError, error.errno, error.strerror, error.filename)
    except ValueError as error:
        # A kind of ValueError that is made of more than its message does not travel.
        kind = type(error) if type(error).__init__ is ValueError.__init__ else ValueError
        return None, (kind, str(error))


def _raise(failure: tuple[Any, ...] | None) -> None:
    if failure is not None:
        kind, *arguments = failure
        raise kind(*arguments)
