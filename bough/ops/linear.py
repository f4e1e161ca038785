"""Matrix products. One row is special on CPUs: it is a matter of reading the weights once, as fast as memory gives."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

onednn: Any = torch.backends.mkldnn


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, in] · weightᵀ [in, out] + bias."""
    if x.dtype == torch.bfloat16 and len(x) == 1 and x.device.type == "cpu" and onednn.enabled:
        # torch's own bfloat16 matrix-vector product reads at twice the rate of the library it would hand this to.
        onednn.enabled = False
        try:
            return F.linear(x, weight, bias)
        finally:
            onednn.enabled = True
    return F.linear(x, weight, bias)


def arranged(weight: Tensor) -> Tensor:
    """The weight [out, in], laid out in memory as `linear` of one row reads it fastest.

    On CPUs, float32 products with more outputs than inputs read a transposed weight at up to twice the rate; those of
    many rows do not mind.
    """
    out, inputs = weight.shape
    if weight.dtype == torch.float32 and weight.device.type == "cpu" and out > inputs:
        return weight.T.contiguous().T
    return weight
