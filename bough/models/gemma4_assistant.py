"""Gemma 4's assistant: a small network that guesses what the target will say next, from the target's own K and V.

Its layers have queries only. Each attends to what the last layer of its type with K and V of its own has stored in the
target: all of it, or the window before the next token. The input is the embedding that the target has of the last token
and the target's hidden row of the one before. Fed its own row and the token drafted from it, it goes on, always from
the position of that last token: drafted tokens leave no K and V.

Not a Model: it reads no step and keeps no state.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bough import ops
from bough.errors import BadWeights, ModelError
from bough.models.blocks import Linear, Rope, Rotation, attention_kind
from bough.models.config import ModelConfig
from bough.models.gemma4 import Gemma4, Layer, config_of, norm, types_of
from bough.models.load import name_in_language_model
from bough.models.model import Model
from bough.models.weights import AGAIN, SafetensorsFolder, Weights
from bough.ops.ragged import Rows
from bough.state.live import State

ORDER = "masked_embedding.token_ordering"


@dataclass(frozen=True, slots=True)
class Seen:
    """The K and V of one layer of the target that the rows of a draft see, row after row: [S, heads, dim]."""

    k: Tensor
    v: Tensor
    rows: Rows

    @staticmethod
    def of(states: Sequence[State], layer: int) -> "Seen":
        views = [state.view(layer) for state in states]
        found = [view for view in views if view is not None]
        assert len(found) == len(states), "a draft has a text before it"
        rows = Rows((1,) * len(found), tuple(len(k) - 1 for k, _ in found))  # the last key counts as the query's own
        return Seen(torch.cat([k for k, _ in found]), torch.cat([v for _, v in found]), rows)


class ClusteredHead:
    """Scores clusters of tokens, and then the tokens of the best ones; all others score one less than the worst."""

    def __init__(self, config: ModelConfig, weights: Weights, head: Tensor) -> None:
        clusters, self.top = config.get("num_centroids", 2048), config.get("centroid_intermediate_top_k", 32)
        vocab, hidden = head.shape
        if vocab % clusters or self.top > clusters:
            raise ModelError(
                f"{config.where} has num_centroids {clusters} and centroid_intermediate_top_k {self.top}, which do not"
                f" go with a vocabulary of {vocab}; take the config.json that belongs to the weights"
            )
        self.head = head
        self.clusters = weights.linear("masked_embedding.centroids", clusters, hidden)
        order = weights.take(ORDER.replace(".", r"\.") + "$").get(ORDER)
        if order is None or not torch.equal(order.long().sort().values, torch.arange(vocab)):
            raise BadWeights(f"{weights.source.where} lacks {ORDER}, or it does not list every token once; {AGAIN}")
        self.members = order.long().view(clusters, -1).to(weights.device)  # [clusters, tokens in each]

    def __call__(self, hidden: Tensor) -> Tensor:
        best = self.clusters(hidden).topk(self.top).indices  # [N, top]
        ids = self.members[best].flatten(1)
        scores = (self.head[ids] @ hidden[:, :, None])[:, :, 0]
        others = scores.amin(-1, keepdim=True) - 1
        return others.repeat(1, len(self.head)).scatter_(1, ids, scores)


class Gemma4Assistant:
    """Embeddings of tokens and hidden rows in, logits and hidden rows out, as wide as the target's."""

    def __init__(self, config: ModelConfig, weights: Weights, target: Gemma4) -> None:
        text = Gemma4.told(config)
        _check(config, text, target)
        types, taps = types_of(text), taps_of(target)
        configs = [config_of(text, i, layer_type) for i, layer_type in enumerate(types)]
        self.layers = [Layer(configs[i], weights, types[i], i, source=-1) for i in range(len(types))]
        self.taps = {layer_type: taps[layer_type] for layer_type in types}  # the target's layer that each type sees
        for layer in self.layers:
            _check_tap(config, layer, target, self.taps[layer.type])
        hidden: int = text.hidden_size
        self.norm = norm(weights, "model.norm", hidden, text.rms_norm_eps)
        self.before = weights.linear("pre_projection", hidden, 2 * target.hidden_size)
        self.after = weights.linear("post_projection", target.hidden_size, hidden)
        name = "lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight"
        head = weights.tensor(name, (target.vocab_size, hidden))
        clustered = config.get("use_ordered_embeddings", False)
        self.head = ClusteredHead(config, weights, head) if clustered else Linear(head)
        context: int = text.max_position_embeddings
        self.ropes = {
            each.type: Rope(each.attention.head_dim, text.rope(each.type), context, weights) for each in self.layers
        }

    def see(self, states: Sequence[State]) -> dict[str, Seen]:
        """What the layers of each type see of the target's states."""
        return {layer_type: Seen.of(states, tap) for layer_type, tap in self.taps.items()}

    def __call__(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, seen: Mapping[str, Seen]
    ) -> tuple[Tensor, Tensor]:
        """Logits [N, vocabulary] of what follows, and the rows [N, width] to go on from."""
        x = self.before(torch.cat([embedded, hidden], -1))
        rotations = {layer_type: rope(positions) for layer_type, rope in self.ropes.items()}
        for layer in self.layers:
            x = _apply(layer, x, seen[layer.type], rotations[layer.type])
        x = self.norm(x)
        return self.head(x), self.after(x)


def _apply(layer: Layer, x: Tensor, seen: Seen, rotation: Rotation) -> Tensor:
    """A layer of Gemma 4 whose K and V are given."""
    attention = layer.attention
    q = attention.project(layer.before_attention(x)).view(len(x), attention.heads, attention.head_dim)
    q = ops.rotate(attention.q_norm(q), *rotation)
    out = ops.attention(q, seen.rows, scale=1.0, explicit=(seen.k, seen.v))
    x, y = layer.before_mlp.whole(x, layer.after_attention(attention.out(out.flatten(1))))
    return (x + layer.after_mlp(layer.mlp(y))) * layer.scalar


def taps_of(target: Gemma4) -> dict[str, int]:
    """By type the last layer that has K and V of its own."""
    return {layer.type: i for i, layer in enumerate(target.layers) if target.kinds[i] is not None}


def _check(config: ModelConfig, text: ModelConfig, target: Gemma4) -> None:
    """Raise where the assistant is not one of this target."""
    for what, own, theirs in (
        ("a vocabulary", text.vocab_size, target.vocab_size),
        ("hidden rows", config.get("backbone_hidden_size", 1536), target.hidden_size),
    ):
        if own != theirs:
            raise _misfit(config, f"{what} of {own}, where the model's is {theirs}")
    if text.hidden_size_per_layer_input or text.enable_moe_block or text.use_double_wide_mlp:
        raise _misfit(config, "inputs by layer, experts or double-wide layers, which assistants do not have")
    lacking = set(types_of(text)) - set(taps_of(target))
    if lacking:
        raise _misfit(config, f"{min(lacking)} layers, of which the model has none with K and V")


def _check_tap(config: ModelConfig, layer: Layer, target: Gemma4, tap: int) -> None:
    attention = layer.attention
    wanted = attention_kind(attention.kv_heads, attention.head_dim, attention.window)
    if wanted != target.kinds[tap]:
        raise _misfit(config, f"{layer.type} layers that read {wanted}, where layer {tap} has {target.kinds[tap]}")


def _misfit(config: ModelConfig, what: str) -> ModelError:
    return ModelError(
        f"the assistant in {config.where} has {what}; give the assistant that was trained for this model, or draft with"
        " ngram"
    )


def load_assistant(path: Path, target: Model) -> Gemma4Assistant:
    """The assistant in a Hugging Face folder, for this target: in its dtype and on its device."""
    if not os.path.isdir(path):
        raise ModelError(f"{path} is not a folder; give one with the config.json and *.safetensors of an assistant")
    config = ModelConfig.from_folder(path)
    if config.get("model_type") != "gemma4_assistant":
        raise ModelError(f"{config.where} is of type {config.get('model_type')!r}; an assistant is gemma4_assistant")
    if not isinstance(target, Gemma4):
        raise _misfit(config, "the layers of Gemma 4, and the model is of another family")
    source = SafetensorsFolder(path)
    weights = Weights(source, dtype=target.dtype, device=target.device, rename=name_in_language_model)
    assistant = Gemma4Assistant(config, weights, target)
    weights.finish(ignore=r"model\.embed_tokens\.")  # where the head is another, nothing reads it
    return assistant
