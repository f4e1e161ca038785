"""Replies taken apart while they come: what is said, what is thought, and which tools are called.

Dialect    how a model marks its thinking and writes its calls, known from its chat template or its special tokens.
Splitter   takes text piece by piece, and gives parts. Only what may turn out to be a call or a mark is held back.
Reader     does the same for the pieces of a request; it also sees marks that are special tokens, which no text shows.

Nothing but white space beside calls and thinking, and the marks of thinking, is left out: what is not a call after all
comes out as it was written. Knows nothing of the APIs that tell clients of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from json import dumps
from typing import Any, NamedTuple

from bough.engine.request import Piece
from bough.engine.text import StopStrings
from bough.engine.tokenizer import Detokenizer, Tokenizer
from bough.engine.tool_formats import FORMATS, CallFormat, Malformed, ToolCall, Tools

THINKING = (("<think>", "</think>"), ("<|channel>thought\n", "<channel|>"), ("[THINK]", "[/THINK]"))
BARE_CALLS = ('{"name": ', '{"name":', '{"type": "function", "name": ')  # and the name
MOST_FAILURES = 64  # to read a call; what comes after them is taken as text, so that a reply costs little to split
PROMPT_END = 16  # tokens at the end of a prompt in which its opening of the thinking is


@dataclass(frozen=True, slots=True)
class Said:
    """A part of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """A part of the thinking before it."""

    text: str


Part = Said | Thought | ToolCall


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a model writes what is not plain text."""

    calls: CallFormat | None = None
    thinking: tuple[str, str] | None = None  # the marks before and after

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Dialect":
        """What the chat template mentions; where it does not say, what there are special tokens for."""
        source = tokenizer.template or ""
        template = source if isinstance(source, str) else "\n".join(source.values())

        def has_token(mark: str) -> bool:
            token = mark.removesuffix("thought\n")
            ids = tokenizer.encode(token, special=False)
            return len(ids) == 1 and tokenizer.decode(ids, skip_special=False) == token

        calls = next((each for each in FORMATS if each.opening in template), None)
        if calls is None and "tools" in template:
            calls = next((each for each in FORMATS if has_token(each.opening)), None)
        told = (each for each in THINKING if each[1] in template or (has_token(each[0]) and has_token(each[1])))
        return cls(calls, next(told, None) if template else None)

    @property
    def marks(self) -> tuple[str, ...]:
        """All that has to be seen for replies to be understood."""
        calls = () if self.calls is None else (self.calls.opening, self.calls.close or "", *self.calls.quotes)
        return tuple(filter(None, (*calls, *(self.thinking or ()))))


class _Found(NamedTuple):
    at: int
    mark: str


class Splitter:
    """Splits one reply. `tools`: what may be called; none: nothing is taken for a call."""

    def __init__(self, dialect: Dialect, tools: Tools | None = None, *, thinking: bool = False) -> None:
        self._calls, self._thinking, self._tools = dialect.calls if tools else None, dialect.thinking, tools or {}
        self._state = self._thought if thinking and dialect.thinking else self._said
        self._held = ""  # text that is not certain yet
        self._space = ""  # white space that is left out if a call or a mark follows
        self._fresh = True  # nothing but white space and thinking has come
        self.thinks = thinking and dialect.thinking is not None  # whether it is at its thinking, or was
        self._after_mark = thinking  # white space here is left out
        self._mark = ""  # what began the call that is being read
        self._searched = 0  # how much of it holds no closing mark that would end it
        self._failures = 0  # to read calls
        self._parts: list[Part] = []

    def push(self, text: str) -> list[Part]:
        """The parts that are now certain. Calls come whole."""
        return self._go_on(text, last=False)

    def finish(self) -> list[Part]:
        """The rest, when no more text will come."""
        return self._go_on("", last=True)

    def _go_on(self, text: str, *, last: bool) -> list[Part]:
        self._held += text
        while self._state(last):
            pass
        parts, self._parts = self._parts, []
        return parts

    # States. Each takes from the held text what it is certain of, and tells whether another has to go on.

    def _said(self, last: bool) -> bool:
        openings = self._openings()
        found = self._first(openings)
        if found is None:
            self._say(Said, self._certain(openings, last), last or not openings)
            return False
        self._say(Said, self._held[: found.at], False)
        self._held = self._held[found.at + len(found.mark) :]
        if self._thinking and found.mark == self._thinking[0]:
            self._state, self._space, self._after_mark, self.thinks = self._thought, "", True, True
        else:
            self._state, self._mark, self._searched = self._call, found.mark, 0
        return True

    def _thought(self, last: bool) -> bool:
        assert self._thinking is not None
        close = self._thinking[1]
        at = self._held.find(close)
        if at < 0:
            self._say(Thought, self._certain([close], last), last)
            return False
        self._say(Thought, self._held[:at], False)
        self._held = self._held[at + len(close) :]
        self._state, self._space, self._after_mark = self._said, "", True
        return True

    def _call(self, last: bool) -> bool:
        assert self._calls is not None
        close = self._calls.close
        end = -1 if close is None else self._held.find(close, self._searched)
        if end < 0 and not last:
            self._searched = max(0, len(self._held) - len(close or "") + 1)
            return False
        end = len(self._held) if end < 0 else end
        stop = min(len(self._held), end + len(close or ""))
        body = self._held[:end]
        calls = self._read(body)
        if calls is None:
            self._failures += 1
            if end < stop and self._failures < MOST_FAILURES and self._calls.in_string(body):
                self._searched = stop  # the mark is a part of some argument
                return True
            # Only the mark is known to be text: in what follows it there may be a call.
            self._say(Said, self._mark, True)
            self._calls = None if self._failures >= MOST_FAILURES else self._calls
        else:
            text = self._mark + self._held[:stop]
            self._parts += [replace(calls[0], text=text), *calls[1:]]
            self._held, self._space, self._after_mark, self._fresh = self._held[stop:], "", True, False
        self._state = self._said
        return True

    def _read(self, body: str) -> list[ToolCall] | None:
        assert self._calls is not None
        whole = body if self._mark == self._calls.opening else self._mark + body
        try:
            return self._calls.read(whole, self._tools)
        except Malformed:
            return None

    def _openings(self) -> list[str]:
        """What begins something else here. Thinking comes first, and only first, as does a call without a mark."""
        marks = [] if self._calls is None else [self._calls.opening]
        if self._fresh and self._thinking:
            marks.append(self._thinking[0])
        if self._fresh and self._calls is not None and self._calls.bare:
            marks += [lead + dumps(name) for name in self._tools for lead in BARE_CALLS]
        return marks

    def _first(self, marks: Sequence[str]) -> _Found | None:
        found = [_Found(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        anywhere = self._calls.opening if self._calls else ""
        return min((each for each in found if each.mark == anywhere or not self._held[: each.at].strip()), default=None)

    def _certain(self, marks: Sequence[str], last: bool) -> str:
        """Take the held text that no mark can begin in any more."""
        longest = 0 if last else max((_overlap(self._held, mark) for mark in marks), default=0)
        certain = self._held[: len(self._held) - longest]
        self._held = self._held[len(certain) :]
        return certain

    def _say(self, kind: type[Said] | type[Thought], text: str, last: bool) -> None:
        """Tell of text, but for white space at its end, unless it is the last."""
        if self._after_mark:
            text = text.lstrip()
            self._after_mark = not text
        text = self._space + text
        self._space = "" if last else text[len(text.rstrip()) :]
        text = text[: len(text) - len(self._space)]
        if text:
            self._parts.append(kind(text))
            self._fresh = self._fresh and (kind is Thought or text.isspace())


class Reader:
    """Splits the reply to one request, given its pieces."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        dialect: Dialect,
        prompt: Sequence[int],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        stop: Sequence[str] = (),
    ) -> None:
        if not tools:  # what looks like a call is none, and marks that no text shows stay unseen
            dialect = replace(dialect, calls=None)
        self._splitter = Splitter(dialect, _named(tools), thinking=begins_thinking(tokenizer, dialect, prompt))
        special = tokenizer.special_ids
        marks = {token for mark in dialect.marks for token in tokenizer.encode(mark, special=False)} & special
        self._hidden = special - marks
        # Text without the marks is of no use where these are special tokens: then it is made anew.
        self._text = Detokenizer(tokenizer, prompt, skip_special=False) if marks else None
        self._stops = StopStrings(stop)

    @property
    def thinks(self) -> bool:
        """Whether the reply begins with thinking. Where that is empty no part tells of it, but tokens stand for it."""
        return self._splitter.thinks

    def push(self, piece: Piece) -> list[Part]:
        text = piece.text
        if self._text is not None:
            text = self._text.push([token for token in piece.tokens if token not in self._hidden])
            text, _ = self._stops.push(text)
        return self._splitter.push(text)

    def finish(self) -> list[Part]:
        """The rest, when the request has ended."""
        parts: list[Part] = []
        if self._text is not None:
            text, stopped = self._stops.push(self._text.finish())
            parts = self._splitter.push(text if stopped else text + self._stops.finish())
        return parts + self._splitter.finish()


def begins_thinking(tokenizer: Tokenizer, dialect: Dialect, prompt: Sequence[int]) -> bool:
    """Whether a prompt ends with the mark that opens the thinking."""
    opening = dialect.thinking and dialect.thinking[0].strip()
    end = tokenizer.decode(list(prompt[-PROMPT_END:]), skip_special=False).rstrip()
    return bool(opening and end.endswith(opening))


def _named(tools: Sequence[Mapping[str, Any]] | None) -> Tools:
    """Tools, as chat templates have them, by their names."""
    functions = [tool.get("function", tool) for tool in tools or ()]
    return {function["name"]: function.get("parameters") or {} for function in functions}


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of a text are the start of a mark."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)
