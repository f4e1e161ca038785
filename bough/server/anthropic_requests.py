"""What Anthropic's API lets a client ask: the tables of its fields, and how they become prompts and sampling.

Its `cache_control` marks say where prompts will branch: each becomes a boundary, as long as what the prompt has in
common with the render of the chat that is cut there. What cannot be honoured is refused; unknown names are ignored.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bough.config import Grammar, SamplingParams
from bough.engine.template import ChatTemplate, Transcript
from bough.errors import TemplateError
from bough.server.errors import ApiError
from bough.server.generation import Prompt, Service
from bough.server.openai_requests import LEAST_TOP_P, template_id
from bough.server.schema import Either, Flag, Invalid, Listed, Number, Record, Shape, Text, Whole

MARK = Record({}, open=True, about="a place at which other requests will go on differently")
BLOCK = Record(
    {
        "type": Text(least=1, about="text, tool_use, tool_result or thinking"),
        "text": Text(),
        "thinking": Text(),
        "id": Text(),
        "name": Text(),
        "input": Record({}, open=True),
        "tool_use_id": Text(),
        "content": Either((Text(), Listed(Record({"type": Text(), "text": Text()}, ("type",)))), "text, or blocks"),
        "cache_control": MARK,
    },
    needed=("type",),
)
BLOCKS = Either((Text(), Listed(BLOCK)), "text, or a list of blocks")
TOOL = Record(
    {
        "type": Text(),
        "name": Text(least=1),
        "description": Text(),
        "input_schema": Record({}, open=True),
        "cache_control": MARK,
    },
    needed=("name",),
)
COUNTED: dict[str, Shape] = {
    "model": Text(about="the name that /v1/models tells; none: the one there is"),
    "messages": Listed(
        Record({"role": Text(("user", "assistant", "system")), "content": BLOCKS}, ("role", "content")), least=1
    ),
    "system": BLOCKS,
    "tools": Listed(TOOL),
    "tool_choice": Record(
        {
            "type": Text(("auto", "none", "any", "tool")),
            "name": Text(about="of the tool"),
            "disable_parallel_tool_use": Flag(about="true: at most one call"),
        },
        ("type",),
    ),
    "thinking": Record({"type": Text(("enabled", "disabled", "adaptive"))}, ("type",)),
    "cache_control": Record({}, open=True, about="marks the last block"),
    "output_config": Record(
        {"format": Record({"type": Text(("json_schema",)), "schema": Record({}, open=True)}, ("type", "schema"))}
    ),
}
COUNT = Record(COUNTED, needed=("messages",))
MESSAGES = Record(
    COUNTED
    | {
        "max_tokens": Whole(0, about="the most tokens to write; 0: only read the prompt"),
        "temperature": Number(0),
        "top_p": Number(0, 1),
        "top_k": Whole(0),
        "stop_sequences": Listed(Text(least=1), most=64),
        "stream": Flag(),
    },
    needed=("messages", "max_tokens"),
)
MOST_MARKS = 4  # as Anthropic has it; each costs a render of the chat
OTHER = "\x00"  # a text that begins like no other


def sampling(body: Mapping[str, Any], defaults: SamplingParams, salt: str | None) -> SamplingParams:
    given: dict[str, Any] = {"max_tokens": body["max_tokens"], "cache_salt": salt}
    given |= {name: body[name] for name in ("temperature", "top_k") if name in body}
    if "top_p" in body:
        given["top_p"] = max(body["top_p"], LEAST_TOP_P)
    if "stop_sequences" in body:
        given["stop"] = body["stop_sequences"]
    if schema := _schema(body):
        given["grammar"] = Grammar.json_schema(schema["schema"])
    return replace(defaults, **given)


def _schema(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found: Mapping[str, Any] | None = body.get("output_config", {}).get("format")
    return found


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation in this API's form: what the template is given, and places in it."""

    system: list[dict[str, Any]]  # blocks
    messages: list[dict[str, Any]]  # with lists of blocks for content
    tools: list[dict[str, Any]]

    def plain(self) -> list[dict[str, Any]]:
        """Messages as chat templates read them."""
        system = "\n".join(_text(block, f"system[{at}]") for at, block in enumerate(self.system))
        told: list[dict[str, Any]] = [{"role": "system", "content": [system]}] if self.system else []
        called: dict[str, str] = {}
        for at, message in enumerate(self.messages):
            for each in _plain(message["role"], message["content"], f"messages[{at}].content"):
                called |= {call["id"]: call["function"]["name"] for call in each.get("tool_calls", ())}
                if each["role"] == "tool" and each["tool_call_id"] in called:
                    each["name"] = called[each["tool_call_id"]]
                if told and each["role"] == told[-1]["role"] == "user":  # turns of one side count as one
                    told[-1]["content"] += each["content"]
                else:
                    told.append(each)
        return [{**each, "content": "\n".join(each["content"])} for each in told]

    def functions(self) -> list[dict[str, Any]] | None:
        return [_function(tool) for tool in self.tools] or None

    def marked(self, *, last: bool) -> "Iterator[Chat]":
        """The chats that end where this one is marked; with `last`, its end is one of these places.

        One that ends before the first message goes on with something else there, as templates want a message.
        """
        other = [{"role": "user", "content": [{"type": "text", "text": OTHER}]}]
        for at, tool in enumerate(self.tools):
            if "cache_control" in tool:
                yield Chat(self.system, other, self.tools[: at + 1])
                yield Chat([{"type": "text", "text": OTHER}], other, self.tools[: at + 1])
        for at, block in enumerate(self.system):
            if "cache_control" in block:
                yield Chat(self.system[: at + 1], other, self.tools)
        for at, message in enumerate(self.messages):
            for end, block in enumerate(message["content"], 1):
                if "cache_control" in block:
                    cut = {**message, "content": message["content"][:end]}
                    yield Chat(self.system, [*self.messages[:at], cut], self.tools)
        if last:
            yield self

    @property
    def marks(self) -> int:
        blocks = [*self.tools, *self.system, *(block for message in self.messages for block in message["content"])]
        return sum("cache_control" in block for block in blocks)


def chat(body: Mapping[str, Any]) -> Chat:
    tools = [] if body.get("tool_choice", {}).get("type") == "none" else body.get("tools", [])
    for at, tool in enumerate(tools):
        if tool.get("type", "custom") != "custom":
            raise Invalid(f"tools[{at}].type", "custom: the server has no tools of its own", tool["type"])
    messages = [{**message, "content": _blocks(message["content"])} for message in body["messages"]]
    found = Chat(_blocks(body.get("system", [])), messages, tools)
    if found.marks > MOST_MARKS:
        raise ApiError(400, f"{found.marks} blocks have cache_control, and {MOST_MARKS} may; leave the others out")
    return found


def forced_tools(body: Mapping[str, Any], asked: Chat) -> list[dict[str, Any]]:
    """Those of which one has to be called; empty: it is up to the model."""
    choice = body.get("tool_choice", {"type": "auto"})
    if choice["type"] in ("auto", "none"):
        return []
    tools = asked.functions() or []
    if not tools:
        raise Invalid("tool_choice.type", "auto or none where no tools are given")
    found = [tool for tool in tools if choice["type"] == "any" or tool["function"]["name"] == choice.get("name")]
    if not found:
        raise Invalid("tool_choice.name", "the name of one of the tools", choice.get("name"))
    return found


def several_calls(body: Mapping[str, Any]) -> bool:
    """Whether a reply may have more calls than one; it is asked for one where the tool is named."""
    choice = body.get("tool_choice", {"type": "auto"})
    return choice["type"] != "tool" and not choice.get("disable_parallel_tool_use", False)


def _blocks(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _text(block: Mapping[str, Any], path: str) -> str:
    if block["type"] != "text":
        raise Invalid(f"{path}.type", "text: the model reads nothing else", block["type"])
    text: str = block.get("text", "")
    return text


def _plain(role: str, blocks: Sequence[dict[str, Any]], path: str) -> Iterator[dict[str, Any]]:
    """A message as messages for templates, with lists of texts: what a tool gave is one of its own."""
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thinking: list[str] = []
    for at, block in enumerate(blocks):
        kind = block["type"]
        if kind == "tool_result" and role == "user":
            if texts:
                yield {"role": role, "content": texts}
                texts = []
            yield _result(block, f"{path}[{at}]")
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call(block, f"{path}[{at}]"))
        elif kind == "thinking" and role == "assistant":
            thinking.append(block.get("thinking", ""))
        elif kind != "redacted_thinking":
            texts.append(_text(block, f"{path}[{at}]"))
    if texts or calls or thinking or not blocks:
        told: dict[str, Any] = {"role": role, "content": texts}
        yield told | ({"tool_calls": calls} if calls else {}) | ({"thinking": "\n".join(thinking)} if thinking else {})


def _call(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    for name in ("id", "name"):
        if not block.get(name):
            raise Invalid(f"{path}.{name}", "given")
    function = {"name": block["name"], "arguments": block.get("input", {})}
    return {"type": "function", "id": template_id(block["id"]), "function": function}


def _result(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    if not block.get("tool_use_id"):
        raise Invalid(f"{path}.tool_use_id", "given")
    texts = [_text(each, f"{path}.content[{at}]") for at, each in enumerate(_blocks(block.get("content", [])))]
    return {"role": "tool", "tool_call_id": template_id(block["tool_use_id"]), "content": texts}


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    described = {"description": tool["description"]} if "description" in tool else {}
    parameters = tool.get("input_schema", {"type": "object", "properties": {}})
    return {"type": "function", "function": {"name": tool["name"]} | described | {"parameters": parameters}}


def _options(body: Mapping[str, Any]) -> dict[str, Any]:
    """Variables for the chat template. Where the text has to follow a grammar, there is thinking if it is asked for."""
    thinking = body.get("thinking", {"type": "disabled"} if _schema(body) else None)
    return {} if thinking is None else {"enable_thinking": thinking["type"] != "disabled"}


async def prompt(asked: Chat, body: Mapping[str, Any], service: Service) -> tuple[Prompt, int]:
    """The prompt of a chat, and up to where its marks ask for it to be cached."""
    return await asyncio.to_thread(_prompt, asked, "cache_control" in body, _options(body), service)


def _prompt(asked: Chat, mark_last: bool, options: dict[str, Any], service: Service) -> tuple[Prompt, int]:
    template, tokenizer = service.template, service.engine.tokenizer
    if template is None or tokenizer is None:
        raise TemplateError("the model has no tokenizer, so it cannot chat; send token ids to /v1/completions")
    messages, tools, opening = asked.plain(), asked.functions(), ""
    if messages[-1]["role"] == "assistant":  # the beginning of the reply
        begun = messages.pop()
        opening = begun["content"]
        if not messages or "tool_calls" in begun:
            raise ApiError(400, "there is nothing to answer; end with a user's message, or with the text of a reply")
    transcript = template.prompt(messages, tools=tools, **options)
    if opening:
        text = transcript.text + opening
        transcript = Transcript(text, *tokenizer.encode_split(text))
    tokens = service.checked(transcript.tokens)
    cuts = {_common(template, tokens, cut, options) for cut in asked.marked(last=mark_last)}
    marks = tuple(sorted(at for at in cuts if 0 < at < len(tokens)))
    boundaries: tuple[int, ...] = ()
    if service.engine.cache.places_points:
        boundaries = tuple(template.boundaries(transcript, messages, tools=tools, **options))
    return Prompt(tokens, boundaries, marks), max(cuts, default=0) if service.engine.cache.enabled else 0


def _common(template: ChatTemplate, tokens: Sequence[int], cut: Chat, options: dict[str, Any]) -> int:
    """How many tokens a prompt begins with that the chat that is cut somewhere begins with too."""
    try:
        part = template.prompt(cut.plain(), tools=cut.functions(), add_generation_prompt=False, **options)
    except TemplateError:  # some refuse a chat that ends there
        return 0
    pairs = enumerate(zip(tokens, part.tokens, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(tokens), len(part.tokens)))
