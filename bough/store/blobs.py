"""Files by content: each is kept once, under the digest of what is in it."""

import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

PIECE = 1 << 22
READ_ONLY = 0o444  # several models may share a file


class Entry(NamedTuple):
    """A file of a model: the SHA-256 of its bytes, and how many there are."""

    digest: str
    size: int


class Blobs:
    """The folder of files by content. Whoever adds or removes one holds the store's lock meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, digest: str) -> Path:
        return self.folder / f"sha256-{digest}"

    def has(self, entry: Entry) -> bool:
        """Whether the file is there, as far as its size tells."""
        try:
            return self.path(entry.digest).stat().st_size == entry.size
        except OSError:
            return False

    def put(self, file: Path, entry: Entry) -> None:
        """Take over a file that is complete and on disk. A damaged one of the same name is replaced."""
        self.folder.mkdir(parents=True, exist_ok=True)
        target = self.path(entry.digest)
        if self.has(entry) and digest_of(target) == entry:
            file.unlink()
            return
        file.chmod(READ_ONLY)
        os.replace(file, target)
        sync_folder(self.folder)

    def link(self, entry: Entry, target: Path) -> None:
        """Give the file a second place; a copy of it where the file system has no hard links."""
        target.parent.mkdir(parents=True, exist_ok=True)
        source = self.path(entry.digest)
        with suppress(FileNotFoundError):
            if target.samefile(source):
                return
        beside = target.with_name(f".{target.name}.new")
        beside.unlink(missing_ok=True)
        try:
            os.link(source, beside)
        except OSError:
            shutil.copyfile(source, beside)
        os.replace(beside, target)

    def all(self) -> list[str]:
        """The digests of all files there are."""
        if not self.folder.is_dir():
            return []
        return [each.name.removeprefix("sha256-") for each in self.folder.iterdir() if each.name.startswith("sha256-")]

    def remove(self, digest: str) -> int:
        """Forget a file. Returns its bytes."""
        path = self.path(digest)
        size = path.stat().st_size
        path.unlink()
        return size


def digest_of(path: Path) -> Entry:
    with path.open("rb") as file:
        return pour(file, None)


def pour(source: BinaryIO, target: BinaryIO | None, tell: Callable[[int], None] = lambda _: None) -> Entry:
    """What is in a file, copied on its way to `target`; `tell` is told of the bytes as they pass."""
    digest, size = hashlib.sha256(), 0
    while piece := source.read(PIECE):
        digest.update(piece)
        if target is not None:
            target.write(piece)
        size += len(piece)
        tell(len(piece))
    return Entry(digest.hexdigest(), size)


def sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes, beside: Path) -> None:
    """A file that is the old one or the new one at every moment. `beside` is written first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside.parent.mkdir(parents=True, exist_ok=True)
    with beside.open("wb") as file:
        file.write(data)
        sync(file)
    os.replace(beside, path)
    sync_folder(path.parent)
