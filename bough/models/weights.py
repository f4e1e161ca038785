"""Where a model's tensors come from, and the ledger that makes sure each was used exactly as meant.

A Source gives tensors by the names of a Hugging Face checkpoint. Weights hands them to a model while it is being
built: it checks shapes, casts, fuses projections that share their input, and writes down what is missing or of the
wrong shape, so that `finish()` can report everything at once instead of the first thing.
"""

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bough import ops
from bough.errors import BadWeights
from bough.models.blocks import Linear
from bough.models.config import read_json
from bough.ops import Matrices, Parts, Quantised

Progress = Callable[[int, int], None]  # (tensors read, tensors in all)
AGAIN = "download the model again"
GROUPS = (8, 16, 32, 64, 128)  # inputs of a quantised matrix that may share a scale


class Source(Protocol):
    """Named tensors, read one at a time."""

    where: str

    def names(self) -> Iterable[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> Tensor: ...


class SafetensorsFolder:
    """The *.safetensors of a model folder: model.safetensors, or shards with an index, or whatever there is.

    An index says which shard a tensor is in; a tensor that it does not place must be in one file alone.
    """

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._files: dict[str, Any] = {}  # tensor → the open file that it is in
        index = folder / "model.safetensors.index.json"
        placed: dict[str, str] = {}
        if os.path.exists(folder / "model.safetensors"):
            shards = ["model.safetensors"]
        elif os.path.exists(index):
            placed = _read_index(index)
            shards = sorted(set(placed.values()))
        else:
            shards = _without_index(folder)
        for shard in shards:
            self._open(folder / shard, placed)
        lost = sorted(set(placed) - set(self._files))
        if lost:
            raise BadWeights(f"{index} lists tensors that their shards do not have: {_some(lost)}; {AGAIN}")

    def _open(self, path: Path, placed: Mapping[str, str]) -> None:
        try:
            file = safe_open(path, framework="pt")
        except FileNotFoundError:
            raise BadWeights(f"{path} is missing; {AGAIN}") from None
        except (SafetensorError, OSError, ValueError) as error:
            raise BadWeights(f"{path} is damaged or cut short ({error}); {AGAIN}") from None
        names = [name for name in file.keys() if placed.get(name, path.name) == path.name]  # noqa: SIM118 (no mapping)
        twice = sorted(name for name in names if name in self._files)
        if twice:
            raise BadWeights(f"{path} repeats tensors of another file there: {_some(twice)}; remove the file to ignore")
        self._files.update(dict.fromkeys(names, file))

    def names(self) -> Iterable[str]:
        return self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def nbytes(self, name: str) -> int:
        """Without reading it."""
        kind = self._files[name].get_slice(name).get_dtype()
        return math.prod(self.shape(name)) * int(re.sub(r"\D", "", re.sub("^BOOL$", "8", kind.partition("_")[0]))) // 8


def _read_index(path: Path) -> dict[str, str]:
    """Which shard each tensor is in. A shard is a name in the same folder: an index leads nowhere else."""
    placed = read_json(path).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(shard, str) for shard in placed.values()):
        raise BadWeights(f"{path} has no weight_map from tensors to shards; {AGAIN}")
    foreign = sorted(shard for shard in set(placed.values()) if not re.fullmatch(r"[^/\\]+\.safetensors", shard))
    if foreign:
        raise BadWeights(f"{path} names what is no *.safetensors in its folder: {_some(foreign)}; {AGAIN}")
    if not placed:
        raise BadWeights(f"{path} lists no tensors; {AGAIN}")
    return placed


def _without_index(folder: Path) -> list[str]:
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    if not shards and any(folder.glob("*.bin")):
        raise BadWeights(
            f"{folder} has its weights in *.bin only. Those are pickle files, which can run code when read, so Bough"
            " refuses them; if you trust them, convert them with transformers:"
            " AutoModelForCausalLM.from_pretrained(folder).save_pretrained(another_folder)"
        )
    if not shards:
        raise BadWeights(f"{folder} has no *.safetensors; give a folder with weights in that format")
    return shards


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
        self._names: dict[str, str] = {}  # today's name → the name in the source
        for name in source.names():
            if self._names.setdefault(rename(name), name) != name:
                raise BadWeights(f"{source.where} has both {self._names[rename(name)]} and {name}; {AGAIN}")
        self._unused = set(self._names)
        self._missing: list[str] = []
        self._misshapen: list[str] = []
        self._progress = progress
        self.nbytes = self.count = 0  # bytes and weights of what was handed out

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
        value = self.source.read(self._names[name])
        if not value.is_floating_point():
            self._misshapen.append(f"{name} holds {value.dtype}, expected floating point")
            return stand_in
        value = value.to(self.device, target)
        self.nbytes += value.nbytes
        self.count += value.numel()
        if self._progress:
            self._progress(len(self._names) - len(self._unused), len(self._names))
        return value

    def repeats(self, name: str, tensor: Tensor) -> bool:
        """Whether the source has under this name what was read as `tensor` already; that then counts as used.

        The same in fewer bits is no repetition.
        """
        same = f"{name}.scale" not in self._names and not tensor.is_meta
        same = same and self.source.shape(self._names[name]) == tuple(tensor.shape)
        same = same and torch.equal(self.source.read(self._names[name]).to(tensor.device, tensor.dtype), tensor)
        if same:
            self._unused.discard(name)
        return same

    def matrix(self, name: str, shape: Sequence[int]) -> Tensor | Quantised:
        """The tensor of that name, for what is multiplied with and nothing else: it may be of fewer bits.

        Such a tensor says so itself, by the scales (and zeros) that the source has beside it.
        """
        if f"{name}.scale" not in self._names:
            return self.tensor(name, shape)
        stand_in = torch.empty(tuple(shape), dtype=self.dtype, device="meta")
        *outputs, inputs = shape
        self._unused.difference_update((name, f"{name}.scale", f"{name}.zero"))
        data = self.source.read(self._names[name])
        groups = (self.source.shape(self._names[f"{name}.scale"]) or (0,))[-1]
        width = {torch.int8: inputs, torch.uint8: inputs // 2}.get(data.dtype)
        if data.shape != (*outputs, width) or groups not in (inputs // size for size in GROUPS if inputs % size == 0):
            found = f"{data.dtype} {list(data.shape)} in {groups} groups"
            self._misshapen.append(f"{name} is {found}, expected {list(shape)} of 8 or 4 bits")
            return stand_in
        others = self.count
        beside = [self.tensor(f"{name}.scale", (*outputs, groups))]
        if data.dtype == torch.uint8:
            beside.append(self.tensor(f"{name}.zero", (*outputs, groups)))
        if any(each.is_meta for each in beside):
            return stand_in
        self.nbytes += data.nbytes
        self.count = others + math.prod(shape)  # scales and zeros are none
        return Quantised(data.to(self.device), *beside)

    def linear(
        self,
        names: str | Sequence[str],
        outputs: int | Sequence[int],
        inputs: int,
        bias: bool = False,
        orders: Sequence[Tensor] | None = None,
    ) -> Linear:
        """The projection `name`, or several of one input fused so that one product computes all of them.

        `orders` has for each of them which row of the tensor becomes which output.
        """
        names = [names] if isinstance(names, str) else list(names)
        outputs = [outputs] if isinstance(outputs, int) else list(outputs)
        weights = [self.matrix(f"{n}.weight", (o, inputs)) for n, o in zip(names, outputs, strict=True)]
        if orders is not None:
            weights = [each[order.to(each.device)] for each, order in zip(weights, orders, strict=True)]
        biases = [self.tensor(f"{n}.bias", (o,)) for n, o in zip(names, outputs, strict=True)] if bias else []
        whole = bias and not any(each.is_meta for each in biases)
        return Linear(_fuse(weights), torch.cat(biases) if whole else None)

    def stack(self, name: str, count: int, outputs: int, inputs: int) -> Matrices:
        """The matrices of all experts, which the source has in one tensor [count, outputs, inputs]."""
        stack = self.matrix(name, (count, outputs, inputs))
        return ops.matrices(stack if isinstance(stack, Tensor) else [stack[index] for index in range(count)])

    def taps(self, name: str, channels: int, kernel: int) -> Tensor:
        """A depthwise convolution's weight, tap by tap [kernel, channels] in float32, as it is applied."""
        return self.tensor(f"{name}.weight", (channels, 1, kernel))[:, 0].T.float().contiguous()

    def take(self, pattern: str) -> dict[str, Tensor]:
        """All tensors whose names match, as they are: for parts that another piece of the program builds."""
        names = sorted(name for name in self._unused if re.match(pattern, name))
        self._unused.difference_update(names)
        return {name: self.source.read(self._names[name]) for name in names}

    def finish(self, ignore: str | None = None) -> None:
        """Everything must have been there, in shape, and used; what matches `ignore` may be left over."""
        left = sorted(name for name in self._unused if not (ignore and re.match(ignore, name)))
        faults = [("missing", self._missing), ("of the wrong shape or type", self._misshapen), ("unexpected", left)]
        said = [f"{len(names)} tensors {fault}: {_some(names)}" for fault, names in faults if names]
        if said:
            raise BadWeights(
                f"the weights in {self.source.where} do not fit the config: {'; '.join(said)}."
                " Check that config.json belongs to these weights"
            )


def _fuse(weights: Sequence[Tensor | Quantised]) -> Tensor | Quantised | Parts:
    """One weight of them all, or a stand-in for it if one of them is a stand-in."""
    if any(isinstance(each, Tensor) and each.is_meta for each in weights):
        return torch.empty((sum(each.shape[0] for each in weights), *weights[0].shape[1:]), device="meta")
    return ops.fused(weights)


def _some(names: Sequence[str], most: int = 100) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
