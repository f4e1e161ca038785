"""How models write tool calls: one CallFormat for each way, from the marks around a call to its name and arguments.

Facts of each are those of the chat templates that ask for it. Nothing here is streamed: tools.py finds where a call
begins and ends. What cannot be read raises Malformed. Nothing a model writes is ever evaluated.
"""

import ast
import json
import keyword
import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

KEYWORD = "_keyword_"  # makes a name of a word that Python has a meaning for
STRING_OR_WORD = re.compile(
    rf"""
    "(?:[^"\\]|\\.)*(?:"|\Z)
    | '(?:[^'\\]|\\.)*(?:'|\Z)
    | \b(?P<word>{"|".join(keyword.kwlist)})(?=\s*=(?!=))
    """,
    re.DOTALL | re.VERBOSE,
)
BARE = re.compile(r"[^,\[\]{}]+")  # a value without quotes

Tools = Mapping[str, Mapping[str, Any]]  # the schema of the parameters of each tool, by its name


class Malformed(ValueError):
    """Not a call after all."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model wrote; `text` is the text that stood for it, marks included, if it is the first in it."""

    name: str
    arguments: dict[str, Any]
    text: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The marks around calls, and what reads the text between them."""

    name: str
    opening: str
    close: str | None  # None: the end of the reply
    read: Callable[[str, Tools], list[ToolCall]]
    in_string: Callable[[str], bool] = lambda body: False  # whether a text stops inside of a string
    quotes: tuple[str, ...] = ()  # further marks that have to be seen
    bare: bool = False  # whether a reply that begins as a JSON call is one, without any mark


def read_json(text: str) -> Any:
    """A JSON value. Lines may end inside of strings, since models write them so."""
    try:
        return JSON.decode(text)
    except (ValueError, RecursionError) as error:
        raise Malformed(str(error)) from None


def no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def finite(number: str) -> float:
    """Of what is written as a number, but too large to be one."""
    value = float(number)
    return value if math.isfinite(value) else no_constant(number)


JSON = json.JSONDecoder(strict=False, parse_constant=no_constant, parse_float=finite)


def _bare(text: str) -> Any:
    """What text without quotes stands for: a JSON value, as Python would write it too, or itself."""
    try:
        return read_json({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except Malformed:
        return text


def _json_calls(text: str) -> list[ToolCall]:
    """A call as a JSON object, or a list of them."""
    value = read_json(text)
    calls = [_json_call(each) for each in (value if isinstance(value, list) else [value])]
    if not calls:
        raise Malformed("no call")
    return calls


def _json_call(value: Any) -> ToolCall:
    if not isinstance(value, dict):
        raise Malformed("not an object")
    value = value["function"] if isinstance(value.get("function"), dict) else value
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = read_json(arguments)
    arguments = {} if arguments is None else arguments
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        raise Malformed("no name, or arguments that are not an object")
    return ToolCall(name, arguments)


def _in_json_string(body: str) -> bool:
    inside = escaped = False
    for char in body:
        if inside and (escaped or char == "\\"):
            escaped = not escaped
        elif char == '"':
            inside = not inside
    return inside


# Hermes, Qwen: a JSON object in tags; newer Qwen: tags for the function and each parameter.


def _tagged(body: str, tools: Tools) -> list[ToolCall]:
    body = body.strip()
    if not body.startswith("<function="):
        return _json_calls(body)
    calls = []
    while body:
        name, body = _tag(body, "<function=")
        arguments: dict[str, Any] = {}
        while body.startswith("<parameter="):
            key, body = _tag(body, "<parameter=")
            value, body = _parameter(body)
            arguments[key] = _typed(value, tools.get(name, {}).get("properties"), key)
        if not body.startswith("</function>"):
            raise Malformed("the function does not end")
        body = body[len("</function>") :].lstrip()
        calls.append(ToolCall(name, arguments))
    return calls


def _tag(body: str, opening: str) -> tuple[str, str]:
    """The name in the tag that a text begins with, and what follows; a value keeps its indentation."""
    name, closed, rest = body[len(opening) :].partition(">")
    if not (body.startswith(opening) and closed and name.strip() and "\n" not in name):
        raise Malformed("no tag")
    return name.strip(), rest if opening == "<parameter=" else rest.lstrip()


def _parameter(body: str) -> tuple[str, str]:
    """The value of a parameter, and what follows. It ends where the next parameter or the end of the call follows."""
    at = 0
    while (at := body.find("</parameter>", at)) >= 0:
        rest = body[at + len("</parameter>") :].lstrip()
        if rest.startswith(("<parameter=", "</function>")):
            return body[:at].removeprefix("\n").removesuffix("\n"), rest
        at += 1
    raise Malformed("a parameter does not end")


def _typed(value: str, properties: Any, key: str) -> Any:
    """Text as it is where the tool takes text, else what it is as JSON, if anything."""
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    if kinds == "string" or (isinstance(kinds, list) and "string" in kinds):
        return value
    return _bare(value)


def _in_tagged(body: str) -> bool:
    if body.lstrip().startswith("<function="):
        return not body.rstrip().endswith("</function>")
    return _in_json_string(body)


# Llama 3: after a mark, or as the whole reply, JSON objects one after the other; or a call of a built-in tool.


def _llama(body: str, tools: Tools) -> list[ToolCall]:
    body = body.strip()
    if body.startswith("{"):
        return [call for text in _objects(body, "; \n\t") for call in _json_calls(text)]
    calls = _pythonic(body)
    return [ToolCall(call.name.removesuffix(".call"), call.arguments) for call in calls]


def _objects(text: str, between: str) -> list[str]:
    """The JSON objects that a text is made of, with nothing but some characters between them."""
    found = []
    while text := text.lstrip(between):
        try:
            end = JSON.raw_decode(text)[1]
        except (ValueError, RecursionError) as error:
            raise Malformed(str(error)) from None
        found.append(text[:end])
        text = text[end:]
    return found


# Mistral: after a mark a list of JSON objects; newer: a name and a JSON object, and each call has the mark.


def _mistral(body: str, tools: Tools) -> list[ToolCall]:
    if body.lstrip().startswith("["):
        return _json_calls(body)
    calls = []
    for text in body.split("[TOOL_CALLS]"):
        name, brace, rest = text.partition("{")
        name = name.partition("[ARGS]")[0].partition("[CALL_ID]")[0].strip()
        arguments = read_json(brace + rest)
        if not name or any(map(str.isspace, name)) or not isinstance(arguments, dict):
            raise Malformed("no name, or arguments that are not an object")
        calls.append(ToolCall(name, arguments))
    return calls


# LFM2: a list of calls as Python writes them; or, when asked for, JSON.


def _lfm2(body: str, tools: Tools) -> list[ToolCall]:
    try:
        return _json_calls(body)
    except Malformed:
        return _pythonic(body)


def _pythonic(text: str) -> list[ToolCall]:
    """Calls with literals for arguments, one or a list."""
    # An argument may have the name of a word of Python's own, such as `from`.
    text = STRING_OR_WORD.sub(lambda found: KEYWORD + found[0] if found["word"] else found[0], text.strip())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            tree = ast.parse(text, mode="eval").body
        calls = [_python_call(node) for node in (tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree])]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Malformed(str(error)) from None
    if not calls:
        raise Malformed("no call")
    return calls


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise Malformed("not a call with named arguments")
    arguments = {}
    for each in node.keywords:
        if each.arg is None:
            raise Malformed("an argument without a name")
        arguments[each.arg.removeprefix(KEYWORD)] = _literal(each.value)
    return ToolCall(_dotted(node.func), arguments)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise Malformed("no name")


def _literal(node: ast.expr | None) -> Any:
    """The value of a literal that JSON has too."""
    match node:
        case ast.Constant(value=None | bool() | int() | str() as value):
            return value
        case ast.Constant(value=float() as value) if math.isfinite(value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float())):
            return -_literal(node.operand)
        case ast.Name(id="true" | "false" | "null" as name):
            return read_json(name)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = {_literal(key): _literal(value) for key, value in zip(keys, values, strict=True)}
            if all(isinstance(key, str) for key in pairs):
                return pairs
    raise Malformed("not a literal")


# Gemma 4 and FunctionGemma: call:name{key:value,...}, where a mark of its own stands for quotes.


class _GemmaCall:
    """Reads the text of one call, from left to right."""

    def __init__(self, text: str, quote: str) -> None:
        self.text, self.quote, self.at = text, quote, 0

    def read(self) -> ToolCall:
        self.require("call:")
        name = self.until("{").strip()
        self.at -= 1
        arguments = self.value()
        self.skip_space()
        if not name or self.at < len(self.text):
            raise Malformed("no name, or something follows the call")
        return ToolCall(name, arguments)

    def value(self) -> Any:
        self.skip_space()
        if self.take(self.quote):
            return self.until(self.quote)
        if self.text.startswith('"', self.at):
            return self.json_string()
        if self.take("{"):
            return dict(self.items("}", self.pair))
        if self.take("["):
            return self.items("]", self.value)
        found = BARE.match(self.text, self.at)
        if found is None:
            raise Malformed("no value")
        self.at = found.end()
        return _bare(found[0].strip())

    def pair(self) -> tuple[str, Any]:
        self.skip_space()
        if self.text.startswith((self.quote, '"'), self.at):
            key = self.value()
            self.require(":")
        else:
            key = self.until(":").strip()
        if not key:
            raise Malformed("no key")
        return key, self.value()

    def items(self, end: str, item: Callable[[], Any]) -> list[Any]:
        """What follows up to the bracket at the end."""
        found: list[Any] = []
        self.skip_space()
        while not self.take(end):
            if found:
                self.require(",")
            found.append(item())
            self.skip_space()
        return found

    def json_string(self) -> str:
        try:
            value, self.at = JSON.raw_decode(self.text, self.at)
        except ValueError as error:
            raise Malformed(str(error)) from None
        assert isinstance(value, str)
        return value

    def until(self, mark: str) -> str:
        end = self.text.find(mark, self.at)
        if end < 0:
            raise Malformed(f"no {mark}")
        start, self.at = self.at, end + len(mark)
        return self.text[start:end]

    def take(self, mark: str) -> bool:
        found = self.text.startswith(mark, self.at)
        self.at += len(mark) * found
        return found

    def require(self, mark: str) -> None:
        self.skip_space()
        if not self.take(mark):
            raise Malformed(f"no {mark}")

    def skip_space(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1


def _gemma(quote: str) -> Callable[[str, Tools], list[ToolCall]]:
    def read(body: str, tools: Tools) -> list[ToolCall]:
        try:
            return [_GemmaCall(body, quote).read()]
        except RecursionError:
            raise Malformed("nested too deeply") from None

    return read


def _gemma_format(name: str, opening: str, close: str, quote: str) -> CallFormat:
    return CallFormat(
        name, opening, close, _gemma(quote), in_string=lambda body: body.count(quote) % 2 == 1, quotes=(quote,)
    )


FORMATS = (
    _gemma_format("gemma", "<|tool_call>", "<tool_call|>", '<|"|>'),
    _gemma_format("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>"),
    CallFormat("lfm2", "<|tool_call_start|>", "<|tool_call_end|>", _lfm2),
    CallFormat("tagged", "<tool_call>", "</tool_call>", _tagged, in_string=_in_tagged),
    CallFormat("mistral", "[TOOL_CALLS]", None, _mistral, quotes=("[ARGS]", "[CALL_ID]")),
    CallFormat("llama", "<|python_tag|>", None, _llama, bare=True),
)
