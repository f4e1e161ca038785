"""The store: names, shared files, and what is left when processes are killed, collide, or disks lie."""

import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from storing import MADE, Children, bough_home, check, make, small_llama  # noqa: F401 (a fixture that is always used)
from test_cli import bough

from bough.errors import BadWeights, BoughError, ModelError, OptionError, RequestError
from bough.store import blobs
from bough.store.names import Name
from bough.store.store import STALE, Store


@pytest.fixture
def llama(tmp_path) -> Path:
    return small_llama(tmp_path / "llama")


def test_list_cp_rm(llama, tmp_path):
    assert "nothing is stored" in bough("list").stderr
    make("FROM ./llama\nSYSTEM one", tmp_path, "one")
    make("FROM ./llama\nSYSTEM two", tmp_path, "org/two:v1")
    assert bough("cp", "one", "three").exit_code == 0
    lines = bough("list").stdout.splitlines()
    assert lines[0].split() == ["name", "id", "family", "size", "bits", "draft", "created"]
    assert [line.split()[0] for line in lines[1:]] == ["one:latest", "three:latest", "org/two:v1"]
    assert all("llama" in line and "KiB" in line for line in lines[1:])
    store = Store()
    assert store.get(Name.parse("three")).digest == store.get(Name.parse("one")).digest
    assert bough("rm", "one", "org/two:v1").exit_code == 0
    check(store)
    assert [str(each.name) for each in store.all()] == ["three"]
    assert bough("rm", "three").exit_code == 0
    assert store.blobs.all() == [] and store.all() == []
    check(store)
    for command in (["rm", "one"], ["cp", "one", "two"]):
        done = bough(*command)
        assert done.exit_code == 1 and "there is no model 'one' in the store" in done.stderr


def test_show(llama, tmp_path):
    make("FROM ./llama\nSYSTEM be [bold]brief[/bold]\nPARAMETER stop [x]\nLICENSE MIT", tmp_path)
    done = bough("show", "made", "--verify", "--cache-bytes", "8M")
    assert done.exit_code == 0, done.stderr
    for fact in ("made (Llama)", "made:latest", "be [bold]brief[/bold]", "stop '[x]'", "MIT", "./llama", "fit at once"):
        assert fact in done.stdout
    assert "--verify compares a stored model" in bough("show", llama, "--verify").stderr


def test_a_name_is_replaced_in_one_step(llama, tmp_path):
    make("FROM ./llama\nSYSTEM one", tmp_path)
    store, seen, stop = Store(), set(), threading.Event()

    def look() -> None:
        while not stop.is_set():
            with suppress(ModelError):  # replaced between the two
                seen.add(store.get(MADE).about.system)

    watcher = threading.Thread(target=look)
    watcher.start()
    for text in ("two", "one", "two", "one"):
        make(f"FROM made\nSYSTEM {text}", tmp_path)
    stop.set()
    watcher.join()
    assert seen <= {"one", "two"} and seen
    check(store)


def test_what_goes_while_it_is_listed_is_not_there(monkeypatch):
    monkeypatch.setattr(Store, "_names", lambda store: [MADE])
    assert Store().all() == [] and Store().find(MADE) is None


def test_a_tag_may_be_added_while_another_goes(llama, tmp_path, monkeypatch):
    make("FROM ./llama", tmp_path)
    store, replace = Store(), os.replace
    store.copy(MADE, Name.parse("other:one"))
    removal = threading.Thread(target=store.remove, args=[Name.parse("other:one")])

    def meanwhile(*paths) -> None:
        removal.start()
        removal.join(0.2)  # it has to wait for this, or else it is done by then
        replace(*paths)

    monkeypatch.setattr(os, "replace", meanwhile)
    store.copy(MADE, Name.parse("other:two"))
    removal.join()
    assert [str(each.name) for each in store.all()] == ["made", "other:two"]
    check(store)


def test_damage_is_found_and_mended(llama, tmp_path):
    stored = make("FROM ./llama", tmp_path)
    weights = stored.folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.chmod(0o600)
    weights.write_bytes(data)
    done = bough("show", "made", "--verify")
    assert done.exit_code == 1 and "made is damaged in the store (model.safetensors); pull or create" in done.stderr
    make("FROM ./llama", tmp_path)
    check(Store())
    weights.chmod(0o600)
    weights.write_bytes(data[:-10])
    done = bough("run", "made", "1 2 3")
    assert done.exit_code == 1 and "damaged in the store" in done.stderr
    with pytest.raises(ModelError, match="damaged in the store"):
        make("FROM made", tmp_path, "other")
    make("FROM ./llama", tmp_path)
    check(Store())


def test_a_damaged_manifest_is_told_and_can_be_removed(llama, tmp_path):
    stored = make("FROM ./llama", tmp_path)
    store = Store()
    manifest = store._manifest(MADE)
    told = json.loads(manifest.read_text())
    for damage in ("{", "[]", json.dumps({**told, "tree": "0" * 64}), json.dumps({**told, "version": 9})):
        manifest.write_text(damage)
        with pytest.raises(ModelError, match="the entry of made in the store is damaged"):
            store.all()
        assert store.collect() == 0 and stored.folder.exists()
    store.remove(MADE)
    check(store)


def test_without_hard_links_files_are_copied(llama, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    make("FROM ./llama\nSYSTEM one", tmp_path)
    make("FROM made\nSYSTEM two", tmp_path)
    check(Store())
    Store().remove(MADE)
    check(Store())


def test_two_may_create_and_collect_at_once(llama, tmp_path):
    """Two processes' worth of threads, each with models of its own and one in common, and one that collects."""
    store, failures, stop = Store(), [], threading.Event()

    def work(name: str) -> None:
        try:
            for i in range(6):
                make(f"FROM ./llama\nSYSTEM {name if i % 2 else 'same'}", tmp_path, name)
                store.get(Name.parse(name)).require_whole()
                if i % 3 == 2:
                    store.remove(Name.parse(name))
        except BoughError as error:
            failures.append(error)

    def collect() -> None:
        while not stop.is_set():
            store.collect()

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b")]
    collector = threading.Thread(target=collect)
    for each in (*threads, collector):
        each.start()
    for each in threads:
        each.join()
    stop.set()
    collector.join()
    assert failures == []
    store.collect()
    check(store)


def test_one_name_is_made_by_one_at_a_time(llama, tmp_path):
    store = Store()
    with store.job(f"create {MADE.full}"), pytest.raises(RequestError, match="another process is at it already"):
        make("FROM ./llama", tmp_path)
    make("FROM ./llama", tmp_path)
    check(store)


def test_jobs_that_nobody_goes_on_with_are_forgotten(llama, tmp_path):
    store = Store()
    with suppress(OptionError), store.job("a job") as job:
        job.add(llama / "config.json")
        raise OptionError("broken off")
    assert store.collect() == 0 and len(store.blobs.all()) == 1
    old = time.time() - STALE - 10
    os.utime(job.folder / "journal.json", (old, old))
    assert store.collect() == (llama / "config.json").stat().st_size
    check(store)


def test_a_store_that_cannot_be_written(tmp_path, monkeypatch, llama):
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("BOUGH_HOME", str(tmp_path / "file"))
    (tmp_path / "Modelfile").write_text("FROM ./llama")
    done = bough("create", "made", "-f", tmp_path / "Modelfile")
    assert done.exit_code == 1 and "cannot be written" in done.stderr and "BOUGH_HOME" in done.stderr
    assert "nothing is stored" in bough("list").stderr


# Killed at any moment.


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    with Children() as started:
        yield started


def expect_nothing_half_made(home: Path, expected: set[str | None]) -> None:
    """The name stands for a whole model, or for none."""
    stored = Store(home / "models").find(MADE)
    assert (None if stored is None else stored.about.system) in expected
    if stored is not None:
        assert stored.damaged() == []


@pytest.mark.parametrize(
    ("what", "stride"),
    [
        ("create", 31),
        pytest.param("create", 1, marks=pytest.mark.long),
        pytest.param("quantise", 1, marks=pytest.mark.long),
    ],
)
def test_killed_creates_leave_nothing_half_made(what, stride, llama, tmp_path, children):
    """Over nothing, or over an older model of that name. What was half made is gone on with by the next."""
    (tmp_path / "old").write_text("FROM ./llama\nSYSTEM old")
    (tmp_path / "new").write_text("FROM ./llama\nSYSTEM new")
    home = tmp_path / "killed"
    total = children.count(what, home, tmp_path / "new")
    for at in range(1, total + 1, stride):
        shutil.rmtree(home)
        before: set[str | None] = {None}
        if at % 2:
            assert not children.killed("create", home, tmp_path / "old")
            before = {"old"}
        was = children.killed(what, home, tmp_path / "new", at)
        expect_nothing_half_made(home, before | {"new"} if was else {"new"})
        assert not children.killed(what, home, tmp_path / "new")
        expect_nothing_half_made(home, {"new"})
        check(Store(home / "models"))
    assert total > 50


@pytest.mark.parametrize("stride", [13, pytest.param(1, marks=pytest.mark.long)])
def test_killed_removals_leave_nothing_half_made(stride, llama, tmp_path, children):
    (tmp_path / "new").write_text("FROM ./llama\nSYSTEM new")
    home = tmp_path / "killed"
    was, at = True, 1 - stride
    while was:
        at += stride
        assert not children.killed("create", home, tmp_path / "new")
        was = children.killed("remove", home, "-", at)
        expect_nothing_half_made(home, {"new", None})
        Store(home / "models").collect()
        check(Store(home / "models"))
    assert at > 10


def test_what_was_stored_already_is_not_read_again(llama, tmp_path, monkeypatch):
    """A create that is broken off at its end goes on without reading a weight."""

    def fail(*args, **kwargs):
        raise RequestError("broken off")

    with monkeypatch.context() as patched:
        patched.setattr(Store, "publish", fail)
        with pytest.raises(RequestError, match="broken off"):
            make("FROM ./llama", tmp_path)
    read = []
    pour = blobs.pour
    monkeypatch.setattr("bough.store.job.pour", lambda source, *rest: read.append(source.name) or pour(source, *rest))
    make("FROM ./llama", tmp_path)
    assert read == []
    check(Store())


# What comes in.


def refused(tmp_path: Path, told: str, kind: type[BoughError] = ModelError) -> None:
    with pytest.raises(kind, match=told):
        make("FROM ./llama", tmp_path)
    assert Store().all() == [] and Store().blobs.all() == []


def test_pickles_are_not_stored_and_not_enough(llama, tmp_path):
    (llama / "pytorch_model.bin").write_bytes(b"\x80\x04")
    stored = make("FROM ./llama", tmp_path)
    assert not any(name.endswith(".bin") for name in stored.files)
    Store().remove(MADE)
    (llama / "model.safetensors").unlink()
    refused(tmp_path, "pytorch_model.bin. That is a pickle file, which can run code", BadWeights)


@pytest.mark.parametrize(
    "place", ["../other.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..\\x.safetensors"]
)
def test_an_index_that_leads_elsewhere(place, llama, tmp_path):
    shutil.copy(llama / "model.safetensors", tmp_path / "other.safetensors")
    (llama / "model.safetensors").unlink()
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": place}}))
    refused(tmp_path, r"names what is no \*\.safetensors in its folder", BadWeights)


def test_links_out_of_the_folder_are_not_followed(llama, tmp_path):
    (tmp_path / "secret").write_text("{}")
    (llama / "generation_config.json").unlink(missing_ok=True)
    (llama / "generation_config.json").symlink_to(tmp_path / "secret")
    refused(tmp_path, "generation_config.json is a link that leads out of its folder")
    (llama / "generation_config.json").unlink()
    shutil.move(llama / "model.safetensors", tmp_path / "weights")
    (llama / "model.safetensors").symlink_to("../weights")
    refused(tmp_path, "is a link that leads out of its folder")
    (llama / "model.safetensors").unlink()
    shutil.move(tmp_path / "weights", llama / "weights")
    (llama / "model.safetensors").symlink_to("weights")
    stored = make("FROM ./llama", tmp_path)
    assert not (stored.folder / "model.safetensors").is_symlink()


def test_a_folder_that_is_a_link_out_and_things_that_are_no_files(llama, tmp_path):
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "config.json").write_text("{}")
    (llama / "assistant").symlink_to(tmp_path / "else")
    refused(tmp_path, "assistant is a link that leads out of its folder")
    (llama / "assistant").unlink()
    os.mkfifo(llama / "extra.json")
    refused(tmp_path, "extra.json is no regular file")
    (llama / "extra.json").unlink()
    (llama / "extra.json").symlink_to("nothing")
    refused(tmp_path, "extra.json is missing, or a link to nothing")


def test_a_snapshot_of_the_hubs_cache_is_a_model_folder(llama, tmp_path):
    """There files are links into blobs beside the snapshots."""
    repository = tmp_path / "models--org--tiny"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    shutil.move(llama, repository / "blobs")
    for file in (repository / "blobs").iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert "model.safetensors" in make(f"FROM {snapshot}", tmp_path).files


def lie(folder: Path, change) -> None:
    """Change the header of the weights."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    body = change(header, body) or body
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + body)


def entry(header: dict) -> dict:
    return header["model.norm.weight"]


def overlap(header: dict, body: bytes) -> None:
    first, second = [each for name, each in header.items() if name != "__metadata__"][:2]
    size = second["data_offsets"][1] - second["data_offsets"][0]
    second["data_offsets"] = [first["data_offsets"][0], first["data_offsets"][0] + size]


LIES = {
    "past the end": lambda header, body: entry(header).update(data_offsets=[len(body), len(body) + 64]),
    "negative": lambda header, body: entry(header).update(data_offsets=[-64, 0]),
    "backwards": lambda header, body: entry(header)["data_offsets"].reverse(),
    "overlapping": overlap,
    "shape": lambda header, body: entry(header).update(shape=[17]),
    "huge shape": lambda header, body: entry(header).update(shape=[2**40, 2**40]),
    "dtype": lambda header, body: entry(header).update(dtype="F64"),
    "unknown dtype": lambda header, body: entry(header).update(dtype="PICKLE"),
    "a gap": lambda header, body: header.pop("model.norm.weight") and None,
    "more than it says": lambda header, body: body + b"more",
    "less than it says": lambda header, body: body[:-4],
}


@pytest.mark.parametrize("change", LIES.values(), ids=LIES)
def test_headers_that_lie(change, llama, tmp_path):
    lie(llama, change)
    refused(tmp_path, r"model\.safetensors is damaged or cut short", BadWeights)


@pytest.mark.parametrize("length", [2**63, 2**40, 10**8 + 1, 0])
def test_headers_of_absurd_length(length, llama, tmp_path):
    file = llama / "model.safetensors"
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])
    refused(tmp_path, r"model\.safetensors is damaged or cut short", BadWeights)


def test_weights_that_do_not_belong_to_the_config(llama, tmp_path):
    save_file({"model.norm.weight": torch.ones(16)}, llama / "model.safetensors")
    refused(tmp_path, "do not fit the config", BadWeights)


def test_locks_are_let_go_of(llama, tmp_path):
    """Whoever holds the lock while collecting waits for no one afterwards."""
    make("FROM ./llama", tmp_path)
    with (Store().folder / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
