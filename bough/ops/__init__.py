"""The operations models are written in, each with a readable torch form.

Every op that uses state takes it stored (Pages, Slots) or as explicit tensors, never both.
"""

from bough.ops.attention import Mask, attention, write_pages
from bough.ops.conv import carry, causal_conv, replay_conv
from bough.ops.delta import delta_gates, gated_delta, replay_delta
from bough.ops.linear import Parts, Weight, arranged, fused, linear
from bough.ops.norm import rms_norm, rms_norm_gated, rms_norm_scaled
from bough.ops.quant import Quantised
from bough.ops.ragged import Pages, Rows, Slots
from bough.ops.rope import inverse_frequencies, rotate, rotations

__all__ = [
    "Mask",
    "Pages",
    "Parts",
    "Quantised",
    "Rows",
    "Slots",
    "Weight",
    "arranged",
    "attention",
    "carry",
    "causal_conv",
    "delta_gates",
    "fused",
    "gated_delta",
    "inverse_frequencies",
    "linear",
    "replay_conv",
    "replay_delta",
    "rms_norm",
    "rms_norm_gated",
    "rms_norm_scaled",
    "rotate",
    "rotations",
    "write_pages",
]
