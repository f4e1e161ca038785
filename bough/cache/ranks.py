"""Things in order of worth, least first. No call does work that grows with how many there are, but for moving pointers.

    ranks = Ranks[Node]()
    ranks.put(node, 0.5)          # or put it elsewhere, if it is there
    ranks.at(0)                   # (0.5, 0.0, node), the least; at(1) is the next
    ranks.drop(node)

A heap would need either entries that no longer hold, and a day on which they are cleared away, or a search for those
that change. This is one sorted list, cut into blocks that are short enough to insert into and to delete from.

Invariants (`check()` asserts them): entries rise; no block is empty or long; each thing has one entry.
"""

from bisect import bisect_left, bisect_right, insort
from itertools import count, pairwise
from typing import Generic, TypeVar

BLOCK = 512  # entries at which a block is cut in two

T = TypeVar("T")
Entry = tuple[float, float, int, T]  # worth; among equals, the time; among equals, which was put first


class Ranks(Generic[T]):
    """A sorted list of things that change places."""

    def __init__(self) -> None:
        self._entries: dict[T, Entry[T]] = {}
        self._blocks: list[list[Entry[T]]] = []
        self._firsts: list[Entry[T]] = []  # of the blocks
        self._order = count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, thing: T) -> bool:
        return thing in self._entries

    def put(self, thing: T, worth: float, time: float = 0.0) -> None:
        """Give it its place, behind those that are worth the same and are not younger."""
        self.drop(thing)
        entry = self._entries[thing] = worth, time, next(self._order), thing
        if not self._blocks:
            self._blocks.append([])
            self._firsts.append(entry)
        at = max(0, bisect_right(self._firsts, entry) - 1)
        block = self._blocks[at]
        insort(block, entry)
        self._firsts[at] = block[0]
        if len(block) >= BLOCK:
            self._blocks[at : at + 1] = [block[: BLOCK // 2], block[BLOCK // 2 :]]
            self._firsts.insert(at + 1, block[BLOCK // 2])

    def drop(self, thing: T) -> None:
        """Take it out, if it is there."""
        entry = self._entries.pop(thing, None)
        if entry is None:
            return
        at = bisect_right(self._firsts, entry) - 1
        block = self._blocks[at]
        del block[bisect_left(block, entry)]
        if block:
            self._firsts[at] = block[0]
        else:
            del self._blocks[at], self._firsts[at]

    def at(self, place: int) -> tuple[float, float, T] | None:
        """What stands at a place, counted from the least, after its worth and its time; None beyond the last."""
        for block in self._blocks:
            if place < len(block):
                worth, time, _, thing = block[place]
                return worth, time, thing
            place -= len(block)
        return None

    def check(self) -> None:
        entries = [entry for block in self._blocks for entry in block]
        assert all(a < b for a, b in pairwise(entries)), "entries are out of order"
        assert all(0 < len(block) < BLOCK for block in self._blocks), "a block is empty or long"
        assert self._firsts == [block[0] for block in self._blocks], (
            "blocks are found by other entries than their first"
        )
        assert {entry[3]: entry for entry in entries} == self._entries, "a thing is lost, or stands twice"
        assert len(entries) == len(self._entries), "a thing stands twice"
