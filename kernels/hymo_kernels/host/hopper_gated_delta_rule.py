"""The gated delta rule on Hopper GPUs, for keys and values of 64 or 128 features: three kernels in Gluon.

`triton_gated_delta_rule` serves all other shapes and cards. What these kernels gain, they gain from a whole state in
one program's registers and from operands that the copy engine puts where the tensor cores read them.
"""

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from hymo_kernels.host.gated_delta_call import (
    CHUNK,
    FORGOTTEN,
    Gradients,
    Options,
    Prepared,
    Shape,
    multiprocessors,
    over_groups,
)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def serves(q: Tensor, shape: Shape) -> bool:
    """Whether `scan` and `backward` are made for a call and for the card that it is on."""
    rows = shape.b * shape.hv * max(shape.t, shape.slots * shape.k)
    suits = q.element_size() == 2 and shape.k == shape.v and shape.k in (64, 128)
    return suits and rows < 2**31 and _is_hopper(q.device)


def prepares(q: Tensor, k: Tensor, shape: Shape, options: Options) -> bool:
    """Whether `prepare` is: for keys that it divides by their lengths, in rows that start where 16 bytes do."""
    suits = q.element_size() == 2 and options.norm and shape.k in (64, 128)
    return suits and _is_hopper(q.device) and _in_lines(q) and _in_lines(k)


def _descriptors() -> Any:
    """What the copy engine is told of a tensor: tokens [B, T, heads, D], rows of a chunk's square, states."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(128, 16, 2)

    def tokens(x: Tensor) -> TensorDescriptor:
        b, t, heads, d = x.shape
        flat = x.stride(2) == d and (b == 1 or x.stride(0) == t * x.stride(1))
        if not (flat and _in_lines(x)):
            x = x.contiguous()
        return TensorDescriptor(x, [b * t, heads * d], [x.stride(1), 1], [CHUNK, d], layout)

    def rows(x: Tensor) -> TensorDescriptor:
        return TensorDescriptor(x, [x.numel() // CHUNK, CHUNK], [CHUNK, 1], [CHUNK, CHUNK], layout)

    def squares(x: Tensor) -> TensorDescriptor:
        d = x.shape[-1]
        return TensorDescriptor(x, [x.numel() // d, d], [d, 1], [d, d], layout)

    return tokens, rows, squares


def _in_lines(x: Tensor) -> bool:
    """Whether every row starts where 16 bytes do, and Triton can see it."""
    return x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in x.stride()[:3])


def _pieces(shape: Shape, device: int | None) -> tuple[int, int]:
    """Chunks per segment, and segments: as many as one program on each multiprocessor allows."""
    programs = shape.b * shape.sequences * shape.hv
    chunks = -(-shape.t // CHUNK)
    length = max(8, -(-chunks // max(1, multiprocessors(device) // programs)))
    return length, -(-chunks // length)


_COMPILED: set[tuple[Any, ...]] = set()


def _launch(kernel: Any, programs: int, *arguments: Any, device: torch.device, **constants: Any) -> None:
    """Launches a kernel whose `FULL` says that no chunk is cut short.

    The first time its other form is compiled beside it, so that sequences of another length compile nothing.
    """
    kind = (kernel, device, arguments[0].base.dtype, *constants.values())
    if constants["PACKED"] or kind in _COMPILED:
        kernel[(programs,)](*arguments, **constants)
        return
    other = constants | {"FULL": not constants["FULL"]}

    def compile_other() -> None:
        with torch.cuda.device(-1 if device.index is None else device.index):
            kernel.warmup(*arguments, grid=(programs,), **other)

    with ThreadPoolExecutor(1) as beside:
        compiling = beside.submit(compile_other)
        kernel[(programs,)](*arguments, **constants)
        compiling.result()
    _COMPILED.update({kind, (*kind[:3], *other.values())})


def prepare(
    q: Tensor,
    k: Tensor,
    g: Tensor | None,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    bounds: Tensor,
    made: Prepared,
    *,
    shape: Shape,
    options: Options,
) -> None:
    """Fills `made`."""
    from hymo_kernels.device.fused_prepare import fused_prepare_kernel

    gates = beta if g is None else g
    fused_prepare_kernel[(shape.b * shape.slots * shape.hv,)](
        q,
        k,
        gates,
        beta,
        beta if A_log is None else A_log,
        beta if dt_bias is None else dt_bias,
        bounds,
        options.scale,
        *made,
        *q.stride()[:3],
        *k.stride()[:3],
        *gates.stride(),
        *beta.stride(),
        shape.t,
        shape.slots,
        shape.sequences,
        H=shape.h,
        HV=shape.hv,
        D=shape.k,
        C=CHUNK,
        PACKED=shape.packed,
        GATE=options.gate,
        HAS_BIAS=dt_bias is not None,
        SIGMOID=options.sigmoid,
        HAS_G=g is not None,
        BETA_MAX=options.beta_max,
        num_warps=4,
        maxnreg=96,  # five programs a multiprocessor
    )


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    made: Prepared,
    start: Tensor | None,
    bounds: Tensor,
    *,
    o: Tensor | None,
    end: Tensor | None,
    states: Tensor | None,
    shape: Shape,
    options: Options,
) -> None:
    """Carries the state through all chunks, writing what is given of o, end and states."""
    from hymo_kernels.device.fused_forward import fused_forward_kernel

    tokens, rows, squares = _descriptors()
    length, segments = _pieces(shape, q.device.index)
    _launch(
        fused_forward_kernel,
        shape.b * shape.sequences * shape.hv * segments,
        tokens(q),
        tokens(k),
        tokens(v),
        rows(made.inverse),
        rows(made.attention),
        tokens(v if o is None else o),
        rows(made.inverse) if states is None else squares(states),
        *made[2:],
        made.total if start is None else start,
        made.total if end is None else end,
        v if o is None else o,
        bounds,
        options.scale,
        *((0, 0, 0, 0) if start is None else start.stride()),
        shape.t,
        shape.slots,
        shape.sequences,
        length,
        segments,
        FORGOTTEN,
        device=q.device,
        H=shape.h,
        HV=shape.hv,
        D=shape.k,
        C=CHUNK,
        PACKED=shape.packed,
        FULL=not shape.packed and shape.t % CHUNK == 0,
        HAS_START=start is not None,
        READ_OUT=o is not None,
        KEEP_STATES=states is not None,
        KEEP_END=end is not None and options.keep_end,
        num_warps=8,
    )


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    kept: Prepared,
    states: Tensor,
    d_end: Tensor | None,
    bounds: Tensor,
    grads: Gradients,
    start: Tensor | None,
    *,
    shape: Shape,
    options: Options,
) -> None:
    """Fills `grads`, given the state before each chunk."""
    from hymo_kernels.device.fused_backward import fused_backward_kernel

    tokens, rows, squares = _descriptors()
    with over_groups(grads, shape) as (dq, dk):
        length, segments = _pieces(shape, q.device.index)
        _launch(
            fused_backward_kernel,
            shape.b * shape.sequences * shape.hv * segments,
            tokens(q),
            tokens(k),
            tokens(v),
            tokens(do),
            rows(kept.inverse),
            rows(kept.attention),
            squares(states),
            tokens(dq),
            tokens(dk),
            *kept[2:],
            kept.total if d_end is None else d_end,
            grads.retention,
            grads.strength,
            grads.v,
            dq,
            dk,
            grads.start,
            bounds,
            options.scale,
            *((0, 0, 0, 0) if d_end is None else d_end.stride()),
            shape.t,
            shape.slots,
            shape.sequences,
            length,
            segments,
            FORGOTTEN,
            device=q.device,
            H=shape.h,
            HV=shape.hv,
            D=shape.k,
            C=CHUNK,
            PACKED=shape.packed,
            FULL=not shape.packed and shape.t % CHUNK == 0,
            NORM=options.norm,
            HAS_END=d_end is not None,
            KEEP_START=start is not None,
            num_warps=8,
        )
