"""The real `anthropic` client against a live server."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import anthropic
import pytest
from scripted import scripted_folder
from serving import Live, held, serving, until

from bough import CacheConfig, Engine, SamplingParams
from bough.engine.template import ChatTemplate
from bough.server.settings import Settings

FOX = [{"role": "user", "content": "the quick brown fox"}]
MARK = {"type": "ephemeral"}
WEATHER = {
    "name": "weather",
    "description": "How it is there",
    "input_schema": {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]},
}
LONG = "the old bear runs away from the lazy dog in the dark forest " * 3


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
    with anthropic.Anthropic(base_url=live.url, api_key="any", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def told(scripted):
    with anthropic.Anthropic(base_url=scripted.url, api_key="any", max_retries=0, timeout=60) as client:
        yield client


def ask(live: Live, client, **given):
    asked = {"model": live.engine.name, "max_tokens": 12, "messages": FOX, "extra_body": {"temperature": 0}}
    return client.messages.create(**asked | given)


def text_block(text: str, **more) -> dict:
    return {"type": "text", "text": text} | more


def tokens_of(live: Live, messages: list[dict], **options) -> list[int]:
    return ChatTemplate(live.engine.tokenizer).prompt(messages, **options).tokens


def test_messages_are_what_the_engine_writes(live, client):
    tokens = tokens_of(live, [{"role": "system", "content": "be brief"}, *FOX])
    expected = live.engine.generate(tokens, SamplingParams(max_tokens=12, temperature=0))
    answer = ask(live, client, system="be brief")
    [block] = answer.content
    assert (block.type, block.text, answer.role, answer.type) == ("text", expected.text, "assistant", "message")
    assert answer.stop_reason == {"stop": "end_turn", "length": "max_tokens"}[expected.finish_reason]
    assert answer.model == live.engine.name
    counts = answer.usage
    assert counts.input_tokens + counts.cache_read_input_tokens == len(tokens)
    assert counts.output_tokens == len(expected.tokens) and counts.cache_creation_input_tokens == 0


def test_streams_equal_wholes(live, client):
    sampled = {"temperature": 0, "top_k": 40, "top_p": 0.9}  # no arguments of the client any more
    whole = ask(live, client, extra_body=sampled)
    asked = {"model": live.engine.name, "max_tokens": 12, "messages": FOX, "extra_body": sampled}
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text and final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    read = final.usage.cache_read_input_tokens
    assert final.usage.input_tokens + read == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


def test_the_events_of_a_stream(scripted, told):
    stream = ask(scripted, told, stream=True, tools=[WEATHER], max_tokens=50)
    events = [event.to_dict() for event in stream]
    kinds = [event["type"] for event in events if event["type"] != "content_block_delta"]
    block = ["content_block_start", "content_block_stop"]
    assert [kind for kind in kinds if kind != "ping"] == [
        "message_start", *block, *block, "message_delta", "message_stop",
    ]  # fmt: skip
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert starts == ["text", "tool_use"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    written = "".join(delta["partial_json"] for delta in deltas if delta["type"] == "input_json_delta")
    assert json.loads(written) == {"city": "Paris"}
    assert {event["index"] for event in events if "index" in event} == {0, 1}


def test_the_reasons_to_stop(scripted, told):
    answer = ask(scripted, told, max_tokens=50)
    assert (answer.content[0].text, answer.stop_reason) == ("just some words and more", "end_turn")
    answer = ask(scripted, told, max_tokens=2)
    assert (answer.content[0].text, answer.stop_reason) == ("just some", "max_tokens")
    answer = ask(scripted, told, max_tokens=50, stop_sequences=["never", " and"])
    assert (answer.content[0].text, answer.stop_reason) == ("just some words", "stop_sequence")
    assert answer.stop_sequence == " and"
    answer = ask(scripted, told, max_tokens=0)
    assert (answer.content, answer.stop_reason, answer.usage.output_tokens) == ([], "max_tokens", 0)


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_are_called_and_answered(scripted, told, streamed):
    chat = [{"role": "user", "content": "how is Paris?"}]
    asked = {"model": scripted.engine.name, "max_tokens": 50, "tools": [WEATHER], "messages": chat}
    if streamed:
        with told.messages.stream(**asked) as stream:
            answer = stream.get_final_message()
    else:
        answer = told.messages.create(**asked)
    said, call = answer.content
    assert (said.text, call.name, call.input) == ("I look it up.", "weather", {"city": "Paris"})
    assert answer.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [text_block("rain")]}
    chat += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    answer = ask(scripted, told, messages=chat, tools=[WEATHER])
    assert (answer.content[0].text, answer.stop_reason) == ("it rains", "end_turn")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("choice", "kinds", "given"),
    [
        ({"type": "auto"}, ["text", "tool_use"], {"city": "Paris"}),
        ({"type": "any"}, ["tool_use"], {"city": "Paris"}),
        ({"type": "any", "disable_parallel_tool_use": True}, ["tool_use"], {"city": "Paris"}),
        ({"type": "tool", "name": "weather"}, ["tool_use"], {"city": "Paris"}),
        ({"type": "tool", "name": "light"}, ["tool_use"], {"on": False}),
        ({"type": "none"}, ["text"], None),
    ],
)
def test_calls_can_be_forced(scripted, told, choice, kinds, given, streamed):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    tools = [WEATHER, {"name": "light", "input_schema": schema}]
    asked = {"model": scripted.engine.name, "max_tokens": 200, "messages": FOX, "tools": tools, "tool_choice": choice}
    if streamed:
        with told.messages.stream(**asked) as stream:
            answer = stream.get_final_message()
    else:
        answer = told.messages.create(**asked)
    assert [block.type for block in answer.content] == kinds
    assert answer.stop_reason == ("tool_use" if given else "end_turn")
    assert given is None or answer.content[-1].input == given


@pytest.mark.parametrize("streamed", [False, True])
def test_thinking_has_a_block_of_its_own(scripted, told, streamed):
    asked = {"model": scripted.engine.name, "max_tokens": 50, "messages": FOX, "thinking": {"type": "adaptive"}}
    if streamed:
        with told.messages.stream(**asked) as stream:
            answer = stream.get_final_message()
    else:
        answer = told.messages.create(**asked)
    thought, said = answer.content
    assert (thought.type, thought.thinking, said.text) == ("thinking", "let me see", "that is it")
    chat = [*FOX, {"role": "assistant", "content": answer.content}, {"role": "user", "content": "sure?"}]
    counted = told.messages.count_tokens(model=scripted.engine.name, messages=chat).input_tokens
    plain = [*FOX, {"role": "assistant", "content": "that is it", "thinking": "let me see"}, chat[-1]]
    assert counted == len(tokens_of(scripted, plain))


def test_a_reply_that_has_begun_is_gone_on_with(live, client):
    begun = {"role": "assistant", "content": "the lazy"}
    tokens = live.engine.tokenizer.encode(ChatTemplate(live.engine.tokenizer).render(FOX) + "the lazy", special=False)
    expected = live.engine.generate(tokens, SamplingParams(max_tokens=12, temperature=0))
    assert ask(live, client, messages=[*FOX, begun]).content[0].text == expected.text


def test_tokens_are_counted(live, client):
    counted = client.messages.count_tokens(
        model=live.engine.name, messages=FOX, system=[text_block("a"), text_block("b")]
    )
    assert counted.input_tokens == len(tokens_of(live, [{"role": "system", "content": "a\nb"}, *FOX]))


def test_turns_of_one_side_count_as_one(live, client):
    chat = [{"role": "user", "content": "one"}, {"role": "user", "content": [text_block("two"), text_block("three")]}]
    counted = client.messages.count_tokens(model=live.engine.name, messages=chat)
    assert counted.input_tokens == len(tokens_of(live, [{"role": "user", "content": "one\ntwo\nthree"}]))


def test_the_second_turn_is_read_from_the_cache(live, client):
    chat = [{"role": "user", "content": "first of all: " + LONG}]
    answer = ask(live, client, messages=chat)
    chat += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "and then?"}]
    again = ask(live, client, messages=chat)
    assert again.usage.cache_read_input_tokens > 50
    whole = again.usage.input_tokens + again.usage.cache_read_input_tokens
    assert whole == client.messages.count_tokens(model=live.engine.name, messages=chat).input_tokens


@pytest.mark.parametrize("marks", [{"cache_control": MARK}, {}])
def test_marks_become_resume_points(live, client, marks):
    def usage(second: str):
        system = [text_block(f"{len(marks)} rules: {LONG}", **marks), text_block(second)]
        return ask(live, client, system=system).usage

    first, second = usage("the day is one of those"), usage("another day")
    if marks:
        assert second.cache_read_input_tokens == first.cache_read_input_tokens + first.cache_creation_input_tokens > 50
        assert second.cache_creation_input_tokens == 0
    else:
        assert second.cache_read_input_tokens < 20 and first.cache_creation_input_tokens == 0


@pytest.mark.parametrize("marks", [{"cache_control": MARK}, {}])
def test_marks_inside_of_a_message_become_resume_points(live, client, marks):
    def usage(question: str):
        blocks = [text_block(f"{len(marks)} paper: {LONG}", **marks), text_block(question)]
        return ask(live, client, messages=[{"role": "user", "content": blocks}]).usage

    first, second = usage("who runs?"), usage("and what is dark?")
    if marks:
        assert second.cache_read_input_tokens == first.cache_read_input_tokens + first.cache_creation_input_tokens > 50
    else:
        assert second.cache_read_input_tokens < 20 and first.cache_creation_input_tokens == 0


def test_a_mark_on_the_request_is_one_on_its_end(live, client):
    chat = [{"role": "user", "content": "at the end: " + LONG}]
    first = ask(live, client, messages=chat, cache_control=MARK).usage
    assert first.input_tokens < 20 < first.cache_creation_input_tokens
    assert ask(live, client, messages=chat).usage.cache_read_input_tokens > 50


def test_nothing_is_cached_where_there_is_no_cache(hybrid_folder):
    off = CacheConfig(enabled=False, device_bytes=64 << 20)
    with (
        Engine.load(hybrid_folder, dtype="float32", cache=off) as engine,
        serving(engine) as live,
        anthropic.Anthropic(base_url=live.url, api_key="any", max_retries=0) as client,
    ):
        usage = ask(live, client, messages=[{"role": "user", "content": LONG}], cache_control=MARK).usage
    assert usage.cache_creation_input_tokens == usage.cache_read_input_tokens == 0 < usage.input_tokens


def test_marks_of_tools(scripted, told):
    tools = [{**WEATHER, "name": f"tool_{at}"} for at in range(3)]
    tools[1] = {**tools[1], "cache_control": MARK}
    usage = ask(scripted, told, tools=tools, messages=[{"role": "user", "content": "tools"}]).usage
    whole = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert 0 < usage.cache_creation_input_tokens < whole


def refused(kind: type[anthropic.APIStatusError], ask_for, words: str) -> None:
    with pytest.raises(kind) as raised:
        ask_for()
    body = raised.value.body
    assert body["type"] == "error" and words in body["error"]["message"]


def test_errors(live, client):
    bad, missing = anthropic.BadRequestError, anthropic.NotFoundError
    refused(missing, lambda: ask(live, client, model="other"), "not served")
    refused(missing, lambda: ask(live, client, model="other", stream=True), "not served")
    refused(bad, lambda: ask(live, client, messages=[]), "messages")
    refused(bad, lambda: ask(live, client, extra_body={"temperature": -1}), "temperature")
    refused(bad, lambda: ask(live, client, messages=[{"role": "robot", "content": "x"}]), "messages[0].role")
    refused(bad, lambda: ask(live, client, messages=[{"role": "assistant", "content": "x"}]), "nothing to answer")
    refused(bad, lambda: ask(live, client, messages=[{"role": "user", "content": "word " * 5000}]), "shorten it")
    refused(bad, lambda: ask(live, client, tool_choice={"type": "any"}), "where no tools are given")
    refused(bad, lambda: ask(live, client, tools=[WEATHER], tool_choice={"type": "tool", "name": "x"}), "not 'x'")
    refused(bad, lambda: ask(live, client, tools=[WEATHER], tool_choice={"type": "tool"}), "tool_choice.name")
    refused(bad, lambda: ask(live, client, tools=[WEATHER], tool_choice={"type": "any"}), "no known way of calling")
    refused(bad, lambda: ask(live, client, tools=[{"type": "bash_20250124", "name": "bash"}]), "tools[0].type")
    marked = [{"role": "user", "content": [text_block("a", cache_control=MARK)] * 5}]
    refused(bad, lambda: ask(live, client, messages=marked), "5 blocks have cache_control")
    called = {"type": "tool_use", "id": "x", "name": "weather", "input": {}}
    asked = [*FOX, {"role": "assistant", "content": [called]}]
    refused(bad, lambda: ask(live, client, messages=asked), "nothing to answer")
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    asked = [{"role": "user", "content": [text_block("look"), image]}]
    refused(bad, lambda: ask(live, client, messages=asked), "messages[0].content[1].type must be text")
    result = {"type": "tool_result", "tool_use_id": "x", "content": [image]}
    refused(bad, lambda: ask(live, client, messages=[{"role": "user", "content": [result]}]), "content[0].content[0]")


def test_keys(live):
    def client(url: str, key: str) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)

    with serving(live.engine, Settings(api_keys=("secret",))) as locked:
        with client(locked.url, "wrong") as other:
            refused(anthropic.AuthenticationError, lambda: ask(live, other), "API key")
        with client(locked.url, "secret") as own:
            assert ask(live, own, max_tokens=1).usage.output_tokens == 1


def test_parallel_requests_get_what_they_would_alone(live, client):
    chats = [[{"role": "user", "content": f"number {at} of the lazy dogs"}] for at in range(8)]
    alone = [ask(live, client, messages=chat).content for chat in chats]
    with ThreadPoolExecutor(8) as pool:
        asked = pool.map(lambda chat: ask(live, client, messages=chat), chats)
        assert [answer.content for answer in asked] == alone


def test_a_client_that_leaves_stops_the_work(scripted, told):
    before = scripted.ended("cancelled")
    with held(scripted.engine, after=8):
        stream = ask(scripted, told, messages=[{"role": "user", "content": "endless"}], max_tokens=10**6, stream=True)
        for _ in range(4):
            next(stream)
        stream.close()
        assert until(scripted.all_cancelled)
    assert until(scripted.is_idle) and scripted.ended("cancelled") == before + 1
    scripted.engine.check()


def test_a_stream_that_breaks_says_so(scripted, told):
    with held(scripted.engine, after=4):
        stream = ask(scripted, told, messages=[{"role": "user", "content": "endless"}], max_tokens=10**6, stream=True)
        next(stream)
        scripted.service.cancel_all()
    with pytest.raises(anthropic.APIStatusError, match="shutting down"):
        list(stream)


def test_models_are_listed(live, client):
    [model] = client.models.list()
    assert (model.id, model.display_name, model.type) == (live.engine.name, live.engine.name, "model")
    assert model.created_at.year > 2000 and client.models.retrieve(model.id).id == model.id
    assert ask(live, client)._request_id.startswith("req-")


def test_json_schemas(live, client, scripted, told):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"]}
    wanted = {"format": {"type": "json_schema", "schema": schema | {"additionalProperties": False}}}
    answer = ask(live, client, output_config=wanted, max_tokens=60)
    assert answer.content[0].text.lstrip().startswith("{")
    asked, chat = {"output_config": wanted, "tools": [WEATHER], "max_tokens": 60}, FOX
    [call] = ask(scripted, told, messages=chat, **asked).content
    assert call.type == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    chat = [*chat, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    [said] = ask(scripted, told, messages=chat, **asked).content
    assert json.loads(said.text) == {"n": False}


def test_the_async_client(scripted):
    async def collect() -> str:
        async with (
            anthropic.AsyncAnthropic(base_url=scripted.url, api_key="any") as client,
            client.messages.stream(model=scripted.engine.name, max_tokens=50, messages=FOX) as stream,
        ):
            return "".join([text async for text in stream.text_stream])

    assert asyncio.run(collect()) == "just some words and more"
