"""Layered: the models whose every layer is a norm, a mixer of tokens, a norm and an MLP, each added to the stream."""

from typing import Protocol

from torch import Tensor

from bough.models.blocks import Rope, Rotation, narrowed, narrowing
from bough.models.model import Model
from bough.models.weights import Weights
from bough.ops import Addend, Input, Norm
from bough.state.kinds import Kind
from bough.state.step import Ends, Step


class Mixer(Protocol):
    """What lets tokens see one another, through state of a kind."""

    @property
    def kind(self) -> Kind: ...
    def __call__(self, x: Input, step: Step, rotation: Rotation, wanted: Ends | None) -> Addend:
        """What it adds to the stream of the wanted tokens, now that all are stored; None: of all."""
        ...


class MLP(Protocol):
    def __call__(self, x: Input) -> Addend: ...


class Layer:
    def __init__(self, mixer_norm: Norm, mixer: Mixer, mlp_norm: Norm, mlp: MLP) -> None:
        self.mixer_norm, self.mixer, self.mlp_norm, self.mlp = mixer_norm, mixer, mlp_norm, mlp

    def __call__(
        self, x: Tensor, y: Addend | None, step: Step, rotation: Rotation, wanted: Ends | None = None
    ) -> tuple[Tensor, Addend]:
        """The stream, and what is yet to be added to it: on the way in and out, since the next norm adds it."""
        x, normed = self.mixer_norm.after(x, y)
        x, normed = self.mlp_norm.after(narrowed(x, wanted), self.mixer(normed, step, rotation, wanted))
        return x, self.mlp(normed)


class Layered(Model):
    def _stack(self, layers: list[Layer], norm: Norm, weights: Weights) -> None:
        """What a model is made of, once it has read its layers and the norm after them."""
        self.layers, self.norm = layers, norm
        self.rope = Rope(self.config.head_size, self.config.rope(), self.context, weights)
        self.kinds = [layer.mixer.kind for layer in layers]

    def __call__(self, step: Step) -> Tensor:
        x, rotation = self.embed(step.tokens), self.rope(step.positions)
        y = None
        for layer, wanted in narrowing(self.layers, step):
            x, y = layer(x, y, step, rotation, wanted)
        return self.norm.whole(x, y)[1]
