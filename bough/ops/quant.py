"""Weights of 8 or 4 bits, and products with them. At most a tile of one matrix is expanded at a time.

A weight is q · scale in 8 bits and (q − 8) · scale + zero in 4, where scale and zero are those of its group: some
inputs, next to each other, of one output.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bough.ops.twins import twins

TILE = 1 << 19  # weights expanded at a time on CPUs: a tile should stay in the processor's cache
DEVICE_TILE = 1 << 27  # elsewhere
HALVES = 8  # of words, in a chunk
BLOCK = 32  # outputs, of which those that have plain ones beside them must be a multiple


@dataclass(frozen=True)
class Quantised:
    """A matrix [out, in], or a stack of them [..., out, in], as it lies in files.

    data: int8 [..., in], or uint8 [..., in / 2]; there each byte has one weight from the first half of a group (low
    bits) and the one as far into its second half. scale, and in 4 bits zero: [..., groups] in the dtype of activations.
    """

    data: Tensor
    scale: Tensor
    zero: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.data.shape[:-1], self.data.shape[-1] * (1 if self.zero is None else 2))

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def group(self) -> int:
        return self.shape[-1] // self.scale.shape[-1]

    @property
    def form(self) -> tuple[torch.dtype, int]:
        """What is equal for matrices that can be one."""
        return self.data.dtype, self.group

    def __getitem__(self, rows: int | slice | Tensor) -> "Quantised":
        return Quantised(self.data[rows], self.scale[rows], None if self.zero is None else self.zero[rows])

    def codes(self) -> Tensor:
        """q [..., groups, group], in the data's dtype."""
        data = self.data.unflatten(-1, (self.scale.shape[-1], -1))
        return data if self.zero is None else torch.cat([data & 15, data >> 4], -1)

    def expanded(self) -> Tensor:
        """The weights in the dtype of activations."""
        scale, codes = self.scale[..., None], self.codes().to(self.scale.dtype)
        if self.zero is None:
            return codes.mul_(scale).flatten(-2)
        return torch.addcmul(self.zero[..., None], codes.sub_(8), scale).flatten(-2)

    def product(self, x: Tensor) -> Tensor:
        """x [T, in] · weightᵀ."""
        return expanding(self, x)


@dataclass(frozen=True)
class Chunks:
    """A matrix [out, in] as the twins on devices read it: 16 bytes at a time, which are inputs next to each other.

    data: int16 [out, halves]. Eight halves of a word are a chunk of 16 or 32 weights; of these the weight 8 · i + j is
    the i-th code of the half j, from its low bits. Codes of 8 bits have 128 added. steps [out, groups, 1 or 2]: scale,
    and in 4 bits zero. beside [more, in]: outputs after these, whose weights have not been quantised.
    """

    data: Tensor
    steps: Tensor
    beside: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        out, halves = self.data.shape
        return out + (0 if self.beside is None else len(self.beside)), halves * 2 * self.steps.shape[-1]

    def __getitem__(self, rows: slice) -> "Chunks":
        """Some of the outputs that have been quantised."""
        return Chunks(self.data[rows], self.steps[rows])

    def expanded(self) -> Tensor:
        assert self.beside is None
        return self._twin().expanded(self)

    def product(self, x: Tensor) -> Tensor:
        """x [T, in] · weightᵀ, of many rows. Those of few are the twins' own."""
        if self.beside is None:
            return expanding(self, x)
        return torch.cat([expanding(self[:], x), F.linear(x, self.beside)], -1)

    def above(self, plain: Tensor) -> "Chunks | None":
        """With a plain weight beneath; None if that would be no single launch."""
        alike = self.beside is None and plain.dtype == self.steps.dtype and plain.is_contiguous()
        return replace(self, beside=plain) if alike and len(self.data) % BLOCK == 0 else None

    def _twin(self) -> Any:
        return twins(self.data)


def chunks(weight: Quantised) -> Chunks | None:
    """The weight as twins read it; None if there are none here, or if its groups are no whole chunks."""
    each, over = divmod(weight.group, 16 if weight.zero is None else 32)
    if twins(weight.data) is None or over or each & (each - 1):
        return None
    return Chunks(in_chunks(weight), in_steps(weight))


def in_chunks(weight: Quantised) -> Tensor:
    """The data of Chunks."""
    size = 16 if weight.zero is None else 32
    codes = weight.codes().reshape(weight.shape[0], -1, size // HALVES, HALVES).transpose(-1, -2)
    if weight.zero is None:
        codes = codes.view(torch.uint8) ^ 128
    else:
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    return codes.contiguous().view(torch.int16).flatten(1)


def in_steps(weight: Quantised) -> Tensor:
    """The steps of Chunks."""
    return torch.stack([each for each in (weight.scale, weight.zero) if each is not None], -1)


def expanding(weight: Quantised | Chunks, x: Tensor) -> Tensor:
    """x [T, in] · weightᵀ by ordinary products, with some outputs at a time."""
    out, inputs = weight.shape
    step = max(1, (TILE if x.device.type == "cpu" else DEVICE_TILE) // inputs)
    tiles = [F.linear(x, weight[at : at + step].expanded()) for at in range(0, out, step)]
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles, -1)


def stacked(weights: Sequence[Quantised]) -> Quantised:
    """Matrices of one form, one under the other."""
    zeros = [each.zero for each in weights if each.zero is not None]
    data, scale = (torch.cat([getattr(each, name) for each in weights]) for name in ("data", "scale"))
    return Quantised(data, scale, torch.cat(zeros) if zeros else None)
