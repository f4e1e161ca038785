# mypy: allow-untyped-defs, allow-incomplete-defs
"""Products of few rows, which take as long as reading the weights once does.

A program computes some outputs of all rows. Of few outputs that would make too few programs to keep memory busy: there
each reads a part of the inputs, and whichever of an output's programs is done last adds up what all of them wrote
down, always in the same order. Results do not depend on timing.

What an activation gates comes as one product too: each output of the gate is followed by the one of up that it gates.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.ops.activation import Activation
from bough.ops.triton.activation import ACTIVATIONS, activated

ROWS = 32  # up to which these are faster than torch's own
VECTORS = 2  # rows up to which the arithmetic units do as well as the matrix units
OUTPUTS = 1 << 16  # up to which these are faster than torch's own
TILES = 1 << 14  # whose programs can be counted
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


@triton.jit(do_not_specialize=["rows"])
def _vectors(
    x, weight, bias, out, rows, outputs, x_stride, inputs: tl.constexpr, block: tl.constexpr,
    block_rows: tl.constexpr, span: tl.constexpr, stages: tl.constexpr, activation: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * block
    output = _outputs(first, outputs, block, activation is not None)
    weight += output.to(tl.int64)[:, None] * inputs
    ragged: tl.constexpr = inputs % span != 0
    sums = (tl.zeros([block, span // CHUNK], tl.float32),) * block_rows
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
        total = tl.sum(sums[row], 1)[:, None]
        _put(total, bias, output, out, first, row + tl.arange(0, 1), rows, outputs, block, activation)


@triton.jit
def _gathered(sums, partial, arrived, tiles, block: tl.constexpr, block_rows: tl.constexpr, parts: tl.constexpr):
    """Writes down this part's sums. Whether all parts of the tile have, and if so their sums in order, else zeros."""
    tile, at = tl.program_id(0), tl.arange(0, block)[:, None] * block_rows + tl.arange(0, block_rows)[None, :]
    place = partial + tile * (block * block_rows) + at
    step = tiles * (block * block_rows)
    tl.store(place + tl.program_id(1) * step, sums)
    tl.debug_barrier()  # all of the program's warps have stored before it says so
    last = tl.atomic_add(arrived + tile, 1) == parts - 1
    sums = tl.zeros([block, block_rows], tl.float32)
    if last:
        tl.store(arrived + tile, 0)  # as the next launch needs it
        for part in tl.static_range(parts):
            sums += tl.load(place + part * step, cache_modifier=".cg")
    return last, sums


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, weight, bias, out, partial, arrived, rows, outputs, x_stride, inputs: tl.constexpr, part: tl.constexpr,
    parts: tl.constexpr, block: tl.constexpr, block_rows: tl.constexpr, span: tl.constexpr, stages: tl.constexpr,
    activation: tl.constexpr,
):  # fmt: skip
    first, low = tl.program_id(0) * block, tl.program_id(1) * part
    output = _outputs(first, outputs, block, activation is not None)
    row = tl.arange(0, block_rows)
    weight += output.to(tl.int64)[:, None] * inputs
    x += tl.minimum(row, rows - 1)[None, :] * x_stride
    ragged: tl.constexpr = inputs % part != 0
    sums = tl.zeros([block, block_rows], tl.float32)
    for start in tl.range(0, part, span, num_stages=stages):
        at = low + start + tl.arange(0, span)
        left = at[None, :] < inputs if ragged else None
        right = at[:, None] < inputs if ragged else None
        some = tl.load(weight + at[None, :], mask=left, other=0.0 if ragged else None)
        seen = tl.load(x + at[:, None], mask=right, other=0.0 if ragged else None)
        sums = tl.dot(some, seen, sums, input_precision="ieee")
    if parts == 1:
        _put(sums, bias, output, out, first, row, rows, outputs, block, activation)
    else:
        last, sums = _gathered(sums, partial, arrived, tl.num_programs(0), block, block_rows, parts)
        if last:
            _put(sums, bias, output, out, first, row, rows, outputs, block, activation)


def _arrivals(device: torch.device) -> Tensor:
    """How many parts of each tile have been written down: none, between launches. Each stream has its own."""
    return _counters(device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)


@cache
def _counters(device: torch.device, stream: int) -> Tensor:
    assert device.type == "cpu" or not torch.cuda.is_current_stream_capturing(), "a graph would keep what is shared"
    return torch.zeros(TILES, dtype=torch.int32, device=device)


def vectors(x: Tensor, weight: Tensor, bias: Tensor | None, cut: Cut, activation: str | None = None) -> Tensor:
    """The product by the arithmetic units: a thread sums chunks of its own, and a program its threads at the end."""
    (rows, inputs), outputs = x.shape, len(weight)
    out = x.new_empty(rows, outputs if activation is None else outputs // 2)
    _vectors[(triton.cdiv(outputs, cut.outputs),)](
        x, weight, bias, out, rows, outputs, x.stride(0), inputs=inputs, block=cut.outputs,
        block_rows=triton.next_power_of_2(rows), span=cut.inputs, stages=cut.stages, activation=activation,
        num_warps=cut.warps,
    )  # fmt: skip
    return out


def product(x: Tensor, weight: Tensor, bias: Tensor | None, cut: Cut, activation: str | None = None) -> Tensor:
    """The product by the matrix units, whose left factor the weights are: there they take many rows, and few right."""
    (rows, inputs), outputs = x.shape, len(weight)
    part = triton.cdiv(triton.cdiv(inputs, cut.inputs), cut.parts) * cut.inputs
    tiles, parts = triton.cdiv(outputs, cut.outputs), triton.cdiv(inputs, part)
    block_rows = max(16, triton.next_power_of_2(rows))
    out = x.new_empty(rows, outputs if activation is None else outputs // 2)
    partial = arrived = None
    if parts > 1:
        assert tiles <= TILES
        partial = x.new_empty(parts * tiles * cut.outputs * block_rows, dtype=torch.float32)
        arrived = _arrivals(x.device)
    _product[tiles, parts](
        x, weight, bias, out, partial, arrived, rows, outputs, x.stride(0), inputs=inputs, part=part, parts=parts,
        block=cut.outputs, block_rows=block_rows, span=cut.inputs, stages=cut.stages, activation=activation,
        num_warps=cut.warps,
    )  # fmt: skip
    return out


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


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    """The twin of ops.linear, for `few` rows."""
    if len(x) <= VECTORS:
        return vectors(x, weight, bias, vectors_cut(*weight.shape), activation)
    return product(x, weight, bias, product_cut(*weight.shape), activation)


def gated_rows(x: Tensor, gate_up: Tensor, activation: Activation) -> Tensor:
    """The twin of ops.gated of the halves of ops.linear, for `few` rows and the ACTIVATIONS."""
    return few_rows(x, gate_up, None, ACTIVATIONS[activation])
