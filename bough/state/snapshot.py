"""Snapshot: what it takes to be at length `end` again, given the path of tokens before `start`.

For each page group it lists the pages of [start, end) within reach of `end`: all of them where the reach is all, the
window before `end` (which may begin before `start`) otherwise; and, where one was saved, the slot at `end`. It is
immutable and owns references, not memory: split and merge move references and copy nothing.

Invariants (`check()` asserts them):
- A group whose reach is all has exactly the pages that cover [start, end).
- A window, where there is one, covers [end − reach, end). It may be missing, as may the slot: then `end` can be passed
  through but not resumed at.
- An edge may be empty (start == end): such a snapshot is a resume point and nothing else.

A page that holds the border of two edges holds the tokens on both sides of it, since whoever wrote the right side had
the left side before him; so two neighbours always agree on it, even as copies that came back at different times.
"""

from collections.abc import Iterator

import numpy as np

from bough.errors import StateError
from bough.state.pool import Pool
from bough.state.store import EMPTY, Ids, Run


class Snapshot:
    """A frozen piece of a sequence's state. Adds a reference to all it lists; `close()` drops them."""

    def __init__(self, pool: Pool, start: int, end: int, runs: dict[int, Run], slot: int | None) -> None:
        self.pool, self.start, self.end, self.runs, self.slot = pool, start, end, runs, slot
        self.closed, self._more = False, 0  # how many hold it beside the one it was made for
        pool.share(self.references())
        pool.register(self)

    def references(self) -> Iterator[tuple[int, Ids]]:
        for index, run in self.runs.items():
            yield index, run.ids
        yield from self.pool.slot_reference(self.slot)

    def moved(self, unit: int, where: Ids) -> None:
        if unit == self.pool.slot_store:
            self.slot = None if self.slot is None else int(where[self.slot])
        elif unit in self.runs:
            self.runs[unit] = self.runs[unit].moved(where)

    @property
    def resumes(self) -> bool:
        """Whether a state can go on at `end`: every window and the slot are there."""
        has_slot = self.slot is not None or self.pool.slot_store is None or self.end == 0
        return has_slot and all(index in self.runs for index in self.pool.page_stores)

    @property
    def is_sound(self) -> bool:
        """Memory does not go bad; what lies on a disk may (a copy of the prefix cache is asked this on every tier)."""
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of the distinct pages and the slot it refers to, whoever else does."""
        return sum(len(np.unique(ids)) * self.pool.stores[index].unit.stride for index, ids in self.references())

    @property
    def freed_bytes(self) -> int:
        """Bytes that closing it would give back: those of pages and slots that nobody else refers to."""
        held = ((self.pool.stores[index], ids) for index, ids in self.references())
        return sum(int((store.refs[ids] == 1).sum()) * store.unit.stride for store, ids in held)

    def without_point(self) -> "Snapshot":
        """The edge alone: what it takes to pass through `end`, but not to resume there; takes this one over."""
        self._expect_open()
        full = {index: run for index, run in self.runs.items() if self.pool.stores[index].unit.reach is None}
        bare = Snapshot(self.pool, self.start, self.end, full, None)
        self.close()
        return bare

    def with_point(self, point: "Snapshot") -> "Snapshot":
        """This edge with the windows and the slot of another one that ends there; takes both over."""
        self._expect_open()
        point._expect_open()
        assert point.end == self.end and point.pool is self.pool
        windows = {index: run for index, run in point.runs.items() if self.pool.stores[index].unit.reach is not None}
        whole = Snapshot(self.pool, self.start, self.end, {**self.runs, **windows}, point.slot)
        self.close()
        point.close()
        return whole

    def sizes(self, *, edge: bool = True, point: bool = True) -> list[int]:
        """How many entries of each unit a copy of its edge, its resume point or both takes."""
        counts = [0] * len(self.pool.stores)
        for index, run in self._part(edge, point).items():
            counts[index] = len(run.ids)
        if point and self.slot is not None and self.pool.slot_store is not None:
            counts[self.pool.slot_store] = 1
        return counts

    def copy_to(self, pool: Pool, *, edge: bool = True, point: bool = True) -> "Snapshot":
        """The same, or its edge or resume point alone, in another pool of the same layout.

        Raises PoolFull, and changes nothing, if there is no room.
        """
        self._expect_open()
        runs, slot = self._part(edge, point), self.slot if point else None
        shape = {index: (run.first, len(run.ids)) for index, run in runs.items()}
        copy = vacant(pool, self.start if edge else self.end, self.end, shape, slot)
        for index, run in runs.items():
            pool.stores[index].copy_from(self.pool.stores[index], run.ids, copy.runs[index].ids)
        for (index, ids), (_, there) in zip(
            self.pool.slot_reference(slot), pool.slot_reference(copy.slot), strict=True
        ):
            pool.stores[index].copy_from(self.pool.stores[index], ids, there)
        return copy

    def _part(self, edge: bool, point: bool) -> dict[int, Run]:
        """The runs of the edge, of the windows at its end, or of both. Without its edge a snapshot has empty ones."""
        runs = {}
        for index, run in self.runs.items():
            if self.pool.stores[index].unit.reach is None:
                runs[index] = run if edge else EMPTY
            elif point:
                runs[index] = run
        return runs

    def split(self, at: int) -> "tuple[Snapshot | None, Snapshot | None]":
        """Two snapshots, of [start, at) and [at, end); takes this one over. Outside the ends one of them is None.

        Slot and windows go to the right; the left one shares the windows too as far as they cover its own reach.
        """
        self._expect_open()
        if at <= self.start:
            return None, self
        if at >= self.end:
            return self, None
        layout, left, right = self.pool.layout, {}, {}
        for index, run in self.runs.items():
            unit = self.pool.stores[index].unit
            wanted = layout.pages(unit.earliest(at) if unit.reach is not None else self.start, at)
            mine = run.part(*wanted)
            if (mine.first, mine.end) == wanted or unit.reach is None:
                left[index] = mine
            right[index] = run if unit.reach is not None else run.part(*layout.pages(at, self.end))
        halves = Snapshot(self.pool, self.start, at, left, None), Snapshot(self.pool, at, self.end, right, self.slot)
        self.close()
        return halves

    def join(self, right: "Snapshot") -> "Snapshot":
        """One snapshot of this edge and the next; takes both over."""
        merged = merge(self, right)
        assert merged is not None
        return merged

    def held(self) -> "Snapshot":
        """This one, for another holder: it is closed when each of them has closed it."""
        assert not self.closed  # whoever forks a state holds it
        self._more += 1
        return self

    def close(self) -> None:
        """Drop the references. Once it is closed, another call does nothing."""
        if self._more:
            self._more -= 1
        elif not self.closed:
            self.closed = True
            self.pool.release(self.references())
            self.pool.unregister(self)

    def _expect_open(self) -> None:
        if self.closed:
            raise StateError("the snapshot is closed; take another one")

    def check(self) -> None:
        if self.closed:
            return
        for index, run in self.runs.items():
            store = self.pool.stores[index]
            start = self.start if store.unit.reach is None else store.unit.earliest(self.end)
            if store.unit.reach is None and self.start == self.end:
                assert not len(run.ids), "an empty edge has pages"
            else:
                assert (run.first, run.end) == self.pool.layout.pages(start, self.end), "pages are missing or too many"
                assert (store.fill[run.ids[:-1]] == self.pool.layout.page_tokens).all(), "a page is not full"
        full = {index for index in self.pool.page_stores if self.pool.stores[index].unit.reach is None}
        assert full <= self.runs.keys(), "a group whose reach is all has no pages"


def vacant(pool: Pool, start: int, end: int, pages: dict[int, tuple[int, int]], slot: object | None = None) -> Snapshot:
    """A snapshot of entries nobody has written yet: by unit the first page number and the count, and a slot if wanted.

    Whoever asks fills all of them before anyone looks. Raises PoolFull, and changes nothing, if there is no room.
    """
    counts = [0] * len(pool.stores)
    for index, (_, count) in pages.items():
        counts[index] = count
    if slot is not None:
        assert pool.slot_store is not None
        counts[pool.slot_store] = 1
    taken = pool.take(counts, spare=True)
    runs = {index: Run(first, taken[index]) for index, (first, _) in pages.items()}
    for index, run in runs.items():
        pool.stores[index].fill[run.ids] = pool.layout.page_tokens
        pool.stores[index].fill[run.ids[-1:]] = end - (run.end - 1) * pool.layout.page_tokens
    lent = None if slot is None else int(taken[pool.slot_store][0])  # type: ignore[index]
    made = Snapshot(pool, start, end, runs, lent)
    pool.release((index, ids) for index, ids in enumerate(taken))
    return made


def merge(left: Snapshot | None, right: Snapshot | None) -> Snapshot | None:
    """One snapshot of both edges; takes both over. The resume point between them goes. None if a half is missing."""
    if left is None or right is None:
        for half in (left, right):
            if half is not None:
                half.close()
        return None
    left._expect_open()
    right._expect_open()
    if left.end != right.start:
        raise StateError(f"[{left.start}, {left.end}) and [{right.start}, {right.end}) do not follow each other")
    pool, runs = left.pool, dict(right.runs)
    for index, run in left.runs.items():
        if pool.stores[index].unit.reach is None and left.start < left.end:
            after = right.runs[index]
            before = run.part(run.first, after.first) if len(after.ids) else run
            runs[index] = Run(run.first, np.concatenate([before.ids, after.ids]))
    merged = Snapshot(pool, left.start, right.end, runs, right.slot)
    left.close()
    right.close()
    return merged
