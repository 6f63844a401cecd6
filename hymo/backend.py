"""Implementations are values: a `Backend` is a record of the operations that have more than one.

Choosing kernels, a compute dtype or sharding is passing another record; the model never asks which one it got.
"""

import functools
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hymo.config import TrainingConfig
from hymo.params import for_compute
from hymo.region import once, region
from hymo_kernels import (
    causal_conv1d_heads,
    document_attention,
    gated_delta_rule,
    gated_linear_scan,
    linear_cross_entropy,
    routed_swiglu,
)


class Backend(NamedTuple):
    """The operations of a model that have more than one implementation.

    Args:
        scan: the gated delta rule, `hymo_kernels.gated_delta_rule`.
        linear_scan: the additive recurrence, `hymo_kernels.gated_linear_scan`.
        conv: queries, keys and values by a causal convolution, rotated, `hymo_kernels.causal_conv1d_heads`.
        attend: document-isolated causal attention, `hymo_kernels.document_attention`.
        experts: what a mixture's experts answer within their capacity, `hymo_kernels.routed_swiglu`.
        cross_entropy: the loss of a vocabulary head, `hymo_kernels.linear_cross_entropy`.
        lend: (experts of a block, their specs) -> what a region is given of them.
        gather: (parameters of a block, their specs) -> the parameters its layers use; what is lent stays as it is.
        region: a function that is called many times -> the function to call in its place, `hymo.region.region`.
        once: likewise for one that is not differentiated, `hymo.region.once`.
        stacked: elements of a parameter up to which it is updated in a stack with those of its shape and role.
    """

    scan: Callable[..., tuple[Tensor, Tensor | None]]
    linear_scan: Callable[..., tuple[Tensor, Tensor | None]]
    conv: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]
    attend: Callable[..., Tensor]
    experts: Callable[..., tuple[Tensor, Tensor]]
    cross_entropy: Callable[..., Tensor]
    lend: Callable[[Any, Any], Any]
    gather: Callable[[Any, Any], Any]
    region: Callable[[Any], Any]
    once: Callable[[Any], Any]
    stacked: int


def keep(params: Any, spec: Any) -> Any:
    """Parameters as they are: fp32, on one device."""
    return params


def inline(pure: Any) -> Any:
    """The function itself."""
    return pure


COMPILED, COMPILED_ONCE = partial(region, compile="inductor"), partial(once, compile="inductor")
"""Layers of one kind are compiled once, and so are micro-batches: as one graph, the 32 layers of v1.0 were not compiled
within 7 minutes."""

STACKED = 2**21
"""Elements of a parameter whose copies do not count: of v1.0 the matrices, not the experts."""

LOGIT_BYTES, GPU_LOGIT_BYTES = 2**22, 2**30
"""Logits that exist at once: pieces that fit a CPU's cache, and pieces large enough to fill a GPU."""

EAGER = Backend(
    scan=partial(gated_delta_rule, backend="eager"),
    linear_scan=partial(gated_linear_scan, backend="eager"),
    conv=partial(causal_conv1d_heads, backend="eager"),
    attend=partial(document_attention, backend="eager"),
    experts=partial(routed_swiglu, backend="eager"),
    cross_entropy=partial(linear_cross_entropy, backend="eager", logit_bytes=LOGIT_BYTES),
    lend=keep,
    gather=keep,
    region=inline,
    once=inline,
    stacked=0,
)
"""Plain PyTorch, on any device, in the dtype of the parameters; its logits come in pieces for a CPU."""

EAGER_ON_GPU = EAGER._replace(cross_entropy=partial(linear_cross_entropy, backend="eager", logit_bytes=GPU_LOGIT_BYTES))
"""Plain PyTorch, with logits in pieces for a GPU."""

TRITON = EAGER._replace(
    scan=partial(gated_delta_rule, backend="triton", keep_states=True),
    linear_scan=partial(gated_linear_scan, backend="triton"),
    conv=partial(causal_conv1d_heads, backend="triton"),
    attend=partial(document_attention, backend="triton"),
    experts=routed_swiglu,
    cross_entropy=partial(linear_cross_entropy, backend="triton", logit_bytes=GPU_LOGIT_BYTES),
)
"""Triton's kernels, on an NVIDIA GPU; what they do not serve is an error. Experts have none and take what is best."""

AUTO = EAGER._replace(
    scan=partial(gated_delta_rule, keep_states=True),
    linear_scan=gated_linear_scan,
    conv=causal_conv1d_heads,
    attend=document_attention,
    experts=routed_swiglu,
    cross_entropy=partial(linear_cross_entropy, logit_bytes=GPU_LOGIT_BYTES),
)
"""Triton's kernels for what they serve on a GPU, and plain PyTorch for the rest."""


def choose_backend(training: TrainingConfig, device: torch.device | str) -> Backend:
    """The operations that `training.backend` asks for on a device, computing in `training.precision`.

    `auto` takes Triton's kernels where they are available and serve what is asked, and plain PyTorch elsewhere.

    Raises:
        ValueError: if they are not available there.
    """
    missing = _triton_is_missing(torch.device(device))
    if training.backend == "triton" and missing:
        raise ValueError(f"training.backend: triton is not available, {missing}; auto and eager work")
    if training.backend == "triton" and training.precision == "float32":
        raise ValueError(
            "training.backend: triton has no attention in training.precision float32; auto and eager work, and auto "
            "takes the other kernels"
        )
    if torch.device(device).type != "cuda":
        backend = EAGER
    else:
        on_gpu = {"auto": AUTO, "triton": TRITON, "eager": EAGER_ON_GPU}
        backend = on_gpu["eager" if missing else training.backend]
        if training.compile == "inductor":
            backend = backend._replace(region=COMPILED, once=COMPILED_ONCE, stacked=STACKED)
    return with_compute_dtype(backend, getattr(torch, training.precision))


def _triton_is_missing(device: torch.device) -> str | None:
    """Why there are no Triton kernels on a device; None if there are."""
    if device.type != "cuda":
        return f"it needs an NVIDIA GPU, this is a {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    return None


@functools.cache
def with_compute_dtype(backend: Backend, dtype: torch.dtype) -> Backend:
    """The same backend, its layers computing in `dtype`; gates, norms, states and the loss stay in fp32.

    Asked again it is one and the same, so that what is compiled for it is found again.
    """
    if dtype == torch.float32:
        return backend
    return backend._replace(lend=partial(_joined, dtype=dtype), gather=partial(_cast, dtype=dtype))


def _joined(experts: Any, spec: Any, dtype: torch.dtype) -> Any:
    """Experts in `dtype` before a region sees them, gate and up in one: gradients leave it as its products made them.

    What reads them converts them; a region would give them back in fp32, which are most of a model's numbers.
    """
    low = for_compute(spec, experts, dtype)
    return low._replace(gate=torch.cat([low.gate, low.up], dim=-1), up=())


def _cast(params: Any, spec: Any, dtype: torch.dtype) -> Any:
    return for_compute(spec, params, dtype)
