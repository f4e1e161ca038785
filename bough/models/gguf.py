"""GGUF files as a source of weights: tensors under Hugging Face names and in their layout, and a config to match.

Tensors are dequantised one at a time, when they are read. gguf_header.py reads the tables of the file,
gguf_architectures.py knows the models, gguf_tokenizer.py the tokenizers in them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bough.errors import BadWeights, ModelError, UnknownArchitecture
from bough.models.gguf_architectures import ANY, ARCHITECTURES, FREQUENCIES, layers_of
from bough.models.gguf_header import Entry, Header, Metadata, read_header
from bough.models.gguf_tokenizer import gguf_tokenizer

__all__ = ["GGUFFile", "gguf_tokenizer"]

AGAIN = "download it again"
PIECE = 1 << 17  # elements dequantised at once: few enough that the steps in between stay in the processor's cache


class GGUFFile:
    """A GGUF file: the Source of its tensors, its config, and its metadata."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        data, header = _open(path)
        self.metadata: Metadata = header.metadata
        name = self.metadata.need("general.architecture", str)
        if name not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            raise UnknownArchitecture(f"{self.where} is of type {name!r}; from GGUF files Bough runs {known}")
        if (parts := self.metadata.size("split.count", 1)) > 1:
            raise ModelError(f"{self.where} is one of {parts} parts; join them with llama-gguf-split --merge")
        self.own = self.metadata.under(f"{name}.")  # the part that describes the model
        self._architecture = ARCHITECTURES[name]
        quants = _quants(self.where)
        layers = layers_of(self.own) if "nextn_predict_layers" in self.own else ANY
        self._held: dict[str, _Held] = {}
        for entry in header.tensors:
            stored = _Stored.find(entry, data[header.data_start :], quants, self.where)
            held = _named(stored, self._architecture.rename(entry.name, layers))
            if twice := held.keys() & self._held.keys():
                raise BadWeights(f"{self.where} has {min(twice)} twice, the second time as {entry.name}; {AGAIN}")
            self._held |= held

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def names(self) -> Iterable[str]:
        return [name for name in self._held if name != FREQUENCIES]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._architecture.shape(name, self._held[name].shape)

    def read(self, name: str) -> Tensor:
        """The tensor in float32, as the Hugging Face checkpoint has it."""
        stored = self._held[name].stored
        values = stored.dequantised().view(stored.entry.shape)
        return self._architecture.restore(self, name, values).reshape(self.shape(name))

    def config(self) -> dict[str, Any]:
        """What config.json would say."""
        return self._architecture.config(self) | {"dtype": self._dtype()}

    def _dtype(self) -> str:
        """What to compute in: the type of the matrices, or for quantised ones bfloat16, finer than their steps."""
        types = {held.stored.type.name for held in self._held.values()}
        if types <= {"F32"}:
            return "float32"
        return "float16" if types <= {"F32", "F16"} else "bfloat16"


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in the file: its bytes, and what they mean."""

    entry: Entry
    type: Any  # of the gguf package
    data: np.ndarray
    quants: Any  # the module of the gguf package that dequantises
    where: str

    @staticmethod
    def find(entry: Entry, data: np.ndarray, quants: Any, where: str) -> "_Stored":
        """The tensor of this entry in the data of the file; one that would reach past its end is an error."""
        try:
            kind = quants.GGMLQuantizationType(entry.type)
        except ValueError:
            raise BadWeights(
                f"{entry.name} in {where} is of type {entry.type}, which the gguf package does not know;"
                " upgrade it (pip install -U gguf) or take another quantisation"
            ) from None
        block, size = quants.GGML_QUANT_SIZES[kind]
        if (entry.shape or (1,))[-1] % block:
            raise BadWeights(f"{entry.name} in {where} does not fill its blocks of {block}; download it again")
        stop = entry.offset + entry.elements // block * size
        if stop > len(data):
            raise BadWeights(f"{where} ends inside {entry.name}; it is cut short or damaged: download it again")
        return _Stored(entry, kind, data[entry.offset : stop], quants, where)

    def parts(self, count: int) -> "list[_Stored]":
        """What it has of each of so many that follow one another."""
        first, rows, *others = self.entry.shape
        entry = replace(self.entry, shape=(first * rows // count, *others))
        return [replace(self, entry=entry, data=part) for part in np.split(self.data, count)]

    def dequantised(self) -> Tensor:
        block, size = self.quants.GGML_QUANT_SIZES[self.type]
        values, blocks = torch.empty(self.entry.elements), PIECE // block
        try:
            with np.errstate(all="ignore"):  # what is no number stays none, without a word from numpy
                for i, piece in enumerate(values.split(blocks * block)):
                    part = self.data[i * blocks * size : (i + 1) * blocks * size]
                    piece.numpy()[:] = self.quants.dequantize(part, self.type)
        except NotImplementedError:
            raise BadWeights(
                f"{self.entry.name} in {self.where} is of type {self.type.name}, which Bough cannot dequantise;"
                " take another quantisation of the model"
            ) from None
        return values


class _Held(NamedTuple):
    """What has a name: what is stored, or a part of it of this shape."""

    stored: _Stored
    shape: tuple[int, ...]


def _named(stored: _Stored, names: list[str]) -> dict[str, _Held]:
    """What a tensor holds, by name: names with {} are of each expert."""
    shape, several = stored.entry.shape, len(names)
    if "{}" in names[0]:
        if len(shape) != 3 or not stored.entry.elements or shape[1] % several:  # no elements: of any number of experts
            raise BadWeights(f"{stored.entry.name} in {stored.where} is {list(shape)}, which no experts have; {AGAIN}")
        names = [name.replace("{}", str(expert)) for expert in range(shape[0]) for name in names]
        parts = stored.parts(len(names))
        return {name: _Held(part, part.entry.shape) for name, part in zip(names, parts, strict=True)}
    rows, *others = shape or (1,)
    if rows % several:
        raise BadWeights(f"{stored.entry.name} in {stored.where} is {list(shape)}, of {several} tensors; {AGAIN}")
    return {name: _Held(stored, (rows // several, *others) if several > 1 else shape) for name in names}


def _quants(where: str) -> Any:
    try:
        from gguf import quants  # an optional dependency: only these files need it
    except ImportError:
        raise ModelError(f"{where} needs the gguf package to be read: pip install 'bough[gguf]'") from None
    return quants


def _open(path: Path) -> tuple[np.ndarray, Header]:
    """The bytes of the file, read where they are used, and its head."""
    try:
        data = np.asarray(np.memmap(path, mode="r")) if path.stat().st_size else np.empty(0, np.uint8)
    except OSError as error:
        raise ModelError(f"{path} cannot be opened ({error.strerror}); give the path of a .gguf file") from None
    return data, read_header(data, str(path))
