# mypy: allow-untyped-defs, allow-incomplete-defs
"""Norms in one launch, whatever is added before them or gates them.

A program norms a few rows. Those of a tensor [T, H, d] lie where the strides of T and H say.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.ops.norm import Norm
from bough.ops.triton.follow import following, pass_on, passing_on
from bough.ops.triton.spare import with_spare

TILE = 1024  # elements that a program works on, if its row is not longer


@triton.jit
def at(base, entry, outer, inner, column, heads: tl.constexpr):
    """Where the columns of entry (token · heads + head) lie."""
    return base + entry // heads * outer + entry % heads * inner + column


@triton.jit
def _normed(value, weight, eps, column, dtype: tl.constexpr, width: tl.constexpr, rounded: tl.constexpr):
    """In float32, but rounded where ops.Norm rounds; zero beyond the width."""
    value *= tl.rsqrt(tl.sum(value * value, 1) / width + eps)[:, None]
    if rounded:
        value = value.to(dtype).to(tl.float32)
    if weight is not None:
        value *= tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    return value


@triton.jit(do_not_specialize=["count"])
def _norm(
    x, gate, weight, out, eps, count, x_outer, x_inner, gate_outer, gate_inner,
    heads: tl.constexpr, width: tl.constexpr, block: tl.constexpr, each: tl.constexpr, rounded: tl.constexpr,
    follows: tl.constexpr,
):  # fmt: skip
    pass_on(follows)
    entry = (tl.program_id(0).to(tl.int64) * each + tl.arange(0, each))[:, None]
    column = tl.arange(0, block)[None, :]
    mask = (entry < count) & (column < width)
    dtype: tl.constexpr = x.dtype.element_ty
    value = tl.load(at(x, entry, x_outer, x_inner, column, heads), mask=mask, other=0.0).to(tl.float32)
    value = _normed(value, weight, eps, column, dtype, width, rounded)
    if gate is not None:
        opened = tl.load(at(gate, entry, gate_outer, gate_inner, column, heads), mask=mask, other=0.0).to(tl.float32)
        value = value.to(dtype).to(tl.float32) * opened * tl.sigmoid(opened)
    tl.store(out + entry * width + column, value, mask=mask)


@triton.jit
def _norm_after(
    x, y, weight, total, out, eps, x_stride, y_stride, width: tl.constexpr, block: tl.constexpr, rounded: tl.constexpr,
    follows: tl.constexpr,
):  # fmt: skip
    pass_on(follows)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, block)[None, :]
    mask = column < width
    dtype: tl.constexpr = x.dtype.element_ty
    value = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    value += tl.load(y + row * y_stride + column, mask=mask, other=0.0).to(tl.float32)
    value = value.to(dtype)  # what is measured is what the next layer finds
    tl.store(total + row * width + column, value, mask=mask)
    value = _normed(value.to(tl.float32), weight, eps, column, dtype, width, rounded)
    tl.store(out + row * width + column, value, mask=mask)


def as_heads(x: Tensor) -> Tensor:
    """x [..., d] as [T, H, d] with its last dimension dense; what has at most three, and is so, is not copied."""
    x = x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def warps(elements: int) -> int:
    """So many that each thread has 8 elements: of 2 bytes, one load."""
    return max(1, min(16, elements // 256))


def norm(x: Tensor, by: Norm) -> Tensor:
    """The twin of ops.Norm."""
    return _launch(x, None, by)


def norm_after(x: Tensor, y: Tensor, by: Norm) -> tuple[Tensor, Tensor]:
    """The twin of ops.Norm.after for x and y [T, d]."""
    assert x.stride(-1) == y.stride(-1) == 1
    total, out = (with_spare(x, x.shape) for _ in range(2))
    (rows, width), block = x.shape, triton.next_power_of_2(x.shape[-1])
    _norm_after[(rows,)](
        x, y, by.weight, total, out, by.eps, x.stride(0), y.stride(0),
        width=width, block=block, rounded=by.rounded, num_warps=warps(block), **following(x.device),
    )  # fmt: skip
    return total, out


def rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The twin of ops.rms_norm_gated."""
    return _launch(x, gate, Norm(weight, eps, rounded=True))


def _launch(x: Tensor, gate: Tensor | None, by: Norm) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    x, gate = as_heads(x), None if gate is None else as_heads(gate)
    (tokens, heads, width), block = x.shape, triton.next_power_of_2(x.shape[-1])
    each = max(1, TILE // block)
    _norm[(triton.cdiv(tokens * heads, each),)](
        x, gate, by.weight, out, by.eps, tokens * heads, *x.stride()[:2], *(x if gate is None else gate).stride()[:2],
        heads=heads, width=width, block=block, each=each, rounded=by.rounded, num_warps=warps(each * block),
        **passing_on(x.device, tokens),
    )  # fmt: skip
    return out
