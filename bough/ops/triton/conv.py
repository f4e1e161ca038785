# mypy: allow-untyped-defs, allow-incomplete-defs
"""The causal convolution: one launch for short rows; for long ones the outputs, then the tails.

A row's inputs are [its tail | its tokens]. Whoever writes a tail in place has read all that it needs of the old one:
one program works on a row's channels from its first piece to its last.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.ops.ragged import Carried, Rows, Slots, close_slots, open_slots
from bough.ops.triton.plan import plan

CHUNK = 64  # tokens that a program works on in long rows
CHANNELS = 128


@triton.jit
def _input(
    x, tails, slot, slot_stride, tail_stride, x_stride, start, at, channel, inside, keep: tl.constexpr,
    past: tl.constexpr = False,
):  # fmt: skip
    """Input `at` of a row, 0 being the first of its tail, as [channels]; where `at` is [tokens, 1], one for each.

    None is of the tail if all are `past` it.
    """
    if past:
        return tl.load(x + (start + at - keep) * x_stride + channel, mask=inside, other=0.0)
    in_tail = inside & (at < keep)
    old = tl.load(tails + slot * slot_stride + at * tail_stride + channel, mask=in_tail & (slot >= 0), other=0.0)
    new = tl.load(x + (start + at - keep) * x_stride + channel, mask=inside & (at >= keep), other=0.0)
    return tl.where(at < keep, old.to(x.dtype.element_ty), new)


@triton.jit
def _filtered(
    x, tails, slot, slot_stride, tail_stride, x_stride, start, at, channel, inside, taps, bias, channels,
    kernel: tl.constexpr, biased: tl.constexpr, silu: tl.constexpr, past: tl.constexpr = False,
):  # fmt: skip
    """The output of a row's token `at`, in float32."""
    y = tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32) if biased else 0.0
    for i in tl.static_range(kernel):
        tap = tl.load(taps + i * channels + channel, mask=channel < channels, other=0.0)
        value = _input(
            x, tails, slot, slot_stride, tail_stride, x_stride, start, at + i, channel, inside, kernel - 1, past
        )
        y += value.to(tl.float32) * tap
    return y * tl.sigmoid(y) if silu else y


@triton.jit
def _put_tail(
    x, tails, source, target, slot_stride, tail_stride, x_stride, start, count, channel, inside, keep: tl.constexpr
):  # fmt: skip
    """The tail after a row's first `count` tokens goes to slot `target`, if that is one."""
    if target >= 0:
        for i in tl.static_range(keep):  # what is written here is not read again
            value = _input(
                x, tails, source, slot_stride, tail_stride, x_stride, start, count + i, channel, inside, keep
            )
            tl.store(tails + target * slot_stride + i * tail_stride + channel, value, mask=inside)


@triton.jit
def _short_rows(
    x, y, tails, taps, bias, starts, counts, reads, writes, x_stride, y_stride, slot_stride, tail_stride, channels,
    kernel: tl.constexpr, biased: tl.constexpr, silu: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    channel = tl.program_id(0) * block + tl.arange(0, block)
    inside = channel < channels
    start, count = tl.load(starts + row).to(tl.int64), tl.load(counts + row)
    source, target = tl.load(reads + row).to(tl.int64), tl.load(writes + row).to(tl.int64)
    for t in range(count):
        out = _filtered(
            x, tails, source, slot_stride, tail_stride, x_stride, start, t, channel, inside, taps, bias, channels,
            kernel, biased, silu,
        )  # fmt: skip
        tl.store(y + (start + t) * y_stride + channel, out, mask=inside)
    _put_tail(x, tails, source, target, slot_stride, tail_stride, x_stride, start, count, channel, inside, kernel - 1)


@triton.jit
def _short_tails(
    x, tails, starts, counts, reads, writes, x_stride, slot_stride, tail_stride, channels,
    keep: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    channel = tl.program_id(0) * block + tl.arange(0, block)
    inside = channel < channels
    start, count = tl.load(starts + row).to(tl.int64), tl.load(counts + row)
    source, target = tl.load(reads + row).to(tl.int64), tl.load(writes + row).to(tl.int64)
    _put_tail(x, tails, source, target, slot_stride, tail_stride, x_stride, start, count, channel, inside, keep)


@triton.jit
def _long_outputs(
    x, y, tails, taps, bias, reads, pieces, piece_start, chunk_start, chunk_count, chunk_row,
    x_stride, y_stride, slot_stride, tail_stride, channels,
    kernel: tl.constexpr, biased: tl.constexpr, silu: tl.constexpr, chunk: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    here = tl.program_id(1)
    channel = (tl.program_id(0) * block + tl.arange(0, block))[None, :]
    token, row = tl.arange(0, chunk)[:, None], tl.load(chunk_row + here)
    start = tl.load(piece_start + tl.load(pieces + row)).to(tl.int64)
    before = tl.load(chunk_start + here) - start  # tokens of the row
    at, slot = before + token, tl.load(reads + row).to(tl.int64)
    inside = (token < tl.load(chunk_count + here)) & (channel < channels)
    if before >= kernel - 1:
        out = _filtered(
            x, tails, slot, slot_stride, tail_stride, x_stride, start, at, channel, inside,
            taps, bias, channels, kernel, biased, silu, True,
        )  # fmt: skip
    else:
        out = _filtered(
            x, tails, slot, slot_stride, tail_stride, x_stride, start, at, channel, inside,
            taps, bias, channels, kernel, biased, silu,
        )  # fmt: skip
    tl.store(y + (start + at) * y_stride + channel, out, mask=inside)


@triton.jit
def _long_tails(
    x, tails, reads, pieces, piece_start, piece_end, slots, x_stride, slot_stride, tail_stride, channels,
    kernel: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    channel = tl.program_id(0) * block + tl.arange(0, block)
    inside = channel < channels
    source, first = tl.load(reads + row).to(tl.int64), tl.load(pieces + row)
    start = tl.load(piece_start + first).to(tl.int64)
    for piece in range(first, tl.load(pieces + row + 1)):
        count = tl.load(piece_end + piece) - start
        target = tl.load(slots + piece).to(tl.int64)
        _put_tail(
            x, tails, source, target, slot_stride, tail_stride, x_stride, start, count, channel, inside, kernel - 1
        )


def causal_conv(
    x: Tensor,
    taps: Tensor,
    rows: Rows,
    *,
    bias: Tensor | None = None,
    stored: Slots | None = None,
    explicit: Tensor | None = None,
    silu: bool = False,
) -> Carried:
    """The twin of ops.causal_conv; of activations it knows SiLU."""
    slots = open_slots("causal_conv", rows, stored, explicit)
    data, (kernel, channels) = slots.data, taps.shape
    assert x.stride(1) == 1 and data.stride(2) == 1 and taps.is_contiguous()
    y, (short, long) = torch.empty_like(x, memory_format=torch.contiguous_format), plan(rows, slots, CHUNK)
    strides = (x.stride(0), y.stride(0), data.stride(0), data.stride(1), channels)
    options = {"kernel": kernel, "biased": bias is not None, "silu": silu, "block": CHANNELS}
    blocks = triton.cdiv(channels, CHANNELS)
    if len(short.start):
        _short_rows[blocks, len(short.start)](x, y, data, taps, bias, *short, *strides, **options)
    if len(long.read):
        _long_outputs[blocks, len(long.chunk_start)](
            x, y, data, taps, bias, long.read, long.pieces, long.start, long.chunk_start, long.chunk_count,
            long.chunk_row, *strides, chunk=CHUNK, **options,
        )  # fmt: skip
        _long_tails[blocks, len(long.read)](
            x, data, long.read, long.pieces, long.start, long.end, long.slot, x.stride(0), *strides[2:],
            kernel=kernel, block=CHANNELS,
        )  # fmt: skip
    slots.record(rows, x)
    return close_slots(y, slots, explicit)


def carry(x: Tensor, rows: Rows, *, stored: Slots) -> None:
    """The twin of ops.carry."""
    slots = open_slots("carry", rows, stored, None)
    data, (_, keep, channels) = slots.data, slots.data.shape
    assert x.stride(1) == 1 and data.stride(2) == 1
    short, long = plan(rows, slots, CHUNK)
    strides, blocks = (x.stride(0), data.stride(0), data.stride(1), channels), triton.cdiv(channels, CHANNELS)
    if len(short.start):
        _short_tails[blocks, len(short.start)](x, data, *short, *strides, keep=keep, block=CHANNELS)
    if len(long.read):
        _long_tails[blocks, len(long.read)](
            x, data, long.read, long.pieces, long.start, long.end, long.slot, *strides,
            kernel=keep + 1, block=CHANNELS,
        )  # fmt: skip
    slots.record(rows, x)
