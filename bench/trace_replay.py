"""A trace through the real tree and policies, with memory that is only counted. No model, no tensors.

Admission is the prefix cache's: a resume point where a prompt ends and where it left a known path. In a trace of pieces
a prompt ends, for this purpose, with its last whole piece: no longer prompt can have the partial one.
"""

import heapq
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray
from trace_files import Recorded, Trace

from bough.cache.policy import Index, Move
from bough.cache.reuse import Use
from bough.cache.tree import Node, Tier, Tree

SECONDS_PER_TOKEN = 0.02  # a reply's length is known to the policy that much later for each token


@dataclass(slots=True)
class Meter:
    """Memory taken, in tokens of K and V."""

    point: int  # what a resume point takes
    used: int = 0


class Held:
    """What would be held of an edge."""

    __slots__ = ("meter", "resumes", "start", "tokens")

    def __init__(self, meter: Meter, start: int, tokens: NDArray[np.int32], resumes: bool) -> None:
        self.meter, self.start, self.tokens, self.resumes = meter, start, tokens, resumes
        meter.used += self.freed_bytes

    @property
    def is_sound(self) -> bool:
        return True

    @property
    def freed_bytes(self) -> int:
        return int(self.tokens.sum()) + (self.meter.point if self.resumes else 0)

    def split(self, at: int) -> "tuple[Held, Held]":
        self.close()
        cut = at - self.start
        left = Held(self.meter, self.start, self.tokens[:cut], not self.meter.point)
        return left, Held(self.meter, at, self.tokens[cut:], self.resumes)

    def join(self, right: "Held") -> "Held":
        self.close()
        right.close()
        return Held(self.meter, self.start, np.concatenate([self.tokens, right.tokens]), right.resumes)

    def with_point(self, other: "Held") -> "Held":
        self.close()
        other.close()
        return Held(self.meter, self.start, self.tokens, True)

    def without_point(self) -> "Held":
        self.close()
        return Held(self.meter, self.start, self.tokens, False)

    def close(self) -> None:
        self.meter.used -= self.freed_bytes


class Replay:
    """One cache of one size, one policy, one kind of model."""

    def __init__(self, trace: Trace, *, policy: str, budget: int, point: int) -> None:
        self.trace, self.budget, self.point = trace, budget, point
        self.meter = Meter(point)
        self.index = Index(policy, point / trace.symbol_tokens)
        self.tree = Tree(watcher=self.index)
        self.hit = 0
        self._replies: list[tuple[float, int, Recorded, Use]] = []
        self._order = count()

    def run(self) -> float:
        """The share of all prompt tokens that need not have been computed."""
        for request in self.trace.requests:
            while self._replies and self._replies[0][0] <= request.time:
                self._finish(*heapq.heappop(self._replies))
            self._serve(request)
        return self.hit / self.trace.prompt_tokens

    def _serve(self, request: Recorded) -> None:
        walk = self.tree.match(b"", request.prompt)
        resumed = walk.matched
        if self.point:
            resumed = max((n.end for n in walk.nodes if n.end <= walk.matched and n.resumes), default=0)
        self.hit += int(request.tokens[:resumed].sum())
        end = request.whole if self.point else len(request.prompt)
        path = self._keep(request.prompt[:end], request.tokens[:end], self._cuts(walk.matched, end), request.time)
        use = self.index.used(path, request.time, request.prompt, resumed=resumed)
        heapq.heappush(
            self._replies, (request.time + SECONDS_PER_TOKEN * request.made, next(self._order), request, use)
        )
        self._fit(request.time)

    def _cuts(self, matched: int, end: int) -> list[int]:
        return [matched, end] if self.point and 0 < matched < end else [end]

    def _keep(self, symbols: NDArray[np.int32], tokens: NDArray[np.int32], cuts: list[int], now: float) -> list[Node]:
        path: list[Node] = []
        for at in cuts:
            if at:
                node = self.tree.grow(b"", symbols[:at], now)
                path = node.path()
                for each in path:
                    have = each.copies[Tier.DEVICE]
                    if have is None:
                        held = Held(
                            self.meter, each.start, tokens[each.start : each.end], not self.point or each is node
                        )
                        self.tree.put(each, Tier.DEVICE, held)
                    elif each is node and not have.resumes:
                        self.tree.put(each, Tier.DEVICE, Held(self.meter, each.start, have.tokens, True))
                        have.close()
        return path

    def _finish(self, now: float, _: int, request: Recorded, use: Use) -> None:
        path: list[Node] = []
        if len(request.reply):
            symbols = np.concatenate([request.prompt[:-1], request.reply])
            path = self._keep(symbols, np.ones(len(symbols), np.int32), [len(symbols)], now)
        self.index.finished(use, request.made, path, now)
        self._fit(now)

    def _fit(self, now: float) -> None:
        while self.meter.used > self.budget:
            chosen = self.index.least(Tier.DEVICE, now, lambda node, move: True)
            assert chosen is not None, "nothing can go, and yet there is no room"
            node, move = chosen
            if move is Move.LEAF:
                self.tree.remove(node)
            else:
                copy = node.copies[Tier.DEVICE]
                assert copy is not None
                self.tree.put(node, Tier.DEVICE, copy.without_point())
                if self.tree.can_merge(node):
                    self.tree.merge(node)
