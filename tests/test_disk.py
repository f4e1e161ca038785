"""The disk tier: what is read is what was written, or nothing; the budget holds; a kill at any moment does no harm."""

import contextlib
import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import disk_child
import numpy as np
import pytest
from disk_child import IDENTITY, turn
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from bough.cache.disk import BURST, LONGEST_PAUSE, PAUSE, Disk, scan
from bough.cache.extent import Extent, Lost, PathDigest, Piece, connect, digest, extent_size, salt_key
from bough.errors import DiskUnavailable

PLENTY = 10_000_000
NOBODY = salt_key(None)
ROOT = PathDigest(NOBODY).digest()


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def opened(tmp_path):
    """Opens disks in one folder and closes them in the end."""
    with contextlib.ExitStack() as disks:

        def open_disk(nbytes: int = PLENTY, **named) -> Disk:
            named = {"identity": IDENTITY, "write_rate": 1e12} | named
            disk = Disk.open(tmp_path, nbytes, **named)
            disks.callback(disk.close)
            return disk

        yield open_disk


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / IDENTITY


def made(tokens=7, seed=0, meta=None, **shapes) -> Piece:
    rng = np.random.default_rng(seed)
    shapes = shapes or {"unit0": (3, 16), "unit1": (0, 40), "unit2": (1, 5)}
    arrays = {name: rng.integers(0, 256, shape, np.uint8) for name, shape in shapes.items()}
    return Piece(NOBODY, ROOT, 0, rng.integers(0, 1 << 30, tokens, np.int32), arrays, meta or {"first": [0, 2]})


def written(disk: Disk, piece: Piece) -> Extent | None:
    got: list[Extent | None] = []
    assert disk.write(piece, got.append)
    disk.drain()
    return got[0]


def read(disk: Disk, extent: Extent, rows=None):
    got: list = []
    disk.read(extent, rows or {name: (0, shape[0]) for name, shape in extent.arrays.items()}, got.append)
    disk.drain()
    return got[0]


def same(piece: Piece, rows) -> bool:
    return rows.keys() == piece.arrays.keys() and all(np.array_equal(rows[n], a) for n, a in piece.arrays.items())


def files(folder: Path) -> dict[str, int]:
    """Everything of ours, by name."""
    found = {}
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            found[name] = os.lstat(folder / name).st_size
    return found


@pytest.mark.parametrize("shapes", [
    {"unit0": (3, 16)}, {"unit0": (0, 16), "unit1": (2, 0)}, {"unit0": (1, 1), "unit1": (40, 3), "unit2": (2, 999)},
])  # fmt: skip
@pytest.mark.parametrize("tokens", [0, 1, 1000])
def test_what_is_written_is_read_back_by_us_and_by_safetensors(opened, folder, tokens, shapes):
    disk, piece = opened(), made(tokens, meta={"first": [1], "name": "ü", "whole": True}, **shapes)
    extent = written(disk, piece)
    assert same(piece, read(disk, extent))
    disk.close()
    (again,) = opened().extents
    for found in (extent, again):
        assert (found.salt, found.path, found.start, found.end) == (NOBODY, ROOT, 0, tokens)
        assert np.array_equal(found.tokens, piece.tokens) and found.arrays == piece.shapes and found.meta == piece.meta
        assert found.nbytes == files(folder)[found.name + ".safetensors"]
        assert found.nbytes == extent_size(IDENTITY, 0, tokens, piece.shapes, piece.meta)
    with safe_open(folder / f"{extent.name}.safetensors", "numpy") as file:
        assert file.metadata()["identity"] == IDENTITY
        assert np.array_equal(file.get_tensor("tokens"), piece.tokens)
        assert same(piece, {name: file.get_tensor(name) for name in file.keys() if name != "tokens"})  # noqa: SIM118


def test_a_range_of_rows_and_rows_that_lie_apart(opened):
    whole = np.random.default_rng(0).integers(0, 256, (9, 64), np.uint8)
    disk = opened()
    extent = written(disk, Piece(NOBODY, ROOT, 0, np.zeros(3, np.int32), {"unit0": whole[:, :50]}))
    for first in range(10):
        for last in range(first, 10):
            assert np.array_equal(read(disk, extent, {"unit0": (first, last)})["unit0"], whole[first:last, :50])


def test_equal_pieces_are_two_files(opened):
    disk = opened()
    one, other = written(disk, made()), written(disk, made())
    assert one.name != other.name
    disk.delete(one)
    disk.check()
    assert same(made(), read(disk, other))


def test_salts_and_paths_have_digests_of_their_own():
    assert len({salt_key(None), salt_key(""), salt_key("a"), salt_key("\ud800")}) == 4
    tokens = np.arange(100, dtype=np.int32)
    path = PathDigest(NOBODY)
    for length in range(100):
        fork = path.copy()
        assert path.digest() == fork.digest() == PathDigest(NOBODY, tokens[:length]).digest()
        assert path.digest() != PathDigest(salt_key("a"), tokens[:length]).digest()
        fork.extend(tokens[:1])
        path.extend(tokens[length : length + 1])
        assert (fork.digest() == path.digest()) == (length == 0)
    with pytest.raises(AssertionError):
        path.extend(tokens.astype(np.int64))


@pytest.fixture
def small(opened, folder):
    """A file of every section, small enough to try every byte: the piece, the extent, the path, the bytes."""
    piece = made()
    disk = opened()
    extent = written(disk, piece)
    disk.close()
    path = folder / f"{extent.name}.safetensors"
    return piece, extent, path, path.read_bytes()


def test_a_flip_of_any_byte_is_never_served(opened, small):
    piece, extent, path, good = small
    seen: Counter[str] = Counter()
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
        disk = opened()
        if at < extent.offsets["unit0"]:  # header and tokens: found at the start
            assert not disk.extents and disk.dropped.total() == 1 and not path.exists()
        else:
            (found,) = disk.extents
            name = max((n for n in piece.arrays if extent.offsets[n] <= at), key=lambda n: extent.offsets[n])
            row = (at - extent.offsets[name]) // extent.arrays[name][1]
            for other in set(range(extent.arrays[name][0])) - {row}:
                got = read(disk, found, {name: (other, other + 1)})
                assert np.array_equal(got[name], piece.arrays[name][other : other + 1])
            assert read(disk, found) is Lost.DAMAGED
            assert not disk.extents and disk.dropped == {Lost.DAMAGED: 1} and not path.exists()
            assert read(disk, found) is Lost.VANISHED and disk.dropped.total() == 1
        disk.check()
        assert disk.used_bytes == 0
        seen += disk.dropped
        disk.close()
    assert seen[Lost.DAMAGED] + seen[Lost.TRUNCATED] == len(good) > 800


def test_a_cut_or_an_addition_anywhere_is_found(opened, small):
    _, _, path, good = small
    seen: Counter[str] = Counter()
    for content in [good[:length] for length in range(len(good))] + [good + b"\0"]:
        path.write_bytes(content)
        disk = opened()
        assert not disk.extents and not path.exists() and not disk.used_bytes
        seen += disk.dropped
        disk.close()
    assert seen == {Lost.TRUNCATED: len(good), Lost.DAMAGED: 1}


def test_a_file_that_is_cut_while_in_use_is_found(opened, small):
    piece, _, path, good = small
    disk = opened()
    os.truncate(path, len(good) - 6)
    (extent,) = disk.extents
    assert np.array_equal(read(disk, extent, {"unit0": (0, 2)})["unit0"], piece.arrays["unit0"][:2])
    assert read(disk, extent) is Lost.TRUNCATED
    disk.check()


def test_a_renamed_file_is_found(opened, small):
    _, extent, path, _ = small
    for at in range(32):
        other = extent.name[:at] + ("0" if extent.name[at] != "0" else "1") + extent.name[at + 1 :]
        shutil.copy(path, path.with_stem(other))
    disk = opened()
    assert [found.name for found in disk.extents] == [extent.name] and disk.dropped == {Lost.DAMAGED: 32}
    disk.check()


def test_files_of_another_model_or_format_are_dropped(opened, small, folder):
    _, own, path, good = small
    other = opened(identity="beef")
    extent = written(other, made())
    other.close()
    shutil.move(folder.parent / "beef" / f"{extent.name}.safetensors", folder)
    header, data = good[8 : own.offsets["tokens"]], good[own.offsets["tokens"] :]
    for text in [b'{"x":{}}', header + b" " * 8]:  # properly named, but of no format of ours; said in another way
        start = len(text).to_bytes(8, "little") + text
        (folder / f"{digest(start).hex()}.safetensors").write_bytes(start + data)
    disk = opened()
    assert disk.dropped == {Lost.FOREIGN: 3} and len(disk.extents) == 1 and path.exists()
    disk.check()


def test_links_folders_and_pipes_are_foreign_and_other_files_are_left_alone(opened, small, folder, tmp_path):
    _, _, path, good = small
    outside = tmp_path / "outside.safetensors"
    path.rename(outside)
    path.symlink_to(outside)
    (folder / f"{'a' * 32}.safetensors").mkdir()
    os.mkfifo(folder / f"{'b' * 32}.safetensors")
    (folder / "notes.txt").write_text("mine")
    (folder / f"{'A' * 32}.safetensors").write_text("mine too")
    (folder / f"{'c' * 32}.part").write_bytes(b"half")
    (folder / "about.json.part").symlink_to(outside)
    disk = opened()
    assert disk.dropped == {Lost.FOREIGN: 3} and not disk.extents
    assert outside.read_bytes() == good and not path.exists()
    assert set(files(folder)) == {"lock", "notes.txt", f"{'A' * 32}.safetensors", f"{'a' * 32}.safetensors"}
    assert disk.failures.total() == 1  # the folder, which is not ours to empty
    disk.check()


def test_a_link_in_place_of_a_file_in_use_is_not_followed(opened, tmp_path, folder):
    disk, piece = opened(), made()
    extent = written(disk, piece)
    path = folder / f"{extent.name}.safetensors"
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    assert read(disk, extent) is Lost.FOREIGN
    assert (tmp_path / "moved").exists() and not path.is_symlink()


def test_a_file_that_vanished(opened, folder):
    disk = opened()
    one, other = written(disk, made()), written(disk, made())
    for extent in (one, other):
        os.unlink(folder / f"{extent.name}.safetensors")
    assert read(disk, one) is Lost.VANISHED and disk.dropped == {Lost.VANISHED: 1}
    disk.delete(one)  # dropped already
    disk.delete(other)
    disk.delete(other)
    disk.check()
    assert disk.used_bytes == 0 and not disk.failures


def test_the_folder_vanished(opened, folder):
    disk = opened()
    extent = written(disk, made())
    shutil.rmtree(folder)
    assert written(disk, made()) is None and disk.failures == {"write ENOENT": 1}
    assert read(disk, extent) is Lost.VANISHED
    disk.check()


def test_a_full_disk(opened, monkeypatch, folder):
    clock, real = Clock(), os.write
    disk = opened(clock=clock)
    kept = written(disk, made())
    room = 2000

    def scarce(fd, data):
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = real(fd, data[:room])
        room -= count
        return count

    monkeypatch.setattr(os, "write", scarce)
    large = made(unit0=(40, 100))
    for pause in [PAUSE, 2 * PAUSE, 4 * PAUSE]:
        got: list = []
        assert disk.write(large, got.append) and disk.write(large, got.append)
        disk.drain()
        assert got == [None, None], "the second is not even tried"
        disk.check()
        assert disk.used_bytes == kept.nbytes and not disk.room_for(1) and not disk.write(made(), got.append)
        clock.now += pause * 0.99
        assert not disk.ready()
        clock.now += pause * 0.01
    assert disk.failures == {"write ENOSPC": 3} and same(made(), read(disk, kept))
    room = PLENTY
    assert same(large, read(disk, written(disk, large)))
    room = 0
    assert written(disk, large) is None
    clock.now += PAUSE  # a write that succeeds forgives the earlier failures
    assert disk.ready()
    assert not any(name.endswith(".part") for name in files(folder))


def test_pauses_do_not_grow_forever(opened, monkeypatch):
    clock = Clock()
    disk = opened(clock=clock)

    def broken(fd, data):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "write", broken)
    for _ in range(12):
        assert written(disk, made()) is None
        clock.now += LONGEST_PAUSE
    assert disk.failures == {"write EIO": 12}
    disk.check()


def test_a_process_that_may_write_small_files_only(tmp_path):
    out = subprocess.run(child("starve", tmp_path, 20_000), check=True, capture_output=True, text=True).stdout
    expected = {"outcomes": [True, False, True, False, False, True], "failures": {"write EFBIG": 3}, "files": 3}
    assert json.loads(out) == expected


def test_an_extent_that_fits_exactly_and_one_that_does_not(opened):
    piece = made()
    size = extent_size(IDENTITY, 0, piece.end, piece.shapes, piece.meta)
    disk = opened(2 * size)
    assert disk.size_of(0, piece.end, piece.shapes, piece.meta) == size and disk.room_for(2 * size)
    assert not disk.room_for(2 * size + 1)
    one = written(disk, piece)
    assert written(disk, piece) and disk.free_bytes == 0
    assert (
        not disk.room_for(1) and not disk.write(piece, pytest.fail) and not disk.write(piece, pytest.fail, paced=False)
    )
    disk.delete(one)
    assert disk.free_bytes == size and written(disk, piece)
    disk.check()
    disk.close()
    disk = opened(size)
    assert disk.free_bytes == -size and len(disk.extents) == 2
    disk.delete(disk.extents[0])
    assert disk.free_bytes == 0
    disk.check()


def test_the_description_counts(opened, folder):
    for _ in range(2):
        disk = opened(describe={"model": "toy"})
        assert json.loads((folder / "about.json").read_text()) == {"model": "toy"}
        assert disk.used_bytes == os.path.getsize(folder / "about.json")
        disk.close()
    os.unlink(folder / "about.json")
    assert opened(3, describe={"model": "toy"}).used_bytes == 0 and not (folder / "about.json").exists()


class Faults:
    """System calls that fail at random; after each that does not, somebody looks at the folder."""

    chances = {"write": 0.01, "replace": 0.03, "unlink": 0.1, "preadv": 0.4}  # noqa: RUF012

    def __init__(self, monkeypatch, seed: int, look) -> None:
        self.rng, self.look = np.random.default_rng(seed), look
        for name, chance in self.chances.items():
            monkeypatch.setattr(os, name, self.faulty(getattr(os, name), chance))

    def faulty(self, call, chance: float):
        def called(*args, **named):
            if self.rng.random() < chance:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            result = call(*args, **named)
            self.look()
            return result

        return called


@pytest.mark.parametrize("seed", range(6))
def test_the_budget_holds_at_every_moment(opened, monkeypatch, folder, seed):
    rng, clock, nbytes, most = np.random.default_rng(seed), Clock(), 30_000, 0
    disk = opened(nbytes, clock=clock)

    def look(_=None) -> None:
        nonlocal most
        most = max(most, sum(files(folder).values()))

    Faults(monkeypatch, seed, look)
    for step in range(400):
        move = rng.random()
        if move < 0.6:
            disk.write(made(int(rng.integers(50)), seed=step, unit0=(int(rng.integers(8)), 500)), look)
        elif disk.extents:
            victim = disk.extents[rng.integers(len(disk.extents))]
            if move < 0.9:
                disk.delete(victim)
            else:
                disk.read(victim, {"unit0": (0, victim.arrays["unit0"][0])}, look)
        if step % 7 == 0:
            disk.check()
        clock.now += 2 * LONGEST_PAUSE
    disk.check()
    assert nbytes * 0.9 < most <= nbytes
    assert disk.failures["write EIO"] and disk.failures["delete EIO"] and disk.dropped.keys() == {Lost.UNREADABLE}
    monkeypatch.undo()
    disk.close()
    disk = opened(nbytes)  # leftovers go now; extents that could not be removed are back
    disk.check()
    assert not any(name.endswith(".part") for name in files(folder))
    assert not any(isinstance(read(disk, extent), Lost) for extent in disk.extents)


def test_the_rate(opened):
    clock = Clock()
    piece = made(unit0=(10, 1000))
    size = extent_size(IDENTITY, 0, piece.end, piece.shapes, piece.meta)
    disk = opened(clock=clock, write_rate=size)  # one a second
    assert BURST * size < size, "one is more than a burst, and may be written all the same"
    count = 0
    for _ in range(1000):
        count += disk.write(piece, lambda extent: None)
        clock.now += 0.01
    assert count == 11  # 10 seconds, a part of the burst, and what was more than allowed in the end
    clock.now += 1000  # a long rest is worth a burst
    assert disk.write(piece, lambda extent: None) and not disk.ready() and not disk.room_for(1)
    assert not disk.write(piece, pytest.fail) and disk.write(piece, lambda extent: None, paced=False)
    disk.drain()
    assert len(disk.extents) == 13 and disk.written_bytes == 13 * size


@pytest.fixture
def gate(monkeypatch):
    """Writes to files wait until it is set; `reached` tells that one does."""
    gate, real = threading.Event(), os.write
    gate.reached = threading.Event()

    def waiting(fd, data):
        gate.reached.set()
        assert gate.wait(60)
        return real(fd, data)

    monkeypatch.setattr(os, "write", waiting)
    yield gate
    gate.set()


def test_nobody_waits_for_a_slow_disk_and_reads_come_first(opened, gate):
    gate.set()
    disk = opened(queue_bytes=20_000)
    piece = made(unit0=(10, 1000))
    extent, victim = written(disk, piece), written(disk, piece)
    gate.clear()
    gate.reached.clear()
    order: list[str] = []
    assert disk.write(piece, lambda extent: order.append("first write"))
    assert gate.reached.wait(60)
    assert disk.write(piece, lambda extent: order.append("second write"))
    assert not disk.ready() and not disk.write(piece, pytest.fail), "the queue has its bound"
    disk.touch(extent)
    disk.delete(victim)
    disk.read(extent, {"unit0": (3, 5)}, lambda rows: order.append("read"))
    assert disk.used_bytes == 3 * extent.nbytes and order == []
    gate.set()
    disk.drain()
    assert order == ["read", "first write", "second write"]
    disk.check()


def test_files_are_touched_by_the_thread_alone(opened, monkeypatch):
    disk, users = opened(), set()

    def watched(call):
        def called(*args, **named):
            users.add(threading.current_thread().name)
            return call(*args, **named)

        return called

    for call in ["open", "write", "pread", "preadv", "replace", "unlink", "utime", "stat", "fstat", "listdir"]:
        monkeypatch.setattr(os, call, watched(getattr(os, call)))
    extent = written(disk, made())
    assert disk.room_for(1)
    disk.touch(extent)
    read(disk, extent)
    disk.delete(extent)
    disk.drain()
    assert users == {"bough-disk"}


def test_abandoning_gives_up_queued_writes_alone(opened, gate):
    gate.set()
    disk = opened()
    extent = written(disk, made())
    gate.clear()
    wrote: list = []
    got: list = []
    for _ in range(3):
        disk.write(made(), wrote.append)
    disk.read(extent, {"unit0": (0, 3)}, got.append)
    threading.Timer(0.05, gate.set).start()
    disk.close(abandon=True)
    assert wrote[1:] == [None, None] and len(got) == 1 and disk.used_bytes == sum(e.nbytes for e in disk.extents)
    disk.close()
    assert len(opened().extents) == len(disk.extents)


def test_closing_finishes_what_is_queued(opened):
    disk = opened()
    wrote: list = []
    for _ in range(5):
        disk.write(made(), wrote.append, paced=False)
    disk.close()
    assert len(wrote) == len(opened().extents) == 5 and None not in wrote
    with pytest.raises(AssertionError, match="closed"):
        disk.touch(wrote[0])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_callback_that_raises_does_not_leave_others_waiting(opened):
    disk = opened()
    disk.write(made(), lambda extent: 1 / 0)
    disk.drain()
    with pytest.raises(AssertionError, match="raised"):
        disk.write(made(), pytest.fail)
    disk.close()
    assert len(opened().extents) == 1


def child(what: str, folder: Path, number: int = 0) -> list[str]:
    return [sys.executable, disk_child.__file__, what, str(folder), str(number)]


@contextlib.contextmanager
def running(what: str, folder: Path, number: int = 0):
    """A child that has opened the folder; killed in the end."""
    with subprocess.Popen(child(what, folder, number), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n" or process.wait() == -signal.SIGKILL
            yield process
        finally:
            process.kill()


def test_one_process_has_the_folder_until_it_dies(opened, tmp_path):
    with running("hold", tmp_path):
        with pytest.raises(DiskUnavailable, match="in use by another process; stop that one"):
            opened()
        assert opened(identity="beef").extents == []
        assert scan(tmp_path) == []
    written(opened(), made())
    with pytest.raises(DiskUnavailable, match="in use"):
        opened()


def survivors(opened, folder: Path) -> int:
    """Reopens after a kill; every extent must be what its turn says. Returns how many there are."""
    disk = opened(100_000)
    assert not disk.dropped and not disk.failures and disk.used_bytes <= 100_000
    assert not any(name.endswith(".part") for name in files(folder))
    ordered, stranded = connect(disk.extents)
    paths = dict(ordered)
    assert len(paths) + len(stranded) == len(disk.extents)
    for extent in disk.extents:
        piece = turn(extent.meta["index"])
        assert (extent.salt, extent.path, extent.start, extent.end) == (piece.salt, piece.path, piece.start, piece.end)
        assert np.array_equal(extent.tokens, piece.tokens) and same(piece, read(disk, extent))
        if extent in paths:
            assert np.array_equal(paths[extent], np.arange(extent.end))
    disk.check()
    count = len(disk.extents)
    disk.close()
    return count


def killed_in_calls(opened, tmp_path, calls) -> list[int]:
    """Returns how many temporary files each kill left behind."""
    left = []
    for number in calls:
        with running("write", tmp_path, number) as process:
            assert process.wait(60) == -signal.SIGKILL
        left.append(sum(name.endswith(".part") for name in files(tmp_path / IDENTITY)))
        survivors(opened, tmp_path / IDENTITY)
    return left


def test_a_kill_in_a_system_call_loses_what_was_being_written(opened, tmp_path):
    # in the description; in a header, its extent's tokens and a row; before its rename; deep in evictions
    assert killed_in_calls(opened, tmp_path, [1, 1, 2, 5, 8, 300])[:5] == [1] * 5
    assert survivors(opened, tmp_path / IDENTITY) > 5


@pytest.mark.long
def test_a_kill_in_any_system_call(opened, tmp_path):
    left = killed_in_calls(opened, tmp_path, range(1, 80))
    assert set(left) == {0, 1}


@pytest.mark.long
def test_a_hundred_kills_at_random_moments(opened, tmp_path):
    rng = np.random.default_rng(0)
    for _ in range(100):
        with running("write", tmp_path) as process:
            time.sleep(rng.exponential(0.05))
            process.kill()
        count = survivors(opened, tmp_path / IDENTITY)
    assert count > 5


def test_modes(opened, folder):
    written(opened(describe={}), made())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_last_use_survives(opened):
    disk = opened()
    extent, other = written(disk, made()), written(disk, made())
    written_at = extent.used
    assert abs(written_at - time.time()) < 60
    disk.touch(extent)
    assert extent.used >= written_at
    disk.close()
    again = {found.name: found.used for found in opened().extents}
    assert again[extent.name] == pytest.approx(extent.used, abs=1e-3)
    assert again[other.name] == pytest.approx(other.used, abs=1)


def test_a_folder_that_cannot_be_used_says_why(opened, tmp_path, monkeypatch):
    def fails(path: Path, match: str) -> None:
        with pytest.raises(DiskUnavailable, match=f"{match}; make it a folder that this user can write to"):
            Disk.open(path, PLENTY, identity=IDENTITY, write_rate=1)

    file = tmp_path / "file"
    file.touch()
    fails(file, "File exists")
    fails(file / "below", "Not a directory")
    fails(Path("/proc/none/such"), "No such file or directory")
    target = tmp_path / "elsewhere"
    target.mkdir()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / IDENTITY).symlink_to(target)
    fails(tmp_path / "linked", "Not a directory")
    assert list(target.iterdir()) == []
    monkeypatch.setattr(os, "access", lambda *args, **named: False)
    fails(tmp_path, "not writable")
    monkeypatch.undo()
    (tmp_path / "user").symlink_to(target)  # this one the user has chosen
    Disk.open(tmp_path / "user", PLENTY, identity=IDENTITY, write_rate=1).close()
    opened()


def test_scanning_a_folder_in_use_changes_nothing(opened, tmp_path, folder):
    disk, other = opened(), opened(identity="beef")
    extents = [written(disk, made()), written(disk, made()), written(other, made())]
    (folder / f"{'a' * 32}.safetensors").write_bytes(b"damaged")
    (folder / f"{'a' * 32}.part").write_bytes(b"being written")
    (tmp_path / "dead").write_bytes(b"")
    (tmp_path / "feed").symlink_to(folder)
    before = files(folder)
    assert {(e.identity, e.name) for e in scan(tmp_path)} == {(e.identity, e.name) for e in extents}
    assert files(folder) == before
    with pytest.raises(DiskUnavailable, match="name the folder of a disk cache"):
        scan(tmp_path / "nowhere")


@st.composite
def pieces(draw) -> list[tuple[str, list[int], int]]:
    """(salt, path, start): pieces of paths that have much in common."""
    tokens = st.lists(st.integers(0, 2), max_size=12)
    paths = draw(st.lists(st.tuples(st.sampled_from("ab"), tokens), min_size=1, max_size=6))
    drawn = []
    for _ in range(draw(st.integers(0, 14))):
        salt, path = draw(st.sampled_from(paths))
        end = draw(st.integers(0, len(path)))
        drawn.append((salt, path[:end], draw(st.integers(0, end))))
    return drawn


@given(pieces())
def test_connecting_finds_what_can_be_reached(drawn):
    truth: dict[Extent, tuple[str, list[int], int]] = {}
    for salt, path, start in drawn:
        tokens, key = np.array(path, np.int32), salt_key(salt)
        piece = Piece(key, PathDigest(key, tokens[:start]).digest(), start, tokens[start:], {})
        truth[Extent.of(piece, IDENTITY)] = (salt, path, start)

    def leads_to(parent: Extent, extent: Extent) -> bool:
        (salt, path, start), (other, before, first) = truth[extent], truth[parent]
        return salt == other and first <= start <= len(before) and before[:start] == path[:start]

    reached = {extent for extent in truth if extent.start == 0}
    while more := {e for e in truth if e not in reached and any(leads_to(parent, e) for parent in reached)}:
        reached |= more
    ordered, stranded = connect(truth)
    seen: list[Extent] = []
    for extent, path in ordered:
        assert path.tolist() == truth[extent][1] and path.dtype == np.int32
        assert extent.start == 0 or any(leads_to(parent, extent) for parent in seen)
        seen.append(extent)
    assert set(seen) == reached and len(seen) == len(reached)
    assert set(stranded) == truth.keys() - reached and len(seen) + len(stranded) == len(truth)


def test_connecting_a_long_conversation_keeps_few_paths():
    """Its paths together are 3,000 times as long as the longest; one is made at a time."""
    path, extents = PathDigest(NOBODY), []
    for start in range(3000):
        tokens = np.array([start], np.int32)
        extents.append(Extent.of(Piece(NOBODY, path.digest(), start, tokens, {}), IDENTITY))
        path.extend(tokens)
    ordered, stranded = connect(reversed(extents))
    assert [extent for extent, _ in ordered] == extents and not stranded
