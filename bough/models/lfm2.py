"""LFM2: short gated convolutions, with attention in a few layers.

Knows the older config.json too: there the attention layers are listed by index, and two fields have other names.
"""

from collections.abc import Mapping
from typing import Any

from bough import ops
from bough.models.blocks import Attention, GatedMLP, Rotation, narrowed
from bough.models.config import ModelConfig
from bough.models.layered import MLP, Layer, Layered
from bough.models.weights import Weights
from bough.ops import Addend, Input, Norm
from bough.state.kinds import ShortConv
from bough.state.step import Ends, Step

CONV, FULL = "conv", "full_attention"
NAMES = ("w1", "w3", "w2")  # of an MLP's gate, up and down


class Convolution:
    """[b | c | x] from one projection; out(c · conv(b · x)). Remembers the last inputs of the convolution."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, layer: int) -> None:
        hidden, bias, self.layer = config.hidden_size, config.conv_bias, layer
        self.kind = ShortConv(hidden, config.conv_L_cache)
        self.project = weights.linear(f"{prefix}.in_proj", 3 * hidden, hidden, bias)
        self.taps = weights.taps(f"{prefix}.conv", hidden, config.conv_L_cache)
        self.bias = weights.tensor(f"{prefix}.conv.bias", (hidden,)) if bias else None
        self.out = weights.linear(f"{prefix}.out_proj", hidden, hidden, bias)

    def __call__(self, x: Input, step: Step, rotation: Rotation, wanted: Ends | None) -> Addend:
        b, c, v = self.project(x).chunk(3, -1)
        tails = step.slots(self.layer, "conv")
        seen = ops.causal_conv(b * v, self.taps, step.rows, bias=self.bias, stored=tails).out
        return self.out.later(narrowed(c, wanted) * narrowed(seen, wanted))


def mlp_width(config: ModelConfig) -> int:
    """The width as given, or two thirds of it, scaled and rounded up: as many weights as an MLP without a gate."""
    width, multiple = config.intermediate_size, config.block_multiple_of
    if not config.block_auto_adjust_ff_dim:
        return width
    width = int(config.block_ffn_dim_multiplier * int(2 * width / 3))
    return -(-width // multiple) * multiple


def layer_types(config: ModelConfig) -> list[str]:
    attending = config.get("full_attn_idxs", range(config.num_hidden_layers))
    return config.types_of_layers((CONV, FULL), lambda layer: FULL if layer in attending else CONV)


class Lfm2(Layered):
    defaults: Mapping[str, Any] = {  # configs on the hub leave out what has these values
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    }

    older: Mapping[str, str] = {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"}

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        layers = [self._layer(weights, index, each) for index, each in enumerate(layer_types(config))]
        self._stack(layers, self._norm(weights, "model.embedding_norm", self.hidden_size), weights)

    def _norm(self, weights: Weights, name: str, size: int) -> Norm:
        return Norm(weights.tensor(f"{name}.weight", (size,)), self.config.norm_eps, rounded=True)

    def _layer(self, weights: Weights, index: int, layer_type: str) -> Layer:
        prefix, config, hidden = f"model.layers.{index}", self.config, self.hidden_size
        mixer_norm, mlp_norm = (self._norm(weights, f"{prefix}.{each}_norm", hidden) for each in ("operator", "ffn"))
        mixer: Attention | Convolution
        if layer_type == FULL:
            mixer = Attention(
                weights,
                f"{prefix}.self_attn",
                index,
                hidden=hidden,
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                head_dim=config.head_size,
                q_norm=self._norm(weights, f"{prefix}.self_attn.q_layernorm", config.head_size),
                k_norm=self._norm(weights, f"{prefix}.self_attn.k_layernorm", config.head_size),
                out="out_proj",
            )
        else:
            mixer = Convolution(config, weights, f"{prefix}.conv", index)
        return Layer(mixer_norm, mixer, mlp_norm, self._mlp(weights, f"{prefix}.feed_forward", index))

    def _mlp(self, weights: Weights, prefix: str, index: int) -> MLP:
        return GatedMLP(weights, prefix, self.hidden_size, mlp_width(self.config), names=NAMES)
