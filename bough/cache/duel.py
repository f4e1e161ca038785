"""Which order is the better one here, that of learned worth or that of the last use: two caches that hold nothing tell.

Both are given every use and what it weighs, have as much room as the real cache, and count what comes back while they
have it. Where learned worth loses (nothing to learn but noise, little seen yet, everything at the same instant), what
was used longest ago goes first. Uses and numbers; no tree, no clock.
"""

import math
from collections.abc import Callable

from bough.cache.ranks import Ranks
from bough.cache.reuse import REMEMBERED, Use

LATELY = 3000.0  # uses that came back
GAIN = 0.01  # that recency has to be ahead to be taken, if that is more than chance would make it
SLACK = 0.02  # as in an index
LITTLE = 16  # uses looked at in a call


class Ghost:
    """What a cache of whole uses would have, if the least by some measure went first."""

    def __init__(self, worth: Callable[[Use, float], float]) -> None:
        self._worth = worth
        self._weights: dict[Use, float] = {}
        self._ranks = Ranks[Use]()
        self.held = 0.0

    def keep(self, use: Use, weight: float) -> None:
        self.drop(use)
        self.held += weight
        self._weights[use] = weight
        self.changed(use)
        if len(self._weights) > REMEMBERED:  # the real cache is not full, and may never be
            self.fit(0.0)

    def drop(self, use: Use) -> float:
        """What it weighed, if it was there."""
        weight = self._weights.pop(use, 0.0)
        self._ranks.drop(use)
        self.held -= weight
        return weight

    def changed(self, use: Use) -> None:
        if use in self._weights:
            self._ranks.put(use, self._worth(use, self._weights[use]))

    def fit(self, room: float) -> None:
        """Give up what is worth least; where there is more to do than a little, the next calls go on."""
        for _ in range(LITTLE):
            least = self._ranks.at(0) if self.held > room else None
            if least is None:
                return
            worth, _, use = least
            if self._worth(use, self._weights[use]) - worth > SLACK * abs(worth):
                self.changed(use)
            else:
                self.drop(use)


class Duel:
    """The two orders, and what each has gained of late."""

    def __init__(self, worth: Callable[[Use, float], float]) -> None:
        self._learned, self._recent = Ghost(worth), Ghost(lambda use, _: use.since)
        self._hits = self._lead = self._spread = 0.0  # of learned worth; of recency before it, and its square
        self.recency = False  # is the better order

    def kept(self, use: Use, weight: float) -> None:
        """A use, and what is kept for it."""
        self._learned.keep(use, weight)
        self._recent.keep(use, weight)

    def changed(self, use: Use) -> None:
        """Other things are expected of it."""
        self._learned.changed(use)

    def came(self, use: Use) -> None:
        learned, recent = self._learned.drop(use), self._recent.drop(use)
        self._hits += (learned - self._hits) / LATELY
        self._lead += (recent - learned - self._lead) / LATELY
        self._spread += ((recent - learned) ** 2 - self._spread) / LATELY
        by_chance = math.sqrt(self._spread / (2.0 * LATELY))
        self.recency = self._lead > (0.0 if self.recency else max(GAIN * self._hits, by_chance))

    def fit(self, room: float) -> None:
        """The real cache is full at that."""
        self._learned.fit(room)
        self._recent.fit(room)
