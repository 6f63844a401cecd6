"""Products in low precision whose result is wanted in fp32: they leave in fp32, as they were accumulated.

The gradient of an fp32 master, which a layer uses in bf16, is a product of bf16 matrices that is then cast to fp32. As
written it is rounded to bf16 on the way, and memory is passed over once more.
"""

from math import prod
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
WIDE: dict[Any, Any] = {aten.mm.default: aten.mm.dtype, aten.bmm.default: aten.bmm.dtype}


def exact_products(graph: fx.Graph) -> None:
    """Lets the products of 16-bit matrices that a graph gives back as fp32 be fp32 (CUDA only, where there are such).

    Only views may be between a product and its cast, and nothing else may read either. A part of a product stays as it
    is: it has to be copied in any case, and is read faster in 16 bits. So does what the graph itself goes on with.
    """
    output = graph.output_node()
    for cast in list(output.all_input_nodes):
        path = _path(cast)
        if not path:
            continue
        product = path[0]
        with graph.inserting_before(product):
            wide = graph.call_function(WIDE[product.target], (*product.args, torch.float32))
        wide.meta = dict(product.meta)
        product.replace_all_uses_with(wide)
        graph.erase_node(product)
        for node in (wide, *path[1:]):
            val = node.meta["val"]
            node.meta["val"] = val.new_empty_strided(val.shape, val.stride(), dtype=torch.float32)
        cast.replace_all_uses_with(path[-1] if path[1:] else wide)
        graph.erase_node(cast)
    graph.lint()


def _path(cast: fx.Node) -> list[fx.Node]:
    """From the product that a cast to fp32 ends to the last view before the cast; empty if there is no such."""
    if cast.target is not torch.ops.prims.convert_element_type.default or cast.args[1] != torch.float32:
        return []
    path: list[fx.Node] = []
    node: Any = cast.args[0]
    while len(node.users) == 1:
        path.insert(0, node)
        if node.target in WIDE:
            val = node.meta["val"]
            whole = prod(val.shape) == prod(cast.meta["val"].shape)
            return path if whole and val.dtype in (torch.bfloat16, torch.float16) else []
        if not (isinstance(node.target, torch._ops.OpOverload) and node.target.is_view):
            return []
        node = node.args[0]
    return []
