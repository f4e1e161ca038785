"""Root-mean-square norms. All measure in float32; they differ in what they multiply by, and when they round."""

import torch
from torch import Tensor


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
    return (rms_norm(x, weight, eps) * torch.nn.functional.silu(gate.float())).to(x.dtype)
