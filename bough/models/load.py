"""From a folder to a model: which family a config names, and in what dtype it runs."""

import importlib
import os
import re
from pathlib import Path

import torch

from bough.errors import ModelError, OptionError, UnknownArchitecture
from bough.models.config import ModelConfig
from bough.models.gguf import GGUFFile
from bough.models.model import Model
from bough.models.weights import Progress, SafetensorsFolder, Source, Weights

# model_type of config.json → module and class. A model with other senses is run as the language model in it.
FAMILIES = {
    "llama": ("llama", "Llama"),
    "mistral": ("llama", "Mistral"),
    "qwen3": ("qwen3", "Qwen3"),
    "gemma3": ("gemma3", "Gemma3"),
    "gemma3_text": ("gemma3", "Gemma3"),
    "gemma4": ("gemma4", "Gemma4"),
    "gemma4_text": ("gemma4", "Gemma4"),
    "lfm2": ("lfm2", "Lfm2"),
    "lfm2_moe": ("lfm2_moe", "Lfm2Moe"),
    "qwen3_next": ("qwen3_next", "Qwen3Next"),
    "qwen3_5": ("qwen3_5", "Qwen35"),
    "qwen3_5_text": ("qwen3_5", "Qwen35"),
    "qwen3_5_moe": ("qwen3_5", "Qwen35Moe"),
    "qwen3_5_moe_text": ("qwen3_5", "Qwen35Moe"),
}
# The frequencies of ropes, which older files have beside each layer (Llama 2's do): they follow from the config.
COMPUTED = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq$"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    path: Path,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Model:
    """The model in a Hugging Face folder or a GGUF file, its weights cast to `dtype` on `device`."""
    if os.path.isfile(path):
        file = GGUFFile(path)
        config = ModelConfig(file.config(), f"the metadata of {path}")
        return build_model(config, file, dtype=dtype, device=device, progress=progress)
    if not os.path.isdir(path):
        raise ModelError(f"{path} is not there; give a folder with config.json and *.safetensors, or a .gguf file")
    return build_model(
        ModelConfig.from_folder(path), SafetensorsFolder(path), dtype=dtype, device=device, progress=progress
    )


def build_model(
    config: ModelConfig,
    source: Source,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Model:
    family = family_of(config)
    config = family.told(config)
    weights = Weights(
        source,
        dtype=choose_dtype(dtype, config, device),
        device=device,
        rename=name_in_language_model,
        progress=progress,
    )
    model = family(config, weights)
    model.weight_bytes, model.parameters = weights.nbytes, weights.count
    weights.finish(ignore="|".join(filter(None, (model.ignored, COMPUTED))))
    return model


def family_of(config: ModelConfig) -> type[Model]:
    name = config.get("model_type", "(none)")
    if name not in FAMILIES:
        raise UnknownArchitecture(f"{config.where} is of type {name!r}; Bough runs {', '.join(sorted(FAMILIES))}")
    module, cls = FAMILIES[name]
    return getattr(importlib.import_module(f"bough.models.{module}"), cls)


def choose_dtype(name: str, config: ModelConfig, device: torch.device | str) -> torch.dtype:
    if name != "auto":
        if name not in DTYPES:
            raise OptionError(f"dtype {name!r} is not one of auto, {', '.join(DTYPES)}")
        return DTYPES[name]
    stored = DTYPES.get(str(config.get("dtype", config.get("torch_dtype", "float32"))).removeprefix("torch."))
    if stored is torch.float16 and torch.device(device).type == "cpu":
        return torch.float32  # half precision is slow on CPUs and overflows where bfloat16 does not
    return stored or torch.float32


def name_in_language_model(name: str) -> str:
    """Models with other senses keep the language model under a prefix, in one of two orders."""
    name = re.sub(r"^(model\.language_model|language_model\.model)\.", "model.", name)
    return re.sub(r"^language_model\.lm_head\.", "lm_head.", name)
