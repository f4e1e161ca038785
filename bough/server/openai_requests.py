"""What OpenAI's API lets a client ask: the tables of its fields, and how they become prompts and sampling.

Fields of others that clients of such servers send (top_k, min_p, cache_salt ...) are read too. What cannot be honoured
is refused rather than ignored; names that nobody here knows are ignored, as OpenAI does.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bough.config import Grammar, SamplingParams, is_number
from bough.server.schema import Either, Flag, Invalid, Listed, Number, Record, Shape, Text, Whole

LEAST_TOP_P = 1e-9  # the likeliest token alone, which is what 0 asks for
SIXTY_FOUR_BITS = (-(2**63), 2**63 - 1)

# Beyond these the sampler could not compute, and no text would make sense any more.
PENALTY = Number(-2, 2)
REPETITION = Number(0.01, 100, about="1: none")
STOP = Either(
    (Text(least=1), Listed(Text(least=1), most=64)), "a string that is not empty, or a list of at most 64 of them"
)

SAMPLING: dict[str, Shape] = {
    "model": Text(about="the name that /v1/models tells; none: the one there is"),
    "max_tokens": Whole(0, about="the most tokens to write; 0: only read the prompt"),
    "temperature": Number(0, about="0: always the likeliest token"),
    "top_p": Number(0, 1),
    "top_k": Whole(-1, about="0 or -1: all"),
    "min_p": Number(0, 1),
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "repetition_penalty": REPETITION,
    "seed": Whole(*SIXTY_FOUR_BITS, about="the same seed gives the same text; choice i has seed + i"),
    "stop": STOP,
    "n": Whole(1, 128, about="how many continuations to write"),
    "stream": Flag(),
    "stream_options": Record({"include_usage": Flag()}),
    "ignore_eos": Flag(about="go on after the model has ended"),
    "cache_salt": Text(about="requests with different ones share nothing through the cache"),
    "logit_bias": Record({}, open=True, about="what is added to the logits of token ids, -100 to 100"),
    "user": Text(about="ignored"),
}

TOOL = Record(
    {
        "type": Text(("function",)),
        "function": Record(
            {"name": Text(least=1), "description": Text(), "parameters": Record({}, open=True)},
            needed=("name",),
            open=True,
        ),
    },
    needed=("type", "function"),
    open=True,
)
TOOL_CALL = Record(
    {"id": Text(), "type": Text(), "function": Record({"name": Text(), "arguments": Text()}, ("name",), open=True)},
    needed=("function",),
    open=True,
)
PART = Record({"type": Text(("text",), about="the model reads nothing else"), "text": Text()}, needed=("type", "text"))
MESSAGE = Record(
    {
        "role": Text(least=1, about="system, user, assistant, tool, or what else the chat template knows"),
        "content": Either((Text(), Listed(PART)), "text, or a list of parts of text"),
        "name": Text(),
        "tool_calls": Listed(TOOL_CALL),
        "tool_call_id": Text(),
        "reasoning_content": Text(),
    },
    needed=("role",),
    open=True,
)
NAMED_TOOL = Record(
    {"type": Text(("function",)), "function": Record({"name": Text()}, needed=("name",))}, needed=("type", "function")
)
CHAT = Record(
    SAMPLING
    | {
        "messages": Listed(MESSAGE, least=1),
        "max_completion_tokens": Whole(0, about="the newer name of max_tokens"),
        "logprobs": Flag(),
        "top_logprobs": Whole(0, 20, about="needs logprobs"),
        "tools": Listed(TOOL),
        "tool_choice": Either((Text(("none", "auto", "required")), NAMED_TOOL), "none, auto, required or a function"),
        "parallel_tool_calls": Flag(about="false: at most one call"),
        "response_format": Record(
            {
                "type": Text(("text", "json_object", "json_schema")),
                "json_schema": Record({"name": Text(), "schema": Record({}, open=True), "strict": Flag()}),
            },
            needed=("type",),
        ),
        "functions": Listed(Record({}), about="the older form of tools; not supported: has to be empty"),
        "reasoning_effort": Text(about="a variable of the chat template; none: no thinking"),
        "chat_template_kwargs": Record({}, open=True, about="variables of the chat template"),
    },
    needed=("messages",),
)
TOKEN = Whole(0, 2**31 - 1)
COMPLETION = Record(
    SAMPLING
    | {
        "prompt": Either(
            (Text(), Listed(Text(), 1), Listed(TOKEN, 1), Listed(Listed(TOKEN, 1), 1)),
            "text, a list of token ids, or a list of either",
        ),
        "logprobs": Whole(0, 20),
        "echo": Flag(about="not supported: has to be false"),
        "best_of": Whole(1, about="not supported: has to be n"),
        "suffix": Text(about="not supported: has to be empty"),
        "return_token_ids": Flag(about="tell the ids of the tokens written"),
    },
    needed=("prompt",),
)


def chat_sampling(body: Mapping[str, Any], defaults: SamplingParams, salt: str | None, context: int) -> SamplingParams:
    if body.get("functions"):
        raise Invalid("functions", "empty: give tools instead")
    if body.get("top_logprobs") is not None and not body.get("logprobs"):
        raise Invalid("top_logprobs", "left out when logprobs is not true")
    most = body.get("max_completion_tokens", body.get("max_tokens", context))
    logprobs = body.get("top_logprobs", 0) if body.get("logprobs") else None
    return _sampling(body, defaults, max_tokens=most, logprobs=logprobs, cache_salt=salt, grammar=_grammar(body))


def _grammar(body: Mapping[str, Any]) -> Grammar | None:
    wanted = body.get("response_format", {"type": "text"})
    if wanted["type"] == "text":
        return None
    if wanted["type"] == "json_object":
        return Grammar.json_object()
    if "schema" not in wanted.get("json_schema", {}):
        raise Invalid("response_format.json_schema.schema", "given")
    return Grammar.json_schema(wanted["json_schema"]["schema"])


def completion_sampling(body: Mapping[str, Any], defaults: SamplingParams, salt: str | None) -> SamplingParams:
    for name, allowed in (("echo", "false"), ("suffix", "empty")):
        if body.get(name):
            raise Invalid(name, f"{allowed}: it is not supported")
    if body.get("best_of", 1) != body.get("n", 1) and "best_of" in body:
        raise Invalid("best_of", "the same as n: it is not supported")
    most = body.get("max_tokens", 16)  # what OpenAI's has always been
    return _sampling(body, defaults, max_tokens=most, logprobs=body.get("logprobs"), cache_salt=salt)


def _sampling(body: Mapping[str, Any], defaults: SamplingParams, **given: Any) -> SamplingParams:
    same = ("temperature", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos", "stop")
    given |= {name: body[name] for name in same if name in body}
    if "top_p" in body:
        given["top_p"] = max(body["top_p"], LEAST_TOP_P)
    if "top_k" in body:
        given["top_k"] = max(body["top_k"], 0)
    if "seed" in body:
        given["seed"] = body["seed"] % 2**63
    if "logit_bias" in body:
        given["logit_bias"] = {_token_id(token): _bias(token, bias) for token, bias in body["logit_bias"].items()}
    return replace(defaults, **given)


def _token_id(name: str) -> int:
    """JSON has no numbers for names."""
    if not re.fullmatch("[0-9]{1,10}", name):
        raise Invalid("logit_bias", "numbers by token id", name)
    return int(name)


def _bias(token: str, bias: Any) -> float:
    if not is_number(bias, -100, 100):
        raise Invalid(f"logit_bias.{token}", "a number from -100 to 100", bias)
    return float(bias)


def choices(params: SamplingParams, n: int) -> list[SamplingParams]:
    """The sampling of each of n continuations: seeds that follow each other, or they would all be the same."""
    if params.seed is None:
        return [params] * n
    return [replace(params, seed=(params.seed + index) % 2**63) for index in range(n)]


def chat_messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Messages as chat templates read them: content is text, arguments of tool calls are objects."""
    return [_message(message) for message in body["messages"]]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    role = "system" if message["role"] == "developer" else message["role"]
    plain = {**message, "role": role, "content": content or ""}
    if message.get("tool_calls"):
        plain["tool_calls"] = [_called(call) for call in message["tool_calls"]]
    if message.get("tool_call_id") is not None:
        plain["tool_call_id"] = template_id(message["tool_call_id"])
    return plain


def _called(call: Mapping[str, Any]) -> dict[str, Any]:
    named = {"id": template_id(call["id"])} if call.get("id") is not None else {}
    return {**call, **named, "function": _function(call["function"])}


def template_id(given: str) -> str:
    """The id of a call as chat templates get it: nine letters and digits, since some take nothing else."""
    if re.fullmatch("[a-zA-Z0-9]{9}", given):
        return given
    return hashlib.sha256(given.encode(errors="backslashreplace")).hexdigest()[:9]


def _function(function: Mapping[str, Any]) -> dict[str, Any]:
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, RecursionError):  # a model wrote it: the template gets it as it is
        arguments = function["arguments"]
    return {**function, "arguments": arguments}


def template_options(body: Mapping[str, Any]) -> dict[str, Any]:
    """Variables for the chat template."""
    effort = {"reasoning_effort": body["reasoning_effort"]} if "reasoning_effort" in body else {}
    if effort.get("reasoning_effort") == "none":
        effort["enable_thinking"] = False
    return effort | body.get("chat_template_kwargs", {})


def chat_tools(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools that the model is told of."""
    return None if body.get("tool_choice") == "none" else body.get("tools") or None


def forced_tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those of which one has to be called; empty: it is up to the model."""
    choice, tools = body.get("tool_choice", "auto"), body.get("tools", [])
    if choice in ("auto", "none"):
        return []
    if not tools:
        raise Invalid("tool_choice", "auto or none where no tools are given")
    if choice == "required":
        return list(tools)
    name = choice["function"]["name"]
    found = [tool for tool in tools if tool["function"]["name"] == name]
    if not found:
        raise Invalid("tool_choice.function.name", "the name of one of the tools", name)
    return found[:1]


def several_calls(body: Mapping[str, Any]) -> bool:
    """Whether a reply may have more calls than one; it is asked for one where the tool is named."""
    return bool(body.get("parallel_tool_calls", True)) and not isinstance(body.get("tool_choice"), dict)


def completion_prompts(body: Mapping[str, Any]) -> list[str | list[int]]:
    prompt = body["prompt"]
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
