"""How an opaque operation becomes differentiable, vmappable and compilable under `torch.func`: hymo's `custom_vjp`.

The obvious recipes are silently wrong (torch 2.11 to 2.13), so every kernel and collective goes through this file:

* Inside `torch.compile`, `torch.func.grad` ignores the `backward` of a bare `autograd.Function` whose input is a leaf
  of the gradient and differentiates through `forward`: a tripled backward returns the untripled gradient, an opaque
  forward 0.0 (pytorch#193279). `allow_in_graph` around `apply` keeps Dynamo out; it marks the function it gets for the
  whole process, so each primitive gives it a fresh one.
* `custom_op`, `triton_op` and `register_autograd` fail under `torch.func.grad`: "must override the setup_context
  staticmethod" (pytorch#168393, #170834, #179652). Ops come from a raw `Library` with a fallthrough Autograd key.
* Under `torch.func.grad` a `backward` receives wrapped tensors without storage, which a kernel cannot read. A backward
  that is itself a Function receives plain ones: hence a pair.
* What a Function saves must be an argument or an output, so residuals are outputs of `forward`.

`tests/kernels/test_primitive.py` holds the canaries, with a deliberately tripled backward.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LIBRARY = torch.library.Library("hymo", "DEF")  # type: ignore[no-untyped-call]
OPERATIONS: list[Any] = []
"""All raw ops that have been defined."""

Outputs = tuple[Tensor, ...]
Forward = Callable[..., Tensor | Outputs]
Backward = Callable[[tuple[bool, ...], tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]], tuple[Tensor | None, ...]]


def define(
    schema: str,
    *,
    fake: Callable[..., Any],
    cpu: Callable[..., Any] | None = None,
    cuda: Callable[..., Any] | None = None,
    vmap: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """A raw op, `torch.ops.hymo.<name>`: opaque to autograd and to every compiler.

    Args:
        schema: as in `torch.library.define`, without a namespace: `"scale(Tensor x, float s) -> Tensor"`.
        fake: the outputs' shapes, dtypes and devices, as empty tensors.
        cpu, cuda: the implementations; a device without one raises torch's own error.
        vmap: the rule of `torch.library.register_vmap`; by default the op runs once a sample. `differentiable` does
            without one: it folds the mapped axis into the batch.
    """
    name = schema.split("(")[0]
    LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    for key, implementation in (("CPU", cpu), ("CUDA", cuda)):
        if implementation is not None:
            LIBRARY.impl(name, implementation, key)  # type: ignore[no-untyped-call]
    LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"hymo::{name}", fake, lib=LIBRARY)
    op: Callable[..., Any] = getattr(torch.ops.hymo, name).default
    OPERATIONS.append(op)

    def batched(info: Any, dims: Any, *arguments: Any) -> Any:
        return _one_by_one(op, info, dims, arguments)

    torch.library.register_vmap(f"hymo::{name}", vmap or batched, lib=LIBRARY)
    return op


def tell_inductor() -> None:
    """Tells inductor that it calls the raw ops as they are.

    Untold it finds out, but first writes down what an op is given, and what that was given, and so on (torch 2.11): for
    a model of 32 layers it does not come to an end.
    """
    from torch._inductor.lowering import lowerings, make_fallback

    for op in OPERATIONS:
        if op not in lowerings:
            make_fallback(op, warn=False)  # type: ignore[no-untyped-call]


def differentiable(
    forward: Forward, backward: Backward, *, save: tuple[int, ...], shared: tuple[int, ...] = (), residuals: int = 0
) -> Callable[..., Any]:
    """`forward` as a function with the gradient `backward`, in every mode of `torch.func` and `torch.compile`.

    Args:
        forward: `(*arguments) -> tensor or tuple of tensors`. Arguments are tensors, None, or static (numbers, strings,
            booleans). Dimension 0 of every tensor argument and of every output is the batch.
        backward: `(needs, arguments, outputs, grads) -> one gradient or None per argument`. `needs[i]` is False where
            argument i wants no gradient. Tensors that are not saved, and gradients of unused outputs, are None.
        save: what the backward reads, as indices into `(*arguments, *outputs)`; static arguments are always there.
        shared: indices of tensor arguments without a batch dimension (weights). `vmap` over samples then runs the
            backward, and a forward in which a weight itself is mapped, once a sample.
        residuals: how many of the last outputs are only for the backward; they are not returned.

    The second derivative raises `NotImplementedError`.
    """
    label = getattr(forward, "__name__", "primitive")

    class BackwardPass(torch.autograd.Function):
        @staticmethod
        def forward(needs: tuple[bool, ...], outputs: int, *values: Any) -> Outputs:
            count = len(needs)
            arguments, results, grads = values[:count], values[count : count + outputs], values[count + outputs :]
            found = backward(needs, arguments, results, grads)
            wanted = [grad for need, grad in zip(needs, found, strict=True) if need]
            assert all(grad is not None for grad in wanted), (
                f"{label}: backward left out a gradient that {needs} asks for"
            )
            return tuple(grad for grad in wanted if grad is not None)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise NotImplementedError(
                f"{label}: asked for a second derivative; its backward is a kernel with a first derivative only, "
                "differentiate the operation's definition instead"
            )

        @staticmethod
        def vmap(info: Any, dims: Any, needs: tuple[bool, ...], outputs: int, *values: Any) -> Any:
            def call(*values: Any) -> Any:
                return BackwardPass.apply(needs, outputs, *values)  # type: ignore[no-untyped-call]

            if shared:
                return _one_by_one(call, info, dims[2:], values)
            return _folded(call, info, dims[2:], values)

    class ForwardPass(torch.autograd.Function):
        @staticmethod
        def forward(*arguments: Any) -> Tensor | Outputs:
            return forward(*arguments)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            values = (*inputs, *outputs)
            ctx.set_materialize_grads(False)
            if residuals:
                ctx.mark_non_differentiable(*outputs[-residuals:])
            ctx.save_for_backward(*(values[i] for i in save))
            ctx.static = [None if isinstance(x, Tensor) else x for x in inputs]
            ctx.outputs = len(outputs)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            values = ctx.static + [None] * ctx.outputs
            for i, saved in zip(save, ctx.saved_tensors, strict=True):
                values[i] = saved if isinstance(saved, Tensor) else values[i]
            needs = tuple(ctx.needs_input_grad)
            found = iter(BackwardPass.apply(needs, ctx.outputs, *values, *grads))  # type: ignore[no-untyped-call]
            return tuple(next(found) if need else None for need in needs)

        @staticmethod
        def vmap(info: Any, dims: Any, *arguments: Any) -> Any:
            if any(isinstance(dims[i], int) for i in shared):
                return _one_by_one(ForwardPass.apply, info, dims, arguments)
            return _folded(ForwardPass.apply, info, dims, arguments, shared=shared)

    def primitive(*arguments: Any) -> Any:
        outputs = ForwardPass.apply(*arguments)  # type: ignore[no-untyped-call]
        if not residuals:
            return outputs
        kept = outputs[:-residuals]
        return kept if len(kept) > 1 else kept[0]

    primitive.__name__ = primitive.__qualname__ = label
    primitive.__doc__ = forward.__doc__
    wrapped: Callable[..., Any] = torch.compiler.allow_in_graph(primitive)  # type: ignore[no-untyped-call]
    return wrapped


def _folded(call: Callable[..., Any], info: Any, dims: Any, args: Any, *, shared: tuple[int, ...] = ()) -> Any:
    """One call in which the mapped axis is the outer part of the batch; unmapped tensors are repeated."""
    size = info.batch_size

    def fold(i: int, x: Any) -> Any:
        if not isinstance(x, Tensor) or i in shared:
            return x
        return (x.expand(size, *x.shape) if dims[i] is None else x.movedim(dims[i], 0)).flatten(0, 1)

    def unfold(x: Tensor) -> Tensor:
        # Not -1 for the batch: an output without elements would leave it open.
        return x.reshape(size, x.shape[0] // size, *x.shape[1:])

    outputs = call(*(fold(i, x) for i, x in enumerate(args)))
    if isinstance(outputs, Tensor):
        return unfold(outputs), 0
    return tuple(unfold(x) for x in outputs), (0,) * len(outputs)


def _one_by_one(call: Callable[..., Any], info: Any, dims: Any, args: Any) -> Any:
    """One call a sample: for arguments that have no batch to fold the mapped axis into."""
    samples = [
        call(*(x.select(d, i) if isinstance(d, int) else x for x, d in zip(args, dims, strict=True)))
        for i in range(info.batch_size)
    ]
    if isinstance(samples[0], Tensor):
        return torch.stack(samples), 0
    return tuple(torch.stack(outputs) for outputs in zip(*samples, strict=True)), (0,) * len(samples[0])
