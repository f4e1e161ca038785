# mypy: allow-untyped-defs, allow-incomplete-defs
"""The causal convolution: one launch for short rows; for long ones the outputs, then the tails.

A row's inputs are [its tail | its tokens]. Whoever writes a tail in place has read all that it needs of the old one:
one program works on a row's channels from its first piece to its last.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.ops.ragged import Carried, Rows, ShortRows, Slots, close_slots, open_slots
from bough.ops.spans import FEW
from bough.ops.triton.activation import LOG2E
from bough.ops.triton.follow import follow, following, lead
from bough.ops.triton.plan import plan

CHUNK = 64  # tokens that a program works on in long rows
STRIP = 8  # of these, that a thread does
CHANNELS = 128


@triton.jit
def _silu(y):
    """y / (1 + exp −y), by the square of an inverse root: a division takes as many instructions as the taps do."""
    root = tl.rsqrt(1 + tl.exp2(y * -LOG2E))
    return y * (root * root)


@triton.jit
def _input(x, tails, slot, slot_stride, tail_stride, x_stride, start, at, channel, inside, keep: tl.constexpr):
    """Input `at` of a row, 0 being the first of its tail, as [channels]; where `at` is [tokens, 1], one for each."""
    in_tail = inside & (at < keep)
    old = tl.load(tails + slot * slot_stride + at * tail_stride + channel, mask=in_tail & (slot >= 0), other=0.0)
    new = tl.load(x + (start + at - keep) * x_stride + channel, mask=inside & (at >= keep), other=0.0)
    return tl.where(at < keep, old.to(x.dtype.element_ty), new)


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
def _store(tails, slot, tail, slot_stride, tail_stride, inside):
    """A tail goes to a slot, if that is one."""
    for i in tl.static_range(len(tail)):
        tl.store(tails + slot * slot_stride + i * tail_stride, tail[i], mask=inside & (slot >= 0))


@triton.jit
def _tokens(x, x_stride, first, count, inside, few: tl.constexpr):
    """The inputs of up to `few` tokens of a row, from one on."""
    inputs: tl.tuple = ()
    for t in tl.static_range(few):
        inputs += (tl.load(x + (first + t) * x_stride, mask=inside & (first + t < count), other=0.0),)
    return inputs


@triton.jit
def _after(inputs, tokens, keep: tl.constexpr, few: tl.constexpr):
    """The tail after as many tokens, of which up to `few` count, from a tail and their inputs."""
    tail = inputs[few:]
    for t in tl.static_range(1, few):
        shorter: tl.tuple = ()
        for i in tl.static_range(keep):
            shorter += (tl.where(tokens == t, inputs[t + i], tail[i]),)
        tail = shorter
    return tail


@triton.jit
def _short_rows(
    x, y, tails, taps, bias, starts, counts, reads, writes, past, owed_start, owed, keeps, records,
    x_stride, y_stride, slot_stride, tail_stride, channels,
    kernel: tl.constexpr, biased: tl.constexpr, silu: tl.constexpr, few: tl.constexpr, block: tl.constexpr,
    follows: tl.constexpr,
):  # fmt: skip
    """Outputs, if there are to be any, and tails. All that a few tokens need is loaded before anything is stored.

    Where something may be owed the tail is first moved on by that, and stored if it is to be kept so; and inputs are
    recorded.
    """
    lead(follows)
    keep: tl.constexpr = kernel - 1
    row = tl.program_id(1)
    channel = tl.program_id(0) * block + tl.arange(0, block)
    inside = channel < channels
    start, count = tl.load(starts + row).to(tl.int64), tl.load(counts + row)
    source, target = tl.load(reads + row).to(tl.int64), tl.load(writes + row).to(tl.int64)
    old, old_start, old_count = x, start, 0  # inputs that the tail has yet to be moved on by
    if past is not None:
        old, old_start, old_count = past, tl.load(owed_start + row).to(tl.int64), tl.load(owed + row)
        past += tl.load(records + row).to(tl.int64) * channels + channel
        kept = tl.load(keeps + row).to(tl.int64)
    tail: tl.tuple = ()
    for i in tl.static_range(keep):
        tail += (
            _input(
                old, tails, source, slot_stride, tail_stride, channels, old_start, old_count + i, channel, inside, keep
            ),
        )
    weights: tl.tuple = ()
    if y is not None:
        for i in tl.static_range(kernel):
            weights += (tl.load(taps + i * channels + channel, mask=inside, other=0.0),)
        shift = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32) if biased else 0.0
        y += start * y_stride + channel
    x += start * x_stride + channel
    follow(follows)
    before, coming = tail, _tokens(x, x_stride, 0, count, inside, few)
    for first in range(0, count, few):
        inputs = before + coming
        coming = _tokens(x, x_stride, first + few, count, inside, few)
        for t in tl.static_range(few):
            if first + t < count:
                if past is not None:
                    tl.store(past + (first + t) * channels, inputs[keep + t], mask=inside)
                if y is not None:
                    out = shift
                    for i in tl.static_range(kernel):
                        out += inputs[t + i].to(tl.float32) * weights[i]
                    tl.store(y + (first + t) * y_stride, _silu(out) if silu else out, mask=inside)
        before = _after(inputs, count - first, keep, few)
    tails += channel
    if past is not None:
        _store(tails, kept, tail, slot_stride, tail_stride, inside)
    _store(tails, target, before, slot_stride, tail_stride, inside)


@triton.jit
def _long_outputs(
    x, y, tails, taps, bias, reads, pieces, piece_start, chunk_start, chunk_count, chunk_row,
    x_stride, y_stride, slot_stride, tail_stride, channels,
    kernel: tl.constexpr, biased: tl.constexpr, silu: tl.constexpr,
    chunk: tl.constexpr, strip: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """A thread takes a strip of tokens: it loads each input once, and all of them before it waits for any."""
    keep: tl.constexpr = kernel - 1
    tl.static_assert(strip >= keep)  # or later inputs than the first `keep` of a strip would be of the tail
    here, token = tl.program_id(1), (tl.arange(0, chunk // strip) * strip)[:, None]
    # Strips load what they share each for itself: so it lies with the thread that needs it, and no thread waits.
    channel = tl.broadcast_to((tl.program_id(0) * block + tl.arange(0, block))[None, :], (chunk // strip, block))
    inside = channel < channels
    first, last, row = tl.load(chunk_start + here), tl.load(chunk_count + here) - 1, tl.load(chunk_row + here)
    origin = x + first.to(tl.int64) * x_stride + channel
    inputs: tl.tuple = ()
    for i in tl.static_range(keep + strip):  # past the ends others are loaded, for nobody: that needs no masks
        place = tl.minimum(tl.maximum(token + i - keep, -first), last)
        inputs += (tl.load(origin + place * x_stride, mask=inside),)
    start = tl.load(piece_start + tl.load(pieces + row)).to(tl.int64)
    before = first - start  # tokens of the row
    if before < keep:
        slot = tl.load(reads + row).to(tl.int64)
        early: tl.tuple = ()
        for i in tl.static_range(keep):
            at, within = before + token + i, inside & (token + i - keep <= last)
            early += (_input(x, tails, slot, slot_stride, tail_stride, x_stride, start, at, channel, within, keep),)
        inputs = early + inputs[keep:]
    weights: tl.tuple = ()
    for i in tl.static_range(kernel):
        weights += (tl.load(taps + i * channels + channel, mask=inside),)
    shift = tl.load(bias + channel, mask=inside).to(tl.float32) if biased else 0.0
    y += first.to(tl.int64) * y_stride + channel
    for t in tl.static_range(strip):
        out = shift
        for i in tl.static_range(kernel):
            out += inputs[t + i].to(tl.float32) * weights[i]
        tl.store(y + (token + t) * y_stride, _silu(out) if silu else out, mask=inside & (token + t <= last))


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
    follows = following(x.device) if explicit is None else {"follows": False}  # those slots have just been made
    blocks = triton.cdiv(channels, CHANNELS)
    if len(short.start):
        _short_rows[blocks, len(short.start)](
            x, y, data, taps, bias, *short, *_past(x, slots), *strides, few=_few(x, short), num_warps=1, **options,
            **follows,
        )  # fmt: skip
    if len(long.read):
        _long_outputs[blocks, len(long.chunk_start)](
            x, y, data, taps, bias, long.read, long.pieces, long.start, long.chunk_start, long.chunk_count,
            long.chunk_row, *strides, chunk=CHUNK, strip=STRIP, num_warps=CHUNK // STRIP * CHANNELS // 256, **options,
        )  # fmt: skip
        _long_tails[blocks, len(long.read)](
            x, data, long.read, long.pieces, long.start, long.end, long.slot, x.stride(0), *strides[2:],
            kernel=kernel, block=CHANNELS,
        )  # fmt: skip
    slots.record(rows, x)
    return close_slots(y, slots, explicit)


def _few(x: Tensor, short: ShortRows) -> int:
    """Tokens of a row that are worked on together; one of a few numbers, since each is compiled for."""
    return min(FEW, triton.next_power_of_2(triton.cdiv(len(x), len(short.start))))


def _past(x: Tensor, slots: Slots) -> tuple[Tensor | None, ...]:
    """What was recorded before and will be now, and what rows owe of it. None where nothing is owed."""
    if slots.owed is None or slots.recording is None:
        return (None,) * 5
    return *slots.recording.room((x, x.dtype)), *slots.owed


def carry(x: Tensor, rows: Rows, *, stored: Slots) -> None:
    """The twin of ops.carry."""
    slots = open_slots("carry", rows, stored, None)
    data, (_, keep, channels) = slots.data, slots.data.shape
    assert x.stride(1) == 1 and data.stride(2) == 1
    short, long = plan(rows, slots, CHUNK)
    strides, blocks = (data.stride(0), data.stride(1), channels), triton.cdiv(channels, CHANNELS)
    if len(short.start):
        _short_rows[blocks, len(short.start)](
            x, None, data, None, None, *short, *_past(x, slots), x.stride(0), 0, *strides,
            kernel=keep + 1, biased=False, silu=False, few=_few(x, short), block=CHANNELS, num_warps=1,
            **following(x.device),
        )  # fmt: skip
    if len(long.read):
        _long_tails[blocks, len(long.read)](
            x, data, long.read, long.pieces, long.start, long.end, long.slot, x.stride(0), *strides,
            kernel=keep + 1, block=CHANNELS,
        )  # fmt: skip
    slots.record(rows, x)
