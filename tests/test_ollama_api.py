"""The real `ollama` client against a live server."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import ollama
import pytest
from scripted import scripted_folder
from serving import held, serving, until

from bough import CacheConfig, Engine, SamplingParams
from bough.engine.template import ChatTemplate
from bough.server.settings import Settings

HELLO = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the quick brown fox"}]
GREEDY = {"temperature": 0, "num_predict": 12}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "How it is there",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def live(hybrid_folder):
    with Engine.load(hybrid_folder, dtype="float32", cache=CacheConfig(device_bytes=64 << 20)) as engine:
        with serving(engine) as live:
            yield live
        engine.check()


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    folder = scripted_folder(tmp_path_factory.mktemp("scripted"))
    with Engine.load(folder, dtype="float32", draft=None, cache=CacheConfig(device_bytes=64 << 20)) as engine:
        with serving(engine) as live:
            yield live
        engine.check()


@pytest.fixture(scope="module")
def client(live):
    with ollama.Client(live.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def told(scripted):
    with ollama.Client(scripted.url, timeout=60) as client:
        yield client


def test_chat_is_what_the_engine_writes(live, client):
    tokens = ChatTemplate(live.engine.tokenizer).prompt(HELLO).tokens
    expected = live.engine.generate(tokens, SamplingParams(max_tokens=12, temperature=0))
    answer = client.chat(live.engine.name, HELLO, options=GREEDY)
    assert (answer.message.role, answer.message.content) == ("assistant", expected.text)
    assert (answer.done, answer.done_reason, answer.model) == (True, expected.finish_reason, live.engine.name)
    assert (answer.prompt_eval_count, answer.eval_count) == (len(tokens), len(expected.tokens))
    parts = (answer.load_duration, answer.prompt_eval_duration, answer.eval_duration)
    assert all(part >= 0 for part in parts) and sum(parts) <= answer.total_duration


def test_streams_equal_wholes_and_seeds_hold(live, client):
    options = {"temperature": 1.5, "seed": 7, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "num_predict": 12}
    options |= {"repeat_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "num_ctx": 4096}
    whole = client.chat(live.engine.name + ":latest", HELLO, options=options, keep_alive="5m")
    parts = list(client.chat(live.engine.name, HELLO, options=options, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == whole.eval_count
    plain = client.generate(live.engine.name, "a bear", options=options)
    pieces = list(client.generate(live.engine.name, "a bear", options=options, stream=True))
    assert "".join(part.response for part in pieces) == plain.response
    assert pieces[-1].context == plain.context


def test_raw_prompts_are_continued_as_they_are(live, client):
    expected = live.engine.generate("the lazy dog", SamplingParams(max_tokens=12, temperature=0))
    answer = client.generate(live.engine.name, "the lazy dog", raw=True, options=GREEDY)
    assert answer.response == expected.text
    assert answer.context == [*live.engine.tokenize("the lazy dog"), *expected.tokens]
    more = client.generate(live.engine.name, " and", raw=True, context=answer.context, options=GREEDY)
    assert more.context[: len(answer.context)] == answer.context


def test_a_context_goes_on_as_the_chat_would(live, client):
    template = ChatTemplate(live.engine.tokenizer)
    first = client.generate(live.engine.name, "hello bear", system="be brief", options=GREEDY)
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello bear"}]
    prompt = template.prompt(said)
    assert first.context[: len(prompt.tokens)] == prompt.tokens
    written = first.context[len(prompt.tokens) :]
    second = client.generate(live.engine.name, "and you?", context=first.context, options=GREEDY)
    said += [{"role": "assistant", "content": first.response}, {"role": "user", "content": "and you?"}]
    expected = template.extend(prompt, written, said)
    assert second.context[: len(expected.tokens)] == expected.tokens
    assert second.prompt_eval_count == len(expected.tokens)


def test_the_second_turn_is_read_from_the_cache(live, client):
    chat = [{"role": "user", "content": "tell me of the dark forest and of the old bear in it " * 3}]
    answer = client.chat(live.engine.name, chat, options=GREEDY)
    before = live.engine.cache.stats()["cached_tokens"]
    chat += [answer.message, {"role": "user", "content": "and then?"}]
    client.chat(live.engine.name, chat, options=GREEDY)
    assert live.engine.cache.stats()["cached_tokens"] - before > 50


def test_stop_strings_and_ends(told, scripted):
    name = scripted.engine.name
    answer = told.chat(name, HELLO)
    assert (answer.message.content, answer.done_reason) == ("just some words and more", "stop")
    answer = told.chat(name, HELLO, options={"stop": [" and"]})
    assert (answer.message.content, answer.done_reason) == ("just some words", "stop")
    answer = told.chat(name, HELLO, options={"num_predict": 2})
    assert (answer.message.content, answer.done_reason) == ("just some", "length")


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called_and_answered(told, scripted, stream):
    chat = [{"role": "user", "content": "how is Paris?"}]
    answer = told.chat(scripted.engine.name, chat, tools=[WEATHER], stream=stream)
    parts = list(answer) if stream else [answer]
    assert "".join(part.message.content for part in parts) == "I look it up."
    [call] = [call for part in parts for call in part.message.tool_calls or ()]
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Paris"})
    assert parts[-1].done_reason == "stop"
    chat.append({"role": "assistant", "content": "I look it up.", "tool_calls": [call]})
    chat.append({"role": "tool", "tool_name": "weather", "content": "rain"})
    assert told.chat(scripted.engine.name, chat, tools=[WEATHER]).message.content == "it rains"


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_is_told_apart(told, scripted, stream):
    answer = told.chat(scripted.engine.name, HELLO, think=True, stream=stream)
    parts = list(answer) if stream else [answer]
    assert "".join(part.message.thinking or "" for part in parts) == "let me see"
    assert "".join(part.message.content for part in parts) == "that is it"
    answer = told.generate(scripted.engine.name, "hi", think="high", stream=stream)
    parts = list(answer) if stream else [answer]
    assert "".join(part.thinking or "" for part in parts) == "let me see"
    assert "".join(part.response for part in parts) == "that is it"
    assert told.chat(scripted.engine.name, HELLO, think=False).message.thinking is None


def test_models(live, client):
    [model] = client.list().models
    assert model.model == live.engine.name and model.size == live.engine.model.weight_bytes
    [loaded] = client.ps().models
    assert loaded.digest == model.digest and loaded.context_length == live.engine.context
    shown = client.show(live.engine.name)
    assert shown.modelinfo["qwen3_5_text.context_length"] == live.engine.context
    assert shown.capabilities == ["completion"] and "im_start" in shown.template
    assert shown.details.quantization_level == "F32"


def test_what_the_model_can_do(told, scripted):
    assert told.show(scripted.engine.name).capabilities == ["completion", "tools", "thinking"]


def test_a_model_is_loaded_already(live, client):
    for answer in (client.generate(live.engine.name), client.chat(live.engine.name)):
        assert (answer.done, answer.done_reason) == (True, "load")


def test_a_model_stays_loaded(live, client):
    """Whatever a client says of how long it should; 0 is how others have one unloaded."""
    for keep in (0, "0", 0.0, -1, "5m"):
        assert client.chat(live.engine.name, HELLO, options=GREEDY, keep_alive=keep).done
        assert client.generate(live.engine.name, keep_alive=keep).done
    assert client.ps().models


def test_liveness(live):
    with httpx.Client(base_url=live.url) as http:
        assert http.get("/").text == "Bough is running"
        assert http.head("/").status_code == 200
        assert http.get("/api/version").json()["version"].count(".") == 2


def refused(ask, status: int, words: str) -> None:
    with pytest.raises(ollama.ResponseError) as raised:
        ask()
    assert raised.value.status_code == status and words in raised.value.error


def test_errors(live, client):
    name = live.engine.name
    refused(lambda: client.chat("other", HELLO), 404, "not served")
    refused(lambda: list(client.chat("other", HELLO, stream=True)), 404, "not served")
    refused(lambda: client.show("other"), 404, "not served")
    refused(lambda: client.embed(name, "text"), 400, "does not support embeddings")
    refused(lambda: client.embeddings(name, "text"), 400, "does not support embeddings")
    refused(lambda: client.chat(name, HELLO, options={"temperature": -1}), 400, "options.temperature")
    for option, wrong in (
        ("presence_penalty", 3.0), ("presence_penalty", -1e38), ("frequency_penalty", 1e38), ("repeat_penalty", 0.0),
        ("repeat_penalty", 1e38), ("temperature", 1e39), ("top_k", -2), ("top_p", 1.5), ("min_p", -0.1),
        ("num_predict", -3), ("num_predict", 2**63), ("num_ctx", -1), ("seed", 2**63), ("stop", ["x"] * 65),
        ("stop", [""]),
    ):  # fmt: skip
        asked = {"messages": HELLO, "options": {option: wrong}}
        for stream in (True, False):
            answer = live.client.post("/api/chat", json=asked | {"stream": stream})
            assert answer.status_code == 400 and answer.json()["error"].startswith(f"options.{option}"), answer.text
    refused(lambda: client.chat(name, HELLO, think=True), 400, "does not support thinking")
    refused(lambda: client.generate(name, "a", suffix="b"), 400, "suffix")
    refused(lambda: client.generate(name, "a", template="b"), 400, "template")
    refused(lambda: client.generate(name, "a", context=[10**6]), 400, "vocabulary")
    refused(lambda: client.generate(name, "word " * 5000), 400, "shorten it")
    pictured = [{"role": "user", "content": "look", "images": [b"not really"]}]
    refused(lambda: client.chat(name, pictured), 400, "messages[0].images")
    with httpx.Client(base_url=live.url) as http:
        assert "error" in http.post("/api/pull", json={"model": "x"}).json()
        assert http.post("/api/chat", content=b"{").json()["error"].startswith("the body is not valid JSON")


def test_keys(live):
    with serving(live.engine, Settings(api_keys=("secret",))) as locked:
        with ollama.Client(locked.url) as client:
            refused(client.list, 401, "API key")
        with ollama.Client(locked.url, headers={"Authorization": "Bearer secret"}) as client:
            assert len(client.list().models) == 1


def test_formats(live, client, scripted, told):
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    answer = client.chat(live.engine.name, HELLO, format=schema, options={"num_predict": 60, "temperature": 0})
    assert answer.message.content.lstrip().startswith("{")
    light = {"type": "function", "function": {"name": "light", "parameters": schema}}
    asked = {"format": schema, "tools": [light], "options": {"num_predict": 60, "temperature": 0}}
    message = told.chat(scripted.engine.name, HELLO, **asked).message
    assert message.content == "" and [call.function.name for call in message.tool_calls] == ["light"]
    chat = [*HELLO, message, {"role": "tool", "tool_name": "light", "content": "on"}]
    message = told.chat(scripted.engine.name, chat, **asked).message
    assert json.loads(message.content).keys() == {"n"} and not message.tool_calls


def test_parallel_requests_get_what_they_would_alone(live, client):
    prompts = [f"number {at} of the lazy dogs" for at in range(8)]
    alone = [client.generate(live.engine.name, prompt, raw=True, options=GREEDY).response for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        asked = pool.map(lambda text: client.generate(live.engine.name, text, raw=True, options=GREEDY), prompts)
        assert [answer.response for answer in asked] == alone


def test_a_client_that_leaves_stops_the_work(told, scripted):
    before = scripted.ended("cancelled")
    with held(scripted.engine, after=8):
        stream = told.chat(scripted.engine.name, [{"role": "user", "content": "endless"}], stream=True)
        assert [next(stream).message.content for _ in range(3)]
        stream.close()
        assert until(scripted.all_cancelled)
    assert until(scripted.is_idle) and scripted.ended("cancelled") == before + 1
    scripted.engine.check()


def test_a_stream_that_breaks_says_so(told, scripted):
    with held(scripted.engine, after=4):
        stream = told.chat(scripted.engine.name, [{"role": "user", "content": "endless"}], stream=True)
        next(stream)
        scripted.service.cancel_all()
    with pytest.raises(ollama.ResponseError, match="shutting down"):
        list(stream)


def test_the_async_client(scripted):
    async def ask():
        async with ollama.AsyncClient(scripted.url) as client:
            stream = await client.chat(scripted.engine.name, HELLO, stream=True)
            return "".join([part.message.content async for part in stream])

    assert asyncio.run(ask()) == "just some words and more"
