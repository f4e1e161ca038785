# mypy: allow-untyped-defs, allow-incomplete-defs
"""Products of few rows, which take as long as reading the weights once does.

A program computes some outputs of all rows. Of few outputs that would make too few programs to keep memory busy: there
each reads a part of the inputs, and whichever of an output's programs is done last adds up what all of them wrote
down, always in the same order. Results do not depend on timing.

What an activation gates comes as one product too: each output of the gate is followed by the one of up that it gates.

Of a norm, the product before it does one half (`product_normed`): it adds the rows that it goes onto, and stores these,
what the norm's weight makes of them, and the sum of their squares. The product after it does the other: inputs may be
Normed, and then sums are divided by the root. A convolution after a product can be done by it too, where every row has
one token: a program has all that the convolution of its outputs needs.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.ops.activation import Activation
from bough.ops.deferred import Input, Normed
from bough.ops.ragged import Rows, Slots, open_slots
from bough.ops.triton.activation import ACTIVATIONS, activated
from bough.ops.triton.arrivals import COUNTED, arrivals, is_last
from bough.ops.triton.plan import plan

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


@triton.jit
def _outputs(first, outputs, block: tl.constexpr, gated: tl.constexpr):
    """Which outputs [block] a program computes. Those past the last repeat it, and are not stored."""
    at = tl.arange(0, block)
    if gated:
        return tl.minimum(first // 2 + at // 2, outputs // 2 - 1) + at % 2 * (outputs // 2)
    return tl.minimum(first + at, outputs - 1)


@triton.jit
def _needed(
    rest, first, row, rows, outputs, block: tl.constexpr, measured: tl.constexpr, kernel: tl.constexpr
):  # fmt: skip
    """What is needed beside the sums, asked for before these are made: by then it is there."""
    at, known = first + tl.arange(0, block), tl.minimum(row, rows - 1)
    squares, there, scale = 0.0, 0.0, 1.0
    tails: tl.tuple = ()
    taps: tl.tuple = ()
    if rest.root is not None:
        tile = tl.arange(0, triton.next_power_of_2(measured))[:, None]
        squares = tl.load(rest.root + tile * rows + known[None, :], mask=tile < measured, other=0.0)
    if rest.onto is not None:
        there = rest.onto + known[None, :] * rest.onto_stride + at[:, None]
        there = tl.load(there, mask=at[:, None] < outputs, other=0.0)
    if rest.scale is not None:
        scale = tl.load(rest.scale + tl.minimum(at, outputs - 1))[:, None]
    if rest.taps is not None:
        slot, inside = tl.load(rest.reads + known).to(tl.int64)[None, :], at[:, None] < rest.channels
        place = rest.tails + slot * rest.slot_stride + at[:, None]
        for i in tl.static_range(kernel):
            taps += (tl.load(rest.taps + i * rest.channels + at[:, None], mask=inside, other=0.0),)
            if i < kernel - 1:
                tails += (tl.load(place + i * rest.tail_stride, mask=inside & (slot >= 0), other=0.0),)
    return squares, there, scale, tails, taps


@triton.jit
def _put(sums, bias, output, out, first, row, rows, outputs, block: tl.constexpr, activation: tl.constexpr):
    """Stores sums [block, R] of the rows [R], rounded as product, activation and what it gates are one by one."""
    if bias is not None:
        sums += tl.load(bias + output).to(tl.float32)[:, None]
    sums = sums.to(out.dtype.element_ty)
    if activation is None:
        at, width = first + tl.arange(0, block), outputs
    else:
        pairs = tl.reshape(sums, [block // 2, 2, sums.shape[1]])
        gate, up = tl.split(tl.permute(pairs, [0, 2, 1]))
        gate = activated(gate.to(tl.float32), activation).to(sums.dtype).to(tl.float32)
        sums = (gate * up.to(tl.float32)).to(sums.dtype)
        at, width = first // 2 + tl.arange(0, block // 2), outputs // 2
    tl.store(out + row[None, :] * width + at[:, None], sums, mask=(row[None, :] < rows) & (at[:, None] < width))


@triton.jit
def _put_onto(sums, there, scale, rest, out, first, row, rows, outputs, block: tl.constexpr):
    """Stores what sums [block, R] add up to with the rows that they go onto, rounded; that, scaled; and its squares."""
    at = first + tl.arange(0, block)
    inside = (row[None, :] < rows) & (at[:, None] < outputs)
    value = (there.to(tl.float32) + sums.to(out.dtype.element_ty).to(tl.float32)).to(out.dtype.element_ty)
    place = row[None, :] * outputs + at[:, None]
    tl.store(rest.total + place, value, mask=inside)
    value = tl.where(inside, value.to(tl.float32), 0.0)
    tl.store(rest.squares + tl.program_id(0) * rows + row, tl.sum(value * value, 0), mask=row < rows)
    tl.store(out + place, (value * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _convolved(sums, tails, taps, rest, dtype: tl.constexpr, first, row, rows, block: tl.constexpr):
    """The sums [block, R], the first channels of which are each row's next input of a convolution, with that done."""
    channel = (first + tl.arange(0, block))[:, None]
    slot = tl.load(rest.writes + tl.minimum(row, rows - 1)).to(tl.int64)[None, :]
    inside = (channel < rest.channels) & (row[None, :] < rows) & (slot >= 0)
    place, y = rest.tails + slot * rest.slot_stride + channel, tl.zeros_like(sums)
    for i in tl.static_range(len(taps)):
        value = (sums if i == len(tails) else tails[i]).to(dtype)
        y += value.to(tl.float32) * taps[i]
        if i > 0:
            tl.store(place + (i - 1) * rest.tail_stride, value, mask=inside)
    return tl.where(channel < rest.channels, y * tl.sigmoid(y), sums)


@triton.jit
def _finish(
    sums, needed, rest, output, out, first, row, rows, outputs, inputs: tl.constexpr, block: tl.constexpr,
    activation: tl.constexpr,
):  # fmt: skip
    squares, there, scale, tails, taps = needed
    if rest.root is not None:  # inputs are yet to be divided by the root of their mean square
        sums *= tl.rsqrt(tl.sum(squares, 0) / inputs + rest.eps)[None, :]
    if rest.taps is not None:
        sums = _convolved(sums, tails, taps, rest, out.dtype.element_ty, first, row, rows, block)
    if rest.onto is None:
        _put(sums, rest.bias, output, out, first, row, rows, outputs, block, activation)
    else:
        _put_onto(sums, there, scale, rest, out, first, row, rows, outputs, block)


@triton.jit(do_not_specialize=["rows"])
def _vectors(
    x, weight, out, rest, rows, outputs, x_stride, inputs: tl.constexpr, measured: tl.constexpr, kernel: tl.constexpr,
    block: tl.constexpr, block_rows: tl.constexpr, span: tl.constexpr, stages: tl.constexpr, activation: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * block
    output = _outputs(first, outputs, block, activation is not None)
    weight += output.to(tl.int64)[:, None] * inputs
    ragged: tl.constexpr = inputs % span != 0
    sums = (tl.zeros([block, span // CHUNK], tl.float32),) * block_rows
    needed: tl.tuple = ()
    for row in tl.static_range(block_rows):
        needed += (_needed(rest, first, row + tl.arange(0, 1), rows, outputs, block, measured, kernel),)
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
        _finish(
            tl.sum(sums[row], 1)[:, None], needed[row], rest, output, out, first, row + tl.arange(0, 1), rows, outputs,
            inputs, block, activation,
        )  # fmt: skip


@triton.jit
def _gathered(sums, partial, arrived, tiles, block: tl.constexpr, block_rows: tl.constexpr, parts: tl.constexpr):
    """Writes down this part's sums. Whether all parts of the tile have, and if so their sums in order, else zeros."""
    tile, at = tl.program_id(0), tl.arange(0, block)[:, None] * block_rows + tl.arange(0, block_rows)[None, :]
    place = partial + tile * (block * block_rows) + at
    step = tiles * (block * block_rows)
    tl.store(place + tl.program_id(1) * step, sums)
    last = is_last(arrived + tile, parts)
    sums = tl.zeros([block, block_rows], tl.float32)
    if last:
        for part in tl.static_range(parts):
            sums += tl.load(place + part * step, cache_modifier=".cg")
    return last, sums


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, weight, out, rest, partial, arrived, rows, outputs, x_stride, inputs: tl.constexpr, measured: tl.constexpr,
    kernel: tl.constexpr, part: tl.constexpr, parts: tl.constexpr, block: tl.constexpr, block_rows: tl.constexpr,
    span: tl.constexpr, stages: tl.constexpr, activation: tl.constexpr,
):  # fmt: skip
    first, low = tl.program_id(0) * block, tl.program_id(1) * part
    output = _outputs(first, outputs, block, activation is not None)
    row = tl.arange(0, block_rows)
    weight += output.to(tl.int64)[:, None] * inputs
    x += tl.minimum(row, rows - 1)[None, :] * x_stride
    ragged: tl.constexpr = inputs % part != 0
    needed = _needed(rest, first, row, rows, outputs, block, measured, kernel)
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
        last, sums = _gathered(sums, partial, arrived, tl.num_programs(0), block, block_rows, parts)
    if last:
        _finish(sums, needed, rest, output, out, first, row, rows, outputs, inputs, block, activation)


class Rest(NamedTuple):
    """What is done with the sums of a product, beside storing them."""

    bias: Tensor | None = None
    root: Tensor | None = None  # of inputs that are Normed: their squares [N, T]
    eps: float = 0.0
    onto: Tensor | None = None  # rows [T, out] that they are added to
    onto_stride: int = 0
    scale: Tensor | None = None  # of the norm after that
    total: Tensor | None = None  # [T, out]
    squares: Tensor | None = None  # [tiles, T]
    taps: Tensor | None = None  # [K, C]: of the convolution that the first of them are inputs of
    tails: Tensor | None = None
    reads: Tensor | None = None  # [T]: the slots of its tails, of rows of one token
    writes: Tensor | None = None
    slot_stride: int = 0
    tail_stride: int = 0
    channels: int = 0


class Work(NamedTuple):
    """A product, and what comes with it."""

    weight: Tensor
    rest: Rest = Rest()
    activation: str | None = None


def vectors(x: Input, work: Work, cut: Cut) -> Tensor:
    """The product by the arithmetic units: a thread sums chunks of its own, and a program its threads at the end."""
    x, told = _told(x, work)
    out = x.new_empty(len(x), told.pop("width"))
    _vectors[(triton.cdiv(len(work.weight), cut.outputs),)](
        x, work.weight, out, rows=len(x), block=cut.outputs, block_rows=triton.next_power_of_2(len(x)),
        span=cut.inputs, stages=cut.stages, num_warps=cut.warps, **told,
    )  # fmt: skip
    return out


def product(x: Input, work: Work, cut: Cut) -> Tensor:
    """The product by the matrix units, whose left factor the weights are: there they take many rows, and few right."""
    outputs, inputs = work.weight.shape
    part = triton.cdiv(triton.cdiv(inputs, cut.inputs), cut.parts) * cut.inputs
    tiles, parts = triton.cdiv(outputs, cut.outputs), triton.cdiv(inputs, part)
    block_rows = max(16, triton.next_power_of_2(len(x)))
    x, told = _told(x, work)
    out = x.new_empty(len(x), told.pop("width"))
    partial = arrived = None
    if parts > 1:
        assert tiles <= COUNTED
        partial = x.new_empty(parts * tiles * cut.outputs * block_rows, dtype=torch.float32)
        arrived = arrivals(x.device)
    _product[tiles, parts](
        x, work.weight, out, partial=partial, arrived=arrived, rows=len(x), part=part, parts=parts,
        block=cut.outputs, block_rows=block_rows, span=cut.inputs, stages=cut.stages, num_warps=cut.warps, **told,
    )  # fmt: skip
    return out


def _told(x: Input, work: Work) -> tuple[Tensor, dict[str, Any]]:
    """The rows that are multiplied, and what both kernels are told of the rest."""
    (outputs, inputs), rest = work.weight.shape, work.rest
    if isinstance(x, Normed):
        rest = rest._replace(root=x.squares, eps=x.eps)
        x = x.scaled
    assert rest.onto is None or (rest.bias is None and work.activation is None and rest.onto.stride(1) == 1)
    return x, {
        "rest": rest, "outputs": outputs, "inputs": inputs, "x_stride": x.stride(0), "activation": work.activation,
        "measured": 0 if rest.root is None else len(rest.root), "kernel": 0 if rest.taps is None else len(rest.taps),
        "width": outputs if work.activation is None else outputs // 2,
    }  # fmt: skip


def vectors_cut(outputs: int, inputs: int) -> Cut:
    """Few outputs to a program, so that all processors end together."""
    return Cut(8, 512, 1, 1) if outputs >= 8192 else Cut(4, 512, 2, 3)


def product_cut(outputs: int, inputs: int) -> Cut:
    """The inputs are cut so that there is at least a program for each processor."""
    return Cut(64, 128, 4, 3) if outputs >= 8192 else Cut(64, 128, 4, 4, max(1, min(inputs // 512, 10240 // outputs)))


def few(x: Tensor, weight: Tensor) -> bool:
    """Whether few_rows does this product, and is faster than torch's own."""
    (outputs, inputs), alike = weight.shape, x.dtype == weight.dtype == torch.bfloat16
    return alike and 0 < len(x) <= ROWS and outputs <= OUTPUTS and inputs % 8 == 0 and laid_out(x, weight)


def laid_out(x: Tensor, weight: Tensor) -> bool:
    return x.stride(1) == 1 and x.stride(0) % 8 == 0 and weight.is_contiguous()


def few_rows(x: Input, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The twin of ops.linear, for `few` rows."""
    return _made(x, Work(weight, Rest(bias)))


def gated_rows(x: Input, gate_up: Tensor, activation: Activation) -> Tensor:
    """The twin of ops.gated of the halves of ops.linear, for `few` rows and the ACTIVATIONS."""
    return _made(x, Work(gate_up, activation=ACTIVATIONS[activation]))


def product_normed(x: Tensor, weight: Tensor, onto: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The product of `few` rows added onto others; and of the norm of that what Normed has."""
    tiles = triton.cdiv(len(weight), _cut(x, weight).outputs)
    total, squares = x.new_empty(onto.shape), x.new_empty(tiles, len(x), dtype=torch.float32)
    rest = Rest(onto=onto, onto_stride=onto.stride(0), scale=scale, total=total, squares=squares)
    return total, _made(x, Work(weight, rest)), squares


def projected_rows(x: Input, weight: Tensor, taps: Tensor, rows: Rows, tails: Slots) -> Tensor:
    """The twin of ops.projected_conv with SiLU, for `few` rows of one token; all outputs in one."""
    slots = open_slots("projected_conv", rows, tails, None)
    short, data = plan(rows, slots, 1).short, slots.data
    assert taps.is_contiguous() and data.stride(2) == 1 and slots.recording is None
    return _made(x, Work(weight, Rest(
        taps=taps, tails=data, reads=short.read, writes=short.write,
        slot_stride=data.stride(0), tail_stride=data.stride(1), channels=taps.shape[1],
    )))  # fmt: skip


def _cut(x: Input, weight: Tensor) -> Cut:
    return vectors_cut(*weight.shape) if len(x) <= VECTORS else product_cut(*weight.shape)


def _made(x: Input, work: Work) -> Tensor:
    return (vectors if len(x) <= VECTORS else product)(x, work, _cut(x, work.weight))
