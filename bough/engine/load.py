"""From a path to everything an engine needs: the model, its tokenizer, when it ends, and how it likes to be sampled."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bough.config import SamplingParams
from bough.engine.about import NOTHING, About
from bough.engine.tokenizer import Tokenizer
from bough.errors import ModelError, OptionError
from bough.models.config import read_json
from bough.models.load import load_model
from bough.models.model import Model
from bough.models.weights import Progress


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model and what came with it."""

    name: str
    model: Model
    tokenizer: Tokenizer | None
    end_tokens: frozenset[int]
    sampling: SamplingParams  # what the model's makers suggest
    path: Path | None = None  # where it came from
    about: About = NOTHING  # what Bough keeps beside it


def load(
    path: Path,
    *,
    name: str | None = None,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Loaded:
    """Read a Hugging Face folder or a GGUF file, and what Bough keeps beside it."""
    about = About.beside(path)
    model = load_model(path, dtype=dtype, device=device, progress=progress)
    tokenizer = load_tokenizer(path, about)
    suggestion = path / "generation_config.json"
    suggested = read_json(suggestion) if path.is_dir() and suggestion.exists() else {}
    try:
        ends, sampling = _end_tokens(suggested, model, tokenizer), _sampling(suggested)
    except (TypeError, ValueError, OverflowError, OptionError) as error:  # int() of infinity overflows
        raise ModelError(f"{path}/generation_config.json is wrong ({error}); correct or remove it") from None
    sampling = replace(sampling, **about.sampling(model.context))
    return Loaded(name or path.stem, model, tokenizer, ends, sampling, path, about)


def load_tokenizer(path: Path, about: About) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder or a GGUF file, with the chat template that was chosen for it."""
    if path.is_file():
        from bough.models.gguf import GGUFFile, gguf_tokenizer  # an optional dependency

        core, special, template, add_bos = gguf_tokenizer(GGUFFile(path))
        tokenizer: Tokenizer | None = Tokenizer(core, special=special, template=template, add_bos=add_bos)
    else:
        tokenizer = Tokenizer.from_folder(path)
    if tokenizer is not None and about.template is not None:
        tokenizer.template = about.template
    return tokenizer


def _end_tokens(suggested: Mapping[str, Any], model: Model, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The tokens that end a text: those of generation_config, else of config, and the tokenizer's own."""
    named = suggested.get("eos_token_id", model.config.get("eos_token_id"))
    listed = named if isinstance(named, list) else [] if named is None else [named]
    return frozenset(int(token) for token in listed) | (tokenizer.eos_ids if tokenizer else frozenset())


def _sampling(suggested: Mapping[str, Any]) -> SamplingParams:
    if not suggested.get("do_sample"):
        return SamplingParams(temperature=0)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return SamplingParams(**{name: suggested[name] for name in names if suggested.get(name) is not None})
