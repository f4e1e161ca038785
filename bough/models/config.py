"""A model's config.json, read so that a wrong or old one is a clear error and not a surprise later."""

import json
import os
import reprlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bough.errors import ModelError, UnknownArchitecture
from bough.models.fields import AT_LEAST, MULTIPLES, OBJECTS, RULES

REMEDY = "take the config.json that belongs to the weights"
QUANT_METHOD, QUANT_VERSION = "bough", 1  # of the quantised weights that Bough writes, and the only ones it reads


class ModelConfig(Mapping[str, Any]):
    """The fields of a config.json by attribute: `config.hidden_size`. `config.get(name, default)` for optional ones.

    A field is checked when it is read (fields.py has the rules), so what nobody reads may hold anything. A field that
    is null counts as absent, as the library that writes these files means it. A field of fields is a ModelConfig too.
    """

    def __init__(self, fields: Mapping[str, Any], where: str = "config.json") -> None:
        if not isinstance(fields, Mapping):
            raise ModelError(f"{where} is {reprlib.repr(fields)}, and must be an object with fields; {REMEDY}")
        self._fields: dict[str, Any] = dict(fields._fields if isinstance(fields, ModelConfig) else fields)
        self.where = where

    @staticmethod
    def from_folder(folder: Path) -> "ModelConfig":
        path = folder / "config.json"
        if not os.path.exists(path):
            raise ModelError(f"{folder} has no config.json; give a folder in the Hugging Face layout or a .gguf file")
        config = ModelConfig(read_json(path), str(path))
        config._check_quantisation()
        return config

    @property
    def raw(self) -> Mapping[str, Any]:
        """All fields as they were read, unchecked."""
        return self._fields

    def __getitem__(self, name: str) -> Any:
        value = self._fields.get(name)
        if value is None:
            raise KeyError(name)
        if name in OBJECTS:
            return ModelConfig(value, f"{self.where} ({name})")
        if name in RULES and not RULES[name].allows(value):
            raise ModelError(
                f"{self.where} has {name} {reprlib.repr(value)}, and it must be {RULES[name].said}; {REMEDY}"
            )
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise ModelError(f"{self.where} lacks {name!r}; {REMEDY}") from None

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
        text = inner.over(outer)
        # The head and what ends a text belong to the outer model, whatever the inner config says of them.
        own = {"eos_token_id": self["eos_token_id"]} if "eos_token_id" in self else {}
        own |= {"tie_word_embeddings": True} if self.get("tie_word_embeddings") else {}
        return ModelConfig({**text._fields, **own}, text.where)

    def over(self, defaults: Mapping[str, Any]) -> "ModelConfig":
        """This config, with the defaults for what it leaves out. Fields that contradict each other are an error."""
        given = {name: self._fields[name] for name in self}
        config = ModelConfig({**ModelConfig(defaults)._fields, **given}, self.where)
        config._check()
        return config

    def renamed(self, names: Mapping[str, str]) -> "ModelConfig":
        """This config, with the values of the old names (the keys) under today's."""
        found = {new: self._fields[old] for old, new in names.items() if old in self}
        return ModelConfig({**self._fields, **found}, self.where)

    def _check(self) -> None:
        """Raise where two fields do not go together."""
        for part, total in MULTIPLES:
            if part in self and total in self and self[total] % self[part]:
                self._refuse(f"{total} {self[total]}, which is no multiple of {part} {self[part]}")
        for least, most in AT_LEAST:
            if least in self and most in self and self[least] > self[most]:
                self._refuse(f"{least} {self[least]}, which is more than {most} {self[most]}")
        if "layer_types" in self and "num_hidden_layers" in self and len(self.layer_types) != self.num_hidden_layers:
            self._refuse(f"{len(self.layer_types)} layer_types for num_hidden_layers {self.num_hidden_layers}")

    def _check_quantisation(self) -> None:
        how = self.get("quantization_config")
        if how is None:
            return
        if how.get("quant_method") != QUANT_METHOD:
            raise ModelError(
                f"{self.where} is of weights quantised by {reprlib.repr(how.get('quant_method'))}, which Bough does not"
                " read; take the model in 16 bits and quantise it with bough create --quantize"
            )
        if how.get("version") != QUANT_VERSION:
            raise ModelError(
                f"{self.where} is of version {reprlib.repr(how.get('version'))} of Bough's quantised weights, and this"
                f" Bough reads version {QUANT_VERSION}; upgrade it, or quantise the model again"
            )

    def _refuse(self, what: str) -> None:
        raise ModelError(f"{self.where} has {what}; {REMEDY}")

    @property
    def head_size(self) -> int:
        if "head_dim" not in self and self.hidden_size % self.num_attention_heads:
            self._refuse(
                f"hidden_size {self.hidden_size}, which num_attention_heads {self.num_attention_heads} does not divide,"
                " and no head_dim"
            )
        return self.get("head_dim") or self.hidden_size // self.num_attention_heads

    def types_of_layers(self, known: tuple[str, ...], otherwise: Callable[[int], str]) -> list[str]:
        """The type of each layer, one of those known: as listed, or `otherwise(index)` where there is no list."""
        types = self.get("layer_types") or [otherwise(index) for index in range(self.num_hidden_layers)]
        unknown = sorted(set(types) - set(known))
        if unknown:
            raise UnknownArchitecture(
                f"{self.where} has layers of type {', '.join(unknown)}; of this family Bough runs {', '.join(known)}"
            )
        return list(types)

    def rope(self, layer_type: str | None = None) -> dict[str, Any]:
        """The rope parameters (of one type of layer), from today's field or from the two that came before it."""
        rope = dict(self.get("rope_parameters") or self.get("rope_scaling") or {})
        if layer_type in rope:
            rope = dict(rope[layer_type])
        for name in ("rope_theta", "partial_rotary_factor"):
            if name not in rope and name in self:
                rope[name] = self[name]
        if layer_type is None and "original_max_position_embeddings" in self:  # which outranks what is inside
            rope["original_max_position_embeddings"] = self.original_max_position_embeddings
        return rope


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; anything else is a ModelError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object; download it again")
    return value
