# mypy: allow-untyped-defs, allow-incomplete-defs
"""Products of few rows with weights of 8 or 4 bits, which are read once; and weights in full.

What bounds them is how many instructions a weight takes, and how soon all that is to be read is asked for. So a thread
loads the very weights that the matrix units take from it, and loads many before it begins: none pass through shared
memory.

Of several rows, weights are made in full (codes.py). A row alone leaves seven eighths of the matrix units idle, so they
sum the chunks of its inputs apart, each in a column of its own, and scales are applied to the sums.

Every row's sums are of the same cuts in the same order, whatever rows are beside it and however programs are timed.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.ops.deferred import Input
from bough.ops.quant import HALVES, Chunks
from bough.ops.triton.codes import added, has_ptx, numbers, weights
from bough.ops.triton.follow import follow, following, lead
from bough.ops.triton.rest import Stored, Work, ask, finish, gathered, in_parts, noted, outputs_at, prepared

ROWS = 32  # up to which this is faster than to expand the weights and have torch multiply


class Cut(NamedTuple):
    """How a product is cut into programs."""

    outputs: int  # of a program
    warps: int  # that its inputs are cut among
    times: int  # that it multiplies eight chunks of each output and warp, before it begins again
    ahead: int  # times that it has loaded before it multiplies
    parts: int = 1  # that the inputs are cut into
    registers: int | None = None  # that a thread may use: with fewer, more programs run at a time


@triton.jit
def _operand(tile):
    """[4, 8, warps, N, 8] as [warps, N · 8, 4 · 8], where the matrix units take what threads load.

    They take two neighbours of each of four threads, the next two of each, and so on.
    """
    warps: tl.constexpr = tile.shape[2]
    several: tl.constexpr = tile.shape[3]
    tile = tl.permute(tl.reshape(tile, [4, 8, warps, several, 4, 2]), [2, 3, 1, 4, 0, 5])
    return tl.reshape(tile, [warps, several * 8, 32])


@triton.constexpr_function
def _turns(time, span, every, once):
    """How often four chunks for each warp are there at a time: the last one may have them once."""
    return 1 if once and time * span + span // 2 >= every else 2


@triton.constexpr_function
def _is_ragged(span, every, once):
    """Whether a thread may have no chunk to load."""
    return not once or every % (span // 2) != 0


@triton.jit
def _across(several: tl.constexpr):
    """0, 1, 2 ... as they lie across threads: [1, 8, 1, several, 1]."""
    lane, more = tl.arange(0, 8)[None, :, None, None, None], tl.arange(0, several)[None, None, None, :, None]
    return lane + 8 * more


@triton.jit
def _along(warps: tl.constexpr):
    """Of which chunks each thread loads the first, from a program's first on: [4, 1, warps, 1, 1]."""
    return tl.arange(0, 4)[:, None, None, None, None] + 4 * tl.arange(0, warps)[None, None, :, None, None]


@triton.jit
def _loaded(
    words, steps, start, chunk, end, span: tl.constexpr, turns: tl.constexpr, group: tl.constexpr, bits: tl.constexpr,
    ragged: tl.constexpr,
):  # fmt: skip
    """Halves and steps of four chunks for each warp, once or twice. Zeros from the end on."""
    some: tl.tuple = ()
    for turn in tl.static_range(turns):
        at = start + turn * span // 2
        inside, other = (at + chunk < end, 0) if ragged else (None, None)
        some += (tl.load(words + at * 8, mask=inside, other=other, eviction_policy="evict_first"),)
        place = (at + chunk) // group * (8 // bits)
        some += (tl.load(steps + place, mask=inside, other=other, eviction_policy="evict_first"),)
    return some


@triton.jit
def _spread(first, second):
    """Of two turns [4, 8, warps, N] the columns [warps, N · 8, 8] in which a row alone is summed."""
    both = tl.permute(tl.join(first, second), [2, 3, 1, 0, 4])
    return tl.reshape(both, [both.shape[0], both.shape[1] * 8, 8])


@triton.jit
def _inputs(x, start, chunk, end, span: tl.constexpr, turns: tl.constexpr, bits: tl.constexpr):
    """What a row alone is multiplied by at a time: each chunk's inputs in a column of their own, zeros elsewhere."""
    column = _across(1)  # two next to each other are the two turns of a chunk
    at = start + column % 2 * (span // 2)
    own = (column // 2 == tl.arange(0, 4)[:, None, None, None, None]) & (column % 2 < turns) & (at + chunk < end)
    seen: tl.tuple = ()
    for place in tl.static_range(16 // bits):
        seen += (tl.load(x + at * (128 // bits) + 8 * place, mask=own, other=0.0),)
    return seen


@triton.jit
def _summed(total, seen, some, turns: tl.constexpr, bits: tl.constexpr, ptx: tl.constexpr):
    """Adds what was loaded, times a row alone, to total [warps, outputs, columns]."""
    warps: tl.constexpr = total.shape[0]
    several: tl.constexpr = total.shape[1] // 16
    dtype: tl.constexpr = seen[0].dtype
    ones = tl.full([warps, 16, 32], 1.0, dtype)
    first, second, whole = tl.zeros_like(total), tl.zeros_like(total), tl.zeros([warps, 16, 8], tl.float32)
    for place in tl.static_range(16 // bits):
        right = tl.permute(_operand(seen[place]), [0, 2, 1])
        whole = tl.dot(ones, right, whole)
        for nibble in tl.static_range(bits // 4):
            first = tl.dot(
                _operand(numbers(some[0], bits // 4 * place + nibble, nibble == 1, dtype, ptx)), right, first
            )
            if turns == 2:
                number = numbers(some[2], bits // 4 * place + nibble, nibble == 1, dtype, ptx)
                second = tl.dot(_operand(number), right, second)
    sums = tl.where(tl.arange(0, 8)[None, None, :] % 2 == 0, first, second)  # the others are no sums of anything
    one, other = some[1].to(tl.float32), some[2 * turns - 1].to(tl.float32)
    if bits == 4:
        one, zero = tl.split(one)
        other, zeros = tl.split(other)
        step, shift = _spread(one, other), _spread(zero, zeros)
    else:
        step, shift = _spread(tl.reshape(one, one.shape[:4]), tl.reshape(other, other.shape[:4])), 0.0
    whole = tl.broadcast_to(whole[:, None, :, :], [warps, several, 16, 8])
    whole = tl.reshape(whole, [warps, several * 16, 8])
    return total + sums * step + whole * (shift - added(dtype, bits) * step)


@triton.jit
def _multiplied(
    sums, x, start, there, chunk, end, some, span: tl.constexpr, turns: tl.constexpr, bits: tl.constexpr,
    ptx: tl.constexpr,
):  # fmt: skip
    """Adds what was loaded, times several rows, to sums [warps, outputs, rows]."""
    for turn in tl.static_range(turns):
        at = start + turn * span // 2
        for place in tl.static_range(16 // bits):
            seen = tl.load(x + at * (128 // bits) + 8 * place, mask=there & (at + chunk < end), other=0.0)
            weight = _operand(weights(some[2 * turn], some[2 * turn + 1], place, bits, ptx))
            sums = tl.dot(weight, tl.permute(_operand(seen), [0, 2, 1]), sums, input_precision="ieee")
    return sums


@triton.jit
def _round(
    sums, some, x, there, words, steps, start, chunk, end, every: tl.constexpr, span: tl.constexpr, times: tl.constexpr,
    ahead: tl.constexpr, group: tl.constexpr, bits: tl.constexpr, once: tl.constexpr, ptx: tl.constexpr,
):  # fmt: skip
    """Multiplies so many times, and loads as often, if there is more to come."""
    for time in tl.static_range(times):
        now = start + time * span
        if there is None:
            seen = _inputs(x, now, chunk, end, span, _turns(time, span, every, once), bits)
            sums = _summed(sums, seen, some, _turns(time, span, every, once), bits, ptx)
        else:
            sums = _multiplied(
                sums, x, now, there, chunk, end, some, span, _turns(time, span, every, once), bits, ptx
            )  # fmt: skip
        some = some[2 * _turns(time, span, every, once) :]
        if not once or time + ahead < times:
            some += _loaded(
                words, steps, now + span * ahead, chunk, end, span, _turns(time + ahead, span, every, once), group,
                bits, _is_ragged(span, every, once),
            )  # fmt: skip
            tl.debug_barrier()  # as before the first
    return sums, some


@triton.jit
def _rounds(
    sums, some, x, there, words, steps, low, chunk, end, every: tl.constexpr, part: tl.constexpr, span: tl.constexpr,
    times: tl.constexpr, ahead: tl.constexpr, group: tl.constexpr, bits: tl.constexpr, once: tl.constexpr,
    ptx: tl.constexpr,
):  # fmt: skip
    """All rounds of a part."""
    if once:
        sums, some = _round(
            sums, some, x, there, words, steps, low, chunk, end, every, span, times, ahead, group, bits, once, ptx
        )  # fmt: skip
    else:
        for start in tl.range(low, low + part, span * times, num_stages=1):
            sums, some = _round(
                sums, some, x, there, words, steps, start, chunk, end, every, span, times, ahead, group, bits, once, ptx
            )  # fmt: skip
    return sums


@triton.jit
def _plain(
    x, plain, out, rest, first, rows, outputs, coded, x_stride, inputs: tl.constexpr, measured: tl.constexpr,
    kernel: tl.constexpr, block: tl.constexpr, block_rows: tl.constexpr, follows: tl.constexpr,
):  # fmt: skip
    """The products of several rows with some outputs whose weights have not been quantised."""
    output = outputs_at(first + tl.arange(0, block), outputs, False).to(tl.int64)
    plain += (output - coded)[:, None] * inputs
    row = tl.arange(0, block_rows)
    follow(follows)
    needed = ask(rest, first, row, rows, outputs, block, measured, kernel)
    sums = tl.zeros([block, block_rows], tl.float32)
    for start in tl.range(0, inputs, 128, num_stages=5):
        at = start + tl.arange(0, 128)
        some = tl.load(plain + at[None, :], mask=at[None, :] < inputs, other=0.0)
        there = (row < rows)[None, :] & (at[:, None] < inputs)
        seen = tl.load(x + row[None, :] * x_stride + at[:, None], mask=there, other=0.0)
        sums = tl.dot(some, seen, sums, input_precision="ieee")
    finish(sums, needed, rest, out, first, row, rows, outputs, inputs, block, kernel, None)


@triton.jit
def _plain_alone(
    x, plain, out, rest, first, outputs, coded, inputs: tl.constexpr, measured: tl.constexpr, kernel: tl.constexpr,
    block: tl.constexpr, span: tl.constexpr, follows: tl.constexpr,
):  # fmt: skip
    """The products of a row alone with some of these outputs."""
    output = outputs_at(first + tl.arange(0, block), outputs, False).to(tl.int64)
    plain += (output - coded)[:, None] * inputs
    at = tl.arange(0, span)[None, :]
    some = tl.load(plain + at, mask=at < inputs, other=0.0)
    tl.debug_barrier()  # as for those that have been quantised
    follow(follows)
    needed = ask(rest, first, tl.arange(0, 1), 1, outputs, block, measured, kernel)
    sums = tl.zeros([block, span // 8], tl.float32)
    for start in tl.range(0, inputs, span, num_stages=1):
        here, ahead = start + at, start + span + at
        seen = tl.load(x + here, mask=here < inputs, other=0.0).to(tl.float32)
        sums += tl.sum(tl.reshape(some.to(tl.float32) * seen, [block, span // 8, 8]), 2)
        some = tl.load(plain + ahead, mask=ahead < inputs, other=0.0)
    total = tl.sum(sums, 1)[:, None]
    finish(total, needed, rest, out, first, tl.arange(0, 1), 1, outputs, inputs, block, kernel, None)


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, data, steps, plain, out, rest, partial, arrived, rows, outputs, coded, x_stride, inputs: tl.constexpr,
    measured: tl.constexpr, kernel: tl.constexpr, group: tl.constexpr, bits: tl.constexpr, part: tl.constexpr,
    parts: tl.constexpr, block: tl.constexpr, block_rows: tl.constexpr, warps: tl.constexpr, times: tl.constexpr,
    ahead: tl.constexpr, beside: tl.constexpr, activation: tl.constexpr, ptx: tl.constexpr, follows: tl.constexpr,
):  # fmt: skip
    lead(follows)
    every: tl.constexpr = inputs * bits // 128
    span: tl.constexpr = 2 * 4 * warps
    alone: tl.constexpr = block_rows == 1
    tile = tl.program_id(0) - tl.cdiv(outputs - coded, beside)  # what takes longest comes first
    if plain is None or tile >= 0:
        first, low = tile * block, tl.program_id(1) * part
        output = outputs_at(first + _across(block // 8), coded, activation is not None).to(tl.int64)
        chunk, end = _along(warps), tl.minimum(low + part, every)
        once: tl.constexpr = part == span * times and parts == 1
        words = data + (output * every + chunk) * 8 + tl.arange(0, 8)[None, None, None, None, :]
        each = steps + output * (every // group * (8 // bits)) + tl.arange(0, 8 // bits)[None, None, None, None, :]
        some: tl.tuple = ()
        for time in tl.static_range(ahead):
            some += _loaded(
                words, each, low + time * span, chunk, end, span, _turns(time, span, every, once), group, bits,
                _is_ragged(span, every, once),
            )  # fmt: skip
        tl.debug_barrier()  # else the compiler would load when they are used, for which it needs fewer registers
        follow(follows)
        row = tl.arange(0, block_rows)
        at = chunk * (128 // bits) + tl.arange(0, 8)[None, None, None, None, :]
        if alone:
            needed = ask(rest, first, row, rows, outputs, block, measured, kernel)
            sums = tl.zeros([warps, block, 8], tl.float32)
            seen, there = x + at + 0 * _across(1), None
        else:
            needed = None
            sums = tl.zeros([warps, block, block_rows], tl.float32)
            seen, there = x + at + _across(block_rows // 8) * x_stride, _across(block_rows // 8) < rows
        sums = _rounds(
            sums, some, seen, there, words, each, low, chunk, end, every, part, span, times, ahead, group, bits, once,
            ptx,
        )  # fmt: skip
        if alone:
            sums = tl.sum(sums, 2)[:, :, None]
        sums = tl.sum(sums, 0)
        last = True
        if parts > 1:
            last = noted(sums, partial, arrived, block, block_rows, parts)
        if last:
            if not alone:  # now that registers are free for it
                needed = ask(rest, first, row, rows, outputs, block, measured, kernel)
            if parts > 1:
                sums = gathered(partial, block, block_rows, parts)
            finish(sums, needed, rest, out, first, row, rows, outputs, inputs, block, kernel, activation)
    elif tl.program_id(1) > 0:
        follow(follows)
    else:
        first = coded + tl.program_id(0) * beside
        if alone:
            _plain_alone(
                x, plain, out, rest, first, outputs, coded, inputs, measured, kernel, beside, 512 * warps, follows
            )  # fmt: skip
        else:
            _plain(
                x, plain, out, rest, first, rows, outputs, coded, x_stride, inputs, measured, kernel, beside,
                block_rows, follows,
            )  # fmt: skip


@triton.jit
def _expand(
    data, steps, out, outputs, inputs: tl.constexpr, group: tl.constexpr, bits: tl.constexpr, block: tl.constexpr,
    chunks: tl.constexpr, ptx: tl.constexpr,
):  # fmt: skip
    every: tl.constexpr = inputs * bits // 128
    output = (tl.program_id(0) * block + tl.arange(0, block))[None, :, None, None, None]
    chunk = (tl.program_id(1) * chunks + tl.arange(0, chunks))[:, None, None, None, None]
    inside, eight = (output < outputs) & (chunk < every), tl.arange(0, 8)[None, None, None, None, :]
    place = output.to(tl.int64) * every + chunk
    half = tl.load(data + place * 8 + eight, mask=inside, other=0)
    two = tl.arange(0, 8 // bits)[None, None, None, None, :]
    step = tl.load(steps + place // group * (8 // bits) + two, mask=inside, other=0.0)
    to = out + place * (128 // bits) + eight
    for index in tl.static_range(16 // bits):
        tl.store(to + 8 * index, weights(half, step, index, bits, ptx), mask=inside)


def made(x: Input, work: Work) -> Stored:
    """The product of up to ROWS."""
    assert isinstance(work.weight, Chunks)
    (outputs, inputs), halves = work.weight.shape, work.weight.data.shape[1]
    if work.weight.steps.dtype == torch.float32:  # which takes much room
        return product(x, work, Cut(16, 2, 1, 1))
    return product(x, work, cut(outputs, halves // HALVES, 16 * halves // inputs, len(x)))


def cut(outputs: int, chunks: int, bits: int, rows: int) -> Cut:
    """Of many outputs, programs that use few registers, so that others begin early; of few, ones that load much."""
    if outputs >= 8192:
        if rows == 1 and bits == 8:
            return Cut(16, 4, 5, 5)
        if rows == 1 and outputs <= 6 * 132 * 16 and chunks <= 80:  # six programs a processor leave room to load more
            return Cut(16, 2, 5, 3, 1, 168)
        if rows <= 8:
            return Cut(16, 2, 1, 1, 1, 96 if outputs >= 16384 else 104)
        return Cut(32, 4, *((1, 1) if rows > 16 else (3, 2) if bits == 4 else (5, 1)))
    if rows <= 8:
        if bits == 8 and chunks > 256:
            return Cut(16, 8, 3, 3, triton.cdiv(chunks, 192))
        if rows == 1 and bits == 4 and 128 < chunks <= 288:  # as many programs as there are processors, and more
            times = triton.cdiv(chunks, 32)
            return Cut(16, 4, times, min(5, times))
        times = min(5, triton.cdiv(chunks, 64))
        return Cut(16 if times <= 2 or rows > 1 else 32, 8, times, times)
    if bits == 4 and chunks <= 128 and rows <= 16:
        return Cut(32, 8, 2, 2)
    times = 1 if rows > 16 else 3 if bits == 4 else 2
    return Cut(32, 4, times, min(2, times), triton.cdiv(chunks, 96 if bits == 4 else 64))


def product(x: Input, work: Work, cut: Cut) -> Stored:
    assert isinstance(work.weight, Chunks)
    coded, every = len(work.weight.data), work.weight.data.shape[1] // HALVES
    times = min(cut.times, triton.cdiv(every, 8 * cut.warps))
    span = 8 * cut.warps * times
    part = triton.cdiv(triton.cdiv(every, span), cut.parts) * span
    parts = triton.cdiv(every, part)
    alone = len(x) == 1 and work.weight.steps.dtype != torch.float32
    beside = 4 if alone else 16  # outputs of a program whose weights have not been quantised
    tiles = triton.cdiv(coded, cut.outputs) + triton.cdiv(work.weight.shape[0] - coded, beside)
    block_rows = 1 if alone else max(8, triton.next_power_of_2(len(x)))
    x, stored, told = prepared(x, work, tiles)
    _product[tiles, parts](
        x, data=work.weight.data, steps=work.weight.steps, plain=work.weight.beside, out=stored.out, rows=len(x),
        coded=coded, x_stride=x.stride(0), part=part, block=cut.outputs, block_rows=block_rows, warps=cut.warps,
        times=times, ahead=min(cut.ahead, times), beside=beside, num_warps=cut.warps, maxnreg=cut.registers,
        ptx=has_ptx(x.device),
        **told, **_groups(work.weight), **following(x.device), **in_parts(x, tiles, parts, cut.outputs * block_rows),
    )  # fmt: skip
    return stored


def expanded(weight: Chunks) -> Tensor:
    """The twin of Chunks.expanded."""
    outputs, inputs = weight.shape
    out = weight.steps.new_empty(outputs, inputs)
    grid = triton.cdiv(outputs, 16), triton.cdiv(weight.data.shape[1], 32 * HALVES)
    _expand[grid](
        weight.data, weight.steps, out, outputs, inputs=inputs, **_groups(weight), block=16, chunks=32,
        ptx=has_ptx(weight.data.device),
    )  # fmt: skip
    return out


def _groups(weight: Chunks) -> dict[str, int]:
    """What kernels are told of its codes."""
    data, steps = weight.data, weight.steps
    return {"bits": 8 // steps.shape[2], "group": data.shape[1] // HALVES // steps.shape[1]}
