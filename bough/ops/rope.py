"""Rotary positions: the frequencies of each variant, and the rotation.

Dimension j of the rotated part turns together with dimension j + half. Plain rope rotates all of a head, partial rope
its first dimensions, proportional rope all of it with zero frequencies for the rest (those stay as they are).
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bough.errors import ModelError, UnknownArchitecture
from bough.ops.twins import twins


def inverse_frequencies(head_dim: int, rope: Mapping[str, Any], context: int) -> tuple[Tensor, float]:
    """The frequencies [rotated / 2] in float32, and what cos and sin are multiplied by.

    `rope` is a config's rope_parameters: rope_theta, rope_type, partial_rotary_factor and what the type needs.
    """
    kind = rope.get("rope_type", rope.get("type")) or "default"
    theta = float(rope.get("rope_theta", 10000.0))
    rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if head_dim % 2 or not rotated:
        raise ModelError(
            f"rope cannot turn {rotated} dimensions of heads with {head_dim}: check head_dim in config.json"
        )
    if kind == "proportional":
        frequencies = _plain(theta, head_dim)
        frequencies[rotated // 2 :] = 0
        return frequencies / rope.get("factor", 1.0), 1.0
    frequencies = _plain(theta, rotated)
    match kind:
        # For text alone the rows of mrope are all the same. What is dynamic is what comes after the context.
        case "default" | "mrope" | "dynamic":
            return frequencies, 1.0
        case "linear":
            return frequencies / _required(rope, "factor"), 1.0
        # By a divisor for each: how a GGUF file gives what "llama3" computes.
        case "divided" if len(rope.get("divisors", ())) == len(frequencies):
            return frequencies / torch.tensor(rope["divisors"]), 1.0
        case "llama3":
            return _llama3(frequencies, rope, context), 1.0
        case "yarn":
            return _yarn(frequencies, theta, rotated, rope, context)
    raise UnknownArchitecture(
        f"rope type {kind!r} is not supported; Bough knows default, linear, dynamic, llama3, yarn, proportional"
    )


def _required(rope: Mapping[str, Any], name: str) -> float:
    if name not in rope:
        raise ModelError(f"the rope parameters in config.json lack {name!r}; take the file that belongs to the weights")
    return rope[name]


def _plain(theta: float, dim: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)


def _llama3(frequencies: Tensor, rope: Mapping[str, Any], context: int) -> Tensor:
    """Long waves are slowed by the factor, short ones kept, those between blended."""
    original = rope.get("original_max_position_embeddings") or context
    low, high = _required(rope, "low_freq_factor"), _required(rope, "high_freq_factor")
    if low >= high:
        raise ModelError(
            f"the rope parameters in config.json have low_freq_factor {low}, not below high_freq_factor {high}"
        )
    turns = original * frequencies / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return blend * frequencies + (1 - blend) * frequencies / _required(rope, "factor")


def _yarn(frequencies: Tensor, theta: float, dim: int, rope: Mapping[str, Any], context: int) -> tuple[Tensor, float]:
    """As llama3, with a linear ramp over dimensions, and attention sharpened by a factor."""
    original = rope.get("original_max_position_embeddings") or context
    factor = rope.get("factor") or context / original

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / ((high - low) or 0.001)).clamp(0, 1)
    sharpen = rope.get("attention_factor")
    if sharpen is None:
        sharpen = _yarn_sharpening(factor, rope.get("mscale"), rope.get("mscale_all_dim"))
    return ramp * frequencies / factor + (1 - ramp) * frequencies, sharpen


def _yarn_sharpening(factor: float, mscale: float | None, mscale_all: float | None) -> float:
    def scale(m: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

    return scale(mscale) / scale(mscale_all) if mscale and mscale_all else scale(1.0)


def rotations(positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, rotated] for positions [T]; sin is negative in its first half, as `rotate` wants it."""
    if (fast := twins(positions)) is not None:
        return fast.rotations(positions, frequencies, factor, dtype)
    angles = positions.float()[:, None, None] * frequencies  # [T, 1, rotated / 2]
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, d] turned by its position; dimensions past those of cos and sin are passed through."""
    rotated = cos.shape[-1]
    if rotated < x.shape[-1]:
        return torch.cat([rotate(x[..., :rotated], cos, sin), x[..., rotated:]], -1)
    return x * cos + x.roll(rotated // 2, -1) * sin
