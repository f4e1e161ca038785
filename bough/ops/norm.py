"""Root-mean-square norms. All measure in float32; they differ in what they multiply by, and when they round."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bough.ops.deferred import Addend, Input, Product, made
from bough.ops.twins import twins


@dataclass(frozen=True, eq=False)
class Norm:
    """The norm of the last dimension, with its weight; without one, nothing is scaled.

    `rounded`: to the dtype of x before it is scaled, by a weight of that dtype. Else it is scaled in float32, and then
    rounded; the weight is float32.
    """

    weight: Tensor | None
    eps: float
    rounded: bool

    def __call__(self, x: Addend) -> Tensor:
        x = made(x)
        if (fast := twins(x)) is not None:
            return fast.norm(x, self)
        if self.weight is None or self.rounded:
            return rms_norm(x, self.weight, self.eps)
        return rms_norm_scaled(x, self.weight, self.eps)

    def after(self, x: Tensor, y: Addend | None) -> tuple[Tensor, Input]:
        """x + y (x alone where there is nothing to add), and the norm of that."""
        if isinstance(y, Product):
            return y.normed(x, self.weight, self.eps)
        return self.whole(x, y)

    def whole(self, x: Tensor, y: Addend | None) -> tuple[Tensor, Tensor]:
        """The same with nothing left undone."""
        if y is None:
            return x, self(x)
        y = made(y)
        if (fast := twins(x)) is not None:
            return fast.norm_after(x, y, self)
        x = x + y
        return x, self(x)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Plain: rounded to the dtype of x, then scaled (Llama, Qwen3, LFM2). No weight: not scaled."""
    if weight is None or x.dtype == torch.float32:  # where nothing is rounded, all at once
        return torch.rms_norm(x, x.shape[-1:], weight, eps)
    return torch.rms_norm(x, x.shape[-1:], None, eps) * weight


def rms_norm_scaled(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Scaled in float32 and then rounded: Gemma 4 (scale = w), and the zero-centred norms (scale = 1 + w)."""
    return torch.rms_norm(x.float(), scale.shape, scale, eps).to(x.dtype)


def rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Plain, then × silu(gate) in float32 (the output of gated-delta layers)."""
    if (fast := twins(x)) is not None:
        return fast.rms_norm_gated(x, gate, weight, eps)
    return (rms_norm(x, weight, eps) * torch.nn.functional.silu(gate.float())).to(x.dtype)
