# mypy: allow-untyped-defs, allow-incomplete-defs
"""What is done with the sums of products of few rows: the same, whatever the weights are made of.

What an activation gates comes as one product: each output of the gate is followed by the one of up that it gates.

Of a norm, the product before it does one half: it adds the rows that it goes onto, and stores these, what the norm's
weight makes of them, and the sum of their squares. The product after it does the other: inputs may be Normed, and then
sums are divided by the root. A convolution after a product can be done by it too, where every row has one token: a
program has all that the convolution of its outputs needs.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.ops.deferred import Input, Normed
from bough.ops.quant import Chunks
from bough.ops.triton.activation import activated
from bough.ops.triton.arrivals import COUNTED, arrivals, is_last


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

    weight: Tensor | Chunks
    rest: Rest = Rest()
    activation: str | None = None


class Stored(NamedTuple):
    """What a product leaves: its outputs; or, if it was added onto rows, that, and the norm of it as Normed has it."""

    out: Tensor
    total: Tensor | None
    squares: Tensor | None


@triton.jit
def outputs_at(place, outputs, gated: tl.constexpr):
    """Which outputs programs compute at some places. Those past the last repeat it, and are not stored."""
    if gated:
        return tl.minimum(place // 2, outputs // 2 - 1) + place % 2 * (outputs // 2)
    return tl.minimum(place, outputs - 1)


@triton.jit
def ask(
    rest, first, row, rows, outputs, block: tl.constexpr, measured: tl.constexpr, kernel: tl.constexpr
):  # fmt: skip
    """What is needed beside the sums. If it is asked for before these are made, it is there by then."""
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
        slot, inside = tl.load(rest.reads + known).to(tl.int64)[None, :], (at < rest.channels)[:, None]
        place = rest.tails + slot * rest.slot_stride + at[:, None]
        for tap in tl.static_range(kernel):
            if tap < kernel - 1:
                tails += (tl.load(place + tap * rest.tail_stride, mask=inside & (slot >= 0), other=0.0),)
            taps += (tl.load(rest.taps + tap * rest.channels + at[:, None], mask=inside, other=0.0),)
    return squares, there, scale, tails, taps


@triton.jit
def _put(sums, bias, out, first, row, rows, outputs, block: tl.constexpr, activation: tl.constexpr):
    """Stores sums [block, R] of the rows [R], rounded as product, activation and what it gates are one by one."""
    if bias is not None:
        output = outputs_at(first + tl.arange(0, block), outputs, activation is not None)
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
def _convolved(
    sums, tails, taps, rest, dtype: tl.constexpr, first, row, rows, block: tl.constexpr, kernel: tl.constexpr
):  # fmt: skip
    """The sums [block, R], the first channels of which are each row's next input of a convolution, with that done."""
    tails += (sums.to(dtype),)
    channel = (first + tl.arange(0, block))[:, None]
    slot = tl.load(rest.writes + tl.minimum(row, rows - 1)).to(tl.int64)[None, :]
    mask = (channel < rest.channels) & (row < rows)[None, :] & (slot >= 0)
    place = rest.tails + slot * rest.slot_stride + channel
    y = tl.zeros_like(sums)
    tl.debug_barrier()  # all threads have their tails before any is written
    for tap in tl.static_range(kernel):
        y += tails[tap].to(tl.float32) * taps[tap]
        if tap > 0:
            tl.store(place + (tap - 1) * rest.tail_stride, tails[tap].to(dtype), mask=mask)
    return tl.where(channel < rest.channels, activated(y, "silu"), sums)


@triton.jit
def finish(
    sums, needed, rest, out, first, row, rows, outputs, inputs: tl.constexpr, block: tl.constexpr, kernel: tl.constexpr,
    activation: tl.constexpr,
):  # fmt: skip
    """Does the rest with the sums [block, R] of the rows [R], and stores what comes of it."""
    squares, there, scale, tails, taps = needed
    if rest.root is not None:  # inputs are yet to be divided by the root of their mean square
        sums *= tl.rsqrt(tl.sum(squares, 0) / inputs + rest.eps)[None, :]
    if rest.taps is not None:
        sums = _convolved(sums, tails, taps, rest, out.dtype.element_ty, first, row, rows, block, kernel)
    if rest.onto is None:
        _put(sums, rest.bias, out, first, row, rows, outputs, block, activation)
    else:
        _put_onto(sums, there, scale, rest, out, first, row, rows, outputs, block)


@triton.jit
def _place(partial, block: tl.constexpr, block_rows: tl.constexpr):
    """Where the sums of a tile's first part are, and how far it is to those of the next."""
    at = tl.arange(0, block)[:, None] * block_rows + tl.arange(0, block_rows)[None, :]
    return partial + tl.program_id(0) * (block * block_rows) + at, tl.num_programs(0) * (block * block_rows)


@triton.jit
def noted(sums, partial, arrived, block: tl.constexpr, block_rows: tl.constexpr, parts: tl.constexpr):
    """Writes down this part's sums. Whether all parts of the tile now have."""
    place, step = _place(partial, block, block_rows)
    tl.store(place + tl.program_id(1) * step, sums)
    return is_last(arrived + tl.program_id(0), parts)


@triton.jit
def gathered(partial, block: tl.constexpr, block_rows: tl.constexpr, parts: tl.constexpr):
    """The sums of all parts, in order."""
    place, step = _place(partial, block, block_rows)
    sums = tl.zeros([block, block_rows], tl.float32)
    for part in tl.static_range(parts):
        sums += tl.load(place + part * step, cache_modifier=".cg")
    return sums


def prepared(x: Input, work: Work, tiles: int) -> tuple[Tensor, Stored, dict[str, Any]]:
    """The rows that are multiplied, room for what is made of them, and what all kernels are told."""
    (outputs, inputs), rest = work.weight.shape, work.rest
    if isinstance(x, Normed):
        rest = rest._replace(root=x.squares, eps=x.eps)
        x = x.scaled
    x = x if x.stride(1) == 1 else x.contiguous()
    if (onto := rest.onto) is not None:
        assert rest.bias is None and work.activation is None and onto.stride(1) == 1
        total, squares = x.new_empty(onto.shape), x.new_empty(tiles, len(x), dtype=torch.float32)
        rest = rest._replace(onto_stride=onto.stride(0), total=total, squares=squares)
    out = x.new_empty(len(x), outputs if work.activation is None else outputs // 2)
    return x, Stored(out, rest.total, rest.squares), {
        "rest": rest, "outputs": outputs, "inputs": inputs, "activation": work.activation,
        "measured": 0 if rest.root is None else len(rest.root), "kernel": 0 if rest.taps is None else len(rest.taps),
    }  # fmt: skip


def in_parts(x: Tensor, tiles: int, parts: int, sums: int) -> dict[str, Any]:
    """What kernels are told where so many programs add up parts of the sums of a tile."""
    if parts == 1:
        return {"parts": 1, "partial": None, "arrived": None}
    assert tiles <= COUNTED
    partial = x.new_empty(parts * tiles * sums, dtype=torch.float32)
    return {"parts": parts, "partial": partial, "arrived": arrivals(x.device)}
