"""Pulling from a stand-in of the hub: what is taken, what is refused, and that nothing is fetched twice."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gguf_files import reference, write
from hub import COMMIT, Hub, hub_on_loopback
from parity import save
from storing import MADE, Children, bough_home, check, make, small_llama  # noqa: F401 (a fixture that is always used)
from test_assistant import assistant
from test_cli import bough
from test_gemma4 import gemma4
from transformers import AutoModelForCausalLM

from bough import Engine, SamplingParams
from bough.errors import BoughError, ModelError, OptionError, RequestError
from bough.store import pull as pulling
from bough.store.names import Name
from bough.store.pull import HubId, pull
from bough.store.store import Store

TINY = HubId.parse("org/tiny")


@pytest.fixture
def hub(monkeypatch) -> Iterator[Hub]:
    monkeypatch.setattr(pulling, "PAUSE", 0.001)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with hub_on_loopback() as started:
        monkeypatch.setenv("HF_ENDPOINT", started.url)
        yield started


@pytest.fixture
def llama(tmp_path, hub) -> Path:
    folder = small_llama(tmp_path / "llama")
    hub.add("org/tiny", folder)
    return folder


def refused(told: str, which: HubId = TINY, kind: type[BoughError] = RequestError, **options) -> None:
    with pytest.raises(kind, match=told):
        pull(Store(), which, **options)
    assert Store().all() == []


def test_pull_and_run(hub, llama):
    done = bough("pull", "org/tiny")
    assert done.exit_code == 0 and "bough run org/tiny" in done.stderr, done.stderr
    stored = Store().get(Name.parse("org/tiny"))
    assert stored.about.source == f"org/tiny@{COMMIT}" and stored.about.license == ("apache-2.0",)
    ours = bough("run", "org/tiny", "5 6 7", "-t", "0", "-n", "6")
    theirs = bough("run", llama, "5 6 7", "-t", "0", "-n", "6")
    assert ours.exit_code == 0 and ours.stdout == theirs.stdout, ours.stderr
    check(Store())
    sent = hub.sent
    assert bough("pull", "https://huggingface.co/org/tiny@v1", "--name", "again").exit_code == 0
    assert hub.sent - sent < (llama / "model.safetensors").stat().st_size  # that was there
    assert Store().get(Name.parse("again")).files.keys() == stored.files.keys()
    assert hub.tokens == {None}


def test_only_what_a_model_needs_is_fetched(hub, llama):
    more = ("pytorch_model.bin", "training.pt", "code.py", "README.md", "onnx/model.onnx", "original/params.json",
            ".gitattributes", "../../evil.json", "/etc/evil.json", "a\\b.json", "sub/../evil.json")  # fmt: skip
    hub.repositories["org/tiny"] |= dict.fromkeys(more, b"{}")
    stored = pull(Store(), TINY)
    assert set(stored.files) == {"config.json", "generation_config.json", "model.safetensors", "bough.json"}
    assert not any(name in path for path, _ in hub.asked for name in more)
    check(Store())


def test_shards_and_an_assistant(hub, tmp_path):
    target = gemma4()
    save(target, tmp_path / "one")
    AutoModelForCausalLM.from_pretrained(tmp_path / "one").save_pretrained(tmp_path / "g", max_shard_size="60KB")
    save(assistant(target.config.hidden_size), tmp_path / "g" / "assistant")
    hub.add("org/tiny", tmp_path / "g", **{"other.safetensors": b"not in the index"})
    stored = pull(Store(), TINY)
    assert "assistant/model.safetensors" in stored.files and "other.safetensors" not in stored.files
    assert "model.safetensors.index.json" in stored.files
    with Engine.load(stored.path, dtype="float32") as engine:
        assert type(engine.drafting.drafter).__name__ == "AssistantDrafter"


def test_gguf_repositories(hub, tmp_path):
    (tmp_path / "g").mkdir()
    for name in ("m-Q8_0.gguf", "m-F32.gguf"):
        write(reference("llama"), tmp_path / "g" / name)
    hub.add("org/tiny", tmp_path / "g", **{"config.json": b"{}"})
    refused(
        "which GGUF file of org/tiny\\? choose one with --file; there are: m-F32.gguf, m-Q8_0.gguf", kind=OptionError
    )
    refused("there are: m-F32.gguf, m-Q8_0.gguf", kind=OptionError, file="q2")
    assert set(pull(Store(), TINY, file="q8").files) == {"model.gguf", "bough.json"}
    assert [path for path, _ in hub.asked if "F32" in path] == []


def test_a_modelfile_may_name_the_hub(hub, llama, tmp_path):
    stored = make("FROM org/tiny\nDRAFT org/tiny\nSYSTEM hi", tmp_path)
    assert stored.about.system == "hi" and stored.about.drafter == "model"
    assert [str(each.name) for each in Store().all()] == ["made", "org/tiny"]
    assert len([path for path, _ in hub.asked if path.startswith("/cdn")]) == 1  # the draft was there then


def test_what_the_hub_refuses(hub, llama, monkeypatch):
    refused("there is no model org/none on the hub, or it is private", HubId.parse("org/none"))
    refused("org/tiny has no revision 'v9'", HubId.parse("org/tiny@v9"))
    refused("org/a--b is no repository of the hub", HubId.parse("org/a--b"), OptionError)
    hub.gated, hub.token = {"org/tiny"}, "hf_secret"
    refused("org/tiny is gated; accept its terms on its page, and set HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    refused("org/tiny is gated")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert pull(Store(), TINY).name == Name.parse("org/tiny")
    assert hub.tokens == {None, "hf_wrong", "hf_secret"}


def test_a_disk_that_is_too_small(hub, llama, monkeypatch):
    size = (llama / "model.safetensors").stat().st_size
    usage = shutil.disk_usage(llama)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size - 1))
    refused(f"takes {size:,} bytes more, and {size - 1:,} are free")
    assert not any(path.endswith("model.safetensors") for path, _ in hub.asked)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size))
    pull(Store(), TINY)
    check(Store())


def test_a_hub_that_is_not_there(hub, llama, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    refused("the hub does not answer as it should")


def test_cut_connections_are_gone_on_with(hub, llama):
    hub.cuts["model.safetensors"], hub.failures = [1000, 0, 2000], 2
    pull(Store(), TINY)
    check(Store())
    ranges = [wanted for path, wanted in hub.asked if path.startswith("/cdn")]
    assert ranges == [None, "bytes=1000-", "bytes=1000-", "bytes=3000-"]
    assert hub.sent < (llama / "model.safetensors").stat().st_size + 20_000


def test_a_server_without_ranges(hub, llama):
    hub.cuts["model.safetensors"], hub.ranges = [1000], False
    assert pull(Store(), TINY).damaged() == []


def test_a_connection_that_is_always_cut_is_given_up_and_what_came_is_kept(hub, llama):
    hub.cuts["model.safetensors"] = [1500, *[0] * 20]
    refused("the hub does not answer as it should .*; try again: what came is kept")
    hub.cuts.clear()
    hub.asked.clear()
    pull(Store(), TINY)
    assert [wanted for path, wanted in hub.asked if path.startswith("/cdn")] == ["bytes=1500-"]
    assert not any(path.endswith("/config.json") for path, _ in hub.asked)
    check(Store())


def test_a_damaged_file_in_the_store_is_fetched_again(hub, llama):
    weights = pull(Store(), TINY).folder / "model.safetensors"
    data = weights.read_bytes()
    weights.chmod(0o600)
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert pull(Store(), TINY).damaged() == []
    assert weights.read_bytes() == data
    check(Store())


def test_what_came_of_a_broken_pull_can_be_removed(hub, llama):
    hub.cuts["model.safetensors"] = [1500, *[0] * 20]
    refused("try again: what came is kept")
    assert bough("rm", "org/tiny").exit_code == 0
    check(Store())
    assert "there is no model 'org/tiny'" in bough("rm", "org/tiny").stderr


def test_bytes_that_are_not_what_the_hub_tells(hub, llama):
    right = hub.repositories["org/tiny"]
    for name in ("config.json", "model.safetensors"):
        for wrong in (right[name][:-1] + b"\0", right[name] + b"more", right[name][:-5]):
            hub.lies = {name: wrong}
            refused(f"{name} did not arrive as the hub has it", kind=ModelError)
    hub.lies = {}
    pull(Store(), TINY)
    check(Store())


def test_pickles_alone_are_refused(hub, llama):
    files = hub.repositories["org/tiny"]
    files["pytorch_model.bin"] = files.pop("model.safetensors")
    refused("has its weights in pytorch_model.bin. That is a pickle file", kind=ModelError)
    files.pop("pytorch_model.bin")
    refused("has no weights", kind=ModelError)


def test_an_index_that_leads_elsewhere(hub, llama):
    files = hub.repositories["org/tiny"]
    files["../x.safetensors"] = files.pop("model.safetensors")
    files["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": "../x.safetensors"}}).encode()
    refused(r"names what is no \*\.safetensors in its folder", kind=ModelError)
    assert not any("x.safetensors" in path for path, _ in hub.asked)


@pytest.mark.parametrize(
    "text",
    [
        "tiny",
        "a/b/c",
        "../tiny",
        "org/..",
        "./tiny",
        "org/tiny@",
        "org/tiny@..",
        "o rg/x",
        "",
        "org/tiny:",
        "org/tiny:..",
        "org/tiny:v1:v2",
        "org/tiny@v1:v2",
        "file://org/tiny",
    ],
)
def test_what_is_no_repository(text):
    with pytest.raises(OptionError, match="is no repository of the hub"):
        HubId.parse(text)


def test_revisions_become_tags():
    assert HubId.parse("org/tiny").name == Name.parse("org/tiny:latest")
    assert HubId.parse("org/tiny@v1").name == Name.parse("org/tiny:v1")
    assert HubId.parse("hf.co/org/tiny") == TINY
    for text in ("org/tiny", "org/tiny@v1"):  # and back
        assert HubId.parse(HubId.parse(text).name.full) == HubId.parse(text)


def test_offline_the_hubs_own_cache_is_used(hub, llama, tmp_path):
    """In a process of its own: huggingface_hub looks at the environment when it is imported."""
    cache = tmp_path / "cache" / "models--org--tiny"
    shutil.copytree(llama, cache / "blobs")
    snapshot = cache / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(COMMIT)
    for file in (cache / "blobs").iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache.parent)}
    script = (
        "import sys; from bough.cli import app; [app([*each.split()], standalone_mode=False) for each in sys.argv[1:]]"
    )
    commands = ["pull org/tiny", "pull org/none"]
    done = subprocess.run([sys.executable, "-c", script, *commands], env=environment, capture_output=True, text=True)
    assert "org/tiny:latest is stored" in done.stderr, done.stderr
    assert "HF_HUB_OFFLINE is set and org/none is not in the hub's cache" in done.stderr
    assert hub.asked == [] and Store().get(Name.parse("org/tiny")).damaged() == []


@pytest.mark.parametrize("all_moments", [False, pytest.param(True, marks=pytest.mark.long)])
def test_killed_pulls_leave_nothing_half_made_and_go_on(all_moments, hub, llama, tmp_path):
    size, home = (llama / "model.safetensors").stat().st_size, tmp_path / "killed"
    with Children() as children:
        total = children.count("pull", home, hub.url)
        late = total - 12  # the weights are there then
        for at in range(1, total + 1) if all_moments else (total // 3, late):
            shutil.rmtree(home)
            killed = children.killed("pull", home, hub.url, at)
            stored = Store(home / "models").find(MADE)
            assert stored is not None or killed
            assert stored is None or stored.damaged() == []
            before = hub.sent
            assert not children.killed("pull", home, hub.url)
            assert at != late or hub.sent - before < size
            check(Store(home / "models"))
            assert Store(home / "models").get(MADE).damaged() == []
    assert total > 50


def test_the_tokens_are_those_of_the_folder(hub, llama):
    asked = SamplingParams(max_tokens=8, temperature=0)
    written = []
    for path in (llama, pull(Store(), TINY).path):
        with Engine.load(path, dtype="float32") as engine:
            written.append(engine.generate([5, 6, 7], asked).tokens)
    assert written[0] == written[1]
    assert torch.is_inference_mode_enabled() is False
