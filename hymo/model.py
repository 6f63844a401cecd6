"""HyMo: three layers that remember for each one that attends, experts where it attends, and heads that look ahead."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hymo.backend import EAGER, Backend
from hymo.batch import document_position
from hymo.config import ModelConfig
from hymo.layers.embedding import embed as embed_tokens
from hymo.layers.embedding import unembed
from hymo.layers.feedforward import SwigluParams, swiglu
from hymo.layers.gdn import GdnParams, GdnState, gdn, gdn_spec, gdn_state
from hymo.layers.mla import MlaParams, MlaState, mla, mla_spec, mla_state
from hymo.layers.moe import Load, MoeParams, moe, moe_spec, parted
from hymo.layers.mtp import MtpParams, mtp_spec
from hymo.layers.norm import rms_norm
from hymo.layers.rope import Rotary, rotary
from hymo.params import constant, declare, embed, normal_fan_in, vector


class Block(NamedTuple):
    """One layer: a mixer over time, then a feed-forward over features, each behind a norm and beside a residual.

    A GDN block has a SwiGLU or `()`; an MLA block has a mixture of experts.
    """

    mixer_norm: Float[Tensor, " d"] = vector(constant(1.0))
    mixer: GdnParams | MlaParams | tuple[()] = ()
    ffn_norm: Float[Tensor, " d"] | tuple[()] = vector(constant(1.0))
    ffn: SwigluParams | MoeParams | tuple[()] = ()


class ModelParams(NamedTuple):
    """All parameters; `head` is `()` when the table is tied."""

    table: Float[Tensor, "u d"] = embed(inputs="d", init=normal_fan_in(0.3))
    blocks: tuple[Block, ...] = ()
    norm: Float[Tensor, " d"] = vector(constant(1.0))
    head: Float[Tensor, "u d"] | tuple[()] = embed(inputs="d", init=normal_fan_in(0.3))
    mtp: tuple[MtpParams, ...] = ()


class ModelState(NamedTuple):
    """What continues a sequence: a state per layer, and the position that the next token of each row has."""

    layers: tuple[GdnState | MlaState, ...]
    position: Int[Tensor, " b"]


class Trunk(NamedTuple):
    """What the stack of blocks gives: hidden states before the final norm, the next state, the experts' loads."""

    hidden: Float[Tensor, "b t d"]
    layers: tuple[GdnState | MlaState, ...]
    loads: tuple[Load, ...]


@functools.cache
def model_spec(cfg: ModelConfig) -> ModelParams:
    """The declaration of every parameter, as a tree of `ParamSpec`."""
    sizes = {"u": cfg.vocab_size, "d": cfg.dim}
    tied: dict[str, Any] = {"head": ()} if cfg.tie_embeddings else {}
    return declare(
        ModelParams,
        sizes,
        blocks=tuple(_block_spec(cfg, i) for i in range(cfg.n_layers)),
        mtp=tuple(mtp_spec(cfg) for _ in range(cfg.mtp_depth)),
        **tied,
    )


def _block_spec(cfg: ModelConfig, layer: int) -> Block:
    sizes = {"d": cfg.dim, "f": cfg.gdn_ffn_dim}
    if layer in cfg.mla_layers:
        return declare(Block, sizes, mixer=mla_spec(cfg), ffn=moe_spec(cfg))
    if cfg.gdn_ffn_dim:
        return declare(Block, sizes, mixer=gdn_spec(cfg), ffn=declare(SwigluParams, sizes, depth=cfg.n_layers))
    return declare(Block, sizes, mixer=gdn_spec(cfg), ffn_norm=(), ffn=())


def init_state(
    cfg: ModelConfig, batch: int, slots: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> ModelState:
    """The state before the first token of `batch` sequences.

    Args:
        slots: longest sequence that the attention caches can hold, in tokens; memories need none.
        dtype: of caches and convolution taps; memories are fp32.
    """
    on = torch.device(device)
    layers = tuple(
        mla_state(cfg, batch, slots, dtype=dtype, device=on)
        if layer in cfg.mla_layers
        else gdn_state(cfg, batch, dtype=dtype, device=on)
        for layer in range(cfg.n_layers)
    )
    return ModelState(layers, torch.zeros(batch, dtype=torch.int64, device=on))


def trunk(
    params: ModelParams,
    x: Float[Tensor, "b t {cfg.dim}"],
    *,
    cfg: ModelConfig,
    position: Int[Tensor, "b t"],
    backend: Backend = EAGER,
    state: ModelState | None = None,
    capacity: int | None = None,
) -> Trunk:
    """The residual stream through all blocks.

    Args:
        x: embeddings of the tokens.
        state: what came before; None starts a sequence and returns no layer states.
        capacity: tokens of a row that one expert serves; None serves all.
    """
    layers: list[GdnState | MlaState] = []
    loads: list[Load] = []
    # By whether a layer attends. Every layer computing them would spend more on angles than on what it rotates.
    angles = {
        attends: rotary(position, dims=dims, theta=cfg.rope_theta)
        for attends, dims in ((True, cfg.qk_rope_head_dim), (False, cfg.gdn_rope_dim))
    }
    if state is None:
        params = lent(params, model_spec(cfg), backend=backend)
    for i, stored in enumerate(params.blocks):
        attends = i in cfg.mla_layers
        layer = _layer(cfg, attends, backend, capacity)
        if state is None:
            layer = backend.region(layer)
        x, load, after = layer(stored, x, position, angles[attends], state.layers[i] if state else ())
        layers += [after] if after else []
        loads += [load] if load else []
    return Trunk(x, tuple(layers), tuple(loads))


@functools.cache
def _layer(cfg: ModelConfig, attends: bool, backend: Backend, capacity: int | None) -> Callable[..., Any]:
    """What all layers of a kind do: from stored parameters, the stream, positions, their angles and the state before or
    `()` to the stream, the experts' load or `()`, and the state after or `()`."""
    spec = next(each for i, each in enumerate(model_spec(cfg).blocks) if (i in cfg.mla_layers) == attends)
    mixer: Any = mla if attends else gdn

    def layer(
        stored: Block, x: Tensor, position: Tensor, angles: Rotary, before: Any
    ) -> tuple[Tensor, Load | tuple[()], Any]:
        p = backend.gather(stored, spec)
        normed = rms_norm(x, p.mixer_norm, eps=cfg.norm_eps)
        y, after = mixer(
            p.mixer, normed, cfg=cfg, position=position, angles=angles, backend=backend, state=before or None
        )
        x = x + y
        load: Load | tuple[()] = ()
        if isinstance(p.ffn, MoeParams):
            normed = rms_norm(x, p.ffn_norm, eps=cfg.norm_eps)
            y, load = moe(p.ffn, normed, cfg=cfg, backend=backend, capacity=capacity)
            x = x + y
        elif isinstance(p.ffn, SwigluParams):
            x = x + swiglu(p.ffn, rms_norm(x, p.ffn_norm, eps=cfg.norm_eps))
        return x, load, after or ()

    return layer


def lent(params: ModelParams, spec: ModelParams, *, backend: Backend) -> ModelParams:
    """Parameters as the blocks' regions are given them."""

    def lend(stored: Block, spec: Block) -> Block:
        if not isinstance(stored.ffn, MoeParams):
            return stored
        assert isinstance(spec.ffn, MoeParams)
        return stored._replace(ffn=stored.ffn._replace(routed=backend.lend(stored.ffn.routed, spec.ffn.routed)))

    return params._replace(blocks=tuple(map(lend, params.blocks, spec.blocks)))


def given_back(grads: ModelParams) -> ModelParams:
    """The gradient of what was lent as that of what is stored, of which it is made of views."""

    def give(block: Block) -> Block:
        return block._replace(ffn=parted(block.ffn)) if isinstance(block.ffn, MoeParams) else block

    return grads._replace(blocks=tuple(map(give, grads.blocks)))


def gather_ends(params: ModelParams, *, cfg: ModelConfig, backend: Backend) -> ModelParams:
    """Table, final norm, head and MTP heads as they are used; the blocks are left for `trunk` to gather one by one."""
    ends: ModelParams = backend.gather(params._replace(blocks=()), model_spec(cfg)._replace(blocks=()))
    return ends


def head_table(ends: ModelParams) -> Float[Tensor, "u d"]:
    """The output head: the embedding table when they are tied."""
    return ends.head if isinstance(ends.head, Tensor) else ends.table


def forward(
    params: ModelParams,
    tokens: Int[Tensor, "b t"],
    *,
    cfg: ModelConfig,
    backend: Backend = EAGER,
    state: ModelState | None = None,
) -> tuple[Float[Tensor, "b t {cfg.vocab_size}"], ModelState | None]:
    """Softcapped logits of the next token, in nats, and the state after the last one.

    Prefill and decoding are this function with a state from `init_state`; every token is served by all its experts.

    Args:
        tokens: ids below `cfg.vocab_size`; a delimiter starts a document, isolated from what stands before it.
        state: what came before; None starts a sequence and returns None.
    """
    hidden, after = hidden_states(params, tokens, cfg=cfg, backend=backend, state=state)
    ends = gather_ends(params, cfg=cfg, backend=backend)
    normed = rms_norm(hidden, ends.norm, eps=cfg.norm_eps)
    return unembed(normed, head_table(ends), cap=cfg.logit_softcap), after


def hidden_states(
    params: ModelParams,
    tokens: Int[Tensor, "b t"],
    *,
    cfg: ModelConfig,
    backend: Backend = EAGER,
    state: ModelState | None = None,
) -> tuple[Float[Tensor, "b t {cfg.dim}"], ModelState | None]:
    """`forward` without final norm and head."""
    position = document_position(tokens, state.position if state else None)
    ends = gather_ends(params, cfg=cfg, backend=backend)
    x = embed_tokens(ends.table, tokens)
    out = trunk(params, x, cfg=cfg, position=position, backend=backend, state=state)
    return out.hidden, ModelState(out.layers, position[:, -1] + 1) if state else None
