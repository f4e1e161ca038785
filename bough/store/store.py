"""The store: a folder of models by name.

    blobs/sha256-<digest>                  every file, by its content
    trees/<digest>/                        a model: an ordinary model folder, whose files are links to blobs
    manifests/<namespace>/<name>/<tag>     the tree that a name stands for, and the digests of its files
    tmp/                                   jobs under way, and ones that were broken off
    lock                                   held for moments: by many who add, or by one who removes or collects

A name stands for a whole model at every moment: its manifest is replaced in one step, when everything that it names is
on disk. Files that nothing names are collected when a name goes; journals of jobs name things too.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from bough.engine.about import FILE, About
from bough.errors import ModelError, OptionError, RequestError
from bough.store.blobs import Blobs, Entry, digest_of, sync_folder, write_atomically
from bough.store.job import JOURNAL, Job, claimed
from bough.store.names import RESERVED, Name

VERSION = 1
STALE = 7 * 86400  # seconds after which a job that nobody goes on with is forgotten
Files = Mapping[str, Entry]  # by their path in the model's folder


def home() -> Path:
    """Where Bough keeps things: $BOUGH_HOME, or ~/.bough."""
    try:
        return Path(os.environ.get("BOUGH_HOME") or "~/.bough").expanduser()
    except RuntimeError:
        raise OptionError("there is no home folder to keep models in; name a place with BOUGH_HOME") from None


@dataclass(frozen=True, slots=True)
class Stored:
    """A model in the store."""

    name: Name
    digest: str  # of its tree
    files: dict[str, Entry]
    created: float
    folder: Path

    @property
    def path(self) -> Path:
        """What can be loaded: the folder, or the GGUF file in it."""
        return next(
            (self.folder / name for name in self.files if name.endswith(".gguf") and "/" not in name), self.folder
        )

    @property
    def about(self) -> About:
        try:
            return About.read(self.folder / FILE)  # each has one, so that it is missing does not mean that it is empty
        except ModelError as error:
            raise ModelError(
                f"{self.name} was removed or replaced meanwhile, or is damaged; try again ({error})"
            ) from None

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.files.values())

    def require_whole(self) -> None:
        """Raise if files are missing or cut short. Damage that leaves their sizes takes `damaged` to be found."""
        wrong = [name for name, entry in self.files.items() if not _is_sized(self.folder / name, entry.size)]
        if wrong:
            raise ModelError(f"{self.name} is damaged in the store ({', '.join(wrong)}); pull or create it again")

    def damaged(self) -> list[str]:
        """The files that are not what they were. Reads all of them."""
        return [
            name
            for name, entry in self.files.items()
            if not _is_sized(self.folder / name, entry.size) or digest_of(self.folder / name) != entry
        ]


class Store:
    """A folder of models. Any number of processes may use it at once."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = home() / "models" if folder is None else folder
        self.blobs = Blobs(self.folder / "blobs")
        self._trees, self._manifests, self._tmp = (self.folder / each for each in ("trees", "manifests", "tmp"))

    # What there is.

    def all(self) -> list[Stored]:
        return [stored for name in self._names() if (stored := self.find(name)) is not None]

    def find(self, name: Name) -> Stored | None:
        path = self._manifest(name)
        try:
            told = json.loads(path.read_bytes())
            files = {str(file): Entry(str(digest), int(size)) for file, (digest, size) in told["files"].items()}
            tree, created = str(told["tree"]), float(told["created"])
            if told["version"] != VERSION or tree != tree_digest(files):
                raise ValueError("its digest is another")
        except FileNotFoundError:  # or it has gone since it was listed
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(
                f"the entry of {name} in the store is damaged ({path}: {error}); remove it with: bough rm {name}"
            ) from None
        return Stored(name, tree, files, created, self._trees / tree)

    def has(self, name: Name) -> bool:
        """Whether the name stands for something, though it may be damaged."""
        return self._manifest(name).is_file()

    def get(self, name: Name) -> Stored:
        found = self.find(name)
        if found is None:
            raise RequestError(f"there is no model {str(name)!r} in the store; bough list shows what there is")
        return found

    def _names(self) -> list[Name]:
        walked = os.walk(self._manifests)  # folders that go meanwhile are as good as empty to it
        found = [Path(folder, file).relative_to(self._manifests).parts for folder, _, files in walked for file in files]
        return sorted(Name(*parts) for parts in found if len(parts) == 3)

    def _manifest(self, name: Name) -> Path:
        return self._manifests / name.namespace / name.model / name.tag

    # What changes it.

    @contextmanager
    def job(self, key: str) -> Iterator[Job]:
        """A job, by what it is for; only one process at a time works on it. It is over when the block ends well."""
        folder, lock = self._job(key)
        with self._adding():
            held = _try_lock(lock, fcntl.LOCK_EX)
        if held is None:
            raise RequestError(f"another process is at it already ({key}); wait until it is done")
        try:
            yield Job(folder, self.blobs, self._adding)
            with self._adding():
                self._drop(folder)
        finally:
            with suppress(OSError):  # there is something in it to go on with, or it is gone
                folder.rmdir()
            os.close(held)
        self.collect()

    def publish(self, name: Name, files: Files, job: Job) -> Stored:
        """Let a name stand for these files, which the job has brought to the blobs."""
        self.require_free(name)
        digest = tree_digest(files)
        tree = self._trees / digest
        with self._adding():
            self._require_blobs(files)
            beside = tree if tree.is_dir() else job.folder / "tree"
            for path, entry in files.items():
                self.blobs.link(entry, beside / path)
            if beside is not tree:
                self._trees.mkdir(parents=True, exist_ok=True)
                try:
                    os.rename(beside, tree)
                except OSError:
                    if not tree.is_dir():  # or else another made the same meanwhile, and ours goes with the job
                        raise
                sync_folder(self._trees)
            self._write(name, Stored(name, digest, dict(files), time.time(), tree))
        return self.get(name)

    def copy(self, source: Name, target: Name) -> Stored:
        """Let a second name stand for a model."""
        self.require_free(target)
        with self._adding():
            self._write(target, self.get(source))
        self.collect()
        return self.get(target)

    def _job(self, key: str) -> tuple[Path, Path]:
        """The folder of a job, and its lock."""
        digest = hashlib.sha256(key.encode()).hexdigest()[:32]
        return self._tmp / digest, self._tmp / f"{digest}.lock"

    def remove(self, name: Name) -> None:
        """Let a name stand for nothing, and forget what was broken off on the way to it."""
        with self._locked(fcntl.LOCK_EX):  # who adds is not to find the folder of a manifest gone
            path = self._manifest(name)
            begun = [self._forget(f"{what} {name.full}") for what in ("create", "pull")]
            if not path.is_file() and not any(begun):
                self.get(name)
            path.unlink(missing_ok=True)
            with suppress(OSError):  # it has other tags
                path.parent.rmdir()
                path.parent.parent.rmdir()
        self.collect()

    @staticmethod
    def require_free(name: Name) -> None:
        if str(name) == RESERVED:
            raise OptionError(f"{RESERVED!r} is the name of the model in the box; choose another")

    def _require_blobs(self, files: Files) -> None:
        lost = [path for path, entry in files.items() if not self.blobs.has(entry)]
        if lost:
            raise ModelError(f"files are gone from the store ({', '.join(lost)}); pull or create the model again")

    def _write(self, name: Name, stored: Stored) -> None:
        told = {"version": VERSION, "tree": stored.digest, "created": stored.created, "files": stored.files}
        data = json.dumps(told, indent=1).encode()
        write_atomically(self._manifest(name), data, self._tmp / f"manifest-{token_hex(8)}")

    def collect(self) -> int:
        """Remove what nothing names. Returns the bytes of it."""
        with self._locked(fcntl.LOCK_EX):
            self._forget_jobs()
            try:
                named = self.all()
            except ModelError:  # what a damaged entry names is not known: it may be anything
                return 0
            trees = {each.digest for each in named}
            for tree in self._trees.iterdir() if self._trees.is_dir() else ():
                if tree.name not in trees:
                    self._drop(tree)
            live = {entry.digest for each in named for entry in each.files.values()}
            for folder in self._tmp.iterdir():
                live |= {entry.digest for entry in claimed(folder).values()}
            return sum(self.blobs.remove(digest) for digest in self.blobs.all() if digest not in live)

    def _forget(self, key: str) -> bool:
        """Remove what is left of a job that nobody works on. Says if there was something."""
        folder, lock = self._job(key)
        held = _try_lock(lock, fcntl.LOCK_EX) if folder.exists() else None
        if held is None:
            return False
        self._drop(folder)
        os.close(held)
        return True

    def _drop(self, folder: Path) -> None:
        """Remove a folder, all of it at once for whoever looks."""
        gone = self._tmp / f"gone-{token_hex(8)}"
        os.rename(folder, gone)
        shutil.rmtree(gone)

    def _forget_jobs(self) -> None:
        """Remove what was left in tmp by processes that are gone: at once what cannot be gone on with, jobs later."""
        old = time.time() - STALE
        for path in list(self._tmp.iterdir()):
            if path.suffix == ".lock":
                folder = path.with_suffix("")
                held = _try_lock(path, fcntl.LOCK_EX)
                if held is None:
                    continue
                touched = [each for each in (folder / JOURNAL, folder) if each.exists()]
                if touched and touched[0].stat().st_mtime < old:
                    self._drop(folder)
                if not folder.exists():
                    path.unlink()
                os.close(held)
            elif path.name.startswith("gone-"):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.startswith("manifest-"):
                path.unlink()  # they are written and renamed by holders of the lock

    @contextmanager
    def _adding(self) -> Iterator[None]:
        with self._locked(fcntl.LOCK_SH):
            yield

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        try:
            self._tmp.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RequestError(
                f"the store in {self.folder} cannot be written ({error.strerror}); name another place with BOUGH_HOME"
            ) from None
        try:
            fcntl.flock(descriptor, how)
            yield
        finally:
            os.close(descriptor)


def tree_digest(files: Files) -> str:
    """What a tree goes by: its files, wherever they came from."""
    told = json.dumps({path: list(entry) for path, entry in sorted(files.items())})
    return hashlib.sha256(told.encode()).hexdigest()


def _try_lock(path: Path, how: int) -> int | None:
    """A descriptor that holds the lock as long as it is open; None if another has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        return None
    return descriptor


def _is_sized(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False
