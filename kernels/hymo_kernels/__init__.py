"""hymo's kernels: operations on sequences that a model is made of, each beside its definition."""

from hymo_kernels.host.causal_conv1d import causal_conv1d
from hymo_kernels.host.causal_conv1d_heads import causal_conv1d_heads
from hymo_kernels.host.cross_entropy import linear_cross_entropy
from hymo_kernels.host.document_attention import document_attention, naive_document_attention
from hymo_kernels.host.gated_delta_rule import (
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    gated_delta_rule,
    naive_gated_delta_rule,
    naive_recurrent_gated_delta_rule,
)
from hymo_kernels.host.gated_linear_scan import gated_linear_scan, naive_gated_linear_scan
from hymo_kernels.host.mixed_linear import mixed_linear
from hymo_kernels.host.rotation import rotated
from hymo_kernels.host.routed_swiglu import routed_swiglu
from hymo_kernels.host.symmetric_product import symmetric_polynomial, symmetric_product

__all__ = [
    "causal_conv1d",
    "causal_conv1d_heads",
    "chunk_gated_delta_rule",
    "document_attention",
    "fused_recurrent_gated_delta_rule",
    "gated_delta_rule",
    "gated_linear_scan",
    "linear_cross_entropy",
    "mixed_linear",
    "naive_document_attention",
    "naive_gated_delta_rule",
    "naive_gated_linear_scan",
    "naive_recurrent_gated_delta_rule",
    "rotated",
    "routed_swiglu",
    "symmetric_polynomial",
    "symmetric_product",
]
