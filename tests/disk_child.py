"""What test_disk.py runs in a process of its own, to hold, to starve or to kill: `disk_child.py WHAT FOLDER NUMBER`."""

import json
import os
import resource
import signal
import sys
import time

import numpy as np

from bough.cache.disk import Disk
from bough.cache.extent import PathDigest, Piece, salt_key

IDENTITY = "c0ffee"
TURN = 24  # tokens


def turn(index: int) -> Piece:
    """Turn number `index` of a few conversations; the same one whenever it is asked for."""
    rng = np.random.default_rng(index)
    salt, depth = salt_key(f"tenant {index % 3}"), index // 3 % 5
    path = np.arange(depth * TURN, dtype=np.int32)
    tokens = np.arange(depth * TURN, (depth + 1) * TURN, dtype=np.int32)
    arrays = {
        "unit0": rng.integers(0, 256, (5, 700), np.uint8),
        "unit1": rng.integers(0, 256, (index % 3, 2000), np.uint8),
    }
    return Piece(salt, PathDigest(salt, path).digest(), depth * TURN, tokens, arrays, {"index": index})


def open_disk(folder: str, nbytes: int = 100_000) -> Disk:
    return Disk.open(folder, nbytes, identity=IDENTITY, write_rate=1e12, describe={"model": "none"})


def hold(folder: str, _: int) -> None:
    disk = open_disk(folder)
    print("ready", flush=True)
    time.sleep(60)
    disk.close()


def write(folder: str, calls: int) -> None:
    """Writes, reads and deletes without end; dies in the given system call of the disk's thread, or is killed."""
    left = calls

    def mortal(call):
        def called(*args, **named):
            nonlocal left
            left -= 1
            if left == 0:
                if call is os_write:
                    os_write(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **named)

        return called

    os_write = os.write
    os.write, os.replace, os.unlink = mortal(os.write), mortal(os.replace), mortal(os.unlink)
    disk = open_disk(folder)
    print("ready", flush=True)
    rng = np.random.default_rng(calls)
    first = max((extent.meta["index"] for extent in disk.extents), default=-1) + 1
    for index in range(first, first + 100_000):
        while not disk.write(turn(index), lambda extent: None):
            victim = disk.extents[rng.integers(len(disk.extents))] if disk.extents else None
            if victim is not None:
                disk.read(victim, {"unit0": (0, 5)}, lambda rows: None)
                disk.delete(victim)
            disk.drain()


def starve(folder: str, limit: int) -> None:
    """Files may not grow beyond `limit` bytes: large extents fail, small ones do not."""
    clock = hasty_clock()
    disk = Disk.open(folder, 10_000_000, identity=IDENTITY, write_rate=1e12, clock=clock)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    outcomes: list[bool] = []
    small = turn(0)
    large = Piece(small.salt, small.path, 0, small.tokens, {"unit0": np.zeros((100, limit // 50), np.uint8)}, {})
    for piece in [small, large, turn(1), large, large, turn(2)]:
        assert disk.write(piece, lambda extent: outcomes.append(extent is not None))
        disk.check()
    print(json.dumps({"outcomes": outcomes, "failures": disk.failures, "files": len(disk.extents)}))
    disk.close()


def hasty_clock():
    """A clock on which more than the longest pause passes from one look to the next."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 100.0
        return now

    return clock


if __name__ == "__main__":
    what, folder, number = sys.argv[1:]
    {"hold": hold, "write": write, "starve": starve}[what](folder, int(number))
