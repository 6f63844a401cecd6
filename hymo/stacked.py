"""Tensors of one shape as one and back, by operations that a compiler does not look into.

It would write a kernel of its own for each place in each stack, and compile for minutes.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from hymo_kernels.primitive import define


def _stack_mapped(info: Any, dims: Any, parts: list[Tensor]) -> tuple[Tensor, int]:
    every = [
        part.expand(info.batch_size, *part.shape) if dim is None else part.movedim(dim, 0)
        for part, dim in zip(parts, dims[0], strict=True)
    ]
    return stack(every), 1


def _parts(x: Tensor) -> list[Tensor]:
    parts = [x.new_empty(x.shape[1:]) for _ in range(x.shape[0])]
    _write(parts, x)
    return parts


def _write(into: list[Tensor], x: Tensor) -> None:
    # One launch for many, where a copy of each would be a launch of its own.
    torch._foreach_copy_(into, list(x.unbind()))


def _unstack_mapped(info: Any, dims: Any, x: Tensor) -> tuple[list[Tensor], list[int]]:
    parts = unstack(x.movedim(dims[0], 1))
    return parts, [0] * len(parts)


_stack = define(
    "stack(Tensor[] parts) -> Tensor",
    fake=lambda parts: parts[0].new_empty(len(parts), *parts[0].shape),
    cpu=torch.stack,
    cuda=torch.stack,
    vmap=_stack_mapped,
)
_unstack = define(
    "unstack(Tensor stack) -> Tensor[]",
    fake=lambda x: [x.new_empty(x.shape[1:]) for _ in range(x.shape[0])],
    cpu=_parts,
    cuda=_parts,
    vmap=_unstack_mapped,
)
_unstack_into = define(
    "unstack_into(Tensor(a!)[] into, Tensor stack) -> ()", fake=lambda into, x: None, cpu=_write, cuda=_write
)


def stack(parts: Sequence[Tensor]) -> Tensor:
    """`torch.stack`, opaque to compilers and without a gradient."""
    stacked: Tensor = _stack(list(parts))
    return stacked


def unstack(x: Tensor) -> list[Tensor]:
    """The tensors of a stack, each in storage of its own; opaque to compilers and without a gradient."""
    parts: list[Tensor] = _unstack(x)
    return parts


def write_in_place(graph: fx.Graph) -> None:
    """Lets the parts of a stack that a graph ends by copying into its inputs be written there at once.

    The graph is functional but for those copies, which come last: what it reads of its inputs is what was there before.
    A stack with a part that is also used otherwise stays as it is.
    """
    for node in graph.find_nodes(op="call_function", target=_unstack):
        parts = sorted(node.users, key=lambda part: part.args[1])
        copies = [copy for part in parts for copy in part.users if copy.target is torch.ops.aten.copy_.default]
        uses = sum(len(part.users) for part in parts)
        if not len(copies) == uses == len(parts) == len(node.meta["val"]) or any(copy.users for copy in copies):
            continue
        with graph.inserting_before(graph.output_node()):
            graph.call_function(_unstack_into, ([copy.args[0] for copy in copies], node.args[0]))
        for done in (*copies, *parts, node):
            graph.erase_node(done)


@functools.cache
def inductor_pass() -> Any:
    """`write_in_place` as inductor takes it, and knows its graphs again."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class WriteInPlace(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            write_in_place(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,))

    return WriteInPlace()
