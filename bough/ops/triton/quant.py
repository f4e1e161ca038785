# mypy: allow-untyped-defs, allow-incomplete-defs
"""Products of few rows with weights of 8 or 4 bits, which are read once; and weights in full.

What bounds them is how many instructions a weight takes. So codes become numbers by masking alone: bits of a word
below 2**24, read as float32, are that integer times 2**-149 (a denormal, which the processors multiply at full rate).
The powers of two that this and a code's place in its word make are taken out again where it costs little: from the
inputs where they are few, else from the scales and the sums. All are exact.

Every row's sums are of the same cuts in the same order, whatever rows are beside it and however programs are timed.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 2  # up to which the arithmetic units do as well as the matrix units
BESIDE = tl.constexpr(4)  # words of a chunk
INTEGER = tl.constexpr(2.0**69)  # with LIFT the 2**149 of an integer that is read as a number: no float32 has it whole
LIFT = tl.constexpr(80)
LOW = tl.constexpr(2.0**-60)  # of weights while they are multiplied, so that none of the factors leaves the range


class Cut(NamedTuple):
    """How a product is cut into programs."""

    outputs: int  # of a program
    warps: int
    stages: int
    parts: int = 1  # that the inputs are cut into


@triton.jit
def _tile(data, scale, zero, output, start, inputs: tl.constexpr, group: tl.constexpr, words: tl.constexpr):
    """Words [outputs, words]; step and shift [outputs, chunks]: a weight is code · step + shift. Zeros outside."""
    planes: tl.constexpr = 4 if zero is None else 8
    every: tl.constexpr = inputs // planes
    ragged: tl.constexpr = every % words != 0
    at = start + tl.arange(0, words)[None, :]
    chunk = start // BESIDE + tl.arange(0, words // BESIDE)[None, :]
    inside = at < every if ragged else None
    known = chunk < every // BESIDE if ragged else None
    other = 0 if ragged else None
    word = tl.load(data + output * every + at, mask=inside, other=other).to(tl.uint32, bitcast=True)
    place = output * (inputs // group) + chunk // (group // (BESIDE * planes))
    step = tl.load(scale + place, mask=known, other=other).to(tl.float32)
    if zero is None:
        shift = step * -128.0
    else:
        shift = tl.load(zero + place, mask=known, other=other).to(tl.float32) - 8.0 * step
    return word, step, shift


@triton.jit
def _first(at, planes: tl.constexpr):
    """Which input the first code of a word belongs to; those of the others follow, BESIDE apart."""
    return at // BESIDE * (BESIDE * planes) + at % BESIDE


@triton.jit
def _plane(word, seen, plane: tl.constexpr, bits: tl.constexpr):
    """code · input of the codes at one place in their words, times 2**(LIFT - 149)."""
    late: tl.constexpr = plane * bits + bits > 24
    at: tl.constexpr = plane * bits - (8 if late else 0)
    code = (word >> 8 if late else word) & ((1 << bits) - 1 << at)
    return code.to(tl.float32, bitcast=True) * (seen * 2.0 ** (LIFT - at))


@triton.jit
def _row(x, inside, word, step, shift, block: tl.constexpr, words: tl.constexpr, bits: tl.constexpr):
    """The sums [outputs, chunks] of one row."""
    sums = tl.zeros([block, words], tl.float32)
    whole = tl.zeros([1, words], tl.float32)
    for plane in tl.static_range(32 // bits):
        seen = tl.load(x + BESIDE * plane, mask=inside, other=None if inside is None else 0.0)
        seen = seen.to(tl.float32)
        whole += seen
        sums += _plane(word, seen, plane, bits)
    sums = tl.sum(tl.reshape(sums, [block, words // BESIDE, BESIDE]), 2)
    whole = tl.sum(tl.reshape(whole, [1, words // BESIDE, BESIDE]), 2)
    return sums * (step * INTEGER) + whole * shift


@triton.jit(do_not_specialize=["rows"])
def _vectors(
    x, data, scale, zero, out, rows, outputs, inputs: tl.constexpr, group: tl.constexpr, block: tl.constexpr,
    block_rows: tl.constexpr, words: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    bits: tl.constexpr = 8 if zero is None else 4
    every: tl.constexpr = inputs * bits // 32
    output = tl.program_id(0) * block + tl.arange(0, block)
    place = tl.minimum(output, outputs - 1).to(tl.int64)[:, None]
    sums = (tl.zeros([block, words // BESIDE], tl.float32),) * block_rows
    for start in tl.range(0, every, words, num_stages=stages):
        word, step, shift = _tile(data, scale, zero, place, start, inputs, group, words)
        at = start + tl.arange(0, words)[None, :]
        inside = at < every if every % words != 0 else None
        for row in tl.static_range(block_rows):
            seen = x + tl.minimum(row, rows - 1) * inputs + _first(at, 32 // bits)
            more = (sums[0] + _row(seen, inside, word, step, shift, block, words, bits),)
            sums = sums[1:] + more  # after all rows, in order again
    for row in tl.static_range(block_rows):
        total = tl.sum(sums[row], 1).to(out.dtype.element_ty)
        tl.store(out + row * outputs + output, total, mask=(output < outputs) & (row < rows))


@triton.jit
def _spread(value, block: tl.constexpr, words: tl.constexpr):
    """What a chunk has [outputs, chunks], for each of its words."""
    return tl.reshape(tl.broadcast_to(value[:, :, None], [block, words // BESIDE, BESIDE]), [block, words])


@triton.jit
def _weights(word, step, shift, plane: tl.constexpr, bits: tl.constexpr):
    """LOW · the weights [outputs, words] whose codes are at one place in their words; step has INTEGER · LOW in it."""
    byte: tl.constexpr = plane * bits // 8
    half: tl.constexpr = plane * bits % 8
    if byte < 2:
        word = word << 16 - 8 * byte
    if byte > 2:
        word = word >> 8
    code = (word & ((1 << bits) - 1 << 16 + half)).to(tl.float32, bitcast=True)
    return code * (step * 2.0 ** (LIFT - 16 - half)) + shift


@triton.jit(do_not_specialize=["rows", "part"])
def _product(
    x, data, scale, zero, out, rows, outputs, part, inputs: tl.constexpr, group: tl.constexpr, block: tl.constexpr,
    block_rows: tl.constexpr, words: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    bits: tl.constexpr = 8 if zero is None else 4
    every: tl.constexpr = inputs * bits // 32
    narrow: tl.constexpr = x.dtype.element_ty == tl.float16  # which has no range for low weights
    output = tl.program_id(0) * block + tl.arange(0, block)
    place = tl.minimum(output, outputs - 1).to(tl.int64)[:, None]
    row = tl.arange(0, block_rows)
    sums = tl.zeros([block, block_rows], tl.float32)
    begin = tl.program_id(1) * part * words
    for start in tl.range(begin, tl.minimum(begin + part * words, every), words, num_stages=stages):
        word, step, shift = _tile(data, scale, zero, place, start, inputs, group, words)
        step = _spread(step * (INTEGER * LOW), block, words)
        shift = _spread(shift * LOW, block, words)
        at = start + tl.arange(0, words)[:, None]
        inside = at < every if every % words != 0 else None
        seen_at = x + tl.minimum(row, rows - 1)[None, :] * inputs + _first(at, 32 // bits)
        for plane in tl.static_range(32 // bits):
            seen = tl.load(seen_at + BESIDE * plane, mask=inside, other=None if inside is None else 0.0)
            weight = _weights(word, step, shift, plane, bits)
            if narrow:
                weight *= 1.0 / LOW
            sums = tl.dot(weight.to(seen.dtype), seen, sums, input_precision="ieee")
    if not narrow:
        sums *= 1.0 / LOW
    to = out + (tl.program_id(1) * rows + row[None, :]).to(tl.int64) * outputs + output[:, None]
    known = (row[None, :] < rows) & (output[:, None] < outputs)
    tl.store(to, sums.to(out.dtype.element_ty), mask=known)


@triton.jit
def _sum(parts, out, count, number: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for part in tl.static_range(number):
        total += tl.load(parts + part * count + at, mask=at < count, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < count)


@triton.jit
def _expand(
    data, scale, zero, out, outputs, inputs: tl.constexpr, group: tl.constexpr, block: tl.constexpr,
    words: tl.constexpr,
):  # fmt: skip
    bits: tl.constexpr = 8 if zero is None else 4
    every: tl.constexpr = inputs * bits // 32
    output, start = tl.program_id(0) * block + tl.arange(0, block), tl.program_id(1) * words
    place = tl.minimum(output, outputs - 1).to(tl.int64)[:, None]
    word, step, shift = _tile(data, scale, zero, place, start, inputs, group, words)
    step = _spread(step * (INTEGER * LOW), block, words)
    shift = _spread(shift * LOW, block, words)
    at = start + tl.arange(0, words)[None, :]
    to = out + place * inputs + _first(at, 32 // bits)
    inside = (output[:, None] < outputs) & (at < every)
    for plane in tl.static_range(32 // bits):
        weight = _weights(word, step, shift, plane, bits) * (1.0 / LOW)
        tl.store(to + BESIDE * plane, weight.to(out.dtype.element_ty), mask=inside)


def quantised_product(x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """The twin of Chunks.product, for up to 64 rows."""
    if len(x) <= ROWS:
        return vectors(x, data, scale, zero, vectors_cut(*data.shape))
    return product(x, data, scale, zero, product_cut(*data.shape))


def vectors_cut(outputs: int, words: int) -> Cut:
    """Of many outputs each program takes more, for which it loads the inputs once; of few, more warps share them."""
    if outputs >= 8192:
        return Cut(8, 1, 3)
    return Cut(4, 4 if words % 512 == 0 else 2, 3)


def product_cut(outputs: int, words: int) -> Cut:
    """The inputs are cut so that there are about as many programs as run at a time."""
    if outputs >= 8192:
        return Cut(64, 4, 3, max(1, min(words // 64, 4)))
    return Cut(32, 2, 3, max(1, min(words // 64, 1024 * 32 // outputs)))


def vectors(x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, cut: Cut) -> Tensor:
    """The product by the arithmetic units: a thread sums chunks of its own, and a program its threads at the end."""
    (rows, inputs), outputs = x.shape, len(data)
    y = x.new_empty(rows, outputs)
    _vectors[(triton.cdiv(outputs, cut.outputs),)](
        x.contiguous(), data, scale, zero, y, rows, outputs, inputs=inputs, group=inputs // scale.shape[1],
        block=cut.outputs, block_rows=triton.next_power_of_2(rows), words=128 * cut.warps, stages=cut.stages,
        num_warps=cut.warps,
    )  # fmt: skip
    return y


def product(x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, cut: Cut) -> Tensor:
    """The product by the matrix units."""
    (rows, inputs), (outputs, every) = x.shape, data.shape
    words = 32
    part = triton.cdiv(triton.cdiv(every, words), cut.parts)
    parts = triton.cdiv(every, part * words)
    y = x.new_empty(rows, outputs)
    target = y if parts == 1 else x.new_empty(parts, rows, outputs, dtype=torch.float32)
    _product[triton.cdiv(outputs, cut.outputs), parts](
        x.contiguous(), data, scale, zero, target, rows, outputs, part, inputs=inputs, group=inputs // scale.shape[1],
        block=cut.outputs, block_rows=max(16, triton.next_power_of_2(rows)), words=words, stages=cut.stages,
        num_warps=cut.warps,
    )  # fmt: skip
    if parts > 1:
        _sum[(triton.cdiv(y.numel(), 1024),)](target, y, y.numel(), number=parts, block=1024)
    return y


def expanded(data: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """The twin of Chunks.expanded."""
    outputs, words = data.shape
    out = scale.new_empty(outputs, words * (4 if zero is None else 8))
    group = out.shape[1] // scale.shape[1]
    grid = triton.cdiv(outputs, 16), triton.cdiv(words, 128)
    _expand[grid](data, scale, zero, out, outputs, inputs=out.shape[1], group=group, block=16, words=128)
    return out
