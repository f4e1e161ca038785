"""What makes state computed by one model useless to another: weights, configuration, and how state is laid out."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bough.models.model import Model
from bough.state.layout import Layout

VERSION = 1  # of the arithmetic: to be raised when models compute something else from the same weights
PIECE = 1 << 22  # elements at a time


def identity(model: Model, layout: Layout) -> str:
    """A name for all that state depends on, in 32 hexadecimal digits. Reads every weight."""
    told = {
        "version": VERSION,
        "family": type(model).__name__,
        "config": model.config.raw,
        "device": model.device.type,
        "page_tokens": layout.page_tokens,
        "units": [
            [
                unit.name,
                unit.nbytes,
                [[*key, list(each.shape), str(each.part.dtype)] for key, each in unit.fields.items()],
            ]
            for unit in layout.units
        ],
        "weights": [
            [name, str(tensor.dtype), list(tensor.shape), fingerprint(tensor)] for name, tensor in _tensors(model, "")
        ],
    }
    return hashlib.blake2b(json.dumps(told, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


@torch.inference_mode()
def fingerprint(tensor: Tensor) -> int:
    """A number that differs, in all likelihood, for tensors that differ anywhere. Computed where the tensor is."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if len(data) % 4:
        data = torch.cat([data, data.new_zeros(4 - len(data) % 4)])
    words, total = data.view(torch.int32), 0
    for start in range(0, len(words), PIECE):
        piece = words[start : start + PIECE].to(torch.int64)
        place = torch.arange(start + 1, start + 1 + len(piece), device=piece.device)
        mixed = (piece + (place << 20)) * -7046029254386353131  # odd, so nothing is lost; 64 bits wrap around
        mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
        total += int((mixed ^ (mixed >> 32)).sum())
    return total % 2**64


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that a model is made of, by where it is."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _tensors(value[key], f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _tensors(each, f"{name}.{index}")
    elif type(value).__module__.startswith(("bough.models", "bough.ops")):
        named = [*getattr(value, "__dict__", ()), *getattr(value, "__slots__", ())]
        yield from _tensors({each: getattr(value, each) for each in named}, name)
