# mypy: allow-untyped-defs, allow-incomplete-defs
"""Products of few rows with weights of 8 or 4 bits, which are read once; and weights in full.

What bounds them is how many instructions a weight takes, and how soon all that is to be read is asked for. So codes
become numbers by masking alone: bits of a word below 2**24, read as float32, are that integer times 2**-149 (a
denormal, which the processors multiply at full rate). The powers of two that this and a code's place in its word make
are taken out again where it costs little: from the inputs where they are few, else from the scales. All are exact.
And a thread loads chunks that it also multiplies, several before it begins: none pass through shared memory.

Every row's sums are of the same cuts in the same order, whatever rows are beside it and however programs are timed.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from bough.ops.deferred import Input
from bough.ops.quant import Chunks
from bough.ops.triton.follow import follow, following, lead
from bough.ops.triton.rest import Stored, Work, ask, finish, gathered, in_parts, noted, outputs_at, prepared

ROWS = 64  # up to which the weights are read as they are
WORDS = tl.constexpr(4)  # of a chunk
STEP = 4  # chunks, of which the matrix units multiply a plane at a time
INTEGER = tl.constexpr(2.0**69)  # with LIFT the 2**149 of an integer that is read as a number: no float32 has it whole
LIFT = tl.constexpr(80)
LOW = tl.constexpr(2.0**-60)  # of weights while they are multiplied, so that none of the factors leaves the range


class Cut(NamedTuple):
    """How a product is cut into programs."""

    outputs: int  # of a program
    chunks: int  # of each that it multiplies at a time
    ahead: int  # times that it loads before it multiplies
    warps: int = 1
    parts: int = 1  # that the inputs are cut into
    registers: int | None = None  # that a thread may use: with fewer, more programs run at a time


@triton.jit
def _weights_at(data, steps, output, chunk, every: tl.constexpr, group: tl.constexpr, bits: tl.constexpr):
    """Where the first words [chunks, *outputs, WORDS] and steps [chunks, *outputs, 1 or 2] are."""
    place = (output * every)[None, :, :] + chunk[:, None, None]
    words = data + place[:, :, :, None] * WORDS + tl.arange(0, WORDS)[None, None, None, :]
    place = (output * (every // group))[None, :, :] + chunk[:, None, None] // group
    return words, steps + place[:, :, :, None] * (8 // bits) + tl.arange(0, 8 // bits)[None, None, None, :]


@triton.jit
def _loaded(words, steps, start, chunk, end, group: tl.constexpr, bits: tl.constexpr):
    """Words and steps of the chunks from start on. Zeros from the end on."""
    inside = (start + chunk < end)[:, None, None, None]
    word = tl.load(words + start * WORDS, mask=inside, other=0).to(tl.uint32, bitcast=True)
    return word, tl.load(steps + start // group * (8 // bits), mask=inside, other=0)


@triton.jit
def _ahead(
    words, steps, start, chunk, end, chunks: tl.constexpr, ahead: tl.constexpr, group: tl.constexpr, bits: tl.constexpr
):
    """The same so many times."""
    some = _loaded(words, steps, start, chunk, end, group, bits)
    for time in tl.static_range(1, ahead):
        some += _loaded(words, steps, start + time * chunks, chunk, end, group, bits)
    tl.debug_barrier()  # else the compiler would load when they are used, for which it needs fewer registers
    return some


@triton.jit
def _scale(steps, bits: tl.constexpr):
    """step and shift [chunks, *outputs]: a weight is code · step + shift."""
    steps = steps.to(tl.float32)
    if bits == 8:
        step = tl.reshape(steps, steps.shape[:3])
        shift = step * -128.0
    else:
        step, zero = tl.split(steps)
        shift = zero - 8.0 * step
    return step, shift


@triton.jit
def _inputs_at(x, chunk, bits: tl.constexpr):
    """Where the first of each row's inputs [chunks, rows, 1, 2 · WORDS] are."""
    at = (chunk * (128 // bits))[:, None, None, None] + tl.arange(0, 2 * WORDS)[None, None, None, :]
    return x[None, :, None, None] + at


@triton.jit
def _inputs(x, start, chunk, pair: tl.constexpr, bits: tl.constexpr, every: tl.constexpr, ragged: tl.constexpr):
    """What the codes at two neighbouring places in their words are multiplied with: each [chunks, rows, 1, WORDS]."""
    inside = (start + chunk < every)[:, None, None, None] if ragged else None
    x += start * (128 // bits) + 2 * WORDS * pair
    both = tl.load(x, mask=inside, other=0.0 if ragged else None)
    both = tl.reshape(both, [both.shape[0], both.shape[1], 1, 2, WORDS])
    return tl.split(tl.permute(both, [0, 1, 2, 4, 3]))


@triton.constexpr_function
def _place(plane, bits):
    """Where the codes of a plane are in what they are masked from."""
    return plane * bits - (8 if plane * bits + bits > 24 else 0)


@triton.jit
def _code(word, plane: tl.constexpr, bits: tl.constexpr):
    """The codes at one place in their words as numbers, times 2**(_place - 149)."""
    at: tl.constexpr = _place(plane, bits)
    code = (word if at == plane * bits else word >> 8) & ((1 << bits) - 1 << at)
    return code.to(tl.float32, bitcast=True)


@triton.jit
def _summed(x, start, chunk, word, steps, bits: tl.constexpr, every: tl.constexpr, ragged: tl.constexpr):
    """The sums [chunks, *outputs] of one row."""
    sums = tl.zeros(word.shape, tl.float32)
    whole = tl.zeros([word.shape[0], word.shape[1], 1, WORDS], tl.float32)
    for pair in tl.static_range(16 // bits):
        both = _inputs(x, start, chunk, pair, bits, every, ragged)
        for half in tl.static_range(2):
            seen = both[half].to(tl.float32)
            whole += seen
            sums += _code(word, 2 * pair + half, bits) * (seen * 2.0 ** (LIFT - _place(2 * pair + half, bits)))
    step, shift = _scale(steps, bits)
    return tl.sum(sums, 3) * (step * INTEGER) + tl.sum(whole, 3) * shift


@triton.jit
def _plain_vector(
    x, plain, out, rest, tile, outputs, coded, inputs: tl.constexpr, measured: tl.constexpr, kernel: tl.constexpr,
    block: tl.constexpr, span: tl.constexpr,
):  # fmt: skip
    """The products of one row with some of the weights that have not been quantised."""
    first, row = coded + tile * block, tl.arange(0, 1)
    output = outputs_at(first + tl.arange(0, block), outputs, False).to(tl.int64)
    needed = ask(rest, first, row, 1, outputs, block, measured, kernel)
    sums = tl.zeros([block, span // 8], tl.float32)
    for start in tl.range(0, inputs, span, num_stages=1):
        at = start + tl.arange(0, span)[None, :]
        some = tl.load(plain + (output - coded)[:, None] * inputs + at, mask=at < inputs, other=0.0).to(tl.float32)
        seen = tl.load(x + at, mask=at < inputs, other=0.0).to(tl.float32)
        sums += tl.sum(tl.reshape(some * seen, [block, span // 8, 8]), 2)
    total = tl.sum(sums, 1)[:, None]
    finish(total, needed, rest, out, first, row, 1, outputs, inputs, block, kernel, None)


@triton.jit
def _vector(
    x, data, steps, plain, out, rest, outputs, coded, inputs: tl.constexpr, measured: tl.constexpr,
    kernel: tl.constexpr, group: tl.constexpr, bits: tl.constexpr, block: tl.constexpr, chunks: tl.constexpr,
    ahead: tl.constexpr, warps: tl.constexpr, activation: tl.constexpr, follows: tl.constexpr,
):  # fmt: skip
    lead(follows)
    every: tl.constexpr = inputs * bits // 128
    ragged: tl.constexpr = every % (chunks * ahead) != 0
    abreast: tl.constexpr = 32 * warps // chunks  # outputs of which the threads load chunks at once
    tile, tiles, row = tl.program_id(0), tl.cdiv(coded, block), tl.arange(0, 1)
    if plain is None or tile < tiles:
        first = tile * block
        output = outputs_at(first + tl.arange(0, block), coded, activation is not None).to(tl.int64)
        chunk = tl.arange(0, chunks)
        placed = tl.reshape(output, [abreast, block // abreast])
        words, each = _weights_at(data, steps, placed, chunk, every, group, bits)
        some = _ahead(words, each, 0, chunk, every, chunks, ahead, group, bits)
        follow(follows)
        needed = ask(rest, first, row, 1, outputs, block, measured, kernel)
        seen = _inputs_at(x + tl.zeros([abreast], tl.int32), chunk, bits)
        sums = tl.zeros([chunks, abreast, block // abreast], tl.float32)
        for start in tl.range(0, every, chunks * ahead, num_stages=1):
            for time in tl.static_range(ahead):
                word, scales, at = some[2 * time], some[2 * time + 1], start + time * chunks
                sums += _summed(seen, at, chunk, word, scales, bits, every, ragged)
            some = _ahead(words, each, start + chunks * ahead, chunk, every, chunks, ahead, group, bits)
        total = tl.reshape(tl.sum(sums, 0), [block, 1])
        finish(total, needed, rest, out, first, row, 1, outputs, inputs, block, kernel, activation)
    elif plain is not None:  # as many bytes of these
        follow(follows)
        _plain_vector(
            x, plain, out, rest, tile - tiles, outputs, coded, inputs, measured, kernel, block // 4, 1024 * warps
        )  # fmt: skip


@triton.jit
def _plane(tile):
    """[STEP, n, 1, WORDS] as [n, STEP · WORDS], in the order in which the matrix units take what threads load."""
    tile = tl.permute(tl.reshape(tile, [tile.shape[0], tile.shape[1], 2, 2]), [1, 2, 0, 3])
    return tl.reshape(tile, [tile.shape[0], tile.shape[1] * tile.shape[2] * tile.shape[3]])


@triton.jit
def _multiplied(sums, x, start, chunk, word, steps, bits: tl.constexpr, every: tl.constexpr, ragged: tl.constexpr):
    """Adds LOW · the products of a step's chunks to sums [outputs, rows]."""
    narrow: tl.constexpr = x.dtype.element_ty == tl.float16  # which has no range for low weights
    step, shift = _scale(steps, bits)
    step, shift = (step * (INTEGER * LOW))[:, :, :, None], (shift * LOW)[:, :, :, None]
    for pair in tl.static_range(16 // bits):
        both = _inputs(x, start, chunk, pair, bits, every, ragged)
        for half in tl.static_range(2):
            scaled = step * 2.0 ** (LIFT - _place(2 * pair + half, bits))
            weight = _code(word, 2 * pair + half, bits) * scaled + shift
            if narrow:
                weight *= 1.0 / LOW
            weight = _plane(weight.to(x.dtype.element_ty))
            sums = tl.dot(weight, tl.trans(_plane(both[half])), sums, input_precision="ieee")
    return sums


@triton.jit
def _plain_product(sums, x, plain, low, high, inputs: tl.constexpr):
    """Adds the products with weights that have not been quantised, of a part of the inputs, to sums [outputs, rows]."""
    for start in tl.range(low, high, 64, num_stages=3):
        at = start + tl.arange(0, 64)
        some = tl.load(plain + at[None, :], mask=at[None, :] < inputs, other=0.0)
        seen = tl.load(x + at[:, None], mask=at[:, None] < inputs, other=0.0)
        sums = tl.dot(some, seen, sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, data, steps, plain, out, rest, partial, arrived, rows, outputs, coded, x_stride, inputs: tl.constexpr,
    measured: tl.constexpr, kernel: tl.constexpr, group: tl.constexpr, bits: tl.constexpr, part: tl.constexpr,
    parts: tl.constexpr, block: tl.constexpr, block_rows: tl.constexpr, chunks: tl.constexpr, ahead: tl.constexpr,
    activation: tl.constexpr, follows: tl.constexpr,
):  # fmt: skip
    lead(follows)
    every: tl.constexpr = inputs * bits // 128
    size: tl.constexpr = 128 // bits
    ragged: tl.constexpr = every % part != 0
    first, low = tl.program_id(0) * block, tl.program_id(1) * part
    output = outputs_at(first + tl.arange(0, block), outputs, activation is not None).to(tl.int64)
    row = tl.arange(0, block_rows)
    line = tl.minimum(row, rows - 1) * x_stride
    sums = tl.zeros([block, block_rows], tl.float32)
    if plain is None or first < coded:
        chunk, end = tl.arange(0, chunks), tl.minimum(low + part, every)
        words, each = _weights_at(data, steps, output[:, None], chunk, every, group, bits)
        some = _ahead(words, each, low, chunk, end, chunks, ahead, group, bits)
        follow(follows)
        seen = _inputs_at(x + line, chunk, bits)
        for start in tl.range(low, low + part, chunks * ahead, num_stages=1):
            for time in tl.static_range(ahead):
                word, scales, at = some[2 * time], some[2 * time + 1], start + time * chunks
                sums = _multiplied(sums, seen, at, chunk, word, scales, bits, every, ragged)
            some = _ahead(words, each, start + chunks * ahead, chunk, end, chunks, ahead, group, bits)
        if x.dtype.element_ty != tl.float16:
            sums *= 1.0 / LOW
    elif plain is not None:
        beside = plain + (output - coded)[:, None] * inputs
        follow(follows)
        sums = _plain_product(sums, x + line[None, :], beside, low * size, (low + part) * size, inputs)
    last = True
    if parts > 1:
        last = noted(sums, partial, arrived, block, block_rows, parts)
    if last:
        needed = ask(rest, first, row, rows, outputs, block, measured, kernel)  # now that registers are free for it
        if parts > 1:
            sums = gathered(partial, block, block_rows, parts)
        finish(sums, needed, rest, out, first, row, rows, outputs, inputs, block, kernel, activation)


@triton.jit
def _expand(
    data, steps, out, outputs, inputs: tl.constexpr, group: tl.constexpr, bits: tl.constexpr, block: tl.constexpr,
    chunks: tl.constexpr,
):  # fmt: skip
    every: tl.constexpr = inputs * bits // 128
    output = tl.program_id(0) * block + tl.arange(0, block)
    chunk, start = tl.arange(0, chunks), tl.program_id(1) * chunks
    place = tl.minimum(output, outputs - 1).to(tl.int64)
    words, each = _weights_at(data, steps, place[:, None], chunk, every, group, bits)
    word, each = _loaded(words, each, start, chunk, every, group, bits)
    step, shift = _scale(each, bits)
    chunk += start
    step, shift = (step * (INTEGER * LOW))[:, :, :, None], (shift * LOW)[:, :, :, None]
    first = (place * inputs)[None, :] + chunk[:, None] * (128 // bits)
    to = out + first[:, :, None, None] + tl.arange(0, WORDS)[None, None, None, :]
    inside = ((output < outputs)[None, :] & (chunk < every)[:, None])[:, :, None, None]
    for plane in tl.static_range(32 // bits):
        weight = _code(word, plane, bits) * (step * 2.0 ** (LIFT - _place(plane, bits))) + shift
        tl.store(to + WORDS * plane, (weight * (1.0 / LOW)).to(out.dtype.element_ty), mask=inside)


def made(x: Input, work: Work) -> Stored:
    """The product of up to ROWS."""
    (outputs, inputs), words = work.weight.shape, work.weight.data.shape[1]
    if len(x) == 1:
        return vector(x, work, vector_cut(outputs, words // WORDS.value))
    return product(x, work, product_cut(outputs, words // WORDS.value, 32 * words // inputs, len(x)))


def vector_cut(outputs: int, chunks: int) -> Cut:
    """A thread multiplies each input with the weights of four outputs, and many threads of few outputs share them."""
    if outputs < 8192:
        return Cut(4, 64, min(3, triton.cdiv(chunks, 64)), 2)
    each = 16 if chunks % 32 == 16 else 32
    return Cut(128 // each, each, min(1 if outputs < 16384 else 5, triton.cdiv(chunks, each)), registers=168)


def product_cut(outputs: int, chunks: int, bits: int, rows: int) -> Cut:
    """The inputs are cut so that there are somewhat more programs than run at a time, all alike if that can be."""
    block, ahead = 32, 4 if rows <= 16 else 2
    if outputs >= 16384 and rows <= 16:  # more run at a time, since each uses fewer registers
        block, ahead = (16, 5) if bits == 8 else (32, 2)
    spans = triton.cdiv(chunks, STEP * ahead)
    wanted = 2304 * 32 // outputs // triton.cdiv(rows, 16)
    parts = min((parts for parts in range(1, spans + 1) if spans % parts == 0), key=lambda parts: abs(parts - wanted))
    return Cut(block, STEP, ahead, 1, parts)


def vector(x: Input, work: Work, cut: Cut) -> Stored:
    """The product of one row, by the arithmetic units: a thread sums chunks of its own, a program its threads."""
    coded, outputs = len(work.weight.data), work.weight.shape[0]
    tiles = triton.cdiv(coded, cut.outputs) + triton.cdiv(outputs - coded, cut.outputs // 4)
    x, stored, told = prepared(x, work, tiles)
    _vector[(tiles,)](
        x, out=stored.out, block=cut.outputs, chunks=cut.chunks, ahead=cut.ahead, warps=cut.warps,
        num_warps=cut.warps, maxnreg=cut.registers, **told, **_told(work.weight), **following(x.device),
    )  # fmt: skip
    return stored


def product(x: Input, work: Work, cut: Cut) -> Stored:
    """The product of several rows, by the matrix units."""
    every, span = work.weight.data.shape[1] // WORDS.value, cut.chunks * cut.ahead
    part = triton.cdiv(triton.cdiv(every, span), cut.parts) * span
    tiles, parts = triton.cdiv(work.weight.shape[0], cut.outputs), triton.cdiv(every, part)
    block_rows = max(8, triton.next_power_of_2(len(x)))
    x, stored, told = prepared(x, work, tiles)
    _product[tiles, parts](
        x, out=stored.out, rows=len(x), x_stride=x.stride(0), part=part, block=cut.outputs, block_rows=block_rows,
        chunks=cut.chunks, ahead=cut.ahead, num_warps=cut.warps, maxnreg=cut.registers,
        **following(x.device), **told, **_told(work.weight), **in_parts(x, tiles, parts, cut.outputs * block_rows),
    )  # fmt: skip
    return stored


def expanded(data: Tensor, steps: Tensor) -> Tensor:
    """The twin of Chunks.expanded."""
    (outputs, words), form = data.shape, _form(data, steps)
    out = steps.new_empty(outputs, words * (32 // form["bits"]))
    grid = triton.cdiv(outputs, 16), triton.cdiv(words, 128)
    _expand[grid](data, steps, out, outputs, inputs=out.shape[1], **form, block=16, chunks=32)
    return out


def _told(weight: Tensor | Chunks) -> dict[str, Any]:
    """What the kernels of products are told of it."""
    assert isinstance(weight, Chunks)
    data, steps = weight.data, weight.steps
    return {"data": data, "steps": steps, "plain": weight.beside, "coded": len(data), **_form(data, steps)}


def _form(data: Tensor, steps: Tensor) -> dict[str, int]:
    return {"bits": 8 // steps.shape[2], "group": data.shape[1] // WORDS.value // steps.shape[1]}
