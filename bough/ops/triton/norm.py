# mypy: allow-untyped-defs, allow-incomplete-defs
"""The gated norm after the delta rule."""

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 4  # that a program norms


@triton.jit
def _norm_gated(
    x, gate, weight, out, eps, count, gate_stride, heads: tl.constexpr, width: tl.constexpr, block: tl.constexpr,
    each: tl.constexpr,
):  # fmt: skip
    entry = (tl.program_id(0).to(tl.int64) * each + tl.arange(0, each))[:, None]
    column = tl.arange(0, block)[None, :]
    dtype = x.dtype.element_ty
    mask = (entry < count) & (column < width)
    value = tl.load(x + entry * width + column, mask=mask, other=0.0).to(tl.float32)
    at = entry // heads * gate_stride + entry % heads * width + column
    opened = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    # Rounded where ops.rms_norm_gated rounds.
    value = (value * tl.rsqrt(tl.sum(value * value, 1) / width + eps)[:, None]).to(dtype).to(tl.float32)
    value = (value * scale).to(dtype).to(tl.float32) * opened * tl.sigmoid(opened)
    tl.store(out + entry * width + column, value, mask=mask)


def rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The twin of ops.rms_norm_gated for x and gate [T, H, d]."""
    (total, heads, width), out = x.shape, torch.empty_like(x)
    assert x.is_contiguous() and gate.stride()[1:] == (width, 1)
    _norm_gated[(triton.cdiv(total * heads, HEADS),)](
        x, gate, weight, out, eps, total * heads, gate.stride(0),
        heads=heads, width=width, block=triton.next_power_of_2(width), each=HEADS, num_warps=HEADS,
    )  # fmt: skip
    return out
