"""Sequence: a running request, its tokens, its State, and the text made of them."""

from collections.abc import Sequence as Tokens

import numpy as np
from torch import Tensor

from bough.cache.prefix_cache import Match
from bough.cache.reuse import Use
from bough.cache.tree import Symbols, as_symbols
from bough.engine.grammar import Matcher
from bough.engine.request import Handle, Output, Piece, Usage
from bough.engine.sampler import Biases, Logprobs, RowSampling, TokenCounts
from bough.engine.text import StopStrings
from bough.engine.tokenizer import Detokenizer, Tokenizer
from bough.errors import RequestError
from bough.state.live import State


class Sequence:
    """One request being worked on. `tokens` are the prompt and what was written; the state holds a prefix of them."""

    def __init__(
        self,
        handle: Handle,
        *,
        context: int,
        end_tokens: frozenset[int],
        tokenizer: Tokenizer | None,
        counts: TokenCounts | None,
        biases: Biases | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        self.handle, self.request = handle, handle.request
        self.state: State | None = None
        self.match: Match | None = None  # while it waits for what the cache has of it
        self.cuts: set[int] = set()  # lengths at which its prefill leaves resume points
        self.leader: tuple[Sequence, int] | None = None  # whose prefill it waits for, and up to where
        self.tries = 0  # to get from the cache what it has
        self.passed = 0  # how often one that came later started before it
        self.started = False  # whether it has run before
        self.use: Use | None = None  # as the cache learns from it, once the prompt is read
        self.usage = Usage(prompt_tokens=len(self.request.prompt))
        self.tokens = list(self.request.prompt)
        self.limit = min(context, len(self.tokens) + self.request.params.max_tokens)
        self.end_tokens = frozenset() if self.request.params.ignore_eos else end_tokens
        self.counts, self.biases = counts, biases
        self.matcher = matcher
        self.reason: str | None = None  # why it ended, once it has its last token
        self.failure: RequestError | None = None  # why it could not be ended well
        self.detokenizer = Detokenizer(tokenizer, self.request.prompt) if tokenizer else None
        self.stops = StopStrings(self.request.params.stop) if self.request.params.stop else None
        self.text: list[str] = []
        self.logprobs: list[Logprobs] = []
        self.scores: list[float] = []

    @property
    def computed(self) -> int:
        """How many of its tokens the state holds."""
        return self.state.length if self.state else 0

    @property
    def pending(self) -> int:
        """How many tokens have to be fed before the next one can be chosen."""
        return len(self.tokens) - self.computed

    @property
    def has_lost_its_state(self) -> bool:
        """Whether what it knows was fed to a state that is no more, or was to be."""
        return self.state is not None and (self.state.condition != "ready" or not self.pending)

    @property
    def wants_token(self) -> bool:
        """Whether a token is to be written once all that is pending has been fed."""
        return len(self.tokens) < self.limit

    @property
    def is_writing(self) -> bool:
        """Whether it feeds a single token next, after all that is known of it, and leaves no resume point there."""
        known = self.state.known if self.state else 0
        return self.pending == 1 and known == self.computed and len(self.tokens) not in self.cuts

    def tokens_to_feed(self, count: int) -> Symbols | list[int]:
        """The next so many of its tokens."""
        start, prompt = self.computed, self.request.prompt
        if count > 1 and start + count <= len(prompt):
            return prompt.symbols[start : start + count]
        return self.tokens[start : start + count]

    @property
    def written(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def symbols(self) -> Symbols:
        """All its tokens, as the cache compares them."""
        return np.concatenate([self.request.prompt.symbols, as_symbols(self.written)])

    @property
    def salt(self) -> str | None:
        return self.request.params.cache_salt

    def sampling_at(self, depth: int, drafted: Tokens[int] = (), allowed: Tensor | None = None) -> RowSampling:
        """How the token after so many more is chosen, if these are what was drafted, and this is what may follow."""
        index = len(self.tokens) - len(self.request.prompt) + depth
        return RowSampling(self.request.params, self.request.seed, index, self.counts, self.biases, drafted, allowed)

    def append(self, token: int, logprobs: Logprobs | None, *, drafted: bool = False) -> None:
        """Take the next token, which may be the last."""
        if self.matcher is not None and not self.matcher.take(token):
            self.failure, self.reason = RequestError(self.matcher.problem), "failed"
            return
        self.tokens.append(token)
        if self.counts is not None:
            self.counts.add([token])
        if logprobs is not None:
            self.logprobs.append(logprobs)
        text = self.detokenizer.push([token]) if self.detokenizer else ""
        stopped = False
        if self.stops:
            text, stopped = self.stops.push(text)
        if stopped or token in self.end_tokens or (self.matcher is not None and self.matcher.complete):
            self.reason = "stop"
        elif len(self.tokens) >= self.limit:
            self.reason = "length"
        if self.reason and not stopped:
            text += self._rest()
            if self.stops and self.stops.stopped:
                self.reason = "stop"
        self.text.append(text)
        self.handle.put(Piece(text, [token], [logprobs] if logprobs else [], drafted))

    def take(self, tokens: Tokens[tuple[int, Logprobs | None]]) -> int:
        """Take the next tokens, of which all but the last were drafted, up to one that ends it. Returns how many."""
        for count, (token, logprobs) in enumerate(tokens, 1):
            self.append(token, logprobs, drafted=count < len(tokens))
            if self.reason:
                return count
        return len(tokens)

    def _rest(self) -> str:
        """Text that was held back, now that nothing follows."""
        text = self.detokenizer.finish() if self.detokenizer else ""
        if not self.stops:
            return text
        text, stopped = self.stops.push(text)
        return text if stopped else text + self.stops.finish()

    def cut_off(self) -> None:
        """The request ends before its time: what was held back is text after all."""
        if rest := self._rest():
            self.text.append(rest)
            self.handle.put(Piece(rest, []))

    def finish(self, reason: str) -> None:
        """Tell the client, and give the state back."""
        if self.failure is not None:
            self.fail(self.failure)
            return
        self.release()
        self.usage.completion_tokens = len(self.written)
        self.handle.end(Output("".join(self.text), self.written, reason, self.usage, self.logprobs, self.scores))

    def fail(self, error: BaseException) -> None:
        self.release()
        self.handle.end(error=error)

    def release(self) -> None:
        if self.state is not None:
            self.state.release()
            self.state = None
