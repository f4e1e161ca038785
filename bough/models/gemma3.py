"""Gemma 3, the language model: norms on both sides of each part, and windows in all but every sixth layer.

Knows the older config.json too: there the pattern of layers is one number, and the two ropes are loose fields.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bough.errors import UnknownArchitecture
from bough.models.blocks import Attention, GatedMLP, Rope, Rotation, activation, narrowed, narrowing
from bough.models.config import ModelConfig
from bough.models.model import Model
from bough.models.weights import Weights
from bough.ops import Norm
from bough.state.step import Ends, Step

WINDOW, FULL = "sliding_attention", "full_attention"


class Gemma(Model):
    """What Gemma 3 and 4 share: embeddings scaled by √hidden, and logits that may be soft-capped."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.embedding_scale = rounded(self.hidden_size**0.5, weights)
        self.softcap: float | None = config.get("final_logit_softcapping")

    def embed(self, tokens: Tensor) -> Tensor:
        return super().embed(tokens).mul_(self.embedding_scale)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)


def rounded(value: float, weights: Weights) -> float:
    """The nearest number that the weights' dtype has: Gemma's scales were trained so (√3072 is 55.5 in bfloat16)."""
    return torch.tensor(value, dtype=weights.dtype).item()


def layer_types(config: ModelConfig) -> list[str]:
    """As listed, or by the pattern: every n-th layer sees all, those between have a window."""
    pattern = config.get("sliding_window_pattern", 6)
    return config.types_of_layers((WINDOW, FULL), lambda index: WINDOW if (index + 1) % pattern else FULL)


def rope_parameters(config: ModelConfig, layer_type: str) -> dict[str, Any]:
    """Today's config lists them by layer type; the older one scales full layers alone, and names two thetas."""
    listed = config.get("rope_parameters", {}).get(layer_type) or {}
    if layer_type == FULL:
        return {"rope_theta": config.get("rope_theta", 1e6), **listed, **config.get("rope_scaling", {})}
    return {"rope_theta": config.get("rope_local_base_freq", 1e4), **listed}


def read_norm(config: ModelConfig, weights: Weights, name: str, size: int) -> Norm:
    weight = weights.tensor(f"{name}.weight", (size,))  # which is zero where nothing is scaled
    return Norm(1 + weight.float(), config.rms_norm_eps, rounded=False)


class Layer:
    def __init__(self, config: ModelConfig, weights: Weights, index: int, layer_type: str) -> None:
        prefix, hidden, self.type = f"model.layers.{index}", config.hidden_size, layer_type

        def norm(name: str, size: int = hidden) -> Norm:
            return read_norm(config, weights, f"{prefix}.{name}", size)

        self.before_attention, self.after_attention = norm("input_layernorm"), norm("post_attention_layernorm")
        self.before_mlp, self.after_mlp = norm("pre_feedforward_layernorm"), norm("post_feedforward_layernorm")
        self.attention = Attention(
            weights,
            f"{prefix}.self_attn",
            index,
            hidden=hidden,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            window=config.sliding_window if layer_type == WINDOW else None,
            scale=config.query_pre_attn_scalar**-0.5,
            softcap=config.get("attn_logit_softcapping"),
            q_norm=norm("self_attn.q_norm", config.head_dim),
            k_norm=norm("self_attn.k_norm", config.head_dim),
            bias=config.attention_bias,
            out_bias=config.attention_bias,
        )
        act = activation(config.hidden_activation)
        self.mlp = GatedMLP(weights, f"{prefix}.mlp", hidden, config.intermediate_size, act)

    def __call__(
        self, x: Tensor, y: Tensor | None, step: Step, rotation: Rotation, wanted: Ends | None
    ) -> tuple[Tensor, Tensor]:
        """The stream, and what is yet to be added to it: on the way in and out, since the next norm adds it."""
        x, y = self.before_attention.whole(x, y)
        seen = self.attention(y, step, rotation, wanted)
        x, y = self.before_mlp.whole(narrowed(x, wanted), self.after_attention(seen))
        return x, self.after_mlp(self.mlp(y))


class Gemma3(Gemma):
    ignored = r"(model\.)?(vision_tower|multi_modal_projector)\."
    defaults: Mapping[str, Any] = {  # configs on the hub leave out what has these values
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    }

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        if config.get("use_bidirectional_attention"):
            raise UnknownArchitecture(f"{config.where} sets use_bidirectional_attention; Bough runs decoders only")
        super().__init__(config, weights)
        types = layer_types(config)
        self.layers = [Layer(config, weights, i, layer_type) for i, layer_type in enumerate(types)]
        self.norm = read_norm(config, weights, "model.norm", self.hidden_size)
        self.ropes = {
            layer_type: Rope(config.head_dim, rope_parameters(config, layer_type), self.context, weights)
            for layer_type in dict.fromkeys(types)
        }
        self.kinds = [layer.attention.kind for layer in self.layers]

    def __call__(self, step: Step) -> Tensor:
        rotations = {layer_type: rope(step.positions) for layer_type, rope in self.ropes.items()}
        x, y = self.embed(step.tokens), None
        for layer, wanted in narrowing(self.layers, step):
            x, y = layer(x, y, step, rotations[layer.type], wanted)
        return self.norm.whole(x, y)[1]
