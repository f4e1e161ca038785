"""What the cache has done and lost: counters, and for a while what was evicted from where and when."""

from collections import Counter, OrderedDict
from dataclasses import dataclass

import numpy as np

from bough.cache.extent import PathDigest
from bough.cache.tree import Node, Symbols, Tier

REMEMBERED = 4096  # evictions


@dataclass(frozen=True, slots=True)
class Grave:
    """Something that was given up: a node, or the resume point at its end."""

    what: str
    tier: Tier  # the last that had it
    when: float
    length: int


class Ledger:
    """Counters by name, and the latest evictions by the path they ended."""

    def __init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self._graves: OrderedDict[bytes, Grave] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def count(self, name: str, by: int = 1) -> None:
        self.counters[name] += by

    def bury(self, node: Node, tier: Tier, what: str, now: float) -> None:
        tokens = np.concatenate([each.symbols for each in node.path()])
        key = PathDigest(node.root().salt, tokens).digest()
        if old := self._graves.pop(key, None):
            self._lengths[old.length] -= 1
        self._graves[key] = Grave(what, tier, now, node.end)
        self._lengths[node.end] += 1
        while len(self._graves) > REMEMBERED:
            _, oldest = self._graves.popitem(last=False)
            self._lengths[oldest.length] -= 1

    def find(self, salt: bytes, tokens: Symbols, after: int, what: str) -> Grave | None:
        """The longest prefix of the tokens, above this length, whose eviction is remembered."""
        lengths = sorted(at for at, count in self._lengths.items() if count and after < at <= len(tokens))
        path, at, found = PathDigest(salt), 0, None
        for length in lengths:
            path.extend(tokens[at:length])
            at = length
            grave = self._graves.get(path.digest())
            if grave is not None and grave.what == what:
                found = grave
        return found
