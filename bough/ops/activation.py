"""Activations, and what they gate."""

from collections.abc import Callable
from typing import TypeAlias

import torch.nn.functional as F
from torch import Tensor

from bough.ops.twins import twins

Activation: TypeAlias = Callable[[Tensor], Tensor]


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def gated(gate: Tensor, value: Tensor, activation: Activation) -> Tensor:
    """activation(gate) · value, which are of one shape."""
    if (fast := twins(gate)) is not None and activation in fast.ACTIVATIONS:
        return fast.gated(gate, value, activation)
    return activation(gate).mul_(value)
