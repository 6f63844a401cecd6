"""Implementations are values: a `Backend` is a record of the operations that have more than one.

Choosing kernels, a compute dtype or sharding is passing another record; the model never asks which one it got.
"""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hymo.config import TrainingConfig
from hymo.params import for_compute
from hymo_kernels import causal_conv1d, gated_delta_rule, gated_linear_scan


class Backend(NamedTuple):
    """The operations of a model that have more than one implementation.

    Args:
        scan: the gated delta rule, `hymo_kernels.gated_delta_rule`.
        linear_scan: the additive recurrence, `hymo_kernels.gated_linear_scan`.
        conv: the causal depthwise convolution, `hymo_kernels.causal_conv1d`.
        attend: document-isolated causal attention, `attend` below.
        gather: (parameters of a block, their specs) -> the parameters its layers use.
        logit_budget: how many fp32 logits exist at once in the loss.
    """

    scan: Callable[..., tuple[Tensor, Tensor | None]]
    linear_scan: Callable[..., tuple[Tensor, Tensor | None]]
    conv: Callable[..., tuple[Tensor, Tensor | None]]
    attend: Callable[..., Tensor]
    gather: Callable[[Any, Any], Any]
    logit_budget: int


def visible(position: Int[Tensor, "b t"], slot: Int[Tensor, ""], slots: int) -> Bool[Tensor, "b t s"]:
    """Which of `slots` keys each query sees: those of its own document, up to itself.

    Args:
        position: index of each query in its document.
        slot: index of the first query among the keys.
    """
    key = torch.arange(slots, device=position.device)
    query = slot + torch.arange(position.shape[1], device=position.device)
    return (key <= query[:, None]) & (key >= (query - position)[..., None])


def attend(
    q: Float[Tensor, "b t h k"],
    k: Float[Tensor, "b s g k"],
    v: Float[Tensor, "b s g v"],
    *,
    position: Int[Tensor, "b t"],
    slot: Int[Tensor, ""],
    scale: float,
) -> Float[Tensor, "b t h v"]:
    """Softmax attention inside documents; query head i uses key head i // (h / g).

    Args:
        position: index of each query in its document.
        slot: index of the first query among the keys; 0 when there is no cache.
        scale: multiplies the scores.
    """
    q, k, v = (rearrange(x, "b t h k -> b h t k") for x in (q, k, v))
    mask = visible(position, slot, k.shape[2])[:, None]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return rearrange(out, "b h t v -> b t h v")


def keep(params: Any, spec: Any) -> Any:
    """Parameters as they are: fp32, on one device."""
    return params


EAGER = Backend(
    scan=partial(gated_delta_rule, backend="eager"),
    linear_scan=partial(gated_linear_scan, backend="eager"),
    conv=partial(causal_conv1d, backend="eager"),
    attend=attend,
    gather=keep,
    logit_budget=2**20,
)
"""Plain PyTorch, on any device, in the dtype of the parameters. Logits come in pieces that fit a CPU's cache."""

GPU_LOGIT_BUDGET = 2**28
"""One GiB of fp32 logits at once: pieces large enough to fill a GPU."""

TRITON = EAGER._replace(
    scan=partial(gated_delta_rule, backend="triton"),
    linear_scan=partial(gated_linear_scan, backend="triton"),
    conv=partial(causal_conv1d, backend="triton"),
    logit_budget=GPU_LOGIT_BUDGET,
)
"""Triton's kernels, on an NVIDIA GPU; what they do not serve is an error."""

AUTO = EAGER._replace(
    scan=gated_delta_rule, linear_scan=gated_linear_scan, conv=causal_conv1d, logit_budget=GPU_LOGIT_BUDGET
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
    if torch.device(device).type != "cuda":
        backend = EAGER
    else:
        on_gpu = {"auto": AUTO, "triton": TRITON, "eager": EAGER._replace(logit_budget=GPU_LOGIT_BUDGET)}
        backend = on_gpu["eager" if missing else training.backend]
    return with_compute_dtype(backend, getattr(torch, training.precision))


def _triton_is_missing(device: torch.device) -> str | None:
    """Why there are no Triton kernels on a device; None if there are."""
    if device.type != "cuda":
        return f"it needs an NVIDIA GPU, this is a {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    return None


def with_compute_dtype(backend: Backend, dtype: torch.dtype) -> Backend:
    """The same backend, its layers computing in `dtype`; gates, norms, states and the loss stay in fp32."""
    if dtype == torch.float32:
        return backend
    return backend._replace(gather=partial(_cast, dtype=dtype))


def _cast(params: Any, spec: Any, dtype: torch.dtype) -> Any:
    return for_compute(spec, params, dtype)
