"""Chat templates: from messages to the text and the tokens of a prompt.

ChatTemplate  renders messages, finds the turn boundaries of a prompt, and continues a chat without retokenising it.
Transcript    rendered text together with the token ids that stand for it.

Templates come with model files and are not trusted. They run in jinja2's sandbox, which keeps them from reaching
Python, and are metered: rounds of loops, calls, output and products are bounded. One that builds a huge value in
another way (repeated concatenation, a format width) can still use up memory. Whatever goes wrong is a TemplateError.
"""

import json
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateSyntaxError, nodes, pass_context
from jinja2 import TemplateError as JinjaError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from bough.engine.tokenizer import Detokenizer, Place, Tokenizer, common_prefix
from bough.errors import TemplateError

Message = Mapping[str, Any]

MAX_OUTPUT = 16 * 2**20  # characters
MAX_STEPS = 2_000_000  # loop rounds and calls of one render, some microseconds each
MAX_SEARCH_STEPS = 100_000  # the same of one search for turn boundaries; tokenising 8 characters counts as a step
MAX_INTEGER_BITS = 4096
REMEDY = "put a working one into chat_template.jinja in the model folder, or send a plain prompt"


@dataclass(frozen=True, slots=True)
class Transcript:
    """A rendered chat and the tokens that stand for it. Replies keep the tokens they were generated with."""

    text: str
    tokens: list[int]
    splits: list[Place]

    def last_split(self, end: int) -> Place:
        """The last split at or before a place in the text; the start of the text is one."""
        place = bisect_right(self.splits, end, key=lambda split: split.char)
        return self.splits[place - 1] if place else Place(0, 0)

    def split_at(self, char: int) -> Place | None:
        split = self.last_split(char)
        return split if split.char == char else None


class ChatTemplate:
    """The chat template of a tokenizer, or another one given as `source`. It is compiled when first used."""

    def __init__(self, tokenizer: Tokenizer, source: str | dict[str, str] | None = None) -> None:
        self._tokenizer = tokenizer
        self._source = tokenizer.template if source is None else source
        self._compiled: dict[str, Template] = {}

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """The text of the messages, followed by the opening of the reply. Templates read `extra` as variables."""
        variables = self._variables(messages, tools, extra)
        return self._render(variables | {"add_generation_prompt": add_generation_prompt}, _Meter(MAX_STEPS))

    def prompt(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, **extra: Any
    ) -> Transcript:
        """The prompt that asks for a reply to the messages."""
        text = self.render(messages, tools=tools, **extra)
        return Transcript(text, *self._tokenizer.encode_split(text))

    def extend(
        self,
        transcript: Transcript,
        reply: Sequence[int],
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> Transcript:
        """The prompt of the next turn, of a chat in which `transcript` was answered with the tokens `reply`.

        `messages` are all of the chat: those of the transcript, the reply, and what came after it. As long as their
        text begins with the text generated so far, its tokens stay as they are and only the rest is tokenised. Where
        they differ (many templates leave out the thinking of earlier replies, or trim them), tokens are kept up to a
        place before the difference at which the text is tokenised apart anyway.
        """
        text = self.render(messages, tools=tools, **extra)
        follows = text.startswith(transcript.text)
        if follows:
            kept = self._agreement(transcript, reply, text)
        else:
            kept = transcript.last_split(common_prefix(transcript.text, text) - self._tokenizer.split_reach)
        tokens, splits = self._tokenizer.encode_split(text[kept.char :], follows=follows)
        earlier = [split for split in transcript.splits if split < kept]
        later = [Place(kept.char + split.char, kept.token + split.token) for split in splits]
        return Transcript(text, [*transcript.tokens, *reply][: kept.token] + tokens, earlier + later)

    def boundaries(
        self,
        transcript: Transcript,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extra: Any,
    ) -> list[int]:
        """Lengths in tokens, inside the transcript of these messages, at which other prompts are likely to branch off.

        They are where the system prompt and the tools end, where each message ends, and where the opening of the
        reply begins: the common token prefixes of the transcript with renders of the first messages alone. A part
        that the template refuses has no boundary. In a very long chat the oldest turns have none.
        """
        meter = _Meter(MAX_SEARCH_STEPS)
        variables = self._variables(messages, tools, extra) | {"add_generation_prompt": False}
        found = set()
        for part in _parts(variables["messages"]):
            if meter.spent:
                break
            with suppress(TemplateError):
                text = self._render(variables | {"messages": part}, meter)
                found.add(self._shared(transcript, text, meter))
        return sorted(length for length in found if 0 < length < len(transcript.tokens))

    def _shared(self, transcript: Transcript, text: str, meter: "_Meter") -> int:
        """How many tokens at its start the transcript has in common with another text."""
        common = common_prefix(transcript.text, text)
        if common == len(text) and (split := transcript.split_at(common)):
            return split.token
        split = transcript.last_split(common - self._tokenizer.split_reach)
        meter.spend((len(text) - split.char) // 8)
        tokens = self._tokenizer.encode(text[split.char :], special=False)
        length = split.token
        for token, other in zip(tokens, transcript.tokens[split.token :], strict=False):
            if token != other:
                break
            length += 1
        return length

    def _agreement(self, transcript: Transcript, reply: Sequence[int], text: str) -> Place:
        """How much of transcript and reply can stay when the chat goes on as `text`: all that agrees with it, if that
        is the whole reply, else up to a split. End-of-turn tokens are left to the template, which writes its own.
        """
        start = place = kept = Place(len(transcript.text), len(transcript.tokens))
        splits = {
            start.char + split.char for split in self._tokenizer.encode_split(text[start.char :], follows=True)[1]
        }
        stream = Detokenizer(self._tokenizer, transcript.tokens, skip_special=False)
        for token in _without_end(reply, self._tokenizer.special_ids):
            piece = stream.push([token])
            if not text.startswith(piece, place.char):
                return kept
            place = Place(place.char + len(piece), place.token + 1)
            if place.char in splits and stream.settled:
                kept = place
        rest = stream.finish()
        return Place(place.char + len(rest), place.token) if text.startswith(rest, place.char) else kept

    def _variables(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, extra: dict[str, Any]
    ) -> dict[str, Any]:
        """What the template sees. Names in `extra` win over those of special tokens."""
        if not messages:
            raise TemplateError("the chat has no messages; give at least one")
        try:
            chat = {"messages": [_message(message) for message in messages], "tools": _plain(tools)}
            return {**self._tokenizer.special, "documents": None, **_plain(extra), **chat}
        except RecursionError as error:
            raise TemplateError("messages or tools are nested too deeply; flatten them") from error

    def _render(self, variables: dict[str, Any], meter: "_Meter") -> str:
        template = self._template("default" if variables["tools"] is None else "tool_use")
        before = _METER.set(meter)
        try:
            return _collect(template.generate(variables))
        except TemplateError:
            raise
        except _Refusal as error:
            raise TemplateError(f"the chat template refused the messages: {_brief(error)}") from error
        except Exception as error:  # a template can provoke nearly any, MemoryError and RecursionError included
            raise TemplateError(f"the chat template failed ({_brief(error)}); {REMEDY}") from error
        finally:
            _METER.reset(before)

    def _template(self, name: str) -> Template:
        if not self._source:
            raise TemplateError(f"the model has no chat template; {REMEDY}")
        sources = {"default": self._source} if isinstance(self._source, str) else self._source
        if name not in sources:
            name = "default"
        if name not in sources:
            raise TemplateError(f"none of the chat templates {', '.join(sources)} is named default; {REMEDY}")
        if name not in self._compiled:
            self._compiled[name] = _compile(sources[name])
        return self._compiled[name]


class _Refusal(JinjaError):
    """What `raise_exception` in a template raises."""


class _Meter:
    """Counts down the steps that a template may still take."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    @property
    def spent(self) -> bool:
        return self._left < 0

    def spend(self, steps: int = 1) -> None:
        self._left -= steps
        if self.spent:
            raise TemplateError(f"the chat template runs for too long; {REMEDY}")


_METER: ContextVar[_Meter] = ContextVar("meter")


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        _METER.get().spend()
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_INTEGER_BITS:
                raise OverflowError("an integer grows too large")
        for items, times in ((left, right), (right, left)):
            if isinstance(items, str | list | tuple) and isinstance(times, int) and len(items) * times > MAX_OUTPUT:
                raise OverflowError("a repeated sequence grows too large")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """Accepts `{% generation %}` around the replies, with which templates mark them for training."""

    tags = {"generation"}  # noqa: RUF012 (as the base class declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


@pass_context  # so that it is never run at compile time
def _metered(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _METER.get().spend()
        yield item


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter, without escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _sandbox() -> _Sandbox:
    sandbox = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    sandbox.filters |= {"tojson": _to_json, "metered": _metered}
    sandbox.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    del sandbox.globals["lipsum"]
    return sandbox


_SANDBOX = _sandbox()


def _compile(source: str) -> Template:
    try:
        tree = _SANDBOX.parse(source)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "metered", [], [], None, None, lineno=loop.lineno)
        return _SANDBOX.from_string(tree)
    except TemplateSyntaxError as error:
        raise TemplateError(f"line {error.lineno} of the chat template is wrong: {_brief(error)}; {REMEDY}") from error
    except Exception as error:  # deep nesting, for one, fails in the Python compiler
        raise TemplateError(f"the chat template does not compile ({_brief(error)}); {REMEDY}") from error


def _collect(pieces: Iterable[str]) -> str:
    size, collected = 0, []
    for piece in pieces:
        size += len(piece)
        if size > MAX_OUTPUT:
            raise TemplateError(f"the chat template writes more than {MAX_OUTPUT} characters; {REMEDY}")
        collected.append(piece)
    return "".join(collected)


def _brief(error: Exception) -> str:
    text = str(error)
    text = text if len(text) <= 500 else text[:500] + " ..."
    return text if isinstance(error, JinjaError) else f"{type(error).__name__}: {text}"


def _message(message: Message) -> dict[str, Any]:
    """A message as templates see it: the thinking of a reply is there under each name that one of them reads."""
    if not isinstance(message, Mapping):
        raise TemplateError(f"a message is a dict with role and content, not {type(message).__name__}")
    plain: dict[str, Any] = _plain(message)
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((plain[name] for name in names if plain.get(name) is not None), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """The value rebuilt from plain JSON types, so that a template meets no methods the sandbox does not know."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value) if kind is not str else str.__str__(value)
    raise TemplateError(f"messages and tools hold JSON data, not {type(value).__name__}; convert it first")


def _without_end(reply: Sequence[int], special: Collection[int]) -> Sequence[int]:
    end = len(reply)
    while end and reply[end - 1] in special:
        end -= 1
    return reply[:end]


def _parts(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The partial chats whose renders end at turn boundaries, the most useful ones first."""
    first = next((i for i, message in enumerate(messages) if message.get("role") not in ("system", "developer")), None)
    if first is not None:
        # What every chat with this system prompt and these tools begins with, wherever the template puts them.
        content = messages[first].get("content")
        other = "b" if isinstance(content, str) and content.startswith("a") else "a"
        yield [*messages[:first], {**messages[first], "content": other}]
    for end in range(len(messages), 0, -1):
        yield messages[:end]
