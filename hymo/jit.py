"""`jit`: the one place where a pure function of trees becomes one compiled graph.

Python runs once, on tracers, as under `jax.jit`: closures are constants, checks run at trace time, and everything that
changes from call to call must come in as a tensor. The trace is non-strict (`torch._dynamo.nonstrict_trace`), because
a strict one silently drops the backward of a `torch.autograd.Function` under `torch.func.grad` (pytorch #193279).
"""

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, Literal, TypeVar, no_type_check

import torch
from torch import Tensor

from hymo import tree
from hymo.replay import replayed
from hymo_kernels.primitive import tell_inductor

Compile = Literal["inductor", "aot_eager", "none"]
R = TypeVar("R")


def jit(
    pure: Callable[..., R], *, compile: Compile = "inductor", donate: bool = False, replay: bool = False
) -> Callable[..., R]:
    """`pure`, compiled into one graph per structure and shapes of its arguments.

    Args:
        pure: a function of trees of tensors that returns a tree of tensors; it is never differentiated from outside.
        compile: `inductor` generates kernels, `aot_eager` runs the traced graph op by op, `none` runs `pure` itself.
        donate: the first result replaces the first argument: it is written into its storage, so that a training state
            exists once. `pure` must then return a tuple that begins with a tree of the first argument's structure.
        replay: on a GPU, record what a program launches as a CUDA graph at its second call, and launch that from then
            on. Its memory stays taken. A donated argument should be what the last call returned.

    Raises:
        ValueError: if inductor has no compiler to generate code with.
        ValueError: while tracing, if the first result cannot replace a donated argument.
        TypeError: at the call, if an argument holds something else than tensors.
        Whatever `pure` raises while it is traced, as itself.
    """
    programs: dict[Any, Callable[[list[Tensor]], list[Tensor]]] = {}
    structures: dict[Any, Any] = {}

    def call(*args: Any) -> R:
        leaves, structure = tree.flatten(args)
        _require_tensors(args, leaves)
        # A program of its own for each signature: of one code object Dynamo would keep eight and refuse the ninth.
        signature = structure, tuple((leaf.shape, leaf.dtype, leaf.device) for leaf in leaves)
        if signature not in programs:
            require_compiler(compile, leaves[0].device if leaves else "cpu")
            run = _uncompiled if compile == "none" else functools.partial(_compiled, backend=compile)
            donated = len(tree.leaves(args[0])) if donate else 0
            program = run(_flat(pure, signature, structures, donated), donated)
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
) -> Callable[[list[Tensor]], list[Tensor]]:
    """`pure` as a function of lists: a returned NamedTuple does not survive the trace."""

    def flat(leaves: list[Tensor]) -> list[Tensor]:
        args = tree.unflatten(leaves, signature[0])
        output = pure(*args)
        results, structures[signature] = tree.flatten(output)
        if donated:
            _require_same(args[0], output)
        # An old value in a new place is copied before its storage is written to.
        old = {id(leaf) for leaf in leaves[:donated]}
        return [
            result.clone() if id(result) in old and (i >= donated or result is not leaves[i]) else result
            for i, result in enumerate(results)
        ]

    return flat


def _uncompiled(flat: Callable[[list[Tensor]], list[Tensor]], donated: int) -> Callable[[list[Tensor]], list[Tensor]]:
    def program(leaves: list[Tensor]) -> list[Tensor]:
        results = flat(leaves)
        if donated:
            tree.write_into(leaves[:donated], results[:donated])
        return leaves[:donated] + results[donated:]

    return program


def _compiled(
    flat: Callable[[list[Tensor]], list[Tensor]], donated: int, *, backend: str
) -> Callable[[list[Tensor]], list[Tensor]]:
    raised: list[Exception] = []

    def remembering(leaves: list[Tensor]) -> list[Tensor]:
        try:
            return flat(leaves)
        except Exception as error:
            raised.append(error)
            raise

    traced = torch._dynamo.nonstrict_trace(remembering)

    # Dynamo traces this one function strictly and would trip over the tests' type checks.
    @no_type_check
    def strict(leaves: list[Tensor]) -> list[Tensor]:
        results = traced(leaves)
        if donated:
            # Leaf by leaf: a fused copy of many makes large kernels, unlike each other and slow to compile.
            for old, new in zip(leaves[:donated], results[:donated], strict=True):
                old.copy_(new)
        return results[donated:]

    # Dynamo keeps programs by code object and does not look which function `traced` is: with a shared code object a
    # second function would run the first one's program.
    own = FunctionType(strict.__code__.replace(), strict.__globals__, closure=strict.__closure__)
    graph = torch.compile(own, fullgraph=True, dynamic=False, backend=backend)

    def program(leaves: list[Tensor]) -> list[Tensor]:
        raised.clear()
        try:
            if backend == "inductor":
                tell_inductor()
            results: list[Tensor] = graph(leaves)
            return leaves[:donated] + results
        except Exception:
            # Dynamo reports every error of the traced function as an unsupported output type; say what really happened.
            if raised:
                raise raised[-1] from None
            raise

    return program


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
