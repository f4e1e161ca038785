"""From validated requests to the engine and back: prompts, running generations, and the limits on them.

The engine has a thread of its own, and tells of news there; `Generation` carries them over to the event loop, where
everything else in the server happens. Prompts are rendered and tokenised in threads, since that can take a while.
"""

import asyncio
import queue
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from bough.config import SamplingParams
from bough.engine.engine import Engine
from bough.engine.request import Handle, Output, Piece
from bough.engine.template import ChatTemplate, Message
from bough.errors import PoolFull, TemplateError
from bough.server.errors import ApiError, no_such_model
from bough.server.metrics import Metrics
from bough.server.settings import Settings

PULSE = 10.0  # seconds without news, after which a stream says that it is alive
QUIET = Piece("", [])
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
RESERVED = {"self", "messages", "tools", "transcript", "add_generation_prompt"}  # not for clients to set


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, where turns end in them, and up to where the client wants them cached."""

    tokens: Sequence[int]
    boundaries: tuple[int, ...] = ()
    marks: tuple[int, ...] = ()


class Service:
    """An engine, and what all APIs share in serving it."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.names = settings.names or (engine.name,)
        self.started = int(time.time())
        self.metrics = Metrics(engine, self.names[0])
        self.running: set[Generation] = set()
        self.closing = False
        self._starting = 0  # continuations on their way to the engine
        self.template = ChatTemplate(engine.tokenizer) if engine.tokenizer is not None else None

    @property
    def name(self) -> str:
        """What the model is called in answers."""
        return self.names[0]

    def require_model(self, name: str | None) -> None:
        """Refuse a request that asks for another model. One that names none gets the one there is."""
        if name is not None and name not in self.names:
            raise no_such_model(name, self.name)

    @property
    def most_tokens(self) -> int:
        """How long an answer may become if nobody says."""
        stored = "num_predict" in self.engine.about.parameters
        return self.engine.defaults.max_tokens if stored else self.engine.context

    async def chat_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] = NO_OPTIONS,
    ) -> Prompt:
        """The prompt that asks for a reply to messages. Templates read `options` as variables."""
        if taken := RESERVED & options.keys():
            raise ApiError(400, f"{', '.join(sorted(taken))} cannot be set for the chat template; leave it out")
        return await asyncio.to_thread(self._rendered, messages, tools, options)

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, options: Mapping[str, Any]
    ) -> Prompt:
        if self.template is None:
            raise TemplateError("the model has no tokenizer, so it cannot chat; send token ids to /v1/completions")
        messages = self._opened(messages)
        transcript = self.template.prompt(messages, tools=tools, **options)
        prompt = Prompt(self.checked(transcript.tokens))
        if not self.engine.cache.places_points:
            return prompt
        return Prompt(prompt.tokens, tuple(self.template.boundaries(transcript, messages, tools=tools, **options)))

    def _opened(self, messages: Sequence[Message]) -> Sequence[Message]:
        """With the system prompt that was stored with the model, where the messages bring none."""
        system = self.engine.about.system
        if system is None or any(message.get("role") in ("system", "developer") for message in messages):
            return messages
        return [{"role": "system", "content": system}, *messages]

    async def plain_prompt(self, prompt: str | Sequence[int]) -> Prompt:
        """A prompt as it is, text or token ids."""
        return await asyncio.to_thread(lambda: Prompt(self.checked(prompt)))

    def checked(self, prompt: str | Sequence[int]) -> Sequence[int]:
        try:
            tokens = self.engine.tokens(prompt)
        except PoolFull as error:  # it would never fit
            raise ApiError(400, str(error), code="context_length_exceeded") from error
        most = self.settings.prompt_tokens
        if most is not None and len(tokens) > most:
            message = f"the prompt has {len(tokens)} tokens, and this server takes {most}; shorten it"
            raise ApiError(400, message, code="context_length_exceeded")
        return tokens

    async def start(self, wanted: Sequence[tuple[Prompt, SamplingParams]]) -> "Generation":
        """Start on prompts, all of them or none."""
        self._require_room(len(wanted))
        self._starting += len(wanted)
        try:
            handles = await asyncio.to_thread(self._submit, wanted)  # a grammar may take a while to read
        finally:
            self._starting -= len(wanted)
        return Generation(self, handles)

    def _submit(self, wanted: Sequence[tuple[Prompt, SamplingParams]]) -> list[Handle]:
        handles: list[Handle] = []
        try:
            for prompt, params in wanted:
                asked = self.engine.submit(prompt.tokens, params, boundaries=prompt.boundaries, marks=prompt.marks)
                handles.append(asked)
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        return handles

    @property
    def _most(self) -> int:
        """Continuations that run or wait."""
        return self.engine.max_running + self.settings.queue

    def require_possible(self, count: int) -> None:
        """Refuse a request for more continuations than can ever wait at once."""
        if count > self._most:
            message = f"{count} answers were asked for at once, and this server works on {self._most}; ask for less"
            raise ApiError(400, message)

    def _require_room(self, count: int) -> None:
        """Refuse one for more than can wait now."""
        if self.closing:
            raise ApiError(503, "the server is shutting down; try another", kind="server_error", code="closing")
        self.require_possible(count)
        busy = self._starting + sum(each.left for each in self.running)
        if busy + count > self._most:
            message = f"{busy} requests are running or waiting, and no more than {self._most} may; try again later"
            raise ApiError(429, message, kind="rate_limit_error", code="queue_full", headers={"Retry-After": "1"})

    def cancel_all(self) -> None:
        """Stop whatever is running; what was computed is kept."""
        for generation in list(self.running):
            generation.cancel()


class Generation:
    """What one client request has the engine write, one or several continuations, as the event loop sees it."""

    def __init__(self, service: Service, handles: list[Handle]) -> None:
        self.handles = handles
        self.left = len(handles)  # continuations that have not ended
        self.began = time.perf_counter()
        self._service, self._metrics = service, service.metrics
        self.first: list[float | None] = [None] * len(handles)  # when each had its first piece
        self._last: list[float | None] = [None] * len(handles)  # and its last
        self._ended = [False] * len(handles)
        self._news: deque[tuple[int, Piece | None]] = deque()
        self._woken = asyncio.Event()
        service.running.add(self)
        loop = asyncio.get_running_loop()
        for index, handle in enumerate(handles):
            handle.listen(partial(_from_engine, loop, partial(self._take, index)))

    async def __aiter__(self) -> AsyncIterator[tuple[int, Piece | None]]:
        """Which continuation has news, and what: a piece, or None at its end. QUIET when there are none for a while."""
        left = len(self.handles)
        while left:
            while self._news:
                index, piece = self._news.popleft()
                left -= piece is None
                yield index, piece
            if left:
                self._woken.clear()
                try:
                    async with asyncio.timeout(PULSE):
                        await self._woken.wait()
                except TimeoutError:
                    yield 0, QUIET

    def output(self, index: int = 0) -> Output:
        """How a continuation that has ended came out. Raises what broke it off."""
        assert self.handles[index].done, "it has not ended"
        output = self.handles[index].result()
        if output.finish_reason == "cancelled":
            raise ApiError(503, "the server is shutting down", kind="server_error", code="closing")
        return output

    async def outputs(self) -> list[Output]:
        """Wait for all to end."""
        async for _ in self:
            pass
        return [self.output(index) for index in range(len(self.handles))]

    def cancel(self) -> None:
        """Stop what has not ended. What was computed is kept."""
        for handle in self.handles:
            handle.cancel()

    def _take(self, index: int) -> None:
        """Take over what the engine has put down, and note when."""
        now, handle = time.perf_counter(), self.handles[index]
        with suppress(queue.Empty):
            while not self._ended[index]:
                piece = handle.next_piece(0)
                self._news.append((index, piece))
                if piece is None:
                    self._end(index, handle)
                elif piece.tokens:
                    self._metrics.token(self.began if (last := self._last[index]) is None else last, now, last is None)
                    self._last[index] = now
                    self.first[index] = self.first[index] or now
        self._woken.set()

    def _end(self, index: int, handle: Handle) -> None:
        self._ended[index] = True
        self.left -= 1
        self._metrics.ended(handle)
        if not self.left:
            self._service.running.discard(self)


def _from_engine(loop: asyncio.AbstractEventLoop, take: Callable[[], None]) -> None:
    """Runs in the engine's thread."""
    with suppress(RuntimeError):  # the event loop has ended: nobody listens any more
        loop.call_soon_threadsafe(take)
