"""The gated linear recurrence (no erase term): its entry, its definition and its chunked form."""

from typing import Any, Literal

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from hymo_kernels.host.gate_sums import gate_sums
from hymo_kernels.host.packed import pack, packing, unpack
from hymo_kernels.host.prefix_states import prefix_states
from hymo_kernels.host.triton_gated_linear_scan import triton_gated_linear_scan, unavailable

# The decay between two tokens is a number per channel, so pairs cost chunk * s each token: short chunks are best.
CHUNK = 16


def gated_linear_scan(
    v: Float[Tensor, "b t h v"],
    b: Float[Tensor, "b t h s"],
    c: Float[Tensor, "b t h s"],
    g: Float[Tensor, "b t h"],
    A_log: Float[Tensor, "h s"],
    initial_state: Float[Tensor, "n h s v"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
    *,
    max_seqlen: int | None = None,
    backend: Literal["eager", "triton"] | None = None,
) -> tuple[Float[Tensor, "b t h v"], Float[Tensor, "n h s v"] | None]:
    """Read-outs and final state of a diagonal recurrence, in chunks.

        h_t = exp(g_t A) * h_{t-1} + b_t v_t^T,   o_t = c_t h_t,   A = -exp(A_log)

    fp64 inputs compute in fp64, all others in fp32; o has v's dtype, the state stays fp32 (or fp64).

    Args:
        g: step size per head, >= 0; the decay of channel s is `exp(-g exp(A_log_s))`. +inf is a hard reset: nothing
            before that token changes a bit of what follows, and its gradients to g and A_log are 0.
        A_log: natural log of the decay rate of each channel.
        initial_state: state before the first token of each sequence; None is 0.
        output_final_state: return the state after the last token as well, else None in its place.
        cu_seqlens, max_seqlen: packed sequences, as in `gated_delta_rule`.
        backend: "triton" (an NVIDIA GPU; even state and value widths up to 256; v, b and c all bf16, all fp16 or all
            fp32), or "eager", plain PyTorch for anything; None is "triton" where that is available, else "eager". The
            kernels take operands of products in the dtype of v and add up in fp32.

    Raises:
        ValueError: for shapes that do not fit, and for what is not available.
    """
    if backend not in (None, "eager", "triton"):
        raise ValueError(f"gated_linear_scan: backend must be 'eager', 'triton' or None; got {backend!r}")
    check_shapes(v, b, c, g=g, A_log=A_log, initial_state=initial_state, cu_seqlens=cu_seqlens)
    reason = unavailable(v, b, c)
    if reason and backend == "triton":
        raise ValueError(f"gated_linear_scan: backend='triton' is not available, {reason}; use backend='eager' or None")
    if not reason and backend != "eager":
        o, end = triton_gated_linear_scan(
            v, b, c, g, A_log, initial_state=initial_state, cu_seqlens=cu_seqlens, keep_end=output_final_state
        )
        return o, end if output_final_state else None
    return _scan(chunked_linear, v, b, c, g, A_log, initial_state, output_final_state, cu_seqlens, max_seqlen)


def naive_gated_linear_scan(
    v: Float[Tensor, "b t h v"],
    b: Float[Tensor, "b t h s"],
    c: Float[Tensor, "b t h s"],
    g: Float[Tensor, "b t h"],
    A_log: Float[Tensor, "h s"],
    initial_state: Float[Tensor, "n h s v"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
    *,
    max_seqlen: int | None = None,
) -> tuple[Float[Tensor, "b t h v"], Float[Tensor, "n h s v"] | None]:
    """The definition of `gated_linear_scan`, token by token: for proofs and for decoding."""
    return _scan(linear_definition, v, b, c, g, A_log, initial_state, output_final_state, cu_seqlens, max_seqlen)


def linear_sequence(
    v: Float[Tensor, "t v"],
    b: Float[Tensor, "t s"],
    c: Float[Tensor, "t s"],
    *,
    g: Float[Tensor, " t"],
    rate: Float[Tensor, " s"],
    initial: Float[Tensor, "s v"],
) -> tuple[Float[Tensor, "t v"], Float[Tensor, "s v"]]:
    """The definition, one head of one sequence: decay each channel, add, read."""
    state, read = initial, []
    for v_t, b_t, c_t, g_t in zip(*(x.unbind() for x in (v, b, c, g)), strict=True):
        reset = g_t.isinf()
        decay = torch.where(reset, 0, (torch.where(reset, 0, g_t) * rate).exp())
        state = decay[:, None] * state + torch.outer(b_t, v_t)
        read.append(c_t @ state)
    return torch.stack(read), state


def linear_definition(
    v: Float[Tensor, "b t h v"],
    b: Float[Tensor, "b t h s"],
    c: Float[Tensor, "b t h s"],
    *,
    g: Float[Tensor, "b t h"],
    rate: Float[Tensor, "h s"],
    initial: Float[Tensor, "b h s v"],
) -> tuple[Float[Tensor, "b t h v"], Float[Tensor, "b h s v"]]:
    """`linear_sequence` lifted over heads and over the batch."""

    def one(v: Tensor, b: Tensor, c: Tensor, g: Tensor, rate: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        return linear_sequence(v, b, c, g=g, rate=rate, initial=initial)

    heads = torch.func.vmap(one, in_dims=(1, 1, 1, 1, 0, 0), out_dims=(1, 0))
    o, state = torch.func.vmap(heads, in_dims=(0, 0, 0, 0, None, 0))(v, b, c, g, rate, initial)
    return o, state


def chunked_linear(
    v: Float[Tensor, "b t h v"],
    b: Float[Tensor, "b t h s"],
    c: Float[Tensor, "b t h s"],
    *,
    g: Float[Tensor, "b t h"],
    rate: Float[Tensor, "h s"],
    initial: Float[Tensor, "b h s v"],
) -> tuple[Float[Tensor, "b t h v"], Float[Tensor, "b h s v"]]:
    """The same recurrence a chunk at a time: pairs of tokens inside it, one decayed state into and out of it."""
    batch, time, heads, _ = v.shape

    def split(x: Tensor) -> Tensor:
        """[b, t, h, *d] to [b, h, chunks, chunk, *d]; added tokens write nothing and have g = 0."""
        x = torch.nn.functional.pad(x, [0, 0] * (x.ndim - 2) + [0, -time % CHUNK])
        return rearrange(x, "b (n c) h ... -> b h n c ...", c=CHUNK)

    v, b, c, g = split(v), split(b), split(c), split(g)
    sums = gate_sums(g)
    rate = rate[:, None, None, :]
    # Every exponent is <= 0, so the masks can follow the exponentials.
    decay = torch.where(sums.linked[..., None], (sums.between[..., None] * rate[..., None, :]).exp(), 0)
    from_start = torch.where(sums.open[..., None], (sums.total[..., None] * rate).exp(), 0)
    pairs = (decay * b[..., None, :, :] @ c[..., None]).squeeze(-1)
    write = (b * decay[..., -1, :, :]).mT @ v
    states, final = prefix_states(
        from_start[..., -1, :, None].flatten(0, 1), write.flatten(0, 1), initial=initial.flatten(0, 1), act=torch.mul
    )
    o = (c * from_start) @ states.reshape(batch, heads, *states.shape[1:]) + pairs @ v
    return rearrange(o, "b h n c v -> b (n c) h v")[:, :time], final.reshape(initial.shape)


def check_shapes(
    v: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    g: Tensor,
    A_log: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Raises ValueError, naming the shapes, unless the scan's arguments fit together."""
    count = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state_shape = (count, v.shape[2], b.shape[3], v.shape[3])
    if b.shape != c.shape or b.shape[:3] != v.shape[:3] or g.shape != v.shape[:3] or A_log.shape != b.shape[2:]:
        raise ValueError(
            "gated_linear_scan: b and c must be [b, t, h, s] with v [b, t, h, v], g [b, t, h], A_log [h, s]; got "
            f"b {list(b.shape)}, c {list(c.shape)}, v {list(v.shape)}, g {list(g.shape)}, A_log {list(A_log.shape)}"
        )
    if cu_seqlens is not None and v.shape[0] != 1:
        raise ValueError(f"gated_linear_scan: cu_seqlens packs its sequences in one batch row; got {v.shape[0]} rows")
    if initial_state is not None and initial_state.shape != state_shape:
        raise ValueError(
            f"gated_linear_scan: initial_state must be {list(state_shape)}; got {list(initial_state.shape)}"
        )


def _scan(
    form: Any,
    v: Tensor,
    b: Tensor,
    c: Tensor,
    g: Tensor,
    A_log: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> tuple[Tensor, Tensor | None]:
    check_shapes(v, b, c, g=g, A_log=A_log, initial_state=initial_state, cu_seqlens=cu_seqlens)
    out_dtype = v.dtype
    exact = torch.float64 if v.dtype == torch.float64 else torch.float32
    v, b, c, g, rate = v.to(exact), b.to(exact), c.to(exact), g.to(exact), -A_log.to(exact).exp()
    at = None if cu_seqlens is None else packing(cu_seqlens, v.shape[1], max_seqlen=max_seqlen)
    if at is not None:
        v, b, c, g = unpack(v, at), unpack(b, at), unpack(c, at), unpack(g, at)
    state_shape = (v.shape[0], v.shape[2], b.shape[3], v.shape[3])
    state = v.new_zeros(state_shape) if initial_state is None else initial_state.to(exact)
    o = v
    if v.shape[1]:
        o, state = form(v, b, c, g=g, rate=rate, initial=state)
    o = (o if at is None else pack(o, at)).to(out_dtype)
    return o, state if output_final_state else None
