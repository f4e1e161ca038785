"""Depth against simulated drafters: how near it comes to the best fixed depth, and how little it wastes."""

import random
from collections import Counter
from collections.abc import Callable

import pytest

from bough.draft.depth import PRIOR, STALE, Costs, Depth, Rates, RequestDepth

LIMIT = 8
Cost = Callable[[int], float]


def linear(depth: int) -> float:
    """Each token drafted costs a tenth of a plain round."""
    return 1 + 0.1 * depth


def knee(depth: int) -> float:
    """Free up to three tokens, dear from there on."""
    return 1.05 if depth <= 3 else 1.05 + 0.8 * (depth - 3)


def dear(depth: int) -> float:
    """Every draft costs more than it can bring."""
    return 1 + 1.2 * depth


def step(depth: int) -> float:
    """To draft at all is dear, and how much makes little difference: one token never pays, several do."""
    return 1 if depth == 0 else 2.3 + 0.05 * depth


def expected_speed(depth: int, rate: float, cost: Cost) -> float:
    return sum(rate**i for i in range(depth + 1)) / cost(depth)


class World:
    """Rounds of requests with a drafter whose tokens stand with probability `rate`, each alone."""

    def __init__(self, rate: float, cost: Cost = linear, *, seed: int = 0, noise: float = 0.0, hiccups: float = 0.0):
        self.rate, self.cost, self.noise, self.hiccups = rate, cost, noise, hiccups
        self.random = random.Random(seed)
        self.depth = Depth(LIMIT)
        self.request = self.depth.begin()
        self.tokens = self.seconds = 0.0
        self.depths: Counter[int] = Counter()

    def round(self) -> int:
        depth = self.request.choose()
        accepted = 0
        while accepted < depth and self.random.random() < self.rate:
            accepted += 1
        seconds = self.cost(depth) * (1 + self.noise * self.random.uniform(-1, 1))
        told = seconds * (20 if self.random.random() < self.hiccups else 1)
        self.request.observe(depth, accepted, told)
        self.tokens += 1 + accepted
        self.seconds += seconds
        self.depths[depth] += 1
        return depth

    def run(self, rounds: int, each: int = 10**9) -> "World":
        """So many rounds, of requests of `each` rounds."""
        self.tokens = self.seconds = 0.0
        self.depths = Counter()
        for number in range(rounds):
            if number % each == each - 1:
                self.request = self.depth.begin()
            self.round()
        return self

    def best_fixed(self) -> tuple[int, float]:
        depth = max(range(LIMIT + 1), key=lambda each: expected_speed(each, self.rate, self.cost))
        return depth, expected_speed(depth, self.rate, self.cost)

    @property
    def share_of_best(self) -> float:
        return self.tokens / self.seconds / self.best_fixed()[1]


def test_always_right_goes_as_deep_as_it_may():
    world = World(1.0).run(1000)
    assert world.best_fixed()[0] == LIMIT
    assert world.depths.most_common(1)[0][0] == LIMIT
    assert world.share_of_best > 0.97


def test_always_wrong_decodes_plainly_and_asks_rarely():
    """The cost of finding out, over and over, is bounded: a probe every now and then, of one token."""
    world = World(0.0).run(500)
    assert world.share_of_best > 0.98
    world.run(5000)
    assert set(world.depths) == {0, 1} and world.depths[1] < 5000 / 50
    assert world.share_of_best > 0.998


def test_always_wrong_and_dear_is_asked_even_less():
    world = World(0.0, dear).run(500).run(5000)
    assert world.depths[1] < 5000 / 300
    assert world.share_of_best > 0.996


@pytest.mark.parametrize("rate", [0.9, 0.97, 1.0])
def test_a_knee_in_the_costs_is_found(rate):
    world = World(rate, knee).run(1500)
    assert world.best_fixed()[0] == 3
    assert world.depths.most_common(1)[0][0] == 3
    assert world.share_of_best > 0.96


@pytest.mark.parametrize("each", [10**9, 40])
def test_what_pays_only_when_deep_is_found(each):
    """One token is worse than none, so a walk from depth to depth would never get there."""
    world = World(0.95, step, noise=0.1)
    assert expected_speed(1, 0.95, step) < 1 < 1.5 < world.best_fixed()[1]
    assert world.run(48, each).tokens > 48 * 1.8, "soon"
    assert world.run(1500, each).share_of_best > 0.93


def test_drafts_that_cost_more_than_they_bring_are_not_made():
    world = World(1.0, dear).run(2000)
    assert world.best_fixed()[0] == 0
    assert world.depths[0] > 1900
    assert world.share_of_best > 0.97


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.642, 0.8, 0.95])
@pytest.mark.parametrize("cost", [linear, knee, dear, step])
@pytest.mark.parametrize("each", [10**9, 40])
def test_near_the_best_fixed_depth(rate, cost, each):
    """In one long request or in many short ones, which start from what the ones before taught."""
    shares = [World(rate, cost, seed=seed, noise=0.1).run(3000, each).share_of_best for seed in range(5)]
    assert min(shares) > 0.9 and sum(shares) / len(shares) > 0.95, shares


def test_slow_rounds_now_and_then_change_nothing():
    world = World(0.8, knee, noise=0.05, hiccups=0.05).run(2000)
    assert world.share_of_best > 0.93


def test_a_slow_first_round_of_a_depth_is_got_over():
    """The first draft ever may wait for a compiler."""
    depth = Depth(LIMIT)
    request = depth.begin()
    costs = depth.costs(1)
    for number in range(400):
        chosen = request.choose()
        request.observe(chosen, chosen, 50.0 if costs.latest(chosen) == 0 and number else linear(chosen))
    assert request.best() == LIMIT


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.95), (0.1, 0.9), (0.95, 0.0), (0.9, 0.3)])
def test_acceptance_that_changes(before, after):
    world = World(before).run(3000)
    world.rate = after
    world.run(700)  # time to notice: the longest wait for a probe, and some to be sure
    assert world.run(2000).share_of_best > 0.93


def test_short_requests_notice_a_change_together():
    """None of them lasts as long as it takes until the next probe."""
    world = World(0.0).run(3000, 10)
    assert 20 < world.depths[1] < 3000 / 40
    world.rate = 0.95
    world.run(1500, 10)
    assert world.run(1000, 10).share_of_best > 0.93


def test_costs_that_change():
    """As when a text has become long: what was cheap is dear now, and the other way round."""
    world = World(0.9, linear).run(1500)
    world.cost = dear
    assert world.run(300).run(2000).share_of_best > 0.95
    world.cost = linear
    assert world.run(900).run(2000).share_of_best > 0.93


def test_requests_differ():
    """Beside requests with perfect drafts, one with useless ones stops drafting, and they go on."""
    depth = Depth(LIMIT)
    good, bad = depth.begin(), depth.begin()

    def play(request: RequestDepth, right: bool) -> int:
        chosen = request.choose(rows=2)
        request.observe(chosen, chosen if right else 0, linear(chosen), rows=2)
        return chosen

    played = [(play(good, True), play(bad, False)) for _ in range(600)]
    assert sum(one for one, _ in played[-300:]) > 300 * (LIMIT - 1)
    assert sum(other for _, other in played[-300:]) < 60


def test_greedy_requests_teach_sampled_ones_nothing():
    depth = Depth(LIMIT)
    world = World(1.0)
    world.depth, world.request = depth, depth.begin()
    world.run(300)
    assert depth.begin().rates.first(1)[0] > 0.95
    assert depth.begin(greedy=False).rates.first(1) == [PRIOR]


def test_batches_have_costs_of_their_own():
    """One row is bound by memory and drafts for free; many rows compute, and pay for every token."""
    depth = Depth(LIMIT)
    alone, among = depth.begin(), depth.begin()
    for _ in range(600):
        chosen = alone.choose(rows=1)
        alone.observe(chosen, chosen, 1 + 0.02 * chosen, rows=1)
        chosen = among.choose(rows=32)
        among.observe(chosen, chosen, 1.0 + 1.1 * chosen, rows=32)
    assert alone.best(rows=1) == LIMIT
    assert among.best(rows=32) == 0
    assert depth.costs(17) is depth.costs(31) is not depth.costs(32)


def test_never_deeper_than_asked():
    world = World(1.0).run(300)
    assert [world.request.choose(most=most) <= most for most in (0, 1, 2, 3, -1)] == [True] * 4 + [False]
    assert world.request.choose(most=-1) == world.request.choose(most=0) == 0
    none = Depth(0).begin()
    for _ in range(100):
        assert none.choose() == 0
        none.observe(0, 0, 1.0)


def test_drafts_shorter_than_asked_are_counted_as_they_were():
    """A drafter may have no idea: then the round was a plain one, and a probe is still to be made."""
    request = Depth(LIMIT).begin()
    for _ in range(200):
        request.choose()
        request.observe(0, 0, 1.0)
    assert request.rates.first(1) == [PRIOR]
    assert request.choose() == 1


def test_the_first_rounds_measure_what_is_compared():
    request = Depth(LIMIT).begin()
    chosen = []
    for _ in range(4):
        chosen.append(request.choose())
        request.observe(chosen[-1], 0, 1.0)
    assert chosen == [0, 0, 1, 1]  # twice each, since the first may have waited for a compiler


class TestRates:
    def test_only_tokens_that_were_checked_count(self):
        rates = Rates()
        for _ in range(200):
            rates.learn(4, 2)  # two stood, the third did not, the fourth was not looked at
        first = rates.first(5)
        assert first[0] > 0.99 and first[1] > 0.99 and first[2] < 0.01
        assert first[4] == first[3] == first[2]  # nothing known: as the one before

    def test_a_request_starts_from_what_others_taught(self):
        shared = Rates()
        for _ in range(100):
            shared.learn(1, 0)
        own = Rates(shared)
        assert own.first(2) == shared.first(2) and own.first(1)[0] < 0.1
        for _ in range(10):
            own.learn(1, 1)
        assert own.first(1)[0] > 0.5

    def test_tokens_of_a_round(self):
        rates = Rates()
        for _ in range(1000):
            rates.learn(1, 1)
            rates.learn(1, 0)
        assert rates.tokens(2) == pytest.approx([1, 1.5, 1.75], abs=0.05)


class TestCosts:
    def test_median_of_the_latest_but_for_the_very_first(self):
        costs = Costs()
        for seconds in (0.001, 100, 1, 1, 100, 2):
            costs.learn(3, seconds)
        assert costs[3] == 2
        for _ in range(9):
            costs.learn(3, 5)
        assert costs[3] == 5

    def test_what_was_not_measured_lies_on_a_line(self):
        costs = Costs()
        assert costs[4] > costs[0] > 0
        measure(costs, 0, 2.0)
        assert costs[2] == pytest.approx(2.4)
        measure(costs, 4, 4.0)
        assert [costs[depth] for depth in (1, 2, 6)] == pytest.approx([2.5, 3.0, 5.0])

    def test_more_tokens_are_never_thought_to_cost_less(self):
        costs = Costs()
        measure(costs, 0, 2.0)
        measure(costs, 1, 1.0)
        assert costs[5] == 2.0

    def test_what_was_measured_long_ago_counts_no_longer(self):
        costs = Costs()
        measure(costs, 3, 100.0)
        assert costs.latest(3) and costs.deepest == 3
        for _ in range(STALE + 1):
            costs.learn(0, 1.0)
        assert not costs.latest(3) and costs.deepest == 0
        assert costs[3] < 2


def measure(costs: Costs, depth: int, seconds: float) -> None:
    for _ in range(2):
        costs.learn(depth, seconds)
