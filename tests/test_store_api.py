"""Ollama's endpoints over the store, with its own client; and what a stored model brings into a server."""

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import ollama
import pytest
from gguf_files import reference, write
from hub import COMMIT
from serving import Live, serving, until
from storing import bough_home, check, make, small_llama  # noqa: F401 (a fixture that is always used)
from test_pull import hub, llama  # noqa: F401 (fixtures)

from bough import CacheConfig, Engine, SamplingParams
from bough.errors import ModelError
from bough.server import ollama_store
from bough.server.settings import Settings
from bough.store.names import Name
from bough.store.pull import pull
from bough.store.store import Store

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture
def live(bough_home, llama_folder, tmp_path) -> Iterator[Live]:  # noqa: F811
    said = 'SYSTEM be brief\nPARAMETER temperature 0\nPARAMETER num_predict 4\nPARAMETER stop "qq"'
    stored = make(f"FROM {llama_folder}\nTEMPLATE {TEMPLATE}\n{said}", tmp_path, "served")
    cache = CacheConfig(device_bytes=32 << 20)
    with Engine.load(stored.path, name="served", dtype="float32", cache=cache, draft=None) as engine:
        with serving(engine, Settings(store=Store().folder)) as live:
            yield live
        engine.check()


@pytest.fixture
def client(live) -> Iterator[ollama.Client]:
    with ollama.Client(live.url, timeout=60) as client:
        yield client


def test_what_was_stored_are_the_defaults_of_the_server(live, client):
    def expected(text: str, count: int) -> str:
        return live.engine.generate(text, SamplingParams(max_tokens=count, temperature=0)).text

    asked = [{"role": "user", "content": "the fox"}]
    brief = expected("<system>be brief<user>the fox", 4)
    assert client.chat("served:latest", asked).message.content == brief
    assert client.generate("served", "the fox").response == brief
    body = {"model": "served", "messages": asked}
    answer = live.client.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == brief and answer["usage"]["completion_tokens"] == 4
    longer = live.client.post("/v1/chat/completions", json=body | {"max_tokens": 6}).json()
    assert longer["choices"][0]["message"]["content"] == expected("<system>be brief<user>the fox", 6)
    own = [{"role": "system", "content": "be long"}, *asked]
    assert client.chat("served", own).message.content == expected("<system>be long<user>the fox", 4)


def test_less_than_no_tokens_are_as_many_as_fit(live, client):
    """-1 and -2 are no limit, whatever was stored with the model."""
    assert client.generate("served", "the fox", raw=True).eval_count == 4
    for most in (-1, -2):
        answer = client.generate("served", "the fox", raw=True, options={"num_predict": most, "stop": []})
        assert answer.prompt_eval_count + answer.eval_count == live.engine.context and answer.done_reason == "length"


def test_create_show_copy_delete(live, client):
    lines = list(client.create("org/new:v1", from_="served", system="hi", parameters={"top_k": 4.0, "stop": ["a", "b"]},
                               license="MIT", stream=True))  # fmt: skip
    assert lines[-1].status == "success" and len(lines) > 1
    told = client.show("org/new:v1")
    assert told.template == TEMPLATE and told.license == "MIT" and told.details.family == "llama"
    assert 'SYSTEM """hi"""' in told.modelfile and "FROM org/new:v1" in told.modelfile
    assert told.parameters.splitlines() == ["temperature 0.0", "num_predict 4", 'stop "a"', 'stop "b"', "top_k 4"]
    assert told.modelinfo["llama.block_count"] == 2 and told.modelinfo["general.parameter_count"] > 1000
    assert [each.model for each in client.list().models] == ["served", "org/new:v1"]
    client.copy("org/new:v1", "again")
    listed = {each.model: each for each in client.list().models}
    assert listed.keys() == {"served", "again:latest", "org/new:v1"}
    assert listed["again:latest"].digest == Store().get(Name.parse("org/new:v1")).digest
    client.delete("org/new:v1")
    client.delete("again")
    assert [each.model for each in client.list().models] == ["served"]
    check(Store())


def test_create_with_a_quantised_draft(client, live):
    assert client.create("small", from_="served", quantize="int8", stream=False).status == "success"
    body = {"model": "pair", "from": "small", "draft": "served", "draft_quantize": "int8", "stream": False}
    assert live.client.post("/api/create", json=body).json() == {"status": "success"}
    about = Store().get(Name.parse("pair")).about
    assert (about.drafter, about.weights.scheme, about.draft_weights.scheme) == ("model", "int8", "int8")
    assert {each.model: each.details.quantization_level for each in client.list().models}["small:latest"] == "int8"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({}, "model must be given"),
        ({"model": "x"}, "from must be given"),
        ({"model": "../x", "from": "served"}, "model must be a name"),
        ({"model": "x", "from": "/etc"}, "from must be a name"),
        ({"model": "x", "from": "./served"}, "from must be a name"),
        ({"model": "x", "from": "served", "draft": "~nobody/x"}, "draft must be a name"),
        ({"model": "x", "from": "served", "files": {"a": "sha256:0"}}, "files must be left out"),
        ({"model": "x", "from": "served", "adapters": {"a": "b"}}, "adapters must be left out"),
        ({"model": "x", "from": "served", "messages": [{"role": "user"}]}, "messages must be left out"),
        ({"model": "x", "modelfile": "FROM /etc"}, "modelfile must be left out"),
        ({"model": "x", "from": "served", "template": "{{ .Prompt }}"}, "template of Go"),
        ({"model": "x", "from": "served", "parameters": {"temperature": -1}}, "temperature is -1"),
        ({"model": "x", "from": "served", "parameters": {"warmth": 1}}, "no parameter 'warmth'"),
        ({"model": "x", "from": "served", "parameters": {"stop": 3}}, "parameters.stop must be a text"),
        ({"model": "x", "from": "served", "parameters": {"top_k": "4"}}, "top_k is '4'"),
    ],
)
def test_what_cannot_be_created(body, told, live):
    answer = live.client.post("/api/create", json=body)
    assert answer.status_code == 400 and told in answer.json()["error"]
    assert [str(each.name) for each in Store().all()] == ["served"]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"from": "nothing"}, "'nothing' is not in the store"),
        ({"from": "served", "draft": "org/nothing"}, "'org/nothing' is not in the store"),
        ({"from": "served", "quantize": "q4_K_M"}, "it must be one of int8, int4"),
        ({"from": "served", "template": "{% for"}, "template"),
    ],
)
def test_what_fails_while_it_is_created(more, told, live):
    """Told with its status, or as a line of the stream, which has begun then."""
    body = {"model": "x", **more}
    whole = live.client.post("/api/create", json=body | {"stream": False})
    assert whole.status_code == 400 and told in whole.json()["error"]
    streamed = live.client.post("/api/create", json=body)
    assert streamed.status_code == 200 and told in json.loads(streamed.text.splitlines()[-1])["error"]
    assert [str(each.name) for each in Store().all()] == ["served"]


def test_pull(live, client, hub, llama):  # noqa: F811
    """What Ollama's clients draw their bars from: a digest, how many bytes there are, and how many have come."""
    first, *lines, last = client.pull("org/tiny", stream=True)
    assert (first.status, last.status) == ("pulling manifest", "success")
    weights = [line for line in lines if line.digest]
    size = (llama / "model.safetensors").stat().st_size
    assert {line.total for line in weights} == {size} and weights[-1].completed == size
    stored = Store().get(Name.parse("org/tiny"))
    digest = stored.files["model.safetensors"].digest
    assert {(line.status, line.digest) for line in weights} == {(f"pulling {digest[:12]}", f"sha256:{digest}")}
    stages = [line.status for line in lines if line not in weights]
    assert stages[0] == "pulling org/tiny" and stages[-3:] == ["checking", "storing", "writing manifest"]
    assert len(stages) == len(set(stages)) and "pulling config.json" in stages
    assert stored.about.source == f"org/tiny@{COMMIT}" and stored.damaged() == []
    assert [each.model for each in client.list().models] == ["served", "org/tiny:latest"]
    sent = hub.sent
    again = list(client.pull("org/tiny:latest", stream=True))
    assert hub.sent - sent < size and [line.completed for line in again if line.digest] == [size]
    assert client.pull("hf.co/org/tiny:v1").status == "success"  # what is listed can be pulled again
    assert live.client.post("/api/pull", json={"name": "org/tiny@v1", "stream": False}).json() == {"status": "success"}
    assert {each.model for each in client.list().models} == {"served", "org/tiny:latest", "org/tiny:v1"}
    check(Store())


def test_pull_one_of_several_gguf_files(live, client, hub, tmp_path):  # noqa: F811
    (tmp_path / "g").mkdir()
    for name in ("m-Q8_0.gguf", "m-F32.gguf"):
        write(reference("llama"), tmp_path / "g" / name)
    hub.add("org/tiny", tmp_path / "g")
    with pytest.raises(ollama.ResponseError, match="which GGUF file"):
        client.pull("org/tiny")
    body = {"model": "org/tiny", "file": "q8", "stream": False}
    assert live.client.post("/api/pull", json=body).json() == {"status": "success"}
    assert Store().get(Name.parse("org/tiny")).path.name == "model.gguf"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({}, "model must be given"),
        ({"model": 3}, "model must be a string"),
        ({"model": ""}, "model must be a string that is not empty"),
        *(
            ({"model": name}, "model must be a repository of the Hugging Face hub: organisation/name[:revision]")
            for name in ("tiny", "/etc/passwd", "../tiny", "org/..", "a/b/c", "org/tiny:", "file:///org/tiny")
        ),
        ({"model": "org/tiny", "file": 3}, "file must be a string"),
    ],
)
def test_what_cannot_be_pulled(body, told, live, hub):  # noqa: F811
    answer = live.client.post("/api/pull", json=body)
    assert answer.status_code == 400 and told in answer.json()["error"]
    assert hub.asked == []


def refused_pull(live: Live, name: str, told: str, status: int = 400) -> None:
    """Told with its status, or as a line of the stream, which has begun then."""
    whole = live.client.post("/api/pull", json={"model": name, "stream": False})
    assert whole.status_code == status and told in whole.json()["error"]
    streamed = live.client.post("/api/pull", json={"model": name})
    *_, last = map(json.loads, streamed.text.splitlines())
    assert streamed.status_code == 200 and last.keys() == {"error"} and told in last["error"]
    with ollama.Client(live.url) as client, pytest.raises(ollama.ResponseError):
        list(client.pull(name, stream=True))
    assert [str(each.name) for each in Store().all()] == ["served"]


def test_what_fails_while_it_is_pulled(live, hub, llama, monkeypatch, caplog):  # noqa: F811
    refused_pull(live, "org/none", "there is no model org/none on the hub, or it is private")
    refused_pull(live, "org/tiny:v9", "org/tiny has no revision 'v9'")
    refused_pull(live, "org/a--b", "org/a--b is no repository of the hub")
    refused_pull(live, "-org/tiny", "is no name of a model")
    hub.lies = {"config.json": b"{}"}
    refused_pull(live, "org/tiny", "config.json did not arrive as the hub has it")
    hub.lies = {}
    with monkeypatch.context() as patched:
        patched.setattr("huggingface_hub.is_offline_mode", lambda: True)
        refused_pull(live, "org/none", "HF_HUB_OFFLINE is set and org/none is not in the hub's cache")
    with monkeypatch.context() as patched:
        patched.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        refused_pull(live, "org/tiny", "the hub does not answer as it should")
    assert not [record for record in caplog.records if record.exc_info]
    monkeypatch.setattr(Store, "publish", lambda *_: 1 / 0)
    with caplog.at_level(logging.ERROR, "bough.server"):
        refused_pull(live, "org/tiny", "something went wrong in the server; its log says what", 500)
    assert len([record for record in caplog.records if record.exc_info]) == 3


def test_a_pull_keeps_nobody_waiting(live, client, hub, tmp_path):  # noqa: F811
    """More of them than are worked on at once; the server answers all the while, and no name is there too soon."""
    names = [f"org/tiny{at}" for at in range(6)]
    hub.held["model.safetensors"] = threading.Event()
    small_llama(tmp_path / "folder")
    for name in names:
        hub.add(name, tmp_path / "folder")
    done = [threading.Thread(target=client.pull, args=(name,)) for name in names]
    for each in done:
        each.start()
    assert until(lambda: len([path for path, _ in hub.asked if path.startswith("/cdn")]) == 4)
    assert client.generate("served", "the fox").done and len(client.list().models) == 1
    hub.held["model.safetensors"].set()
    for each in done:
        each.join()
    assert {str(each.name) for each in Store().all()} == {"served", *names}
    check(Store())


def test_a_client_that_leaves_a_pull_stops_it(live, client, hub, llama, monkeypatch, caplog):  # noqa: F811
    """The next one who asks goes on with what has come."""
    ended = list[str]()

    def watched(*given, **options):
        try:
            return pull(*given, **options)
        except ModelError as error:
            ended.append(str(error))
            raise

    monkeypatch.setattr(ollama_store, "pull_model", watched)
    hub.held["model.safetensors"] = threading.Event()
    with caplog.at_level(logging.INFO, "bough.server"):
        stream = client.pull("org/tiny", stream=True)
        assert next(line for line in stream if line.digest and line.completed).completed
        with pytest.raises(ollama.ResponseError, match="another process is at it already"):
            client.pull("org/tiny")
        before = len(caplog.records)
        stream.close()
        assert until(lambda: len(caplog.records) > before)  # the request is over
    hub.held["model.safetensors"].set()
    assert until(lambda: ended) and ended == ["the client left"]
    assert [each.model for each in client.list().models] == ["served"]
    sent = hub.sent
    assert client.pull("org/tiny").status == "success"
    assert hub.sent - sent < (llama / "model.safetensors").stat().st_size
    assert not [record for record in caplog.records if record.exc_info]
    check(Store())


def test_models_that_are_not_there(client, live):
    for ask in (lambda: client.delete("nothing"), lambda: client.copy("nothing", "x"), lambda: client.show("nothing")):
        with pytest.raises(ollama.ResponseError) as caught:
            ask()
        assert caught.value.status_code == 404
    make("FROM served", Path("/"), "other")
    with pytest.raises(ollama.ResponseError, match="the model 'other' is not served here; 'served' is"):
        client.chat("other", [{"role": "user", "content": "hi"}])


def test_a_server_without_a_store(llama_folder):
    with (
        Engine.load(llama_folder, dtype="float32", cache=CacheConfig(device_bytes=32 << 20)) as engine,
        serving(engine) as live,
    ):
        answers = [
            live.client.post("/api/create", json={"model": "x", "from": "y"}),
            live.client.post("/api/pull", json={"model": "x/y"}),
            live.client.post("/api/copy", json={"source": "x", "destination": "y"}),
            live.client.request("DELETE", "/api/delete", json={"model": "x"}),
        ]
        assert {answer.status_code for answer in answers} == {403}
        assert len(live.client.get("/api/tags").json()["models"]) == 1
