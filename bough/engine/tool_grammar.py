"""Grammars for replies that are calls of one or several of some tools, or an answer in JSON, and nothing else.

Each format has a Form, from which the rules are put together. Arguments are JSON, so that they follow the schema of the
tool in all it says: the readers of all formats take it, whatever else they take. Where a template asks for tags around
each parameter, they are written so, unless the schema says more than tags can hold. The model may think first.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from bough.config import Grammar
from bough.engine.grammar import JSON_OPTIONS
from bough.engine.tokenizer import Tokenizer
from bough.engine.tools import Dialect
from bough.errors import OptionError

NAME = re.compile(r"[\w.:-]+")
TAGGED = {"type", "properties", "required", "additionalProperties", "title", "description", "$schema"}
TEXT = {"type", "title", "description", "default", "examples"}  # of a parameter that is any text
ANYTHING = r"/(.|\n)*/"

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Form:
    """How calls are written, in Lark; empty: nothing."""

    call: Callable[[str, Schema], str]
    before: str = ""
    between: str = ""
    after: str = ""


def reply_grammar(
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]],
    answer: Grammar | None = None,
    *,
    several: bool,
    thinking: bool,
) -> Grammar:
    """What a reply must be: a call of one of the tools, or `several`, or else an answer by a schema, if there is one.

    `thinking`: the prompt has begun it. If not, the reply may.
    """
    assert answer is None or answer.kind == "json_schema", "this is no schema"
    dialect = Dialect.of(tokenizer)
    rules = _calls(tokenizer, dialect, tools, several) if tools else []
    if answer is not None:
        rules += [f"answer: {_json(json.loads(answer.source))}"]
    if dialect.thinking is not None:
        rules += [f"thought{_until(tokenizer, dialect.thinking[1])}"]
    kinds = " | ".join(["calls"] * bool(tools) + ["answer"] * (answer is not None))
    return Grammar.lark("\n".join([f"start: {_thought(tokenizer, dialect, thinking)} ({kinds})", *rules]))


def _calls(tokenizer: Tokenizer, dialect: Dialect, tools: Sequence[Mapping[str, Any]], several: bool) -> list[str]:
    """The rules of calls."""
    if dialect.calls is None:
        raise OptionError("the model has no known way of calling tools, so no call can be forced; ask for none")
    form = _forms(tokenizer)[dialect.calls.name]
    try:
        calls = [form.call(name, _arguments(name, schema)) for name, schema in map(_function, tools)]
    except RecursionError:
        raise OptionError("the schema of a tool is nested too deeply; flatten it") from None
    again = f"({form.between} call)*" if several else ""
    rules = [f"calls: {form.before} call {again} {form.after}"]
    rules += ["call: " + " | ".join(f"call_{at}" for at in range(len(calls)))]
    rules += [f"call_{at}: {call}" for at, call in enumerate(calls)]
    if any(" value " in call for call in calls):
        rules += [f"value{_until(tokenizer, '</parameter>')}"]
    return rules


def _function(tool: Mapping[str, Any]) -> tuple[str, Schema]:
    """The name of a tool, and the schema of its parameters."""
    function = tool.get("function", tool)
    return function["name"], function.get("parameters") or {"type": "object", "properties": {}}


def _arguments(name: str, schema: Schema) -> Schema:
    """A schema that allows nothing but objects, and no parameters that the tool does not name if it names any."""
    if not NAME.fullmatch(name):
        raise OptionError(f"a call of {name!r} cannot be forced; name tools with letters, digits, '_' and '-'")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    named = isinstance(required, list) and all(isinstance(each, str) for each in required)
    if schema.get("type", "object") != "object" or not isinstance(properties, Mapping) or not named:
        raise OptionError(f"the parameters of the tool {name!r} must be an object; correct their schema")
    closed = {"additionalProperties": False} if "properties" in schema else {}
    return closed | dict(schema) | {"type": "object"}


def _thought(tokenizer: Tokenizer, dialect: Dialect, begun: bool) -> str:
    if dialect.thinking is None:
        return ""
    space = r"(/[ \n]{1,4}/)?"
    return f"thought {space}" if begun else f"({_mark(tokenizer, dialect.thinking[0])} thought {space})?"


def _forms(tokenizer: Tokenizer) -> dict[str, Form]:
    """By the name of the CallFormat."""
    source = tokenizer.template or ""
    template = source if isinstance(source, str) else "\n".join(source.values())

    def mark(text: str) -> str:
        return _mark(tokenizer, text)

    def around(opening: str, written: Callable[[str, Schema], str], close: str) -> Form:
        return Form(lambda name, schema: f"{mark(opening)} {written(name, schema)} {mark(close)}")

    def tagged(name: str, schema: Schema) -> str:
        tags = _tags(name, schema) if "<function=" in template else None
        return tags or _joined("\n", _json_call(name, schema), "\n")

    def mistral(name: str, schema: Schema) -> str:
        return f"{mark('[TOOL_CALLS]')} {_text(name)} {mark('[ARGS]')} {_json(schema)}"

    listed = Form(_json_call, before=f'{mark("[TOOL_CALLS]")} "["', between='", "', after='"]"')
    starts = f'{mark("<|tool_call_start|>")} "["'
    return {
        "tagged": Form(around("<tool_call>", tagged, "</tool_call>").call, between=_text("\n")),
        "gemma": around("<|tool_call>", _named, "<tool_call|>"),
        "functiongemma": around("<start_function_call>", _named, "<end_function_call>"),
        "lfm2": Form(_json_call, before=starts, between='", "', after=f'"]" {mark("<|tool_call_end|>")}'),
        "mistral": Form(mistral) if "[ARGS]" in template else listed,
        "llama": Form(lambda name, schema: _json_call(name, schema, "parameters"), between='"; "'),
    }


# The parts of rules.


def _json_call(name: str, schema: Schema, arguments: str = "arguments") -> str:
    return _joined(f'{{"name": {json.dumps(name)}, "{arguments}": ', _json(schema), "}")


def _named(name: str, schema: Schema) -> str:
    return f"{_text('call:' + name)} {_json(schema)}"


def _tags(name: str, schema: Schema) -> str | None:
    """A call with tags around its parameters; None: the schema says more than they can hold."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if schema.keys() - TAGGED or not set(required) <= properties.keys() or "$ref" in json.dumps(schema):
        return None
    parts = []
    for key, each in properties.items():
        value = _value(each) if NAME.fullmatch(key) and isinstance(each, Mapping) else None
        if value is None:
            return None
        part = f"{_text(f'<parameter={key}>' + chr(10))} {value} {_text(chr(10))}"
        parts.append(part if key in required else f"({part})?")
    return _joined(f"\n<function={name}>\n", " ".join(parts), "</function>\n")


def _value(schema: Schema) -> str | None:
    """What stands between the tags of a parameter, the closing one included. Text has no quotes there."""
    kinds = schema.get("type")
    if kinds != "string" and not (isinstance(kinds, list) and "string" in kinds):
        return f"{_json(schema)} {_text(chr(10) + '</parameter>')}"
    if "enum" not in schema:
        return "value" if not schema.keys() - TEXT else None
    choices = [each for each in schema["enum"] if isinstance(each, str)] if isinstance(schema["enum"], list) else []
    if schema.keys() - TEXT - {"enum"} or not choices or any("\n" in each or "</" in each for each in choices):
        return None
    return "(" + " | ".join(_text(each + "\n</parameter>") for each in choices) + ")"


def _json(schema: Schema) -> str:
    """JSON of a schema. White space is limited as it is elsewhere."""
    return "%json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS})


def _joined(before: str, rule: str, after: str) -> str:
    return f"{_text(before)} {rule} {_text(after)}"


def _text(text: str) -> str:
    return json.dumps(text)


def _mark(tokenizer: Tokenizer, mark: str) -> str:
    """A mark: special tokens by their numbers, since no text stands for these, and the rest as text."""
    tokens = tokenizer.encode(mark, special=False)
    parts = []
    for special, run in groupby(tokens, tokenizer.special_ids.__contains__):
        if special:
            parts += [f"<[{token}]>" for token in run]
        else:
            parts.append(_text(b"".join(map(tokenizer.token_bytes, run)).decode()))
    return " ".join(parts)


def _until(tokenizer: Tokenizer, mark: str) -> str:
    """The rest of a rule for any text up to a mark, and it."""
    written = _mark(tokenizer, mark)
    return f": {ANYTHING} {written}" if written.startswith("<[") else f"[suffix={_text(mark)}]: {ANYTHING}"
