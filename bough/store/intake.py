"""What of a folder, or of a repository's list of files, belongs to a model; and that it is what it seems.

Only what is named here is ever read or stored. Weights are *.safetensors or one .gguf: pickle files are refused, since
reading them can run code. A link that leads out of the folder is refused too, whatever it leads to.
"""

import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from bough.engine.about import FILE
from bough.errors import BadWeights, ModelError
from bough.models.config import read_json
from bough.models.shards import INDEX, WHOLE, SafetensorsFile
from bough.models.weights import AGAIN, SafetensorsFolder

ASSISTANT = "assistant"  # the folder in a model's own where its assistant may be
BESIDE = re.compile(
    r"[\w-][\w.-]*\.(json|jinja|model|tiktoken)|(vocab|merges)\.txt|(LICENSE|NOTICE|COPYING)[\w.-]*", re.A
)
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
Paths = dict[str, Path]  # by where they belong in the model's folder


def beside(names: Iterable[str]) -> list[str]:
    """The files that go with weights: configuration, tokenizer, license."""
    return sorted(name for name in names if BESIDE.fullmatch(name) and name not in (FILE, INDEX))


def weights(names: Collection[str], placed: Collection[str], where: str) -> list[str]:
    """The files that the weights are in, and the index over them. `placed` are the shards that the index lists."""
    if WHOLE in names:
        return [WHOLE]
    if INDEX in names:
        lost = sorted(set(placed) - set(names))
        if lost:
            raise BadWeights(f"{where} lacks files that its index lists: {', '.join(lost)}; {AGAIN}")
        return [INDEX, *sorted(placed)]
    found = sorted(name for name in names if re.fullmatch(r"[^/\\]+\.safetensors", name))
    pickles = sorted(name for name in names if name.endswith(PICKLES))
    if not found and pickles:
        raise BadWeights(
            f"{where} has its weights in {pickles[0]}. That is a pickle file, which can run code when read, so Bough"
            " refuses it; take a version in safetensors, or if you trust it, convert it with transformers:"
            " AutoModelForCausalLM.from_pretrained(folder).save_pretrained(another_folder)"
        )
    if not found:
        raise BadWeights(f"{where} has no weights in *.safetensors or .gguf")
    return found


def shards(index: Path) -> list[str]:
    """The files that an index lists. They are names in its own folder: an index leads nowhere else."""
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()) or not placed:
        raise BadWeights(f"{index} has no weight_map from tensors to shards; {AGAIN}")
    foreign = sorted(
        name for name in set(placed.values()) if not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name, re.A)
    )
    if foreign:
        raise BadWeights(f"{index} names what is no *.safetensors in its folder: {', '.join(foreign)}; {AGAIN}")
    return sorted(set(placed.values()))


def files_in(folder: Path) -> Paths:
    """The files of the model in a folder, all of them regular and inside; its assistant's too, if it has one."""
    names = _names_in(folder) if folder.is_dir() else set()
    if "config.json" not in names:
        raise ModelError(f"{folder} has no config.json; give a folder in the Hugging Face layout or a .gguf file")
    found = {name: inside(folder, name) for name in beside(names)} | weights_in(folder)
    check_weights(folder)
    assistant = folder / ASSISTANT
    if (assistant / "config.json").exists():
        inside(folder, ASSISTANT)
        found |= {f"{ASSISTANT}/{name}": path for name, path in files_in(assistant).items()}
    return found


def weights_in(path: Path) -> Paths:
    """The files that the weights in a folder are in, or those of an index; a file is in itself."""
    if path.is_file() and path.name != INDEX:
        return {path.name: path}
    folder = path if path.is_dir() else path.parent
    names = _names_in(folder)
    placed = shards(inside(folder, INDEX)) if INDEX in names and WHOLE not in names else []
    return {name: inside(folder, name) for name in weights(names, placed, str(folder))}


def _names_in(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir() if not each.is_dir()}


def inside(folder: Path, name: str) -> Path:
    """A file of a folder, which may be a link to another place in it. Nothing else is followed."""
    path = folder / name
    real, root = Path(os.path.realpath(path)), _root(Path(os.path.realpath(folder)))
    if not real.is_relative_to(root):
        raise ModelError(f"{path} is a link that leads out of its folder, to {real}; copy the file there instead")
    if not real.exists():
        raise ModelError(f"{path} is missing, or a link to nothing; {AGAIN}")
    if not (real.is_file() or real.is_dir()):
        raise ModelError(f"{path} is no regular file; remove it")
    return path


def _root(folder: Path) -> Path:
    """What a model may be spread over: its folder. In the hub's own cache a snapshot is links into blobs beside it."""
    repository = folder.parent.parent
    cached = folder.parent.name == "snapshots" and repository.name.startswith("models--")
    return repository if cached else folder


def check_weights(folder: Path) -> None:
    """Raise if the headers of the files do not agree with the files, or the index with the headers.

    The library that reads safetensors checks that a header is of a sane length, that the ranges in it cover the file
    without gaps and overlaps, and that each is as long as its type and shape say.
    """
    SafetensorsFolder(folder)


def tensor_names(file: Path) -> list[str]:
    return list(SafetensorsFile(file).names())


def is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".gguf"))
