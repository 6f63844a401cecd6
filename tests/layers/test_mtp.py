"""A head that looks further ahead, against its formula."""

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hymo import tree
from hymo.layers.mtp import MtpParams, mtp, mtp_spec
from hymo.params import initialize
from tests.configs import tiny_config


@given(st.integers(0, 2**31))
def test_a_depth_is_its_formula_with_its_gradients(seed: int) -> None:
    cfg = tiny_config(model={"dim": 8, "mtp_inter_dim": 12}).model
    draw = torch.Generator().manual_seed(seed)
    p = initialize(mtp_spec(cfg), seed)
    p = p._replace(**{name: torch.randn(8, generator=draw) for name in ("hidden_norm", "embed_norm", "ffn_norm")})
    hidden, ahead, weight = torch.randn(3, 2, 4, 8, generator=draw)

    def formula(p: MtpParams, hidden: Tensor, ahead: Tensor) -> Tensor:
        def normed(x: Tensor, weight: Tensor) -> Tensor:
            return x / (x.square().mean(-1, keepdim=True) + cfg.norm_eps).sqrt() * weight

        merged = normed(hidden, p.hidden_norm) @ p.merge[:8] + normed(ahead, p.embed_norm) @ p.merge[8:]
        inner = normed(merged, p.ffn_norm)
        return merged + (F.silu(inner @ p.ffn.gate) * (inner @ p.ffn.up)) @ p.ffn.down

    wide = tree.map(Tensor.double, (p, hidden, ahead))
    torch.testing.assert_close(mtp(p, hidden, ahead, cfg=cfg).double(), formula(*wide), rtol=1e-4, atol=1e-5)
    grads = torch.func.grad(lambda *xs: (mtp(*xs, cfg=cfg) * weight).sum(), argnums=(0, 1, 2))(p, hidden, ahead)
    expected = torch.func.grad(lambda *xs: (formula(*xs) * weight).sum(), argnums=(0, 1, 2))(*wide)
    for name, found in tree.paths(grads).items():
        true = tree.paths(expected)[name]
        assert (found - true).norm() <= 1e-4 * true.norm(), name
