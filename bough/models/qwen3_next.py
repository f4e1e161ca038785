"""Qwen3-Next: gated-delta layers with gated full attention between them, and experts.

Qwen3.5 has the same layers over weights laid out in another way, with experts or without (qwen3_5.py).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bough import ops
from bough.models.blocks import Attention, GatedMLP, Linear, Rotation, activation, narrowed, read_experts
from bough.models.config import ModelConfig
from bough.models.layered import Layer, Layered
from bough.models.weights import Weights
from bough.ops import Addend, DeltaLayer, Input, Norm
from bough.state.kinds import Recurrent
from bough.state.step import Ends, Step

LINEAR, FULL = "linear_attention", "full_attention"


class GatedDelta:
    """A short convolution over q, k and v, the gated delta rule, a norm gated by z, and the projection out.

    All projections of the input are one product, in the order of `sizes`.
    """

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, layer: int, inputs: Linear) -> None:
        self.layer, self.inputs, self.k_heads = layer, inputs, config.linear_num_key_heads
        heads, dim = config.linear_num_value_heads, config.linear_value_head_dim
        self.sizes = self.sizes_of(config)
        channels, kernel = self.sizes[0], config.linear_conv_kernel_dim
        self.kind = Recurrent(channels, kernel, heads, config.linear_key_head_dim, dim)
        self.taps, self.activation = weights.taps(f"{prefix}.conv1d", channels, kernel), activation(config.hidden_act)
        self.small = DeltaLayer(
            rate=-torch.exp(weights.tensor(f"{prefix}.A_log", (heads,)).float()),
            dt_bias=weights.tensor(f"{prefix}.dt_bias", (heads,)).float(),
            norm=weights.tensor(f"{prefix}.norm.weight", (dim,)),
            eps=config.rms_norm_eps,
        )
        self.out = weights.linear(f"{prefix}.out_proj", config.hidden_size, heads * dim)

    @staticmethod
    def sizes_of(config: ModelConfig) -> list[int]:
        """The widths of [q, k and v | z | b | a]."""
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        return [2 * keys + values, values, config.linear_num_value_heads, config.linear_num_value_heads]

    def __call__(self, x: Input, step: Step, rotation: Rotation, wanted: Ends | None) -> Addend:
        tails, states = step.slots(self.layer, "conv"), step.slots(self.layer, "delta")
        qkv, others = ops.projected_conv(
            x, self.inputs.weight, self.taps, step.rows, stored=tails, activation=self.activation
        )
        z, b, a = others.split(self.sizes[1:], -1)
        out = ops.gated_delta_layer(qkv, z, b, a, self.small, self.k_heads, step.rows, states)
        return self.out.later(narrowed(out.flatten(1), wanted))


class SparseMLP:
    """Each token goes to the few experts its router scores highest, and to one shared expert."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str) -> None:
        hidden, shared = config.hidden_size, config.shared_expert_intermediate_size
        self.chosen, self.normed = config.num_experts_per_tok, config.norm_topk_prob
        self.activation = activation(config.hidden_act)
        names = ["shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert_gate", "gate"]
        self.sizes = [shared, shared, 1, config.num_experts]
        self.inputs = weights.linear([f"{prefix}.{name}" for name in names], self.sizes, hidden)
        self.down = weights.linear(f"{prefix}.shared_expert.down_proj", hidden, shared)
        width = config.moe_intermediate_size
        self.expert_gate_up, self.expert_down = read_experts(
            weights, f"{prefix}.experts", config.num_experts, hidden, width
        )

    def __call__(self, x: Input) -> Tensor:
        x = ops.made(x)  # which more than one product takes
        gate, up, shared_gate, scores = self.inputs(x).split(self.sizes, -1)
        out = torch.sigmoid(shared_gate) * self.down(ops.gated(gate, up, self.activation))
        share, expert = torch.softmax(scores, -1, dtype=torch.float32).topk(self.chosen)  # [T, chosen]
        if self.normed:
            share = share / share.sum(-1, keepdim=True)
        return out + ops.experts(x, share.to(x.dtype), expert, self.expert_gate_up, self.expert_down, self.activation)


class Qwen3Next(Layered):
    kept = r"mtp\."
    defaults: Mapping[str, Any] = {  # what a config may leave out has these values
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        layers = [self._layer(weights, index, each) for index, each in enumerate(layer_types(config))]
        self._stack(layers, self.read_norm(weights, "model.norm", self.hidden_size), weights)

    def read_norm(self, weights: Weights, name: str, size: int) -> Norm:
        weight = weights.tensor(f"{name}.weight", (size,))  # which is zero where nothing is scaled
        return Norm(1 + weight.float(), self.config.rms_norm_eps, rounded=False)

    def _layer(self, weights: Weights, index: int, layer_type: str) -> Layer:
        prefix = f"model.layers.{index}"
        mixer: Attention | GatedDelta
        if layer_type == FULL:
            mixer = self.read_attention(weights, f"{prefix}.self_attn", index)
        else:
            inputs = self._delta_inputs(weights, f"{prefix}.linear_attn")
            mixer = GatedDelta(self.config, weights, f"{prefix}.linear_attn", index, inputs)
        return Layer(
            self.read_norm(weights, f"{prefix}.input_layernorm", self.hidden_size),
            mixer,
            self.read_norm(weights, f"{prefix}.post_attention_layernorm", self.hidden_size),
            self._mlp(weights, f"{prefix}.mlp", index),
        )

    def read_attention(self, weights: Weights, prefix: str, index: int) -> Attention:
        config = self.config
        return Attention(
            weights,
            prefix,
            index,
            hidden=self.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_size,
            q_norm=self.read_norm(weights, f"{prefix}.q_norm", config.head_size),
            k_norm=self.read_norm(weights, f"{prefix}.k_norm", config.head_size),
            gated=True,
            bias=config.attention_bias,
            out_bias=config.attention_bias,
        )

    def _delta_inputs(self, weights: Weights, prefix: str) -> Linear:
        """Files have the rows of in_proj_qkvz and in_proj_ba k head by k head; here they are put in order."""
        qkv, *rest = GatedDelta.sizes_of(self.config)
        names = [f"{prefix}.in_proj_qkvz", f"{prefix}.in_proj_ba"]
        return weights.linear(names, [qkv + rest[0], rest[1] + rest[2]], self.hidden_size, orders=_orders(self.config))

    def _mlp(self, weights: Weights, prefix: str, index: int) -> GatedMLP | SparseMLP:
        config = self.config
        if index not in config.mlp_only_layers and (index + 1) % config.decoder_sparse_step == 0:
            return SparseMLP(config, weights, prefix)
        return GatedMLP(weights, prefix, self.hidden_size, config.intermediate_size, activation(config.hidden_act))


def layer_types(config: ModelConfig) -> list[str]:
    interval = config.full_attention_interval
    return config.types_of_layers((LINEAR, FULL), lambda index: LINEAR if (index + 1) % interval else FULL)


def _orders(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Which row of qkvz each row of [q | k | v | z] is, and which row of ba each of [b | a].

    For each k head, qkvz has its q, its k, and the v and the z of the v heads that it serves; ba has their b and a.
    """
    k_heads, k_dim = config.linear_num_key_heads, config.linear_key_head_dim
    group = config.linear_num_value_heads // k_heads
    values = group * config.linear_value_head_dim
    qkvz = torch.arange(k_heads * (2 * k_dim + 2 * values)).view(k_heads, -1)
    ba = torch.arange(k_heads * 2 * group).view(k_heads, -1)
    heads, gates = qkvz.split([k_dim, k_dim, values, values], 1), ba.split([group, group], 1)
    return torch.cat([each.flatten() for each in heads]), torch.cat([each.flatten() for each in gates])
