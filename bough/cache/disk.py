"""A folder of extents: a byte budget, a write rate, and one thread that reads and writes.

The folder is its own index. An extent gets its name only when it is complete and never changes afterwards, so a process
that is killed leaves whole extents and at most one temporary file. Nothing is synced: what a killed process wrote is
safe with the system, and what a power failure takes away is found out by the digests.

Invariants (`check()` asserts what it can see):
- The files that we put into the folder never take more than the budget: an extent's size is known and set aside before
  it is queued, and removals that were asked for come before the next write. (A budget smaller than what is found at the
  start is the exception: the caller evicts.)
- used_bytes is their size once everything queued is done. What cannot be removed goes on counting.
- Bytes that are not those that were written are never handed out.

Everything but `open`, `drain`, `close` and `scan` returns at once; the thread does the work, reads first, and calls
`done` itself: what `done` does must be quick and safe there, such as putting something into a queue.
Knows bytes, token ids and files; no tree, no torch.
"""

import contextlib
import errno
import fcntl
import heapq
import itertools
import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bough.cache.extent import Extent, Lost, Piece, Rows, Shapes, contents, extent_size, load
from bough.errors import DiskUnavailable

SUFFIX, PART, LOCK, ABOUT = ".safetensors", ".part", "lock", "about.json"
EXTENT = re.compile(r"([0-9a-f]{32})\.safetensors")
IDENTITY = re.compile(r"[0-9a-f]+")
LEFTOVER = re.compile(r"([0-9a-f]{32}|about\.json)\.part")
BURST = 0.25  # seconds of the write rate that may be written at once
PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds without writes after one has failed; doubles each time
READ, DELETE, TOUCH, WRITE, STOP = range(5)  # the order in which the thread does what is queued

Wrote = Callable[[Extent | None], None]
Loaded = Callable[[dict[str, Rows] | Lost], None]


class Disk:
    """The extents of one model in one folder, which no other process uses meanwhile."""

    def __init__(
        self, folder: int, nbytes: int, identity: str, write_rate: float, queue_bytes: int, clock: Callable[[], float]
    ) -> None:
        self.nbytes, self.identity, self.write_rate, self.queue_bytes = nbytes, identity, write_rate, queue_bytes
        self.dropped: Counter[Lost] = Counter()  # extents, by what was wrong with them
        self.failures: Counter[str] = Counter()  # "write ENOSPC", "delete EPERM", ...
        self.written_bytes = self.read_bytes = 0
        self._files, self._folder, self._clock = contextlib.ExitStack(), folder, clock
        self._extents: dict[str, Extent] = {}
        self._used = self._queued = 0  # bytes
        self._allowance, self._filled_at = BURST * write_rate, clock()  # a bucket: bytes that may be written now
        self._pause, self._paused_until = 0.0, clock()
        self._jobs: list[tuple[int, int, Callable[[], None]]] = []  # a heap
        self._serial = itertools.count()
        self._changed = threading.Condition()  # guards all of the above
        self._busy = self._closing = self._abandoning = False
        self._thread = threading.Thread(target=self._main, name="bough-disk", daemon=True)

    @classmethod
    def open(
        cls, path: str | Path, nbytes: int, *, identity: str, write_rate: float, queue_bytes: int = 256 << 20,
        describe: Mapping[str, Any] | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> "Disk":  # fmt: skip
        """Take the folder of a model over, and drop from it what cannot be used. Raises DiskUnavailable.

        `describe` is for people: it is written beside the extents when there is nothing of the kind yet.
        """
        assert IDENTITY.fullmatch(identity), "the identity names a folder"
        with contextlib.ExitStack() as files:
            try:
                folder = _folder(Path(path), identity, files)
                lock = files.enter_context(_opened(folder, LOCK, os.O_RDWR | os.O_CREAT))
                if not os.access(".", os.W_OK | os.X_OK, dir_fd=folder):
                    raise PermissionError(errno.EACCES, "not writable")
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                disk = cls(folder, nbytes, identity, write_rate, queue_bytes, clock)
                disk._take_over(describe)
                disk._files = files.pop_all()
            except BlockingIOError as error:
                raise DiskUnavailable(
                    f"the disk cache {path} is in use by another process; stop that one, or give this one a folder of"
                    " its own (CacheConfig.disk_path)"
                ) from error
            except OSError as error:
                raise DiskUnavailable(
                    f"the disk cache {path} cannot be used: {error.strerror}; make it a folder that this user can write"
                    " to, or name another one (CacheConfig.disk_path)"
                ) from error
        disk._thread.start()
        return disk

    def _take_over(self, describe: Mapping[str, Any] | None) -> None:
        for name in os.listdir(self._folder):
            if LEFTOVER.fullmatch(name):
                self._remove(name)
        for name, found in _survey(self._folder, self.identity):
            if isinstance(found, Extent):
                self._extents[name] = found
                self._used += found.nbytes
            else:
                self.dropped[found] += 1
                self._remove(name + SUFFIX)
        text = json.dumps(describe, indent=2).encode() + b"\n"
        if describe is not None and not self._size(ABOUT) and len(text) <= self.free_bytes:
            try:
                self._put(ABOUT, ABOUT + PART, [text])
            except OSError as error:
                self._failed("write", error)
        self._used += self._size(ABOUT)

    @property
    def extents(self) -> list[Extent]:
        """All that can be read: those found at the start, and those written since."""
        with self._changed:
            return list(self._extents.values())

    @property
    def used_bytes(self) -> int:
        """Bytes of all our files in the folder, once everything queued is done."""
        return self._used

    @property
    def free_bytes(self) -> int:
        """What is left of the budget; below 0 by what is to be evicted if it is smaller than last time."""
        return self.nbytes - self._used

    def size_of(self, start: int, end: int, arrays: Shapes, meta: Mapping[str, Any]) -> int:
        """Bytes of the file that such a piece becomes."""
        return extent_size(self.identity, start, end, arrays, meta)

    def ready(self) -> bool:
        """Whether a write of any size may be queued now, as far as rate, queue and earlier failures are concerned."""
        with self._changed:
            now = self._clock()
            gained = (now - self._filled_at) * self.write_rate
            self._allowance, self._filled_at = min(BURST * self.write_rate, self._allowance + gained), now
            return self._allowance > 0 and self._queued < self.queue_bytes and now >= self._paused_until

    def room_for(self, nbytes: int) -> bool:
        """Whether a write of this size may be queued now."""
        return nbytes <= self.free_bytes and self.ready()

    def write(self, piece: Piece, done: Wrote, *, paced: bool = True) -> bool:
        """Queue a piece and return True, or False if there is no room for it now; `done` gets its extent, or None.

        Unpaced writes ask for the budget only: whoever flushes queues a few, drains, and goes on.
        """
        size = self.size_of(piece.start, piece.end, piece.shapes, piece.meta)
        with self._changed:
            if size > self.free_bytes or (paced and not self.ready()):
                return False
            self._used += size
            self._queued += size
            self._allowance -= size  # may go below 0: what is larger than a burst is written too, and paid for later
            self._post(WRITE, lambda: self._write(piece, size, done))
        return True

    def read(self, extent: Extent, rows: Mapping[str, tuple[int, int]], done: Loaded) -> None:
        """Queue reading rows [first, last) of the arrays named; `done` gets them, verified, or why they are lost.

        An extent of which anything is lost is dropped as a whole.
        """
        self._post(READ, lambda: self._read(extent, rows, done))

    def delete(self, extent: Extent) -> None:
        """Give its bytes back. One that was deleted or dropped before is none any more."""
        with self._changed:
            if self._extents.pop(extent.name, None) is not None:
                self._used -= extent.nbytes
                self._post(DELETE, lambda: self._remove(extent.name + SUFFIX))

    def touch(self, extent: Extent) -> None:
        """Remember that it was used now, beyond a restart if possible."""
        extent.used = time.time()
        self._post(TOUCH, lambda: self._touch(extent))

    def drain(self) -> None:
        """Wait until everything queued is done, `done` calls included."""
        assert threading.current_thread() is not self._thread, "`done` may not wait for itself"
        with self._changed:
            self._changed.wait_for(lambda: not (self._jobs or self._busy))

    def close(self, *, abandon: bool = False) -> None:
        """Finish what is queued, or give up the writes among it, and let go of the folder. Once is enough."""
        with self._changed:
            if not self._closing:
                self._abandoning = abandon
                self._post(STOP, lambda: None)
                self._closing = True
        self._thread.join()
        self._files.close()

    def _post(self, order: int, job: Callable[[], None]) -> None:
        with self._changed:
            assert not self._closing, "the disk is closed, or a `done` has raised"
            heapq.heappush(self._jobs, (order, next(self._serial), job))
            self._changed.notify_all()

    def check(self) -> None:
        """Assert the invariants. Waits for the queue."""
        self.drain()
        with self._changed:
            ours = [name for name in os.listdir(self._folder) if EXTENT.fullmatch(name) or LEFTOVER.fullmatch(name)]
            real = sum(self._size(name) for name in [*ours, ABOUT])
            assert self._used == real, f"{self._used} bytes are counted, {real} are there"
            assert not self._queued, f"nothing is queued, and {self._queued} bytes are counted as such"
            assert {name + SUFFIX for name in self._extents} <= set(ours), "an extent has no file"

    # What follows runs in the thread, or before it starts.

    def _main(self) -> None:
        order = READ
        try:
            while order < STOP:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._jobs)
                    self._busy = True
                    order, _, job = heapq.heappop(self._jobs)
                job()
                del job  # a piece is not to be kept in memory until the next one comes
        finally:  # also when a `done` has raised: nobody shall wait for a thread that has ended
            with self._changed:
                self._closing, self._busy = True, False
                self._jobs.clear()
                self._changed.notify_all()

    def _write(self, piece: Piece, size: int, done: Wrote) -> None:
        extent = None
        with self._changed:  # a removal may have failed since this was queued, and an earlier write
            wanted = self._used <= self.nbytes and self._clock() >= self._paused_until and not self._abandoning
        try:
            if wanted:
                extent = Extent.of(piece, self.identity)
                assert extent.nbytes == size, "an extent has another size than was set aside"
                self._put(extent.name + SUFFIX, extent.name + PART, contents(piece, extent))
                extent.used = time.time()
        except OSError as error:
            extent = None
            self._failed("write", error)
            with self._changed:
                self._pause = min(LONGEST_PAUSE, max(PAUSE, 2 * self._pause))
                self._paused_until = self._clock() + self._pause
        with self._changed:
            self._queued -= size
            if extent is None:
                self._used -= size
            else:
                self._extents[extent.name] = extent
                self.written_bytes += size
                self._pause = 0.0
        done(extent)

    def _put(self, name: str, part: str, buffers: Iterable[Any]) -> None:
        """Write a file under another name first; whoever waits for a read meanwhile is served between two rows."""
        try:
            with _opened(self._folder, part, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
                for buffer in buffers:
                    view = memoryview(buffer)
                    while view:
                        view = view[os.write(fd, view) :]
                    self._serve_before_writes()
            os.replace(part, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError:
            self._remove(part)
            raise

    def _serve_before_writes(self) -> None:
        while True:
            with self._changed:
                if not self._jobs or self._jobs[0][0] >= WRITE:
                    return
                job = heapq.heappop(self._jobs)[2]
            job()

    def _read(self, extent: Extent, rows: Mapping[str, tuple[int, int]], done: Loaded) -> None:
        found = self._rows(extent, rows)
        if isinstance(found, Lost):
            with self._changed:
                known = self._extents.pop(extent.name, None) is not None
                if known:
                    self.dropped[found] += 1
                    self._used -= extent.nbytes
            if known:
                self._remove(extent.name + SUFFIX)
        else:
            self.read_bytes += sum(array.nbytes for array in found.values())
        done(found)

    def _rows(self, extent: Extent, rows: Mapping[str, tuple[int, int]]) -> dict[str, Rows] | Lost:
        result = {}
        try:
            with _opened(self._folder, extent.name + SUFFIX) as fd:
                for name, (first, last) in rows.items():
                    found = extent.read(fd, name, first, last)
                    if isinstance(found, Lost):
                        return found
                    result[name] = found
        except OSError as error:
            return _lost(error)
        except MemoryError:
            return Lost.UNREADABLE
        return result

    def _touch(self, extent: Extent) -> None:
        with contextlib.suppress(OSError):
            os.utime(extent.name + SUFFIX, (extent.used, extent.used), dir_fd=self._folder, follow_symlinks=False)

    def _remove(self, name: str) -> None:
        """Unlink; what cannot be unlinked counts on."""
        size = self._size(name)
        try:
            os.unlink(name, dir_fd=self._folder)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._failed("delete", error)
            with self._changed:
                self._used += size

    def _size(self, name: str) -> int:
        try:
            return os.stat(name, dir_fd=self._folder, follow_symlinks=False).st_size
        except OSError:
            return 0

    def _failed(self, what: str, error: OSError) -> None:
        with self._changed:
            self.failures[f"{what} {errno.errorcode.get(error.errno or 0, 'unknown')}"] += 1


def scan(path: str | Path) -> list[Extent]:
    """The extents of all models in a folder, which may be in use: nothing is locked, and nothing removed."""
    found: list[Extent] = []
    try:
        with _opened(None, str(path), os.O_DIRECTORY, follow=True) as root:
            for identity in sorted(name for name in os.listdir(root) if IDENTITY.fullmatch(name)):
                with contextlib.suppress(OSError), _opened(root, identity, os.O_DIRECTORY) as folder:
                    found += (extent for _, extent in _survey(folder, identity) if isinstance(extent, Extent))
    except OSError as error:
        raise DiskUnavailable(f"{path} cannot be read: {error.strerror}; name the folder of a disk cache") from error
    return found


def _folder(path: Path, identity: str, files: contextlib.ExitStack) -> int:
    """The open folder of a model. The one it is in may be a link, since the user named it; itself it may not."""
    path.mkdir(0o700, parents=True, exist_ok=True)
    with _opened(None, str(path), os.O_DIRECTORY, follow=True) as root:
        with contextlib.suppress(FileExistsError):
            os.mkdir(identity, 0o700, dir_fd=root)
        return files.enter_context(_opened(root, identity, os.O_DIRECTORY))


@contextlib.contextmanager
def _opened(folder: int | None, name: str, flags: int = os.O_RDONLY, *, follow: bool = False) -> Iterator[int]:
    # Without blocking: a pipe in place of a file would wait for a writer.
    flags |= os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    fd = os.open(name, flags, 0o600, dir_fd=folder)
    try:
        yield fd
    finally:
        os.close(fd)


def _survey(folder: int, identity: str) -> Iterator[tuple[str, Extent | Lost]]:
    """Whatever is named like an extent, and what it is."""
    for file in sorted(os.listdir(folder)):
        if match := EXTENT.fullmatch(file):
            try:
                with _opened(folder, file) as fd:
                    yield match[1], load(fd, match[1], identity)
            except OSError as error:
                yield match[1], _lost(error)


def _lost(error: OSError) -> Lost:
    reasons = {errno.ENOENT: Lost.VANISHED, errno.ELOOP: Lost.FOREIGN}  # ELOOP: a link, which is not followed
    return reasons.get(error.errno or 0, Lost.UNREADABLE)
