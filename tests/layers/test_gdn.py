"""Gated DeltaNet against its definition: one document, one head and one token at a time, in fp64."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hymo import tree
from hymo.batch import document_position
from hymo.config import ModelConfig
from hymo.layers.gdn import GdnParams, gdn, gdn_spec
from hymo.params import initialize
from tests.configs import tiny_config, windows

RULES = ["gated_delta", "delta", "gated_linear"]


def defined(p: GdnParams, x: Tensor, cfg: ModelConfig) -> Tensor:
    """The output for one document [t, d], written out."""
    heads, group = cfg.gdn_n_heads, cfg.gdn_n_heads // cfg.gdn_n_key_heads
    key, value, half = cfg.gdn_key_dim, cfg.gdn_value_dim, cfg.gdn_rope_dim // 2

    def convolved(y: Tensor, taps: Tensor) -> Tensor:
        width = taps.shape[1]
        return torch.stack(
            [
                F.silu(sum((taps[:, width - 1 - j] * y[t - j] for j in range(min(width, t + 1))), torch.zeros(())))
                for t in range(len(y))
            ]
        )

    def turned(y: Tensor, t: int) -> Tensor:
        angle = t * cfg.rope_theta ** (-torch.arange(half, dtype=torch.float64) / max(half, 1))
        a, b, rest = y[:half], y[half : 2 * half], y[2 * half :]
        y = torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest])
        return y / (y.square().sum() + 1e-6).sqrt()

    q, k, v = convolved(x @ p.q, p.q_conv), convolved(x @ p.k, p.k_conv), convolved(x @ p.v, p.v_conv)
    outputs = []
    for h in range(heads):
        g = slice(h // group * key, (h // group + 1) * key)
        own = slice(h * value, (h + 1) * value)
        memory, read = torch.zeros(key, value, dtype=torch.float64), []
        for t in range(len(x)):
            q_t, k_t, v_t = turned(q[t, g], t), turned(k[t, g], t), v[t, own]
            step = F.softplus(x[t] @ p.decay[:, h] + p.dt_bias[h]) if cfg.gdn_rule != "delta" else None
            if cfg.gdn_rule == "gated_linear":
                memory = (-p.A_log[h].exp() * step).exp()[:, None] * memory + torch.outer(k_t, v_t)
                o = q_t @ memory
            else:
                if step is not None:
                    memory = (-p.A_log[h, 0].exp() * step).exp() * memory
                beta = torch.sigmoid(x[t] @ p.write[:, h]) * (2 if cfg.gdn_allow_neg_eigval else 1)
                memory = memory + torch.outer(k_t, beta * (v_t - k_t @ memory))
                o = q_t @ memory / key**0.5
            read.append(o + p.skip[h] * v_t if cfg.gdn_value_skip else o)
        o = torch.stack(read)
        o = o / (o.square().mean(-1, keepdim=True) + cfg.norm_eps).sqrt() * p.norm
        outputs.append(o * F.silu(x @ p.output_gate[:, own]))
    return torch.cat(outputs, dim=-1) @ p.out


def by_documents(p: GdnParams, x: Tensor, position: Tensor, cfg: ModelConfig) -> Tensor:
    """`defined`, document by document."""
    rows = []
    for row, at in zip(x, position, strict=True):
        starts = [*(at == 0).nonzero().flatten().tolist(), len(at)]
        rows.append(torch.cat([defined(p, row[a:b], cfg) for a, b in pairwise(starts)]))
    return torch.stack(rows)


def case(seed: int, time: int, **model: Any) -> tuple[ModelConfig, GdnParams, Tensor, Tensor]:
    cfg = tiny_config(model=model).model
    position = document_position(windows(seed, 2, time, document=9))
    x = torch.randn(2, time, cfg.dim, generator=torch.Generator().manual_seed(seed))
    return cfg, initialize(gdn_spec(cfg), seed), x, position


@given(
    seed=st.integers(0, 2**31),
    time=st.integers(1, 40),
    rule=st.sampled_from(RULES),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    conv=st.sampled_from([1, 4]),
    rope=st.sampled_from([0.0, 0.25, 1.0]),
    skip=st.booleans(),
    negative=st.booleans(),
)
def test_the_layer_is_its_definition(
    seed: int, time: int, rule: str, heads: tuple[int, int], conv: int, rope: float, skip: bool, negative: bool
) -> None:
    cfg, p, x, position = case(
        seed,
        time,
        gdn_rule=rule,
        gdn_n_heads=heads[0],
        gdn_n_key_heads=heads[1],
        gdn_conv=conv,
        gdn_rope_fraction=rope,
        gdn_key_dim=8,
        gdn_value_dim=6,
        gdn_value_skip=skip,
        gdn_allow_neg_eigval=negative,
    )
    y, state = gdn(p, x, cfg=cfg, position=position)
    expected = by_documents(tree.map(Tensor.double, p), x.double(), position, cfg)
    assert state is None
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("rule", RULES)
def test_every_gradient_is_that_of_the_definition(rule: str) -> None:
    cfg, p, x, position = case(
        3, 17, gdn_rule=rule, gdn_value_skip=True, gdn_allow_neg_eigval=True, gdn_key_dim=8, gdn_n_heads=2
    )
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))

    def layer(p: GdnParams, x: Tensor) -> Tensor:
        return (gdn(p, x, cfg=cfg, position=position)[0] * weight).sum()

    def definition(p: GdnParams, x: Tensor) -> Tensor:
        return (by_documents(p, x, position, cfg) * weight.double()).sum()

    grads = torch.func.grad(layer, argnums=(0, 1))(p, x)
    expected = torch.func.grad(definition, argnums=(0, 1))(tree.map(Tensor.double, p), x.double())
    for name, found in tree.paths(grads).items():
        true = tree.paths(expected)[name]
        assert (found - true).norm() <= 1e-4 * true.norm(), name
        assert true.norm() > 0, name


def test_a_rule_has_the_weights_that_it_uses() -> None:
    holes = {
        rule: {
            name for name, leaf in gdn_spec(tiny_config(model={"gdn_rule": rule}).model)._asdict().items() if leaf == ()
        }
        for rule in RULES
    }
    assert holes == {
        "gated_delta": {"skip"},
        "delta": {"skip", "decay", "dt_bias", "A_log"},
        "gated_linear": {"skip", "write"},
    }


def test_decay_is_per_head_for_the_delta_rule_and_per_channel_for_the_linear_one() -> None:
    shapes = {r: gdn_spec(tiny_config(model={"gdn_rule": r}).model).A_log for r in ("gated_delta", "gated_linear")}
    assert shapes["gated_delta"].shape == (4, 1)  # type: ignore[union-attr]
    assert shapes["gated_linear"].shape == (4, 16)  # type: ignore[union-attr]


@pytest.mark.parametrize("rule", RULES)
def test_what_follows_changes_nothing_before(rule: str) -> None:
    cfg, p, x, position = case(5, 40, gdn_rule=rule)
    y, _ = gdn(p, x, cfg=cfg, position=position)
    for t in (1, 20, 39):
        changed, _ = gdn(p, torch.cat([x[:, :t], -x[:, t:]], dim=1), cfg=cfg, position=position)
        torch.testing.assert_close(changed[:, :t], y[:, :t], rtol=0, atol=1e-6)
