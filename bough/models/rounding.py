"""Weights to 8 or 4 bits. Looks at nothing but the weights: there is no data to calibrate with."""

import math

import torch
from torch import Tensor

from bough.ops import Quantised

GROUPS = {8: 128, 4: 32}  # inputs that share a scale, by bits; fewer where they do not divide the inputs
LEAST = 8
SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # of a group's range: what is cut off may cost less than coarser steps
PIECE = 1 << 18  # weights rounded at a time: all that is tried with them should stay in the processor's cache


def group_of(inputs: int, bits: int) -> int | None:
    """How many inputs form a group; None if they cannot be grouped."""
    size = math.gcd(inputs, GROUPS[bits])
    return size if size >= LEAST else None


def quantised(weight: Tensor, bits: int) -> Quantised:
    """The weight [..., out, in], rounded to so many bits."""
    group = group_of(weight.shape[-1], bits)
    assert group is not None
    groups = weight.reshape(-1, group)
    pieces = [(to_int8 if bits == 8 else to_int4)(piece.float()) for piece in groups.split(max(1, PIECE // group))]
    data, *beside = (torch.cat(each) for each in zip(*pieces, strict=True))
    data = data.view(*weight.shape[:-1], -1)
    return Quantised(data, *(each.view(*weight.shape[:-1], -1) for each in beside))


def to_int8(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scale of each group (a row)."""
    scale = _coarse(groups.abs().amax(1, keepdim=True) / 127)
    codes = (groups / scale).round_().clamp_(-127, 127)
    return codes.to(torch.int8), scale.to(torch.bfloat16)


def to_int4(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (two a byte), scale and zero of each group, the best of several tries by squared error."""
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    best = torch.zeros_like(groups), torch.empty_like(low), torch.empty_like(low)
    least = torch.full_like(low, torch.inf)
    for part in SHRINK:
        scale = _coarse((high - low) * (part / 15))
        zero = _rounded((high + low + scale) / 2)
        for _ in range(2):  # as the range has it, and then as fits the codes that this gave
            codes = ((groups - zero) / scale).round_().clamp_(-8, 7)
            error = torch.addcmul(zero, codes, scale).sub_(groups).square_().sum(1, keepdim=True)
            better = error < least
            for kept, found in zip(best, (codes, scale, zero), strict=True):
                torch.where(better, found, kept, out=kept)
            least = torch.minimum(least, error)
            scale, zero = _fitted(groups, codes)
    codes, scale, zero = best
    first, second = codes.add_(8).to(torch.uint8).chunk(2, 1)
    return first | (second << 4), scale.to(torch.bfloat16), zero.to(torch.bfloat16)


def _fitted(groups: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and the zero with which these codes come closest to the weights."""
    mean, centre = groups.mean(1, keepdim=True), codes.mean(1, keepdim=True)
    spread = codes - centre
    scale = _coarse((spread * groups).sum(1, keepdim=True) / spread.square().sum(1, keepdim=True).clamp_min(1e-9))
    return scale, _rounded(mean - scale * centre)


def _rounded(values: Tensor) -> Tensor:
    """As they will be stored."""
    return values.to(torch.bfloat16).float()


def _coarse(scale: Tensor) -> Tensor:
    """A scale as it will be stored. Weights that are all the same have any."""
    scale = _rounded(scale)
    return torch.where(scale == 0, 1.0, scale)
