"""Mixtures of experts: each token goes through a few of many gated MLPs."""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from bough.ops.activation import Activation, gated
from bough.ops.linear import Weight, arranged, linear
from bough.ops.twins import twins

Matrices: TypeAlias = Tensor | Sequence[Weight]  # those of all experts: in one tensor [E, out, in], or one by one


def experts(
    x: Tensor, share: Tensor, expert: Tensor, gate_up: Matrices, down: Matrices, activation: Activation
) -> Tensor:
    """Σ share · down(activation(gate x) · up x) over the experts of each token: x [T, hidden] → [T, hidden].

    `expert` [T, chosen] has who is asked, and `share` what that counts. gate_up is [2 I, hidden] for each expert and
    down [hidden, I]; those of experts that no token chose are not read. What an expert says is rounded to the dtype of
    x, before it is multiplied by the share and after.
    """
    plain = isinstance(gate_up, Tensor) and isinstance(down, Tensor)
    if (fast := twins(x)) is not None and plain and activation in fast.ACTIVATIONS:
        return fast.experts(x, share, expert, gate_up, down, activation)
    chosen = expert.shape[1]
    expert, order = expert.flatten().sort(stable=True)
    tokens, share = order // chosen, share.flatten()[order, None]
    hit, counts = torch.unique_consecutive(expert, return_counts=True)
    out, start = torch.zeros_like(x), 0
    for index, count in zip(hit.tolist(), counts.tolist(), strict=True):
        some = slice(start, start + count)
        gate, up = linear(x[tokens[some]], gate_up[index]).chunk(2, -1)
        said = linear(gated(gate, up, activation), down[index])
        out.index_add_(0, tokens[some], (said * share[some]).to(out.dtype))
        start += count
    return out


def matrices(weights: Matrices) -> Matrices:
    """The matrices of all experts, laid out as `experts` reads them fastest: plain ones on devices in one tensor."""
    plain = [each for each in weights if isinstance(each, Tensor) and each.is_cuda]
    if len(plain) == len(weights):
        return weights if isinstance(weights, Tensor) else torch.stack(plain)
    return [arranged(each) for each in weights]
