"""`jit`: the one place where a pure function of trees becomes one compiled graph.

Python runs once, on tracers, as under `jax.jit`: closures are constants, checks run at trace time, and everything that
changes from call to call must come in as a tensor.

Of `torch.compile` it is all but the front: the tracer and functional tensors of AOTAutograd make the graph, inductor's
passes and code generator the kernels. TorchDynamo, which reads bytecode and guards what it finds there, has nothing to
read here: a strict trace silently drops the backward of a `torch.autograd.Function` under `torch.func.grad` (pytorch
#193279), and a non-strict one (`nonstrict_trace`) runs the function on tracers too, but thrice: once for Dynamo, twice
in AOTAutograd. For a step of v1.0 that was 45 s of one CPU's time, where a single trace takes 20 s.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from hymo import tree
from hymo.graph import Compile, compiled, fake_mode, trace, write_results
from hymo.replay import copied, replayed

Program = Callable[[list[Tensor]], list[Tensor]]
R = TypeVar("R")


def jit(
    pure: Callable[..., R], *, compile: Compile = "inductor", donate: bool = False, replay: bool = False
) -> Callable[..., R]:
    """`pure`, compiled into one graph per structure, shapes and strides of its arguments.

    Args:
        pure: a function of trees of tensors that returns a tree of tensors; it is never differentiated from outside.
        compile: `inductor` generates kernels, `aot_eager` runs the traced graph op by op, `none` runs `pure` itself.
        donate: the first result replaces the first argument: it is written into its storage, so that a training state
            exists once. `pure` must then return a tuple that begins with a tree of the first argument's structure.
        replay: on a GPU, record what a program launches as a CUDA graph at its second call, and launch that from then
            on. Its memory stays taken. A donated argument should be what the last call returned.

    Raises:
        ValueError: if inductor has no compiler to generate code with.
        ValueError: while tracing, if the first result cannot replace a donated argument, or an argument is written to.
        TypeError: at the call, if an argument holds something else than tensors.
        Whatever `pure` raises while it is traced, as itself.
    """
    programs: dict[Any, Program] = {}
    structures: dict[Any, Any] = {}

    def call(*args: Any) -> R:
        leaves, structure = tree.flatten(args)
        _require_tensors(args, leaves)
        signature = structure, tuple((leaf.shape, leaf.stride(), leaf.dtype, leaf.device) for leaf in leaves)
        if signature not in programs:
            require_compiler(compile, leaves[0].device if leaves else "cpu")
            donated = len(tree.leaves(args[0])) if donate else 0
            flat = _flat(pure, signature, structures, donated)
            program = _uncompiled(flat, donated) if compile == "none" else _compiled(flat, leaves, donated, compile)
            on_gpu = bool(leaves) and leaves[0].device.type == "cuda"
            programs[signature] = replayed(program, donated) if replay and on_gpu else program
        with torch.no_grad():
            results = programs[signature](leaves)
        output: Any = tree.unflatten(results, structures[signature])
        result: R = output
        return result

    return call


def require_compiler(compile: Compile, device: torch.device | str) -> None:
    """Raises ValueError if `compile` generates code and there is nothing to build it with."""
    error = _compiler_error(torch.device(device).type) if compile == "inductor" else None
    if error:
        raise ValueError(f"training.compile: inductor {error}; `aot_eager` and `none` work without")


def _flat(
    pure: Callable[..., Any], signature: Any, structures: dict[Any, Any], donated: int
) -> Callable[..., list[Tensor]]:
    """`pure` from leaves to leaves; the signature's structure becomes the result's."""

    def flat(*leaves: Tensor) -> list[Tensor]:
        args = tree.unflatten(list(leaves), signature[0])
        output = pure(*args)
        results, structures[signature] = tree.flatten(output)
        if donated:
            _require_same(args[0], output)
        return results

    return flat


def _uncompiled(flat: Callable[..., list[Tensor]], donated: int) -> Program:
    def program(leaves: list[Tensor]) -> list[Tensor]:
        results = flat(*leaves)
        if donated:
            # An old value in a new place, or a view of one, is copied before its storage is written to.
            old = {_storage(leaf) for leaf in leaves[:donated]}
            results = [
                x.clone() if _storage(x) in old and (i >= donated or x is not leaves[i]) else x
                for i, x in enumerate(results)
            ]
            tree.write_into(leaves[:donated], results[:donated])
        return leaves[:donated] + results[donated:]

    return program


def _compiled(flat: Callable[..., list[Tensor]], leaves: list[Tensor], donated: int, compile: Compile) -> Program:
    # Tensors that are no arguments are constants.
    with fake_mode(allow_non_fake_inputs=True) as mode:
        inputs = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in leaves]
        graph = trace(flat, inputs)
        write_results(graph, donated)
        run, _ = compiled(graph, inputs, mode, compile, is_whole=True)

    def program(leaves: list[Tensor]) -> list[Tensor]:
        apart = _apart(leaves, donated)
        results = list(run(list(apart)))
        for old, new in zip(leaves[:donated], apart, strict=False):
            if new is not old:
                old.copy_(new)
        return leaves[:donated] + results

    return program


def _apart(leaves: list[Tensor], donated: int) -> list[Tensor]:
    """The leaves, of which those are copied that share memory with a donated one before them.

    A compiled program writes into a donated leaf as soon as it has read it for the last time.
    """
    apart: list[Tensor] = []
    taken: set[int] = set()
    if not donated:
        return leaves
    for i, leaf in enumerate(leaves):
        place = _storage(leaf)
        apart.append(copied(leaf) if place in taken else leaf)
        if i < donated:
            taken.add(place)
    return apart


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _require_tensors(args: tuple[Any, ...], leaves: list[Any]) -> None:
    if all(isinstance(leaf, Tensor) for leaf in leaves):
        return
    name, leaf = next((name, leaf) for name, leaf in tree.paths(args).items() if not isinstance(leaf, Tensor))
    raise TypeError(f"jit: argument {name} is {leaf!r}; a compiled step takes tensors only")


def _require_same(donated: Any, output: Any) -> None:
    first = output[0] if isinstance(output, tuple) and output else ()
    asked, found = (
        {name: (*leaf.shape, leaf.dtype) for name, leaf in tree.paths(each).items()} for each in (donated, first)
    )
    for name in asked | found:
        if asked.get(name) != found.get(name):
            raise ValueError(
                f"jit: the donated argument has {asked.get(name, 'nothing')} at {name or 'its root'}, "
                f"the first result, which replaces it, {found.get(name, 'nothing')}"
            )
    if tree.flatten(donated)[1] != tree.flatten(first)[1]:
        raise ValueError(f"jit: the donated argument is a {type(donated).__name__}, the first result is no such tree")


@functools.cache
def _compiler_error(device: str) -> str | None:
    if device == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "on a GPU needs Triton, which is not installed"
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception:
        return "on a CPU needs a C++ compiler (g++ or clang++), and none is on the PATH"
    return None
