# mypy: allow-untyped-defs, allow-incomplete-defs
"""Products of few rows, which take as long as reading the weights once does.

A program computes some outputs of all rows. Of few outputs that would make too few programs to keep memory busy: there
each reads a part of the inputs, and whichever of an output's programs is done last adds up what all of them wrote
down, always in the same order. Results do not depend on timing.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.ops.activation import Activation
from bough.ops.deferred import Input
from bough.ops.quant import Chunks
from bough.ops.ragged import Rows, Slots, open_slots
from bough.ops.triton import quant
from bough.ops.triton.activation import ACTIVATIONS
from bough.ops.triton.plan import plan
from bough.ops.triton.rest import Rest, Stored, Work, ask, finish, gathered, in_parts, noted, outputs_at, prepared

ROWS = 32  # up to which these are faster than torch's own
VECTORS = 2  # rows up to which the arithmetic units do as well as the matrix units
OUTPUTS = 1 << 16  # up to which these are faster than torch's own
CHUNK = tl.constexpr(8)  # neighbouring inputs that a thread loads at once, and adds up


class Cut(NamedTuple):
    """How a product is cut into programs."""

    outputs: int  # of a program
    inputs: int  # that it multiplies at a time
    warps: int
    stages: int
    parts: int = 1  # that the inputs are cut into


@triton.jit(do_not_specialize=["rows"])
def _vectors(
    x, weight, out, rest, rows, outputs, x_stride, inputs: tl.constexpr, measured: tl.constexpr, kernel: tl.constexpr,
    block: tl.constexpr, block_rows: tl.constexpr, span: tl.constexpr, stages: tl.constexpr, activation: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * block
    output = outputs_at(first, outputs, block, activation is not None)
    weight += output.to(tl.int64)[:, None] * inputs
    ragged: tl.constexpr = inputs % span != 0
    sums = (tl.zeros([block, span // CHUNK], tl.float32),) * block_rows
    needed: tl.tuple = ()
    for row in tl.static_range(block_rows):
        needed += (ask(rest, first, row + tl.arange(0, 1), rows, outputs, block, measured, kernel),)
    for start in tl.range(0, inputs, span, num_stages=stages):
        at = start + tl.arange(0, span)[None, :]
        inside = at < inputs if ragged else None
        some = tl.load(weight + at, mask=inside, other=0.0 if ragged else None).to(tl.float32)
        for row in tl.static_range(block_rows):
            seen = tl.load(x + tl.minimum(row, rows - 1) * x_stride + at, mask=inside, other=0.0 if ragged else None)
            terms = tl.reshape(some * seen.to(tl.float32), [block, span // CHUNK, CHUNK])
            more = (sums[0] + tl.sum(terms, 2),)
            sums = sums[1:] + more  # after all rows, in order again
    for row in tl.static_range(block_rows):
        finish(
            tl.sum(sums[row], 1)[:, None], needed[row], rest, output, out, first, row + tl.arange(0, 1), rows, outputs,
            inputs, block, kernel, activation,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, weight, out, rest, partial, arrived, rows, outputs, x_stride, inputs: tl.constexpr, measured: tl.constexpr,
    kernel: tl.constexpr, part: tl.constexpr, parts: tl.constexpr, block: tl.constexpr, block_rows: tl.constexpr,
    span: tl.constexpr, stages: tl.constexpr, activation: tl.constexpr,
):  # fmt: skip
    first, low = tl.program_id(0) * block, tl.program_id(1) * part
    output = outputs_at(first, outputs, block, activation is not None)
    row = tl.arange(0, block_rows)
    weight += output.to(tl.int64)[:, None] * inputs
    x += tl.minimum(row, rows - 1)[None, :] * x_stride
    ragged: tl.constexpr = inputs % part != 0
    needed = ask(rest, first, row, rows, outputs, block, measured, kernel)
    sums = tl.zeros([block, block_rows], tl.float32)
    for start in tl.range(0, part, span, num_stages=stages):
        at = low + start + tl.arange(0, span)
        left = at[None, :] < inputs if ragged else None
        right = at[:, None] < inputs if ragged else None
        some = tl.load(weight + at[None, :], mask=left, other=0.0 if ragged else None)
        seen = tl.load(x + at[:, None], mask=right, other=0.0 if ragged else None)
        sums = tl.dot(some, seen, sums, input_precision="ieee")
    last = True
    if parts > 1:
        last = noted(sums, partial, arrived, block, block_rows, parts)
    if last:
        if parts > 1:
            sums = gathered(partial, block, block_rows, parts)
        finish(sums, needed, rest, output, out, first, row, rows, outputs, inputs, block, kernel, activation)


def vectors(x: Input, work: Work, cut: Cut) -> Stored:
    """The product by the arithmetic units: a thread sums chunks of its own, and a program its threads at the end."""
    tiles = triton.cdiv(work.weight.shape[0], cut.outputs)
    x, stored, told = prepared(x, work, tiles)
    _vectors[(tiles,)](
        x, work.weight, stored.out, rows=len(x), x_stride=x.stride(0), block=cut.outputs,
        block_rows=triton.next_power_of_2(len(x)), span=cut.inputs, stages=cut.stages, num_warps=cut.warps, **told,
    )  # fmt: skip
    return stored


def product(x: Input, work: Work, cut: Cut) -> Stored:
    """The product by the matrix units, whose left factor the weights are: there they take many rows, and few right."""
    outputs, inputs = work.weight.shape
    part = triton.cdiv(triton.cdiv(inputs, cut.inputs), cut.parts) * cut.inputs
    tiles, parts = triton.cdiv(outputs, cut.outputs), triton.cdiv(inputs, part)
    block_rows = max(16, triton.next_power_of_2(len(x)))
    x, stored, told = prepared(x, work, tiles)
    _product[tiles, parts](
        x, work.weight, stored.out, rows=len(x), x_stride=x.stride(0), part=part, block=cut.outputs,
        block_rows=block_rows, span=cut.inputs, stages=cut.stages, num_warps=cut.warps,
        **told, **in_parts(x, tiles, parts, cut.outputs * block_rows),
    )  # fmt: skip
    return stored


def vectors_cut(outputs: int, inputs: int) -> Cut:
    """Few outputs to a program, so that all processors end together."""
    return Cut(8, 512, 1, 1) if outputs >= 8192 else Cut(4, 512, 2, 3)


def product_cut(outputs: int, inputs: int) -> Cut:
    """The inputs are cut so that there is at least a program for each processor."""
    return Cut(64, 128, 4, 3) if outputs >= 8192 else Cut(64, 128, 4, 4, max(1, min(inputs // 512, 10240 // outputs)))


def few(x: Tensor, weight: Tensor | Chunks) -> bool:
    """Whether few_rows does this product, and is faster than torch's own."""
    if isinstance(weight, Chunks):
        return 0 < len(x) <= quant.ROWS
    (outputs, inputs), alike = weight.shape, x.dtype == weight.dtype == torch.bfloat16
    return alike and 0 < len(x) <= ROWS and outputs <= OUTPUTS and inputs % 8 == 0 and laid_out(x, weight)


def laid_out(x: Tensor, weight: Tensor) -> bool:
    return x.stride(1) == 1 and x.stride(0) % 8 == 0 and weight.is_contiguous()


def few_rows(x: Input, weight: Tensor | Chunks, bias: Tensor | None = None) -> Tensor:
    """The twin of ops.linear, for `few` rows."""
    return _made(x, Work(weight, Rest(bias))).out


def gated_rows(x: Input, gate_up: Tensor | Chunks, activation: Activation) -> Tensor:
    """The twin of ops.gated of the halves of ops.linear, for `few` rows and the ACTIVATIONS."""
    return _made(x, Work(gate_up, activation=ACTIVATIONS[activation])).out


def product_normed(x: Tensor, weight: Tensor | Chunks, onto: Tensor, scale: Tensor | None) -> Stored:
    """The product of `few` rows added onto others; and of the norm of that what Normed has."""
    return _made(x, Work(weight, Rest(onto=onto, scale=scale)))


def projected_rows(x: Input, weight: Tensor | Chunks, taps: Tensor, rows: Rows, tails: Slots) -> Tensor:
    """The twin of ops.projected_conv with SiLU, for `few` rows of one token; all outputs in one."""
    slots = open_slots("projected_conv", rows, tails, None)
    short, data = plan(rows, slots, 1).short, slots.data
    assert taps.is_contiguous() and data.stride(2) == 1 and slots.recording is None
    return _made(x, Work(weight, Rest(
        taps=taps, tails=data, reads=short.read, writes=short.write,
        slot_stride=data.stride(0), tail_stride=data.stride(1), channels=taps.shape[1],
    ))).out  # fmt: skip


def _made(x: Input, work: Work) -> Stored:
    if isinstance(work.weight, Chunks):
        return quant.made(x, work)
    if len(x) <= VECTORS:
        return vectors(x, work, vectors_cut(*work.weight.shape))
    return product(x, work, product_cut(*work.weight.shape))
