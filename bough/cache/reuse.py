"""How soon what was used will be used again, learned while serving. Times and lengths; no tree, no bytes, no clock.

A *use* is one request, or one pass over a prefix that many share. From then on it waits to come back; its age falls
into bins that grow with it, and each bin has a chance that what has waited so long comes back within it: a logistic
model, additive over a few facts (which turn it is, how long, how much was new, how much was generated, how long the
turn before took), trained at every bin a use outlives and at the one it comes back in. Before it has learned anything
the chances are those that make recent uses the better ones, as in LRU.

The worth of waiting on is an index in the sense of Gittins: the best ratio, over all times to give up, of the chance
to be used until then to the expected time spent waiting. It falls and rises as age passes through lulls and humps.

Uses outlive what was kept of them: fingerprints of recent paths tell a conversation that comes back from a new one
even after all of it was evicted, so the model learns about what it gave up too.
"""

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable
from enum import Enum
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from bough.cache.tree import Symbols

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]

FIRST, GROWTH, BINS = 1.0, 1.5, 34  # seconds, ratio, bins: up to a week
EDGES: Floats = np.concatenate([[0.0], FIRST * GROWTH ** np.arange(BINS)])
WIDTHS: Floats = np.diff(EDGES)
LATER: Floats = np.triu(np.ones((BINS, BINS)))
RATE, STEADY = 0.12, 1.0  # of learning, and what tempers it in the beginning
NEARBY: Floats = np.exp(-0.5 * (np.arange(-4, 5) / 1.75) ** 2)  # what a bin tells about its neighbours
MOST = 30.0  # a logit that is as good as certain
TRUST = (0.0, 0.5, 1.0)  # in the facts
OUTDATED = 0.05  # a use gets other rates when the model has had so many more lessons, as a share
RECENT = 0.005  # and rates are worked out again for it, if those of its profile are older than that
LATELY = 5000.0  # lessons
REMEMBERED = 1 << 16  # requests whose paths are recognised
MOSTLY = 0.65  # of a request; who goes on from that much belongs to the same conversation
FOLLOWERS = 4  # that many go on from a request; if it is more, they only share a beginning
DENSE, SPARSE = 256, 16  # a fingerprint at each length up to the first, then at one in so many
ODD = 0x9E3779B97F4A7C15


class Kind(Enum):
    """What a use is a use of."""

    OWN = "a conversation's last request"
    LEFT = "what a conversation went on from, or past"
    SHARED = "a prefix of several conversations"
    INSIDE = "a resume point inside a path"


class Profile:
    """What all uses with the same facts share: rows of the model, and the rates that these give."""

    __slots__ = ("__weakref__", "drawn", "kind", "rates", "rows")

    def __init__(self, kind: Kind, rows: Rows) -> None:
        self.kind, self.rows = kind, rows
        self.rates: list[float] = []  # by bin
        self.drawn = 0  # when they were worked out, in lessons


class Use:
    """A request, or a pass over a shared prefix: something that may come back."""

    __slots__ = (
        "base", "began", "bin", "drawn", "followers", "fresh", "gap", "gap_before", "kind", "length", "made", "nodes",
        "profile", "rates", "since", "talk", "turn", "unmade", "waiting",
    )  # fmt: skip

    def __init__(self, kind: Kind, now: float, length: int) -> None:
        self.kind, self.length = kind, length
        self.began = self.since = now  # and since when it waits
        self.turn, self.fresh, self.made = 0, 0, -1  # -1: not known
        self.gap = self.gap_before = -1.0  # between the last turns
        self.talk: object = self  # the same for all requests of a conversation; None where it is not known
        self.base = 0  # how much of it the first request of its conversation shared with others
        self.followers = 0  # requests that went on from it
        self.waiting = True  # has not come back, and it would be seen if it did
        self.bin = 0  # that its age is in
        self.profile: Profile | None = None
        self.rates: list[float] = []  # by bin
        self.drawn = 0  # when they were worked out, in lessons
        self.unmade: Profile | None = None  # that it had while it was not known how much it would generate
        self.nodes: dict[Any, None] = {}  # whatever waits for it


def bin_of(age: float) -> int:
    if age < FIRST:
        return 0
    return min(BINS - 1, 1 + int(math.log(age / FIRST) / math.log(GROWTH)))


class Model:
    """The chance to come back in each bin: by age alone, and with the facts about a use added as far as they help.

    Both are judged by how well they foretold (log loss, of late); facts count in full, by half or not at all,
    whatever did best. So where they tell nothing, their noise does no harm.
    """

    def __init__(self) -> None:
        share = 0.15  # of what has waited a seconds comes back before 2.7a seconds, says the beginning
        chance = 1.0 - (np.maximum(EDGES[:-1], 0.5) / EDGES[1:]) ** share
        self._start = np.log(chance / (1.0 - chance))
        self.lessons = 0
        self._rows: dict[Hashable, int] = {}
        self._profiles: WeakValueDictionary[Hashable, Profile] = WeakValueDictionary()
        self._pad = len(NEARBY) // 2
        self._table = self._blank(16)  # for each row the weights of the bins, and what has moved them so far
        self._losses = {kind: [0.0] * len(TRUST) for kind in Kind}

    def profile(self, use: Use) -> Profile:
        """The rows of weights for a use: the one by age alone, the one that facts are added to, and these."""
        keys: list[tuple[Any, ...]] = [("age", use.kind), ("with facts", use.kind)]
        if use.kind is Kind.OWN:
            turn, made, length = min(use.turn, 7), steps(use.made), steps(use.length)
            fresh = steps(use.fresh) if turn else -1
            keys += [
                ("turn", turn), ("made", made), ("fresh", fresh),
                ("gap", steps(use.gap) // 2), ("gap before", steps(use.gap_before) // 2),
                ("turn, made", min(turn, 2), made), ("turn, length", min(turn, 2), length),
                ("turn, fresh", min(turn, 3), fresh), ("length, made", length // 4, made // 4),
                ("length, fresh", length // 3, fresh // 2),
            ]  # fmt: skip
        elif use.kind is Kind.SHARED:
            keys += [("uses", steps(use.turn)), ("every", steps(use.gap))]
        else:
            keys += [("turn", use.kind, min(use.turn, 3))]
        known = tuple(keys)
        found = self._profiles.get(known)
        if found is None:
            rows = np.array([self._row(key) for key in keys], np.intp)
            found = self._profiles[known] = Profile(use.kind, rows)
        return found

    def _row(self, key: tuple[Any, ...]) -> int:
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = len(self._rows)
            if row == len(self._table):
                self._table = np.concatenate([self._table, self._blank(row)])
            if key[0] in ("age", "with facts"):
                self._table[row, 0, self._pad : self._pad + BINS] = self._start
        return row

    def _blank(self, rows: int) -> Floats:
        table = np.zeros((rows, 2, BINS + 2 * self._pad))
        table[:, 1] = STEADY
        return table

    def learn(self, use: Use, at: int, came: bool) -> None:
        """It did or did not come back in this bin, having waited until then."""
        assert use.profile is not None
        self.lessons += 1
        by_age, rest = self._step(use.profile.rows, at, came)
        losses = self._losses[use.kind]
        for number, trust in enumerate(TRUST):
            chance = sigmoid(by_age + trust * (rest - by_age))
            losses[number] += (-math.log(chance if came else 1.0 - chance) - losses[number]) / LATELY
        if use.unmade and self.lessons % 2:  # or those that still generate would never learn how it ends
            self._step(use.unmade.rows, at, came)

    def _step(self, rows: Rows, at: int, came: bool) -> tuple[float, float]:
        """Correct some rows; the logits that they gave, by age alone and with the facts."""
        span = slice(at, at + len(NEARBY))
        part = self._table[rows, :, span]
        middle = part[:, 0, self._pad].tolist()
        by_age, rest = middle[0], sum(middle[1:])
        wrong = [came - sigmoid(by_age), *[came - sigmoid(rest)] * (len(middle) - 1)]
        step = np.array(wrong)[:, None] * NEARBY
        part[:, 1] += step * step
        part[:, 0] += RATE * step / np.sqrt(part[:, 1])
        self._table[rows, :, span] = part
        return by_age, rest

    def rate(self, use: Use) -> float:
        """Uses to be expected per second from its bin on."""
        if not use.rates or self.lessons > 100 + (1 + OUTDATED) * use.drawn:
            assert use.profile is not None
            use.rates, use.drawn = self._rates(use.profile), self.lessons
        return use.rates[use.bin]

    def _rates(self, profile: Profile) -> list[float]:
        if not profile.rates or self.lessons > (1 + RECENT) * profile.drawn:
            weights = self._table[profile.rows, 0, self._pad : self._pad + BINS]
            losses = self._losses[profile.kind]
            trust = TRUST[losses.index(min(losses))]
            logits = weights[0] + trust * (weights[1:].sum(0) - weights[0])
            profile.rates = rates(1.0 / (1.0 + np.exp(-np.clip(logits, -MOST, MOST))))
            profile.drawn = self.lessons
        return profile.rates


def sigmoid(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-max(-MOST, min(MOST, logit))))


def steps(amount: float) -> int:
    """A coarse logarithm: -1 for what is not known, 0 for nothing, then two steps a doubling."""
    if amount < 1:
        return -1 if amount < 0 else 0
    return 1 + int(2 * math.log2(amount))


def rates(chances: Floats) -> list[float]:
    """Of waiting on from the start of each bin: uses to be expected per second, if given up at the best time."""
    still = np.concatenate([[1.0], np.cumprod(1.0 - chances)])
    waited = np.concatenate([[0.0], np.cumsum((still[:-1] + still[1:]) / 2 * WIDTHS)])
    used = still[:-1, None] - still[None, 1:]
    spent = waited[None, 1:] - waited[:-1, None]
    ratio = np.where(spent > 1e-12, used / np.maximum(spent, 1e-12), 0.0)
    best: list[float] = (ratio * LATER).max(1).tolist()
    return best


class Recall:
    """Which recent request a prompt goes on from, by fingerprints of the paths up to where requests ended.

    Beyond a first stretch only some lengths have a fingerprint, and what is before them says which: two prompts with
    the same beginning have them at the same lengths there.
    """

    def __init__(self) -> None:
        self._uses: OrderedDict[tuple[bytes, int], Use] = OrderedDict()
        self._powers = np.ones(1, np.uint64)

    def prints(self, symbols: Symbols) -> tuple[list[int], list[int]]:
        """Lengths, rising, and the fingerprints of the path up to each."""
        count = len(symbols)
        if len(self._powers) < count:
            self._powers = np.cumprod(np.full(2 * count, ODD, np.uint64), dtype=np.uint64)
        sums = np.cumsum((symbols.astype(np.uint64) + np.uint64(1)) * self._powers[:count], dtype=np.uint64)
        chosen = (sums >> np.uint64(40)) % np.uint64(SPARSE) == 0
        chosen[:DENSE] = True
        places = np.flatnonzero(chosen)
        return (places + 1).tolist(), sums[places].tolist()

    def find(self, salt: bytes, prints: list[int]) -> Use | None:
        """The request with the longest path that these fingerprints go on from."""
        for each in reversed(prints):
            use = self._uses.get((salt, each))
            if use is not None and use.followers < FOLLOWERS:
                return use
        return None

    def keep(self, salt: bytes, lengths: list[int], prints: list[int], use: Use) -> None:
        """Recognise whoever goes on from a request, or from most of it, past what it shares with others."""
        for length in (use.length - max(1, use.length // 64), int(MOSTLY * use.length)):
            at = bisect_right(lengths, length) - 1
            if at >= 0 and lengths[at] > use.base:
                key = salt, prints[at]
                self._uses[key] = use
                self._uses.move_to_end(key)
        while len(self._uses) > 2 * REMEMBERED:
            _, forgotten = self._uses.popitem(last=False)
            forgotten.waiting = False  # it may come back unseen now
