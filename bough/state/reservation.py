"""Reservation: the memory one forward may write, taken before it starts.

Everything the forward can need (new pages, copies of shared tails, slots) is taken at once: either all of it is
there, or PoolFull is raised and nothing has changed. `finish()` moves the states on; `abort()` puts everything back.

A shared last page is appended to in place by whoever is exactly at its fill mark — the others do not look past their
own length — and copied first by anyone else. So sharing is token-granular whatever the page size is. A slot is
written in place by its only holder; anyone else reads the shared one and writes another. Of states that share one among
themselves alone and move on together, the last keeps it and the others get copies: so there is always a slot for
everyone. A state in a transaction gets a slot of its own, which is left alone, and its inputs are recorded.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np
from torch import Tensor

from bough.errors import StateError
from bough.ops.attention import Mask
from bough.ops.ragged import Rows
from bough.state.live import State
from bough.state.pool import Pool
from bough.state.recordings import Recordings
from bough.state.snapshot import Snapshot
from bough.state.steady import Batch, Tokens
from bough.state.step import HostNumbers, Step
from bough.state.store import EMPTY, Ids, Run

Cuts = Sequence[Sequence[int]]  # for each row, the lengths at which it shall be resumable


@contextmanager
def forward(
    pool: Pool,
    batch: Batch,
    masks: tuple[Mask | None, ...] | None = None,
    cuts: Cuts | None = None,
    given: Tensor | None = None,
    *,
    settled: bool = True,
) -> Iterator[Step]:
    """The step that feeds each state its tokens, or as many that are `given` on the device. States move on when the
    body ends, and stay when it raises.

    At the lengths in `cuts` a state gets a point, as far as there are slots to spare. A state in a transaction moves on
    when that is committed. States that owe something are settled before, or it is for the body to see to that.
    """
    tokens = _flat([tokens for _, tokens in batch])
    for name, each in (("masks", masks), ("cuts", cuts)):
        if each is not None and len(each) != len(batch):
            raise ValueError(f"{len(each)} {name} for {len(batch)} rows; give each row its own")
    if settled:
        for state, _ in batch:
            state.settle()
    reservation = Reservation(pool, batch, cuts)
    try:
        yield reservation.step(tokens, masks, given)
    except BaseException:
        reservation.abort()
        raise
    reservation.finish()


def _flat(rows: Sequence[Tokens]) -> Ids:
    if any(isinstance(tokens, np.ndarray) for tokens in rows):
        return np.concatenate([np.asarray(tokens, np.int64) for tokens in rows])
    return np.fromiter(chain.from_iterable(rows), np.int64)


class _Growth(NamedTuple):
    """A row that gets pages."""

    row: int
    pages: int
    copies: bool  # whether the first of them takes the place of its last one, which is shared
    filled: int  # tokens in the last of them


class _Appends:
    """What the rows add to one page group. The states themselves change only when the reservation finishes.

    All of it is planned row by row with plain numbers: rows are few, and arrays would cost one row as much as all.
    """

    def __init__(self, pool: Pool, unit: int, states: Sequence[State], rows: Rows) -> None:
        self.unit, self._store, self._states, self._size = unit, pool.stores[unit], states, pool.layout.page_tokens
        self.runs = [state.runs[unit] for state in states]  # after the step, those out of reach still included
        ahead = self._store.unit.reach is None
        self.filled = tuple([state.known for state in states]) if ahead else rows.history  # before the step
        self._marks: list[tuple[int, int]] = []  # shared pages that are appended to in place, and how far
        self._own_marks: list[tuple[int, int]] = []  # those that nobody else can look at before the step has ended
        self._old_marks: list[tuple[int, int]] = []
        self._growing: list[_Growth] = []
        self._old: dict[int, Run] = {}  # of rows that get pages
        self.taken = EMPTY.ids
        self._plan(rows)

    def _plan(self, rows: Rows) -> None:
        size, refs, fill = self._size, self._store.refs, self._store.fill
        left: dict[int, int] = {}  # fill marks as the rows before this one will leave them
        by_row = zip(self.runs, self.filled, rows.history, rows.counts, strict=True)
        for row, (run, filled, before, count) in enumerate(by_row):
            added = before + count - filled
            if added <= 0:  # known tokens add nothing
                continue
            inside = filled % size  # of a last page that is not full
            written = inside + added  # tokens, from the start of the first page that is written
            pages, copies = -(-written // size), False
            if inside:
                tail, mark = run.last, written if written < size else size
                if refs.item(tail) == 1:
                    self._own_marks.append((tail, mark))
                elif left.get(tail, fill.item(tail)) == inside:
                    self._marks.append((tail, mark))
                    left[tail] = mark
                else:
                    copies = True
                pages -= 0 if copies else 1
            if pages:
                self._growing.append(_Growth(row, pages, copies, (written - 1) % size + 1))

    @property
    def takes(self) -> int:
        return sum([each.pages for each in self._growing])

    def apply(self, taken: Ids) -> None:
        """Use the entries taken: copy shared tails, append the new pages, and set the fill marks that others see."""
        self.taken, fill = taken, self._store.fill
        for tail, mark in self._marks:
            self._old_marks.append((tail, fill.item(tail)))
            fill[tail] = mark
        for row, pages, copies, _ in self._growing:
            old, new, taken = self.runs[row], taken[:pages], taken[pages:]
            kept = old.ids
            if copies:
                self._store.copy(kept[-1:], new[:1])
                kept = kept[:-1]
            self._old[row], self.runs[row] = old, Run(old.first, np.concatenate([kept, new]))

    def finish(self) -> None:
        """Give the states their new runs, what fell out of reach included, and set the other fill marks."""
        fill = self._store.fill
        for tail, mark in self._own_marks:
            fill[tail] = mark
        for row, pages, copies, filled in self._growing:
            run = self._states[row].runs[self.unit] = self.runs[row]
            fill[run.ids[-pages:]] = self._size
            fill[run.ids[-1]] = filled
            if copies:
                self._store.release(self._old[row].ids[-1:])

    def abort(self) -> None:
        self._store.release(self.taken)
        for tail, mark in reversed(self._old_marks):
            self._store.fill[tail] = mark


class Reservation:
    """The pages and slots that one forward over `batch` reads and writes."""

    def __init__(self, pool: Pool, batch: Batch, cuts: Cuts | None = None) -> None:
        self.pool = pool
        self.states = [state for state, _ in batch]
        if len(set(self.states)) != len(self.states):
            raise StateError("a state is twice in one step; give each sequence a state of its own (fork)")
        self.rows = Rows(tuple([len(tokens) for _, tokens in batch]), tuple([state.length for state in self.states]))
        self._expect_usable(cuts)
        self._appends = [_Appends(pool, unit, self.states, self.rows) for unit in pool.page_stores]
        movers, copiers = self._plan_slots()
        needs = [0] * len(pool.stores)
        for append in self._appends:
            needs[append.unit] = append.takes
        if pool.slot_store is not None:
            needs[pool.slot_store] = len(movers) + len(copiers)
        taken = pool.take(needs)  # the only thing here that can fail
        for append in self._appends:
            append.apply(taken[append.unit])
        slots = taken[pool.slot_store].tolist() if pool.slot_store is not None else []
        self._points = self._take_points(cuts or (), len(slots))
        self._new_slots: dict[State, int] = dict(zip(movers, slots, strict=False))
        for state, slot in zip(copiers, slots[len(movers) :], strict=True):
            state.own_copy(slot)
        for state in self.states:
            state.condition = "in a step"
        self._recordings: Recordings | None = None
        pool.register(self)

    def references(self) -> Iterator[tuple[int, Ids]]:
        """What was taken and is no state's yet."""
        for append in self._appends:
            yield append.unit, append.taken
        for slot in self._taken_slots():
            yield from self.pool.slot_reference(slot)

    def _taken_slots(self) -> list[int | None]:
        return [*self._new_slots.values(), *(slot for points in self._points.values() for slot in points.values())]

    def moved(self, unit: int, where: Ids) -> None:
        raise AssertionError("entries are moved between steps only")

    def _expect_usable(self, cuts: Cuts | None) -> None:
        for state in self.states:
            assert state.pool is self.pool, "a state of another pool"
            if state.transaction is None or state.condition == "in a step":
                state.expect_ready()
            else:
                state.transaction.expect_feedable()
        for state, count, wanted in zip(self.states, self.rows.counts, cuts or (), strict=False):
            if wanted and state.transaction is not None:
                raise StateError("a state in a transaction takes no cuts; commit first")
            end = state.length + count
            if any(not state.length < cut <= end for cut in wanted):
                raise StateError(
                    f"cuts {list(wanted)} are not all among the lengths ({state.length}, {end}] of this step"
                )

    def _plan_slots(self) -> tuple[list[State], list[State]]:
        """The states that will write a new slot, and those that need a copy of the one they share."""
        if self.pool.slot_store is None:
            return [], []
        refs = self.pool.stores[self.pool.slot_store].refs
        movers: list[State] = []
        copiers: list[State] = []
        groups: dict[int, list[State]] = {}
        for state, count in zip(self.states, self.rows.counts, strict=True):
            if not count:
                continue
            if state.slot is None:
                movers.append(state)
            elif refs.item(state.slot) > 1:
                groups.setdefault(state.slot, []).append(state)
        for slot, group in groups.items():
            if refs[slot] == len(group):
                copiers += group[:-1]
            else:
                copiers += [state for state in group if state.transaction is not None]
                movers += [state for state in group if state.transaction is None]
        return movers, copiers

    def _take_points(self, cuts: Cuts, taken: int) -> dict[int, dict[int, int | None]]:
        """For each row the lengths that will be points, with the slot of each; None where none of its own is needed.

        Points get only the slots that there are to spare: the latest cuts come first, others are skipped.
        """
        points: dict[int, dict[int, int | None]] = {row: {} for row, wanted in enumerate(cuts) if wanted}
        spare = self.pool.spare_slots + taken if points else 0  # those are owed until their states have them
        for row in points:
            end = self.rows.history[row] + self.rows.counts[row]
            for cut in sorted(set(cuts[row]), reverse=True):
                if self.pool.slot_store is None:
                    points[row][cut] = None
                elif spare > 0:  # at the end the point shares the state's own slot, and the state will need another
                    points[row][cut] = None if cut == end else int(self.pool.stores[self.pool.slot_store].take(1)[0])
                    spare -= 1
        return points

    def step(self, tokens: Ids, masks: tuple[Mask | None, ...] | None, given: Tensor | None) -> Step:
        runs = {append.unit: append.runs for append in self._appends}
        known = {append.unit: append.filled for append in self._appends}
        if self.pool.slot_store is None:
            numbers = HostNumbers(self.pool, self.rows, tokens, runs, known)
            return Step(self.pool, self.rows, numbers, masks=masks, given=given, states=tuple(self.states))
        scratch = self.pool.stores[self.pool.slot_store].scratch
        rows, cut = self._with_cuts() if self._points else (self.rows, ())
        recorded = tuple([state.transaction is not None for state in self.states])
        self._recordings = Recordings(self.pool)
        read = tuple([scratch if state.slot is None else state.slot for state in self.states])
        write = [  # nobody looks at what becomes of a state in a transaction
            scratch if kept else self._new_slots.get(state, slot)
            for state, slot, kept in zip(self.states, read, recorded, strict=True)
        ]
        return Step(
            self.pool,
            rows,
            HostNumbers(self.pool, rows, tokens, runs, known),
            read=read,
            write=tuple(write),
            cut=cut,
            recorded=recorded,
            recordings=self._recordings,
            masks=masks,
            given=given,
            states=tuple(self.states),
        )

    def _with_cuts(self) -> tuple[Rows, tuple[tuple[int, ...], ...]]:
        """The rows with their cuts, and the slots of these. Those at the end of a row need none of their own."""
        inner = [
            sorted((c, s) for c, s in self._points.get(row, {}).items() if s is not None)
            for row in range(len(self.states))
        ]
        offsets = [tuple(cut - h for cut, _ in each) for each, h in zip(inner, self.rows.history, strict=True)]
        rows = replace(self.rows, cuts=tuple(offsets)) if any(offsets) else self.rows
        return rows, tuple(tuple(slot for _, slot in each) for each in inner)

    def finish(self) -> None:
        """The forward is done: every state is at its new length, and what fell out of reach is given back."""
        self.pool.unregister(self)
        for append in self._appends:
            append.finish()
        self._move_on()
        try:
            for row, points in self._points.items():
                if self.states[row].length in points:
                    self.states[row].settle()  # before its slot is shared
        finally:
            for row, state in enumerate(self.states):
                if state.transaction is None:
                    self._set_points(state, self._points.get(row, {}))
                    state.trim()

    def _move_on(self) -> None:
        """Every state, or its transaction, is told what became of it."""
        recordings = self._recordings
        journal = None if recordings is None else recordings.journal
        after = self._recorded_at() if recordings is None or journal is None else recordings.after
        for state, count, owed in zip(self.states, self.rows.counts, after, strict=True):
            slot, transaction = self._new_slots.get(state), state.transaction
            if transaction is not None:
                transaction.was_fed(count, recordings if journal is None else journal.all, owed)
                transaction.target = slot
                state.condition = "in a transaction"
                continue
            if slot is not None:
                self.pool.release(self.pool.slot_reference(state.slot))
                state.slot = slot
            state.length += count
            state.known = max(state.known, state.length)
            state.condition = "ready"
            if journal is not None and journal.late.parts:
                state.owes, state.owed = journal.late, owed

    def _recorded_at(self) -> Iterator[tuple[int, int]]:
        """Where each row's tokens are among those recorded, or among all where these are short, and how many."""
        short, at = self.rows.are_short, 0
        for state, count in zip(self.states, self.rows.counts, strict=True):
            yield at, count
            at += count if state.transaction is not None or short else 0

    def _set_points(self, state: State, points: dict[int, int | None]) -> None:
        """Save what it takes to resume at each point, while the windows before it are still there."""
        windows = [unit for unit in state.runs if self.pool.stores[unit].unit.reach is not None] if points else []
        for length, slot in sorted(points.items()):
            if length == state.length and (state.owes is not None or state.condition != "ready"):
                continue  # it could not be settled
            runs = dict.fromkeys(state.runs, EMPTY)
            for unit in windows:
                start = self.pool.stores[unit].unit.earliest(length)
                runs[unit] = state.runs[unit].part(*self.pool.layout.pages(start, length))
            state.forget(length)
            saved = state.slot if length == state.length else slot
            state.points[length] = Snapshot(self.pool, length, length, runs, saved)
            self.pool.release(self.pool.slot_reference(slot))

    def abort(self) -> None:
        """The forward did not happen: give everything back. A slot written in place cannot be put back."""
        self.pool.unregister(self)
        for append in self._appends:
            append.abort()
        recordings = self._recordings
        journal, after = (None, []) if recordings is None else (recordings.journal, recordings.after)
        for slot in self._taken_slots():
            self.pool.release(self.pool.slot_reference(slot))
        for row, (state, count) in enumerate(zip(self.states, self.rows.counts, strict=True)):
            if state.condition == "broken":  # before the forward began
                continue
            if state.transaction is not None:
                state.condition = "in a transaction"
                if journal is not None and after[row][1] > count:  # it failed when all was done: what it owed it owes
                    state.owes, state.owed = journal.all, (after[row][0], after[row][1] - count)
            else:
                in_place = count > 0 and state.slot is not None and state not in self._new_slots
                state.condition = "broken" if in_place else "ready"
