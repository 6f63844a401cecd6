"""The gated delta rule under fla's names and argument order: one entry, three forms."""

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hymo_kernels.host.gated_delta_call import Options, Precision
from hymo_kernels.host.gated_delta_rule_chunked import chunked_delta
from hymo_kernels.host.gated_delta_rule_definition import definition, recurrent
from hymo_kernels.host.packed import Packing, pack, packing, unpack
from hymo_kernels.host.triton_gated_delta_rule import triton_gated_delta_rule, unavailable
from hymo_kernels.host.triton_recurrent_delta_rule import triton_recurrent_delta_rule
from hymo_kernels.host.triton_recurrent_delta_rule import unavailable as recurrent_unavailable

# Up to this many tokens a loop over tokens beats the chunked form.
SHORT = 8

Form = Literal["auto", "chunk", "recurrent", "definition"]
Rule = Callable[..., tuple[Tensor, Tensor]]


def gated_delta_rule(
    q: Float[Tensor, "b t h k"],
    k: Float[Tensor, "b t h k"],
    v: Float[Tensor, "b t hv v"],
    g: Float[Tensor, "b t hv"] | None,
    beta: Float[Tensor, "b t hv"],
    scale: float | None = None,
    initial_state: Float[Tensor, "n hv s1 s2"] | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
    cu_seqlens_cpu: Int[Tensor, " bounds"] | None = None,
    chunk_indices: Int[Tensor, "..."] | None = None,
    cp_context: object | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Float[Tensor, " hv"] | None = None,
    dt_bias: Float[Tensor, " hv"] | None = None,
    chunk_size: int | None = None,
    state_indices: Int[Tensor, " sequences"] | None = None,
    precision: Precision = "tf32x3",
    keep_states: bool = False,
    max_seqlen: int | None = None,
    backend: Literal["eager", "triton"] | None = None,
    form: Form = "auto",
    **legacy: Any,
) -> tuple[Float[Tensor, "b t hv v"], Float[Tensor, "n hv s1 s2"] | None]:
    """Read-outs and final state of the gated delta rule, per value head.

        S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - k_t^T exp(g_t) S_{t-1}))^T
        o_t = scale * S_t^T q_t

    Value head i reads key head `i // (hv / h)`. fp64 inputs compute in fp64, all others in fp32; o has v's dtype, the
    state stays fp32 (or fp64). Keys longer than 1 with beta near 2 make the state grow; normalise them.

    Args:
        g: natural log of the retention, <= 0; None is 0 everywhere. -inf is a hard reset: nothing before that token
            changes a bit of what follows, and dg is 0 there.
        beta: write strength in [0, 2]; above 1 the state may flip sign along k.
        scale: multiplies q; default `k ** -0.5`.
        initial_state: state before the first token of each sequence, [k, v], or [v, k] with `state_v_first`; None is 0.
        output_final_state: return the state after the last token as well, else None in its place.
        use_qk_l2norm_in_kernel: q and k are divided by `sqrt(sum of squares + 1e-6)` first.
        use_beta_sigmoid_in_kernel: beta is given as a logit; with `allow_neg_eigval` it becomes 2 sigmoid(beta).
        use_gate_in_kernel: g is given as a logit; the gate is `-exp(A_log) softplus(g + dt_bias)`.
        cu_seqlens: bounds of sequences packed in one batch row; empty ones are allowed, and rows from `cu_seqlens[-1]`
            on give 0 in o and in every gradient. On the CPU the sequences become a padded batch, and their longest
            length is read on the host unless `max_seqlen` is given.
        cu_seqlens_cpu, chunk_indices: accepted for call sites of fla; not needed.
        chunk_size: 16, 32 or 64, a hint for the chunked form.
        state_indices: which row of `initial_state`, then a pool of fp32 states, each sequence continues. That row
            becomes its final state, in place, and the pool is returned as the final state. No two sequences may share
            one. A negative index is padding: read-outs of 0, and no row changes. There is no gradient.
        precision: of fp32 products in the chunked kernels: "tf32x3", as three products of shorter numbers on the
            tensor cores, or "ieee", in fp32 without them. 16-bit numbers, whose products are exact anyway, ignore it,
            and so does what runs token by token or without kernels.
        keep_states: whether the chunked kernels leave their backward the state before every 64 tokens (32 of fp32
            numbers, 16 of heads up to 32 wide), k x v numbers of q's dtype a head, rather than let it compute them
            again: the same gradients in about an eighth less time. Plain PyTorch ignores it.
        backend: "triton", kernels for an NVIDIA GPU, of 16-bit and fp32 numbers and widths up to 256, even ones in
            chunks; or "eager", plain PyTorch for anything. None is "triton" where that is available, else "eager".
        form: "chunk" for training, "recurrent" for a few tokens, "definition" for proofs (slow, any order of
            derivative); "auto" is recurrent up to 8 tokens.

    Raises:
        ValueError: for shapes that do not fit, and for what is not available.

    Source: Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464; argument names of flash-linear-attention.
    """
    state_v_first = _check_legacy(legacy, state_v_first)
    _check_available(backend=backend, cp_context=cp_context, chunk_size=chunk_size, precision=precision)
    pooled = state_indices is not None
    check_shapes(
        q,
        k,
        v,
        g=g,
        beta=beta,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        v_first=state_v_first,
        state_indices=state_indices,
    )
    if pooled:
        _check_no_gradient(q, k, v, g, beta, A_log, dt_bias, initial_state)
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(
            "gated_delta_rule: allow_neg_eigval doubles the sigmoid of use_beta_sigmoid_in_kernel, which is False; "
            "pass 2 * beta instead"
        )
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    if use_gate_in_kernel and A_log is None:
        raise ValueError("gated_delta_rule: use_gate_in_kernel needs A_log, one number a value head; got None")
    if not use_gate_in_kernel:
        A_log, dt_bias = None, None
    elif g is None:
        g = torch.zeros_like(beta)
    options = Options(
        scale=scale,
        norm=use_qk_l2norm_in_kernel,
        gate=use_gate_in_kernel,
        sigmoid=use_beta_sigmoid_in_kernel,
        beta_max=2.0 if allow_neg_eigval else 1.0,
        keep_end=output_final_state or pooled,
        precision=precision,
        keep_states=keep_states,
    )
    weights = {"A_log": A_log, "dt_bias": dt_bias}
    start = initial_state.mT if initial_state is not None and state_v_first else initial_state
    is_recurrent = form == "recurrent" or (form == "auto" and q.shape[1] <= SHORT)
    # The chunked kernels have no pool.
    by_token = is_recurrent or pooled
    if _takes_triton(q, v, backend=backend, by_token=by_token):
        if by_token:
            o, end = triton_recurrent_delta_rule(
                q,
                k,
                v,
                g,
                beta,
                **weights,
                initial_state=start,
                state_indices=state_indices,
                cu_seqlens=cu_seqlens,
                options=options,
            )
        else:
            o, end = triton_gated_delta_rule(
                q, k, v, g, beta, **weights, initial_state=start, cu_seqlens=cu_seqlens, options=options
            )
    else:
        rule = _form(form, is_recurrent=is_recurrent, chunk_size=chunk_size)
        at = None if cu_seqlens is None else packing(cu_seqlens, q.shape[1], max_seqlen=max_seqlen)
        if state_indices is not None and start is not None:
            o = _in_pool(rule, q, k, v, g, beta, **weights, pool=start, index=state_indices, at=at, options=options)
            end = start
        else:
            o, end = _by_torch(rule, q, k, v, g, beta, **weights, start=start, at=at, options=options)
    return o, (end.mT if state_v_first else end) if output_final_state else None


def _named(name: str, form: Form, summary: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    rule = update_wrapper(partial(gated_delta_rule, form=form), gated_delta_rule)
    rule.__name__ = rule.__qualname__ = name
    rule.__doc__ = f"{summary} Arguments and results are those of `gated_delta_rule`."
    return rule


chunk_gated_delta_rule = _named("chunk_gated_delta_rule", "chunk", "The chunked form, for training.")
fused_recurrent_gated_delta_rule = _named("fused_recurrent_gated_delta_rule", "recurrent", "Token by token, to decode.")
naive_gated_delta_rule = _named("naive_gated_delta_rule", "definition", "The definition, for proofs.")
naive_recurrent_gated_delta_rule = naive_gated_delta_rule


def _form(form: Form, *, is_recurrent: bool, chunk_size: int | None) -> Rule:
    if form == "definition":
        return definition
    return recurrent if is_recurrent else partial(chunked_delta, chunk=chunk_size)


def _takes_triton(q: Tensor, v: Tensor, *, backend: str | None, by_token: bool) -> bool:
    """Whether Triton kernels compute this call; an error if they are asked for and cannot."""
    if backend == "eager":
        return False
    reason = recurrent_unavailable(q, v) if by_token else unavailable(q, v)
    if reason and backend == "triton":
        raise ValueError(f"gated_delta_rule: backend='triton' is not available, {reason}; use backend='eager' or None")
    return not reason


def _by_torch(
    rule: Rule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    start: Tensor | None,
    at: Packing | None,
    options: Options,
    silent: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Read-outs, 0 for `silent` sequences, and final states in plain PyTorch."""
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    out_dtype = v.dtype
    q, k, v, beta = q.to(exact), k.to(exact), v.to(exact), beta.to(exact)
    g = torch.zeros_like(beta) if g is None else g.to(exact)
    if at is not None:
        # First of all: rows of no sequence may be NaN, which no later operation may differentiate.
        q, k, v, g, beta = (unpack(x, at) for x in (q, k, v, g, beta))
    if options.norm:
        q, k = _l2_normalized(q), _l2_normalized(k)
    if options.sigmoid:
        beta = beta.sigmoid() * options.beta_max
    if A_log is not None:
        g = _gate(g if dt_bias is None else g + dt_bias.to(exact), A_log.to(exact))
    if at is not None:
        # The padding neither decays nor writes.
        g, beta = (torch.where(at.filled[..., None], x, 0) for x in (g, beta))
    q = q * options.scale
    state = q.new_zeros((q.shape[0], v.shape[2], k.shape[3], v.shape[3])) if start is None else start.to(exact)
    o = v
    if v.numel() > 0:
        o, state = rule(q, k, v, g=g, beta=beta, initial=state)
    if silent is not None:
        o = torch.where(silent[:, None, None, None], 0, o)
    return (o if at is None else pack(o, at)).to(out_dtype), state


def _in_pool(
    rule: Rule, *sequence: Any, pool: Tensor, index: Tensor, at: Packing | None, options: Options, **weights: Any
) -> Tensor:
    """Read-outs; the rows of `pool` that `index` names become the final states."""
    live = index >= 0
    start = torch.where(live[:, None, None, None], pool[index.clamp(min=0)], 0)
    o, end = _by_torch(rule, *sequence, **weights, start=start, at=at, options=options, silent=~live)
    pool[index[live]] = end[live].to(pool.dtype)
    return o


def _gate(step: Float[Tensor, "b t hv"], A_log: Float[Tensor, " hv"]) -> Float[Tensor, "b t hv"]:
    """`-exp(A_log) softplus(step)`; an infinite step is a reset, and gives A_log no gradient."""
    reset = step == torch.inf
    decay = -A_log.exp() * torch.nn.functional.softplus(torch.where(reset, 0, step))
    return torch.where(reset, -torch.inf, decay)


def _l2_normalized(x: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
    """x over its length; the constant inside the root (fla's) keeps the gradient finite at 0."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def check_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor | None,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    v_first: bool,
    state_indices: Tensor | None = None,
) -> None:
    """Raises ValueError, naming the shapes, unless the scan's arguments fit together."""
    got = f"(got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)})"
    if q.ndim != 4 or v.ndim != 4 or q.shape != k.shape or q.shape[:2] != v.shape[:2]:
        raise ValueError(f"gated_delta_rule: q and k must be [b, t, h, k] and v [b, t, hv, v] {got}")
    batch, _, heads, key = k.shape
    value_heads, value = v.shape[2:]
    if heads == 0 or value_heads % heads:
        raise ValueError(
            f"gated_delta_rule: {value_heads} value heads cannot share {heads} key heads; "
            f"value heads must be a multiple {got}"
        )
    for name, x in (("g", g), ("beta", beta)):
        if x is not None and x.shape != v.shape[:3]:
            raise ValueError(f"gated_delta_rule: {name} must be {list(v.shape[:3])}, as v has; got {list(x.shape)}")
    if cu_seqlens is not None and batch != 1:
        raise ValueError(f"gated_delta_rule: cu_seqlens packs its sequences in one batch row; got {batch} rows {got}")
    count = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if state_indices is not None:
        if state_indices.shape != (count,) or initial_state is None:
            raise ValueError(
                f"gated_delta_rule: state_indices must be [{count}], one a sequence, into initial_state; got "
                f"{list(state_indices.shape)} and initial_state {None if initial_state is None else 'given'}"
            )
        if initial_state.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                "gated_delta_rule: a pool of states must be float32 (rounded at every step, a state degenerates); "
                f"got {initial_state.dtype}"
            )
        count = initial_state.shape[0]
    wanted = [count, value_heads, *((value, key) if v_first else (key, value))]
    if initial_state is not None and list(initial_state.shape) != wanted:
        raise ValueError(f"gated_delta_rule: initial_state must be {wanted}; got {list(initial_state.shape)}")


def _check_no_gradient(*tensors: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise ValueError(
            "gated_delta_rule: state_indices updates the pool in place and has no gradient, which was asked for; "
            "use torch.no_grad(), or initial_state[state_indices] without state_indices"
        )


def _check_available(*, backend: str | None, cp_context: object | None, chunk_size: int | None, precision: str) -> None:
    if backend not in (None, "eager", "triton"):
        raise ValueError(f"gated_delta_rule: backend must be 'eager', 'triton' or None; got {backend!r}")
    if cp_context is not None:
        raise ValueError("gated_delta_rule: cp_context (context parallelism) is not available; pass None")
    if chunk_size not in (None, 16, 32, 64):
        raise ValueError(f"gated_delta_rule: chunk_size must be 16, 32, 64 or None; got {chunk_size}")
    if precision not in get_args(Precision):
        raise ValueError(f"gated_delta_rule: precision must be 'tf32x3' or 'ieee'; got {precision!r}")


def _check_legacy(legacy: dict[str, Any], state_v_first: bool) -> bool:
    """Whether the state is [v, k], after the keywords that fla still accepts or once had."""
    if legacy.pop("head_first", False):
        raise ValueError(
            "gated_delta_rule: head_first=True is not supported; pass [b, t, h, d], with time before heads"
        )
    state_v_first = bool(legacy.pop("transpose_state_layout", False)) or state_v_first
    unknown = [name for name, value in legacy.items() if value is not None]
    if unknown:
        raise ValueError(f"gated_delta_rule: unknown or unsupported arguments {unknown}")
    return state_v_first
