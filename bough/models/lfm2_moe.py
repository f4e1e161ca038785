"""LFM2 with experts: the layers of LFM2, of which all but the first few ask some of many small MLPs."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bough import ops
from bough.models.blocks import GatedMLP, read_experts
from bough.models.config import ModelConfig
from bough.models.layered import MLP
from bough.models.lfm2 import NAMES, Lfm2
from bough.models.weights import Weights
from bough.ops import Input


class BiasedExperts:
    """Each token goes to the experts with the highest scores. Biases, which keep all of them busy, decide who is asked,
    and not what that counts."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str) -> None:
        count, hidden = config.num_experts, config.hidden_size
        self.chosen, self.normed, self.scale = (
            config.num_experts_per_tok, config.norm_topk_prob, config.routed_scaling_factor,
        )  # fmt: skip
        self.router = weights.linear(f"{prefix}.gate", count, hidden)
        biased = config.use_expert_bias
        self.bias = weights.tensor(f"{prefix}.expert_bias", (count,), torch.float32) if biased else None
        self.gate_up, self.down = read_experts(
            weights, f"{prefix}.experts", count, hidden, config.moe_intermediate_size, NAMES
        )

    def __call__(self, x: Input) -> Tensor:
        x = ops.made(x)  # which more than one product takes
        scores = torch.sigmoid(self.router(x))
        expert = (scores if self.bias is None else scores + self.bias).topk(self.chosen).indices  # [T, chosen]
        share = scores.gather(1, expert)
        if self.normed:
            share = share / (share.sum(-1, keepdim=True) + 1e-6)
        return ops.experts(x, share * self.scale, expert, self.gate_up, self.down, F.silu)


class Lfm2Moe(Lfm2):
    defaults: Mapping[str, Any] = {
        **Lfm2.defaults,
        "num_dense_layers": 2,
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }

    def _mlp(self, weights: Weights, prefix: str, index: int) -> MLP:
        config = self.config
        if index < config.num_dense_layers:
            return GatedMLP(weights, prefix, self.hidden_size, config.intermediate_size, names=NAMES)
        return BiasedExperts(config, weights, prefix)
