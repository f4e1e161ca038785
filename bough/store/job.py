"""A piece of work on the store that may be broken off at any moment, and then goes on where it was.

A job has a folder that nobody else sees. Files that are finished go to the blobs, and the job's journal says which work
gave which file, so that a second run of the same job has them at once. What a journal names is not collected.
"""

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from bough.store.blobs import Blobs, Entry, pour, sync, write_atomically

JOURNAL = "journal.json"
Lock = Callable[[], AbstractContextManager[None]]  # a context in which nothing is collected


class Job:
    """Work under way. `lock` keeps the store from being collected for the moments in which a file changes hands."""

    def __init__(self, folder: Path, blobs: Blobs, lock: Lock) -> None:
        self.folder, self.blobs = folder, blobs
        self._lock = lock
        folder.mkdir(parents=True, exist_ok=True)
        self._done = claimed(folder)

    def known(self, work: str) -> Entry | None:
        """The file that this work gave when it was done before."""
        entry = self._done.get(work)
        return entry if entry is not None and self.blobs.has(entry) else None

    def add(self, path: Path, tell: Callable[[int], None] = lambda _: None, *, own: bool = False) -> Entry:
        """A file, copied while its digest is taken; one of the job's `own` only needs a link, and is not written again.
        One that has not changed since it was added is known.
        """
        stat = path.stat()
        work = f"{path.absolute()} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"
        if known := self.known(work):
            tell(known.size)
            return known
        copy = self.folder / "copy"
        copy.unlink(missing_ok=True)
        if own and _linked(path, copy):
            with copy.open("rb") as file:
                entry = pour(file, None, tell)
                os.fsync(file.fileno())
        else:
            with path.open("rb") as source, copy.open("wb") as target:
                entry = pour(source, target, tell)
                sync(target)
        return self._keep(work, copy, entry)

    def put(self, data: bytes) -> Entry:
        """A small file, given as its bytes."""
        entry = Entry(hashlib.sha256(data).hexdigest(), len(data))
        copy = self.folder / "copy"
        copy.unlink(missing_ok=True)
        with copy.open("wb") as file:
            file.write(data)
            sync(file)
        return self._keep(f"written {entry.digest}", copy, entry)

    def _keep(self, work: str, path: Path, entry: Entry) -> Entry:
        with self._lock():
            self.blobs.put(path, entry)
            self._done[work] = entry
            write_atomically(self.folder / JOURNAL, json.dumps(self._done).encode(), self.folder / "journal.new")
        return entry


def claimed(folder: Path) -> dict[str, Entry]:
    """What the journal of a job names, by the work that gave it."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        told = json.loads((folder / JOURNAL).read_bytes())
        return {str(work): Entry(str(digest), int(size)) for work, (digest, size) in told.items()}
    return {}


def _linked(path: Path, place: Path) -> bool:
    try:
        os.link(path, place)
    except OSError:
        return False
    return True
