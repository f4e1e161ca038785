"""Quantised products of few rows on CPUs, where they are a matter of reading the weights once.

torch has an op for that, of weights in 4 bits and rows in bfloat16. For 8 bits there is another where torch comes with
FBGEMM: it looks embeddings up, and adds them up with weights. A matrix is a table of those: one for each input, of all
outputs. The inputs of a group are a bag, the row's values their weights, and the sums of bags are then scaled. Without
it, and where matrices are small, an 8-bit weight is 16 · high + low, and two planes of 4 bits do for it what one does
for the others.

Both read a layout of their own, from which products of many rows expand tiles: nothing is kept twice.
"""

from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from bough.ops.quant import TILE, Quantised

FEW = 48  # rows, up to which the op is faster with one plane than expanding tiles; half with two
GROUPS = (32, 64, 128, 256)  # that the op knows
WIDTH = 256  # outputs of a table: of more, the rows of a bag do not stay near each other
FEW_BAGS = 12  # rows, up to which bags are faster than expanding tiles
SMALL = 1 << 20  # weights, of fewer than which planes are faster: bags take some more calls
ADDED = 128  # to codes in a table, which have no sign


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


@dataclass(frozen=True)
class Tables:
    """A matrix [out, in] of 8 bits as tables, which are alike: the last may have more outputs than there are.

    data: uint8 [tables · in, outputs + 8], the last eight bytes being what the op scales by and adds: 1 and −ADDED.
    scales: [tables, groups, outputs].
    """

    data: Tensor
    scales: Tensor
    shape: tuple[int, int]

    def product(self, x: Tensor) -> Tensor:
        """x [T, in] · weightᵀ."""
        (out, inputs), (tables, groups, width), rows = self.shape, self.scales.shape, len(x)
        if not 0 < rows <= FEW_BAGS:
            return self._expanding(x)
        step = min(tables, max(1, TILE // (groups * rows * width)))
        seen = x.float().unflatten(1, (groups, -1)).transpose(0, 1).expand(step, -1, -1, -1).flatten().contiguous()
        places, ends = bags(step, groups, rows, inputs // groups)
        sums = [self._summed(at, step, places, ends, seen) for at in range(0, tables, step)]
        y = sums[0] if len(sums) == 1 else torch.cat(sums)
        return y.transpose(0, 1).reshape(rows, -1)[:, :out].to(x.dtype)

    def _summed(self, first: int, step: int, places: Tensor, ends: Tensor, seen: Tensor) -> Tensor:
        """What up to `step` tables give for rows: [tables, rows, outputs] in float32."""
        inputs, (tables, groups, width) = self.shape[1], self.scales.shape
        data, scales, bagged = self.data, self.scales, (places, ends, seen)
        if step < tables:
            data, scales = data[first * inputs : (first + step) * inputs], scales[first : first + step]
        if (count := len(scales)) < step:
            part, last = len(places) // step * count, (len(ends) - 1) // step * count
            bagged = places[:part], ends[: last + 1], seen[:part]
        return looked_up(data, *bagged).view(count, groups, -1, width).mul_(scales[:, :, None]).sum(1)

    def _expanding(self, x: Tensor) -> Tensor:
        """The same by ordinary products with a table at a time, expanded as [in, outputs]."""
        (out, _), (tables, groups, width) = self.shape, self.scales.shape
        data = self.data.view(tables, groups, -1, width + 8)[..., :width]
        y = x.new_empty(len(x), tables, width)
        for at in range(tables):
            weight = data[at].to(x.dtype).sub_(ADDED).mul_(self.scales[at, :, None])
            y[:, at] = x @ weight.flatten(0, 1)
        return y.flatten(1)[:, :out]


def looked_up(table: Tensor, places: Tensor, ends: Tensor, weights: Tensor) -> Tensor:
    """The sums [bags, outputs] in float32 of rows of a table, each with a weight."""
    op = torch.ops.quantized.embedding_bag_byte_rowwise_offsets
    sums: Tensor = op(table, places, ends, per_sample_weights=weights, include_last_offset=True)
    return sums


@lru_cache(maxsize=32)  # of up to a megabyte
def bags(tables: int, groups: int, rows: int, group: int) -> tuple[Tensor, Tensor]:
    """The inputs [tables · groups · rows · group] in all bags, and where bags end, from 0 on."""
    places = torch.arange(tables * groups * group, dtype=torch.int32).view(-1, 1, group).expand(-1, rows, -1).flatten()
    return places, torch.arange(0, len(places) + 1, group, dtype=torch.int32)


def tabled(weight: Quantised) -> Tables | None:
    """The weight as tables; None if these serve nothing here."""
    (out, inputs), group = weight.shape, weight.group
    if weight.zero is not None or group < GROUPS[0] or out * inputs < SMALL or not has_bags():
        return None
    tables = -(-out // WIDTH)
    width = -(-out // tables)
    data = torch.zeros(tables, inputs, width + 8, dtype=torch.uint8)
    data[..., width:] = torch.tensor([1.0, -ADDED]).view(torch.uint8)
    scales = weight.scale.new_zeros(tables, inputs // group, width)
    for at in range(tables):
        some = weight[at * width : (at + 1) * width]
        data[at, :, : len(some.data)] = some.data.T.view(torch.uint8) ^ ADDED
        scales[at, :, : len(some.data)] = some.scale.T
    return Tables(data.view(-1, width + 8), scales, (out, inputs))


@cache
def has_bags() -> bool:
    """Whether torch comes with FBGEMM, which has the op."""
    return "fbgemm" in torch.backends.quantized.supported_engines


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
