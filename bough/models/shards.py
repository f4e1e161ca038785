"""Safetensors files: one that is read by itself; and shards, written tensor by tensor.

What is to be in a file must be known before it is written: it stands in its header.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bough.errors import BadWeights
from bough.models.weights import SafetensorsFolder

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = 4 << 30  # bytes a file, about
NAMES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int8: "I8", torch.uint8: "U8",
    torch.int32: "I32", torch.int64: "I64", torch.bool: "BOOL",
}  # fmt: skip


class SafetensorsFile(SafetensorsFolder):
    """The tensors of one file, whatever is beside it."""

    def __init__(self, path: Path) -> None:
        self.where, self._files = str(path), {}
        self._open(path, {})


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], most: int = SHARD) -> None:
    """Tensors that are there already, as the weights of a model folder."""
    entries = [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    for entry in entries:
        if entry.dtype not in NAMES:
            raise BadWeights(f"{entry.name} holds {entry.dtype}, which cannot be stored; convert it to torch.bfloat16")
    write_shards(folder, entries, iter(tensors.values()), lambda _: None, most)


def write_shards(
    folder: Path, entries: Sequence[Entry], tensors: Iterator[Tensor], wrote: Callable[[int], None], most: int = SHARD
) -> None:
    """The tensors, in the order of the entries, as the weights of a model folder. `wrote` is told bytes as they go."""
    shards = _cut(entries, most)
    several = len(shards) > 1
    placed: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors" if several else WHOLE
        placed |= dict.fromkeys((entry.name for entry in shard), name)
        with (folder / name).open("wb") as file:
            file.write(_header(shard))
            for entry in shard:
                tensor = next(tensors)
                assert (tensor.dtype, tuple(tensor.shape)) == (entry.dtype, entry.shape), entry.name
                tensor.contiguous().view(-1).view(torch.uint8).numpy().tofile(file)
                del tensor  # before the next is read
                wrote(entry.nbytes)
            file.flush()
            os.fsync(file.fileno())
    if several:
        total = sum(entry.nbytes for entry in entries)
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": placed})


def _cut(entries: Sequence[Entry], most: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    return shards


def _header(entries: Sequence[Entry]) -> bytes:
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in entries:
        end = start + entry.nbytes
        fields[entry.name] = {"dtype": NAMES[entry.dtype], "shape": entry.shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    return len(text).to_bytes(8, "little") + text


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
