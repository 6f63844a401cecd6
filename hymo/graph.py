"""Graphs: what a function does, traced once, and the program that inductor makes of it.

What traces and compiles of torch's private compiler is here and in `hymo.region`, which cuts a graph in two: the tracer
and the functional tensors of AOTAutograd, inductor's passes, and inductor itself.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from hymo_kernels.primitive import define, tell_inductor

Compile = Literal["inductor", "aot_eager", "none"]
Run = Callable[[list[Tensor]], Sequence[Any]]
_keep = define("keep(Tensor x) -> Tensor", fake=torch.empty_like, cpu=torch.clone, cuda=torch.clone)


def fake_mode(**keys: bool) -> FakeTensorMode:
    """Tensors without numbers, of fixed shapes: an operation whose result's shape depends on numbers is an error.

    Inductor's cache of programs takes no graph without an environment for symbols, though here there are none.
    """
    symbols = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    return FakeTensorMode(shape_env=symbols, **keys)


def trace(flat: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """The operations of `flat`, none of which writes into a tensor, with inductor's decompositions.

    `flat` runs once. What surrounds the call makes no difference: no gradient is recorded, and nothing is cast.

    Args:
        flat: from tensors to tensors; its closures are constants.
        inputs: tensors of one FakeTensorMode, which is on.

    Raises:
        ValueError: if `flat` writes into an argument.
        Whatever `flat` raises, as itself.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._functorch._aot_autograd.functional_utils import from_fun, has_data_mutation, to_fun
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.functional_tensor import FunctionalTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def functional(*leaves: Tensor) -> list[Any]:
        # The mode does what this key would do.
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)):
            given = [to_fun(leaf) for leaf in leaves]
            results = flat(*given)
        written = [i for i, leaf in enumerate(given) if has_data_mutation(leaf)]
        if written:
            raise ValueError(f"a function that is compiled writes into its arguments: leaves {written}")
        return [from_fun(result) for result in results]

    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
        # A thread of the GPU's would not see the modes of this one.
        torch.autograd.set_multithreading_enabled(False),
        enable_python_dispatcher(),
        compiling(),
        FunctionalTensorMode(),
    ):
        graph: fx.GraphModule = make_fx(functional, decomposition_table=select_decomp_table())(*inputs)
    graph.graph.eliminate_dead_code()
    return graph


@contextmanager
def compiling() -> Iterator[None]:
    """What is traced may ask `torch.compiler.is_compiling()` whether there are numbers to read.

    Other threads that ask meanwhile are told the same.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def write_results(graph: fx.GraphModule, donated: int) -> None:
    """Lets a graph end by writing its first results into its first inputs, and return the others.

    What it returns or writes of an old value, or of a view of one, is copied before.
    """
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    places, found, last = placeholders[:donated], results(graph), graph.graph.output_node()
    old, new, rest = set(places), found[:donated], found[donated:]

    def kept(node: fx.Node) -> fx.Node:
        # A clone would not do: inductor drops it between two inputs, though one is written to before it is read.
        copy = graph.graph.call_function(_keep, (node,))
        copy.meta = {"val": node.meta["val"].clone()}
        return copy

    with graph.graph.inserting_before(last):
        rest = [kept(x) if isinstance(x, fx.Node) and base(x)[0] in old else x for x in rest]
        for i, (place, node) in enumerate(zip(places, new, strict=True)):
            source, is_viewed = _source(node)
            if node is not place and source in old and (is_viewed or source is not place):
                new[i] = kept(node)
        # Leaf by leaf: a fused copy of many makes large kernels, unlike each other and slow to compile.
        for place, node in zip(places, new, strict=True):
            if node is not place:
                written = graph.graph.call_function(torch.ops.aten.copy_.default, (place, node))
                written.meta = {"val": place.meta["val"]}
    last.args = (tuple(rest),)
    graph.recompile()


def _source(node: fx.Node) -> tuple[fx.Node, bool]:
    """The last node that all of a value comes from alone, and whether it is looked at in another way on its way."""
    is_viewed = False
    while len(node.all_input_nodes) == 1:
        is_viewed |= _is_view(node)
        (node,) = node.all_input_nodes
    return node, is_viewed


def base(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """What a node is a view of, and the views that lead to it."""
    views: list[fx.Node] = []
    while node.args and isinstance(source := node.args[0], fx.Node) and (_is_view(node) or _is_part(node, source)):
        views.insert(0, node)
        node = source
    return node, views


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _is_part(node: fx.Node, source: fx.Node) -> bool:
    """Whether a node is one of several views."""
    return node.target is operator.getitem and _is_view(source)


def results(graph: fx.GraphModule) -> list[Any]:
    """The nodes that a graph returns."""
    returned: Any = graph.graph.output_node().args[0]
    return list(returned)


def compiled(
    graph: fx.GraphModule,
    inputs: Sequence[Tensor],
    mode: FakeTensorMode,
    compile: Compile,
    *,
    is_whole: bool,
    **keys: Any,
) -> tuple[Run, list[Any]]:
    """A graph as it runs, and tensors like its results.

    Args:
        inputs: tensors of `mode`; the program takes those that are placed like them, at any address.
        is_whole: of a program of its own, that may write into its inputs, and has been through no passes yet.
        keys: for inductor.
    """
    made = [node.meta["val"] if isinstance(node, fx.Node) else node for node in results(graph)]
    if compile == "aot_eager":
        return lambda x: graph(*x), made
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    tell_inductor()
    with torch.no_grad(), tracing(TracingContext(mode)), TracingContext.report_output_strides() as reported:
        if is_whole:
            device = inputs[0].device if inputs else torch.device("cpu")
            graph = joint_graph_passes(graph, device)
            keys["is_inference"] = True
        run: Any = compile_fx_inner(graph, inputs, **keys)
    strides = reported or [None] * len(made)
    return run, [
        torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device) if isinstance(x, Tensor) and stride else x
        for x, stride in zip(made, strides, strict=True)
    ]
