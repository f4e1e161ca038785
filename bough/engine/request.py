"""What a client asked, and what it gets back. Knows tokens and text; nothing of models or memory."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from bough.cache.tree import Symbols, as_symbols
from bough.config import SamplingParams
from bough.engine.sampler import Logprobs


class TokenIds(tuple[int, ...]):
    """The tokens of a prompt. There may be very many, so they are made an array only once."""

    @cached_property
    def symbols(self) -> Symbols:
        """The same, as the cache compares them."""
        return as_symbols(self)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt as tokens, and how to go on from it."""

    prompt: TokenIds
    params: SamplingParams
    seed: int
    score: bool = False  # report the logprob of each prompt token, and write nothing
    boundaries: tuple[int, ...] = ()  # lengths at which other prompts are likely to branch off
    marks: tuple[int, ...] = ()  # lengths at which the client asks for resume points
    came: float = field(default_factory=time.monotonic)

    @property
    def is_late(self) -> bool:
        deadline = self.params.deadline
        return deadline is not None and time.monotonic() > self.came + deadline


@dataclass(slots=True)
class Usage:
    """What a request cost. Cached tokens were not computed for it; matched ones were known, whether used or not."""

    prompt_tokens: int = 0
    matched_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens as they come, and the text that is certain by now (it may lag behind the tokens)."""

    text: str
    tokens: list[int]
    logprobs: list[Logprobs] = field(default_factory=list)
    drafted: bool = False  # whether a drafter had guessed the tokens


@dataclass(frozen=True, slots=True)
class Output:
    """A finished request."""

    text: str
    tokens: list[int]
    finish_reason: str  # stop, length, cancelled, deadline
    usage: Usage
    logprobs: list[Logprobs]  # of each token, when asked for
    scores: list[float]  # of each prompt token but the first, when asked for


class Handle:
    """One request on its way: iterate over its pieces, wait for its result, or cancel it, from any thread."""

    def __init__(self, request: Request, *, has_text: bool) -> None:
        self.request = request
        self.has_text = has_text  # False: the model has no tokenizer, and pieces are tokens only
        self.prefilled = 0  # prompt tokens read so far
        self._news: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self._done = threading.Event()
        self._cancelled = threading.Event()
        self._output: Output | None = None
        self._error: BaseException | None = None
        self._listener: Callable[[], None] | None = None
        self._over = False  # whether all has been told

    def cancel(self) -> None:
        """Stop as soon as the step that is running ends. What was written until then is the result."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, seconds: float | None = None) -> bool:
        """Whether the request has ended, after waiting at most so long."""
        return self._done.wait(seconds)

    def result(self) -> Output:
        """Wait for the end."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        assert self._output is not None
        return self._output

    def __iter__(self) -> Iterator[Piece]:
        """The pieces that nobody has taken yet, in order. Raises what ended the request, if it did not end well."""
        while (piece := self._next(None)) is not None:
            yield piece
        self.result()

    def next_piece(self, seconds: float) -> Piece | None:
        """The next piece, or None when the request has ended; raises queue.Empty when neither happens in time."""
        return self._next(seconds)

    def listen(self, listener: Callable[[], None]) -> None:
        """Have someone called at news, in the engine's thread, and once now for what there is already.

        It must not wait, and must not raise. After the end it is forgotten, and with it all that it refers to.
        """
        self._listener = listener
        listener()
        if self._over:
            self._listener = None

    def _next(self, seconds: float | None) -> Piece | None:
        piece = self._news.get(timeout=seconds)
        if piece is None:
            self._news.put(None)  # the end stays in sight
        return piece

    # The engine's side.

    def put(self, piece: Piece) -> None:
        self._tell(piece)

    def end(self, output: Output | None = None, error: BaseException | None = None) -> None:
        self._output, self._error = output, error
        self._done.set()
        self._tell(None)
        self._over = True
        self._listener = None

    def _tell(self, news: Piece | None) -> None:
        self._news.put(news)
        listener = self._listener  # looked at once: another thread may forget it
        if listener is not None:
            listener()
