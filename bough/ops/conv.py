"""Causal depthwise convolution over ragged rows, each with its own carried tail."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bough.ops.activation import Activation
from bough.ops.deferred import Input
from bough.ops.linear import Weight, few, linear
from bough.ops.ragged import Carried, Replayed, ReplayedRow, Rows, Slots, close_slots, open_slots
from bough.ops.twins import twins


def causal_conv(
    x: Tensor,
    taps: Tensor,
    rows: Rows,
    *,
    bias: Tensor | None = None,
    stored: Slots | None = None,
    explicit: Tensor | None = None,
    activation: Activation | None = None,
) -> Carried:
    """y_t = activation(Σ_i taps_i · x_{t − K + 1 + i} + bias) for x [T, C] and taps [K, C] in float32 → out [T, C].

    What came before a row's first token is its tail: the last K − 1 inputs, in `stored` slots (zeros for a row
    without history) or `explicit` [R, K − 1, C]. A tail, also one at a cut, is a slice of [old tail | inputs], so rows
    and cuts shorter than the tail need no special case. Sums are float32.
    """
    if (fast := twins(x)) is not None and activation in (None, F.silu):
        silu = activation is F.silu
        return fast.causal_conv(x, taps, rows, bias=bias, stored=stored, explicit=explicit, silu=silu)
    slots = open_slots("causal_conv", rows, stored, explicit)
    outs = []
    for row, start, end in rows:
        outs.append(_convolve(_carried(x[start:end], row, rows, slots), taps, bias, activation))
    slots.record(rows, x)
    out = outs[0] if len(outs) == 1 else torch.cat(outs) if outs else torch.empty_like(x)
    return close_slots(out, slots, explicit)


def projected_conv(
    x: Input, weight: Weight, taps: Tensor, rows: Rows, *, stored: Slots, activation: Activation
) -> tuple[Tensor, Tensor]:
    """The product of x with the weight, its first C outputs through the convolution [T, C]; and the others."""
    alone = all(count == 1 for count in rows.counts) and not any(rows.cuts) and stored.recording is None
    fast = few(x, weight) if alone and activation is F.silu else None
    y = linear(x, weight) if fast is None else fast.projected_rows(x, weight, taps, rows, stored)
    inputs, others = y.split([taps.shape[1], y.shape[1] - taps.shape[1]], 1)
    if fast is not None:
        return inputs, others
    return causal_conv(inputs, taps, rows, stored=stored, activation=activation).out, others


def carry(x: Tensor, rows: Rows, *, stored: Slots) -> None:
    """Keep the last inputs x [T, C] of each row, as a convolution over them would, and compute nothing."""
    if (fast := twins(x)) is not None:
        fast.carry(x, rows, stored=stored)
        return
    slots = open_slots("carry", rows, stored, None)
    for row, start, end in rows:
        _carried(x[start:end], row, rows, slots)
    slots.record(rows, x)


def _carried(x: Tensor, row: int, rows: Rows, slots: Slots) -> Tensor:
    """A row's tail before its inputs x [n, C], and these: [K − 1 + n, C]. The tails after it are put into its slots."""
    inputs = torch.cat([slots.before(row).to(x.dtype), x])
    slots.data[slots.write[row]] = inputs[len(x) :]
    for cut, slot in slots.cuts_of(row, rows).items():
        slots.data[slot] = inputs[cut : cut + slots.data.shape[1]]
    return inputs


def replay_conv(layers: Sequence[Replayed], rows: Sequence[ReplayedRow]) -> None:
    """Move tails on by recorded inputs: in each layer those of each row's slot, by so many inputs from a start on."""
    if (fast := twins(layers[0][0])) is not None:
        fast.replay_conv(layers, rows)
        return
    for tails, (x,) in layers:
        for slot, start, count in rows:
            tails[slot] = torch.cat([tails[slot].to(x.dtype), x[start : start + count]])[count:]


def _convolve(inputs: Tensor, taps: Tensor, bias: Tensor | None, activation: Activation | None) -> Tensor:
    """[K − 1 + n, C] → [n, C]."""
    dtype, inputs = inputs.dtype, inputs.float()
    n = len(inputs) - len(taps) + 1
    if n == 1:
        y = (inputs * taps).sum(0, keepdim=True)
    else:  # a product and a sum for each tap: several times faster than the library's depthwise convolution
        y = inputs[:n] * taps[0]
        for i in range(1, len(taps)):
            y.addcmul_(inputs[i : i + n], taps[i])
    if bias is not None:
        y += bias
    return (y if activation is None else activation(y)).to(dtype)
