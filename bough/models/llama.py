"""Llama and models of its shape (Mistral, SmolLM2): pre-norm attention and SwiGLU.

A family that differs only in its windows or in norms on the heads is a subclass (qwen3.py).
"""

from torch import Tensor

from bough.models.blocks import Attention, GatedMLP, Rope, Rotation, activation, narrowed, narrowing
from bough.models.config import ModelConfig
from bough.models.model import Model
from bough.models.weights import Weights
from bough.ops import Addend, Norm
from bough.state.step import Step


class Layer:
    def __init__(self, config: ModelConfig, weights: Weights, index: int, window: int | None, head_norms: bool) -> None:
        prefix, hidden, head_dim = f"model.layers.{index}", config.hidden_size, config.head_size

        def norm(name: str, size: int) -> Norm:
            return Norm(weights.tensor(f"{prefix}.{name}.weight", (size,)), config.rms_norm_eps, rounded=True)

        self.attention_norm = norm("input_layernorm", hidden)
        self.attention = Attention(
            weights,
            f"{prefix}.self_attn",
            index,
            hidden=hidden,
            heads=config.num_attention_heads,
            kv_heads=config.get("num_key_value_heads", config.num_attention_heads),
            head_dim=head_dim,
            window=window,
            q_norm=norm("self_attn.q_norm", head_dim) if head_norms else None,
            k_norm=norm("self_attn.k_norm", head_dim) if head_norms else None,
            bias=config.get("attention_bias", False),
            out_bias=config.get("attention_bias", False),
        )
        self.mlp_norm = norm("post_attention_layernorm", hidden)
        self.mlp = GatedMLP(
            weights,
            f"{prefix}.mlp",
            hidden,
            config.intermediate_size,
            activation(config.get("hidden_act", "silu")),
            bias=config.get("mlp_bias", False),
        )

    def __call__(
        self, x: Tensor, y: Addend | None, step: Step, rotation: Rotation, wanted: Tensor | None
    ) -> tuple[Tensor, Addend]:
        """The stream, and what is yet to be added to it: on the way in and out, since the next norm adds it."""
        x, normed = self.attention_norm.after(x, y)
        x, normed = self.mlp_norm.after(*narrowed(x, self.attention(normed, step, rotation), wanted))
        return x, self.mlp(normed)


class Llama(Model):
    head_norms = False  # whether each head of q and k is normed before it is rotated

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.layers = [Layer(config, weights, i, window, self.head_norms) for i, window in enumerate(self.windows())]
        norm = weights.tensor("model.norm.weight", (config.hidden_size,))
        self.norm = Norm(norm, config.rms_norm_eps, rounded=True)
        self.rope = Rope(config.head_size, config.rope(), self.context, weights)
        self.kinds = [layer.attention.kind for layer in self.layers]

    def windows(self) -> list[int | None]:
        """The window of each layer; None where it sees all."""
        return [self.config.get("sliding_window")] * self.config.num_hidden_layers

    def __call__(self, step: Step) -> Tensor:
        x, rotation = self.embed(step.tokens), self.rope(step.positions)
        y = None
        for layer, wanted in narrowing(self.layers, step):
            x, y = layer(x, y, step, rotation, wanted)
        return self.norm.whole(x, y)[1]
