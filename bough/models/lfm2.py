"""LFM2: short gated convolutions, with attention in a few layers.

Knows the older config.json too: there the attention layers are listed by index, and two fields have other names.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from bough import ops
from bough.models.blocks import Attention, GatedMLP, Rope, Rotation, narrowed, narrowing
from bough.models.config import ModelConfig
from bough.models.model import Model
from bough.models.weights import Weights
from bough.ops import Addend, Input, Norm
from bough.state.kinds import ShortConv
from bough.state.step import Step

CONV, FULL = "conv", "full_attention"


class Convolution:
    """[b | c | x] from one projection; out(c · conv(b · x)). Remembers the last inputs of the convolution."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, layer: int) -> None:
        hidden, bias, self.layer = config.hidden_size, config.conv_bias, layer
        self.kind = ShortConv(hidden, config.conv_L_cache)
        self.project = weights.linear(f"{prefix}.in_proj", 3 * hidden, hidden, bias)
        self.taps = weights.taps(f"{prefix}.conv", hidden, config.conv_L_cache)
        self.bias = weights.tensor(f"{prefix}.conv.bias", (hidden,)) if bias else None
        self.out = weights.linear(f"{prefix}.out_proj", hidden, hidden, bias)

    def __call__(self, x: Input, step: Step, rotation: Rotation) -> Addend:
        b, c, v = self.project(x).chunk(3, -1)
        tails = step.slots(self.layer, "conv")
        return self.out.later(c * ops.causal_conv(b * v, self.taps, step.rows, bias=self.bias, stored=tails).out)


class Layer:
    def __init__(self, config: ModelConfig, weights: Weights, index: int, layer_type: str) -> None:
        prefix, hidden, head_dim = f"model.layers.{index}", config.hidden_size, config.head_size

        def norm(name: str, size: int) -> Norm:
            return Norm(weights.tensor(f"{prefix}.{name}.weight", (size,)), config.norm_eps, rounded=True)

        self.mixer: Attention | Convolution
        if layer_type == FULL:
            self.mixer = Attention(
                weights,
                f"{prefix}.self_attn",
                index,
                hidden=hidden,
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                head_dim=head_dim,
                q_norm=norm("self_attn.q_layernorm", head_dim),
                k_norm=norm("self_attn.k_layernorm", head_dim),
                out="out_proj",
            )
        else:
            self.mixer = Convolution(config, weights, f"{prefix}.conv", index)
        self.mixer_norm, self.mlp_norm = norm("operator_norm", hidden), norm("ffn_norm", hidden)
        self.mlp = GatedMLP(weights, f"{prefix}.feed_forward", hidden, mlp_width(config), names=("w1", "w3", "w2"))

    def __call__(
        self, x: Tensor, y: Addend | None, step: Step, rotation: Rotation, wanted: Tensor | None
    ) -> tuple[Tensor, Addend]:
        """The stream, and what is yet to be added to it: on the way in and out, since the next norm adds it."""
        x, normed = self.mixer_norm.after(x, y)
        x, normed = self.mlp_norm.after(*narrowed(x, self.mixer(normed, step, rotation), wanted))
        return x, self.mlp(normed)


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


class Lfm2(Model):
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

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        config = config.renamed({"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"})
        super().__init__(config, weights)
        self.layers = [Layer(config, weights, i, each) for i, each in enumerate(layer_types(config))]
        norm = weights.tensor("model.embedding_norm.weight", (self.hidden_size,))
        self.norm = Norm(norm, config.norm_eps, rounded=True)
        self.rope = Rope(config.head_size, config.rope(), self.context, weights)
        self.kinds = [layer.mixer.kind for layer in self.layers]

    def __call__(self, step: Step) -> Tensor:
        x, rotation = self.embed(step.tokens), self.rope(step.positions)
        y = None
        for layer, wanted in narrowing(self.layers, step):
            x, y = layer(x, y, step, rotation, wanted)
        return self.norm.whole(x, y)[1]
