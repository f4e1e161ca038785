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

For each tier the index keeps what could go in order, by `value` in both orders, so that either can take over at once.
Entries are corrected when they turn out to be least and when what is expected of a node changes with its age
(bough/cache/expect.py): nothing ever walks the tree, and no call catches up on all that was left undone. No torch, no
clock.

Invariants (`check()` asserts them): whatever could be evicted has a place in each order, and what is gone has none; a
node that is judged by a use is among those to be judged anew when something else is expected of that use.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from bough.cache.expect import SLICE, Learned, Recent, facts_of
from bough.cache.ranks import Ranks
from bough.cache.reuse import Use
from bough.cache.tree import NOWHERE, Node, Symbols

STRANDED = -1.0  # worth less than anything
SLACK = 0.02  # an entry this close to its true worth is not put back
FEW = 8  # that an eviction looks at of what changed with time: many may be needed between two steps
PATIENCE = 64  # entries corrected before the least is taken for what it was worth when it was judged last

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
    last: float  # when it was used last


def value(stake: Stake) -> float:
    """The worth of keeping something: what it saves, times how often, per symbol of memory it takes."""
    return stake.saved * stake.rate / max(stake.freed, 1e-9) if stake.saved else STRANDED


def recency(stake: Stake) -> float:
    """The same by the time of the last use."""
    return stake.last if stake.saved else STRANDED


POLICIES = ("value", "lru")


class Order:
    """What could be evicted, on each tier, least worthy first."""

    def __init__(self, judge: Callable[[Stake], float], slack: float) -> None:
        self.judge, self.slack = judge, slack
        self.tiers = [Ranks[Node]() for _ in range(NOWHERE)]

    def enter(self, node: Node, tier: int, stake: Stake | None) -> None:
        if stake is None:
            self.tiers[tier].drop(node)
        else:
            self.tiers[tier].put(node, self.judge(stake), node.used)

    def is_stale(self, node: Node, stake: Stake, worth: float, time: float) -> bool:
        """Whether it is worth more by now than where it stands, or was used later than what is worth the same."""
        by_now = self.judge(stake)
        return by_now - worth > self.slack * abs(worth) if self.slack else (by_now, node.used) > (worth, time)


class Index:
    """All that may be evicted, least worthy first."""

    def __init__(self, policy: str = "value", point_symbols: float = 0.0) -> None:
        """A resume point weighs as much as the K and V of so many symbols; 0: any length can be resumed."""
        if policy not in POLICIES:
            raise ValueError(f'there is no policy "{policy}"; choose one of {", ".join(POLICIES)}')
        self._expect = Learned(point_symbols) if policy == "value" else Recent()
        self._point = point_symbols
        self._held = 0.0  # on any tier, in symbols
        self._recent = Order(recency, 0.0)
        self._learned = Order(value, SLACK) if policy == "value" else self._recent
        self._orders = (self._learned, self._recent) if policy == "value" else (self._recent,)

    # What requests do.

    def advance(self, now: float, most: int = SLICE) -> None:
        """Time has passed: judge anew some of what is worth something else by now. To be called often."""
        self._rejudge(self._expect.advance(now, most), (self._learned,))

    def used(self, path: Sequence[Node], now: float, symbols: Symbols, *, salt: bytes = b"", resumed: int = 0) -> Use:
        """A prompt was read, from the length `resumed` on; the nodes on its path, as far as they were kept."""
        self.advance(now, self._expect.share)
        use, before = self._expect.used(now, symbols, salt, resumed)
        self._rejudge(self._expect.passed(use, path, now, len(symbols), resumed), self._orders)
        if before is not None:  # whose nodes are waited for by whoever returns to it, but for those that were passed
            self._rejudge(self._expect.judged_by(before), (self._learned,))
        return use

    def finished(self, use: Use, made: int, path: Sequence[Node] = (), now: float = 0.0) -> None:
        """The reply to it has so many symbols; the nodes on its path with these, if they were kept."""
        self._expect.finished(use, made)
        self._rejudge(self._expect.passed(use, path, now, use.length + made, 0), self._orders)
        self._rejudge(self._expect.judged_by(use), (self._learned,))

    # What the tree tells.

    def changed(self, node: Node) -> None:
        """Judge a node anew: it or a child came, was split or merged, or got or lost a copy or a resume point."""
        self._expect.know(node)
        facts, size = facts_of(node), len(node.symbols) + self._point * node.resumes
        self._held += size - facts.size
        facts.size = size
        for tier, copy in enumerate(node.copies):
            if copy is None:
                for order in self._orders:
                    order.enter(node, tier, None)
        self._rejudge((node,), self._orders)

    def removed(self, node: Node) -> None:
        """Forget a node that left the tree."""
        self._held -= facts_of(node).size if node.facts is not None else 0.0
        self._expect.forget(node)
        for order in self._orders:
            for ranks in order.tiers:
                ranks.drop(node)

    # What is asked.

    def least(self, tier: int, now: float, frees: Frees) -> tuple[Node, Move] | None:
        """What is worth least on a tier of all that `frees` says would free something; None if nothing would."""
        self.advance(now, FEW)
        self._expect.full(self._held)
        order = self._order
        ranks, place, corrected = order.tiers[tier], 0, 0
        while (entry := ranks.at(place)) is not None:
            worth, time, node = entry
            stake = self.stake(node, tier)
            if stake is None or (corrected < PATIENCE and order.is_stale(node, stake, worth, time)):
                order.enter(node, tier, stake)
                corrected += 1
            elif frees(node, stake.move):
                return node, stake.move
            else:
                place += 1
        return None

    @property
    def _order(self) -> Order:
        """The one that does better."""
        return self._recent if self._expect.recency else self._learned

    def stake(self, node: Node, tier: int) -> Stake | None:
        """What could be evicted of a node on a tier, and what depends on it; None if nothing can."""
        copy = node.copies[tier]
        if copy is None:
            return None
        leaf, edge, point, last = node.is_leaf(tier), float(len(node.symbols)), self._point, node.used
        if not point:
            return Stake(Move.LEAF, edge, edge, self._expect.rate(node), last) if leaf else None
        if not copy.resumes:
            return Stake(Move.LEAF, 0.0, edge, 0.0, last) if leaf else None
        saved, alone = above(node, tier)
        move, freed = (Move.LEAF, point + alone) if leaf else (Move.POINT, point)
        return Stake(move, saved, freed, self._expect.rate(node), facts_of(node).resumed)

    def worth(self, node: Node, tier: int) -> float | None:
        """Of keeping what could be evicted of a node on a tier."""
        stake = self.stake(node, tier)
        return None if stake is None else self._order.judge(stake)

    def _rejudge(self, nodes: Iterable[Node], orders: Sequence[Order]) -> None:
        """Something else depends on these nodes; to the time of their last use only what happens to them counts."""
        for node in nodes:
            for tier, copy in enumerate(node.copies):
                if copy is not None:
                    stake = self.stake(node, tier)
                    for order in orders:
                        order.enter(node, tier, stake)

    def check(self, nodes: Iterable[Node]) -> None:
        """That these, all nodes of a tree, are what it knows."""
        known = list(nodes)
        held = sum(facts_of(node).size for node in known)
        assert abs(held - self._held) <= 1e-6 * (1.0 + held), f"{self._held} symbols are counted, {held} are there"
        self._expect.check(known)
        for order in self._orders:
            for tier, ranks in enumerate(order.tiers):
                ranks.check()
                missed = [node for node in known if node not in ranks and self.stake(node, tier) is not None]
                assert not missed, f"{missed} could be evicted, and are not ranked"
                assert sum(node in ranks for node in known) == len(ranks), "nodes are ranked that are gone"


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
