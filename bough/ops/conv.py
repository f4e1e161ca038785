"""Causal depthwise convolution over ragged rows, each with its own carried tail."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bough.ops.ragged import Rows, Slots

Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Convolved:
    """The output [T, C]; with an explicit tail also each row's tail after it, and its tails at the cuts."""

    out: Tensor
    tail: Tensor | None = None  # [R, K − 1, C]
    cuts: tuple[Tensor, ...] = ()  # for each row [cuts, K − 1, C]


def causal_conv(
    x: Tensor,
    weight: Tensor,
    rows: Rows,
    *,
    bias: Tensor | None = None,
    stored: Slots | None = None,
    explicit: Tensor | None = None,
    activation: Activation | None = None,
) -> Convolved:
    """y_t = activation(Σ_i weight[:, i] · x_{t − K + 1 + i} + bias) for x [T, C] and weight [C, K].

    What came before a row's first token is its tail: the last K − 1 inputs, in `stored` slots (zeros for a row
    without history) or `explicit` [R, K − 1, C]. A tail, also one at a cut, is a slice of [old tail | inputs], so rows
    and cuts shorter than the tail need no special case.
    """
    if (stored is None) == (explicit is None):
        raise ValueError("causal_conv takes stored slots or an explicit tail: exactly one of them")
    keep = weight.shape[1] - 1
    out = torch.empty_like(x)
    tails = None if explicit is None else explicit.clone()
    cuts = [x.new_empty(len(rows.cuts_of(row)), keep, x.shape[1]) for row in range(len(rows.counts))]
    for row, start, end in rows:
        if explicit is not None:
            tail = explicit[row]
        elif rows.history[row]:
            assert stored is not None
            tail = stored.data[stored.read[row]]
        else:
            tail = x.new_zeros(keep, x.shape[1])
        inputs = torch.cat([tail.to(x.dtype), x[start:end]])  # [K − 1 + n, C]
        y = _convolve(inputs, weight, bias)
        out[start:end] = y if activation is None else activation(y)
        count = end - start
        if tails is not None:
            tails[row] = inputs[count:]
            for index, cut in enumerate(rows.cuts_of(row)):
                cuts[row][index] = inputs[cut : cut + keep]
        else:
            assert stored is not None
            stored.data[stored.write[row]] = inputs[count:]
            for cut, slot in zip(rows.cuts_of(row), stored.cut[row] if stored.cut else (), strict=True):
                stored.data[slot] = inputs[cut : cut + keep]
    return Convolved(out, tails, tuple(cuts) if tails is not None else ())


def _convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[K − 1 + n, C] → [n, C]."""
    channels, kernel = weight.shape
    if inputs.shape[0] == kernel:  # one token: a product and a sum
        y = (inputs.T.float() * weight.float()).sum(1)
        return (y if bias is None else y + bias.float()).to(inputs.dtype)[None]
    return F.conv1d(inputs.T[None], weight[:, None], bias, groups=channels)[0].T
