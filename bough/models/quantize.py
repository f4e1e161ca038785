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
from bough.models.load import FAMILIES, family_of, name_in_language_model
from bough.models.rounding import GROUPS, PIECE, group_of, quantised
from bough.models.shards import Entry, write_json, write_shards
from bough.models.weights import AGAIN, SafetensorsFolder, Source

SCHEMES = {"int8": 8, "int4": 4}  # bits a weight

# Tensors that stay as they are, by what is in their names, and why. What is no matrix stays too.
SPARED = {
    r"embed_tokens": "embeddings are looked up, not multiplied with",
    r"^mtp\.lm_head\.": "the rare head of a draft's own, which decides what it guesses",
    r"masked_embedding\.": "the clusters of a head: few rows, which decide what tokens are scored at all",
    r"norm": "few numbers that scale everything",
    r"conv1d\.|\.conv\.conv\.": "the taps of convolutions: few, and their errors stay in the state",
    r"in_proj_(a|b|ba)\.": "the gates of the delta rule: few rows, and their errors stay in the state",
    r"shared_expert_gate\.|per_layer_input_gate\.": "small gates on all that comes after them",
    r"(mlp|feed_forward)\.gate\.|router\.": "routers: the wrong expert is no small error",
    r"visual\.|vision_tower|audio_tower|embed_vision|embed_audio": "other senses, which are not run",
}
HEAD = r"^(language_model\.)?lm_head\.weight$"  # of 8 bits in any scheme
# Where one is the other, the other is written too, if that takes less than all else has saved.
EMBEDDING, OWN_HEAD = "model.embed_tokens.weight", "lm_head.weight"
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
    plans = [_plan(tensors, *each) for each in policy(tensors, config, SCHEMES[scheme])]
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
    """What a weight takes on average in a model folder, quantised or not.

    Scales and zeros take room and are no weights, nor is a head that has been made from the embedding.
    """
    tensors = SafetensorsFolder(folder)
    names = set(tensors.names())
    tied = _is_tied(ModelConfig.from_folder(folder))
    weights = sum(
        math.prod(tensors.shape(name)) * (2 if f"{name}.zero" in names else 1)
        for name in names
        if name.removesuffix(".scale").removesuffix(".zero") not in names - {name}
        and not (tied and re.search(HEAD, name) and f"{name}.scale" in names)
    )
    return 8 * sum(map(tensors.nbytes, names)) / weights


def policy(tensors: Source, config: ModelConfig, bits: int) -> Iterator[tuple[str, str, int | None]]:
    """Each tensor that is written, the one that it is made from, and its bits a weight; None where it stays itself."""
    names = list(tensors.names())
    tied, saved = _is_tied(config) and not any(re.search(HEAD, name) for name in names), 0
    for name in names:
        shape = tensors.shape(name)
        wanted: int | None = bits
        if re.search(HEAD, name):
            wanted = 8 if config.get("model_type") in FAMILIES else None
        elif not re.search(MATRIX, name) or any(re.search(pattern, name) for pattern in SPARED):
            wanted = None
        wanted = wanted if wanted and _has_groups(shape, wanted) else None
        saved += 16 * math.prod(shape) - _stored_bits(shape, wanted) if wanted else 0
        yield name, name, wanted
    for name in names if tied else ():
        shape = tensors.shape(name)
        is_embedding = name_in_language_model(name) == EMBEDDING and _has_groups(shape, 8)
        if is_embedding and _stored_bits(shape, 8) < saved:
            yield OWN_HEAD, name, 8


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of a tensor: so many bits a weight and their scales, or (None) itself."""

    source: str
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


def _is_tied(config: ModelConfig) -> bool:
    """Whether the embedding is the head too. What is no model by itself has no head in this sense."""
    if config.get("model_type") not in FAMILIES:
        return False
    return family_of(config).told(config).get("tie_word_embeddings", False)


def _stored_bits(shape: tuple[int, ...], bits: int) -> int:
    """What a tensor takes that is so quantised, with its scales and zeros."""
    group = group_of(shape[-1], bits)
    assert group is not None
    return math.prod(shape) * bits + math.prod(shape) // group * (16 if bits == 8 else 32)


def _has_groups(shape: tuple[int, ...], bits: int) -> bool:
    return len(shape) > 1 and group_of(shape[-1], bits) is not None


def _plan(tensors: Source, name: str, source: str, bits: int | None) -> Plan:
    shape = tensors.shape(source)
    if bits is None:
        dtype = torch.bfloat16 if math.prod(shape) > SMALL else tensors.read(source).dtype
        return Plan(source, bits, (Entry(name, dtype, shape),))
    *outputs, inputs = shape
    group = group_of(inputs, bits)
    assert group is not None
    scale = Entry(f"{name}.scale", torch.bfloat16, (*outputs, inputs // group))
    if bits == 8:
        return Plan(source, bits, (Entry(name, torch.int8, shape), scale))
    zero = Entry(f"{name}.zero", torch.bfloat16, scale.shape)
    return Plan(source, bits, (Entry(name, torch.uint8, (*outputs, inputs // 2)), scale, zero))


def _read(tensors: Source, plans: Iterable[Plan]) -> Iterator[Tensor]:
    """What is written for each plan, in the order of its entries."""
    for plan in plans:
        yield from _made(tensors, plan)


def _made(tensors: Source, plan: Plan) -> list[Tensor]:
    tensor = tensors.read(plan.source)
    if plan.bits is None:
        return [tensor.to(plan.entries[0].dtype)]
    if not tensor.is_floating_point() or not _is_finite(tensor):
        raise BadWeights(f"{plan.source} in {tensors.where} holds what is no finite number; {AGAIN}")
    made = quantised(tensor, plan.bits)
    return [each for each in (made.data, made.scale, made.zero) if each is not None]


def _is_finite(tensor: Tensor) -> bool:
    """Looked at in pieces: to look at it all at once takes more memory than the tensor."""
    return all(bool(torch.isfinite(piece).all()) for piece in tensor.flatten().split(PIECE))


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
