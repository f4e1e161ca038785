"""Where a model's tensors come from, and the ledger that makes sure each was used exactly as meant.

A Source gives tensors by the names of a Hugging Face checkpoint. Weights hands them to a model while it is being
built: it checks shapes, casts, fuses projections that share their input, and writes down what is missing or of the
wrong shape, so that `finish()` can report everything at once instead of the first thing.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bough.errors import BadWeights
from bough.models.blocks import Linear

Progress = Callable[[int, int], None]  # (bytes read, bytes in all)


class Source(Protocol):
    """Named tensors, read one at a time."""

    where: str

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> Tensor: ...


class SafetensorsFolder:
    """The *.safetensors of a model folder: one file, or shards with an index."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._files: dict[str, Any] = {}
        index = folder / "model.safetensors.index.json"
        if index.exists():
            try:
                placed = json.loads(index.read_text())["weight_map"]
                shards = sorted({Path(folder / name).name for name in placed.values()})
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise BadWeights(f"{index} is not a shard index ({error}); download it again") from None
        else:
            placed = {}
            shards = sorted(path.name for path in folder.glob("*.safetensors"))
        if not shards:
            raise BadWeights(f"{folder} has no *.safetensors; give a folder with weights in that format")
        for shard in shards:
            self._open(folder / shard)
        lost = sorted(set(placed) - set(self._files))
        if lost:
            raise BadWeights(f"{index.name} lists tensors that no shard has: {_some(lost)}; download the model again")

    def _open(self, path: Path) -> None:
        if not path.exists():
            raise BadWeights(f"{path} is missing, and the shard index names it; download it again")
        try:
            file = safe_open(path, framework="pt")
            self._files.update(dict.fromkeys(file.keys(), file))
        except (SafetensorError, OSError, ValueError) as error:
            raise BadWeights(
                f"{path} cannot be read ({error}); it is damaged or cut short: download it again"
            ) from None

    def names(self) -> Iterable[str]:
        return self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)


class Weights:
    """Tensors for a model under construction, at one dtype on one device."""

    def __init__(
        self,
        source: Source,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        rename: Callable[[str], str] = lambda name: name,
        progress: Progress | None = None,
    ) -> None:
        self.source, self.dtype, self.device = source, dtype, torch.device(device)
        self._names = {rename(name): name for name in source.names()}
        self._unused = set(self._names)
        self._missing: list[str] = []
        self._misshapen: list[str] = []
        self._progress = progress

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor of that name, in the model's dtype unless told otherwise.

        A missing or misshapen one is written down and stood in for, so that building can go on and find the rest.
        """
        target = dtype or self.dtype
        stand_in = torch.empty(tuple(shape), dtype=target, device="meta")
        if name not in self._names:
            self._missing.append(name)
            return stand_in
        self._unused.discard(name)
        found = self.source.shape(self._names[name])
        if found != tuple(shape):
            self._misshapen.append(f"{name} is {list(found)}, expected {list(shape)}")
            return stand_in
        value = self.source.read(self._names[name]).to(self.device, target)
        if self._progress:
            self._progress(len(self._names) - len(self._unused), len(self._names))
        return value

    def linear(
        self, names: str | Sequence[str], outputs: int | Sequence[int], inputs: int, bias: bool = False
    ) -> Linear:
        """The projection `name`, or several of one input fused so that one product computes all of them."""
        names = [names] if isinstance(names, str) else list(names)
        outputs = [outputs] if isinstance(outputs, int) else list(outputs)
        weights = [self.tensor(f"{n}.weight", (o, inputs)) for n, o in zip(names, outputs, strict=True)]
        biases = [self.tensor(f"{n}.bias", (o,)) for n, o in zip(names, outputs, strict=True)] if bias else []
        return Linear(_fuse(weights), _fuse(biases) if bias else None)

    def take(self, pattern: str) -> dict[str, Tensor]:
        """All tensors whose names match, as they are: for parts that another piece of the program builds."""
        names = sorted(name for name in self._unused if re.match(pattern, name))
        self._unused.difference_update(names)
        return {name: self.source.read(self._names[name]) for name in names}

    def finish(self, ignore: str | None = None) -> None:
        """Everything must have been there, in shape, and used; what matches `ignore` may be left over."""
        left = sorted(name for name in self._unused if not (ignore and re.match(ignore, name)))
        faults = [("missing", self._missing), ("of the wrong shape", self._misshapen), ("unexpected", left)]
        said = [f"{len(names)} tensors {fault}: {_some(names)}" for fault, names in faults if names]
        if said:
            raise BadWeights(
                f"the weights in {self.source.where} do not fit the config: {'; '.join(said)}."
                " Check that config.json belongs to these weights"
            )


def _fuse(tensors: list[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return tensors[0]
    if any(each.is_meta for each in tensors):
        return torch.cat([each.to("meta") for each in tensors])
    return torch.cat(tensors)


def _some(names: Sequence[str], most: int = 20) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
