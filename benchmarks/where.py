"""Where the GPU time of a step goes: every kernel is counted for the part of the model that it works for.

A kernel's name tells what it does, and the operation that launched it tells more: products of matrices look alike, but
their shapes are those of the vocabulary, of the experts, or of the matrices that NorMuon orthogonalises.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from hymo import tree
from hymo.config import ModelConfig
from hymo.model import model_spec
from hymo.params import is_spec

KINDS = {
    "communication": r"nccl",
    "attention": r"sdpa|fmha|attention|attn|flash_(fwd|bwd)|pytorch_flash",
    "convolution": r"conv(?!ert)",
    "scan": r"gated_(delta|linear)|recurrent_delta|GatedDelta|chunk|kkt|gdr|wy_repr|recompute_w_u|tilelang|l2norm"
    r"|fused_(prepare|forward|backward)_kernel",
    "experts": r"grouped|GroupProblem|topk|sort|log_sigmoid",
    "heads": r"cross_entropy|softmax|nll_loss|tanh",
    "optimiser": r"lerp|addcmul|adam|multi_tensor|vector_norm",
    "copies": r"memcpy|memset",
    "other products": r"gemm|cutlass|nvjet|xmma|cublas|splitk",
}
"""What operation and kernel are called; the first that fits counts, and nothing else is "elementwise, norms"."""

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


def kind_of(operation: str, shapes: Sequence[Any], kernel: str, model: ModelConfig) -> str:
    """What a kernel works for.

    Args:
        operation: that launched it, or "" if that is not known.
        shapes: of the operation's inputs; numbers have none.
    """
    if operation in PRODUCTS:
        return kind_of_product([list(shape) for shape in shapes if shape], model)
    names = f"{operation} {kernel}"
    fits = (kind for kind, pattern in KINDS.items() if re.search(pattern, names, re.IGNORECASE))
    return next(fits, "elementwise, norms")


def kind_of_product(shapes: Sequence[Sequence[int]], model: ModelConfig) -> str:
    """What a product of matrices, or of stacks of them, works for."""
    if any(model.vocab_size in shape for shape in shapes):
        return "heads"
    shapes = [shape for shape in shapes if len(shape) == 3]
    if not shapes:
        return "projections"
    if all(shape[0] == model.n_routed_experts for shape in shapes):
        return "experts"
    specs = [leaf for leaf in tree.leaves(model_spec(model), is_leaf=is_spec) if leaf.role == "matrix"]
    sides = {leaf.shape for leaf in specs} | {(min(leaf.shape),) * 2 for leaf in specs}
    newton_schulz = all(sides & {(shape[-2], shape[-1]), (shape[-1], shape[-2])} for shape in shapes)
    return "optimiser" if newton_schulz else "other products"


def breakdown(run: Callable[[], object], model: ModelConfig) -> dict[str, float]:
    """Milliseconds of GPU time by kind, of one run under the profiler."""
    with torch.profiler.profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True
    ) as profile:
        run()
        torch.cuda.synchronize()
    return attributed(profile.events(), model)


def attributed(events: Sequence[Any], model: ModelConfig) -> dict[str, float]:
    """Milliseconds by kind, from a profiler's events."""
    spent: Counter[str] = Counter()
    # Kernels by name, less those that an operation is known for. A span that somebody marked is no kernel.
    unclaimed: Counter[str] = Counter()
    marks = {event.name for event in events if event.is_user_annotation}
    for event in events:
        if event.device_type != DeviceType.CPU:
            if event.name not in marks:
                unclaimed[event.name] += event.time_range.elapsed_us()
            continue
        for kernel in event.kernels:
            if kernel.name not in marks:
                spent[kind_of(event.name, event.input_shapes, kernel.name, model)] += kernel.duration
                unclaimed[kernel.name] -= kernel.duration
    for name, microseconds in unclaimed.items():
        spent[kind_of("", (), name, model)] += microseconds
    return {kind: microseconds / 1e3 for kind, microseconds in spent.items()}
