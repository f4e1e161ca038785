# mypy: allow-untyped-defs, allow-incomplete-defs
"""Products of few rows, which take as long as reading the weights once does.

A program computes some outputs of all rows. Of few outputs that would make too few programs to keep memory busy: there
each reads a part of the inputs, and whichever of an output's programs is done last adds up what all of them wrote
down, always in the same order. Results do not depend on timing.

Programs of one row are small, and ask for weights before the row is there (follow.py). Programs of several take so much
of a processor that those of the next launch would gather where they first find room, and so wait for one another: they
lead to the next when they have read all. Of up to 8 rows, projections that no product follows lead at their beginning.
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
from bough.ops.triton.follow import follow, following, lead
from bough.ops.triton.plan import plan, shared_bytes
from bough.ops.triton.rest import Rest, Stored, Work, ask, finish, gathered, in_parts, noted, outputs_at, prepared

ROWS = 64  # up to which these, with all that they take over, are faster than torch's own
OUTPUTS = 1 << 16  # up to which these are faster than torch's own
MANY = 8192  # outputs, from which on there are programs for all processors
CHUNK = tl.constexpr(8)  # neighbouring inputs that a thread loads at once, and adds up


class Cut(NamedTuple):
    """How a product is cut into programs."""

    outputs: int  # of a program
    inputs: int  # that it multiplies at a time
    warps: int
    ahead: int  # times that it loads before it multiplies, where there is room
    parts: int = 1  # that the inputs are cut into


@triton.jit
def _ahead(weight, start, inputs: tl.constexpr, span: tl.constexpr, ahead: tl.constexpr):
    """The weights of the inputs from start on, so many at a time. Zeros past the last."""
    some: tl.tuple = ()
    for time in tl.static_range(ahead):
        at = start + time * span + tl.arange(0, span)[None, :]
        some += (tl.load(weight + at, mask=at < inputs, other=0.0),)
    return some


@triton.jit
def _vector(
    x, weight, out, rest, outputs, inputs: tl.constexpr, measured: tl.constexpr, kernel: tl.constexpr,
    block: tl.constexpr, span: tl.constexpr, ahead: tl.constexpr, activation: tl.constexpr, follows: tl.constexpr,
):  # fmt: skip
    lead(follows)
    first, row = tl.program_id(0) * block, tl.arange(0, 1)
    output = outputs_at(first + tl.arange(0, block), outputs, activation is not None)
    weight += output.to(tl.int64)[:, None] * inputs
    some = _ahead(weight, 0, inputs, span, ahead)
    follow(follows)
    needed = ask(rest, first, row, 1, outputs, block, measured, kernel)
    sums = tl.zeros([block, span // CHUNK], tl.float32)
    for start in tl.range(0, inputs, span * ahead, num_stages=1):
        for time in tl.static_range(ahead):
            at = start + time * span + tl.arange(0, span)[None, :]
            seen = tl.load(x + at, mask=at < inputs, other=0.0)
            terms = some[time].to(tl.float32) * seen.to(tl.float32)
            sums += tl.sum(tl.reshape(terms, [block, span // CHUNK, CHUNK]), 2)
        some = _ahead(weight, start + span * ahead, inputs, span, ahead)
    total = tl.sum(sums, 1)[:, None]
    finish(total, needed, rest, out, first, row, 1, outputs, inputs, block, kernel, activation)


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, weight, out, rest, partial, arrived, rows, outputs, x_stride, inputs: tl.constexpr, measured: tl.constexpr,
    kernel: tl.constexpr, part: tl.constexpr, parts: tl.constexpr, block: tl.constexpr, block_rows: tl.constexpr,
    span: tl.constexpr, stages: tl.constexpr, activation: tl.constexpr, early: tl.constexpr, follows: tl.constexpr,
):  # fmt: skip
    lead(follows and early)
    first, low = tl.program_id(0) * block, tl.program_id(1) * part
    output = outputs_at(first + tl.arange(0, block), outputs, activation is not None)
    row = tl.arange(0, block_rows)
    weight += output.to(tl.int64)[:, None] * inputs
    follow(follows)
    x += row[None, :] * x_stride
    ragged: tl.constexpr = inputs % part != 0
    there = (row < rows)[None, :]  # to load a row again in the place of others would have all ask for the same lines
    needed = ask(rest, first, row, rows, outputs, block, measured, kernel)
    sums = tl.zeros([block, block_rows], tl.float32)
    for start in tl.range(0, part, span, num_stages=stages):
        at = low + start + tl.arange(0, span)
        inside = at[None, :] < inputs if ragged else None
        some = tl.load(weight + at[None, :], mask=inside, other=0.0 if ragged else None)
        seen = tl.load(x + at[:, None], mask=there & (at[:, None] < inputs) if ragged else there, other=0.0)
        sums = tl.dot(some, seen, sums, input_precision="ieee")
    lead(follows and not early)
    last = True
    if parts > 1:
        last = noted(sums, partial, arrived, block, block_rows, parts)
    if last:
        if parts > 1:
            sums = gathered(partial, block, block_rows, parts)
        finish(sums, needed, rest, out, first, row, rows, outputs, inputs, block, kernel, activation)


def vector(x: Input, work: Work, cut: Cut) -> Stored:
    """The product of one row, by the arithmetic units: a thread sums chunks of its own, a program its threads."""
    tiles = triton.cdiv(work.weight.shape[0], cut.outputs)
    x, stored, told = prepared(x, work, tiles)
    _vector[(tiles,)](
        x, work.weight, stored.out, block=cut.outputs, span=cut.inputs, ahead=cut.ahead, num_warps=cut.warps, **told,
        **following(x.device),
    )  # fmt: skip
    return stored


def product(x: Input, work: Work, cut: Cut) -> Stored:
    """The product of several rows, by the matrix units.

    Their left factor is the weights: there they take many rows, and few right.
    """
    outputs, inputs = work.weight.shape
    part = triton.cdiv(triton.cdiv(inputs, cut.inputs), cut.parts) * cut.inputs
    tiles, parts = triton.cdiv(outputs, cut.outputs), triton.cdiv(inputs, part)
    block_rows = max(8, triton.next_power_of_2(len(x)))
    x, stored, told = prepared(x, work, tiles)
    ahead = shared_bytes(x.device) // ((cut.outputs + block_rows) * cut.inputs * x.element_size())
    early = block_rows == 8 and outputs >= MANY and work.activation is None  # a mixer comes next
    _product[tiles, parts](
        x, work.weight, stored.out, rows=len(x), x_stride=x.stride(0), part=part, block=cut.outputs,
        block_rows=block_rows, span=cut.inputs, stages=min(cut.ahead, ahead), early=early, num_warps=cut.warps,
        **following(x.device), **told, **in_parts(x, tiles, parts, cut.outputs * block_rows),
    )  # fmt: skip
    return stored


def vector_cut(outputs: int, inputs: int) -> Cut:
    """Few outputs to a program, so that all processors end together, and many of the weights of these ahead."""
    return Cut(4, 256, 1, 5) if outputs >= MANY else Cut(4, 512, 2, 4)


def product_cut(outputs: int, inputs: int, rows: int) -> Cut:
    """The inputs are cut so that there is about a program for each of 132 processors.

    Of many outputs all programs should run at a time: with many rows, which take as much room as weights, they hold
    less ahead where three of them share a processor.
    """
    if outputs < MANY:
        return Cut(64, 128, 4, 5, max(1, min(inputs // 512, round(132 * 64 / outputs))))
    return Cut(64, 64, 4, 4) if rows > 32 and outputs > 2 * 132 * 64 else Cut(64, 128, 4, 3)


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
    outputs, inputs = work.weight.shape
    if len(x) == 1:
        return vector(x, work, vector_cut(outputs, inputs))
    return product(x, work, product_cut(outputs, inputs, len(x)))
