"""What every model is: kinds of state, a forward over a step, and the head that turns hidden rows into logits."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bough.models.config import ModelConfig
from bough.models.weights import Weights
from bough.state.kinds import Kind
from bough.state.step import Step


class Model(ABC):
    """A decoder: tokens and state in, hidden rows out. Holds weights; keeps nothing between calls."""

    kinds: Sequence[Kind | None]  # by layer
    ignored: str | None = None  # tensors of other senses that a checkpoint may bring along
    kept: str | None = None  # tensors that are loaded as they are for a drafter

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.context: int = config.max_position_embeddings
        self.dtype, self.device = weights.dtype, weights.device
        self.embedding = weights.tensor("model.embed_tokens.weight", (self.vocab_size, self.hidden_size))
        self.head = self.embedding
        if not config.get("tie_word_embeddings", self.tied_by_default):
            self.head = weights.tensor("lm_head.weight", (self.vocab_size, self.hidden_size))
        self.extra = weights.take(self.kept) if self.kept else {}

    tied_by_default = False

    @abstractmethod
    def __call__(self, step: Step) -> Tensor:
        """The hidden rows [T, hidden] of the step's tokens, after the final norm; their state is written."""

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] → [N, vocabulary]."""
        return F.linear(hidden, self.head)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, each storage once."""
        seen: dict[int, int] = {}
        _collect(self, seen, set())
        return sum(seen.values())


def _collect(value: object, seen: dict[int, int], visited: set[int]) -> None:
    if isinstance(value, torch.Tensor):
        seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    elif isinstance(value, list | tuple | dict) or type(value).__module__.startswith("bough."):
        if id(value) in visited:
            return
        visited.add(id(value))
        inner = (
            value.values()
            if isinstance(value, dict)
            else value
            if isinstance(value, list | tuple)
            else vars(value).values()
        )
        for each in inner:
            _collect(each, seen, visited)
