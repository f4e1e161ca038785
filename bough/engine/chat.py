"""Chat: a conversation that keeps the token ids of its turns, so that a reply is never tokenised again.

It also tells the engine where its turns end: there other chats, forks and edits will leave it.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bough.cache.tree import as_symbols, common
from bough.config import SamplingParams
from bough.engine.request import Handle, Output, Piece
from bough.engine.template import ChatTemplate, Message, Transcript
from bough.errors import OptionError, TemplateError

if TYPE_CHECKING:
    from bough.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Turn:
    """What was said, the whole prompt that asked for the reply, where turns end in it, and the reply."""

    said: Message
    prompt: Transcript
    boundaries: tuple[int, ...]
    output: Output

    @property
    def messages(self) -> tuple[Message, Message]:
        return self.said, {"role": "assistant", "content": self.output.text}


class Chat:
    """A conversation: a system prompt and turns. Each turn's prompt begins with the exact tokens of those before."""

    def __init__(
        self,
        engine: "Engine",
        *,
        system: str | None = None,
        tools: Sequence[Message] | None = None,
        params: SamplingParams | None = None,
        **template_options: Any,
    ) -> None:
        if engine.tokenizer is None:
            raise TemplateError("the model has no tokenizer, so it cannot chat; give it token lists instead")
        self.engine, self.system, self.tools = engine, system, tools
        self.params, self.options = params or engine.defaults, template_options
        self.template = ChatTemplate(engine.tokenizer)
        self.turns: tuple[Turn, ...] = ()
        self.open: weakref.WeakSet[Reply] = weakref.WeakSet()  # replies on their way

    @property
    def messages(self) -> list[Message]:
        opening: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        return opening + [message for turn in self.turns for message in turn.messages]

    def send(self, text: str, params: SamplingParams | None = None) -> Output:
        """Say something, and wait for the reply."""
        reply = self.stream(text, params)
        for _ in reply:
            pass
        return reply.output

    def stream(self, text: str, params: SamplingParams | None = None) -> "Reply":
        """Say something, and get the reply piece by piece. The turn counts once it is read to its end, or closed."""
        if self.open:
            raise OptionError("the last reply of this chat is still open; read it to its end or close() it, or fork()")
        said: Message = {"role": "user", "content": text}
        messages = [*self.messages, said]
        if self.turns:
            last = self.turns[-1]
            prompt = self.template.extend(last.prompt, last.output.tokens, messages, tools=self.tools, **self.options)
        else:
            prompt = self.template.prompt(messages, tools=self.tools, **self.options)
        return Reply(self, said, prompt, self._boundaries(prompt, messages), params or self.params)

    def _boundaries(self, prompt: Transcript, messages: list[Message]) -> tuple[int, ...]:
        """Where turns end in a prompt. Those that the last prompt had are still there as far as its tokens are; the
        ends of the reply and of what was said now come to them, so the cost is that of rendering the chat twice.
        """
        if not self.engine.cache.places_points:
            return ()
        if not self.turns:
            return tuple(self.template.boundaries(prompt, messages, tools=self.tools, **self.options))
        last, closed = self.turns[-1], {**self.options, "add_generation_prompt": False}
        kept = _common(prompt.tokens, last.prompt.tokens)
        found = {at for at in last.boundaries if at <= kept}
        for part in (messages[:-1], messages):
            with suppress(TemplateError):  # some refuse a chat that does not end with the user
                ended = self.template.extend(last.prompt, last.output.tokens, part, tools=self.tools, **closed)
                found.add(_common(prompt.tokens, ended.tokens))
        return tuple(sorted(at for at in found if 0 < at < len(prompt.tokens)))

    def fork(self) -> "Chat":
        """A second conversation with the same past."""
        other = Chat(self.engine, system=self.system, tools=self.tools, params=self.params, **self.options)
        other.turns = self.turns
        return other

    def rewind(self, turns: int = 1) -> None:
        """Forget the last turns."""
        if not 0 <= turns <= len(self.turns):
            raise OptionError(f"the chat has {len(self.turns)} turns; it cannot be taken back by {turns}")
        self.turns = self.turns[: len(self.turns) - turns]


class Reply:
    """A reply on its way. Iterate over its pieces; `close()` stops it and keeps what was said until then.

    A reply that nobody holds any more is cancelled. One whose chat was taken back meanwhile does not become a turn.
    """

    def __init__(
        self, chat: Chat, said: Message, prompt: Transcript, boundaries: tuple[int, ...], params: SamplingParams
    ) -> None:
        self._chat, self._past = chat, chat.turns
        self._said, self._prompt, self._boundaries = said, prompt, boundaries
        self.handle: Handle = chat.engine.submit(prompt.tokens, params, boundaries=boundaries)
        weakref.finalize(self, self.handle.cancel)
        chat.open.add(self)

    @property
    def output(self) -> Output:
        """The finished reply; waits for it."""
        return self.handle.result()

    def __iter__(self) -> Iterator[Piece]:
        try:
            yield from self.handle
        finally:
            self.close()

    def close(self) -> None:
        """Stop if it is still going, and make the turn part of the chat. A second call does nothing."""
        if self not in self._chat.open:
            return
        self._chat.open.discard(self)
        self.handle.cancel()
        turn = Turn(self._said, self._prompt, self._boundaries, self.output)
        if self._chat.turns is self._past:
            self._chat.turns = (*self._past, turn)


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return common(as_symbols(left), as_symbols(right))
