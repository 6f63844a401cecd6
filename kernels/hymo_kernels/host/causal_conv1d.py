"""Causal depthwise convolution over time, with a state and with documents."""

from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hymo_kernels.host.triton_causal_conv1d import triton_causal_conv1d, unavailable
from hymo_kernels.primitive import differentiable


def causal_conv1d(
    x: Float[Tensor, "b t c"],
    weight: Float[Tensor, "c w"],
    *,
    position: Int[Tensor, "b t"] | None = None,
    bias: Float[Tensor, " c"] | None = None,
    activation: Literal["silu"] | None = None,
    initial_state: Float[Tensor, "n w-1 c"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
    backend: Literal["eager", "triton"] | None = None,
) -> tuple[Float[Tensor, "b t c"], Float[Tensor, "n w-1 c"] | None]:
    """`y_t = activation(bias + sum_j weight[:, w-1-j] x_{t-j})` for each channel by itself, and the state after it.

    The last column of `weight` multiplies the current token, as in `F.conv1d` and causal-conv1d.

    Args:
        position: index of each token inside its document; tap j is live iff `position >= j`, so a document never reads
            the one before it, bitwise. Without it only the start of the sequence ends the taps.
        activation: `"silu"`, or none.
        initial_state: the `w - 1` inputs before the first, oldest first; None is zeros.
        output_final_state: return the last `w - 1` inputs (of state and x together), in x's dtype; else None.
        cu_seqlens: bounds of sequences packed in one batch row; one state a sequence. Rows from `cu_seqlens[-1]` on
            are 0. No host synchronisation.
        backend: "triton" (a kernel for 2 to 8 taps of 16-bit or fp32 numbers on an NVIDIA GPU, which keeps nothing but
            its inputs for the backward), or "eager", plain PyTorch for anything; None is "triton" wherever it is
            available.

    Returns:
        The filtered sequence in x's dtype (16-bit inputs are summed in fp32), and the state or None.

    Raises:
        ValueError: for an unknown activation, `cu_seqlens` with more than one row or with `position`, or a backend that
            is not available.
    """
    if activation not in (None, "silu"):
        raise ValueError(f"causal_conv1d: activation must be None or 'silu'; got {activation!r}")
    if cu_seqlens is not None and (x.shape[0] != 1 or position is not None):
        raise ValueError(
            "causal_conv1d: cu_seqlens packs its sequences in one batch row and replaces position; "
            f"got x {list(x.shape)}, position {'given' if position is not None else None}"
        )
    if takes_triton(x, weight, backend=backend):
        y, end = triton_causal_conv1d(
            x, weight, position, bias, initial_state, cu_seqlens, activation == "silu", output_final_state
        )
        return y, end if output_final_state else None
    width, time = weight.shape[1], x.shape[1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if cu_seqlens is None:
        past = (
            wide.new_zeros((x.shape[0], width - 1, x.shape[2]))
            if initial_state is None
            else initial_state.to(wide.dtype)
        )
        rows = torch.cat([past, wide], dim=1)
        source, state = _sources(rows, width, time, position), rows[:, time:]
    else:
        count = cu_seqlens.shape[0] - 1
        past = wide.new_zeros((count, width - 1, x.shape[2])) if initial_state is None else initial_state.to(wide.dtype)
        # Rows of no sequence may hold anything: they must not reach the gradient of the weight.
        used = torch.arange(time, device=x.device)[:, None] < cu_seqlens[-1]
        rows = torch.cat([past.flatten(0, 1), torch.where(used, wide[0], 0)])[None]
        source, last = _packed_sources(cu_seqlens, width, time)
        state = rows[0][last]
    y = _filtered(rows, weight.to(wide.dtype), source)
    if bias is not None:
        y = y + bias.to(wide.dtype)
    if activation == "silu":
        y = torch.nn.functional.silu(y)
    if cu_seqlens is not None:
        y = torch.where(used, y, 0)
    return y.to(x.dtype), state.to(x.dtype) if output_final_state else None


def takes_triton(x: Tensor, weight: Tensor, *, backend: str | None) -> bool:
    """Whether the Triton kernels compute this call; an error if they are asked for and cannot."""
    if backend not in (None, "eager", "triton"):
        raise ValueError(f"causal_conv1d: backend must be 'eager', 'triton' or None; got {backend!r}")
    reason = unavailable(x, weight)
    if reason and backend == "triton":
        raise ValueError(f"causal_conv1d: backend='triton' is not available, {reason}; use backend='eager' or None")
    return not reason and backend != "eager"


def _sources(
    rows: Float[Tensor, "b r c"], width: int, time: int, position: Int[Tensor, "b t"] | None
) -> Int[Tensor, "b {width} {time}"]:
    """The row that each tap reads at each token; r where the tap is dead."""
    tap = torch.arange(width, device=rows.device)[:, None]
    source = (tap + torch.arange(time, device=rows.device)).expand(rows.shape[0], -1, -1)
    if position is None:
        return source
    return torch.where(position[:, None] >= width - 1 - tap, source, rows.shape[1])


def _packed_sources(
    cu_seqlens: Int[Tensor, " bounds"], width: int, time: int
) -> tuple[Int[Tensor, "1 {width} {time}"], Int[Tensor, "n {width-1}"]]:
    """As `_sources`, among all states, then all tokens, as rows; and the rows that the next state keeps.

    A sequence reads its own state where its past ends. A token of no sequence reads nothing.
    """
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    count, kept = starts.shape[0], width - 1
    token = torch.arange(time, device=cu_seqlens.device)
    tap = torch.arange(width, device=cu_seqlens.device)[:, None]
    if count == 0:
        return (token + tap).new_full((1, width, time), time), token.new_zeros((0, kept))
    sequence = torch.searchsorted(ends, token, right=True).clamp(max=count - 1)

    def row(sequence: Tensor, offset: Tensor) -> Tensor:
        """Of the token `offset` after a sequence's start; below 0 it is in the state."""
        return torch.where(offset >= 0, count * kept + starts[sequence] + offset, sequence * kept + kept + offset)

    source = torch.where(token < ends[-1], row(sequence, token - starts[sequence] - kept + tap), count * kept + time)
    every = torch.arange(count, device=cu_seqlens.device)[:, None]
    return source[None], row(every, (ends - starts)[:, None] - kept + tap[:-1, 0])


def _read(rows: Tensor, source: Tensor) -> list[Tensor]:
    """For each tap [b, t, c]: the rows it reads, 0 where it is dead. Copying rows is faster than masking them."""
    batch, count, channels = rows.shape
    padded = torch.cat([rows.reshape(-1, channels), rows.new_zeros((1, channels))])
    offset = count * torch.arange(batch, device=rows.device)[:, None, None]
    index = torch.where(source == count, batch * count, source + offset)
    return [padded.index_select(0, at.flatten()).reshape(batch, -1, channels) for at in index.unbind(1)]


def _weighted(taps: list[Tensor], weight: Tensor) -> Tensor:
    y = taps[0] * weight[0]
    for tap, column in zip(taps[1:], weight[1:], strict=True):
        y = torch.addcmul(y, tap, column)
    return y


def _forward(rows: Tensor, weight: Tensor, source: Tensor) -> Tensor:
    return _weighted(_read(rows, source), weight.mT.contiguous())


def _backward(
    needs: tuple[bool, ...], arguments: tuple[Any, ...], outputs: tuple[Any, ...], grads: tuple[Any, ...]
) -> tuple[Tensor | None, ...]:
    rows, weight, source = arguments
    batch, width, time = source.shape
    token = torch.arange(time, device=rows.device).expand(batch, width, time)
    unread = token.new_full((batch, width, rows.shape[1] + 1), time)
    # A tap reads a row at one token at most, so its transpose is a read as well.
    d_taps = _read(grads[0], unread.scatter(2, source, token)[..., :-1])
    d_rows = _weighted(d_taps, weight.mT.contiguous()) if needs[0] else None
    d_weight = torch.stack([(rows * d_tap).sum((0, 1)) for d_tap in d_taps], dim=1) if needs[1] else None
    return d_rows, d_weight, None


_filtered = differentiable(_forward, _backward, save=(0, 1, 2), shared=(1,))
