"""The gated delta rule a chunk at a time, forward and backward, in plain torch: matrix products instead of a loop."""

from typing import Any, NamedTuple

import torch
from einops import rearrange, repeat
from jaxtyping import Float
from torch import Tensor

from hymo_kernels.host.prefix_states import prefix_states
from hymo_kernels.primitive import differentiable

# Tokens a chunk. Forward and backward at [8, 256, 2, K] on one core, K = V = 32, 64, 128: 10.5, 22, 75 ms in chunks of
# 32 and 13.5, 23, 60 ms in chunks of 64. Autograd's gradient in place of the one written out: 20, 43 ms.
SMALL_CHUNK, LARGE_CHUNK, LARGE_KEY = 32, 64, 128


def chunked_delta(
    q: Float[Tensor, "b t h k"],
    k: Float[Tensor, "b t h k"],
    v: Float[Tensor, "b t hv v"],
    *,
    g: Float[Tensor, "b t hv"],
    beta: Float[Tensor, "b t hv"],
    initial: Float[Tensor, "b hv k v"],
    chunk: int | None = None,
) -> tuple[Float[Tensor, "b t hv v"], Float[Tensor, "b hv k v"]]:
    """Read-outs and final state of the gated delta rule, `o_t = S_t^T q_t` (q is already scaled).

    With S the state that enters a chunk, G the running sum of g in it, Gamma_ij = exp(G_i - G_j) and gamma = exp(G):

        A  = (I + tril(beta K K^T * Gamma, -1))^-1
        V' = A (beta V) - A (beta gamma K) S
        O  = gamma Q S + tril(Q K^T * Gamma) V'
        S' = gamma_C S + (w K)^T V',  w_j = Gamma_Cj

    so a chunk acts on the state as an affine map, and `prefix_states` finds every S in log-depth, and every gradient of
    S from the transposed maps. The decay across a reset (g = -inf) is exactly 0, and no other sum contains it, so what
    precedes a reset changes no bit of what follows it. The gradient is written out (`_backward`); a second derivative
    raises, the definition has all of them.

    Source: Yang et al. 2024, arXiv:2412.06464.
    """
    if chunk is None:
        chunk = LARGE_CHUNK if k.shape[3] >= LARGE_KEY else SMALL_CHUNK
    o, final = _chunked(q, k, v, g, beta, initial, chunk)
    return o, final


class _Chunks(NamedTuple):
    """The arguments as one batch of chunks, [b * hv * chunks, chunk, *d]; q and k repeated for their value heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def _split(x: Tensor, chunk: int, repeats: int = 1) -> Tensor:
    """Heads outside, time in chunks; tokens added at the end are 0 (no write, no decay)."""
    short = -x.shape[1] % chunk
    if short:
        x = torch.nn.functional.pad(x, [0, 0] * (x.ndim - 2) + [0, short])
    return repeat(x, "b (n c) h ... -> (b h r n) c ...", c=chunk, r=repeats)


def _join(x: Tensor, like: Tensor) -> Tensor:
    """The transpose of `_split`: back to the shape of `like`, summed over repeats."""
    batch, time, heads = like.shape[:3]
    x = rearrange(x, "(b h r n) c ... -> r b (n c) h ...", b=batch, h=heads, n=-(-time // x.shape[1]))
    return (x[0] if x.shape[0] == 1 else x.sum(0))[:, :time]


def _rows(x: Tensor, count: int) -> Tensor:
    return x.reshape(count, -1, *x.shape[1:])


def _decays(g: Tensor) -> tuple[Tensor, Tensor]:
    """Gamma_ij = exp(g_{j+1} + .. + g_i) for j <= i, else 0, and gamma_i = exp(g_0 + .. + g_i).

    Each exponent adds up only the gates that it names, so a finite stand-in for -inf makes the decay across a reset
    exactly 0 and costs the other pairs nothing, where a difference of running sums would carry its rounding.
    """
    lower = torch.ones(g.shape[-1], g.shape[-1], dtype=g.dtype, device=g.device).tril()
    g = g.clamp(min=-1e30)
    # Row i holds the gates up to i; the product with a constant adds up those after j.
    between = (lower * g[:, None, :]) @ lower.tril(-1)
    return between.exp().tril(), g.cumsum(-1).exp()


def _gate_gradient(g: Tensor, *, between: Tensor, total: Tensor, to_end: Tensor, whole: Tensor) -> Tensor:
    """Gradient of the gates from those of the exponents they add up to; 0 at a reset.

    Gate l is in `between[i, j]` for j < l <= i, in `total[i]` for l <= i, in `to_end[j]` for j < l, and in `whole`.
    Pairs are added up directly: a row sum minus a column sum would cancel at strong decay.
    """
    lower = torch.ones(g.shape[-1], g.shape[-1], dtype=g.dtype, device=g.device).tril()
    after = lower.tril(-1).mT
    pairs = ((between @ after) * lower).sum(-2)
    return torch.where(g.isinf(), 0, pairs + total @ lower + to_end @ after + whole[:, None])


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor, chunk: int
) -> tuple[Tensor, ...]:
    batch, value_heads = v.shape[0], v.shape[2]
    group = value_heads // k.shape[2]
    x = _Chunks(*(_split(x, chunk, group) for x in (q, k)), *(_split(x, chunk) for x in (v, g, beta)))
    decay, gamma = _decays(x.g)
    overlap = (x.k @ x.k.mT) * decay
    pairs = (x.q @ x.k.mT) * decay
    # LAPACK's substitution is as fast as block doubling here, and one node; it reads only what is below the diagonal.
    inverse = torch.linalg.solve_triangular(
        overlap * x.beta[..., None],
        torch.eye(chunk, dtype=q.dtype, device=q.device).expand_as(overlap),
        upper=False,
        unitriangular=True,
    )
    erase = inverse @ (x.k * (x.beta * gamma)[..., None])
    write = inverse @ (x.v * x.beta[..., None])
    k_to_end = (x.k * decay[:, -1, :, None]).mT
    identity = torch.eye(k.shape[3], dtype=q.dtype, device=q.device)
    transition = torch.baddbmm(gamma[:, -1, None, None] * identity, k_to_end, erase, alpha=-1)
    rows = batch * value_heads
    states, final = prefix_states(_rows(transition, rows), _rows(k_to_end @ write, rows), initial=initial.flatten(0, 1))
    states = states.flatten(0, 1)
    new = torch.baddbmm(write, erase, states, alpha=-1)
    o = torch.baddbmm(pairs @ new, x.q * gamma[..., None], states)
    residuals = (decay, gamma, overlap, pairs, inverse, erase, new, states, transition)
    return (_join(o, v), *(_rows(x, batch) for x in (final, *residuals)))


def _backward(
    needs: tuple[bool, ...], arguments: tuple[Any, ...], outputs: tuple[Any, ...], grads: tuple[Any, ...]
) -> tuple[Tensor | None, ...]:
    q, k, v, g, beta, _, chunk = arguments
    batch, value_heads = v.shape[0], v.shape[2]
    group = value_heads // k.shape[2]
    x = _Chunks(*(_split(x, chunk, group) for x in (q, k)), *(_split(x, chunk) for x in (v, g, beta)))
    decay, gamma, overlap, pairs, inverse, erase, new, states, transition = (x.flatten(0, 1) for x in outputs[2:])
    rows = batch * value_heads
    d_o = _split(torch.zeros_like(v) if grads[0] is None else grads[0], chunk)
    d_final = torch.zeros_like(_rows(states, rows)[:, 0]) if grads[1] is None else grads[1].flatten(0, 1)
    to_end, gamma_column, beta_column = decay[:, -1, :, None], gamma[..., None], x.beta[..., None]

    d_new = pairs.mT @ d_o
    d_read = torch.baddbmm((x.q * gamma_column).mT @ d_o, erase.mT, d_new, alpha=-1)
    # The state's gradient runs through the transposed maps, last chunk first.
    d_after, d_initial = prefix_states(_rows(transition, rows).flip(1).mT, _rows(d_read, rows).flip(1), initial=d_final)
    d_after = d_after.flip(1).flatten(0, 1)
    d_new = torch.baddbmm(d_new, x.k * to_end, d_after)
    d_written = inverse.mT @ d_new
    d_pairs = d_o @ new.mT
    # The gradient of L = beta K K^T * Gamma is -tril(d_written V'^T, -1); the sign is taken where it is used.
    minus_d_l = (d_written @ new.mT).tril(-1)
    d_qk = d_pairs * decay
    minus_d_kk = minus_d_l * decay
    minus_d_kk_k = minus_d_kk @ x.k
    q_side = (d_o @ states.mT) * gamma_column
    k_side = (d_written @ states.mT) * gamma_column
    end_side = (new @ d_after.mT) * to_end
    d_q = torch.baddbmm(q_side, d_qk, x.k)
    d_k = torch.baddbmm(end_side, d_qk.mT, x.q)
    d_k = torch.baddbmm(d_k, minus_d_kk.mT, x.k * beta_column, alpha=-1)
    d_k = torch.addcmul(d_k, k_side + minus_d_kk_k, beta_column, value=-1)
    by_k = (x.k * k_side).sum(-1)
    d_beta = (d_written * x.v).sum(-1) - by_k - (x.k * minus_d_kk_k).sum(-1)
    d_g = _gate_gradient(
        x.g,
        between=torch.addcmul(d_pairs * pairs, minus_d_l * overlap, beta_column, value=-1),
        total=(x.q * q_side).sum(-1) - x.beta * by_k,
        to_end=(x.k * end_side).sum(-1),
        whole=gamma[:, -1] * (d_after * states).sum((-2, -1)),
    )
    return (
        _join(d_q, q),
        _join(d_k, k),
        _join(d_written * beta_column, v),
        _join(d_g, g),
        _join(d_beta, beta),
        _rows(d_initial, batch),
        None,
    )


_chunked = differentiable(_forward, _backward, save=(0, 1, 2, 3, 4, *range(9, 18)), residuals=9)
