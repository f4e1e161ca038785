"""Llama and models of its shape (Mistral, SmolLM2): pre-norm attention and SwiGLU."""

from torch import Tensor

from bough.models.blocks import Attention, GatedMLP, RMSNorm, Rope, Rotation, activation
from bough.models.config import ModelConfig
from bough.models.model import Model
from bough.models.weights import Weights
from bough.state.step import Step


class Layer:
    def __init__(self, config: ModelConfig, weights: Weights, index: int) -> None:
        prefix, hidden, eps = f"model.layers.{index}", config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(weights.tensor(f"{prefix}.input_layernorm.weight", (hidden,)), eps)
        self.attention = Attention(
            weights,
            f"{prefix}.self_attn",
            index,
            hidden=hidden,
            heads=config.num_attention_heads,
            kv_heads=config.get("num_key_value_heads", config.num_attention_heads),
            head_dim=config.head_size,
            window=config.get("sliding_window"),
            bias=config.get("attention_bias", False),
            out_bias=config.get("attention_bias", False),
        )
        self.mlp_norm = RMSNorm(weights.tensor(f"{prefix}.post_attention_layernorm.weight", (hidden,)), eps)
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
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.layers = [Layer(config, weights, i) for i in range(config.num_hidden_layers)]
        self.norm = RMSNorm(weights.tensor("model.norm.weight", (config.hidden_size,)), config.rms_norm_eps)
        self.rope = Rope(config.head_size, config.rope(), self.context, weights)
        self.kinds = [layer.attention.kind for layer in self.layers]

    def __call__(self, step: Step) -> Tensor:
        x, rotation = self.embed(step.tokens), self.rope(step.positions)
        for layer in self.layers:
            x = layer(x, step, rotation)
        return self.norm(x)
