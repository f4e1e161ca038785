"""The layers that models are made of. Each takes its input, the step, and what it needs; none keeps state."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch.nn.functional as F
from torch import Tensor

from bough import ops
from bough.errors import UnknownArchitecture
from bough.ops import Activation, Addend, Input, Matrices, Norm, Pages, Parts, Quantised
from bough.state.kinds import FullKV, PageKind, WindowKV
from bough.state.step import Ends, Step

if TYPE_CHECKING:
    from bough.models.weights import Weights

Rotation = tuple[Tensor, Tensor]  # cos and sin of the step's positions
Layer = TypeVar("Layer")


class Linear:
    """x Wᵀ + b."""

    def __init__(self, weight: Tensor | Quantised | Parts, bias: Tensor | None = None) -> None:
        self.weight, self.bias = ops.arranged(weight), bias

    def __call__(self, x: Input) -> Tensor:
        return ops.linear(x, self.weight, self.bias)

    def later(self, x: Tensor) -> Addend:
        """The same, left undone if the norm after it can do it."""
        return ops.later(x, self.weight, self.bias)


class Rope:
    """Turns positions into rotations, for one set of rope parameters."""

    def __init__(self, head_dim: int, parameters: Mapping[str, Any], context: int, weights: "Weights") -> None:
        frequencies, self.factor = ops.inverse_frequencies(head_dim, parameters, context)
        self.frequencies, self.dtype = frequencies.to(weights.device), weights.dtype

    def __call__(self, positions: Tensor) -> Rotation:
        return ops.rotations(positions, self.frequencies, self.factor, self.dtype)


class Attention:
    """Grouped-query attention over the pages of one layer."""

    def __init__(
        self,
        weights: "Weights",
        prefix: str,
        layer: int,
        *,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        gated: bool = False,
        bias: bool = False,
        out: str = "o_proj",
        out_bias: bool = False,
    ) -> None:
        self.layer, self.heads, self.kv_heads, self.head_dim = layer, heads, kv_heads, head_dim
        self.window, self.softcap = window, softcap
        self.scale = head_dim**-0.5 if scale is None else scale
        self.q_norm, self.k_norm, self.gated = q_norm, k_norm, gated
        self.sizes = [heads * head_dim * (1 + gated), kv_heads * head_dim, kv_heads * head_dim]
        names = [f"{prefix}.{each}_proj" for each in "qkv"]
        self.qkv = weights.linear(names, self.sizes, hidden, bias)
        self.out = weights.linear(f"{prefix}.{out}", hidden, heads * head_dim, out_bias)

    @property
    def kind(self) -> PageKind:
        return attention_kind(self.kv_heads, self.head_dim, self.window)

    def __call__(self, x: Input, step: Step, rotation: Rotation, wanted: Ends | None) -> Addend:
        q, k, v = projected(x, self.qkv, self.sizes, wanted)
        q = q.view(len(q), self.heads, self.sizes[0] // self.heads)  # [T, H, d], or [T, H, 2d] with the gate
        gate = None
        if self.gated:
            q, gate = q.chunk(2, -1)
        k, v = (each.view(len(x), self.kv_heads, self.head_dim) for each in (k, v))
        pages, norms = step.pages(self.layer), (self.q_norm, self.k_norm, None)
        q = placed(q, (k, v), pages, rotation, norms, wanted)
        step = step if wanted is None else step.at_ends(wanted)
        seen = ops.attention(
            q,
            step.rows,
            stored=pages,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            masks=step.masks,
            gate=gate,
        )
        return self.out.later(seen.flatten(1))


def projected(x: Input, linear: Linear, sizes: Sequence[int], wanted: Ends | None) -> Sequence[Tensor]:
    """The queries of the wanted tokens, and K and V of all: one product, but where a plain weight can be parted."""
    weight, bias, own = linear.weight, linear.bias, sizes[0]
    if wanted is None or not isinstance(weight, Tensor):
        q, *kv = linear(x).split(sizes, -1)
        return narrowed(q, wanted), *kv
    x = ops.made(x)
    q = ops.linear(narrowed(x, wanted), weight[:own], None if bias is None else bias[:own])
    both = ops.linear(x, weight[own:], None if bias is None else bias[own:])
    return q, *both.split(sizes[1:], -1)


def placed(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    pages: Pages,
    rotation: Rotation,
    norms: tuple[Norm | None, Norm | None, Norm | None],
    wanted: Ends | None,
) -> Tensor:
    """The queries of the wanted tokens, normed and turned, and K and V of all in their pages."""
    if wanted is None:
        return ops.place_heads(q, rotation, kv=kv, pages=pages, norms=norms)
    ops.place_heads(kv[0][:, :0], rotation, kv=kv, pages=pages, norms=norms)
    cos, sin = rotation
    return ops.place_heads(q, (narrowed(cos, wanted), narrowed(sin, wanted)), norms=norms)


def attention_kind(kv_heads: int, head_dim: int, window: int | None) -> PageKind:
    return FullKV(kv_heads, head_dim, head_dim) if window is None else WindowKV(kv_heads, head_dim, head_dim, window)


Names = tuple[str, str, str]
NAMES: Names = ("gate_proj", "up_proj", "down_proj")  # of an MLP's matrices, where files have no others


class GatedMLP:
    """down(activation(gate x) · up x), with gate and up in one product."""

    def __init__(
        self,
        weights: "Weights",
        prefix: str,
        hidden: int,
        width: int,
        activation: Activation = F.silu,
        names: Names = NAMES,
        bias: bool = False,
    ) -> None:
        gate, up, down = (f"{prefix}.{name}" for name in names)
        self.gate_up = weights.linear([gate, up], [width, width], hidden, bias)
        self.down = weights.linear(down, hidden, width, bias)
        self.activation = activation

    def __call__(self, x: Input) -> Addend:
        if not len(x):  # since no row is wanted: quantised weights would be unpacked all the same
            return ops.made(x)
        return self.down.later(ops.gated_linear(x, self.gate_up.weight, self.gate_up.bias, self.activation))


def read_experts(
    weights: "Weights", prefix: str, count: int, hidden: int, width: int, names: Names = NAMES
) -> tuple[Matrices, Matrices]:
    """gate and up [2 · width, hidden] and down [hidden, width] of each. Files have them one by one or stacked."""
    if f"{prefix}.gate_up_proj" in weights:
        gate_up = weights.stack(f"{prefix}.gate_up_proj", count, 2 * width, hidden)
        return gate_up, weights.stack(f"{prefix}.down_proj", count, hidden, width)
    each = [[f"{prefix}.{index}.{name}" for name in names] for index in range(count)]
    inputs = [weights.linear([gate, up], [width, width], hidden) for gate, up, _ in each]
    outputs = [weights.linear(down, hidden, width) for *_, down in each]
    return ops.matrices([one.weight for one in inputs]), ops.matrices([one.weight for one in outputs])


def narrowing(layers: Sequence[Layer], step: Step) -> Iterator[tuple[Layer, Ends | None]]:
    """The layers that store something, each with the tokens that are wanted once it has stored; None: all.

    Only the last can leave some out: what becomes of a token from there on, no other token looks at.
    """
    yield from ((layer, None) for layer in layers[:-1])
    yield layers[-1], step.wanted


def narrowed(x: Tensor, wanted: Ends | None) -> Tensor:
    """The rows [T, ...] of the wanted tokens."""
    return x if wanted is None else x[wanted.places]


ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": ops.gelu_tanh,
    "gelu_tanh": ops.gelu_tanh,
}


def activation(name: str) -> Activation:
    if name not in ACTIVATIONS:
        raise UnknownArchitecture(f"activation {name!r} is not supported; Bough knows {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
