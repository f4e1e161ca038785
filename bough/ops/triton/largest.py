# mypy: allow-untyped-defs, allow-incomplete-defs
"""The largest number of each row: programs look for it in a part each, and whichever is done last compares theirs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.ops.triton.arrivals import arrivals, is_last

BLOCK = 8192  # numbers of a part
WARPS = 16


@triton.jit
def _first(value, place, width):
    """The largest of some, and the first place that has it."""
    most = tl.max(value, 0)
    return most, tl.min(tl.where(value == most, place, width), 0)


@triton.jit
def _largest(
    x, best, at, values, places, arrived, stride, width: tl.constexpr, block: tl.constexpr, parts: tl.constexpr
):  # fmt: skip
    # Parts that a product has written last come first: they are still in the second-level cache.
    row, part, i = tl.program_id(0), parts - 1 - tl.program_id(1), tl.arange(0, triton.next_power_of_2(parts))
    place = part * block + tl.arange(0, block)
    value = tl.load(x + row.to(tl.int64) * stride + place, mask=place < width, other=-float("inf")).to(tl.float32)
    most, where = _first(tl.where(value == value, value, float("inf")), place, width)  # what is no number is no less
    last = True
    if parts > 1:
        tl.store(values + row * parts + part, most)
        tl.store(places + row * parts + part, where)
        last = is_last(arrived + row, parts)
    if last:
        if parts > 1:
            some = tl.load(values + row * parts + i, mask=i < parts, other=-float("inf"), cache_modifier=".cg")
            other = tl.load(places + row * parts + i, mask=i < parts, other=width, cache_modifier=".cg")
            most, where = _first(some, other, width)
        tl.store(best + row, most)
        tl.store(at + row, where.to(tl.int64))


def largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """The twin of ops.largest."""
    rows, width = x.shape
    assert x.stride(1) == 1
    block = min(BLOCK, triton.next_power_of_2(width))
    parts = triton.cdiv(width, block)
    best, at = x.new_empty(rows, dtype=torch.float32), x.new_empty(rows, dtype=torch.int64)
    if rows:
        values, places = (x.new_empty(rows, parts, dtype=each) for each in (torch.float32, torch.int32))
        _largest[rows, parts](
            x, best, at, values, places, arrivals(x.device), x.stride(0), width=width, block=block, parts=parts,
            num_warps=max(1, min(WARPS, block // 256)),
        )  # fmt: skip
    return best, at
