"""The 4 B hybrid that figures of whole models are of: its config, and random weights that are made where they are used.

`config()` is the shape as transformers has it, `fields()` as a config.json has it. `tensors(device)` are weights under
the names of a checkpoint, `loaded(...)` a model of them as an engine takes it, `write(...)` a model folder of them.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import bough
from bough import SamplingParams
from bough.draft.mtp import Kept
from bough.engine.load import Loaded
from bough.models import rounding
from bough.models.config import ModelConfig
from bough.models.load import build_model
from bough.models.quantize import SCHEMES, policy
from bough.models.shards import Entry, write_json, write_shards

if TYPE_CHECKING:
    import transformers

LOW = torch.bfloat16
SHAPE: dict[str, Any] = {
    "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32, "vocab_size": 151936,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 8192, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
COMMON: dict[str, Any] = {
    "max_position_embeddings": 65536,
    "tie_word_embeddings": True,
    "dtype": LOW,
    "eos_token_id": 0,
}


def config(*, tiny: bool = False) -> "transformers.PreTrainedConfig":
    import transformers

    return transformers.Qwen3_5TextConfig(**(TINY if tiny else SHAPE), **COMMON)


def fields(*, tiny: bool = False) -> dict[str, Any]:
    return json.loads(config(tiny=tiny).to_json_string(use_diff=False))


def tensors(device: torch.device | str, *, tiny: bool = False) -> dict[str, Tensor]:
    """Small enough that activations stay finite. Norms are around what leaves their input as it is."""
    import transformers

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config(tiny=tiny))
    shapes = {name: each.shape for name, each in model.state_dict().items() if name != "lm_head.weight"}
    drawn = {name: torch.randn(shape, device=device, dtype=LOW).mul_(0.02) for name, shape in shapes.items()}
    for name, value in drawn.items():
        if name.endswith("linear_attn.norm.weight"):  # the others are around 0 and have 1 added
            value.add_(1)
    return drawn


def loaded(drawn: Mapping[str, Tensor], device: torch.device | str, *, tiny: bool = False) -> Loaded:
    model = build_model(ModelConfig(fields(tiny=tiny)), Kept(drawn, "memory"), dtype="bfloat16", device=device)
    return Loaded("random", model, None, frozenset(), SamplingParams())


def quantised(drawn: Mapping[str, Tensor], scheme: str, *, tiny: bool = False) -> dict[str, Tensor]:
    """The same weights in fewer bits, rounded on their device as `bough create --quantize` would."""
    rounding.PIECE = 1 << 26  # what fits a processor's cache is far too little for a GPU
    made: dict[str, Tensor] = {}
    for name, source, bits in policy(Kept(drawn, "memory"), ModelConfig(fields(tiny=tiny)), SCHEMES[scheme]):
        if bits is None:
            made[name] = drawn[source]
            continue
        weight = rounding.quantised(drawn[source], bits)
        made |= {name: weight.data, f"{name}.scale": weight.scale}
        if weight.zero is not None:
            made[f"{name}.zero"] = weight.zero
    return made


def write(drawn: Mapping[str, Tensor], folder: Path, *, tiny: bool = False) -> int:
    """A model folder with these weights and the bundled model's tokenizer; returns the bytes of its weights."""
    entries = [Entry(name, value.dtype, tuple(value.shape)) for name, value in drawn.items()]
    write_json(folder / "config.json", fields(tiny=tiny))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(Path(bough.__file__).parent / "bundled" / name, folder / name)
    write_shards(folder, entries, (value.cpu() for value in drawn.values()), lambda count: None)
    return sum(entry.nbytes for entry in entries)
