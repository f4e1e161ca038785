"""What is given up first: the worth of keeping each thing a tier holds, and an index that finds the least of them.

    index = Index("value", point_symbols=409)     # or "lru"; 0 where any length can be resumed
    tree = Tree(watcher=index)                    # it calls index.changed(node) and index.removed(node)
    use = index.used(path, now, prompt)           # once for each request, when its prompt is in the tree
    index.finished(use, 120, path, now)           # it generated so many symbols; the path with these
    index.least(tier, now, frees)                 # (node, move): the caller evicts it, the tree tells the index

Worth is what would have to be computed again, times how often it is expected to be used per second, over what its
going would really free. KV and resume points are judged together: where a point is needed to resume, a leaf without one
is stranded and goes first, and a leaf is worth what resuming at its end saves. A point inside a path can go alone.
`lru` gives up what was used longest ago, stranded first too; so does `value` while that would do better.

The index is a heap for each tier. Entries are corrected when they come to the top and when what is expected of a node
changes with its age (bough/cache/expect.py), so nothing ever walks the tree. No torch, no clock.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count

from bough.cache.expect import Learned, Recent, facts_of
from bough.cache.reuse import Use
from bough.cache.tree import NOWHERE, Node, Symbols

STRANDED = -1.0  # worth less than anything
SLACK = 0.02  # an entry this close to its true worth is not put back

Frees = Callable[[Node, "Move"], bool]


class Move(Enum):
    """What can be evicted of a node."""

    POINT = "its resume point"
    LEAF = "all of it"


@dataclass(frozen=True, slots=True)
class Stake:
    """What depends on a node, or on its resume point: all that its worth is a function of."""

    move: Move
    saved: float  # symbols that would have to be computed again
    freed: float  # what its going gives back, in symbols of K and V
    rate: float  # uses expected per second


def value(stake: Stake) -> float:
    """The worth of keeping something: what it saves, times how often, per symbol of memory it takes."""
    return stake.saved * stake.rate / max(stake.freed, 1e-9) if stake.saved else STRANDED


def recency(stake: Stake) -> float:
    """The same by the time of the last use, which is what `Recent` gives as the rate."""
    return stake.rate if stake.saved else STRANDED


POLICIES = ("value", "lru")


class Index:
    """All that may be evicted, least worthy first."""

    def __init__(self, policy: str = "value", point_symbols: float = 0.0) -> None:
        """A resume point weighs as much as the K and V of so many symbols; 0: any length can be resumed."""
        if policy not in POLICIES:
            raise ValueError(f'there is no policy "{policy}"; choose one of {", ".join(POLICIES)}')
        self._expect = Learned(point_symbols) if policy == "value" else Recent()
        self._point = point_symbols
        self._held = 0.0  # on any tier, in symbols
        self._recency = self._expect.recency  # is what the heaps are in order of
        self._heaps: list[list[tuple[float, float, int, Node, Move]]] = [[] for _ in range(NOWHERE)]
        self._crowded = [64] * NOWHERE  # entries at which a heap is rid of those that no longer hold
        self._stamps = count(1)

    # What requests do.

    def used(self, path: Sequence[Node], now: float, symbols: Symbols, *, salt: bytes = b"", resumed: int = 0) -> Use:
        """A prompt was read, from the length `resumed` on; the nodes on its path, as far as they were kept."""
        self._reconsider(self._expect.advance(now))
        use = self._expect.used(now, symbols, salt, resumed)
        self._rejudge(self._expect.passed(use, path, now, len(symbols), resumed))
        self._reconsider(self._expect.left())
        return use

    def finished(self, use: Use, made: int, path: Sequence[Node] = (), now: float = 0.0) -> None:
        """The reply to it has so many symbols; the nodes on its path with these, if they were kept."""
        self._expect.finished(use, made)
        self._rejudge(self._expect.passed(use, path, now, use.length + made, 0))
        self._reconsider(use.nodes)

    # What the tree tells.

    def changed(self, node: Node) -> None:
        """Judge a node anew: it or a child came, was split or merged, or got or lost a copy or a resume point."""
        self._expect.know(node)
        facts, size = facts_of(node), len(node.symbols) + self._point * node.resumes
        self._held += size - facts.size
        facts.size = size
        self._rejudge((node,))

    def removed(self, node: Node) -> None:
        """Forget a node that left the tree."""
        self._held -= facts_of(node).size if node.facts is not None else 0.0
        self._expect.forget(node)

    # What is asked.

    def least(self, tier: int, now: float, frees: Frees) -> tuple[Node, Move] | None:
        """What is worth least on a tier of all that `frees` says would free something; None if nothing would."""
        self._reconsider(self._expect.advance(now))
        self._expect.full(self._held)
        if self._recency is not self._expect.recency:
            self._turn()
        heap, aside, found = self._heaps[tier], [], None
        slack = 0.0 if self._recency else SLACK
        while heap and found is None:
            entry = heapq.heappop(heap)
            worth, _, _, node, move = entry
            if not _holds(entry, tier):
                continue
            stake = self.stake(node, tier)
            if stake is None or stake.move is not move or self._judge(stake) - worth > slack * abs(worth):
                self._enter(node, tier)
                continue
            aside.append(entry)  # until the tree tells what became of it
            if frees(node, move):
                found = node, move
        for entry in aside:
            heapq.heappush(heap, entry)
        return found

    def stake(self, node: Node, tier: int) -> Stake | None:
        """What could be evicted of a node on a tier, and what depends on it; None if nothing can."""
        copy = node.copies[tier]
        if copy is None:
            return None
        leaf, edge, point = node.is_leaf(tier), float(len(node.symbols)), self._point
        if not point:
            return Stake(Move.LEAF, edge, edge, self._expect.rate(node)) if leaf else None
        if not copy.resumes:
            return Stake(Move.LEAF, 0.0, edge, 0.0) if leaf else None
        saved, alone = above(node, tier)
        if leaf:
            return Stake(Move.LEAF, saved, point + alone, self._expect.point_rate(node))
        return Stake(Move.POINT, saved, point, self._expect.point_rate(node))

    def worth(self, node: Node, tier: int) -> float | None:
        """Of keeping what could be evicted of a node on a tier."""
        stake = self.stake(node, tier)
        return None if stake is None else self._judge(stake)

    def _judge(self, stake: Stake) -> float:
        return recency(stake) if self._recency else value(stake)

    # The heaps.

    def _turn(self) -> None:
        """Put everything in the other order."""
        self._recency = self._expect.recency
        for tier, heap in enumerate(self._heaps):
            entries = sorted((entry for entry in heap if _holds(entry, tier)), key=lambda entry: entry[2])
            heap.clear()
            for _, _, _, node, _ in entries:
                self._enter(node, tier)

    def _reconsider(self, nodes: Iterable[Node]) -> None:
        """Something else is expected of nodes that were not used; to the time of their last use that is nothing."""
        if not self._recency:
            self._rejudge(nodes)

    def _rejudge(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            for tier, copy in enumerate(node.copies):
                if copy is not None:
                    self._enter(node, tier)

    def _enter(self, node: Node, tier: int) -> None:
        stamp, stake, heap = next(self._stamps), self.stake(node, tier), self._heaps[tier]
        facts_of(node).stamps[tier] = stamp
        if stake is None:
            return
        heapq.heappush(heap, (self._judge(stake), node.used, stamp, node, stake.move))
        if len(heap) > self._crowded[tier]:
            heap[:] = [entry for entry in heap if _holds(entry, tier)]
            heapq.heapify(heap)
            self._crowded[tier] = 64 + 2 * len(heap)


def _holds(entry: tuple[float, float, int, Node, Move], tier: int) -> bool:
    """Whether an entry is the last one made of its node, and the node is still there."""
    _, _, stamp, node, _ = entry
    return node.parent is not None and node.copies[tier] is not None and facts_of(node).stamps[tier] == stamp


def above(node: Node, tier: int) -> tuple[float, float]:
    """Symbols from the nearest resume point above to the node's end, and how many of them nothing else needs."""
    alone, shared, parent = len(node.symbols), False, node.parent
    while parent is not None and parent.parent is not None:
        if any(copy is not None and copy.resumes for copy in parent.copies[: tier + 1]):
            break
        shared = shared or len(parent.children) > 1
        alone += 0 if shared else len(parent.symbols)
        parent = parent.parent
    return float(node.end - (parent.end if parent is not None else 0)), float(alone)
