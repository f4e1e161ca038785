"""Matrix products. One row is special on CPUs: it is a matter of reading the weights once, as fast as memory gives."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from bough.ops.activation import Activation, gated
from bough.ops.deferred import Addend, Input, Normed, Product, made
from bough.ops.quant import Chunks, Quantised, chunks, stacked
from bough.ops.quant_cpu import Planes, Tables, block_rows, planes, tabled
from bough.ops.twins import twins

onednn: Any = torch.backends.mkldnn


@dataclass(frozen=True)
class Parts:
    """Matrices of one input that are not all of one form, one under the other."""

    parts: tuple["Weight", ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def product(self, x: Tensor) -> Tensor:
        return torch.cat([linear(x, part) for part in self.parts], -1)


Weight: TypeAlias = Tensor | Quantised | Chunks | Planes | Tables | Parts  # a matrix [out, in], whatever it is made of


def linear(x: Input, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x [T, in] · weightᵀ [in, out] + bias."""
    if (fast := few(x, weight)) is not None:
        few_rows: Tensor = fast.few_rows(x, weight, bias)
        return few_rows
    x = made(x)
    if not isinstance(weight, Tensor):
        y = weight.product(x)
        return y if bias is None else y + bias
    if x.dtype == torch.bfloat16 and len(x) == 1 and x.device.type == "cpu" and onednn.enabled:
        # torch's own bfloat16 matrix-vector product reads at twice the rate of the library it would hand this to.
        onednn.enabled = False
        try:
            return F.linear(x, weight, bias)
        finally:
            onednn.enabled = True
    fast = twins(x)
    product: Tensor = F.linear(x, weight, bias) if fast is None else fast.product(x, weight, bias)
    return product


def later(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Addend:
    """The same, but left undone where a norm that follows can do it better.

    In float16 rows that are not yet divided by their root might leave its range.
    """
    left = bias is None and x.dtype != torch.float16
    if left and isinstance(weight, Tensor | Chunks) and few(x, weight) is not None:
        return Product(x, weight)
    return linear(x, weight, bias)


def few(x: Input, weight: Weight) -> Any:
    """The twins, where they are faster since there are few rows."""
    x = x.scaled if isinstance(x, Normed) else x
    fast = twins(x) if isinstance(weight, Tensor | Chunks) else None
    return fast if fast is not None and fast.few(x, weight) else None


def gated_linear(x: Input, weight: Weight, bias: Tensor | None, activation: Activation) -> Tensor:
    """activation(gate) · up of the products of x with both, one under the other in the weight."""
    mixed = isinstance(weight, Chunks) and weight.beside is not None  # where a gate may be of another form than its up
    fast = None if mixed or bias is not None else few(x, weight)
    if fast is not None and activation in fast.ACTIVATIONS:
        gated_rows: Tensor = fast.gated_rows(x, weight, activation)
        return gated_rows
    own = twins(x) if bias is None and isinstance(x, Tensor) and isinstance(weight, Tensor) else None
    done: Tensor | None = None if own is None else own.wide(x, weight, activation)
    if done is not None:
        return done
    gate, up = linear(x, weight, bias).chunk(2, -1)
    return gated(gate, up, activation)


def fused(weights: Sequence[Tensor | Quantised]) -> Tensor | Quantised | Parts:
    """Matrices of one input as one; neighbours of one form become a single product."""
    merged: list[Tensor | Quantised] = []
    for kind, some in groupby(weights, lambda each: None if isinstance(each, Tensor) else each.form):
        same: list[Any] = list(some)
        merged.append(same[0] if len(same) == 1 else torch.cat(same) if kind is None else stacked(same))
    return merged[0] if len(merged) == 1 else Parts(tuple(merged))


@overload
def arranged(weight: Tensor) -> Tensor: ...
@overload
def arranged(weight: Weight) -> Weight: ...
def arranged(weight: Weight) -> Weight:
    """The weight [out, in], laid out in memory as `linear` of one row reads it fastest.

    On CPUs, float32 products with more outputs than inputs read a transposed weight at up to twice the rate; those of
    many rows do not mind.
    """
    if isinstance(weight, Parts):
        match parts := tuple(arranged(part) for part in weight.parts):
            case (Chunks() as quantised, Tensor() as plain) if (whole := quantised.above(plain)) is not None:
                return whole
        return Parts(parts)
    if isinstance(weight, Planes | Tables | Chunks):
        return weight
    if isinstance(weight, Quantised):
        return _on_cpu(weight) if weight.device.type == "cpu" else chunks(weight) or weight
    out, inputs = weight.shape
    if weight.dtype == torch.float32 and weight.device.type == "cpu" and out > inputs:
        return weight.T.contiguous().T
    return weight


def _on_cpu(weight: Quantised) -> Weight:
    """Outputs that are no whole block of the op's are few, and better expanded than the reason to expand all."""
    if (tables := tabled(weight)) is not None:
        return tables
    whole = len(weight.data) - len(weight.data) % (block_rows() or 1)
    packed = planes(weight[:whole]) if whole else None
    if packed is None:
        return weight
    return packed if whole == len(weight.data) else Parts((packed, weight[whole:].expanded()))
