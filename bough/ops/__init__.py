"""The operations models are written in, each with a readable torch form.

Every op that uses state takes it stored (Pages, Slots) or as explicit tensors, never both.
"""

from bough.ops.activation import Activation, gated, gelu_tanh
from bough.ops.attention import Mask, attention, write_pages
from bough.ops.conv import carry, causal_conv, projected_conv, replay_conv
from bough.ops.deferred import Addend, Input, made
from bough.ops.delta import DeltaLayer, delta_gates, gated_delta, gated_delta_layer, replay_delta
from bough.ops.embedding import embedding
from bough.ops.experts import Matrices, experts, matrices
from bough.ops.heads import place_heads
from bough.ops.largest import largest
from bough.ops.linear import Parts, Weight, arranged, fused, gated_linear, later, linear
from bough.ops.norm import Norm, rms_norm, rms_norm_gated, rms_norm_scaled
from bough.ops.quant import Quantised
from bough.ops.ragged import Pages, Rows, Slots
from bough.ops.rope import inverse_frequencies, rotate, rotations
from bough.ops.rounds import standing

__all__ = [
    "Activation",
    "Addend",
    "DeltaLayer",
    "Input",
    "Mask",
    "Matrices",
    "Norm",
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
    "embedding",
    "experts",
    "fused",
    "gated",
    "gated_delta",
    "gated_delta_layer",
    "gated_linear",
    "gelu_tanh",
    "inverse_frequencies",
    "largest",
    "later",
    "linear",
    "made",
    "matrices",
    "place_heads",
    "projected_conv",
    "replay_conv",
    "replay_delta",
    "rms_norm",
    "rms_norm_gated",
    "rms_norm_scaled",
    "rotate",
    "rotations",
    "standing",
    "write_pages",
]
