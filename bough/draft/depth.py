"""How many tokens to draft: as many as give the most tokens a second, which may be none.

A draft of d tokens gives 1 + r₀ + r₀r₁ + … + r₀…r_{d−1} tokens, where r_i is how often draft token i stands once those
before it do, and its round takes a while. Both are learnt: a request's rates from its own rounds, starting from what
all requests of its sort taught (greedy ones are far easier to guess than sampled ones), and the seconds from all rounds
of about as many rows. The first token drafted often costs far more than the next ones (a drafter is run at all, several
rows are verified), so one token may not pay where more of them do: a deeper draft is measured as soon as it would
pay if it cost no more than one token. From there depths are tried one by one: at most one deeper than any measured.

What is not chosen is not measured, and may have changed: now and then a round is a probe of a depth beside the chosen
one, or of the best draft where none is chosen. How often depends on what that is thought to cost, so that all probes
together cost a percent of speed, and less and less while they bring nothing new.

Told numbers, asked for one; knows no clock, no models, no tokens.
"""

from collections import deque
from itertools import accumulate
from operator import mul

PRIOR, PRIOR_WEIGHT = 0.6, 2.0  # the first token's rate before anything is known, and for how many tries that counts
REQUEST_WEIGHT = 6.0  # for how many of its own tries a request takes what others taught
MEMORY = 0.96  # what a try still counts after one more
SAMPLES = 9  # rounds of one depth whose median is its cost
STALE = 1024  # rounds after which a depth's cost has to be measured again
AHEAD = 3  # the depth measured where one token may not pay
SLOPE = 0.1  # of a round's cost that one more token costs, where only one depth was measured
GAIN = 1.02  # a deeper draft must be so much faster to be worth it
PROBING = 0.01  # of speed that may be lost to probes
PATIENCE = 8  # how many times rarer they become at most
SOONEST, LATEST = 4, 512  # rounds between them


class Rates:
    """How often draft token i stood, once those before it did: recent tries count more."""

    def __init__(self, taught: "Rates | None" = None) -> None:
        self._taught = taught
        self._hits: list[float] = []
        self._tries: list[float] = []

    def first(self, count: int) -> list[float]:
        """The rates of the first tokens. Of a token never tried: as others taught, or else as the token before it."""
        taught = self._taught.first(count) if self._taught else []
        rates: list[float] = []
        for position in range(count):
            if position < len(self._tries):
                rates.append(self._hits[position] / self._tries[position])
            else:
                rates.append(taught[position] if taught else rates[-1] if rates else PRIOR)
        return rates

    def learn(self, depth: int, accepted: int) -> None:
        """Of a draft of `depth` tokens the first `accepted` stood; those after the first that did not say nothing."""
        for position in range(min(depth, accepted + 1)):
            if position == len(self._tries):
                weight = REQUEST_WEIGHT if self._taught else PRIOR_WEIGHT
                self._hits.append(self.first(position + 1)[-1] * weight)
                self._tries.append(weight)
            self._hits[position] = self._hits[position] * MEMORY + (position < accepted)
            self._tries[position] = self._tries[position] * MEMORY + 1

    def tokens(self, most: int) -> list[float]:
        """How many tokens a round gives on average, by the depth of its draft, 0 to `most`."""
        return list(accumulate(accumulate(self.first(most), mul), initial=1.0))


class Costs:
    """How long rounds of each depth take, for one size of batch: a median, so single slow rounds do not count.

    Nor does the very first round of a depth, which may have waited for a compiler.
    """

    def __init__(self) -> None:
        self._met: set[int] = set()
        self._samples: dict[int, deque[float]] = {}
        self._median: dict[int, float] = {}
        self._latest: dict[int, int] = {}  # the number of the round that measured a depth last
        self._rounds = 0

    @property
    def deepest(self) -> int:
        """The deepest draft measured; −1: none."""
        return max(self._median, default=-1)

    def learn(self, depth: int, seconds: float) -> None:
        if depth not in self._met:
            self._met.add(depth)
            return
        self._rounds += 1
        self._latest[depth] = self._rounds
        samples = self._samples.setdefault(depth, deque(maxlen=SAMPLES))
        samples.append(seconds)
        self._median[depth] = sorted(samples)[(len(samples) - 1) // 2]
        for stale in [each for each, latest in self._latest.items() if latest <= self._rounds - STALE]:
            del self._samples[stale], self._median[stale], self._latest[stale]

    def latest(self, depth: int) -> int:
        """When the depth was measured last: a number that grows; 0: not in recent rounds."""
        return self._latest.get(depth, 0)

    def __getitem__(self, depth: int) -> float:
        """Seconds. Of a depth that was not measured: on the line through the two measured ones nearest to it."""
        if depth in self._median:
            return self._median[depth]
        known = sorted(sorted(self._median, key=lambda each: abs(each - depth))[:2])
        if len(known) < 2:
            at, seconds = (known[0], self[known[0]]) if known else (0, 1.0)
            return seconds * (1 + SLOPE * depth) / (1 + SLOPE * at)
        low, high = known
        slope = max(0.0, (self[high] - self[low]) / (high - low))
        return self[low] + slope * (depth - low) if depth > low else self[low]


class Depth:
    """What the requests of one drafter have learnt together."""

    def __init__(self, limit: int) -> None:
        self.limit = limit  # of tokens in a draft
        self.rates = {greedy: Rates() for greedy in (True, False)}
        self.patience = 1  # of a new request
        self.since = 0  # rounds since any request's probe
        self._costs: dict[int, Costs] = {}  # by the number of rows, in powers of two

    def costs(self, rows: int) -> Costs:
        return self._costs.setdefault(max(rows, 1).bit_length(), Costs())

    def begin(self, *, greedy: bool = True) -> "RequestDepth":
        return RequestDepth(self, self.rates[greedy])


class RequestDepth:
    """Chooses the depth of one request's drafts, round by round."""

    def __init__(self, shared: Depth, taught: Rates) -> None:
        self.shared = shared
        self.taught, self.rates = taught, Rates(taught)
        self._patience = shared.patience  # how many times longer than necessary it waits before a probe
        self._since = shared.since  # rounds since the last one; short requests go on where the ones before ended
        self._probe: int | None = None  # the depth that was asked for only to learn about it

    def choose(self, rows: int = 1, most: int | None = None) -> int:
        """The depth of the next draft, in a round of so many rows; at most `most`."""
        costs, limit = self.shared.costs(rows), self._limit(most)
        self._probe = None
        for depth in range(min(limit, 1) + 1):  # the two without which nothing can be compared
            if not costs.latest(depth):
                return depth
        speeds = self._speeds(costs, limit)
        best = _best(speeds)
        if costs.deepest == 1 and limit >= AHEAD and self.rates.tokens(AHEAD)[-1] > GAIN * speeds[best] * costs[1]:
            return AHEAD
        others = (best + 1, best - 1, 0) if best else (1 + _best(speeds[1:]),)
        beside = [each for each in others if each != best and 0 <= each < len(speeds)]
        if not beside:
            return best
        probe = min(beside, key=costs.latest)
        loss = max(0.0, 1 - speeds[probe] / speeds[best])
        if self._since < self._patience * min(max(SOONEST, loss / PROBING), LATEST / PATIENCE):
            return best
        self._probe = probe
        return probe

    def best(self, rows: int = 1, most: int | None = None) -> int:
        """The depth that is thought to give the most tokens a second."""
        return _best(self._speeds(self.shared.costs(rows), self._limit(most)))

    def _limit(self, most: int | None) -> int:
        return self.shared.limit if most is None else max(0, min(most, self.shared.limit))

    def _speeds(self, costs: Costs, limit: int) -> list[float]:
        """Tokens a second by depth, up to one deeper than any measured."""
        tokens = self.rates.tokens(min(limit, costs.deepest + 1))
        return [each / max(costs[depth], 1e-9) for depth, each in enumerate(tokens)]

    def observe(self, depth: int, accepted: int, seconds: float, rows: int = 1) -> None:
        """A round with a draft of `depth` tokens, of which the first `accepted` stood, took so many seconds."""
        assert 0 <= accepted <= depth and seconds >= 0, f"{accepted} of {depth} tokens in {seconds} seconds"
        probed = depth == self._probe
        better = probed and any(rate < 0.5 for rate in self.rates.first(accepted))  # than was thought
        before = self.best(rows) if probed else depth
        self.rates.learn(depth, accepted)
        self.taught.learn(depth, accepted)
        self.shared.costs(rows).learn(depth, seconds)
        self._since += 1
        self.shared.since += 1
        if probed:
            news = better or self.best(rows) != before
            self._patience = self.shared.patience = 1 if news else min(2 * self._patience, PATIENCE)
            self._since, self.shared.since, self._probe = 0, 0, None


def _best(speeds: list[float]) -> int:
    """The fastest depth. Of nearly equal ones the smaller."""
    best = 0
    for depth, speed in enumerate(speeds):
        if speed > GAIN * speeds[best]:
            best = depth
    return best
