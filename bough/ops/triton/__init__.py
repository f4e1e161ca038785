"""Twins of the reference ops for CUDA devices, in Triton: the same functions of the same layouts.

Nothing outside this package imports triton. What a twin does not do (masks, other activations) its reference does.
Without a GPU the kernels run in Triton's interpreter, if TRITON_INTERPRET=1 is set before import.
"""

from bough.ops.triton.activation import ACTIVATIONS, gated
from bough.ops.triton.attention import attention
from bough.ops.triton.conv import carry, causal_conv
from bough.ops.triton.delta import gated_delta, gated_delta_layer
from bough.ops.triton.embedding import embedding
from bough.ops.triton.experts import experts
from bough.ops.triton.gates import delta_gates
from bough.ops.triton.heads import place_heads, rotations
from bough.ops.triton.largest import largest
from bough.ops.triton.linear import few, few_rows, gated_rows, product_normed, projected_rows
from bough.ops.triton.norm import norm, norm_after, rms_norm_gated
from bough.ops.triton.quant import expanded
from bough.ops.triton.replay import replay_conv, replay_delta
from bough.ops.triton.rounds import go_on, standing
from bough.ops.triton.spare import product
from bough.ops.triton.wide import wide

__all__ = [
    "ACTIVATIONS",
    "attention",
    "carry",
    "causal_conv",
    "delta_gates",
    "embedding",
    "expanded",
    "experts",
    "few",
    "few_rows",
    "gated",
    "gated_delta",
    "gated_delta_layer",
    "gated_rows",
    "go_on",
    "largest",
    "norm",
    "norm_after",
    "place_heads",
    "product",
    "product_normed",
    "projected_rows",
    "replay_conv",
    "replay_delta",
    "rms_norm_gated",
    "rotations",
    "standing",
    "wide",
]
