"""The gated delta rule token by token: the definition, and the same loop over whole batches."""

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor


def delta_sequence(
    q: Float[Tensor, "t k"],
    k: Float[Tensor, "t k"],
    v: Float[Tensor, "t v"],
    *,
    g: Float[Tensor, " t"],
    beta: Float[Tensor, " t"],
    initial: Float[Tensor, "k v"],
) -> tuple[Float[Tensor, "t v"], Float[Tensor, "k v"]]:
    """The definition, for one head of one sequence.

    Decay; move what the state recalls for k towards v, by a share beta; read with q (already scaled). Any order of
    derivative, any dtype.
    """
    state, read = initial, []
    for q_t, k_t, v_t, g_t, beta_t in zip(*(x.unbind() for x in (q, k, v, g, beta)), strict=True):
        state = g_t.exp() * state
        state = state + torch.outer(k_t, beta_t * (v_t - k_t @ state))
        read.append(q_t @ state)
    return torch.stack(read), state


def definition(
    q: Float[Tensor, "b t h k"],
    k: Float[Tensor, "b t h k"],
    v: Float[Tensor, "b t hv v"],
    *,
    g: Float[Tensor, "b t hv"],
    beta: Float[Tensor, "b t hv"],
    initial: Float[Tensor, "b hv k v"],
) -> tuple[Float[Tensor, "b t hv v"], Float[Tensor, "b hv k v"]]:
    """`delta_sequence` lifted over the value heads of a key head, over key heads, over the batch."""
    heads = k.shape[2]

    def one(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        return delta_sequence(q, k, v, g=g, beta=beta, initial=initial)

    grouped = torch.func.vmap(one, in_dims=(None, None, 1, 1, 1, 0), out_dims=(1, 0))
    over_heads = torch.func.vmap(grouped, in_dims=(1, 1, 1, 1, 1, 0), out_dims=(1, 0))
    v, g, beta = (rearrange(x, "b t (h r) ... -> b t h r ...", h=heads) for x in (v, g, beta))
    o, state = torch.func.vmap(over_heads)(q, k, v, g, beta, rearrange(initial, "b (h r) ... -> b h r ...", h=heads))
    return o.flatten(2, 3), state.flatten(1, 2)


def recurrent(
    q: Float[Tensor, "b t h k"],
    k: Float[Tensor, "b t h k"],
    v: Float[Tensor, "b t hv v"],
    *,
    g: Float[Tensor, "b t hv"],
    beta: Float[Tensor, "b t hv"],
    initial: Float[Tensor, "b hv k v"],
) -> tuple[Float[Tensor, "b t hv v"], Float[Tensor, "b hv k v"]]:
    """The same recurrence token by token, all heads and sequences at once."""
    heads = k.shape[2]
    q, k = q[:, :, :, None, None], k[:, :, :, None, None]
    v, g, beta = (rearrange(x, "b t (h r) ... -> b t h r ...", h=heads) for x in (v, g, beta))
    tokens = zip(
        *(x.unbind(1) for x in (q, k, k.mT, v[..., None, :], g.exp()[..., None, None], beta[..., None, None])),
        strict=True,
    )
    state, read = rearrange(initial, "b (h r) ... -> b h r ...", h=heads), []
    for q_t, k_t, k_column, v_t, keep, beta_t in tokens:
        state = keep * state
        state = state + k_column * (beta_t * (v_t - k_t @ state))
        read.append(q_t @ state)
    return rearrange(torch.stack(read, 1), "b t h r 1 v -> b t (h r) v"), state.flatten(1, 2)
