"""Linear cross-entropy on NVIDIA GPUs: products by cuBLAS, one kernel between them, in chunks of tokens."""

import importlib.util
from typing import Any

import torch
from torch import Tensor

from hymo_kernels.host.gated_delta_call import multiprocessors
from hymo_kernels.primitive import define, differentiable

HAS_TRITON = importlib.util.find_spec("triton") is not None

BLOCK, WARPS = 2048, 8
"""Columns of one load, of which four are under way, and warps of the program of a row; measured on an H200."""

KEPT_BLOCK, KEPT_STEPS, KEPT_WARPS, KEPT_REGISTERS = 4096, 4, 32, 64
"""Of the form that reads a row once: words of one load, pairs of loads that a row takes at most, and warps and
registers that fill a multiprocessor; half of these are what is kept. On an H200 (Triton 3.6) it takes 637 us at
[8192, 64256], where the other form takes 729 and a copy 494."""

KEPT_CAP = 32.0
"""In nats: up to it the least gradient before its division, exp(-2 cap) 2^-24, is a normal fp32 number, 2^-116.3."""

COMPILED = True
"""False where the kernels are interpreted."""

TILE = 128
"""Rows of a chunk are a multiple of what a product computes at once."""

HIGHEST_CAP = 64.0
"""In nats: up to it a sum of exponentials of capped logits is a normal fp32 number, without a running maximum."""


def unavailable(hidden: Tensor, table: Tensor, cap: float) -> str | None:
    """Why there is no kernel for this call; None if there is one."""
    if hidden.device.type != "cuda":
        return f"it needs tensors on an NVIDIA GPU, these are on {hidden.device.type}"
    if not HAS_TRITON:
        return "Triton is not installed"
    if hidden.dtype not in (torch.bfloat16, torch.float32) or table.dtype != hidden.dtype:
        return f"it computes bfloat16 and float32, hidden is {hidden.dtype}, table {table.dtype}"
    if cap > HIGHEST_CAP:
        return f"it serves caps up to {HIGHEST_CAP:.0f}, this is {cap}"
    return None


def chunk_of(tokens: int, vocabulary: int, itemsize: int, logit_bytes: int) -> int:
    """Tokens whose logits exist at once: equal chunks within the budget, but at least one tile."""
    most = max(TILE, logit_bytes // (itemsize * _stride(vocabulary)) // TILE * TILE)
    chunks = max(1, -(-tokens // most))
    return min(max(1, tokens), -(-tokens // (chunks * TILE)) * TILE)


def _stride(vocabulary: int) -> int:
    """Numbers between rows of logits: whole vectors of 16 bytes, for loads and for products."""
    return -(-vocabulary // 16) * 16


def _is_kept(logits: Tensor, cap: float) -> bool:
    """Whether rows are read once, as it was timed: at a size that leaves less than half of the registers idle."""
    columns, most = logits.shape[1], 4 * KEPT_BLOCK * KEPT_STEPS
    return logits.dtype == torch.bfloat16 and cap <= KEPT_CAP and columns % 2 == 0 and most // 2 < columns <= most


def forward(
    hidden: Tensor, table: Tensor, labels: Tensor, weight: Tensor, cap: float, chunk: int, gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted nats of each token, and the gradients of their sum: hidden's, and the table's in fp32."""
    nats, d_hidden, d_table = _outputs(hidden, table, gradient)
    labels, weight = labels.contiguous(), weight.contiguous()
    tokens, vocabulary, stride = hidden.shape[0], table.shape[0], _stride(table.shape[0])
    if tokens == 0:
        return nats, d_hidden, d_table.zero_()
    room = torch.empty(chunk, stride, dtype=hidden.dtype, device=hidden.device)[:, :vocabulary]
    with torch.cuda.device(hidden.get_device()):
        for first in range(0, tokens, chunk):
            h = hidden[first : first + chunk]
            logits = torch.mm(h, table.mT, out=room[: h.shape[0]])
            _replace(logits, stride, labels, weight, nats, cap, first, gradient)
            if gradient:
                torch.mm(logits, table, out=d_hidden[first : first + chunk])
                _accumulate(d_table, logits.mT, h, begin=first == 0)
    return nats, d_hidden, d_table


def _replace(
    logits: Tensor, stride: int, labels: Tensor, weight: Tensor, nats: Tensor, cap: float, first: int, gradient: bool
) -> None:
    """Fills the nats of tokens from the first on, and puts the gradient in the place of their logits."""
    from hymo_kernels.device.cross_entropy import cross_entropy_kernel, kept_cross_entropy_kernel

    rows, vocabulary = logits.shape
    if gradient and _is_kept(logits, cap):
        kept_cross_entropy_kernel[(min(rows, multiprocessors(logits.device.index)),)](
            logits.view(torch.int32),
            labels,
            weight,
            nats,
            cap,
            first,
            rows,
            U=vocabulary,
            STRIDE=stride,
            BLOCK=KEPT_BLOCK,
            STEPS=-(-vocabulary // (4 * KEPT_BLOCK)),
            COMPILED=COMPILED,
            num_warps=KEPT_WARPS,
            maxnreg=KEPT_REGISTERS,
        )
    else:
        cross_entropy_kernel[(rows,)](
            logits,
            labels,
            weight,
            nats,
            cap,
            first,
            U=vocabulary,
            STRIDE=stride,
            BLOCK=BLOCK,
            GRADIENT=gradient,
            num_warps=WARPS,
        )


def _accumulate(total: Tensor, a: Tensor, b: Tensor, *, begin: bool) -> None:
    """`total = a b`, or `total += a b`: in fp32, without rounding the products to 16 bits first."""
    aten = torch.ops.aten
    if a.dtype == total.dtype:
        torch.mm(a, b, out=total) if begin else torch.addmm(total, a, b, out=total)
    elif begin:
        aten.mm.dtype_out(a, b, total.dtype, out=total)
    else:
        aten.addmm.dtype_out(total, a, b, total.dtype, out=total)


def _outputs(hidden: Tensor, table: Tensor, gradient: bool) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device),
        torch.empty(hidden.shape if gradient else (0,), dtype=hidden.dtype, device=hidden.device),
        torch.empty(table.shape if gradient else (0,), dtype=torch.float32, device=hidden.device),
    )


FORWARD = define(
    "linear_cross_entropy(Tensor hidden, Tensor table, Tensor labels, Tensor weight, float cap, int chunk, "
    "bool gradient) -> (Tensor, Tensor, Tensor)",
    fake=lambda hidden, table, labels, weight, cap, chunk, gradient: _outputs(hidden, table, gradient),
    cuda=forward,
)


def _sum(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The sum over tokens, and its gradients."""
    nats, d_hidden, d_table = FORWARD(*arguments, True)
    return nats.sum(), d_hidden, d_table


def _nats(*arguments: Any) -> Tensor:
    """Token by token."""
    nats: Tensor = FORWARD(*arguments, False)[0]
    return nats


def scaled(
    needs: tuple[bool, ...], arguments: tuple[Any, ...], outputs: tuple[Any, ...], grads: tuple[Any, ...]
) -> tuple[Tensor | None, ...]:
    """The gradients that were computed beside the sum, times the gradient of the sum."""
    scale, (_, d_hidden, d_table) = grads[0], outputs
    return (
        scale * d_hidden if needs[0] else None,
        (scale * d_table).to(d_hidden.dtype) if needs[1] else None,
        *(None,) * 4,
    )


def refused(needs: Any, arguments: Any, outputs: Any, grads: Any) -> tuple[Tensor | None, ...]:
    """Nats token by token keep nothing for a gradient."""
    raise NotImplementedError("linear_cross_entropy: reduction='none' has no gradient; differentiate reduction='sum'")


# No argument has a batch that a mapped axis could be folded into: each sample has a gradient of its own table.
SHARED = (0, 1, 2, 3)
triton_cross_entropy = differentiable(_sum, scaled, save=(7, 8), shared=SHARED, residuals=2)
triton_nats = differentiable(_nats, refused, save=(), shared=SHARED)
