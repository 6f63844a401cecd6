"""The layers: each file declares its weights, its state and its equation."""

from hymo.layers.embedding import embed, softcap, unembed
from hymo.layers.feedforward import SwigluParams, swiglu
from hymo.layers.gdn import GdnParams, GdnState, gdn
from hymo.layers.mla import MlaParams, MlaState, mla
from hymo.layers.moe import Load, MoeParams, moe, rebalance, route
from hymo.layers.mtp import MtpParams, mtp
from hymo.layers.norm import gated_rms_norm, rms_norm
from hymo.layers.rope import rotate

__all__ = [
    "GdnParams",
    "GdnState",
    "Load",
    "MlaParams",
    "MlaState",
    "MoeParams",
    "MtpParams",
    "SwigluParams",
    "embed",
    "gated_rms_norm",
    "gdn",
    "mla",
    "moe",
    "mtp",
    "rebalance",
    "rms_norm",
    "rotate",
    "route",
    "softcap",
    "swiglu",
    "unembed",
]
