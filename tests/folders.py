"""Tiny model folders to damage, and what to ask of them."""

import json
from pathlib import Path

import pytest
from parity import feed, pool_for
from torch import Tensor

from bough.errors import BadWeights, ModelError, UnknownArchitecture
from bough.models.load import load_model
from bough.models.model import Model
from bough.state.live import State

SMALL = {
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
}


def edit_config(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def logits(model: Model) -> Tensor:
    pool = pool_for(model, tokens=64, running=4)
    return feed(model, pool, [(State(pool), [1, 2, 3, 4, 5])])[0]


def refusal(folder: Path, kind: type[ModelError] = ModelError) -> str:
    """The message with which the folder is refused."""
    with pytest.raises(kind) as caught:
        load_model(folder)
    assert type(caught.value) in (ModelError, BadWeights, UnknownArchitecture)
    return str(caught.value)
