# mypy: allow-untyped-defs, allow-incomplete-defs
"""The largest number of each row: a program reads a row alone, which is on the chip still and soon read."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 16384
WARPS = 32


@triton.jit
def _largest(x, best, at, stride, width: tl.constexpr, block: tl.constexpr):
    row, places = tl.program_id(0), tl.arange(0, block)
    x += row.to(tl.int64) * stride + places
    top, where = tl.full([block], -float("inf"), tl.float32), places
    for start in range(0, width, block):
        value = tl.load(x + start, mask=start + places < width, other=-float("inf")).to(tl.float32)
        value = tl.where(value == value, value, float("inf"))  # not a number
        more = value > top
        top, where = tl.where(more, value, top), tl.where(more, start + places, where)
    most = tl.max(top, 0)
    tl.store(best + row, most)
    tl.store(at + row, tl.min(tl.where(top == most, where, width), 0).to(tl.int64))


def largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """The twin of ops.largest."""
    rows, width = x.shape
    assert x.stride(1) == 1
    best, at = x.new_empty(rows, dtype=torch.float32), x.new_empty(rows, dtype=torch.int64)
    if rows:
        block = min(BLOCK, triton.next_power_of_2(width))
        warps = max(1, min(WARPS, block // 256))
        _largest[(rows,)](x, best, at, x.stride(0), width=width, block=block, num_warps=warps)
    return best, at
