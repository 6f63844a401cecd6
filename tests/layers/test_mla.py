"""Multi-head latent attention against its definition: one document, one head and one query at a time, in fp64."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hymo import tree
from hymo.batch import document_position
from hymo.config import ModelConfig
from hymo.layers.mla import MlaParams, mla, mla_spec, mla_state
from hymo.params import initialize
from tests.configs import tiny_config, windows


def defined(p: MlaParams, x: Tensor, cfg: ModelConfig) -> Tensor:
    """The output for one document [t, d], written out."""
    nope, rope, value = cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
    half, group = rope // 2, cfg.n_heads // cfg.n_kv_groups

    def normed(y: Tensor, weight: Tensor) -> Tensor:
        return y / (y.square().mean(-1, keepdim=True) + cfg.norm_eps).sqrt() * weight

    def turned(y: Tensor, t: int) -> Tensor:
        angle = t * cfg.rope_theta ** (-torch.arange(half, dtype=torch.float64) / max(half, 1))
        a, b = y[:half], y[half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])

    queries, latent = normed(x @ p.q_down, p.q_norm) @ p.q_up, normed(x @ p.kv_down, p.kv_norm)
    outputs = []
    for h in range(cfg.n_heads):
        g = h // group
        q = queries[:, h * (nope + rope) : (h + 1) * (nope + rope)]
        k_nope = latent @ p.k_up[:, g * nope : (g + 1) * nope]
        v = latent @ p.v_up[:, g * value : (g + 1) * value]
        k = torch.stack([torch.cat([k_nope[t], turned(x[t] @ p.k_rope, t)]) for t in range(len(x))])
        read = []
        for t in range(len(x)):
            q_t = torch.cat([q[t, :nope], turned(q[t, nope:], t)])
            weight = (k[: t + 1] @ q_t / (nope + rope) ** 0.5).softmax(0)
            read.append(weight @ v[: t + 1])
        outputs.append(torch.stack(read))
    return torch.cat(outputs, dim=-1) @ p.out


def by_documents(p: MlaParams, x: Tensor, position: Tensor, cfg: ModelConfig) -> Tensor:
    """`defined`, document by document."""
    rows = []
    for row, at in zip(x, position, strict=True):
        starts = [*(at == 0).nonzero().flatten().tolist(), len(at)]
        rows.append(torch.cat([defined(p, row[a:b], cfg) for a, b in pairwise(starts)]))
    return torch.stack(rows)


@given(
    seed=st.integers(0, 2**31),
    time=st.integers(1, 30),
    heads=st.sampled_from([(1, 1), (4, 1), (4, 2), (6, 3), (4, 4)]),
    dims=st.sampled_from([(8, 4), (0, 8), (8, 0), (5, 2)]),
)
def test_both_forms_of_the_layer_are_its_definition(
    seed: int, time: int, heads: tuple[int, int], dims: tuple[int, int]
) -> None:
    cfg = tiny_config(
        model={
            "n_heads": heads[0],
            "n_kv_groups": heads[1],
            "qk_nope_head_dim": dims[0],
            "qk_rope_head_dim": dims[1],
            "v_head_dim": 6,
        }
    ).model
    p = initialize(mla_spec(cfg), seed)
    position = document_position(windows(seed, 2, time, document=9))
    x = 3 * torch.randn(2, time, cfg.dim, generator=torch.Generator().manual_seed(seed))
    expected = by_documents(tree.map(Tensor.double, p), x.double(), position, cfg)

    expanded, none = mla(p, x, cfg=cfg, position=position)
    assert none is None
    torch.testing.assert_close(expanded.double(), expected, rtol=1e-4, atol=1e-5)

    cache = mla_state(cfg, 2, time + 3, dtype=torch.float32, device=torch.device("cpu"))
    absorbed, cache = mla(p, x, cfg=cfg, position=position, state=cache)  # type: ignore[assignment]
    torch.testing.assert_close(absorbed.double(), expected, rtol=1e-4, atol=1e-5)
    assert cache.length == time


def test_every_gradient_is_that_of_the_definition() -> None:
    cfg = tiny_config().model
    p = initialize(mla_spec(cfg), 0)
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 15, cfg.dim, generator=draw), torch.randn(2, 15, cfg.dim, generator=draw)
    position = document_position(windows(1, 2, 15, document=6))

    def layer(p: MlaParams, x: Tensor) -> Tensor:
        return (mla(p, x, cfg=cfg, position=position)[0] * weight).sum()

    def definition(p: MlaParams, x: Tensor) -> Tensor:
        return (by_documents(p, x, position, cfg) * weight.double()).sum()

    grads = torch.func.grad(layer, argnums=(0, 1))(p, x)
    expected = torch.func.grad(definition, argnums=(0, 1))(tree.map(Tensor.double, p), x.double())
    for name, found in tree.paths(grads).items():
        true = tree.paths(expected)[name]
        assert (found - true).norm() <= 1e-4 * true.norm(), name
        assert true.norm() > 0, name


def test_a_group_of_query_heads_shares_one_key_and_value_head() -> None:
    """As many groups as heads, with the weights of shared ones copied, is the same function."""
    shared = tiny_config(model={"n_kv_groups": 2}).model
    own = tiny_config(model={"n_kv_groups": 4}).model
    p = initialize(mla_spec(shared), 0)

    def copied(weight: Tensor) -> Tensor:
        return weight.unflatten(1, (2, -1)).repeat_interleave(2, dim=1).flatten(1)

    x = torch.randn(1, 9, shared.dim, generator=torch.Generator().manual_seed(0))
    position = torch.arange(9)[None]
    expected, _ = mla(p._replace(k_up=copied(p.k_up), v_up=copied(p.v_up)), x, cfg=own, position=position)
    torch.testing.assert_close(mla(p, x, cfg=shared, position=position)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("t", [1, 10, 19])
def test_what_follows_changes_no_bit_before(t: int) -> None:
    cfg = tiny_config().model
    p = initialize(mla_spec(cfg), 0)
    x = torch.randn(2, 20, cfg.dim, generator=torch.Generator().manual_seed(0))
    position = document_position(windows(3, 2, 20, document=7))
    y, _ = mla(p, x, cfg=cfg, position=position)
    changed, _ = mla(p, torch.cat([x[:, :t], -x[:, t:]], dim=1), cfg=cfg, position=position)
    assert torch.equal(changed[:, :t], y[:, :t])
