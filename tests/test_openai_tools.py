"""The real `openai` client against a live server: tools, and what else a reply has beside text."""

import json
import re
import sys

import openai
import pytest
from conftest import add_tokenizer
from scripted import scripted_folder
from serving import serving
from test_openai_api import HELLO, chat

from bough import CacheConfig, Engine
from bough.engine.request import Handle, Output, Piece, Request, Usage

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
TOOL_TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.tool_call_id %}[{{ m.tool_call_id }}]{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.id }} {{ c.function.arguments.city }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
    "{# <think> </think> #}"
)
REPLY = (
    "<think>\nrain?\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def tooled(hybrid_folder, tmp_path_factory):
    """A server whose model always writes the same reply."""
    folder = tmp_path_factory.mktemp("tooled")
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(hybrid_folder / name)
    add_tokenizer(folder, TOOL_TEMPLATE)
    with Engine.load(folder, dtype="float32", cache=CacheConfig(device_bytes=64 << 20)) as engine:

        def submit(prompt, params, *, boundaries=(), marks=()) -> Handle:
            tokens = engine.tokenize(REPLY)
            handle = Handle(Request(tuple(prompt), params, 0), has_text=True)
            asked.append(engine.tokenizer.decode(prompt, skip_special=False))
            for token in tokens:
                handle.put(Piece(engine.tokenizer.decode([token]), [token]))
            handle.end(Output(REPLY, tokens, "stop", Usage(len(prompt), 0, 0, len(tokens)), [], []))
            return handle

        asked: list[str] = []
        with pytest.MonkeyPatch.context() as patch, serving(engine) as live:
            patch.setattr(engine, "submit", submit)
            with openai.OpenAI(base_url=live.url + "/v1", api_key="any", max_retries=0) as client:
                yield live, client, asked


def test_tool_calls(tooled):
    live, client, asked = tooled
    answer = chat(live, client, tools=TOOLS)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    assert choice.message.reasoning_content == "rain?"
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    assert '"name": "weather"' in asked[-1]

    messages = [*HELLO, choice.message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    chat(live, client, tools=TOOLS, messages=messages)
    [sent] = re.findall(r"<tool_call>(\w+) Rome</tool_call>", asked[-1])
    assert re.fullmatch("[a-zA-Z0-9]{9}", sent) and f"[{sent}]sunny" in asked[-1]  # as Mistral's templates want it

    without = chat(live, client, tools=TOOLS, tool_choice="none").choices[0]
    assert without.message.tool_calls is None and "<tool_call>" in without.message.content
    assert without.finish_reason == "stop" and "weather" not in asked[-1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_calls_are_told_one_or_all(tooled, monkeypatch, several, stream):
    live, client, _ = tooled
    monkeypatch.setattr(sys.modules[__name__], "REPLY", REPLY + REPLY[REPLY.index("<tool_call>") :])
    answer = chat(live, client, tools=TOOLS, parallel_tool_calls=several, stream=stream)
    if stream:
        calls = [call for chunk in answer for call in chunk.choices[0].delta.tool_calls or ()]
        assert [call.index for call in calls] == list(range(1 + several))
    else:
        calls = answer.choices[0].message.tool_calls
    assert [call.function.name for call in calls] == ["weather"] * (1 + several)


def test_streamed_tool_calls(tooled):
    live, client, _ = tooled
    chunks = list(chat(live, client, tools=TOOLS, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "rain?"
    [call] = [call for delta in deltas for call in delta.tool_calls or []]
    assert (call.index, call.function.name) == (0, "weather") and call.id
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    folder = scripted_folder(tmp_path_factory.mktemp("scripted"))
    with Engine.load(folder, dtype="float32", draft=None, cache=CacheConfig(device_bytes=64 << 20)) as engine:
        with serving(engine) as live, openai.OpenAI(base_url=live.url + "/v1", api_key="any", max_retries=0) as client:
            yield live, client
        engine.check()


CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]}
LIGHT = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
BOTH = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "light", "parameters": LIGHT}},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "said", "name", "arguments"),
    [
        ("auto", "I look it up.", "weather", {"city": "Paris"}),
        ("required", "", "weather", {"city": "Paris"}),
        ({"type": "function", "function": {"name": "weather"}}, "", "weather", {"city": "Paris"}),
        ({"type": "function", "function": {"name": "light"}}, "", "light", {"on": False}),
    ],
)
def test_calls_can_be_forced(scripted, stream, choice, said, name, arguments):
    pytest.importorskip("llguidance")
    live, client = scripted
    answer = chat(live, client, tools=BOTH, tool_choice=choice, max_tokens=200, stream=stream)
    if stream:
        choices = [chunk.choices[0] for chunk in answer]
        text = "".join(each.delta.content or "" for each in choices)
        [call] = [call for each in choices for call in each.delta.tool_calls or ()]
    else:
        choices = answer.choices
        text, [call] = choices[0].message.content or "", choices[0].message.tool_calls
    assert (text, call.function.name, json.loads(call.function.arguments)) == (said, name, arguments)
    assert choices[-1].finish_reason == "tool_calls"


def test_json_by_a_schema_comes_after_thinking(scripted):
    pytest.importorskip("llguidance")
    wanted = {"type": "json_schema", "json_schema": {"schema": LIGHT | {"additionalProperties": False}}}
    extra = {"chat_template_kwargs": {"opened": True}}
    message = chat(*scripted, response_format=wanted, max_tokens=60, extra_body=extra).choices[0].message
    assert (message.reasoning_content, json.loads(message.content)) == ("let me see", {"on": False})


def test_an_answer_of_a_format_comes_beside_tools(scripted):
    """First a call and nothing before it, then the answer; without a call where none may be."""
    pytest.importorskip("llguidance")
    wanted = {"type": "json_schema", "json_schema": {"schema": LIGHT | {"additionalProperties": False}}}
    asked = {"response_format": wanted, "tools": BOTH, "max_tokens": 60}
    message = chat(*scripted, **asked).choices[0].message
    assert message.content is None and [call.function.name for call in message.tool_calls] == ["weather"]
    messages = [*HELLO, message.to_dict(), {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "x"}]
    message = chat(*scripted, messages=messages, **asked).choices[0].message
    assert json.loads(message.content) == {"on": False} and message.tool_calls is None
    message = chat(*scripted, tool_choice="none", **asked).choices[0].message
    assert json.loads(message.content) == {"on": False}


def test_thinking_can_be_asked_not_to_be(scripted):
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    assert chat(*scripted, extra_body=extra).choices[0].message.reasoning_content == "let me see"
    message = chat(*scripted, reasoning_effort="none").choices[0].message
    assert message.content == "just some words and more"


def test_calls_that_cannot_be_forced(scripted):
    pytest.importorskip("llguidance")
    with pytest.raises(openai.BadRequestError, match="one of the tools, not 'lights'"):
        chat(*scripted, tools=BOTH, tool_choice={"type": "function", "function": {"name": "lights"}})
    wrong = [{"type": "function", "function": {"name": "weather", "parameters": {"properties": {"a": {"type": 5}}}}}]
    with pytest.raises(openai.BadRequestError, match="cannot be used"):
        chat(*scripted, tools=wrong, tool_choice="required")
