"""Whether weights fit their config, and a draft its target, told from headers: no weight is read.

Models are built on torch's meta device, by the code that builds them to run. So what passes here will load.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bough.draft.load import drafter_for
from bough.draft.mtp import MTPHead
from bough.errors import ModelError
from bough.models.config import ModelConfig
from bough.models.gguf import GGUFFile
from bough.models.load import build_model, load_model
from bough.models.model import Model
from bough.models.quantize import bits_per_weight
from bough.models.weights import SafetensorsFolder


class Shapes:
    """The tensors of a GGUF file without what is in them, which would have to be dequantised."""

    def __init__(self, file: GGUFFile) -> None:
        self.where, self.names, self.shape = file.where, file.names, file.shape

    def read(self, name: str) -> Tensor:
        return torch.empty(self.shape(name), device="meta")


def config_of(path: Path) -> ModelConfig:
    """The config of a model in a folder or a GGUF file."""
    if path.is_file():
        return ModelConfig(GGUFFile(path).config(), f"the metadata of {path}")
    return ModelConfig.from_folder(path)


def skeleton(path: Path, *, dtype: str = "auto", **_: Any) -> Model:
    """A model without its weights. Raises what loading it would raise."""
    if path.is_file():
        return build_model(config_of(path), Shapes(GGUFFile(path)), dtype=dtype, device="meta")
    return load_model(path, dtype=dtype, device="meta")


def count(path: Path) -> int:
    """How many weights are in a folder or a GGUF file."""
    if path.is_file():
        file = GGUFFile(path)
        return sum(math.prod(file.shape(name)) for name in file.names())
    tensors = SafetensorsFolder(path)
    return round(8 * sum(map(tensors.nbytes, tensors.names())) / bits_per_weight(path))


def own_drafter(model: Model) -> str | None:
    """What kind of drafter is in a model's own weights, if there is one that can be used."""
    try:
        return "mtp" if model.extra and MTPHead(model) else None
    except ModelError:
        return None


def check_draft(draft: Path, target: Model, target_path: Path) -> None:
    """Raise if this cannot draft for the target: another vocabulary or width, or layers that the target has not."""
    drafter_for(draft, target, path=target_path, load=skeleton)
