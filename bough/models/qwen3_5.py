"""Qwen3.5: the layers of Qwen3-Next over weights that lie in order on disk, with a plain MLP or with experts.

A checkpoint may bring a vision tower; it is run as the language model in it. For text alone the three rows of its
rotary positions are equal, which leaves plain partial rope.
"""

from bough.models.blocks import GatedMLP, Linear, activation
from bough.models.config import ModelConfig
from bough.models.qwen3_next import GatedDelta, Qwen3Next, SparseMLP
from bough.models.weights import Weights


class Qwen35(Qwen3Next):
    ignored = r"model\.visual\."

    def _delta_inputs(self, weights: Weights, prefix: str) -> Linear:
        names = [f"{prefix}.in_proj_{each}" for each in ("qkv", "z", "b", "a")]
        return weights.linear(names, GatedDelta.sizes_of(self.config), self.hidden_size)

    def _mlp(self, weights: Weights, prefix: str, index: int) -> GatedMLP | SparseMLP:
        width, act = self.config.intermediate_size, activation(self.config.hidden_act)
        return GatedMLP(weights, prefix, self.hidden_size, width, act)


class Qwen35Moe(Qwen35):
    @classmethod
    def told(cls, config: ModelConfig) -> ModelConfig:
        """The shares of experts sum up to 1, whatever a config that was made from another family's says."""
        told = super().told(config)
        return ModelConfig({**told.raw, "norm_topk_prob": True}, told.where)

    def _mlp(self, weights: Weights, prefix: str, index: int) -> SparseMLP:
        return SparseMLP(self.config, weights, prefix)
