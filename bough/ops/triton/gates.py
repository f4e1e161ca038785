# mypy: allow-untyped-defs, allow-incomplete-defs
"""What the gated delta rule makes of single tokens: their gates, and unit lengths of their keys and queries."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.ops.triton.chunks import EPS

GATES = 1024  # that a program makes


@triton.jit
def length_of(x):
    """What brings a vector to unit length; or to less, if it is near 0."""
    return tl.rsqrt(tl.sum(x * x, 0) + EPS)


@triton.jit
def gates_of(a, b, rate, dt_bias):
    """The log decay and the step size of one token and head: as ops.delta_gates rounds them."""
    x = a.to(tl.float32) + dt_bias
    grown = tl.exp(x)
    more = 1 + grown
    # log(1 + e^x). What e^x lost when 1 was added is made up for: a weak decay counts over thousands of tokens.
    soft = tl.where(more == 1, grown, tl.log(more) * (grown / (more - 1)))
    return rate * tl.where(x > 20, x, soft), tl.sigmoid(b.to(tl.float32)).to(b.dtype).to(tl.float32)


@triton.jit(do_not_specialize=["count"])
def _all_gates(a, b, g, beta, rate, dt_bias, count, a_stride, b_stride, heads: tl.constexpr, block: tl.constexpr):
    entry = tl.program_id(0) * block + tl.arange(0, block)
    token, head, inside = (entry // heads).to(tl.int64), entry % heads, entry < count
    of_a = tl.load(a + token * a_stride + head, mask=inside, other=0.0)
    of_b = tl.load(b + token * b_stride + head, mask=inside, other=0.0)
    decay, step = gates_of(of_a, of_b, tl.load(rate + head), tl.load(dt_bias + head))
    tl.store(g + entry, decay, mask=inside)
    tl.store(beta + entry, step, mask=inside)


def delta_gates(a: Tensor, b: Tensor, rate: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """The twin of ops.delta_gates."""
    assert a.stride(1) == b.stride(1) == 1
    g, beta = (torch.empty(a.shape, dtype=torch.float32, device=a.device) for _ in range(2))
    if a.numel():
        _all_gates[(triton.cdiv(a.numel(), GATES),)](
            a, b, g, beta, rate, dt_bias, a.numel(), a.stride(0), b.stride(0), heads=a.shape[1], block=GATES
        )
    return g, beta
