"""Which drafter the `draft` option means, for a target that is loaded already.

Knows the words of the option and what a path may lead to. A drafter that was asked for by name and cannot be had is an
error; "auto" makes do with n-grams, and logs why if the model brought something better that cannot be used.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias, cast

from tokenizers import Tokenizer
from torch import Tensor

from bough.draft import Drafter
from bough.draft.assistant import AssistantDrafter
from bough.draft.model import ModelDrafter
from bough.draft.mtp import MTPDrafter, MTPHead
from bough.draft.ngram import NGram
from bough.errors import ModelError, OptionError, expecting_tokenizer
from bough.models.config import ModelConfig
from bough.models.gemma4 import Gemma4
from bough.models.gemma4_assistant import load_assistant
from bough.models.gguf import GGUFFile
from bough.models.load import load_model
from bough.models.model import Model
from bough.models.qwen3_next import Qwen3Next
from bough.models.shards import INDEX, SafetensorsFile
from bough.models.weights import Progress, SafetensorsFolder

DraftOption: TypeAlias = str | os.PathLike[str] | Drafter | None

ALLOWED = (
    '"auto" (what the model ships, else ngram), "mtp", "assistant", "ngram", the path of a draft model or'
    " an MTP head, an object with the methods of a Drafter, or None"
)
MTP = "mtp."  # how the names of an MTP head's tensors begin
ASSISTANT = "assistant"  # the folder in the target's own where its assistant may be
UNLIKE = 0.01  # of the tokens may differ: models of one family have other names for some special ones

log = logging.getLogger("bough")


def drafter_for(
    option: DraftOption,
    target: Model,
    *,
    path: Path | None = None,
    progress: Progress | None = None,
    load: Callable[..., Model] = load_model,
) -> Drafter | None:
    """The drafter that the option asks for, in the target's dtype and on its device; None if it asks for none.

    `path` is where the target was loaded from: its tokenizer and its assistant are looked for there. `progress` is told
    of the loading of a draft model, which `load` does.
    """
    if option is None:
        return None
    if not isinstance(option, str | os.PathLike):
        return _implemented(option)
    match option:
        case "auto":
            return _shipped(target, path)
        case "mtp":
            return MTPDrafter(MTPHead(target))
        case "assistant":
            return _assistant(_assistant_in(path), target)
        case "ngram":
            return NGram()
    draft_path = Path(os.path.expanduser(option))
    if option == "" or not draft_path.exists():
        raise OptionError(f"draft is {str(option)!r}, and there is no such file or folder; it may be {ALLOWED}")
    match draft_kind(draft_path):
        case "mtp":
            return _head(draft_path, target)
        case "assistant":
            return _assistant(draft_path, target)
    return _model(draft_path, target, path, progress, load)


def draft_kind(path: Path) -> str:
    """What kind of drafter a path leads to: mtp, assistant or model."""
    if is_bare(path):
        return "mtp"
    if path.is_dir():
        if ModelConfig.from_folder(path).get("model_type") == "gemma4_assistant":
            return "assistant"
        if all(name.startswith(MTP) for name in SafetensorsFolder(path).names()):
            return "mtp"
    return "model"


def is_bare(path: Path) -> bool:
    """Whether a path leads to weights without the config of a model. What can be meant is the MTP head among them."""
    if path.is_dir():
        return not (path / "config.json").exists() and any(path.glob("*.safetensors"))
    return path.suffix == ".safetensors" or path.name == INDEX


def head_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of the MTP head in a file, or in the shards of a folder or its index, whatever else is in them."""
    folder = path.parent if path.name == INDEX else path
    source = SafetensorsFolder(folder) if folder.is_dir() else SafetensorsFile(path)
    tensors = {name: source.read(name) for name in sorted(source.names()) if name.startswith(MTP)}
    if not tensors:
        raise ModelError(
            f"{path} has no MTP head, since no tensor in it is called {MTP}*; name a file or folder with one"
        )
    return tensors


def _head(path: Path, target: Model) -> MTPDrafter:
    if not isinstance(target, Qwen3Next):
        raise ModelError(f"{path} is an MTP head, which Qwen3-Next and Qwen3.5 have; the model is of another family")
    target.extra = head_tensors(path)  # in place of its own
    return MTPDrafter(MTPHead(target))


def _implemented(option: Drafter) -> Drafter:
    names = ("kinds", "lag", "reads_hidden", "committed", "propose", "close")
    if isinstance(option, type) or (lacking := [name for name in names if not hasattr(option, name)]):
        lacks = "" if isinstance(option, type) else f", which lacks {', '.join(lacking)}"
        raise OptionError(f"draft is {option!r}{lacks}; it must be {ALLOWED}")
    return option


def _shipped(target: Model, path: Path | None) -> Drafter:
    """What came with the model, as far as it can be used; else n-grams."""
    try:
        if target.extra:
            return MTPDrafter(MTPHead(target))
        if isinstance(target, Gemma4) and path is not None and (path / ASSISTANT / "config.json").exists():
            return _assistant(path / ASSISTANT, target)
    except ModelError as error:
        log.warning("drafting with n-grams, since what the model ships for it cannot be used: %s", error)
    return NGram()


def _assistant_in(path: Path | None) -> Path:
    if path is None or not (path / ASSISTANT / "config.json").exists():
        raise OptionError(
            f"there is no folder {ASSISTANT!r} in the model's own with an assistant; give the path of the assistant as"
            " draft, or draft with ngram"
        )
    return path / ASSISTANT


def _assistant(path: Path, target: Model) -> AssistantDrafter:
    return AssistantDrafter(load_assistant(path, target), cast(Gemma4, target))  # it fits no other


def _model(
    path: Path, target: Model, target_path: Path | None, progress: Progress | None, load: Callable[..., Model]
) -> ModelDrafter:
    own, theirs = tokens_of(path), None if target_path is None else tokens_of(target_path)
    if own is not None and theirs is not None:
        different = sum(token != theirs.get(i, token) for i, token in own.items())
        if different > UNLIKE * min(len(own), len(theirs)):
            raise _misfit(path, f"{different:,} of its {len(own):,} tokens are others in the model's tokenizer")
    dtype = str(target.dtype).removeprefix("torch.")  # both keep their state in one arena
    model = load(path, dtype=dtype, device=target.device, progress=progress)
    if (own is None or theirs is None) and model.vocab_size != target.vocab_size:
        raise _misfit(path, f"it has {model.vocab_size:,} of them, and the model {target.vocab_size:,}")
    return ModelDrafter(model, target.vocab_size)


def tokens_of(path: Path) -> dict[int, str] | None:
    """What each token id stands for, in a Hugging Face folder or a GGUF file; None if there is no tokenizer."""
    if path.is_file():
        tokens = GGUFFile(path).metadata.get("tokenizer.ggml.tokens", list)
        return None if tokens is None else dict(enumerate(tokens))
    file = path / "tokenizer.json"
    if not file.exists():
        return None
    with expecting_tokenizer(f"{file} is not a usable tokenizer"):
        ids: dict[str, int] = Tokenizer.from_file(str(file)).get_vocab()
    return {i: token for token, i in ids.items()}


def _misfit(path: Path, what: str) -> ModelError:
    return ModelError(
        f"the model in {path} cannot draft, since it does not read the same tokens: {what};"
        " give a smaller model of the same family, or draft with ngram"
    )
