"""Store: the entries of one unit: where they are, how many refer to each, how far pages are filled; and runs of them.

A store knows nothing of who refers to its entries; the pool (pool.py) does.
"""

from bisect import insort
from collections.abc import Iterator
from operator import neg

import numpy as np
import torch
from numpy.typing import NDArray

from bough.state.layout import Field, Unit

Ids = NDArray[np.int64]


class Run:
    """Consecutive pages of a sequence: `ids[j]` is its page number `first + j`. None of it is changed."""

    __slots__ = ("_entries", "end", "first", "ids", "last")

    def __init__(self, first: int, ids: Ids) -> None:
        self.first, self.ids, self.end = first, ids, first + len(ids)
        self.last: int = ids.item(-1) if len(ids) else -1  # which every step asks for
        self._entries: slice | Ids | None = None

    @property
    def entries(self) -> "slice | Ids":
        """Its pages as an index. Those of a long prompt mostly follow each other, and a slice takes half the time."""
        if self._entries is None:
            start, count = self.ids.item(0) if len(self.ids) else 0, len(self.ids)
            in_a_row = self.last == start + count - 1 and bool((np.diff(self.ids) == 1).all())
            self._entries = slice(start, start + count) if in_a_row else self.ids
        return self._entries

    def clip(self, first: int, end: int) -> tuple[int, int]:
        """The numbers [low, high) of its pages that are among [first, end)."""
        low = min(max(first, self.first), self.end)
        return low, max(low, min(end, self.end))

    def part(self, first: int, end: int) -> "Run":
        """Those of its pages that are numbered [first, end)."""
        low, high = self.clip(first, end)
        return Run(low, self.ids[low - self.first : high - self.first])

    def moved(self, where: Ids) -> "Run":
        return Run(self.first, where[self.ids])


EMPTY = Run(0, np.empty(0, np.int64))


class Store:
    """The entries of one unit: where they are, how many refer to each, how far each page is filled."""

    def __init__(self, unit: Unit, arena: torch.Tensor, slab_bytes: int, free_slabs: list[int]) -> None:
        self.unit = unit
        self.capacity = arena.numel() // slab_bytes * unit.per_slab
        self.refs = np.zeros(self.capacity, np.int32)
        self.fill = np.zeros(self.capacity, np.int32)
        self.data = arena.view(-1, unit.stride)  # [capacity, stride] uint8: one row is one page or slot
        self.parts = {key: self._part(field) for key, field in unit.fields.items()}
        self.used = 0  # entries
        self.slabs = 0  # those this unit owns
        self._unused: dict[int, list[int]] = {}  # by slab that is partly used: its other entries
        self._free_slabs = free_slabs  # from the last to the first, shared by all stores
        self.scratch = int(self.take(1)[0])

    def _part(self, field: Field) -> torch.Tensor:
        """One layer's part of every entry: [capacity, *shape], at the unit's stride."""
        raw = self.data[:, field.offset : field.offset + field.nbytes]
        return raw.view(field.part.dtype).view(self.capacity, *field.shape)

    def slabs_for(self, count: int) -> int:
        """How many more slabs it takes to lend `count` entries."""
        unused = self.slabs * self.unit.per_slab - self.used
        return max(0, -(-(count - unused) // self.unit.per_slab))

    def take(self, count: int) -> Ids:
        """Lend `count` entries, each with one reference. The caller has made sure that they fit."""
        if not count:
            return EMPTY.ids
        taken: list[int] = []
        while len(taken) < count:
            if not self._unused:
                slab = self._free_slabs.pop(-1 if self.unit.is_page else 0)  # pages in front, slots at the back
                first = slab * self.unit.per_slab
                self._unused[slab] = list(range(first + self.unit.per_slab - 1, first - 1, -1))
                self.slabs += 1
            slab, unused = next(iter(self._unused.items()))
            keep = max(0, len(unused) - (count - len(taken)))
            taken += reversed(unused[keep:])
            del unused[keep:]
            if not unused:
                del self._unused[slab]
        ids = np.array(taken, np.int64)
        self.refs[ids] = 1
        self.fill[ids] = 0
        self.used += count
        return ids

    def share(self, ids: Ids | slice) -> None:
        """Add one reference to each."""
        refs = self.refs[ids]
        assert np.count_nonzero(refs) == len(refs), "an entry is shared that nobody holds"
        self.refs[ids] = refs + 1

    def release(self, ids: Ids) -> None:
        """Drop one reference to each; entries nobody refers to go back, and so do slabs that are empty."""
        if not len(ids):
            return
        left = self.refs[ids] - 1
        assert not np.count_nonzero(left < 0), "an entry is released more often than it was lent"
        self.refs[ids] = left
        gone = ids[left == 0][::-1].tolist()  # so that they are lent again in the order they were in
        self.used -= len(gone)
        for entry in gone:
            slab = entry // self.unit.per_slab
            unused = self._unused.setdefault(slab, [])
            unused.append(entry)
            if len(unused) == self.unit.per_slab:
                del self._unused[slab]
                insort(self._free_slabs, slab, key=neg)
                self.slabs -= 1

    def copy(self, source: Ids, target: Ids) -> None:
        """Copy whole entries, all layers at once."""
        self.copy_from(self, source, target)

    def copy_from(self, other: "Store", source: Ids, target: Ids) -> None:
        """Copy whole entries of another store of the same unit. Copies to or from a device are not waited for."""
        for a, b, count in _runs(source, target):
            self.data[b : b + count].copy_(other.data[a : a + count], non_blocking=True)

    def gather(self, slabs: int) -> Ids | None:
        """Empty up to so many slabs by moving what they hold to unused entries of others; where everything is then."""
        room = {slab: len(unused) for slab, unused in self._unused.items()}
        left = sum(room.values())
        sources: list[int] = []
        for slab in sorted(room, key=lambda slab: -room[slab]):
            if slab == self.scratch // self.unit.per_slab:
                continue
            left -= self.unit.per_slab  # the room that it has, and the room that what it holds will take
            if len(sources) == slabs or left < 0:
                break
            sources.append(slab)
        if not sources:
            return None
        where = np.arange(self.capacity)
        leaving = {slab: self._unused.pop(slab) for slab in sources}
        for slab, not_held in leaving.items():
            first = slab * self.unit.per_slab
            moving = np.setdiff1d(np.arange(first, first + self.unit.per_slab), not_held)
            there = self.take(len(moving))
            self.copy(moving, there)
            self.refs[there], self.fill[there] = self.refs[moving], self.fill[moving]
            self.refs[moving] = 0
            where[moving] = there
            self.used -= len(moving)
            self.slabs -= 1
            insort(self._free_slabs, slab, key=neg)
        return where

    def check(self, held: NDArray[np.int32]) -> set[int]:
        """Assert the invariants, given how many holders list each entry; returns the slabs this unit owns."""
        held[self.scratch] += 1
        wrong = np.flatnonzero(held != self.refs)[:8]
        assert not len(wrong), f"{self.unit.name} {wrong}: refs {self.refs[wrong]}, held {held[wrong]}"
        used = np.flatnonzero(self.refs)
        slabs = set((used // self.unit.per_slab).tolist())
        assert (self.used, self.slabs) == (len(used), len(slabs)), f"{self.unit.name}: miscounted"
        owned = {s * self.unit.per_slab + i for s in slabs for i in range(self.unit.per_slab)}
        unused = [entry for entries in self._unused.values() for entry in entries]
        assert sorted(unused) == sorted(owned.difference(used.tolist())), f"{self.unit.name}: an entry is lost"
        return slabs


def _runs(source: Ids, target: Ids) -> Iterator[tuple[int, int, int]]:
    """Entries that follow each other on both sides, to be copied at once: (source, target, how many)."""
    if not len(source):
        return
    breaks = np.flatnonzero((np.diff(source) != 1) | (np.diff(target) != 1)) + 1
    starts = [0, *breaks.tolist()]
    for start, end in zip(starts, [*starts[1:], len(source)], strict=True):
        yield int(source[start]), int(target[start]), end - start
