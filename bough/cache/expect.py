"""What is expected of each node: which use it waits for, and how often such uses come back. No bytes, no clock.

Every node waits for the request that took it last to go on (OWN), for anyone who shares it once two conversations do
(SHARED), or, when its conversation has gone on past or beside it, for someone to return to it (LEFT). Its resume point
waits on its own account: for the request that ends there to go on, for whoever resumes there, or, inside a path, for
someone to leave the path there (INSIDE).

`Learned` has a model of how long such waits take; `Recent` only knows when things were used last. While that does
better (bough/cache/duel.py tells), `Learned` says so.
"""

import heapq
from collections.abc import Iterable, Sequence
from itertools import count

from bough.cache.duel import Duel
from bough.cache.reuse import BINS, EDGES, Kind, Model, Recall, Use, bin_of
from bough.cache.tree import Node, Symbols

SLICE = 32  # uses looked at in a call of those that may have outlived a bin
EACH = 24  # more for each new use, in the next request: within hours it outlives so many bins, and few last longer


class Facts:
    """What is known about a node."""

    __slots__ = ("passed", "point", "resumed", "size", "use")

    def __init__(self, use: Use, resumed: float) -> None:
        self.use = use  # what it waits for
        self.point: Use | None = None  # what its resume point waits for
        self.passed: Use | None = None  # the request that took it last
        self.resumed = resumed  # when a request last ended or resumed there
        self.size = 0.0  # that an index has counted


def facts_of(node: Node) -> Facts:
    facts = node.facts
    assert isinstance(facts, Facts), f"{node} is not known"
    return facts


class Recent:
    """LRU: what counts is when a node was used last, and when a request last ended or resumed at its point."""

    recency = True  # is the better order
    share = SLICE  # what the next request looks at

    def full(self, symbols: float) -> None:
        """So much is held, and something has to go."""

    def used(self, now: float, symbols: Symbols, salt: bytes, resumed: int) -> tuple[Use, Use | None]:
        """A request, as something that may come back; and the one that it goes on from, if that is known."""
        return Use(Kind.OWN, now, len(symbols)), None

    def passed(self, use: Use, path: Sequence[Node], now: float, end: int, resumed: int) -> list[Node]:
        """A request took these nodes up to a length, and went on from another; the nodes to judge anew.

        A path may be long, and the worth of most of its nodes stays what it was, or rises: then it is corrected when
        they turn out to be least.
        """
        nodes = [node for node in path if node.end <= end]
        for node in nodes:
            self._touch(node, use, now)
            if node.end == resumed or node is nodes[-1]:
                facts_of(node).resumed = now
        return [node for node in nodes if facts_of(node).resumed == now]

    def judged_by(self, use: Use) -> list[Node]:
        """The nodes that are worth what is expected of a use."""
        return []

    def finished(self, use: Use, made: int) -> None:
        """The reply to a request has so many symbols."""

    def advance(self, now: float, most: int = SLICE) -> Iterable[Node]:
        return ()

    def know(self, node: Node) -> None:
        if node.facts is None:
            node.facts = Facts(Use(Kind.OWN, node.used, node.end), node.used)

    def forget(self, node: Node) -> None:
        node.facts = None

    def rate(self, node: Node) -> float:
        """Uses to be expected per second, if anything is: of the node, or of its resume point."""
        return 0.0

    def check(self, nodes: Iterable[Node]) -> None:
        """That what these wait for knows them."""

    def _touch(self, node: Node, use: Use, now: float) -> None:
        self.know(node)
        if facts_of(node).passed is not use:
            facts_of(node).passed = use
            node.used = max(node.used, now)
            node.uses += 1


class Learned(Recent):
    """Uses per second, as far as experience goes, and whether the time of the last use does better."""

    def __init__(self, point: float) -> None:
        """A resume point weighs as much as the K and V of so many symbols; 0: any length can be resumed."""
        self.recency = False
        self._point = point
        self._duel = Duel(self._worth)
        self._model = Model()
        self._recall = Recall()
        self._due: list[tuple[float, int, Use]] = []
        self._order = count()
        self._now = 0.0

    def full(self, symbols: float) -> None:
        self._duel.fit(symbols)
        self.recency = self._duel.recency

    def used(self, now: float, symbols: Symbols, salt: bytes, resumed: int) -> tuple[Use, Use | None]:
        """With what is known of the conversation that it goes on with."""
        self.share = SLICE
        use = Use(Kind.OWN, now, len(symbols))
        lengths, prints = self._recall.prints(symbols)
        before = self._recall.find(salt, prints)
        if before is not None:
            use.turn, use.talk = before.turn + 1, before.talk
            use.gap, use.gap_before = max(0.0, now - before.began), before.gap
            use.fresh = max(0, use.length - before.length)
            self._came(before, now)
            before.kind, before.since = Kind.LEFT, now
            before.followers += 1
            self._wait(before)
        use.base = resumed if before is None else before.base
        self._recall.keep(salt, lengths, prints, use)
        self._wait(use)
        self._duel.kept(use, max(0, use.length - use.base) + self._point)
        return use, before

    def passed(self, use: Use, path: Sequence[Node], now: float, end: int, resumed: int) -> list[Node]:
        nodes, changed = [node for node in path if node.end <= end], list[Node]()
        for node in nodes:
            self.know(node)
            facts, is_last = facts_of(node), node is nodes[-1]
            if facts.passed is use and facts.point not in (None, use) and not is_last and node.end != resumed:
                continue  # as the prompt has left it
            before = self._judge(facts), facts.resumed
            self._pass(node, use, now)
            if node.end == resumed:
                self._resume(node, use, now)
            if is_last:
                self._resume(node, use, now)
            elif (facts.point is None or facts.point is use) and node.resumes:
                kind = Kind.SHARED if facts.use.kind is Kind.SHARED else Kind.INSIDE
                self._aim(node, self._wait(Use(kind, now, node.end)))
            if before != (self._judge(facts), facts.resumed) and self._counts(node):
                changed.append(node)
        if nodes and nodes[-1].end > use.length and use.kind is Kind.OWN:
            self._duel.kept(use, nodes[-1].end - use.base + self._point)
        return changed

    def judged_by(self, use: Use) -> list[Node]:
        return [node for node in use.nodes if self._judge(facts_of(node)) is use and self._counts(node)]

    def finished(self, use: Use, made: int) -> None:
        use.made = made
        if use.waiting and use.kind is Kind.OWN:
            self._outlive(use, bin_of(self._now - use.since))
            use.unmade, use.profile, use.rates = use.profile, self._model.profile(use), []
            self._duel.changed(use)

    def advance(self, now: float, most: int = SLICE) -> list[Node]:
        """Uses that outlived a bin teach the model so, and enter the next. The nodes that wait for these.

        After a lull many have; then each call takes a slice of them, earlier times first, and lags behind for a while.
        """
        self._now, due, nodes = max(now, self._now), self._due, list[Node]()
        while due and due[0][0] <= self._now and most > 0:
            when, _, use = heapq.heappop(due)
            most -= 1
            if when != use.since + EDGES[use.bin + 1] or not (use.waiting or use.nodes):
                continue
            self._outlive(use, use.bin + 1 if use.waiting else max(use.bin + 1, bin_of(self._now - use.since)))
            self._duel.changed(use)
            nodes += self.judged_by(use)
        return nodes

    def know(self, node: Node) -> None:
        """A node split off waits for what its lower part does; one that nothing is known of, for its return."""
        if node.facts is None:
            heirs = (child.facts for child in node.children.values() if isinstance(child.facts, Facts))
            heir = next(heirs, None)
            if heir is not None:
                use = heir.use
            else:
                use = Use(Kind.OWN, node.used, node.end)
                use.talk, use.waiting = None, False
                use.profile, use.bin = self._model.profile(use), bin_of(self._now - node.used)
                self._call(use)
            node.facts = Facts(use, node.used)
            use.nodes[node] = None

    def forget(self, node: Node) -> None:
        facts, node.facts = node.facts, None
        if isinstance(facts, Facts):
            for use in (facts.use, facts.point or facts.use):
                self._let_go(node, use)

    def rate(self, node: Node) -> float:
        return self._model.rate(self._judge(facts_of(node)))

    def check(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            facts = facts_of(node)
            for use in (facts.use, facts.point or facts.use):
                assert node in use.nodes, f"{node} would not hear of what becomes of a use that it waits for"

    def _worth(self, use: Use, weight: float) -> float:
        return self._model.rate(use) * (weight - self._point) / weight if weight else 0.0

    def _judge(self, facts: Facts) -> Use:
        """The use that what can be evicted of a node is judged by: of its resume point, where it has one."""
        return facts.point or facts.use if self._point else facts.use

    def _counts(self, node: Node) -> bool:
        """Whether something could be evicted of it: without resume points, of leafs alone."""
        return self._point > 0 or node.is_leaf(0)

    # Uses.

    def _wait(self, use: Use) -> Use:
        use.bin, use.waiting, use.rates = 0, True, []
        use.profile, use.unmade = self._model.profile(use), None
        self.share += EACH
        self._call(use)
        return use

    def _call(self, use: Use) -> None:
        """Be reminded of a use when it leaves its bin."""
        if use.bin + 1 < BINS:
            heapq.heappush(self._due, (use.since + EDGES[use.bin + 1], next(self._order), use))

    def _outlive(self, use: Use, at: int) -> None:
        """A use has come to a bin. While it waits, the model learns of each that it left behind."""
        before = use.bin
        while use.bin < at:
            if use.waiting:
                self._model.learn(use, use.bin, False)
            use.bin += 1
        if use.bin > before:
            self._call(use)

    def _came(self, use: Use, now: float) -> None:
        if use.waiting:
            at = bin_of(now - use.since)
            self._outlive(use, at)  # it may not have been its turn since
            self._model.learn(use, at, True)
            self._duel.came(use)
            use.waiting = False

    def _again(self, old: Use, node: Node, now: float) -> Use:
        """A node, or its point, that several conversations share is used once more."""
        use = Use(Kind.SHARED, now, node.end)
        use.turn = old.turn + 1 if old.kind is Kind.SHARED else 1
        use.gap = max(0.0, now - old.began)
        if old.kind in (Kind.SHARED, Kind.INSIDE):
            self._came(old, now)
        self._wait(use)
        self._duel.kept(use, len(node.symbols))
        return use

    # Nodes.

    def _pass(self, node: Node, use: Use, now: float) -> None:
        """A request takes a node: of its own conversation, or one that it shares with others from now on."""
        self.know(node)
        facts = facts_of(node)
        if facts.passed is use:
            return
        old = facts.use
        own = old.talk is None or (old.talk is use.talk and old.kind is not Kind.SHARED)
        facts.use = use if own else self._again(old, node, now)
        facts.use.nodes[node] = None
        self._let_go(node, old)
        self._touch(node, use, now)

    def _resume(self, node: Node, use: Use, now: float) -> None:
        """A request ends at a node, or resumes at it."""
        facts = facts_of(node)
        facts.resumed = now
        old = facts.point
        if node.end >= use.length - 1 and (old is None or old.talk is use.talk):
            self._aim(node, use)
        elif old is not None and (old.talk is not use.talk):
            self._aim(node, self._again(old, node, now))

    def _aim(self, node: Node, use: Use) -> None:
        facts = facts_of(node)
        old, facts.point = facts.point, use
        use.nodes[node] = None
        if old is not None:
            self._let_go(node, old)

    def _let_go(self, node: Node, use: Use) -> None:
        """A node waits for something else, unless it, or its point, still waits for this use."""
        facts = node.facts
        if isinstance(facts, Facts) and (use is facts.use or use is facts.point):
            return
        use.nodes.pop(node, None)
        if use.kind in (Kind.SHARED, Kind.INSIDE) and not use.nodes:
            self._outlive(use, bin_of(self._now - use.since))
            use.waiting = False  # nobody would see it come back
