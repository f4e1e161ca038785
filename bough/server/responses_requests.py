"""What OpenAI's Responses API lets a client ask: the tables of its fields, and how they become prompts and sampling.

The server keeps no responses, so each request brings the whole conversation. Its items become the messages that
/v1/chat/completions would be sent: what the model wrote in one reply is one message again, or the prompt would not go
on where that reply ended. What cannot be honoured is refused; unknown names are ignored.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bough.config import SamplingParams
from bough.server import openai_requests as chat
from bough.server.schema import Either, Flag, Invalid, JsonSchema, Listed, Record, Text, Whole

LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True, slots=True)
class Typed:
    """An object of the shape that its `type` names. One without a type has the `usual` one."""

    shapes: Mapping[str, Record]
    usual: str | None = None
    others: bool = False  # whether it may be of another type too: nothing but that is read of it then
    about: str = ""

    def read(self, value: Any, path: str) -> dict[str, Any]:
        usual = {"type": self.usual} if self.usual else {}
        head = usual | Record({"type": Text(least=1)}, () if usual else ("type",)).read(value, path)
        kind = head["type"]
        if kind in self.shapes:
            return {"type": kind} | self.shapes[kind].read(value, path)
        if not self.others:
            Text(tuple(self.shapes), about=self.about).read(kind, f"{path}.type")
        return head

    def schema(self) -> JsonSchema:
        known = [self._with_type(kind, record) for kind, record in self.shapes.items()]
        other = {"type": "string", "minLength": 1, "not": {"enum": list(self.shapes)}}
        rest: JsonSchema = {"type": "object", "properties": {"type": other}, "required": ["type"]}
        return {"anyOf": [*known, rest] if self.others else known}

    def _with_type(self, kind: str, record: Record) -> JsonSchema:
        needed = record.needed if kind == self.usual else ("type", *record.needed)
        return Record({"type": Text((kind,)), **record.fields}, needed).schema()


TEXT = Record({"text": Text()}, needed=("text",))
REFUSAL = Record({"refusal": Text()}, needed=("refusal",))
PART = Typed({"input_text": TEXT, "output_text": TEXT, "refusal": REFUSAL}, about="the model reads nothing else")
CONTENT = Either((Text(), Listed(PART)), "text, or a list of parts of text")
THOUGHTS = Listed(Typed({"reasoning_text": TEXT, "summary_text": TEXT}))
ITEM = Typed(
    {
        "message": Record(
            {"role": Text(("user", "assistant", "system", "developer")), "content": CONTENT}, ("role", "content")
        ),
        "function_call": Record(
            {"call_id": Text(least=1), "name": Text(least=1), "namespace": Text(), "arguments": Text()},
            ("call_id", "name"),
        ),
        "function_call_output": Record({"call_id": Text(least=1), "output": CONTENT}, ("call_id", "output")),
        "reasoning": Record({"content": THOUGHTS, "summary": THOUGHTS}),
    },
    usual="message",
    about="nothing is stored that could be referred to, and the model reads nothing else",
)
FUNCTION = Record(
    {
        "name": Text(least=1),
        "description": Text(),
        "parameters": Record({}, open=True),
        "strict": Flag(about="ignored: forced calls always follow the schema"),
    },
    needed=("name",),
)
# Agents send tools of other types along with their functions: searches that the vendor's servers do, custom tools whose
# calls are free text. Were these refused, Codex could not be used at all; without them it can. So they are left out,
# and the `tools` of the response do not have them. A request that has no others wants what there is not: it is refused.
TOOL = Typed(
    {
        "function": FUNCTION,
        "namespace": Record(  # this is how Codex groups the tools of MCP servers
            {"name": Text(least=1), "description": Text(), "tools": Listed(Typed({"function": FUNCTION}, others=True))},
            ("name", "tools"),
        ),
    },
    others=True,
)
CHOICE = Typed(
    {
        "function": Record({"name": Text()}, ("name",)),
        "allowed_tools": Record(
            {"mode": Text(("auto", "required")), "tools": Listed(Record({"type": Text(), "name": Text()}), least=1)},
            ("mode", "tools"),
        ),
    },
    about="the server has no tools of its own",
)
FORMAT = Typed(
    {
        "text": Record({}),
        "json_object": Record({}),
        "json_schema": Record(
            {"name": Text(), "description": Text(), "schema": Record({}, open=True), "strict": Flag()}, ("schema",)
        ),
    }
)
ELSEWHERE = ("max_tokens", "n", "stream_options")  # fields of chat completions that this API has not
RESPONSE = Record(
    {name: shape for name, shape in chat.SAMPLING.items() if name not in ELSEWHERE}
    | {
        "input": Either((Text(), Listed(ITEM)), "text, or a list of items"),
        "instructions": Text(about="the system prompt"),
        "max_output_tokens": Whole(0, about="the most tokens to write, thinking included"),
        "tools": Listed(TOOL, about="functions; of other types none is told to the model"),
        "tool_choice": Either(
            (Text(("none", "auto", "required")), CHOICE), "none, auto, required, a function or allowed_tools"
        ),
        "parallel_tool_calls": chat.CHAT.fields["parallel_tool_calls"],
        "text": Record({"format": FORMAT, "verbosity": Text(about="ignored")}),
        "reasoning": Record({"effort": chat.CHAT.fields["reasoning_effort"], "summary": Text(about="ignored")}),
        "chat_template_kwargs": chat.CHAT.fields["chat_template_kwargs"],
        "include": Listed(Text(), about=f"{LOGPROBS}, or what else is ignored"),
        "top_logprobs": Whole(0, 20, about=f"needs {LOGPROBS} to be included"),
        "metadata": Record({}, open=True, about="comes back with the response"),
        "prompt_cache_key": Text(about="ignored: what requests have in common is found without it"),
        "safety_identifier": Text(about="ignored"),
        "store": Flag(about="ignored: nothing is stored"),
        # Nothing is left out of a prompt, since one that begins differently every time is never found in the cache.
        "truncation": Text(("auto", "disabled"), about="ignored: a prompt that is too long is refused"),
        "previous_response_id": Text(about="not supported: has to be empty"),
        "conversation": Either((Text(), Record({}, open=True)), "empty", about="not supported: has to be empty"),
        "background": Flag(about="not supported: has to be false"),
        "prompt": Record({}, open=True, about="not supported: has to be empty"),
    },
    needed=("input",),
)
WHOLE = "nothing is stored here; send the whole conversation as input: what was read before comes from the cache"
ABSENT = {
    "previous_response_id": WHOLE,
    "conversation": WHOLE,
    "background": "nothing is stored here that could be fetched later; stream the response instead",
    "prompt": "no prompts are stored here; send instructions and input instead",
}


def require_stateless(body: Mapping[str, Any]) -> None:
    """Refuse what only a server that stores things can do."""
    for name, why in ABSENT.items():
        if body.get(name):
            raise Invalid(name, f"left out: {why}")


def wants_logprobs(body: Mapping[str, Any]) -> bool:
    return LOGPROBS in body.get("include", ())


def sampling(
    body: Mapping[str, Any], defaults: SamplingParams, salt: str | None, context: int, tools: "Tools"
) -> SamplingParams:
    if tools.told and wants_logprobs(body):
        raise Invalid("include", f"without {LOGPROBS} where tools are given: which tokens are text is not known then")
    wanted = body.get("text", {}).get("format", {"type": "text"})
    asked = {
        **{name: value for name, value in body.items() if name in chat.SAMPLING},
        "response_format": {"type": wanted["type"], "json_schema": wanted},
        "max_completion_tokens": body.get("max_output_tokens", context),
    }
    if wants_logprobs(body):
        asked |= {"logprobs": True, "top_logprobs": body.get("top_logprobs", 0)}
    return chat.chat_sampling(asked, defaults, salt, context)


def template_options(body: Mapping[str, Any]) -> dict[str, Any]:
    effort = body.get("reasoning", {}).get("effort")
    return chat.template_options(body if effort is None else {**body, "reasoning_effort": effort})


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request, as chat templates read them."""

    told: list[dict[str, Any]] = field(default_factory=list)  # to the model
    forced: list[dict[str, Any]] = field(default_factory=list)  # of which one has to be called, if there are any
    several: bool = True  # whether a reply may have more calls than one
    places: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # namespace and name of those that have both


def served_tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those of a request that the model can be told of."""
    given: list[dict[str, Any]] = body.get("tools", [])
    served = [tool for tool in given if tool["type"] in TOOL.shapes]
    if given and not served:
        allowed = "'function', in one tool at least: the server has no tools of its own"
        raise Invalid("tools[0].type", allowed, given[0]["type"])
    return served


def tools(body: Mapping[str, Any]) -> Tools:
    told: list[dict[str, Any]] = []
    places: dict[str, tuple[str, str]] = {}
    for tool in served_tools(body):
        space = tool["name"] if tool["type"] == "namespace" else None
        for each in tool.get("tools", [tool]):
            if each["type"] == "function":
                name = full_name(each["name"], space)
                told.append(_function(each, name))
                places |= {name: (space, each["name"])} if space else {}
    for name, many in Counter(tool["function"]["name"] for tool in told).items():
        if many > 1:
            raise Invalid("tools", "tools with a name of their own each", name)
    return _chosen(body, told, places)


def _chosen(body: Mapping[str, Any], told: list[dict[str, Any]], places: Mapping[str, tuple[str, str]]) -> Tools:
    """What the choice of tools leaves."""
    several = body.get("parallel_tool_calls", True)
    choice = body.get("tool_choice", "auto")
    if choice == "none":
        return Tools()
    if choice == "auto":
        return Tools(told, [], several, places)
    if not told:
        raise Invalid("tool_choice", "auto or none where no tools are given")
    if choice == "required":
        return Tools(told, told, several, places)
    if choice["type"] == "function":
        return Tools(told, _named(told, [choice], "tool_choice.name"), False, places)
    allowed = _named(told, choice["tools"], "tool_choice.tools")
    if choice["mode"] == "required":  # the prompt stays as it is, and with it what is cached of it
        return Tools(told, allowed, several, places)
    return Tools(allowed, [], several, places)


def _named(told: list[dict[str, Any]], wanted: Sequence[Mapping[str, Any]], path: str) -> list[dict[str, Any]]:
    names = {each.get("name") for each in wanted}
    found = [tool for tool in told if tool["function"]["name"] in names]
    if not found:
        raise Invalid(path, "the name of one of the tools", wanted[0].get("name"))
    return found


def full_name(name: str, namespace: str | None) -> str:
    """What the model knows a tool by."""
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


def _function(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    described = {"description": tool["description"]} if "description" in tool else {}
    parameters = tool.get("parameters", {"type": "object", "properties": {}})
    return {"type": "function", "function": {"name": name} | described | {"parameters": parameters}}


def messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conversation as chat templates read it."""
    given = body["input"]
    items = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given
    turns: list[dict[str, Any]] = []
    if body.get("instructions"):
        turns.append({"role": "system", "content": [body["instructions"]]})
    called: dict[str, str] = {}
    for item in items:
        if item["type"] == "function_call_output":
            name = {"name": called[item["call_id"]]} if item["call_id"] in called else {}
            texts = list(_texts(item["output"]))
            turns.append({"role": "tool", "tool_call_id": item["call_id"], "content": texts} | name)
        elif item["type"] == "message" and item["role"] != "assistant":
            _ask(turns, item)
        else:
            _reply(turns, item)
        if item["type"] == "function_call":
            called[item["call_id"]] = full_name(item["name"], item.get("namespace"))
    if not turns:
        raise Invalid("input", "a list that is not empty")
    return chat.chat_messages({"messages": [_joined(turn) for turn in turns]})


def _ask(turns: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    """Messages of one side count as one: agents send several in a row, and many templates refuse that."""
    role = "system" if item["role"] == "developer" else item["role"]
    if not turns or turns[-1]["role"] != role:
        turns.append({"role": role, "content": []})
    turns[-1]["content"] += _texts(item["content"])


def _reply(turns: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    """Put what the model wrote into the turn that it is of, which the items before it began, if they can have: text
    and thinking come before text only where a tool is called in between.
    """
    thought = "\n".join(_texts(item.get("content") or item.get("summary") or [])) if item["type"] == "reasoning" else ""
    if item["type"] == "reasoning" and not thought:  # it is encrypted, by another server
        return
    turn = turns[-1] if turns and turns[-1]["role"] == "assistant" else None
    said = turn is not None and turn["content"] and "tool_calls" not in turn
    if turn is None or (said and item["type"] != "function_call"):
        turn = {"role": "assistant", "content": []}
        turns.append(turn)
    if item["type"] == "message":
        turn["content"] += _texts(item["content"])
    elif item["type"] == "reasoning":
        turn.setdefault("reasoning_content", []).append(thought)
    else:
        function = {"name": full_name(item["name"], item.get("namespace")), "arguments": item.get("arguments", "")}
        call = {"type": "function", "id": item["call_id"], "function": function}
        turn.setdefault("tool_calls", []).append(call)


def _joined(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A turn with its texts in one, once all of them are there."""
    return {**turn, **{name: "\n".join(turn[name]) for name in ("content", "reasoning_content") if name in turn}}


def _texts(content: str | Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    else:
        yield from (part["refusal"] if part["type"] == "refusal" else part["text"] for part in content)
