"""Quantised products of few rows on CPUs, where they are a matter of reading the weights once.

torch has an op for that, of weights in 4 bits and rows in bfloat16. An 8-bit weight is 16 · high + low, so two planes
of 4 bits do for it what one does for the others. The op reads a layout of its own, from which products of many rows
expand tiles: nothing is kept twice.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from bough.ops.quant import TILE, Quantised

FEW = 48  # rows, up to which the op is faster with one plane than expanding tiles; half with two
GROUPS = (32, 64, 128, 256)  # that the op knows


@dataclass(frozen=True)
class Planes:
    """A matrix [out, in] as one plane of 4 bits, or two side by side: each row's high halves and then its low ones.

    data: as the op has it. scales: [planes · groups, out, 2], scale and zero in bfloat16.
    """

    data: Tensor
    scales: Tensor
    shape: tuple[int, int]
    count: int  # of planes

    @property
    def group(self) -> int:
        return self.shape[1] * self.count // self.scales.shape[0]

    def product(self, x: Tensor) -> Tensor:
        """x [T, in] · weightᵀ."""
        if not 0 < len(x) <= FEW // self.count:
            return self._expanding(x)
        each = x.contiguous() if self.count == 1 else x.repeat(1, self.count)  # so the op adds the planes up, unrounded
        return torch.ops.aten._weight_int4pack_mm_for_cpu(each, self.data, self.group, self.scales)

    def _expanding(self, x: Tensor) -> Tensor:
        """The same by ordinary products with some blocks of outputs at a time, each expanded as [in, out]."""
        (out, inputs), groups, width = self.shape, self.shape[1] // self.group, block_rows()
        blocks, step = out // width, max(1, TILE // (inputs * width))
        data = self.data.view(blocks, self.count, groups, self.group, width // 2)
        by_block = self.scales[-groups:].view(groups, blocks, 1, width, 2).permute(4, 1, 0, 2, 3)
        scale, zero = by_block.float().contiguous()  # [blocks, groups, 1, width]
        zero = zero - (8 if self.count == 1 else 136) * scale  # that of the low plane has 8 more in it
        y = x.new_empty(len(x), out)
        for at in range(0, blocks, step):
            some = slice(at, at + step)
            codes = unpacked(data[some, 0]) if self.count == 1 else joined(data[some, 0], data[some, 1])
            weight = torch.addcmul(zero[some], codes.float(), scale[some]).flatten(1, 2)  # [blocks, in, width]
            tile = x.new_empty(inputs, len(weight), width).copy_(weight.transpose(0, 1))
            torch.mm(x, tile.flatten(1), out=y[:, at * width : at * width + tile.shape[1] * width])
        return y


def unpacked(data: Tensor) -> Tensor:
    """The codes [..., width] in a block of the op's layout: each byte has one of the first rows and one of the rest."""
    return torch.cat([data & 15, data >> 4], -1)


def joined(high: Tensor, low: Tensor) -> Tensor:
    """The same of two planes: 16 · high + low."""
    return torch.cat([(high << 4) | (low & 15), (high & 240) | (low >> 4)], -1)


def planes(weight: Quantised) -> Planes | None:
    """The weight as the op reads it; None if it serves nothing here."""
    out, inputs = weight.shape
    width = block_rows()
    if weight.scale.dtype != torch.bfloat16 or weight.group not in GROUPS or not width or out % width:
        return None
    scale, zero, count = weight.scale, weight.zero, 1
    if zero is None:
        scale, zero, count = torch.cat([16 * scale, scale], 1), torch.cat([torch.zeros_like(scale), 8 * scale], 1), 2
    scales = torch.stack([scale.T, zero.T], -1).contiguous()
    step = max(1, TILE // (inputs * width)) * width  # the op packs from 4 bytes a code, so some blocks at a time
    data = torch.cat([_packed(_codes(weight[at : at + step])) for at in range(0, out, step)])
    return Planes(data, scales, (out, inputs), count)


def _codes(weight: Quantised) -> Tensor:
    """The codes [out, planes · in] of the planes, side by side."""
    codes = weight.codes().flatten(-2)
    if weight.zero is not None:
        return codes
    offset = codes.to(torch.int16) + 128
    return torch.cat([offset >> 4, offset & 15], 1)


def _packed(codes: Tensor) -> Tensor:
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32).contiguous(), 1)


@cache
def block_rows() -> int:
    """How many rows are a block in the op's layout, which depends on the processor; 0 if it is none of these."""
    codes = torch.arange(128 * 32).view(128, 32) * 7919 % 97 % 16
    for width in (64, 32):
        blocks = unpacked(_packed(codes).view(128 // width, 32, width // 2))
        if torch.equal(blocks.transpose(1, 2).reshape(128, 32), codes.to(torch.uint8)):
            return width
    return 0
