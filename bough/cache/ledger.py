"""What the cache has done and lost: counters, and for a while what was evicted from where and when."""

from collections import Counter, OrderedDict
from dataclasses import dataclass

import numpy as np

from bough.cache.extent import PathDigest
from bough.cache.tree import Node, Symbols, Tier, common

REMEMBERED = 4096  # evictions
EDGE = 1024  # symbols of each that are compared


@dataclass(frozen=True, slots=True)
class Grave:
    """Something that was given up: a node, or the resume point at its end."""

    what: str
    tier: Tier  # the last that had it
    when: float
    start: int  # what is before it is in its key
    last: int  # the symbol just before it
    edge: Symbols


@dataclass(frozen=True, slots=True)
class Trace:
    """A part of a prompt that was known once: up to which length, and when and where it was lost."""

    length: int
    tier: Tier
    when: float


class Ledger:
    """Counters by name, and the latest evictions by the path up to where they began."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self._graves: OrderedDict[bytes, Grave] = OrderedDict()
        self._starts: Counter[tuple[int, int]] = Counter()  # of graves, and the symbols just before them

    def count(self, name: str, by: int = 1) -> None:
        self.counters[name] += by

    def bury(self, node: Node, tier: Tier, what: str, now: float) -> None:
        """Remember a node by its path and first symbol, or its resume point by its whole path."""
        tokens = np.concatenate([each.symbols for each in node.path()])
        known = node.start + 1 if what == "node" else node.end
        key = PathDigest(node.root().salt, tokens[:known]).digest() + what.encode()
        if old := self._graves.pop(key, None):
            self._forget(old)
        grave = Grave(what, tier, now, known, int(tokens[known - 1]), tokens[known : known + EDGE].copy())
        self._graves[key] = grave
        self._starts[grave.start, grave.last] += 1
        while len(self._graves) > REMEMBERED:
            self._forget(self._graves.popitem(last=False)[1])

    def _forget(self, grave: Grave) -> None:
        self._starts[grave.start, grave.last] -= 1
        if not self._starts[grave.start, grave.last]:
            del self._starts[grave.start, grave.last]

    def find(self, salt: bytes, tokens: Symbols, after: int, what: str) -> Trace | None:
        """The longest prefix of the tokens, above this length, whose eviction is remembered."""
        starts = sorted(at for at, last in self._starts if after < at <= len(tokens) and tokens[at - 1] == last)
        path, at, found = PathDigest(salt), 0, None
        for start in starts:
            path.extend(tokens[at:start])
            at = start
            grave = self._graves.get(path.digest() + what.encode())
            if grave is not None:
                length = start + (common(grave.edge, tokens[start:]) if what == "node" else 0)
                if found is None or length > found.length:
                    found = Trace(length, grave.tier, grave.when)
        return found
