"""What is left undone until it is known what follows, which can then do it on the way.

A step of few rows on a device is a row of short launches, and a norm between two products costs one of its own. But the
product before it can add, scale and measure what it has just made (Product), and the one after it can divide its sums
by the root of that measure (Normed). Both are made only where twins do this; elsewhere everything is done in its turn.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from bough.ops.quant import Chunks
from bough.ops.twins import twins


@dataclass(frozen=True, eq=False)
class Product:
    """x [T, in] · weightᵀ, yet to be computed."""

    x: Tensor
    weight: Tensor | Chunks

    def made(self) -> Tensor:
        product: Tensor = self._twin().few_rows(self.x, self.weight)
        return product

    def normed(self, onto: Tensor, scale: Tensor | None, eps: float) -> "tuple[Tensor, Normed]":
        """Its sum with the rows [T, out], and the norm of that."""
        made = self._twin().product_normed(self.x, self.weight, onto, scale)
        return made.total, Normed(made.out, made.squares, eps)

    def _twin(self) -> Any:
        return twins(self.x)


@dataclass(frozen=True, eq=False)
class Normed:
    """The norm of some rows, but for the division by the root of their mean square."""

    scaled: Tensor  # [T, d]: by the norm's weight
    squares: Tensor  # [N, T] float32: the sums over parts of each row, before it was scaled
    eps: float

    def __len__(self) -> int:
        return len(self.scaled)

    def made(self) -> Tensor:
        mean = self.squares.sum(0) / self.scaled.shape[1]
        return (self.scaled * torch.rsqrt(mean + self.eps)[:, None]).to(self.scaled.dtype)


Input: TypeAlias = Tensor | Normed  # of a product
Addend: TypeAlias = Tensor | Product  # of a stream of rows


def made(x: Input | Addend) -> Tensor:
    """What is undone of it, done."""
    return x if isinstance(x, Tensor) else x.made()
