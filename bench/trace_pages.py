"""The baseline of large engines: pages on a fixed grid, a resume point with each, the least recently used page first.

A page stands for all that is before it, so it is known by the page before and its own symbols, and nothing but whole
pages is kept. A request touches its pages from the last to the first: what was used longest ago is then always a page
that no kept one depends on, and one ordered dictionary is all it takes.
"""

import heapq
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray
from trace_files import Trace
from trace_replay import SECONDS_PER_TOKEN


class Pages:
    """One cache of one size; a page takes its tokens and a resume point."""

    def __init__(self, trace: Trace, *, budget: int, point: int, every: int) -> None:
        """Pages of about so many tokens: whole symbols of the trace."""
        self.trace, self.budget, self.point = trace, budget, point
        self.length = max(1, round(every / trace.symbol_tokens))
        self.hit = self.used = 0
        self._numbers: dict[tuple[int, bytes], int] = {}  # of pages, by the one before and their symbols
        self._kept: OrderedDict[int, int] = OrderedDict()  # what each takes, least recently used first
        self._replies: list[tuple[float, int, list[tuple[int, int]]]] = []

    def run(self) -> float:
        """The share of all prompt tokens that need not have been computed."""
        for number, request in enumerate(self.trace.requests):
            while self._replies and self._replies[0][0] <= request.time:
                self._keep(heapq.heappop(self._replies)[2])
            pages = self._pages(request.prompt[: request.whole], request.tokens)
            for page, tokens in pages:
                if page not in self._kept:
                    break
                self.hit += tokens
            self._keep(pages)
            if len(request.reply):
                symbols = np.concatenate([request.prompt[:-1], request.reply])
                pages = self._pages(symbols, np.ones(len(symbols), np.int32))
                heapq.heappush(self._replies, (request.time + SECONDS_PER_TOKEN * request.made, number, pages))
        return self.hit / self.trace.prompt_tokens

    def _pages(self, symbols: NDArray[np.int32], tokens: NDArray[np.int32]) -> list[tuple[int, int]]:
        """The numbers of the whole pages of a path, and the tokens of each."""
        pages, before = [], -1
        for end in range(self.length, len(symbols) + 1, self.length):
            key = before, symbols[end - self.length : end].tobytes()
            before = self._numbers.setdefault(key, len(self._numbers))
            pages.append((before, int(tokens[end - self.length : end].sum())))
        return pages

    def _keep(self, pages: list[tuple[int, int]]) -> None:
        for page, tokens in reversed(pages):
            if page not in self._kept:
                self._kept[page] = tokens + self.point
                self.used += tokens + self.point
            self._kept.move_to_end(page)
        while self.used > self.budget:
            self.used -= self._kept.popitem(last=False)[1]
