"""Ollama's endpoints over the store, with its own client; and what a stored model brings into a server."""

import json
from collections.abc import Iterator
from pathlib import Path

import ollama
import pytest
from serving import Live, serving
from storing import bough_home, check, make  # noqa: F401 (a fixture that is always used)

from bough import CacheConfig, Engine, SamplingParams
from bough.server.settings import Settings
from bough.store.names import Name
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
            live.client.post("/api/copy", json={"source": "x", "destination": "y"}),
            live.client.request("DELETE", "/api/delete", json={"model": "x"}),
        ]
        assert {answer.status_code for answer in answers} == {403}
        assert len(live.client.get("/api/tags").json()["models"]) == 1
