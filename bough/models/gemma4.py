"""Gemma 4, the language model: as Gemma 3, and the last layers may read the K and V of earlier ones.

A layer that shares K and V has no kind: it reads the pages of the last layer of its type that has its own. Optional
parts: an input of its own for every layer (from a second embedding table), full layers whose V is the unrotated K, and
experts beside the MLP. Attention is not scaled; norms multiply by w, not 1 + w.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bough import ops
from bough.errors import ModelError, UnknownArchitecture
from bough.models.blocks import (
    GatedMLP,
    Rope,
    Rotation,
    activation,
    attention_kind,
    narrowed,
    narrowing,
    placed,
    projected,
)
from bough.models.config import ModelConfig
from bough.models.gemma3 import FULL, WINDOW, Gemma, layer_types, rounded
from bough.models.weights import Weights
from bough.ops import Norm
from bough.state.step import Ends, Step

ROPES = {  # where the config has none
    WINDOW: {"rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}


def norm(weights: Weights, name: str, size: int, eps: float) -> Norm:
    return Norm(weights.tensor(f"{name}.weight", (size,)).float(), eps, rounded=False)


def types_of(config: ModelConfig) -> list[str]:
    """As in Gemma 3, but the last layer sees all whatever the config says."""
    return [*layer_types(config)[:-1], FULL]


def sources_of(config: ModelConfig, types: list[str]) -> list[int]:
    """Whose K and V each layer reads: its own, or those of the last layer of its type before the sharing ones."""
    own = max(0, len(types) - config.num_kv_shared_layers)
    last = {layer_type: i for i, layer_type in enumerate(types[:own])}
    lost = set(types[own:]) - set(last)
    if lost:
        raise ModelError(
            f"{config.where} has num_kv_shared_layers {config.num_kv_shared_layers}, which leaves no {min(lost)} layer"
            " with K and V of its own; take the config.json that belongs to the weights"
        )
    return [i if i < own else last[layer_type] for i, layer_type in enumerate(types)]


def config_of(config: ModelConfig, index: int, layer_type: str) -> ModelConfig:
    """The config of one layer: by today's list of what differs, or by the two fields about full layers before it."""
    differs: Mapping[str, Any] = {}
    if "per_layer_config" in config:
        differs = config.per_layer_config.get(str(index), {})
    elif layer_type == FULL:
        differs = {"head_dim": config.global_head_dim}
        if config.attention_k_eq_v and "num_global_key_value_heads" in config:
            differs = {**differs, "num_key_value_heads": config.num_global_key_value_heads}
    return ModelConfig(differs, config.where).over(config)


class Attention:
    """Attention over the pages of layer `source`; where that is the layer itself, it also writes them."""

    def __init__(
        self, config: ModelConfig, weights: Weights, prefix: str, layer_type: str, index: int, source: int
    ) -> None:
        self.source, eps = source, config.rms_norm_eps
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim: int = config.head_dim
        self.window: int | None = config.sliding_window if layer_type == WINDOW else None
        owns, bias = source == index, config.attention_bias
        k_is_v = config.attention_k_eq_v and layer_type == FULL
        names = "q" if not owns else "qk" if k_is_v else "qkv"
        self.sizes = [(self.heads if name == "q" else self.kv_heads) * self.head_dim for name in names]
        self.project = weights.linear([f"{prefix}.{n}_proj" for n in names], self.sizes, config.hidden_size, bias)
        self.q_norm = norm(weights, f"{prefix}.q_norm", self.head_dim, eps)
        self.k_norm = norm(weights, f"{prefix}.k_norm", self.head_dim, eps) if owns else None
        self.v_norm = Norm(None, eps, rounded=True)
        self.out = weights.linear(f"{prefix}.o_proj", config.hidden_size, self.heads * self.head_dim, bias)
        self.kind = attention_kind(self.kv_heads, self.head_dim, self.window) if owns else None

    def __call__(self, x: Tensor, step: Step, rotation: Rotation, wanted: Ends | None) -> Tensor:
        parts = projected(x, self.project, self.sizes, wanted)
        q, *kv = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)  # with K and V, one that is both, or none
        pages, norms = step.pages(self.source), (self.q_norm, self.k_norm, self.v_norm)
        if kv:  # the layers that share them find them there
            q = placed(q, (kv[0], kv[-1]), pages, rotation, norms, wanted)
        else:
            q = ops.place_heads(q, rotation, norms=norms)
        step = step if wanted is None else step.at_ends(wanted)
        seen = ops.attention(q, step.rows, stored=pages, scale=1.0, window=self.window, masks=step.masks)
        return self.out(seen.flatten(1))


class Experts:
    """Beside the MLP, with norms of their own: for each token a few of many gated MLPs, chosen by a router."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        count, width = config.num_experts, config.moe_intermediate_size
        self.top, self.root, self.activation = config.top_k_experts, hidden**-0.5, activation(config.hidden_activation)
        self.router_norm = Norm(weights.tensor(f"{prefix}.router.scale", (hidden,)), eps, rounded=True)
        self.router = weights.linear(f"{prefix}.router.proj", count, hidden)
        self.scale = weights.tensor(f"{prefix}.router.per_expert_scale", (count,))
        self.gate_up = weights.stack(f"{prefix}.experts.gate_up_proj", count, 2 * width, hidden)
        self.down = weights.stack(f"{prefix}.experts.down_proj", count, hidden, width)
        self.before = norm(weights, f"{prefix}.pre_feedforward_layernorm_2", hidden, eps)
        self.after = norm(weights, f"{prefix}.post_feedforward_layernorm_2", hidden, eps)

    def __call__(self, x: Tensor) -> Tensor:
        scores = self.router(self.router_norm(x) * self.root).float()
        share, chosen = torch.softmax(scores, -1).topk(self.top)  # [T, K]
        share = share / share.sum(-1, keepdim=True) * self.scale[chosen]
        out = ops.experts(self.before(x), share, chosen, self.gate_up, self.down, self.activation)
        return self.after(out)


class LayerInput:
    """What a layer adds at its end: its own input of the token, let through by a gate on what it computed."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str) -> None:
        hidden, width = config.hidden_size, config.hidden_size_per_layer_input
        self.gate = weights.linear(f"{prefix}.per_layer_input_gate", width, hidden)
        self.project = weights.linear(f"{prefix}.per_layer_projection", hidden, width)
        self.after = norm(weights, f"{prefix}.post_per_layer_input_norm", hidden, config.rms_norm_eps)
        self.activation = activation(config.hidden_activation)

    def __call__(self, x: Tensor, given: Tensor) -> Tensor:
        return x + self.after(self.project(ops.gated(self.gate(x), given, self.activation)))


class LayerInputs:
    """The inputs of all layers [T, layers, width]: a row of their table, and a projection of the embedding."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.layers, self.width = config.num_hidden_layers, config.hidden_size_per_layer_input
        size = self.layers * self.width
        self.table = weights.tensor("model.embed_tokens_per_layer.weight", (config.vocab_size_per_layer_input, size))
        self.table_scale, self.root = rounded(self.width**0.5, weights), hidden**-0.5
        self.project = weights.linear("model.per_layer_model_projection", size, hidden)
        self.norm = norm(weights, "model.per_layer_projection_norm", self.width, eps)

    def __call__(self, tokens: Tensor, embedded: Tensor) -> Tensor:
        shape = (len(tokens), self.layers, self.width)
        projected = self.norm((self.project(embedded) * self.root).view(shape))
        return (projected + (ops.embedding(tokens, self.table) * self.table_scale).view(shape)) * 2**-0.5


class Layer:
    def __init__(self, config: ModelConfig, weights: Weights, layer_type: str, index: int, source: int) -> None:
        prefix, hidden, eps, self.type = f"model.layers.{index}", config.hidden_size, config.rms_norm_eps, layer_type
        names = "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
        norms = [norm(weights, f"{prefix}.{name}", hidden, eps) for name in names]
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = norms
        self.attention = Attention(config, weights, f"{prefix}.self_attn", layer_type, index, source)
        width = config.intermediate_size * (2 if config.use_double_wide_mlp and source != index else 1)
        self.mlp = GatedMLP(weights, f"{prefix}.mlp", hidden, width, activation(config.hidden_activation))
        self.experts = None
        if config.enable_moe_block:
            self.experts = Experts(config, weights, prefix)
            self.after_dense = norm(weights, f"{prefix}.post_feedforward_layernorm_1", hidden, eps)
        self.input = LayerInput(config, weights, prefix) if config.hidden_size_per_layer_input else None
        self.scalar = weights.tensor(f"{prefix}.layer_scalar", (1,))

    def __call__(self, x: Tensor, step: Step, rotation: Rotation, given: Tensor | None, wanted: Ends | None) -> Tensor:
        seen = self.attention(self.before_attention(x), step, rotation, wanted)
        x, y = self.before_mlp.whole(narrowed(x, wanted), self.after_attention(seen))
        y = ops.made(self.mlp(y))
        if self.experts:
            y = self.after_dense(y) + self.experts(x)
        x = x + self.after_mlp(y)
        if self.input and given is not None:
            x = self.input(x, narrowed(given, wanted))
        return x * self.scalar


class Gemma4(Gemma):
    ignored = r"model\.(vision_tower|audio_tower|embed_vision|embed_audio)\."
    defaults: Mapping[str, Any] = {  # configs on the hub leave out what has these values
        "vocab_size": 262_144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_k_eq_v": False,
        "sliding_window": 512,
        "rope_parameters": ROPES,
        "vocab_size_per_layer_input": 262_144,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
    }

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        if config.get("use_bidirectional_attention") == "all":
            raise UnknownArchitecture(f"{config.where} sets use_bidirectional_attention; Bough runs decoders only")
        super().__init__(config, weights)
        types = types_of(config)
        sources = sources_of(config, types)
        configs = [config_of(config, i, layer_type) for i, layer_type in enumerate(types)]
        self.layers = [Layer(configs[i], weights, types[i], i, sources[i]) for i in range(len(types))]
        self.norm = norm(weights, "model.norm", self.hidden_size, config.rms_norm_eps)
        self.inputs = LayerInputs(config, weights) if config.hidden_size_per_layer_input else None
        self.ropes = {
            layer_type: Rope(configs[i].head_dim, config.rope(layer_type), self.context, weights)
            for i, layer_type in enumerate(types)
        }
        self.kinds = [layer.attention.kind for layer in self.layers]
        self.storing = sum(kind is not None for kind in self.kinds)  # layers with K and V of their own come first
        sharing = "|".join(str(i) for i, source in enumerate(sources) if i != source)
        if sharing:  # some files hold K and V weights for layers that do not use them
            self.ignored += rf"|model\.layers\.({sharing})\.self_attn\.[kv]_(proj|norm)\."

    def __call__(self, step: Step) -> Tensor:
        rotations = {layer_type: rope(step.positions) for layer_type, rope in self.ropes.items()}
        x = self.embed(step.tokens)
        given = iter([None] * len(self.layers) if self.inputs is None else self.inputs(step.tokens, x).unbind(1))
        for layer, wanted in narrowing(self.layers[: self.storing], step):
            x = layer(x, step, rotations[layer.type], next(given), wanted)
        if (ends := step.wanted) is not None:  # from here on nothing is stored
            step, given = step.at_ends(ends), (each if each is None else each[ends.places] for each in given)
            rotations = {name: (cos[ends.places], sin[ends.places]) for name, (cos, sin) in rotations.items()}
        for layer in self.layers[self.storing :] if len(x) else ():
            x = layer(x, step, rotations[layer.type], next(given), None)
        return self.norm(x)
