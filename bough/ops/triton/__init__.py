"""Twins of the reference ops for CUDA devices, in Triton: the same functions of the same layouts.

Nothing outside this package imports triton. What a twin does not do (masks, long rows of attention) it says, and its
reference does it. Without a GPU the kernels run in Triton's interpreter, if TRITON_INTERPRET=1 is set before import.
"""

from bough.ops.triton.attention import attention
from bough.ops.triton.conv import causal_conv
from bough.ops.triton.delta import DeltaLayer, gated_delta, gated_delta_layer
from bough.ops.triton.norm import rms_norm_gated
from bough.ops.triton.quant import expanded, quantised_product

__all__ = [
    "DeltaLayer",
    "attention",
    "causal_conv",
    "expanded",
    "gated_delta",
    "gated_delta_layer",
    "quantised_product",
    "rms_norm_gated",
]
