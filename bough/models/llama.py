"""Llama and models of its shape (Mistral, SmolLM2): pre-norm attention and SwiGLU.

A family that differs only in its windows or in norms on the heads is a subclass (qwen3.py).
"""

from torch import Tensor

from bough.models.blocks import Attention, GatedMLP, RMSNorm, Rope, Rotation, activation
from bough.models.config import ModelConfig
from bough.models.model import Model
from bough.models.weights import Weights
from bough.state.step import Step


class Layer:
    def __init__(self, config: ModelConfig, weights: Weights, index: int, window: int | None, head_norms: bool) -> None:
        prefix, hidden, head_dim = f"model.layers.{index}", config.hidden_size, config.head_size

        def norm(name: str, size: int) -> RMSNorm:
            return RMSNorm(weights.tensor(f"{prefix}.{name}.weight", (size,)), config.rms_norm_eps)

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

    def __call__(self, x: Tensor, step: Step, rotation: Rotation) -> Tensor:
        x = x + self.attention(self.attention_norm(x), step, rotation)
        return x + self.mlp(self.mlp_norm(x))


class Llama(Model):
    head_norms = False  # whether each head of q and k is normed before it is rotated

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.layers = [Layer(config, weights, i, window, self.head_norms) for i, window in enumerate(self.windows())]
        self.norm = RMSNorm(weights.tensor("model.norm.weight", (config.hidden_size,)), config.rms_norm_eps)
        self.rope = Rope(config.head_size, config.rope(), self.context, weights)
        self.kinds = [layer.attention.kind for layer in self.layers]

    def windows(self) -> list[int | None]:
        """The window of each layer; None where it sees all."""
        return [self.config.get("sliding_window")] * self.config.num_hidden_layers

    def __call__(self, step: Step) -> Tensor:
        x, rotation = self.embed(step.tokens), self.rope(step.positions)
        for layer in self.layers:
            x = layer(x, step, rotation)
        return self.norm(x)
