"""Which order is the better one here, that of learned worth or that of the last use: two caches that hold nothing tell.

Both are given every use and what it weighs, have as much room as the real cache, and count what comes back while they
have it. Where learned worth loses (nothing to learn but noise, little seen yet, everything at the same instant), what
was used longest ago goes first. Uses and numbers; no tree, no clock.
"""

import heapq
import math
from collections.abc import Callable
from itertools import count

from bough.cache.reuse import REMEMBERED, Use

LATELY = 3000.0  # uses that came back
GAIN = 0.01  # that recency has to be ahead to be taken, if that is more than chance would make it
SLACK = 0.02  # as in an index


class Ghost:
    """What a cache of whole uses would have, if the least by some measure went first."""

    def __init__(self, worth: Callable[[Use, float], float]) -> None:
        self._worth = worth
        self._weights: dict[Use, tuple[float, int]] = {}  # and the number of the entry that counts
        self._heap: list[tuple[float, int, Use]] = []
        self._order = count()
        self._crowded = 64
        self.held = 0.0

    def keep(self, use: Use, weight: float) -> None:
        self.drop(use)
        self.held += weight
        self._enter(use, weight)
        if len(self._weights) > REMEMBERED:  # the real cache is not full, and may never be
            self.fit(0.9 * self.held)

    def drop(self, use: Use) -> float:
        """What it weighed, if it was there."""
        weight, _ = self._weights.pop(use, (0.0, 0))
        self.held -= weight
        return weight

    def changed(self, use: Use) -> None:
        if use in self._weights:
            self._enter(use, self._weights[use][0])

    def fit(self, room: float) -> None:
        while self.held > room and self._heap:
            worth, number, use = heapq.heappop(self._heap)
            weight, last = self._weights.get(use, (0.0, -1))
            if number != last:
                continue
            if self._worth(use, weight) - worth > SLACK * abs(worth):
                self._enter(use, weight)
            else:
                self.drop(use)

    def _enter(self, use: Use, weight: float) -> None:
        number = next(self._order)
        self._weights[use] = weight, number
        heapq.heappush(self._heap, (self._worth(use, weight), number, use))
        if len(self._heap) > self._crowded:
            self._heap = [entry for entry in self._heap if self._weights.get(entry[2], (0.0, -1))[1] == entry[1]]
            heapq.heapify(self._heap)
            self._crowded = 64 + 2 * len(self._heap)


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
