"""What every model is: kinds of state, a forward over a step, and the head that turns hidden rows into logits."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from bough import ops
from bough.models.config import ModelConfig
from bough.models.weights import Weights
from bough.ops import Quantised, Weight
from bough.state.kinds import Kind
from bough.state.step import Step


class Model(ABC):
    """A decoder: tokens and state in, hidden rows out. Holds weights; keeps nothing between calls."""

    kinds: Sequence[Kind | None]  # by layer
    weight_bytes: int  # of all tensors read
    parameters: int
    defaults: Mapping[str, Any] = {}  # what a config.json of the family may leave out
    older: Mapping[str, str] = {}  # names in older ones, and today's
    ignored: str | None = None  # tensors of other senses that a checkpoint may bring along
    kept: str | None = None  # tensors that are loaded as they are for a drafter

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.context: int = config.max_position_embeddings
        self.dtype, self.device = weights.dtype, weights.device
        self.embedding = weights.tensor("model.embed_tokens.weight", (self.vocab_size, self.hidden_size))
        head = self._head(config.get("tie_word_embeddings", False), weights)
        self.head: Weight
        if head is self.embedding:
            self.head = self.embedding = ops.arranged(self.embedding)
        else:
            self.head = ops.arranged(head)
        self.extra = weights.take(self.kept) if self.kept else {}

    def _head(self, tied: bool, weights: Weights) -> Tensor | Quantised:
        """The embedding where it is tied. A file may repeat it as the head; one that differs was trained apart, or is
        the embedding in fewer bits."""
        name = "lm_head.weight"
        if tied and (name not in weights or weights.repeats(name, self.embedding)):
            return self.embedding
        before = weights.count
        head = weights.matrix(name, (self.vocab_size, self.hidden_size))
        if tied and isinstance(head, Quantised):
            weights.count = before  # they are the embedding's
        return head

    @classmethod
    def told(cls, config: ModelConfig) -> ModelConfig:
        """What the config of a checkpoint says of such a model, under today's names."""
        return config.text.renamed(cls.older).over(cls.defaults)

    @abstractmethod
    def __call__(self, step: Step) -> Tensor:
        """The hidden rows [T, hidden] of the step's tokens, after the final norm; their state is written.

        Where some are wanted, it gives the rows [N, hidden] of these alone, in that order.
        """

    def embed(self, tokens: Tensor) -> Tensor:
        return ops.embedding(tokens, self.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] → [N, vocabulary]."""
        if not len(hidden):  # a part of a prompt that no token is chosen after
            return hidden.new_empty(0, self.vocab_size)
        return ops.linear(hidden, self.head)
