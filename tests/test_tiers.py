"""The tiers below the device: what leaves it comes back right, or not at all, whatever happens to disk and process."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from test_prefix_cache import EVERY, POINTS, ask, some
from timeline import Watched, agrees, audit, empty, engine, params, room

from bough import Engine
from bough.cache.disk import Disk
from bough.cache.tree import Tier
from bough.state.pool import Pool

ROOMY = {"disk_write_rate": 1 << 40, "disk_bytes": 1 << 24}


@pytest.fixture(params=EVERY)
def family(request):
    return request.param


@pytest.fixture
def opened(family, tmp_path):
    """Opens engines of one family on one folder, with the options given, and closes them in the end."""
    made: list[Engine] = []

    def open_engine(**options) -> Watched:
        made.append(engine(family, **{"disk_path": tmp_path, **ROOMY, **options}))
        return Watched(made[-1])

    yield open_engine
    for each in made:
        each.close()


def away(watched: Watched, *, written: bool = True) -> None:
    """Everything has to leave the device, after it was written to disk."""
    tiers = watched.engine._loop.cache.tiers

    def evict() -> None:
        while tiers.evict(Tier.DEVICE):
            pass

    if written:
        watched.engine.cache.flush()
    watched.engine.call(evict)
    assert all(store.used == 1 for store in watched.engine._runner.pool.stores)


def where(watched: Watched, prompt: list[int]) -> str:
    """On which tiers a prompt is held."""
    return " ".join(tiers for _, _, tiers in watched.engine.cache.explain(prompt).held)


def extents(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.safetensors"))


class Gate:
    """Lets the disk's thread read only when it is opened."""

    def __init__(self, watched: Watched) -> None:
        disk = watched.engine._loop.cache.tiers.shelf.disk
        self.open, self.asked, rows = threading.Event(), threading.Semaphore(0), disk._rows

        def gated(*args):
            self.asked.release()
            assert self.open.wait(60)
            return rows(*args)

        disk._rows = gated


# Down and up again.


def test_to_the_host_and_back(family, opened):
    watched, prompt = opened(disk_path=None, host_bytes=4 << 20), some(33)
    ask(family, watched, prompt)
    ask(family, watched, [*prompt[:20], 61, 62])
    used = watched.engine.used_bytes
    away(watched)
    assert "host" in where(watched, prompt) and "device" not in where(watched, prompt)
    assert watched.engine.cache.stats()["bytes"]["host"]["used"] >= used, "it has a scratch of its own"
    assert ask(family, watched, prompt) == 32
    assert ask(family, watched, [*prompt[:20], 63]) == 20
    assert watched.engine.cache.stats()["nodes_promoted_from_host"]
    audit(watched.engine)
    empty(watched.engine)


@pytest.mark.parametrize("host_bytes", [0, 4 << 20])
def test_to_disk_and_back(family, opened, host_bytes):
    watched, prompt = opened(host_bytes=host_bytes), some(33)
    ask(family, watched, prompt)
    ask(family, watched, [*prompt[:20], 61, 62])
    away(watched)
    assert "disk" in where(watched, prompt) and "device" not in where(watched, prompt)
    assert ask(family, watched, prompt) == 32
    assert ask(family, watched, [*prompt[:20], 63]) == 20
    assert watched.engine.cache.stats()["nodes_promoted_from_disk"]
    audit(watched.engine)
    empty(watched.engine)


def test_a_part_of_what_is_on_disk(family, opened):
    """Only what a prompt asks for is read, from the middle of an extent if need be."""
    watched, prompt = opened(), some(50)
    watched.engine.submit(prompt, params(0), boundaries=[9, 22]).result()
    away(watched)
    for at in (22, 9):
        assert ask(family, watched, [*prompt[:at], 61]) == at
        away(watched)
    if family not in POINTS:
        assert ask(family, watched, [*prompt[:35], 61]) == 35
    audit(watched.engine)


def test_a_restart(family, opened):
    watched, prompt = opened(), some(33)
    ask(family, watched, prompt, tokens=4)
    ask(family, watched, [*prompt[:20], 61, 62])
    ask(family, watched, some(12, seed=1), salt="a")
    watched.engine.close()
    for _ in range(2):
        watched = opened()
        assert watched.engine.cache.stats()["stranded_extents_dropped"] == 0
        assert ask(family, watched, [*prompt[:20], 63]) == 20
        assert ask(family, watched, prompt) == 32
        assert ask(family, watched, some(12, seed=1)) == 0
        watched.engine.cache.clear()
        assert ask(family, watched, some(12, seed=1), salt="a") == 0
        ask(family, watched, some(12, seed=1), salt="a")
        ask(family, watched, prompt)
        ask(family, watched, [*prompt[:20], 61, 62])
        ask(family, watched, [*prompt[:20], 60, 62])
        audit(watched.engine)
        watched.engine.close()


def test_a_smaller_budget_after_a_restart(family, opened, tmp_path):
    watched = opened()
    for seed in range(6):
        ask(family, watched, some(30, seed=seed))
    watched.engine.close()
    size = sum(path.stat().st_size for path in tmp_path.glob("*/*"))
    watched = opened(disk_bytes=size // 2)
    audit(watched.engine)
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= size // 2
    left = [seed for seed in range(6) if watched.engine.cache.explain(some(30, seed=seed)).resumable]
    assert 0 < len(left) < 6
    assert ask(family, watched, some(30, seed=left[0])) > 0
    for seed in range(6):
        ask(family, watched, some(30, seed=seed))
        audit(watched.engine)


def test_another_model_finds_nothing(family, opened, tmp_path):
    watched, prompt = opened(), some(20)
    ask(family, watched, prompt)
    watched.engine.close()
    other = EVERY[EVERY.index(family) - 1]
    with engine(other, disk_path=tmp_path, **ROOMY) as stranger:
        assert ask(other, Watched(stranger), prompt) == 0
    assert ask(family, opened(), prompt) == 19


def test_other_pages_find_nothing(family, opened):
    watched, prompt = opened(), some(20)
    ask(family, watched, prompt)
    watched.engine.close()
    assert ask(family, opened(page_tokens=8), prompt) == 0


# Damage.


def flip(path: Path, dice: Random) -> None:
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


def cut(path: Path, dice: Random) -> None:
    os.truncate(path, dice.randrange(path.stat().st_size))


def swap(path: Path, dice: Random) -> None:
    path.write_bytes(dice.choice(extents(path.parent.parent)).read_bytes())


def vanish(path: Path, dice: Random) -> None:
    path.unlink()


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma4", "qwen3_5"])
@pytest.mark.parametrize("harm", [flip, cut, swap, vanish])
@pytest.mark.parametrize("when", ["closed", "open"])
def test_damage_is_found_counted_and_computed_again(family, opened, tmp_path, harm: Callable, when: str):
    """In every extent, or in some; before the folder is opened, or behind the engine's back."""
    dice, prompts = Random(1), [some(33), [*some(20), 61, 62, 63], some(9, seed=2)]
    for share in (1.0, 0.4):
        watched = opened()
        for prompt in prompts:
            ask(family, watched, prompt)
        if when == "closed":
            watched.engine.close()
        else:
            away(watched)
        for path in extents(tmp_path):
            if dice.random() < share:
                harm(path, dice)
        if when == "closed":
            watched = opened()
        for prompt in prompts:
            ask(family, watched, prompt)
        watched.engine.cache.flush()
        audit(watched.engine, tampered=True)
        stats = watched.engine.cache.stats()
        lost = sum(stats.get(f"extents_dropped_{why}", 0) for why in ("damaged", "truncated", "foreign", "vanished"))
        assert lost or share < 1 or (harm, when) in ((vanish, "closed"), (flip, "open"))  # not all is read
        for prompt in prompts:
            assert ask(family, watched, prompt) == len(prompt) - 1
        watched.engine.close()
        watched = opened()  # what was computed again was written again; damage that nobody came across is found now
        for prompt in prompts:
            assert ask(family, watched, prompt) == len(prompt) - 1 or when == "open"
        watched.engine.cache.clear()
        audit(watched.engine)
        watched.engine.close()


def test_foreign_files_are_left_alone_or_dropped(family, opened, tmp_path):
    watched, prompt = opened(), some(20)
    ask(family, watched, prompt)
    watched.engine.close()
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    (folder / "README").write_text("mine")
    (folder / f"{'0' * 32}.safetensors").write_bytes(b"\0" * 100)
    (folder / f"{'1' * 32}.part").write_bytes(b"half an extent")
    (folder / f"{'2' * 32}.safetensors").mkdir()
    (tmp_path / "elsewhere").mkdir()
    watched = opened()
    assert ask(family, watched, prompt) == 19
    stats = watched.engine.cache.stats()
    assert stats["extents_dropped_damaged"] == 1 and stats["extents_dropped_foreign"] == 1
    assert (folder / "README").read_text() == "mine" and not list(folder.glob("*.part"))
    shutil.rmtree(folder / f"{'2' * 32}.safetensors")


# A disk that does not do what it should.


def test_a_full_disk(family, opened, monkeypatch):
    watched, prompt = opened(), some(33)

    def full(*_):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(Disk, "_put", full)
    for _ in range(2):
        ask(family, watched, prompt)
    watched.engine.cache.flush()
    assert ask(family, watched, some(40, seed=1)) == 0
    stats = watched.engine.cache.stats()
    assert stats["disk_failures_write ENOSPC"] and stats["writes_failed"]
    away(watched, written=False)
    assert ask(family, watched, prompt) == 0, "it is lost, and computed again"
    assert watched.engine.cache.stats()["nodes_lost_before_they_were_written"]
    audit(watched.engine)
    empty(watched.engine)


@pytest.mark.parametrize("disk_bytes", [1, 700, 3000])
def test_a_tiny_disk(family, opened, disk_bytes):
    watched = opened(disk_bytes=disk_bytes)
    for seed in (0, 1, 0, 2):
        ask(family, watched, some(33, seed=seed))
        ask(family, watched, [*some(25, seed=seed), 61, 62])
        away(watched)
        audit(watched.engine)
    watched.engine.close()


def test_a_slow_disk_holds_nobody_up(family, opened):
    """A byte a second: nothing but a first burst is written, until the engine is closed."""
    watched = opened(disk_write_rate=1)
    for seed in range(5):
        ask(family, watched, some(30, seed=seed))
    audit(watched.engine)


def test_two_engines_on_one_folder(family, opened):
    watched, prompt = opened(), some(20)
    ask(family, watched, prompt)
    with pytest.warns(RuntimeWarning, match=r"in use by another process.*disk_path.*without a disk cache"):
        second = opened()
    assert ask(family, second, prompt) == 0
    assert "disk" not in second.engine.cache.stats()["bytes"]
    watched.engine.close()
    second.engine.close()
    assert ask(family, opened(), prompt) == 19


def test_a_folder_that_cannot_be_used(family, opened, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="without a disk cache"):
        watched = opened(disk_path=tmp_path / "file")
    assert ask(family, watched, some(10)) == 0


# While something is being read.


def test_cancelled_while_it_waits_for_the_disk(family, opened):
    watched, prompt = opened(), some(33)
    ask(family, watched, prompt)
    away(watched)
    gate = Gate(watched)
    handle = watched.engine.submit(prompt, params())
    gate.asked.acquire()
    handle.cancel()
    ask(family, watched, some(12, seed=1))  # others are served meanwhile
    assert handle.result().finish_reason == "cancelled"
    watched.engine.cache.clear()
    gate.open.set()
    watched.engine.cache.flush()
    audit(watched.engine)
    ask(family, watched, prompt)
    audit(watched.engine)


def test_split_while_it_is_read(family, opened):
    """A path that is being read is left in the middle by others, who read parts of it."""
    watched, prompt = opened(), some(40)
    ask(family, watched, prompt)
    away(watched)
    gate = Gate(watched)
    requests = [
        (prompt, params()),
        ([*prompt[:30], 61], params(2)),
        ([*prompt[:13], 61], params(2)),
        (prompt, params()),
    ]
    handles = [watched.engine.submit(*request) for request in requests]
    gate.asked.acquire()
    watched.engine.call(lambda: None)
    gate.open.set()
    for (text, asked), handle in zip(requests, handles, strict=True):
        assert agrees(family, text, asked, handle.result())
    assert handles[0].result().usage.cached_tokens == handles[3].result().usage.cached_tokens == 39
    audit(watched.engine)


def test_computed_by_another_while_it_is_read(family, opened):
    """One waits for the disk; another, with the same beginning, has no time for that."""
    watched, prompt = opened(), some(40)
    ask(family, watched, prompt)
    away(watched)
    gate = Gate(watched)
    handle = watched.engine.submit(prompt, params())
    gate.asked.acquire()
    state_of = watched.engine._loop.cache.acquire
    watched.engine._loop.cache.acquire = lambda tokens, salt, everywhere: state_of(tokens, salt, everywhere=False)
    assert ask(family, watched, [*prompt, *some(5, seed=1)]) == 0
    watched.engine._loop.cache.acquire = state_of
    gate.open.set()
    assert agrees(family, prompt, params(), handle.result())
    assert handle.result().usage.cached_tokens == 39
    audit(watched.engine)


def test_no_room_for_what_was_read(family, opened):
    """Memory that was there when reading began is gone when it ends."""
    least = room(family, 60, page_tokens=4, running=2, step=16)
    watched, prompt = opened(running=2, step=16, device_bytes=int(1.5 * least)), some(50)
    ask(family, watched, prompt)
    away(watched)
    gate = Gate(watched)
    handle = watched.engine.submit(prompt, params())
    gate.asked.acquire()
    long = params(20, ignore_eos=True)
    forward = watched.engine._runner.forward

    def let_go(*args, **options):
        if watched.steps == begun + 6:
            gate.open.set()
        return forward(*args, **options)

    begun, watched.engine._runner.forward = watched.steps, let_go
    (out,) = watched.ask([(some(39, seed=1), long)])
    watched.engine._runner.forward = forward
    gate.open.set()
    assert agrees(family, some(39, seed=1), long, out)
    assert agrees(family, prompt, params(), handle.result())
    audit(watched.engine)


def test_what_is_on_the_host_follows_what_is_on_disk(family, opened):
    """A path's beginning is written and leaves the device; its end is not, and goes to the host."""
    watched, prompt = opened(host_bytes=4 << 20), some(24)
    ask(family, watched, prompt, tokens=0)
    watched.engine.cache.flush()
    tiers = watched.engine._loop.cache.tiers
    note, tiers.note = tiers.note, lambda node: None
    ask(family, watched, [*prompt, *some(12, seed=1)], tokens=0)
    away(watched, written=False)
    tiers.note = note
    held = where(watched, [*prompt, *some(12, seed=1)])
    assert "disk" in held and "host" in held and "device" not in held
    assert ask(family, watched, [*prompt, *some(12, seed=1)]) == 35
    audit(watched.engine)


def test_evicted_while_it_is_written(family, opened):
    """The disk is busy; what it has yet to write goes, is merged, and comes again."""
    watched, prompt = opened(), some(30)
    disk = watched.engine._loop.cache.tiers.shelf.disk
    gate, put = threading.Event(), disk._put

    def slow(*args):
        assert gate.wait(60)
        return put(*args)

    disk._put = slow
    ask(family, watched, prompt)
    ask(family, watched, [*prompt[:11], 61])
    away(watched, written=False)
    ask(family, watched, prompt)
    watched.engine.cache.clear()
    ask(family, watched, [*prompt[:20], 62])
    gate.set()
    watched.engine.cache.flush()
    audit(watched.engine)
    ask(family, watched, prompt)
    empty(watched.engine)


@pytest.mark.parametrize("family", ["llama", "gemma3", "lfm2"])
def test_parts_of_one_extent_that_were_split_and_joined(family, opened):
    """An edge is written whole, split where nothing can be resumed, and joined again: its extent is one part of it."""
    watched, prompt = opened(page_tokens=4), some(32)
    ask(family, watched, prompt, tokens=0)
    watched.engine.cache.flush()
    found = watched.engine._loop.cache

    def split_and_join() -> None:
        (node,) = (node for node in found.tree.walk() if node.start == 0)
        left = found.tree.split(node, 16)
        assert found.tree.can_merge(left)
        found.tree.merge(left)

    watched.engine.call(split_and_join)
    away(watched)
    assert ask(family, watched, prompt) == 31
    audit(watched.engine)


# Killed.


def killed(family: str, folder: Path, rounds: int, seed: int) -> dict[str, int]:
    """So many processes die while they serve; each time the next one must go on. What the last of them counted."""
    command = [
        sys.executable,
        str(Path(__file__).parent / "cache_child.py"),
        family,
        str(folder),
        str(rounds),
        str(seed),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1500, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_kill_at_any_moment(family, tmp_path):
    told = killed(family, tmp_path, rounds=5, seed=0)
    assert told["rounds"] == 5 and told["hits"]


@pytest.mark.long
@pytest.mark.parametrize("family", EVERY)
def test_kill_at_many_moments(family, tmp_path):
    told = killed(family, tmp_path, rounds=100, seed=1)
    assert told["rounds"] == 100 and told["hits"]


def test_a_host_too_small_for_anything():
    """The least pool there is holds one page of a kind: nearly nothing can be demoted, and all goes on."""
    with engine("qwen3_5", host_bytes=room("qwen3_5", 1, page_tokens=4, running=0)) as opened:
        watched = Watched(opened)
        for _ in range(2):
            ask("qwen3_5", watched, some(30))
            away(watched, written=False)
            audit(opened)
        assert isinstance(opened._loop.cache.tiers.host, Pool)
