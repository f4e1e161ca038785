"""Causal depthwise convolution over ragged rows, each with its own carried tail."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bough.ops.ragged import Carried, Rows, Slots, close_slots, open_slots

Activation = Callable[[Tensor], Tensor]


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
    slots = open_slots("causal_conv", rows, stored, explicit)
    keep = len(taps) - 1
    outs = []
    for row, start, end in rows:
        inputs = torch.cat([slots.before(row).to(x.dtype), x[start:end]])  # [K − 1 + n, C]
        outs.append(_convolve(inputs, taps, bias, activation))
        slots.data[slots.write[row]] = inputs[end - start :]
        slots.record(row, x[start:end])
        for cut, slot in slots.cuts_of(row, rows).items():
            slots.data[slot] = inputs[cut : cut + keep]
    out = outs[0] if len(outs) == 1 else torch.cat(outs) if outs else torch.empty_like(x)
    return close_slots(out, slots, explicit)


def replay_conv(before: Tensor, target: Tensor, inputs: Sequence[Tensor], count: int) -> None:
    """The tail after the first `count` of the recorded inputs, given the tail before them."""
    (x,) = inputs
    target.copy_(torch.cat([before.to(x.dtype), x[:count]])[count:])


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
