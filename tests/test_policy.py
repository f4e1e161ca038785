"""What goes first: the worth of a stake, and an index that finds the least of them as a look at all nodes would."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from bough.cache.duel import Duel, Ghost
from bough.cache.policy import Index, Move, Stake, recency, value
from bough.cache.reuse import Kind, Use
from bough.cache.tree import Node, Tier, Tree, as_symbols


class Held:
    """A copy that is nothing but a claim to be one."""

    is_sound, freed_bytes = True, 1

    def __init__(self, resumes: bool) -> None:
        self.resumes = resumes

    def split(self, at: int) -> "tuple[Held, Held]":
        return Held(False), self

    def join(self, right: "Held") -> "Held":
        return right

    def with_point(self, other: "Held") -> "Held":
        return other

    def without_point(self) -> "Held":
        return Held(False)

    def close(self) -> None:
        pass


def always(node: Node, move: Move) -> bool:
    return True


class Cache:
    """A tree of one tier under a budget in symbols, as the prefix cache uses it, without a model."""

    def __init__(self, policy: str, budget: float, point: float = 0.0) -> None:
        self.index, self.budget, self.point = Index(policy, point), budget, point
        self.tree = Tree(watcher=self.index)
        self.hits = 0

    def ask(self, symbols: list[int], now: float) -> int:
        """How much of a prompt was known; it is kept, and others make room for it."""
        walk = self.tree.match(b"", symbols)
        ends = [node.end for node in walk.nodes if node.resumes and node.end <= walk.matched]
        known = max(ends, default=0) if self.point else walk.matched
        for at in sorted({walk.matched, len(symbols)} - {0}):
            node = self.tree.grow(b"", symbols[:at], now)
            for each in node.path():
                if each.copies[Tier.DEVICE] is None or (each is node and not each.resumes):
                    self.tree.put(each, Tier.DEVICE, Held(each is node or not self.point))
        path = self.tree.match(b"", symbols).nodes
        self.index.finished(self.index.used(path, now, as_symbols(symbols)), 10, path, now)
        self.hits += known
        while self.held() > self.budget:
            self.evict(now)
        self.tree.check()
        self.index.check(self.tree.walk())
        return known

    def held(self) -> float:
        return sum(len(node.symbols) + self.point * node.resumes for node in self.tree.walk())

    def evict(self, now: float) -> tuple[Node, Move]:
        found = self.index.least(Tier.DEVICE, now, always)
        assert found is not None, "nothing can go"
        node, move = found
        if move is Move.POINT:
            assert node.children and node.resumes
            self.tree.put(node, Tier.DEVICE, Held(False))
        else:
            assert node.is_leaf(Tier.DEVICE)
            self.tree.remove(node)
        return found


def test_worth_grows_with_what_is_saved_and_falls_with_what_it_takes():
    stake = Stake(Move.LEAF, saved=100, freed=50, rate=0.01, last=3.0)
    assert value(replace(stake, saved=200)) > value(stake) > value(replace(stake, freed=100))
    assert value(replace(stake, rate=0.02)) > value(stake) > value(replace(stake, saved=0)) == -1
    assert recency(replace(stake, last=5)) > recency(stake) and recency(replace(stake, saved=0)) == -1
    assert value(replace(stake, freed=0)) < float("inf")


def test_unknown_policies_are_refused():
    with pytest.raises(ValueError, match="choose one of value, lru"):
        Index("random")


def test_lru_gives_up_what_was_used_longest_ago():
    cache = Cache("lru", budget=1e9)
    for now, first in enumerate([1, 2, 3, 1, 4, 2]):
        cache.ask([first, first + 10], float(now))
    gone = [int(cache.evict(10.0)[0].symbols[0]) for _ in range(4)]
    assert gone == [3, 1, 4, 2]


@pytest.mark.parametrize("point", [0.0, 5.0])
@pytest.mark.parametrize("policy", ["lru", "value"])
def test_a_turn_judges_few_nodes_however_long_the_talk_is(policy, point, monkeypatch):
    cache, stake, judged, counts = Cache(policy, 1e9, point), Index.stake, [], []
    index, tree = cache.index, cache.tree

    def counted(self, node, tier):
        judged.append(node)
        return stake(self, node, tier)

    monkeypatch.setattr(Index, "stake", counted)
    for turn in range(1, 101):
        symbols = as_symbols(list(range(3 * turn)))
        node = tree.grow(b"", symbols, float(turn))
        tree.put(node, Tier.DEVICE, Held(True))
        judged.clear()
        path = node.path()
        index.finished(index.used(path, float(turn), symbols, resumed=node.start), 0, path, float(turn))
        counts.append(len(judged))
    assert len(path) == 100 and max(counts[-10:]) <= 2 * max(counts[:20]) < 100
    index.check(tree.walk())


@pytest.mark.parametrize("policy", ["lru", "value"])
def test_what_nothing_can_resume_from_goes_first(policy):
    cache = Cache(policy, budget=1e9, point=5)
    cache.ask([1, 2, 3], 0.0)
    cache.ask([4, 5, 6], 100.0)
    leaf = cache.tree.match(b"", [4, 5, 6]).nodes[-1]
    cache.tree.put(leaf, Tier.DEVICE, Held(False))
    assert cache.evict(101.0) == (leaf, Move.LEAF)


@pytest.mark.parametrize("point", [0.0, 3.0, 200.0])
@pytest.mark.parametrize("policy", ["lru", "value"])
def test_the_index_finds_what_a_look_at_all_would(policy, point):
    """Over a random life of a tree the index gives the least of all candidates.

    Lessons change what is expected of all nodes at once, and an entry is corrected when it comes to the top: what fell
    in worth by them may be overlooked for a while, so there it is one of the lowest fifth.
    """
    dice, now = Random(7), 0.0
    cache = Cache(policy, budget=1e9, point=point)
    for _ in range(250):
        now += dice.choice([0.0, 0.1, 5.0, 60.0, 900.0])
        cache.ask([dice.randint(0, 3) for _ in range(dice.randint(1, 9))], now)
        if dice.random() < 0.5:
            chosen, _ = cache.index.least(Tier.DEVICE, now, always)
            worths = (cache.index.worth(node, Tier.DEVICE) for node in cache.tree.walk())
            ranked = sorted(worth for worth in worths if worth is not None)
            lowest = ranked[0 if policy == "lru" else len(ranked) // 5]
            assert cache.index.worth(chosen, Tier.DEVICE) <= lowest + 0.03 * abs(lowest) + 1e-12
            cache.evict(now)


def test_what_may_not_go_is_passed_over_and_stays():
    cache = Cache("value", budget=1e9)
    for now in range(5):
        cache.ask([now, 9], float(now))
    cache.index.advance(10.0)
    refused = []

    def frees(node: Node, move: Move) -> bool:
        refused.append(node)
        return len(refused) > 2

    found = cache.index.least(Tier.DEVICE, 10.0, frees)
    assert found is not None and found[0] not in refused[:2]
    assert cache.index.least(Tier.DEVICE, 10.0, always)[0] is refused[0]
    assert cache.index.least(Tier.DEVICE, 10.0, lambda *_: False) is None


def test_time_may_stand_still_or_go_back():
    cache = Cache("value", budget=30, point=4)
    for now in (5.0, 5.0, 3.0, 1e9, 0.0, 1e9 + 1):
        for first in range(6):
            cache.ask([first, 1, 2, 3], now)


def chats(dice: Random, count: int) -> list[tuple[float, list[int]]]:
    """Conversations of some turns, a minute apart, among prompts that never come back."""
    asked = []
    for chat in range(count):
        start, text = dice.uniform(0, 20 * count), []
        for turn in range(dice.choice([1, 1, 1, 6, 8])):
            text = text + [1000 * chat + 20 * turn + i for i in range(10)]
            asked.append((start + 60 * turn + dice.uniform(0, 20), text))
    return sorted(asked)


def hits(policy: str, asked: list[tuple[float, list[int]]], budget: float, point: float = 0.0) -> int:
    cache = Cache(policy, budget, point)
    for now, symbols in asked:
        cache.ask(symbols, now)
    return cache.hits


@pytest.mark.parametrize("point", [0.0, 8.0])
def test_conversations_that_go_on_are_learnt(point):
    """Turns come back and single questions do not: what is learnt of that beats the time of the last use."""
    asked = chats(Random(3), 120)
    for budget in (60, 120):
        assert hits("value", asked, budget, point) > hits("lru", asked, budget, point)


def test_where_recency_is_right_nothing_is_lost():
    """A sliding set of prompts, each asked several times in a row of rounds: the last ones are the next ones."""
    dice = Random(1)
    asked = [(float(i), [(i // 40 + dice.randint(0, 7)) * 10 + j for j in range(4)]) for i in range(1200)]
    for budget in (16, 32, 64):
        assert hits("value", asked, budget) >= 0.99 * hits("lru", asked, budget)


def test_where_time_tells_nothing_recency_takes_over():
    """Everything at one instant: ages are all the same, and the order of uses is all there is to go by."""
    dice, stack, asked = Random(2), list[list[int]](), []
    for number in range(1200):
        depth = min(int(dice.paretovariate(0.5)) - 1, len(stack))
        text = stack.pop(depth) if depth < len(stack) and dice.random() < 0.7 else [number * 10 + j for j in range(4)]
        stack = [text, *stack[:200]]
        asked.append((0.0, text))
    for budget in (40, 80, 160):
        assert hits("value", asked, budget) >= 0.97 * hits("lru", asked, budget)


class TestDuel:
    """Which order would have done better, counted in caches that hold nothing."""

    @staticmethod
    def replay(duel: Duel, came: Callable[[int], int]) -> None:
        """Ten uses a round, room for five of them; then one comes back."""
        for start in range(0, 1000, 10):
            uses = [Use(Kind.OWN, float(start + i), start + i) for i in range(10)]
            for use in uses:
                duel.kept(use, 1.0)
            duel.fit(5.0)
            duel.came(uses[came(start)])

    def test_learned_worth_is_left_where_the_last_ones_come_back(self):
        duel = Duel(lambda use, weight: -use.since)
        self.replay(duel, lambda start: 9)
        assert duel.recency

    def test_and_kept_where_others_do(self):
        duel = Duel(lambda use, weight: float(use.length % 10 == 2))
        self.replay(duel, lambda start: 2)
        assert not duel.recency

    def test_the_order_turns_back_when_the_times_change(self):
        duel = Duel(lambda use, weight: float(use.length % 10 == 2))
        self.replay(duel, lambda start: 9)
        assert duel.recency
        for _ in range(3):
            self.replay(duel, lambda start: 2)
        assert not duel.recency

    def test_a_ghost_counts_what_it_has(self):
        ghost = Ghost(lambda use, weight: use.since)
        uses = [Use(Kind.OWN, float(i), 1) for i in range(300)]
        for use in uses:
            ghost.keep(use, 2.0)
            ghost.changed(use)
            ghost.fit(20.0)
        assert ghost.held == 20.0
        assert [use for use in uses if ghost.drop(use)] == uses[-10:]
        assert ghost.held == 0.0
