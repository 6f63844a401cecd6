"""Regions: what a compiled program does many times, compiled once.

A compiler reads a model of 32 layers as 32 layers and takes minutes over what is two kinds of layer. A region is a pure
function that the program around it sees as one operation. Its forward and backward are traced and compiled when its
arguments have a signature for the first time; the backward recomputes what is cheaper to recompute than to keep.
"""

import functools
import hashlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, fx

from hymo import tree
from hymo.exact_products import exact_products
from hymo.graph import Compile, Run, base, compiled, compiling, fake_mode, results, trace
from hymo_kernels.primitive import define, differentiable

R = TypeVar("R")
_named: Counter[str] = Counter()


class Program(NamedTuple):
    """A region for one signature.

    Args:
        run: differentiable, from the leaves of the arguments to those of the result.
        structure: of the result.
    """

    run: Callable[..., Any]
    structure: Any


class Halves(NamedTuple):
    """A function's forward, which also gives what its backward wants, and that backward.

    Args:
        forward: from the inputs to the outputs and what is kept.
        backward: from what it wants and the outputs' gradients to the inputs' gradients, None where there is none.
        wanted: what the backward wants, as indices into (*inputs, *outputs, *kept).
        kept: how many values are kept.
        moving: the outputs that have a gradient.
        structure: of the function's result.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    wanted: tuple[int, ...]
    kept: int
    moving: tuple[int, ...]
    structure: Any


@functools.cache
def region(pure: Callable[..., R], *, compile: Compile) -> Callable[..., R]:
    """`pure` as one operation of the program that calls it; ask for it with one and the same function every time.

    Args:
        pure: a function of trees of tensors that returns a tree of tensors, none of them a view of an argument; every
            floating-point leaf may want a gradient. Closures are constants, and no tensors.
        compile: as in `jit`; `none` is `pure` itself.
    """
    return pure if compile == "none" else _programs(pure, compile, _build)


def once(pure: Callable[..., R], *, compile: Compile) -> Callable[..., R]:
    """`pure` as one operation of the program that calls it, without a gradient: a program within a program.

    Args:
        pure: a function of trees of tensors that returns a tree of tensors. Closures are constants.
        compile: as in `jit`; `none` is `pure` itself.
    """
    return pure if compile == "none" else _programs(pure, compile, _build_once)


def _programs(pure: Callable[..., R], compile: Compile, build: Callable[..., Program]) -> Callable[..., R]:
    programs: dict[Any, Program] = {}

    def call(*args: Any) -> R:
        leaves, structure = tree.flatten(args)
        signature = structure, tuple((leaf.shape, leaf.dtype, leaf.device) for leaf in leaves)
        if signature not in programs:
            # In a thread of its own: a trace and a gradient that are under way here must not see what is traced there.
            with ThreadPoolExecutor(1) as thread:
                programs[signature] = thread.submit(build, pure, signature, compile).result()
        program = programs[signature]
        outputs = program.run(*leaves)
        result: R = tree.unflatten(list(outputs) if isinstance(outputs, tuple) else [outputs], program.structure)
        return result

    return call


def _build_once(pure: Callable[..., Any], signature: Any, compile: Compile) -> Program:
    structure, kinds = signature
    of_result: list[Any] = []
    with fake_mode(allow_non_fake_inputs=True) as mode:
        inputs = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in kinds]
        graph = trace(_flat(pure, structure, of_result), inputs)
        code = graph.code
        run, made = compiled(graph, inputs, mode, compile, is_whole=True)
    operation = _operation(_name(code, inputs, made), run, inputs, made)
    return Program(lambda *leaves: tuple(operation(list(leaves))), of_result[0])


def _flat(pure: Callable[..., Any], structure: Any, of_result: list[Any]) -> Callable[..., tuple[Tensor, ...]]:
    """`pure` from leaves to leaves, none of which is an argument's; `of_result` becomes the result's structure."""

    def flat(*leaves: Tensor) -> tuple[Tensor, ...]:
        results, found = tree.flatten(pure(*tree.unflatten(list(leaves), structure)))
        of_result[:] = [found]
        own = {id(leaf) for leaf in leaves}
        return tuple(x.clone() if id(x) in own else x for x in results)

    return flat


def _build(pure: Callable[..., Any], signature: Any, compile: Compile) -> Program:
    structure, kinds = signature
    with fake_mode() as mode:
        inputs = [
            torch.empty(shape, dtype=dtype, device=device, requires_grad=dtype.is_floating_point)
            for shape, dtype, device in kinds
        ]
        with compiling():
            halves = _halves(pure, inputs, structure)
        code = halves.forward.code + halves.backward.code
        run_forward, made = compiled(halves.forward, [x.detach() for x in inputs], mode, compile, is_whole=False)
        values = [*(x.detach() for x in inputs), *made]
        received = [values[i] for i in halves.wanted] + [made[i].contiguous() for i in halves.moving]
        run_backward, found = compiled(halves.backward, received, mode, compile, is_whole=False, is_backward=True)
    moved = [i for i, x in enumerate(found) if x is not None]
    name = _name(code, inputs, made, received, found)
    forward = _operation(name, run_forward, inputs, made)
    backward = _operation(f"{name}_backward", run_backward, received, found)

    def region(*leaves: Tensor) -> tuple[Tensor, ...]:
        return tuple(forward(list(leaves)))

    def gradients(
        needs: tuple[bool, ...], arguments: tuple[Any, ...], outputs: tuple[Any, ...], grads: tuple[Any, ...]
    ) -> tuple[Tensor | None, ...]:
        values = (*arguments, *outputs)
        given = [_like(made[i]).zero_() if grads[i] is None else grads[i] for i in halves.moving]
        result = dict(zip(moved, backward([*(values[i] for i in halves.wanted), *given]), strict=True))
        # What a leaf does not move at all has a gradient of zeros.
        return tuple(
            (result[i] if i in result else _like(inputs[i]).zero_()) if need else None for i, need in enumerate(needs)
        )

    run = differentiable(
        region,
        gradients,
        save=tuple(sorted(set(halves.wanted))),
        shared=tuple(range(len(inputs))),
        residuals=halves.kept,
    )
    return Program(run, halves.structure)


def _halves(pure: Callable[..., Any], inputs: list[Tensor], structure: Any) -> Halves:
    from torch._functorch.aot_autograd import aot_export_joint_simple
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    of_result: list[Any] = []
    moving: list[int] = []

    def flat(*leaves: Tensor) -> tuple[Tensor, ...]:
        found = _flat(pure, structure, of_result)(*leaves)
        moving[:] = [i for i, x in enumerate(found) if x.requires_grad]
        return found

    joint: Any = aot_export_joint_simple(flat, tuple(inputs), trace_joint=True, decompositions=select_decomp_table())
    outputs = of_result[0].num_leaves
    forward, backward = min_cut_rematerialization_partition(joint, (), num_fwd_outputs=outputs)

    placeholders = [node for node in forward.graph.nodes if node.op == "placeholder"]
    assert len(placeholders) == len(inputs), "a region's forward takes all its inputs"
    returned = results(forward)
    place = {node: i for i, node in enumerate((*placeholders, *returned[:outputs]))}
    received = [node for node in backward.graph.nodes if node.op == "placeholder"]
    kept: list[fx.Node] = []
    wanted = []
    for node, its in zip(returned[outputs:], received, strict=False):
        # Of a view its base is kept, which has storage of its own; the backward takes the view.
        source, views = base(node)
        if source not in place:
            place[source] = len(inputs) + outputs + len(kept)
            kept.append(source)
        wanted.append(place[source])
        _view_in(backward, its, source, views, after=received[-1])
    forward.graph.output_node().args = ((*returned[:outputs], *kept),)
    if inputs[0].device.type == "cuda":
        exact_products(backward.graph)
    forward.recompile()
    backward.recompile()
    return Halves(forward, backward, tuple(wanted), len(kept), tuple(moving), of_result[0])


def _view_in(graph: fx.GraphModule, received: fx.Node, base: fx.Node, views: list[fx.Node], *, after: fx.Node) -> None:
    """Lets a graph receive the base of the views that it wants."""
    users, last = list(received.users), received
    for view in views:
        target: Any = view.target
        with graph.graph.inserting_after(after):
            after = graph.graph.call_function(target, (last, *view.args[1:]), dict(view.kwargs))
        after.meta = dict(view.meta)
        last = after
    for user in users:
        user.replace_input_with(received, last)
    received.meta = {**received.meta, "val": base.meta["val"]}


def _like(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _name(code: str, *values: list[Any]) -> str:
    """A name that tells what an operation does, and what its tensors are like.

    A compiled program is found in a cache by the names that it calls. A number would be another one where regions come
    in another order, and the same for a region that has changed.
    """
    likes = [[(x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else x for x in xs] for xs in values]
    name = f"region_{hashlib.sha256(f'{code}{likes}'.encode()).hexdigest()[:16]}"
    _named[name] += 1
    return name if _named[name] == 1 else f"{name}_{_named[name]}"


def _operation(name: str, run: Run, given: list[Tensor], made: list[Any]) -> Callable[..., list[Tensor]]:
    """A compiled graph as a raw op, from tensors like those given to tensors like those made, less what is None."""
    likes = [(i, x) for i, x in enumerate(made) if x is not None]
    copied: list[bool] = []

    def operation(inputs: list[Tensor]) -> list[Tensor]:
        placed = [x if _lies(x, like) else _placed(x, like) for x, like in zip(inputs, given, strict=True)]
        found = run(placed)
        outputs = [(found[i], like) for i, like in likes]
        if not copied:
            # Also where what was given lies otherwise this time, and a copy of it is given back.
            copied.extend(_to_copy([*inputs, *placed], outputs))
        return [_placed(x, like) if copy else x for (x, like), copy in zip(outputs, copied, strict=True)]

    def fake(inputs: list[Tensor]) -> list[Tensor]:
        return [_like(x) for x in made if x is not None]

    return define(f"{name}(Tensor[] inputs) -> Tensor[]", fake=fake, cpu=operation, cuda=operation)


def _lies(x: Tensor, like: Tensor) -> bool:
    """Whether a tensor lies in memory as another does; the stride of an axis of one entry says nothing."""
    return all(size == 1 or own == other for size, own, other in zip(x.shape, x.stride(), like.stride(), strict=True))


def _placed(x: Tensor, like: Tensor) -> Tensor:
    """The same numbers, placed as in another tensor."""
    return torch.empty_strided(like.shape, like.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _to_copy(inputs: list[Tensor], outputs: list[tuple[Tensor, Tensor]]) -> list[bool]:
    """Which results are not placed as promised, or share memory with another tensor, which is another one's later."""
    taken = {x.untyped_storage().data_ptr() for x in inputs}
    copied = []
    for x, like in outputs:
        own = x.untyped_storage().data_ptr()
        copied.append(own in taken or not _lies(x, like))
        taken.add(own)
    return copied
