# mypy: allow-untyped-defs, allow-incomplete-defs
"""Mixtures of experts without asking the host who was chosen.

A pair is a token and one of its experts. Pairs are sorted by expert and cut into blocks of one expert each. How many
blocks that makes only the device knows, so there are as many as could be needed, and programs of those that are not do
nothing. A program computes some outputs of one block. What each pair says is written down, and then added up by token:
results do not depend on timing.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.ops.activation import Activation
from bough.ops.triton.activation import ACTIVATIONS, activated
from bough.ops.triton.plan import shared_bytes

FEW = 1024  # pairs, up to which they are sorted by comparing each with all
EACH = 32  # pairs that a program sorts


@dataclass(frozen=True)
class Tiles:
    """What a program multiplies: `outputs` of the weights with `pairs`, `inputs` of them at a time."""

    pairs: int
    outputs: int
    inputs: int
    warps: int
    stages: int


def tiles(pairs: int, experts: int, dtype: torch.dtype) -> Tiles:
    """With few pairs for each expert all is a matter of reading weights, which small tiles spread over all processors.

    Weights are the left factor, since matrix units take no fewer than 64 rows there but as few columns as there are.
    """
    if dtype == torch.float32:
        return Tiles(16, 32, 32, warps=4, stages=3)
    if pairs <= 8 * experts:
        return Tiles(16, 32 if pairs < 64 else 64, 128, warps=4, stages=4)
    if pairs <= 64 * experts:
        return Tiles(64, 128, 64, warps=4, stages=4)
    return Tiles(128, 256, 64, warps=8, stages=3)


@triton.jit(do_not_specialize=["pairs"])
def _few(expert, order, blocks, pairs, each: tl.constexpr, size: tl.constexpr, span: tl.constexpr):
    """The place of each pair in the order, and a block for each: an empty one unless the block begins with it."""
    pair = (tl.program_id(0) * each + tl.arange(0, each))[:, None]
    mine = tl.load(expert + pair, mask=pair < pairs, other=-1).to(tl.int32)
    lower, earlier, equal = tl.zeros([each], tl.int32), tl.zeros([each], tl.int32), tl.zeros([each], tl.int32)
    for start in range(0, pairs, span):
        other = (start + tl.arange(0, span))[None, :]
        theirs = tl.load(expert + other, mask=other < pairs, other=1 << 30).to(tl.int32)  # neither lower nor equal
        same = theirs == mine
        lower += tl.sum((theirs < mine).to(tl.int32), 1)
        earlier += tl.sum((same & (other < pair)).to(tl.int32), 1)
        equal += tl.sum(same.to(tl.int32), 1)
    place, inside = (lower + earlier)[:, None], pair < pairs
    count = tl.where(earlier % size == 0, tl.minimum(equal - earlier, size), 0)[:, None]
    tl.store(order + place, pair, mask=inside)
    tl.store(blocks + 3 * pair, mine, mask=inside)
    tl.store(blocks + 3 * pair + 1, place, mask=inside)
    tl.store(blocks + 3 * pair + 2, count, mask=inside)


def _many(expert: Tensor, experts: int, size: int) -> tuple[Tensor, Tensor]:
    """As `_few`; each expert has the blocks that it needs, one after the other, and the empty ones are at the end."""
    ordered, order = expert.sort(stable=True)
    most = min(len(expert), experts)
    block = torch.arange(most + (len(expert) - most) // size, dtype=torch.int32, device=expert.device)
    bounds = torch.searchsorted(ordered, torch.arange(experts + 1, device=expert.device), out_int32=True)
    needed = (bounds.diff() + size - 1) // size
    ends = needed.cumsum(0, dtype=torch.int32)
    whose = torch.searchsorted(ends, block, right=True, out_int32=True).clamp(max=experts - 1)
    start = bounds[whose] + (block - (ends - needed)[whose]) * size
    count = (bounds[1:][whose] - start).clamp(0, size)
    return order, torch.stack([whose, start, count], 1)


def schedule(expert: Tensor, experts: int, size: int) -> tuple[Tensor, Tensor]:
    """The pairs sorted by `expert` [P], and blocks [B, 3] of up to `size`: whose it is, where it starts, how many."""
    pairs = len(expert)
    if pairs > FEW:
        return _many(expert, experts, size)
    order, blocks = (expert.new_empty(shape, dtype=torch.int32) for shape in ((pairs,), (pairs, 3)))
    _few[(triton.cdiv(pairs, EACH),)](expert, order, blocks, pairs, each=EACH, size=size, span=64, num_warps=4)
    return order, blocks


@triton.jit
def _product(x, row, weight, output, inputs: tl.constexpr, tile: tl.constexpr, pairs: tl.constexpr,
             span: tl.constexpr):  # fmt: skip
    """Rows `output` [tile] of the weight times rows `row` [pairs] of x: [tile, pairs], rounded."""
    at = tl.arange(0, span)
    left = weight + output[:, None] * inputs + at[None, :]
    right = x + row.to(tl.int64)[None, :] * inputs + at[:, None]
    whole: tl.constexpr = inputs % span == 0
    sums = tl.zeros([tile, pairs], tl.float32)
    for start in range(0, inputs, span):
        inside = (at < inputs - start) | whole
        some = tl.load(left + start, mask=inside[None, :], other=0.0)
        sums = tl.dot(some, tl.load(right + start, mask=inside[:, None], other=0.0), sums, input_precision="ieee")
    return sums.to(x.dtype.element_ty)


@triton.jit
def _gate_up(
    x, weights, order, blocks, out, chosen: tl.constexpr, activation: tl.constexpr,
    hidden: tl.constexpr, width: tl.constexpr, pairs: tl.constexpr, tile: tl.constexpr, span: tl.constexpr,
):  # fmt: skip
    """activation(gate x) · up x [P, width] of the pairs in order."""
    block = blocks + 3 * tl.program_id(1)
    expert, start, count = tl.load(block).to(tl.int64), tl.load(block + 1), tl.load(block + 2)
    if count == 0:
        return
    half: tl.constexpr = tile // 2
    first, row = tl.program_id(0) * half, tl.arange(0, tile)
    # Each output of the gate is followed by the one of up that it gates. Outputs past the last, as pairs past the last,
    # repeat one that is there and are not stored.
    output = tl.minimum(first + row // 2, width - 1) + row % 2 * width
    at = tl.arange(0, pairs)
    token = tl.load(order + start + tl.minimum(at, count - 1)) // chosen
    both = _product(x, token, weights + expert * 2 * width * hidden, output, hidden, tile, pairs, span)
    gate, up = tl.split(tl.permute(tl.reshape(both, [half, 2, pairs]), [0, 2, 1]))
    gate = activated(gate.to(tl.float32), activation).to(both.dtype).to(tl.float32)
    column, place = first + tl.arange(0, half)[:, None], (start + at).to(tl.int64)[None, :]
    mask = (column < width) & (at[None, :] < count)
    tl.store(out + place * width + column, gate * up.to(tl.float32), mask=mask)


@triton.jit
def _down(
    x, weights, share, order, blocks, out,
    hidden: tl.constexpr, width: tl.constexpr, pairs: tl.constexpr, tile: tl.constexpr, span: tl.constexpr,
):  # fmt: skip
    """share · down x [P, hidden], of the pairs as they were before they were put in order."""
    block = blocks + 3 * tl.program_id(1)
    expert, start, count = tl.load(block).to(tl.int64), tl.load(block + 1), tl.load(block + 2)
    if count == 0:
        return
    column, at = tl.program_id(0) * tile + tl.arange(0, tile), tl.arange(0, pairs)
    output, row = tl.minimum(column, hidden - 1), start + tl.minimum(at, count - 1)
    said = _product(x, row, weights + expert * hidden * width, output, width, tile, pairs, span).to(tl.float32)
    pair = tl.load(order + row).to(tl.int64)
    said *= tl.load(share + pair).to(tl.float32)[None, :]
    mask = (column[:, None] < hidden) & (at[None, :] < count)
    tl.store(out + pair[None, :] * hidden + column[:, None], said, mask=mask)


def experts(x: Tensor, share: Tensor, expert: Tensor, gate_up: Tensor, down: Tensor, activation: Activation) -> Tensor:
    """The twin of ops.experts for weights that lie in one tensor, and the ACTIVATIONS."""
    (tokens, chosen), (count, hidden, width) = expert.shape, down.shape
    if tokens == 0:
        return torch.zeros_like(x)
    assert gate_up.is_contiguous() and down.is_contiguous()
    x, share, pairs = x.contiguous(), share.contiguous(), tokens * chosen
    tile = tiles(pairs, count, x.dtype)
    order, blocks = schedule(expert.flatten(), count, tile.pairs)
    shape = {"hidden": hidden, "width": width, "pairs": tile.pairs, "tile": tile.outputs, "span": tile.inputs}
    fit = shared_bytes(x.device) // ((tile.pairs + tile.outputs) * tile.inputs * x.dtype.itemsize)
    options = {"num_warps": tile.warps, "num_stages": max(1, min(tile.stages, fit))}
    inner, said = x.new_empty(pairs, width), x.new_empty(tokens, chosen, hidden)
    _gate_up[triton.cdiv(2 * width, tile.outputs), len(blocks)](
        x, gate_up, order, blocks, inner, chosen=chosen, activation=ACTIVATIONS[activation], **shape, **options
    )
    _down[triton.cdiv(hidden, tile.outputs), len(blocks)](inner, down, share, order, blocks, said, **shape, **options)
    return said.sum(1)
