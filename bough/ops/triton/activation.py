# mypy: allow-untyped-defs, allow-incomplete-defs
"""What activations gate, in one launch."""

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from bough.ops.activation import Activation, gelu_tanh
from bough.ops.triton.norm import TILE, as_heads, at, warps

ACTIVATIONS: dict[Activation, str] = {F.silu: "silu", gelu_tanh: "gelu_tanh", torch.sigmoid: "sigmoid"}
LOG2E = tl.constexpr(math.log2(math.e))
STEEPNESS = tl.constexpr(2 * math.sqrt(2 / math.pi))


@triton.jit
def activated(x, activation: tl.constexpr):
    if activation == "sigmoid":
        return tl.sigmoid(x)
    if activation == "silu":
        return x * tl.sigmoid(x)
    return x * tl.sigmoid(STEEPNESS * (x + 0.044715 * x * x * x))  # since 1 + tanh u is 2 sigmoid 2u


@triton.jit(do_not_specialize=["count"])
def _gated(
    gate, value, out, count, gate_outer, gate_inner, value_outer, value_inner,
    heads: tl.constexpr, width: tl.constexpr, block: tl.constexpr, each: tl.constexpr, activation: tl.constexpr,
):  # fmt: skip
    entry = (tl.program_id(0).to(tl.int64) * each + tl.arange(0, each))[:, None]
    column = (tl.program_id(1) * block + tl.arange(0, block))[None, :]
    mask = (entry < count) & (column < width)
    opened = tl.load(at(gate, entry, gate_outer, gate_inner, column, heads), mask=mask, other=0.0)
    passed = tl.load(at(value, entry, value_outer, value_inner, column, heads), mask=mask, other=0.0)
    opened = activated(opened.to(tl.float32), activation).to(gate.dtype.element_ty)  # rounded as ops.gated does
    tl.store(out + entry * width + column, opened.to(tl.float32) * passed.to(tl.float32), mask=mask)


def gated(gate: Tensor, value: Tensor, activation: Activation) -> Tensor:
    """The twin of ops.gated for the ACTIVATIONS."""
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    gate, value = as_heads(gate), as_heads(value)
    tokens, heads, width = gate.shape
    block = min(TILE, triton.next_power_of_2(width))
    each = TILE // block
    _gated[(triton.cdiv(tokens * heads, each), triton.cdiv(width, block))](
        gate, value, out, tokens * heads, *gate.stride()[:2], *value.stride()[:2],
        heads=heads, width=width, block=block, each=each, activation=ACTIVATIONS[activation], num_warps=warps(TILE),
    )  # fmt: skip
    return out
