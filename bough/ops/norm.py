"""Root-mean-square norms. All measure in float32; they differ in what they multiply by, and when they round."""

import torch
from torch import Tensor


def _unit(x: Tensor, eps: float) -> Tensor:
    """x in float32, divided by its root mean square over the last axis."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Plain: rounded to the dtype of x, then scaled (Llama, Qwen3, LFM2). No weight: not scaled."""
    if weight is None:
        return _unit(x, eps).to(x.dtype)
    if x.dtype == weight.dtype:
        return torch.rms_norm(x, weight.shape, weight, eps)
    return _unit(x, eps).to(x.dtype) * weight


def rms_norm_scaled(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Scaled in float32 and then rounded: Gemma 4 (scale = w), and the zero-centred norms (scale = 1 + w)."""
    if x.dtype == torch.float32:
        return torch.rms_norm(x, scale.shape, scale, eps)
    return torch.rms_norm(x.float(), scale.shape, scale, eps).to(x.dtype)


def rms_norm_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Plain norm, then × silu(gate) in float32 (the output of gated-delta layers)."""
    normed = weight * _unit(x, eps).to(x.dtype)
    return (normed * torch.nn.functional.silu(gate.float())).to(x.dtype)
