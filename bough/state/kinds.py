"""Layer kinds: what a layer has to remember, said by the model that owns the layer.

A kind is a unit of memory (a Page of per-token entries or a Slot of cumulative state), a reach (how many earlier
tokens' entries must be present to go on at length n; None means all of them) and the parts it keeps in the unit.
Nothing else in the system knows one kind from another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bough import ops
from bough.ops.ragged import Replayed, ReplayedRow


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor that a kind keeps in its unit: per token for pages, per sequence for slots."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


Replay = Callable[[Sequence[Replayed], Sequence[ReplayedRow]], None]


@dataclass(frozen=True, slots=True)
class SlotPart(Part):
    """A part of a slot, and how recorded inputs move it on, in all layers that have it.

    One that is `late` is so large that forwards rather record what would move it on, and write it once in a while.
    """

    replay: Replay
    late: bool = False


@dataclass(frozen=True, slots=True)
class PageKind:
    """K and V of one attention layer, one entry a token. K and V may differ in width."""

    heads: int
    k_dim: int
    v_dim: int

    @property
    def reach(self) -> int | None:
        raise NotImplementedError

    def parts(self, kv_dtype: torch.dtype) -> tuple[Part, ...]:
        return (Part("k", (self.heads, self.k_dim), kv_dtype), Part("v", (self.heads, self.v_dim), kv_dtype))


@dataclass(frozen=True, slots=True)
class FullKV(PageKind):
    """Attention over all earlier tokens."""

    @property
    def reach(self) -> int | None:
        return None


@dataclass(frozen=True, slots=True)
class WindowKV(PageKind):
    """Attention over the last `window` tokens, the present one included."""

    window: int

    @property
    def reach(self) -> int | None:
        return self.window - 1


@dataclass(frozen=True, slots=True)
class SlotKind:
    """A fixed-size record that stands for all tokens so far."""

    def parts(self, dtype: torch.dtype) -> tuple[SlotPart, ...]:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Recurrent(SlotKind):
    """A gated-delta layer: the last inputs of its convolution, and its matrix a head (always float32)."""

    channels: int
    kernel: int
    heads: int
    k_dim: int
    v_dim: int

    def parts(self, dtype: torch.dtype) -> tuple[SlotPart, ...]:
        return (
            SlotPart("conv", (self.kernel - 1, self.channels), dtype, ops.replay_conv),
            SlotPart("delta", (self.heads, self.k_dim, self.v_dim), torch.float32, ops.replay_delta, late=True),
        )


@dataclass(frozen=True, slots=True)
class ShortConv(SlotKind):
    """A short convolution: the last kernel − 1 of its inputs."""

    width: int
    kernel: int

    def parts(self, dtype: torch.dtype) -> tuple[SlotPart, ...]:
        return (SlotPart("conv", (self.kernel - 1, self.width), dtype, ops.replay_conv),)


Kind = PageKind | SlotKind
