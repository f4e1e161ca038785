"""The real `openai` client against a live server: the Responses API."""

import asyncio
import json
import socket

import httpx
import openai
import pytest
import scripted as script
from pydantic import BaseModel
from serving import Live, held, serving, until

from bough import CacheConfig, Engine, SamplingParams
from bough.engine.template import ChatTemplate
from bough.server.openai_requests import template_id
from bough.server.responses_requests import TOOL

FOX = "the quick brown fox"
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "description": "How it is", "parameters": CITY, "strict": True}
ON = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"], "additionalProperties": False}
LIGHT = {"type": "function", "name": "light", "parameters": ON, "strict": None}
SERVER = {"type": "namespace", "name": "mcp__home", "description": "At home", "tools": [LIGHT]}
# Replies with all that one can have. Each token has one that follows it, so that those of other scripts are not taken.
MORE_SCRIPTS = {
    "<|both|>": ["<think>\nhm", "\nso\n</think>", "\n\nI look", *script.SCRIPTS["<|calls|>"][1:]],
    "<|twice|>": ["I do both.\n<tool_call>\n", '{"name": "light", "arguments": {"on": true}}\n</tool_call>\n',
                  "<tool_call>", *script.SCRIPTS["<|calls|>"][3:]],
    "<|empty|>": ["<think>\n\n", "</think>", "\n\nat", " once", script.END],
}  # fmt: skip
# Replies are rendered as the model wrote them, with the token before them that chose the script.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\n' }}{% if m.role == 'assistant' %}"
    "{% if messages[loop.index0 - 1].role == 'tool' %}<|answers|>{% elif m.tool_calls and m.thinking %}<|both|>"
    "{% elif m.tool_calls | length > 1 %}<|twice|>{% elif m.tool_calls %}<|calls|>{% elif m.thinking %}<|thinks|>"
    "{% else %}<|plain|>{% endif %}{% endif %}"
    "{% if m.tool_call_id %}{{ m.name }} {{ m.tool_call_id }}: {% endif %}"
    "{% if m.thinking %}<think>\n{{ m.thinking }}\n</think>{{ '\n\n' }}{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '\n' }}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}"
    "{% if opened %}<think>{% elif messages[-1].role == 'tool' %}<|answers|>"
    "{% elif tools and 'think' in messages[-1].content %}<|both|>"
    "{% elif tools and 'twice' in messages[-1].content %}<|twice|>{% elif tools %}<|calls|>"
    "{% elif enable_thinking or reasoning_effort == 'high' %}<|thinks|>"
    "{% elif reasoning_effort == 'low' %}<|empty|>"
    "{% elif 'endless' in messages[-1].content %}<|endless|>{% else %}<|plain|>{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def live(hybrid_folder):
    with Engine.load(hybrid_folder, dtype="float32", cache=CacheConfig(device_bytes=64 << 20)) as engine:
        with serving(engine) as live:
            yield live
        engine.check()


@pytest.fixture(scope="module")
def client(live):
    with openai.OpenAI(base_url=live.url + "/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "SCRIPTS", script.SCRIPTS | MORE_SCRIPTS)
        patch.setattr(script, "TEMPLATE", TEMPLATE)
        script.scripted_folder(folder)
    with Engine.load(folder, dtype="float32", draft=None, cache=CacheConfig(device_bytes=64 << 20)) as engine:
        with serving(engine) as live:
            yield live
        engine.check()


@pytest.fixture(scope="module")
def told(scripted):
    with openai.OpenAI(base_url=scripted.url + "/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client


def ask(live: Live, client, **given):
    asked = {"model": live.engine.name, "input": FOX, "max_output_tokens": 12, "temperature": 0}
    return client.responses.create(**asked | given)


def tokens_of(live: Live, messages: list[dict], **options) -> list[int]:
    return ChatTemplate(live.engine.tokenizer).prompt(messages, **options).tokens


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def result(call_id: str, name: str = "weather", text: str = "rain") -> dict:
    return {"role": "tool", "tool_call_id": template_id(call_id), "name": name, "content": text}


def outputs_of(answer, text: str = "rain") -> list[dict]:
    """What a client sends back for the calls in a response."""
    calls = [item for item in answer.output if item.type == "function_call"]
    return [{"type": "function_call_output", "call_id": call.call_id, "output": text} for call in calls]


def test_a_response_is_what_the_engine_writes(live, client):
    messages = [{"role": "system", "content": "be brief"}, user(FOX)]
    tokens = tokens_of(live, messages)
    expected = live.engine.generate(tokens, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    answer = ask(live, client, instructions="be brief", metadata={"a": "b"}, extra_body={"ignore_eos": True})
    [item] = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")
    [part] = item.content
    assert (part.type, part.text, part.annotations, part.logprobs) == ("output_text", expected.text, [], [])
    assert answer.output_text == expected.text and answer.incomplete_details.reason == "max_output_tokens"
    assert (answer.status, answer.object, answer.model) == ("incomplete", "response", live.engine.name)
    assert answer.id.startswith("resp_") and answer.created_at > 1e9 and answer.error is None
    assert (answer.instructions, answer.metadata, answer.max_output_tokens) == ("be brief", {"a": "b"}, 12)
    assert (answer.tools, answer.tool_choice, answer.parallel_tool_calls) == ([], "auto", True)
    assert (answer.temperature, answer.text.format.type, answer.truncation) == (0, "text", "disabled")
    assert answer.to_dict()["store"] is False
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (len(tokens), 12, len(tokens) + 12)
    assert usage.output_tokens_details.reasoning_tokens == 0
    checked = type(answer).model_validate(answer.to_dict())  # no field that the client's types need is missing
    assert checked.id == answer.id


def test_the_end_of_a_response(scripted, told):
    answer = ask(scripted, told)
    assert (answer.status, answer.output_text, answer.incomplete_details) == (
        "completed",
        "just some words and more",
        None,
    )
    assert answer.completed_at >= answer.created_at and answer.output[0].status == "completed"
    assert ask(scripted, told, max_output_tokens=2).output_text == "just some"
    assert ask(scripted, told, max_output_tokens=0).output == []
    stopped = ask(scripted, told, extra_body={"stop": [" and"]})
    assert (stopped.status, stopped.output_text) == ("completed", "just some words")
    silent = ask(scripted, told, extra_body={"stop": ["just"]})
    assert (silent.status, silent.output[0].type, silent.output_text) == ("completed", "message", "")


@pytest.mark.parametrize("seed", [None, 7])
def test_streams_equal_wholes(live, client, seed):
    sampled = {} if seed is None else {"temperature": 1.5, "top_p": 0.9, "extra_body": {"seed": seed, "top_k": 50}}
    whole = ask(live, client, **sampled)
    events = list(ask(live, client, stream=True, **sampled))
    assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == whole.output_text
    final = events[-1].response
    assert (final.output_text, final.status, final.usage.output_tokens) == (
        whole.output_text, whole.status, whole.usage.output_tokens,
    )  # fmt: skip
    params = SamplingParams(max_tokens=12, temperature=0)
    if seed is not None:
        params = SamplingParams(max_tokens=12, temperature=1.5, top_p=0.9, top_k=50, seed=seed)
    assert live.engine.generate(tokens_of(live, [user(FOX)]), params).text == whole.output_text


ITEM = ["response.output_item.added", "response.output_item.done"]
PART = ["response.content_part.added", "response.content_part.done"]


def test_the_events_of_a_stream(scripted, told):
    events = list(ask(scripted, told, input="think", tools=[WEATHER], stream=True, max_output_tokens=50))
    kinds = [event.type for event in events]
    once = [kind for at, kind in enumerate(kinds) if at == 0 or kind != kinds[at - 1]]
    assert once == [
        "response.created", "response.in_progress",
        ITEM[0], PART[0], "response.reasoning_text.delta", "response.reasoning_text.done", PART[1], ITEM[1],
        ITEM[0], PART[0], "response.output_text.delta", "response.output_text.done", PART[1], ITEM[1],
        ITEM[0], "response.function_call_arguments.delta", "response.function_call_arguments.done", ITEM[1],
        "response.completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [(e.response.status, e.response.output) for e in events[:2]] == [("in_progress", [])] * 2
    final = events[-1].response
    assert final.id == events[0].response.id
    added = [event for event in events if event.type == ITEM[0]]
    assert [each.item.status for each in added] == ["in_progress"] * 3
    assert [event.item for event in events if event.type == ITEM[1]] == final.output
    for event in events:
        if hasattr(event, "item_id"):
            assert event.item_id == added[event.output_index].item.id == final.output[event.output_index].id
    for kind, at in (("reasoning_text", 0), ("output_text", 1)):
        deltas = [event.delta for event in events if event.type == f"response.{kind}.delta"]
        [done] = [event.text for event in events if event.type == f"response.{kind}.done"]
        assert len(deltas) > 1 and "".join(deltas) == done == final.output[at].content[0].text
    [arguments] = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
    assert arguments == final.output[2].arguments and json.loads(arguments) == {"city": "Paris"}


def test_the_wire_format(scripted):
    body = {"input": "x", "stream": True, "stream_options": {"include_obfuscation": False}, "max_output_tokens": 1}
    answer = httpx.post(scripted.url + "/v1/responses", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, rest = answer.text.split("\n\n")
    assert rest == "" and len(events) > 5
    for event in events:  # each says its name twice, and none is [DONE]
        name, data = event.split("\n")
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")
    assert name == "event: response.incomplete"


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_are_called_and_answered(scripted, told, streamed):
    conversation = [user("think, how is Paris?")]
    asked = {"model": scripted.engine.name, "tools": [WEATHER, LIGHT], "input": conversation}
    if streamed:
        with told.responses.stream(**asked) as stream:
            kinds = {event.type for event in stream}
            answer = stream.get_final_response()
        assert "response.function_call_arguments.delta" in kinds
    else:
        answer = told.responses.create(**asked)
    thought, said, call = answer.output
    assert (thought.type, thought.summary, thought.content[0].text) == ("reasoning", [], "hm\nso")
    assert (said.type, said.content[0].text, said.status) == ("message", "I look it up.", "completed")
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Paris"})
    assert answer.status == call.status == "completed" and call.id != call.call_id
    assert answer.usage.output_tokens_details.reasoning_tokens == 2
    assert [tool.name for tool in answer.tools] == ["weather", "light"] and answer.tools[0].strict is True
    conversation += [*answer.output, *outputs_of(answer)]
    again = ask(scripted, told, input=conversation, tools=[WEATHER, LIGHT])
    assert (again.output_text, len(again.output)) == ("it rains", 1)


@pytest.mark.parametrize("several", [False, True])
def test_calls_are_told_one_or_all(scripted, told, several):
    answer = ask(
        scripted, told, input="twice", tools=[WEATHER, LIGHT], max_output_tokens=50, parallel_tool_calls=several
    )
    calls = [item.name for item in answer.output if item.type == "function_call"]
    assert calls == ["light", "weather"][: 1 + several] and answer.parallel_tool_calls is several


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("choice", "kinds", "called"),
    [
        ("auto", ["message", "function_call"], "weather"),
        ("none", ["message"], None),
        ("required", ["function_call"], "weather"),
        ({"type": "function", "name": "light"}, ["function_call"], "light"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "light"}]},
         ["function_call"], "light"),
    ],
)  # fmt: skip
def test_calls_can_be_forced(scripted, told, choice, kinds, called, streamed):
    pytest.importorskip("llguidance")
    asked = {"tools": [WEATHER, LIGHT], "tool_choice": choice, "max_output_tokens": 200}
    answer = ask(scripted, told, stream=streamed, **asked)
    answer = list(answer)[-1].response if streamed else answer
    assert [item.type for item in answer.output] == kinds and answer.status == "completed"
    assert called is None or answer.output[-1].name == called


def test_allowed_tools_are_all_that_is_told(scripted, told):
    some = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "light"}]}
    chosen = ask(scripted, told, tools=[WEATHER, LIGHT], tool_choice=some)
    alone = ask(scripted, told, tools=[LIGHT])
    assert chosen.usage.input_tokens == alone.usage.input_tokens


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_of_namespaces(scripted, told, streamed):
    pytest.importorskip("llguidance")
    chosen = {"type": "function", "name": "mcp__home__light"}
    conversation = [user("light!")]
    asked = {"tools": [WEATHER, SERVER], "tool_choice": chosen, "max_output_tokens": 200, "input": conversation}
    answer = ask(scripted, told, stream=streamed, **asked)
    answer = list(answer)[-1].response if streamed else answer
    [call] = answer.output
    assert (call.namespace, call.name, json.loads(call.arguments)) == ("mcp__home", "light", {"on": False})
    conversation += [*answer.output, *outputs_of(answer, "on")]
    function = {"name": "mcp__home__light", "arguments": {"on": False}}
    messages = [conversation[0], {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
                result(call.call_id, "mcp__home__light", "on")]  # fmt: skip
    tools = [{"type": "function", "function": {"name": "mcp__home__light", "parameters": ON}}]
    assert_prompt(scripted, told, tokens_of(scripted, messages, tools=tools), input=conversation, tools=[SERVER])


def test_other_tools_are_left_out(scripted, told):
    """Agents send them beside their functions; a request with no others wants what there is not."""
    others = [{"type": "web_search"}, {"type": "custom", "name": "apply_patch", "format": {"type": "text"}}]
    answer = ask(scripted, told, tools=[*others, WEATHER], max_output_tokens=50)
    assert [tool.type for tool in answer.tools] == ["function"] and answer.output[-1].name == "weather"
    assert answer.usage.input_tokens == ask(scripted, told, tools=[WEATHER]).usage.input_tokens
    refused(lambda: ask(scripted, told, tools=others), "tools[0].type", "'web_search'")
    jsonschema = pytest.importorskip("jsonschema_rs")  # which schemathesis brings
    described = jsonschema.validator_for(TOOL.schema())
    assert all(map(described.is_valid, [*others, WEATHER, SERVER])) and not described.is_valid({"type": "function"})


@pytest.mark.parametrize("streamed", [False, True])
def test_thinking_is_an_item_of_its_own(scripted, told, streamed):
    asked = {"reasoning": {"effort": "high", "summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    answer = ask(scripted, told, stream=streamed, **asked)
    answer = list(answer)[-1].response if streamed else answer
    thought, said = answer.output
    assert (thought.type, thought.content[0].type, thought.content[0].text) == (
        "reasoning",
        "reasoning_text",
        "let me see",
    )
    assert (said.content[0].text, answer.output_text) == ("that is it", "that is it")
    assert answer.reasoning.effort == "high" and answer.usage.output_tokens_details.reasoning_tokens == 4
    cut = ask(scripted, told, max_output_tokens=3, reasoning={"effort": "high"})
    assert [(item.type, item.status) for item in cut.output] == [("reasoning", "incomplete")]
    assert cut.usage.output_tokens_details.reasoning_tokens == 3
    assert ask(scripted, told, reasoning={"effort": "none"}).output_text == "just some words and more"


def assert_prompt(live: Live, client, tokens: list[int], **given) -> None:
    """That a request has the prompt of these tokens: all but the last are cached once the engine has read them."""
    salt = json.dumps(given, default=str)
    live.engine.generate(tokens, SamplingParams(max_tokens=1, temperature=0, cache_salt=salt))
    usage = ask(live, client, extra_body={"cache_salt": salt}, **given).usage
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens) == (len(tokens), len(tokens) - 1)


def call_item(number: int, city: str) -> dict:
    return {
        "type": "function_call",
        "call_id": f"call_{number}",
        "name": "weather",
        "arguments": f'{{"city": "{city}"}}',
    }


def thought_item(text: str, **more) -> dict:
    return {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
    } | more


def output_item(number: int, output) -> dict:
    return {"type": "function_call_output", "call_id": f"call_{number}", "output": output}


def assistant(content: str, *cities: str, thinking: str | None = None) -> dict:
    calls = [{"function": {"name": "weather", "arguments": {"city": city}}} for city in cities]
    more = ({"tool_calls": calls} if calls else {}) | ({"thinking": thinking} if thinking else {})
    return {"role": "assistant", "content": content} | more


def said(text: str, kind: str = "output_text") -> dict:
    part = {"type": kind, "refusal" if kind == "refusal" else "text": text}
    return {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [part]}


SYSTEM, RAIN = {"role": "system", "content": "be brief"}, [result("call_1"), result("call_2")]
PARTS = [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]
SUMMED = {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "hm"}]}


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ({"input": FOX}, [user(FOX)]),
        ({"input": FOX, "instructions": "be brief"}, [SYSTEM, user(FOX)]),
        ({"input": [{"role": "developer", "content": "be brief"}, user(FOX)]}, [SYSTEM, user(FOX)]),
        (  # many templates take one system message, and turns that alternate
            {"input": [{"role": "developer", "content": "brief"}, user("one"), user("two")], "instructions": "be"},
            [{"role": "system", "content": "be\nbrief"}, user("one\ntwo")],
        ),
        ({"input": [{"type": "message", "role": "user", "content": PARTS}]}, [user("one\ntwo")]),
        ({"input": [user("a"), assistant("b"), user("c")]}, [user("a"), assistant("b"), user("c")]),
        ({"input": [user("a"), said("no", "refusal"), user("c")]}, [user("a"), assistant("no"), user("c")]),
        (  # a reply is one message
            {"input": [user("a"), thought_item("hm"), said("b"), call_item(1, "Rome"), call_item(2, "Paris"),
                       output_item(1, "rain"), output_item(2, [{"type": "input_text", "text": "rain"}]), user("c")]},
            [user("a"), assistant("b", "Rome", "Paris", thinking="hm"), *RAIN, user("c")],
        ),
        (  # text after a call does not part it from its result
            {"input": [user("a"), call_item(1, "Rome"), said("b"), output_item(1, "rain")]},
            [user("a"), assistant("b", "Rome"), RAIN[0]],
        ),
        (  # two replies are two
            {"input": [user("a"), said("b"), thought_item("hm"), said("c"), said("d"), user("e")]},
            [user("a"), assistant("b"), assistant("c", thinking="hm"), assistant("d"), user("e")],
        ),
        ({"input": [user("a"), SUMMED, said("b"), user("c")]}, [user("a"), assistant("b", thinking="hm"), user("c")]),
        (  # one thought after another is one
            {"input": [user("a"), thought_item("hm"), thought_item("so"), said("b"), user("c")]},
            [user("a"), assistant("b", thinking="hm\nso"), user("c")],
        ),
        (  # what another server has encrypted
            {"input": [user("a"), thought_item("", content=None, encrypted_content="x"), said("b"), user("c")]},
            [user("a"), assistant("b"), user("c")],
        ),
    ],
)  # fmt: skip
def test_items_become_messages(scripted, told, given, messages):
    assert_prompt(scripted, told, tokens_of(scripted, messages), **given)


TURNS = {
    "text": ("hello", {}),
    "thinking": ("hello", {"reasoning": {"effort": "high"}}),
    "a call": ("hello", {"tools": [WEATHER, LIGHT]}),
    "two calls": ("twice", {"tools": [WEATHER, LIGHT]}),
    "all": ("think", {"tools": [WEATHER, LIGHT]}),
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("turn", TURNS)
def test_the_next_turn_goes_on_where_the_reply_ended(scripted, told, turn, streamed):
    text, given = TURNS[turn]

    def asking(salt: str, conversation: list, **more):
        extra = {"cache_salt": f"{turn} {streamed} {salt}"}
        return ask(scripted, told, input=conversation, max_output_tokens=50, extra_body=extra, **given, **more)

    conversation = [user(text)]
    first = asking("warm", conversation, stream=streamed)
    first = list(first)[-1].response if streamed else first
    assert first.status == "completed"
    conversation += [*first.output, *(outputs_of(first) or [user("so?")])]
    warm, cold = asking("warm", conversation), asking("cold", conversation)
    # All of the first turn, but perhaps for the token that ended it.
    assert warm.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1
    assert cold.usage.input_tokens_details.cached_tokens == 0
    assert (warm.usage.input_tokens, warm.output_text) == (cold.usage.input_tokens, cold.output_text)


def test_turns_are_cached_as_those_of_chat_completions(live, client):
    def turns(salt: str, reply) -> list[tuple[int, int, str]]:
        messages, told = [], []
        for text in ("away from a very old bear", "and the lazy dog", "over the dark forest"):
            messages.append(user(text))
            prompt, cached, said = reply(messages, {"cache_salt": salt})
            messages.append({"role": "assistant", "content": said})
            told.append((prompt, cached, said))
        return told

    def response(messages, extra):
        answer = ask(live, client, input=messages, extra_body=extra)
        return answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens, answer.output_text

    def completion(messages, extra):
        asked = {"model": live.engine.name, "max_tokens": 12, "temperature": 0, "extra_body": extra}
        answer = client.chat.completions.create(messages=messages, **asked)
        usage, said = answer.usage, answer.choices[0].message.content
        return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, said

    here = turns("responses", response)
    assert here == turns("chat", completion)
    assert [cached > 0 for _, cached, _ in here] == [False, True, True]


class Lamp(BaseModel):
    on: bool


@pytest.mark.parametrize("opened", [False, True])
def test_replies_are_parsed(scripted, told, opened):
    """After thinking too, which the prompt has opened."""
    pytest.importorskip("llguidance")
    asked = {"model": scripted.engine.name, "input": "is it on?", "temperature": 0, "max_output_tokens": 100}
    asked |= {"extra_body": {"chat_template_kwargs": {"opened": opened}}, "text_format": Lamp}
    answer = told.responses.parse(**asked)
    assert answer.output_parsed == Lamp(on=False) and answer.text.format.type == "json_schema"
    assert [item.type for item in answer.output] == ["reasoning"] * opened + ["message"]
    with told.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_parsed == Lamp(on=False)


def test_a_parsed_answer_comes_after_calls(scripted, told):
    pytest.importorskip("llguidance")
    asked = {"model": scripted.engine.name, "temperature": 0, "max_output_tokens": 100, "text_format": Lamp}
    asked["tools"] = [{**WEATHER, "strict": True}]
    answer = told.responses.parse(input=[user(FOX)], **asked)
    assert [item.type for item in answer.output] == ["function_call"] and answer.output_parsed is None
    told_back = [item.to_dict() for item in answer.output]
    answer = told.responses.parse(input=[user(FOX), *told_back, *outputs_of(answer)], **asked)
    assert answer.output_parsed == Lamp(on=False)


def test_json_objects(live, client):
    pytest.importorskip("llguidance")
    answer = ask(live, client, text={"format": {"type": "json_object"}, "verbosity": "low"})
    assert answer.output_text.lstrip().startswith("{")


@pytest.mark.parametrize(("effort", "thinking"), [("none", 0), ("low", 2), ("high", 4)])
def test_logprobs(scripted, told, effort, thinking):
    """Of the tokens of the text alone; thinking may be empty."""
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "reasoning": {"effort": effort}}
    whole = ask(scripted, told, **asked)
    assert whole.usage.output_tokens_details.reasoning_tokens == thinking
    listed = whole.output[-1].content[0].logprobs
    text = "".join(each.token for each in listed)
    assert text.strip() == whole.output_text != "" and whole.top_logprobs == 2
    assert all(len(each.top_logprobs) == 2 and bytes(each.bytes).decode() == each.token for each in listed)
    assert listed[-1].logprob == listed[-1].top_logprobs[0].logprob < 0  # greedy
    events = list(ask(scripted, told, stream=True, **asked))
    deltas = [each for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
    [done] = [event.logprobs for event in events if event.type == "response.output_text.done"]
    assert [each.token for each in deltas] == [each.token for each in done] == [each.token for each in listed]
    assert [each.token for each in events[-1].response.output[-1].content[0].logprobs] == [
        each.token for each in listed
    ]
    assert ask(scripted, told, top_logprobs=2).output[0].content[0].logprobs == []


def refused(ask_for, param: str | None, words: str, kind: type[openai.APIStatusError] = openai.BadRequestError) -> None:
    with pytest.raises(kind) as raised:
        ask_for()
    assert words in raised.value.message and raised.value.param == param, raised.value.message
    assert raised.value.type == "invalid_request_error"


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation as input"),
        ({"conversation": "conv_1"}, "conversation", "send the whole conversation as input"),
        ({"conversation": {"id": "conv_1"}}, "conversation", "send the whole conversation as input"),
        ({"background": True}, "background", "stream the response instead"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "send instructions and input instead"),
        ({"input": []}, "input", "not empty"),
        ({"input": openai.omit}, "input", "given"),
        ({"input": 5}, "input", "text, or a list of items"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "'developer', not 'robot'"),
        ({"input": [{"content": "x"}]}, "input[0].role", "given"),
        ({"input": [user("x"), {"type": "item_reference", "id": "msg_1"}]}, "input[1].type", "nothing is stored"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].type", "reads nothing else"),
        ({"input": [output_item(1, [IMAGE])]}, "input[0].output[0].type", "reads nothing else"),
        ({"input": [{"type": "function_call", "name": "x", "arguments": "{}"}]}, "input[0].call_id", "given"),
        ({"input": "word " * 5000}, None, "shorten it"),
        ({"temperature": -1}, "temperature", "0 or more"),
        ({"max_output_tokens": 1.5}, "max_output_tokens", "whole number"),
        ({"truncation": "some"}, "truncation", "one of"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "given"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "not 'weather'"),
        ({"tools": [{**LIGHT, "name": "mcp__home__light"}, SERVER]}, "tools", "not 'mcp__home__light'"),
        ({"tool_choice": "required"}, "tool_choice", "where no tools are given"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name", "not 'x'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "web_search_preview"}}, "tool_choice.type", "tools of its own"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "x"}]}},
            "tool_choice.tools", "not 'x'",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "given"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "one of"),
        ({"include": ["message.output_text.logprobs"], "tools": [WEATHER]}, "include", "where tools are given"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, None, "cannot be set"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("streamed", [False, True])
def test_mistakes_name_the_field(live, client, given, param, words, streamed):
    refused(lambda: ask(live, client, stream=streamed, **given), param, words)


def test_what_makes_no_difference(live, client):
    plain = ask(live, client)
    given = {"store": True, "truncation": "auto", "service_tier": "flex", "prompt_cache_key": "a", "user": "me"}
    extra = {"safety_identifier": "b", "unknown": {"x": 1}, "previous_response_id": None, "background": False}
    answer = ask(live, client, **given, extra_body=extra)
    assert answer.output_text == plain.output_text and answer.usage.input_tokens == plain.usage.input_tokens
    assert (answer.prompt_cache_key, answer.safety_identifier, answer.truncation) == ("a", "b", "disabled")


def test_other_models_and_stored_responses(live, client):
    refused(lambda: ask(live, client, model="gpt-9"), "model", "not served", openai.NotFoundError)
    refused(lambda: ask(live, client, model="gpt-9", stream=True), "model", "not served", openai.NotFoundError)
    for method in (client.responses.retrieve, client.responses.delete):
        refused(lambda m=method: m("resp_1"), "response_id", "none is stored here", openai.NotFoundError)


@pytest.mark.parametrize("streamed", [False, True])
def test_it_is_described_counted_and_logged(live, client, caplog, streamed):
    paths = live.client.get("/openapi.json").json()["paths"]
    assert paths["/v1/responses"]["post"]["requestBody"]
    assert paths["/v1/responses/{response_id}"].keys() == {"get", "delete"}

    def noted() -> list[dict]:
        facts = [getattr(record, "facts", {}) for record in list(caplog.records)]
        return [each for each in facts if each.get("id") == f"log-{streamed}"]

    with caplog.at_level("INFO", "bough.server"):
        answer = ask(live, client, stream=streamed, extra_headers={"X-Request-Id": f"log-{streamed}"})
        answer = list(answer)[-1].response if streamed else answer
        assert until(noted)  # it is written when the answer has been sent
    [facts] = noted()
    assert (facts["path"], facts["completion_tokens"]) == ("/v1/responses", answer.usage.output_tokens)
    samples = live.client.get("/metrics").text
    assert 'bough_http_requests_total{method="POST",path="/v1/responses",status="200"}' in samples


def ask_and_leave(live: Live, body: dict) -> None:
    """Send a question, and hang up when it is being answered."""
    sent, address = json.dumps(body).encode(), httpx.URL(live.url)
    with socket.create_connection((address.host, address.port)) as connection:
        head = f"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(sent)}\r\n\r\n"
        connection.sendall(head.encode() + sent)
        assert until(lambda: live.service.running)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_leaves_stops_the_work(scripted, told, streaming):
    before = scripted.ended("cancelled")
    with held(scripted.engine, after=8):
        if streaming:
            stream = ask(scripted, told, input="endless", max_output_tokens=10**6, stream=True)
            for _ in range(4):
                next(stream)
            stream.close()
        else:
            ask_and_leave(scripted, {"input": "endless", "temperature": 0})
        assert until(scripted.all_cancelled)
    assert until(scripted.is_idle) and scripted.ended("cancelled") == before + 1
    scripted.engine.check()


def test_a_stream_that_breaks_says_so(scripted, told):
    with held(scripted.engine, after=4):
        stream = ask(scripted, told, input="endless", max_output_tokens=10**6, stream=True)
        events = [next(stream) for _ in range(5)]
        scripted.service.cancel_all()
    events += list(stream)
    error, failed = events[-2:]
    assert (error.type, error.code) == ("error", "closing") and "shutting down" in error.message
    assert (failed.type, failed.response.status) == ("response.failed", "failed")
    assert failed.response.error.code == "server_error" and "shutting down" in failed.response.error.message
    [item] = failed.response.output
    written = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert (item.status, item.content[0].text) == ("incomplete", written) and written
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_a_stream_says_that_it_is_alive(scripted, monkeypatch):
    monkeypatch.setattr("bough.server.generation.PULSE", 0.01)
    body = {"input": "just a moment", "stream": True, "max_output_tokens": 3, "temperature": 0}
    with held(scripted.engine, after=1), scripted.client.stream("POST", "/v1/responses", json=body) as answer:
        lines = answer.iter_lines()
        assert next(line for line in lines if line.startswith(":")) == ": still working"
    assert until(scripted.is_idle)


def test_the_async_client(scripted):
    async def collect() -> tuple[str, list[str], str]:
        async with openai.AsyncOpenAI(base_url=scripted.url + "/v1", api_key="any", max_retries=0) as client:
            asked = {"model": scripted.engine.name, "input": [user("hello")], "temperature": 0}
            whole = await client.responses.create(**asked, tools=[WEATHER])
            kinds = [event.type async for event in await client.responses.create(**asked, stream=True)]
            async with client.responses.stream(**asked) as stream:
                final = await stream.get_final_response()
            return whole.output[-1].name, kinds, final.output_text

    name, kinds, text = asyncio.run(collect())
    assert (name, kinds[-1], text) == ("weather", "response.completed", "just some words and more")
