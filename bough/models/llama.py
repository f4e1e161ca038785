"""Llama and models of its shape (Mistral, SmolLM2): pre-norm attention and SwiGLU.

A family that differs only in its windows or in norms on the heads is a subclass (qwen3.py).
"""

from bough.models.blocks import Attention, GatedMLP, activation
from bough.models.config import ModelConfig
from bough.models.layered import Layer, Layered
from bough.models.weights import Weights
from bough.ops import Norm

NORMS = "input", "post_attention"


class Llama(Layered):
    head_norms = False  # whether each head of q and k is normed before it is rotated

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        layers = [self._layer(weights, index, window) for index, window in enumerate(self.windows())]
        self._stack(layers, self._norm(weights, "model.norm", self.hidden_size), weights)

    def windows(self) -> list[int | None]:
        """The window of each layer; None where it sees all."""
        return [None] * self.config.num_hidden_layers  # though its config may name one, and change nothing

    def _norm(self, weights: Weights, name: str, size: int) -> Norm:
        return Norm(weights.tensor(f"{name}.weight", (size,)), self.config.rms_norm_eps, rounded=True)

    def _layer(self, weights: Weights, index: int, window: int | None) -> Layer:
        prefix, config, head_dim = f"model.layers.{index}", self.config, self.config.head_size
        norms = [self._norm(weights, f"{prefix}.{each}_layernorm", self.hidden_size) for each in NORMS]
        attention = Attention(
            weights,
            f"{prefix}.self_attn",
            index,
            hidden=self.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.get("num_key_value_heads", config.num_attention_heads),
            head_dim=head_dim,
            window=window,
            q_norm=self._norm(weights, f"{prefix}.self_attn.q_norm", head_dim) if self.head_norms else None,
            k_norm=self._norm(weights, f"{prefix}.self_attn.k_norm", head_dim) if self.head_norms else None,
            bias=config.get("attention_bias", False),
            out_bias=config.get("attention_bias", False),
        )
        mlp = GatedMLP(
            weights,
            f"{prefix}.mlp",
            self.hidden_size,
            config.intermediate_size,
            activation(config.get("hidden_act", "silu")),
            bias=config.get("mlp_bias", False),
        )
        return Layer(norms[0], attention, norms[1], mlp)


class Mistral(Llama):
    @classmethod
    def told(cls, config: ModelConfig) -> ModelConfig:
        """A window that is left out has a size; one that is null is none."""
        return super().told(ModelConfig({"sliding_window": 4096, **config.raw}, config.where))

    def windows(self) -> list[int | None]:
        return [self.config.get("sliding_window")] * self.config.num_hidden_layers
