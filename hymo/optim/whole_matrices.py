"""Whole matrices out of shards: each rank works on some of them, and none on another's."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from hymo.distributed import COPIES, SHARDS, Ranks
from hymo.optim.normuon import Direction, by_shape


def spread(
    f: Direction,
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    *,
    shapes: Sequence[tuple[int, ...]],
    ranks: Ranks,
) -> tuple[list[Tensor], list[Tensor]]:
    """`by_shape` of shards: what `f` makes of the whole matrices, as shards again.

    Matrices of one shape are dealt to the ranks, which send each other their rows of them and the results back. A stack
    of matrices is split between matrices, so that a rank has whole ones already. Copies of a shard share the work too.

    Args:
        first: shards of matrices (in, out), split by rows, or of stacks (..., in, out), split along their first axis.
        second: what goes with each matrix, (..., 1, out): of a matrix on every rank, of a stack split like it.
    """

    done: dict[int, tuple[Tensor, Tensor]] = {}
    over_copies, over_shards = _Deal(ranks.copies), _Deal(ranks.shards)
    for shape in sorted(set(map(tuple, shapes)), key=_effort, reverse=True):
        members = [i for i, other in enumerate(shapes) if tuple(other) == shape]
        by_rows = len(shape) == 2 and ranks.shards > 1
        every = _over_copies(_over_shards(f, shape[0], over_shards, ranks) if by_rows else f, over_copies, ranks)
        left, right = by_shape(_flat(every), [first[i] for i in members], [second[i] for i in members])
        done |= zip(members, zip(left, right, strict=True), strict=True)
    return [done[i][0] for i in range(len(first))], [done[i][1] for i in range(len(first))]


class _Deal:
    """Deals stacks of matrices out in equal parts, a stack after another, so that all get about as much to do."""

    def __init__(self, parts: int) -> None:
        self.parts, self.effort = parts, [0] * parts

    def __call__(self, x: Tensor, y: Tensor, effort: int) -> tuple[Tensor, Tensor, int, int]:
        """Both with matrices of zeros before and behind, how many before, and how many matrices a part then has."""
        count = x.shape[0]
        each = -(-count // self.parts)

        def after(front: int) -> list[int]:
            held = [len(range(max(front, p * each), min(front + count, (p + 1) * each))) for p in range(self.parts)]
            return [before + effort * number for before, number in zip(self.effort, held, strict=True)]

        front = min(range(each * self.parts - count + 1), key=lambda n: max(after(n)))
        self.effort = after(front)
        padding = (0, 0, 0, 0, front, each * self.parts - count - front)
        return F.pad(x, padding), F.pad(y, padding), front, each


def _effort(shape: Sequence[int]) -> int:
    """Of orthogonalising a matrix, in multiply-adds of one product."""
    return shape[-2] * shape[-1] * min(shape[-2:])


def _flat(f: Direction) -> Direction:
    """`f` of one stack of matrices as a function of stacks of stacks."""

    def flat(x: Float[Tensor, "*b m n"], y: Float[Tensor, "*b 1 n"]) -> tuple[Tensor, Tensor]:
        left, right = f(x.flatten(0, -3), y.flatten(0, -3))
        return left.view(x.shape), right.view(y.shape)

    return flat


def _over_copies(f: Direction, deal: _Deal, ranks: Ranks) -> Direction:
    """`f` of matrices that every copy has: each copy does its part, and all get the results."""
    if ranks.copies == 1:
        return f

    def spread_over_copies(x: Float[Tensor, "k m n"], y: Float[Tensor, "k 1 n"]) -> tuple[Tensor, Tensor]:
        all_x, all_y, front, each = deal(x, y, _effort(x.shape))
        own = slice(ranks.copy * each, (ranks.copy + 1) * each)
        parts = f(all_x[own], all_y[own])
        left, right = (_gathered(part, ranks.copies, ranks.group(COPIES)) for part in parts)
        return left[front : front + x.shape[0]], right[front : front + x.shape[0]]

    return spread_over_copies


def _over_shards(f: Direction, size: int, deal: _Deal, ranks: Ranks) -> Direction:
    """`f` of matrices of `size` rows of which each rank has some."""
    shards, group = ranks.shards, ranks.group(SHARDS)

    def spread_over_shards(x: Float[Tensor, "k r n"], y: Float[Tensor, "k 1 n"]) -> tuple[Tensor, Tensor]:
        count, rows, columns = x.shape
        all_x, all_y, front, each = deal(x, y, _effort((size, columns)))
        sent = _exchanged(all_x, shards, group)
        # From [rank, matrix, row] to whole matrices, without the rows of zeros that fill up the last shards.
        whole = sent.view(shards, each, rows, columns).transpose(0, 1).reshape(each, shards * rows, columns)
        own = slice(ranks.shard * each, (ranks.shard + 1) * each)
        done, kept = f(whole[:, :size].contiguous(), all_y[own])
        filled = F.pad(done, (0, 0, 0, shards * rows - size))
        back = filled.view(each, shards, rows, columns).transpose(0, 1).reshape(shards * each, rows, columns)
        left, right = _exchanged(back, shards, group), _gathered(kept, shards, group)
        return left[front : front + count], right[front : front + count]

    return spread_over_shards


def _exchanged(x: Float[Tensor, "k m n"], shards: int, group: str) -> Float[Tensor, "k m n"]:
    """Part r of this rank goes to rank r, and part r comes from it."""
    ops, parts = torch.ops._c10d_functional, [x.shape[0] // shards] * shards
    exchanged: Tensor = ops.wait_tensor(ops.all_to_all_single(x.contiguous(), parts, parts, group))
    return exchanged


def _gathered(x: Float[Tensor, "k m n"], count: int, group: str) -> Float[Tensor, "all m n"]:
    ops = torch.ops._c10d_functional
    gathered: Tensor = ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous(), count, group))
    return gathered
