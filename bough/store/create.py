"""From a Modelfile to a stored model."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bough.draft.load import MTP, draft_kind, head_tensors, is_bare
from bough.engine.about import DRAFT, FILE, NOTHING, About, Weighed
from bough.engine.load import load_tokenizer
from bough.engine.template import ChatTemplate
from bough.errors import ModelError, OptionError, RequestError
from bough.models.config import read_json
from bough.models.quantize import SCHEMES, quantize
from bough.models.shards import INDEX, WHOLE, SafetensorsFile, write_json, write_tensors
from bough.store import intake
from bough.store.blobs import Entry
from bough.store.fit import check_draft, count, own_drafter, skeleton
from bough.store.job import Job
from bough.store.modelfile import Modelfile
from bough.store.names import Name
from bough.store.store import Store, Stored

Tell = Callable[[str, int, int], None]  # (what is being done, how much of it is, of how much)
HEAD, REST = "model-mtp.safetensors", "model-target.safetensors"  # shards of a model that was given a head
TO_SAY = [{"role": "user", "content": "hello"}]


@dataclass(frozen=True, slots=True)
class Part:
    """A model, or a drafter, that another is made of: where it can be read, and its files."""

    named: str
    path: Path  # a folder, a .gguf; for a head also a .safetensors or an index
    files: Mapping[str, Path | Entry]  # by their place; those of the store are known by their content
    about: About = NOTHING
    made: bool = False  # whether the files are the job's own

    @property
    def identity(self) -> str:
        """What it is, as far as can be told without reading it."""
        told = {name: file if isinstance(file, Entry) else _stamp(file) for name, file in self.files.items()}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:32]


class Creation:
    """One model under way, from what it is made of to its name."""

    def __init__(self, store: Store, job: Job, modelfile: Modelfile, tell: Tell) -> None:
        self.store, self.job, self.modelfile, self.tell = store, job, modelfile, tell

    def run(self, name: Name, target: Part, draft: Part | None, scheme: str | None, draft_scheme: str | None) -> Stored:
        self.tell("checking", 0, 1)
        kind = self._check(target, draft)
        about = self._about(target, draft, kind)
        _check_template(about, target)
        if draft is not None and kind == "mtp":
            draft = self._head(draft, target)
        weighed, draft_weighed = _weigh(target), None if draft is None else _weigh(draft)
        if draft is not None and draft_scheme is not None:
            draft = self._quantized(draft, draft_scheme)
            draft_weighed = _reweighed(draft_weighed, draft, draft_scheme)
        if scheme is not None:
            target = self._quantized(target, scheme)
            weighed = _reweighed(weighed, target, scheme)
        files = self._entries(target, draft, kind)
        kept = about.draft_weights if draft is None else draft_weighed
        about = replace(about, weights=weighed, draft_weights=kept)
        self.tell("writing manifest", 0, 1)
        return self.store.publish(name, {**files, FILE: self.job.put(about.to_json())}, self.job)

    def _check(self, target: Part, draft: Part | None) -> str | None:
        model = skeleton(target.path)
        if draft is None:
            return target.about.drafter or own_drafter(model)
        kind = draft_kind(draft.path)
        if kind == "mtp" and target.path.is_file():
            raise OptionError(f"{self.modelfile.at('DRAFT')}is an MTP head, which a GGUF file cannot be given")
        try:
            check_draft(draft.path, model, target.path)
        except ModelError as error:
            raise ModelError(f"{self.modelfile.at('DRAFT')}does not fit: {error}") from None
        return kind

    def _about(self, target: Part, draft: Part | None, kind: str | None) -> About:
        """What the Modelfile says, over what was said of the model before."""
        said, before = self.modelfile, target.about
        return replace(
            before,
            template=said.template if said.template is not None else before.template,
            system=said.system if said.system is not None else before.system,
            parameters={**before.parameters, **said.parameters},
            license=before.license + said.license,
            source=target.named,
            draft_source=before.draft_source if draft is None else draft.named,
            drafter=kind,
        )

    def _head(self, draft: Part, target: Part) -> Part:
        """A head in a folder of its own, without what lay beside it, and with the config of the model it is for."""
        folder = self.job.folder / f"head-{draft.identity}-{target.identity}"
        if not folder.is_dir():
            making = folder.with_name(f".{folder.name}")
            shutil.rmtree(making, ignore_errors=True)
            making.mkdir()
            write_tensors(making, head_tensors(draft.path))
            config = read_json(target.path / "config.json")
            write_json(making / "config.json", {**config, "quantization_config": None})  # the head is as it came
            os.rename(making, folder)
        return Part(draft.named, folder, intake.files_in(folder), made=True)

    def _quantized(self, part: Part, scheme: str) -> Part:
        """The part with smaller weights, made once: a job that goes on finds what was finished."""
        folder = self.job.folder / f"{scheme}-{part.identity}"
        if not folder.is_dir():
            for left in self.job.folder.glob(f".{folder.name}.*"):
                shutil.rmtree(left)
            what = f"quantising {part.named} to {scheme}"
            quantize(part.path, folder, scheme, progress=lambda done, total: self.tell(what, done, total))
        beside = {name: file for name, file in part.files.items() if not _is_replaced(name, folder)}
        return replace(part, path=folder, files={**beside, **intake.files_in(folder)}, made=True)

    def _entries(self, target: Part, draft: Part | None, kind: str | None) -> dict[str, Entry]:
        """All files by their content, read and copied where they are not known yet."""
        parts = [target] if draft is None else [target, draft]
        paths = [file for part in parts for file in part.files.values() if isinstance(file, Path)]
        total, done = sum(path.stat().st_size for path in paths), 0

        def passed(size: int) -> None:
            nonlocal done
            done += size
            self.tell("storing", done, total)

        listed = [
            {name: self._entry(part, file, passed) for name, file in part.files.items() if name != FILE}
            for part in parts
        ]
        if draft is None:
            return listed[0]
        own = {name: entry for name, entry in listed[0].items() if not name.startswith(f"{DRAFT}/")}
        if kind == "mtp":
            return self._with_head(own, listed[1])
        return own | {f"{DRAFT}/{name}": entry for name, entry in listed[1].items() if "/" not in name}

    def _entry(self, part: Part, file: Path | Entry, passed: Callable[[int], None]) -> Entry:
        if isinstance(file, Entry):
            return file
        return self.job.add(file, passed, own=part.made and file.is_relative_to(self.job.folder))

    def _with_head(self, files: dict[str, Entry], head: dict[str, Entry]) -> dict[str, Entry]:
        """The files of a model with this head in place of its own, and an index that says which tensor is in which."""
        shards = {name: entry for name, entry in head.items() if _is_shard(name)}
        found = {HEAD if len(shards) == 1 else f"mtp-{name}": entry for name, entry in shards.items()}
        placed = {tensor: name for name, entry in found.items() for tensor in self._tensors(entry)}
        listed, drafts = self._index(files), set(placed)
        for name, entry in files.items():
            if not _is_shard(name):
                found[name] = entry
                continue
            tensors = self._tensors(entry)
            own = [each for each in tensors if listed.get(each, name) == name and not each.startswith(MTP)]
            if not own:
                continue  # there was a head in it, and nothing else
            stored = REST if name == WHOLE else name
            old = {each for each in tensors if each.startswith(MTP)}
            found[stored] = entry if old <= drafts else self._without_head(entry, own)
            placed |= dict.fromkeys(own, stored)
        index = self.job.put(json.dumps({"metadata": {}, "weight_map": placed}, indent=1).encode())
        return found | {INDEX: index}

    def _without_head(self, shard: Entry, own: list[str]) -> Entry:
        """A shard with these tensors alone: what is in a file and not in the index is read too."""
        folder, source = self.job.folder / f"bare-{shard.digest}", SafetensorsFile(self.store.blobs.path(shard.digest))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        write_tensors(folder, {name: source.read(name) for name in own}, most=shard.size)
        return self.job.add(folder / WHOLE, own=True)

    def _tensors(self, file: Entry) -> list[str]:
        return intake.tensor_names(self.store.blobs.path(file.digest))

    def _index(self, files: dict[str, Entry]) -> dict[str, str]:
        """Which shard each tensor is in, where an index says so."""
        if INDEX not in files or WHOLE in files:
            return {}
        placed: dict[str, str] = read_json(self.store.blobs.path(files[INDEX].digest))["weight_map"]
        return placed


def create(
    store: Store,
    name: Name,
    modelfile: Modelfile,
    *,
    scheme: str | None = None,
    draft_scheme: str | None = None,
    only_stored: bool = False,
    tell: Tell = lambda what, done, total: None,
) -> Stored:
    """Store the model that a Modelfile describes. With `only_stored` it may name stored models and nothing else."""
    store.require_free(name)
    for option, given in (("--quantize", scheme), ("--draft-quantize", draft_scheme)):
        if given is not None and given not in SCHEMES:
            raise OptionError(f"{option} is {given!r}; it must be one of {', '.join(SCHEMES)}")
    if draft_scheme is not None and modelfile.draft is None:
        raise OptionError("--draft-quantize needs a DRAFT in the Modelfile, which names what is to be made smaller")
    target = find_part(store, modelfile, "FROM", modelfile.source, only_stored, tell)
    draft = None
    if modelfile.draft is not None:
        draft = find_part(store, modelfile, "DRAFT", modelfile.draft, only_stored, tell)
    if is_bare(target.path):
        raise OptionError(f"{modelfile.at('FROM')}names weights without a config.json; name the folder that has both")
    with store.job(f"create {name.full}") as job:
        return Creation(store, job, modelfile, tell).run(name, target, draft, scheme, draft_scheme)


def find_part(store: Store, modelfile: Modelfile, keyword: str, text: str, only_stored: bool, tell: Tell) -> Part:
    """What FROM or DRAFT names: a path, a stored model, or a repository of the hub, which is then pulled."""
    path = modelfile.folder / Path(text).expanduser()
    if not only_stored and os.path.exists(path):
        return path_part(text, path)
    name = Name.maybe(text)
    stored = None if name is None else store.find(name)
    if stored is not None:
        return stored_part(stored)
    if only_stored:
        raise RequestError(f"{text!r} is not in the store; pull or create it on the server's machine first")
    if text.startswith((".", "/", "~")) or path.suffix in (".gguf", ".safetensors"):
        raise OptionError(f"{modelfile.at(keyword)}names {path}, and there is no such file or folder")
    from bough.store.pull import HubId, pull

    hub = HubId.maybe(text)
    if hub is None:
        raise OptionError(
            f"{modelfile.at(keyword)}names {text!r}, which is no file, folder or stored model; write ./{text} for a"
            " path, or organisation/name for a repository of the hub"
        )
    return stored_part(pull(store, hub, tell=tell))


def path_part(text: str, path: Path) -> Part:
    if is_bare(path):
        return Part(text, path, intake.weights_in(path))
    if path.is_dir():
        about = About.beside(path)
        files: dict[str, Path | Entry] = dict(intake.files_in(path))
        if about.drafter in ("assistant", "model"):
            inside = intake.inside(path, DRAFT)
            files |= {f"{DRAFT}/{name}": file for name, file in intake.files_in(inside).items()}
        return Part(text, path, files, about)
    if path.suffix != ".gguf":
        raise ModelError(f"{path} is no model; give a folder with config.json and *.safetensors, or a .gguf file")
    return Part(text, path, {"model.gguf": path})


def stored_part(stored: Stored) -> Part:
    stored.require_whole()
    return Part(str(stored.name), stored.path, dict(stored.files), stored.about)


def _check_template(about: About, target: Part) -> None:
    """Raise if a template that was given cannot be read, or cannot say hello."""
    if about.template is None:
        return
    tokenizer = load_tokenizer(target.path, about)
    if tokenizer is None:
        raise OptionError("TEMPLATE needs a model with a tokenizer; this one has none")
    ChatTemplate(tokenizer).render(TO_SAY)


def _weigh(part: Part) -> Weighed:
    if part.about.weights is not None:
        return part.about.weights
    return Weighed(count(part.path), _weight_bytes(part))


def _reweighed(before: Weighed | None, part: Part, scheme: str) -> Weighed:
    assert before is not None, "what is made smaller was weighed"
    return Weighed(before.count, _weight_bytes(part), scheme)


def _weight_bytes(part: Part) -> int:
    """Of the model's own weights: what drafts for it lies in folders."""
    own = [file for name, file in part.files.items() if intake.is_weights(name) and "/" not in name]
    return sum(file.size if isinstance(file, Entry) else file.stat().st_size for file in own)


def _is_shard(name: str) -> bool:
    return name.endswith(".safetensors") and "/" not in name


def _is_replaced(name: str, folder: Path) -> bool:
    """Whether a folder of quantised weights has something else in place of this file."""
    weights = "/" not in name and (intake.is_weights(name) or name == INDEX)
    return weights or (folder / name).exists()


def _stamp(path: Path) -> list[Any]:
    stat = path.stat()
    return [str(path.absolute()), stat.st_size, stat.st_mtime_ns, stat.st_ino]
