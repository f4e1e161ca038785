"""Makes a model smaller: writes a folder whose matrices have 8 or 4 bits a weight. docs/quantisation.md has the format.

Tensors are read, rounded and written one by one, so that memory stays near one of them. The folder is written under
another name and renamed when all of it is there.
"""

import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import processors
from torch import Tensor

from bough.errors import BadWeights, ModelError, OptionError
from bough.models.config import QUANT_METHOD, QUANT_VERSION, ModelConfig
from bough.models.gguf import GGUFFile, gguf_tokenizer
from bough.models.load import FAMILIES, family_of
from bough.models.rounding import GROUPS, group_of, quantised
from bough.models.shards import Entry, write_json, write_shards
from bough.models.weights import AGAIN, SafetensorsFolder, Source

SCHEMES = {"int8": 8, "int4": 4}  # bits a weight

# Tensors that stay as they are, by what is in their names, and why. What is no matrix stays too.
SPARED = {
    r"embed_tokens": "embeddings are looked up, not multiplied with, and most are the head too",
    r"^mtp\.lm_head\.": "the rare head of a draft's own, which decides what it guesses",
    r"masked_embedding\.": "the clusters of a head: few rows, which decide what tokens are scored at all",
    r"norm": "few numbers that scale everything",
    r"conv1d\.|\.conv\.conv\.": "the taps of convolutions: few, and their errors stay in the state",
    r"in_proj_(a|b|ba)\.": "the gates of the delta rule: few rows, and their errors stay in the state",
    r"shared_expert_gate\.|per_layer_input_gate\.": "small gates on all that comes after them",
    r"mlp\.gate\.|router\.": "routers: the wrong expert is no small error",
    r"visual\.|vision_tower|audio_tower|embed_vision|embed_audio": "other senses, which are not run",
}
HEAD = r"^(language_model\.)?lm_head\.weight$"  # of 8 bits in any scheme if it is not the embedding
MATRIX = r"\.weight$|\.experts\.(gate_up|down)_proj$"
SMALL = 1 << 20  # elements; what is spared and larger is written in bfloat16
CARRIED = re.compile(r".*\.(json|jinja|txt|model|md)|LICENSE.*|NOTICE.*", re.IGNORECASE)


def quantize(source: Path, target: Path, scheme: str, *, progress: Callable[[int, int], None] | None = None) -> None:
    """Write the model in `source` (a folder, or a GGUF file) to the new folder `target`, in fewer bits.

    `progress` is told bytes written and bytes in all.
    """
    if scheme not in SCHEMES:
        raise OptionError(f"there is no quantisation {scheme!r}; choose one of {', '.join(SCHEMES)}")
    if os.path.lexists(target):
        raise ModelError(f"{target} is there already; give a path where there is nothing, or remove it")
    tensors, config = _open(source)
    plans = [_plan(tensors, name, bits) for name, bits in _bits(tensors, config, SCHEMES[scheme])]
    entries = [entry for plan in plans for entry in plan.entries]
    done, total = 0, sum(entry.nbytes for entry in entries)

    def wrote(count: int) -> None:
        nonlocal done
        done += count
        if progress:
            progress(done, total)

    target.parent.mkdir(parents=True, exist_ok=True)
    making = target.with_name(f".{target.name}.{os.getpid()}.making")
    making.mkdir()
    try:
        _carry_over(source, tensors, making)
        write_json(making / "config.json", _config(config, scheme))
        write_shards(making, entries, _read(tensors, plans), wrote)
        os.rename(making, target)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise


def bits_per_weight(folder: Path) -> float:
    """What a weight takes on average, scales and zeros included, in a model folder, quantised or not."""
    tensors = SafetensorsFolder(folder)
    names = set(tensors.names())
    weights = sum(
        math.prod(tensors.shape(name)) * (2 if f"{name}.zero" in names else 1)
        for name in names
        if name.removesuffix(".scale").removesuffix(".zero") not in names - {name}
    )
    return 8 * sum(map(tensors.nbytes, names)) / weights


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of a tensor: so many bits a weight and their scales, or (None) itself."""

    name: str
    bits: int | None
    entries: tuple[Entry, ...]


def _open(source: Path) -> tuple[Source, ModelConfig]:
    if os.path.isfile(source):
        file = GGUFFile(source)
        return file, ModelConfig(file.config(), f"the metadata of {source}")
    if not os.path.isdir(source):
        raise ModelError(f"{source} is not there; give a folder with config.json and *.safetensors, or a .gguf file")
    config = ModelConfig.from_folder(source)
    if "quantization_config" in config:
        raise ModelError(f"{source} is quantised already; quantise the model that it was made from")
    return SafetensorsFolder(source), config


def _bits(tensors: Source, config: ModelConfig, bits: int) -> Iterator[tuple[str, int | None]]:
    """Each tensor with its bits."""
    own_head = config.get("model_type") in FAMILIES and not config.text.over(family_of(config).defaults).get(
        "tie_word_embeddings", False
    )
    for name in tensors.names():
        shape = tensors.shape(name)
        wanted: int | None = bits
        if re.search(HEAD, name):
            wanted = 8 if own_head else None
        elif not re.search(MATRIX, name) or any(re.search(pattern, name) for pattern in SPARED):
            wanted = None
        if wanted and (len(shape) < 2 or group_of(shape[-1], wanted) is None):
            wanted = None
        yield name, wanted


def _plan(tensors: Source, name: str, bits: int | None) -> Plan:
    shape = tensors.shape(name)
    if bits is None:
        dtype = torch.bfloat16 if math.prod(shape) > SMALL else tensors.read(name).dtype
        return Plan(name, bits, (Entry(name, dtype, shape),))
    *outputs, inputs = shape
    group = group_of(inputs, bits)
    assert group is not None
    scale = Entry(f"{name}.scale", torch.bfloat16, (*outputs, inputs // group))
    if bits == 8:
        return Plan(name, bits, (Entry(name, torch.int8, shape), scale))
    zero = Entry(f"{name}.zero", torch.bfloat16, scale.shape)
    return Plan(name, bits, (Entry(name, torch.uint8, (*outputs, inputs // 2)), scale, zero))


def _read(tensors: Source, plans: Iterable[Plan]) -> Iterator[Tensor]:
    """What is written for each plan, in the order of its entries."""
    for plan in plans:
        yield from _made(tensors, plan)


def _made(tensors: Source, plan: Plan) -> list[Tensor]:
    tensor = tensors.read(plan.name)
    if plan.bits is None:
        return [tensor.to(plan.entries[0].dtype)]
    if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
        raise BadWeights(f"{plan.name} in {tensors.where} holds what is no finite number; {AGAIN}")
    made = quantised(tensor, plan.bits)
    return [each for each in (made.data, made.scale, made.zero) if each is not None]


def _config(config: ModelConfig, scheme: str) -> dict[str, Any]:
    """The config of what is written. It is run in bfloat16, which is finer than the steps of the weights."""
    fields = {**config.raw, "dtype": "bfloat16"}
    if isinstance(fields.get("text_config"), dict):
        fields["text_config"] = {**fields["text_config"], "dtype": "bfloat16"}
    how = {"quant_method": QUANT_METHOD, "version": QUANT_VERSION, "scheme": scheme}
    return {**fields, "quantization_config": {**how, "group_size": GROUPS[SCHEMES[scheme]]}}


def _carry_over(source: Path, tensors: Source, making: Path) -> None:
    """Tokenizer, templates, licences; of a GGUF file the tokenizer in it."""
    if isinstance(tensors, GGUFFile):
        if "tokenizer.ggml.tokens" in tensors.metadata:
            _write_tokenizer(tensors, making)
        return
    replaced = {"config.json", "model.safetensors.index.json"}
    homes = [source.resolve(), (source.parent.parent / "blobs").resolve()]  # the hub's cache links to its own blobs
    for file in source.iterdir():
        known = file.is_file() and CARRIED.fullmatch(file.name) and file.name not in replaced
        if known and any(file.resolve().is_relative_to(home) for home in homes):
            shutil.copyfile(file, making / file.name)


def _write_tokenizer(file: GGUFFile, making: Path) -> None:
    core, special, template, add_bos = gguf_tokenizer(file)
    if add_bos:
        bos = special["bos_token"]
        core.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, core.token_to_id(bos))]
        )
    core.save(str(making / "tokenizer.json"))
    write_json(making / "tokenizer_config.json", special | ({"chat_template": template} if template else {}))
