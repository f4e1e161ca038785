"""From a repository of the Hugging Face hub to a stored model.

huggingface_hub asks the hub (and so honours HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE); the bytes we fetch ourselves
over its session, since it begins a file anew when a download was killed. Each file is checked against the digest that
the hub tells. Offline, a model is taken from the hub's own cache on this machine.
"""

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bough.errors import ModelError, OptionError, RequestError
from bough.models.shards import INDEX, WHOLE
from bough.store import intake
from bough.store.blobs import PIECE, Blobs, Entry, digest_of, sync
from bough.store.create import Creation, Part, Tell, path_part
from bough.store.modelfile import Modelfile
from bough.store.names import LATEST, Name
from bough.store.store import Store, Stored

ID = re.compile(
    r"(?:(?:https://)?(?:hf\.co|huggingface\.co)/)?([\w.-]{1,96}/[\w.-]{1,96})(?:[@:]([\w./-]{1,128}))?", re.A
)
MAIN = "main"
TRIES = 5  # to go on with a file after the connection broke, as long as it brings something new
PATIENCE = 30.0  # seconds without a byte
PAUSE = 0.5  # seconds before the second try; doubled for each one more


@dataclass(frozen=True, slots=True)
class HubId:
    """A repository, at a branch, a tag or a commit. What `name` makes of it, and lists show, is read as the same."""

    repo: str
    revision: str = MAIN

    @staticmethod
    def maybe(text: str) -> "HubId | None":
        match = ID.fullmatch(text)
        if match is None or any(part in ("", ".", "..") for part in re.split("[/@:]", text.removeprefix("https://"))):
            return None
        return HubId(match[1], MAIN if text.endswith(f":{LATEST}") else match[2] or MAIN)

    @staticmethod
    def parse(text: str) -> "HubId":
        found = HubId.maybe(text)
        if found is None:
            raise OptionError(
                f"{text!r} is no repository of the hub; write organisation/name, or organisation/name@revision"
            )
        return found

    def __str__(self) -> str:
        return self.repo if self.revision == MAIN else f"{self.repo}@{self.revision}"

    @property
    def name(self) -> Name:
        """What the model is called in the store if nothing else is said."""
        return Name.parse(f"{self.repo}:{LATEST if self.revision == MAIN else self.revision}")


@dataclass(frozen=True, slots=True)
class Remote:
    """A file of a repository, and what its bytes must be: SHA-256 for large ones, git's digest for the others."""

    name: str
    size: int
    sha256: str | None
    git: str | None

    def digest(self) -> Any:
        return hashlib.sha256() if self.sha256 else hashlib.sha1(f"blob {self.size}\0".encode(), usedforsecurity=False)

    def is_right(self, digest: Any) -> bool:
        expected = self.sha256 or self.git
        return expected is None or digest.hexdigest() == expected


Fetched = Callable[[Remote, int], None]  # (a file, how many of its bytes are there)


def pull(
    store: Store,
    hub: HubId,
    *,
    name: Name | None = None,
    file: str | None = None,
    tell: Tell = lambda what, done, total: None,
    fetched: Fetched = lambda remote, done: None,
) -> Stored:
    """Store a model of the hub, under its own name if no other is given. `file` chooses among GGUF files."""
    name = name or hub.name
    store.require_free(name)
    library = _library()
    with store.job(f"pull {name.full}") as job:
        if library.is_offline_mode():
            part, license = _cached(library, hub, file), None
        else:
            commit, files, license = _listed(library, hub)
            download = Download(library, hub, commit, files, job.folder / commit, store.blobs, tell, fetched)
            download.fetch(download.weights(file))
            part = replace(_part(hub, download.folder, file), named=f"{hub.repo}@{commit}", made=True)
        said = Modelfile(str(hub), license=() if license is None else (license,))
        return Creation(store, job, said, tell).run(name, part, None, None, None)


def _part(hub: HubId, folder: Path, file: str | None) -> Part:
    ggufs = sorted(each.name for each in folder.iterdir() if each.suffix == ".gguf")
    if (folder / "config.json").exists() and file is None:
        return path_part(str(hub), folder)
    return path_part(str(hub), intake.inside(folder, choose_gguf(str(hub), ggufs, file)))


def choose_gguf(where: str, names: list[str], wanted: str | None) -> str:
    """The GGUF file that is meant: by its name, by a part of it, or since there is no other."""
    found = [name for name in names if wanted is None or name == wanted]
    found = found or [name for name in names if wanted is not None and wanted.lower() in name.lower()]
    if len(found) != 1:
        among = ", ".join(found or names) or "none"
        raise OptionError(f"which GGUF file of {where}? choose one with --file; there are: {among}")
    return found[0]


# Asking the hub.


def _library() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError:
        raise OptionError("pulling needs huggingface_hub; install it with: pip install 'bough[hub]'") from None
    return huggingface_hub


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _listed(library: Any, hub: HubId) -> tuple[str, dict[str, Remote], str | None]:
    """(commit, files by name, license) of a repository."""
    with _told(library, hub):
        info = library.HfApi(endpoint=_endpoint()).model_info(
            hub.repo, revision=hub.revision, files_metadata=True, timeout=PATIENCE
        )
    files = {
        each.rfilename: Remote(each.rfilename, each.size or 0, each.lfs.sha256 if each.lfs else None, each.blob_id)
        for each in info.siblings or ()
    }
    if not re.fullmatch(r"[0-9a-f]{6,64}", info.sha or ""):
        raise RequestError(f"the hub tells no commit for {hub}; is HF_ENDPOINT a hub?")
    license = getattr(info.card_data, "license", None)
    return str(info.sha), files, license if isinstance(license, str) else None


def _cached(library: Any, hub: HubId, file: str | None) -> Part:
    """The model in the hub's own cache."""
    with _told(library, hub):
        folder = library.snapshot_download(hub.repo, revision=hub.revision, local_files_only=True)
    return _part(hub, Path(folder), file)


@contextmanager
def _told(library: Any, hub: HubId) -> Iterator[None]:
    """What goes wrong with the hub, in words."""
    errors = library.errors
    try:
        yield
    except errors.HFValidationError as error:
        raise OptionError(f"{hub.repo} is no repository of the hub ({error}); check its name") from None
    except errors.LocalEntryNotFoundError:
        raise RequestError(
            f"HF_HUB_OFFLINE is set and {hub} is not in the hub's cache on this machine; unset it to download"
        ) from None
    except errors.GatedRepoError:
        raise RequestError(
            f"{hub.repo} is gated; accept its terms on its page, and set HF_TOKEN to a token of yours (hf auth login)"
        ) from None
    except errors.RevisionNotFoundError:
        raise RequestError(f"{hub.repo} has no revision {hub.revision!r}; see its page for branches and tags") from None
    except errors.RepositoryNotFoundError:
        raise RequestError(
            f"there is no model {hub.repo} on the hub, or it is private; check its name, and set HF_TOKEN if it is"
            " yours"
        ) from None
    except errors.HTTPError as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise RequestError(
            f"the hub does not answer as it should ({reason[0]}); try again: what came is kept"
        ) from None


# Fetching.


@dataclass(frozen=True, slots=True)
class Download:
    """The files of a repository at a commit, on their way into a folder."""

    library: Any
    hub: HubId
    commit: str
    files: dict[str, Remote]
    folder: Path
    blobs: Blobs
    tell: Tell
    fetched: Fetched

    def weights(self, file: str | None) -> list[Remote]:
        """The files that the weights are in, once what goes with them is fetched."""
        top = {name for name in self.files if "/" not in name}
        ggufs = sorted(name for name in top if name.endswith(".gguf"))
        safetensors = "config.json" in top and any(name.endswith(".safetensors") for name in top)
        if file is not None or (ggufs and not safetensors):
            return [self.files[choose_gguf(str(self.hub), ggufs, file)]]
        found: list[Remote] = []
        for prefix in ("", f"{intake.ASSISTANT}/"):
            names = {name.removeprefix(prefix) for name in self.files if name.startswith(prefix)}
            names = {name for name in names if "/" not in name}
            if prefix and "config.json" not in names:
                continue
            indexed = INDEX in names and WHOLE not in names
            beside = [*intake.beside(names), *([INDEX] if indexed else [])]
            self.fetch([self.files[prefix + name] for name in beside])
            placed = intake.shards(self.folder / prefix / INDEX) if indexed else []
            chosen = intake.weights(names, placed, str(self.hub))
            found += [self.files[prefix + name] for name in chosen if name != INDEX]
        return found

    def fetch(self, files: list[Remote]) -> None:
        """Fetch files; what of them is there already, or in the store, is not asked for."""
        self._expect_space(files)
        what, done, total = f"pulling {self.hub}", 0, sum(each.size for each in files)

        def tell(remote: Remote, now: int) -> None:
            self.tell(what, done + now, total)
            self.fetched(remote, now)

        for each in files:
            place = self.folder / each.name
            place.parent.mkdir(parents=True, exist_ok=True)
            if not place.exists() and not self._is_stored(each, place):
                url = self.library.hf_hub_url(self.hub.repo, each.name, revision=self.commit, endpoint=_endpoint())
                with _told(self.library, self.hub):
                    _fetch_one(self.library, url, each, place, partial(tell, each))
            tell(each, each.size)
            done += each.size

    def _expect_space(self, files: list[Remote]) -> None:
        there = (self.folder / name for each in files for name in (each.name, f"{each.name}.part"))
        lacking = sum(each.size for each in files if not self.blobs.has(Entry(each.sha256 or "", each.size)))
        lacking -= sum(path.stat().st_size for path in there if path.exists())
        free = shutil.disk_usage(self.folder.parent).free
        if lacking > free:
            raise RequestError(
                f"{self.hub} takes {lacking:,} bytes more, and {free:,} are free; make room, or let BOUGH_HOME be a"
                " folder on another disk"
            )

    def _is_stored(self, remote: Remote, place: Path) -> bool:
        """Whether a file could be taken from the store, where another model has it."""
        entry = Entry(remote.sha256 or "", remote.size)
        if not self.blobs.has(entry):
            return False
        beside = place.with_name(f"{place.name}.stored")
        with suppress(FileNotFoundError):  # it was collected meanwhile
            self.blobs.link(entry, beside)
            if digest_of(beside) == entry:
                os.replace(beside, place)
                return True
            beside.unlink()
        return False


def _fetch_one(library: Any, url: str, remote: Remote, place: Path, tell: Callable[[int], None]) -> None:
    part, failures = place.with_name(f"{place.name}.part"), 0
    while True:
        digest, before = remote.digest(), 0
        with part.open("ab+") as file:
            file.seek(0)
            while piece := file.read(PIECE):
                digest.update(piece)
                before += len(piece)
            try:
                now = before if before == remote.size else _stream(library, url, file, remote, before, digest, tell)
            except library.errors.HTTPError as error:
                failures = failures + 1 if part.stat().st_size <= before else 1
                answered = getattr(error, "response", None)
                if failures >= TRIES or (answered is not None and answered.status_code < 500):
                    raise
                time.sleep(PAUSE * 2 ** (failures - 1))
                continue
            sync(file)
        if now == remote.size and remote.is_right(digest):
            os.replace(part, place)
            return
        part.unlink()
        raise ModelError(
            f"{remote.name} did not arrive as the hub has it ({now} of {remote.size} bytes); pull it again"
        )


def _stream(
    library: Any, url: str, file: Any, remote: Remote, before: int, digest: Any, tell: Callable[[int], None]
) -> int:
    """Append the rest of a file, and to its digest; returns how long it is then."""
    headers = library.utils.build_hf_headers() | {"Accept-Encoding": "identity"}
    if before:
        headers["Range"] = f"bytes={before}-"
    with library.get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=PATIENCE) as answer:
        if answer.status_code >= 400:
            answer.read()
            library.utils.hf_raise_for_status(answer)
        passed = before if answer.status_code == 206 else 0  # what a server sends again is not needed twice
        for piece in answer.iter_raw():  # as it comes: what waits for more is lost when the connection breaks
            fresh = piece[max(0, before - passed) :]
            passed += len(piece)
            file.write(fresh)
            file.flush()
            digest.update(fresh)
            before += len(fresh)
            tell(before)
            if before > remote.size:
                break
    return before
