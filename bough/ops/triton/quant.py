# mypy: allow-untyped-defs, allow-incomplete-defs
"""Products of few rows with weights of 8 or 4 bits, which are read once and as they lie; and weights in full.

A program computes some outputs of all rows, from all inputs or a part of them (where there are few outputs, so that
every processor has something to read). The sums of the parts are added in order: results do not depend on timing, nor
does the cut depend on how many rows there are. Tiles have the groups as a dimension of their own, so that a scale is
loaded once for its group.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

OUTPUTS = 64  # of a program
INPUTS = 128  # at a time: a multiple of any group
PROGRAMS = 512  # wanted at least, if the inputs can be cut
PART = 512  # inputs that are worth a program


@triton.jit
def _tile(data, scale, zero, output, outputs, start, inputs, group: tl.constexpr, span: tl.constexpr):
    """Weights [outputs, groups, bytes of a group] in float32: of 4 bits those of the low halves and the high ones."""
    groups: tl.constexpr = span // group
    width: tl.constexpr = group if zero is None else group // 2
    every = inputs // group
    at = start // group + tl.arange(0, groups)[None, :]
    inside = (output[:, None] < outputs) & (at < every)
    place = output[:, None].to(tl.int64) * every + at
    step = tl.load(scale + place, mask=inside, other=0.0).to(tl.float32)[:, :, None]
    byte = tl.load(
        data + place[:, :, None] * width + tl.arange(0, width)[None, None, :], mask=inside[:, :, None], other=0
    )
    if zero is None:
        low = byte.to(tl.float32) * step
        high = low
    else:
        shift = tl.load(zero + place, mask=inside, other=0.0).to(tl.float32)[:, :, None]
        low = ((byte & 15).to(tl.float32) - 8.0) * step + shift
        high = ((byte >> 4).to(tl.float32) - 8.0) * step + shift
    return low, high


@triton.jit
def _rows_of(x, row, rows, x_stride, start, offset: tl.constexpr, inputs, group: tl.constexpr, columns: tl.constexpr,
             width: tl.constexpr):  # fmt: skip
    """x [columns, rows]: what the weights of the columns of a tile are multiplied with."""
    column = tl.arange(0, columns)
    at = start + column // width * group + column % width + offset
    return tl.load(
        x + row[None, :] * x_stride + at[:, None], mask=(row[None, :] < rows) & (at[:, None] < inputs), other=0.0
    )


@triton.jit
def _product(
    x, data, scale, zero, out, rows, outputs, inputs, x_stride, part,
    group: tl.constexpr, block: tl.constexpr, block_rows: tl.constexpr, span: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0) * block + tl.arange(0, block)
    row = tl.arange(0, block_rows)
    width: tl.constexpr = group if zero is None else group // 2
    columns: tl.constexpr = span // group * width
    sums = tl.zeros([block, block_rows], tl.float32)
    first = tl.program_id(1) * part
    for start in range(first, tl.minimum(first + part, inputs), span):
        low, high = _tile(data, scale, zero, output, outputs, start, inputs, group, span)
        seen = _rows_of(x, row, rows, x_stride, start, 0, inputs, group, columns, width)
        sums = tl.dot(tl.reshape(low, [block, columns]).to(seen.dtype), seen, sums, input_precision=precision)
        if zero is not None:
            seen = _rows_of(x, row, rows, x_stride, start, width, inputs, group, columns, width)
            sums = tl.dot(tl.reshape(high, [block, columns]).to(seen.dtype), seen, sums, input_precision=precision)
    place = (tl.program_id(1) * rows + row[None, :]).to(tl.int64) * outputs + output[:, None]
    tl.store(out + place, sums.to(out.dtype.element_ty), mask=(row[None, :] < rows) & (output[:, None] < outputs))


@triton.jit
def _sum(parts, out, count, number: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for part in tl.static_range(number):
        total += tl.load(parts + part * count + at, mask=at < count, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < count)


@triton.jit
def _expand(data, scale, zero, out, outputs, inputs, group: tl.constexpr, block: tl.constexpr, span: tl.constexpr):
    output, start = tl.program_id(0) * block + tl.arange(0, block), tl.program_id(1) * span
    low, high = _tile(data, scale, zero, output, outputs, start, inputs, group, span)
    width: tl.constexpr = group if zero is None else group // 2
    at = start + (tl.arange(0, span // group) * group)[:, None] + tl.arange(0, width)[None, :]
    place = out + output[:, None, None].to(tl.int64) * inputs + at[None, :, :]
    inside = (output[:, None, None] < outputs) & (at[None, :, :] < inputs)
    tl.store(place, low.to(out.dtype.element_ty), mask=inside)
    if zero is not None:
        tl.store(place + width, high.to(out.dtype.element_ty), mask=inside)


def quantised_product(x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """The twin of Quantised.product, for up to 64 rows."""
    (rows, inputs), outputs = x.shape, len(data)
    x = x.contiguous()
    assert data.is_contiguous() and scale.is_contiguous()
    blocks = triton.cdiv(outputs, OUTPUTS)
    parts = max(1, min(PROGRAMS // blocks, inputs // PART))
    part = triton.cdiv(triton.cdiv(inputs, INPUTS), parts) * INPUTS
    parts = triton.cdiv(inputs, part)
    y = x.new_empty(rows, outputs)
    target = y if parts == 1 else x.new_empty(parts, rows, outputs, dtype=torch.float32)
    _product[blocks, parts](
        x, data, scale, zero, target, rows, outputs, inputs, x.stride(0), part,
        group=inputs // scale.shape[1], block=OUTPUTS, block_rows=max(16, triton.next_power_of_2(rows)), span=INPUTS,
        precision="ieee", num_warps=4, num_stages=4,
    )  # fmt: skip
    if parts > 1:
        _sum[(triton.cdiv(y.numel(), 1024),)](target, y, y.numel(), number=parts, block=1024)
    return y


def expanded(data: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """The twin of Quantised.expanded, for one matrix."""
    group = data.shape[1] * (1 if zero is None else 2) // scale.shape[1]
    out = scale.new_empty(len(data), group * scale.shape[1])
    grid = triton.cdiv(len(data), OUTPUTS), triton.cdiv(out.shape[1], INPUTS)
    _expand[grid](data, scale, zero, out, *out.shape, group=group, block=OUTPUTS, span=INPUTS)
    return out
