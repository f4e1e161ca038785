"""A model's config.json, read so that a wrong or old one is a clear error and not a surprise later."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bough.errors import ModelError


class ModelConfig(Mapping[str, Any]):
    """The fields of a config.json by attribute: `config.hidden_size`. `config.get(name, default)` for optional ones.

    A field that is null counts as absent, as the library that writes these files means it.
    """

    def __init__(self, fields: Mapping[str, Any], where: str = "config.json") -> None:
        self._fields, self.where = dict(fields), where

    @staticmethod
    def from_folder(folder: Path) -> "ModelConfig":
        path = folder / "config.json"
        if not path.exists():
            raise ModelError(f"{folder} has no config.json; give a folder in the Hugging Face layout or a .gguf file")
        return ModelConfig(read_json(path), str(path))

    def __getitem__(self, name: str) -> Any:
        value = self._fields.get(name)
        if value is None:
            raise KeyError(name)
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise ModelError(f"{self.where} lacks {name!r}; take the config.json that belongs to the weights") from None

    def __iter__(self) -> Iterator[str]:
        return (name for name, value in self._fields.items() if value is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def text(self) -> "ModelConfig":
        """The part about the language model: itself, or the text_config of a model with other senses too."""
        inner = self.get("text_config")
        if inner is None:
            return self
        outer = {name: self[name] for name in ("tie_word_embeddings", "dtype", "torch_dtype") if name in self}
        return ModelConfig({**outer, **inner}, f"{self.where} (text_config)")

    @property
    def head_size(self) -> int:
        return self.get("head_dim") or self.hidden_size // self.num_attention_heads

    def rope(self, layer_type: str | None = None) -> dict[str, Any]:
        """The rope parameters (of one type of layer), from today's field or from the two that came before it."""
        rope = dict(self.get("rope_parameters") or self.get("rope_scaling") or {})
        if layer_type in rope:
            rope = dict(rope[layer_type])
        for name in ("rope_theta", "partial_rotary_factor"):
            if name not in rope and name in self:
                rope[name] = self[name]
        return rope


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; anything else is a ModelError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object; download it again")
    return value
