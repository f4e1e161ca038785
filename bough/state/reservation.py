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
from dataclasses import dataclass, replace

import numpy as np

from bough.errors import StateError
from bough.ops.attention import Mask
from bough.ops.ragged import Rows
from bough.state.live import State
from bough.state.pool import Pool
from bough.state.recordings import Recordings
from bough.state.snapshot import Snapshot
from bough.state.step import HostNumbers, Step
from bough.state.store import EMPTY, Ids, Run, Store

Batch = Sequence[tuple[State, Sequence[int]]]
Cuts = Sequence[Sequence[int]]  # for each row, the lengths at which it shall be resumable


@contextmanager
def forward(
    pool: Pool,
    batch: Batch,
    masks: tuple[Mask | None, ...] | None = None,
    cuts: Cuts | None = None,
    *,
    settled: bool = True,
) -> Iterator[Step]:
    """The step that feeds each state its tokens. States move on when the body ends, and stay when it raises.

    At the lengths in `cuts` a state gets a point, as far as there are slots to spare. A state in a transaction moves on
    when that is committed. States that owe something are settled before, or it is for the body to see to that.
    """
    tokens = np.array([token for _, tokens in batch for token in tokens], np.int64)
    for name, each in (("masks", masks), ("cuts", cuts)):
        if each is not None and len(each) != len(batch):
            raise ValueError(f"{len(each)} {name} for {len(batch)} rows; give each row its own")
    for state in (state for state, _ in batch if settled):
        state.settle()
    reservation = Reservation(pool, batch, cuts)
    try:
        yield reservation.step(tokens, masks)
    except BaseException:
        reservation.abort()
        raise
    reservation.finish()


@dataclass(slots=True)
class _Append:
    """What one row adds to one page group. The state itself changes only when the reservation finishes."""

    state: State
    store: Store
    unit: int
    old: Run
    filled: int  # tokens whose entries are there before the step
    end: int  # the state's length after the step
    new_pages: int
    copies_tail: bool
    old_fill: int = 0  # of a tail that is appended to in place; what abort() puts back
    run: Run = EMPTY  # the state's pages after the step, those out of reach still included

    @property
    def takes(self) -> int:
        return self.new_pages + self.copies_tail

    @property
    def taken(self) -> Ids:
        return self.run.ids[len(self.run.ids) - self.takes :]

    def apply(self, ids: Ids, page_tokens: int) -> None:
        """Use the entries taken: copy a shared tail, append the new pages, and set the fill marks."""
        kept = self.old.ids
        if self.copies_tail:
            self.store.copy(kept[-1:], ids[:1])
            kept = kept[:-1]
        elif len(kept):
            self.old_fill = int(self.store.fill[kept[-1]])
        self.run = Run(self.old.first, np.concatenate([kept, ids])) if len(ids) else self.old
        written = self.run.ids[self.filled // page_tokens - self.run.first :]
        self.store.fill[written] = page_tokens
        self.store.fill[written[-1]] = self.end - (self.run.end - 1) * page_tokens

    def finish(self) -> None:
        """Give the state its new run, what fell out of reach included."""
        if self.copies_tail:
            self.store.release(self.old.ids[-1:])
        self.state.runs[self.unit] = self.run

    def abort(self) -> None:
        self.store.release(self.taken)
        if len(self.old.ids) and not self.copies_tail:
            self.store.fill[self.old.ids[-1]] = self.old_fill


class Reservation:
    """The pages and slots that one forward over `batch` reads and writes."""

    def __init__(self, pool: Pool, batch: Batch, cuts: Cuts | None = None) -> None:
        self.pool = pool
        self.states = [state for state, _ in batch]
        if len(set(self.states)) != len(self.states):
            raise StateError("a state is twice in one step; give each sequence a state of its own (fork)")
        self.rows = Rows(tuple(len(tokens) for _, tokens in batch), tuple(state.length for state in self.states))
        self._expect_usable(cuts)
        self._appends = self._plan()
        movers, copiers = self._plan_slots()
        needs = [0] * len(pool.stores)
        for append in self._appends:
            needs[append.unit] += append.takes
        if pool.slot_store is not None:
            needs[pool.slot_store] = len(movers) + len(copiers)
        taken = pool.take(needs)  # the only thing here that can fail
        for append in self._appends:
            ids = taken[append.unit]
            append.apply(ids[: append.takes], pool.layout.page_tokens)
            taken[append.unit] = ids[append.takes :]
        slots = taken[pool.slot_store].tolist() if pool.slot_store is not None else []
        self._points = self._take_points(
            cuts, pool.spare_slots + len(slots)
        )  # those are owed until their states have them
        self._new_slots: dict[State, int] = dict(zip(movers, slots, strict=False))
        for state, slot in zip(copiers, slots[len(movers) :], strict=True):
            state.own_copy(slot)
        for state in self.states:
            state.condition = "in a step"
        pool.register(self)

    def references(self) -> Iterator[tuple[int, Ids]]:
        """What was taken and is no state's yet."""
        for append in self._appends:
            yield append.unit, append.taken
        for slot in [*self._new_slots.values(), *(slot for points in self._points for slot in points.values())]:
            yield from self.pool.slot_reference(slot)

    def moved(self, unit: int, where: Ids) -> None:
        raise AssertionError("entries are moved between steps only")

    @property
    def _active(self) -> Iterator[State]:
        return (state for state, count in zip(self.states, self.rows.counts, strict=True) if count)

    def _expect_usable(self, cuts: Cuts | None) -> None:
        for row, state in enumerate(self.states):
            assert state.pool is self.pool, "a state of another pool"
            wanted = cuts[row] if cuts else ()
            if state.transaction is None or state.condition == "in a step":
                state.expect_ready()
            else:
                state.transaction.expect_feedable()
                if wanted:
                    raise StateError("a state in a transaction takes no cuts; commit first")
            end = state.length + self.rows.counts[row]
            if any(not state.length < cut <= end for cut in wanted):
                raise StateError(
                    f"cuts {list(wanted)} are not all among the lengths ({state.length}, {end}] of this step"
                )

    def _plan(self) -> list[_Append]:
        page_tokens = self.pool.layout.page_tokens
        marks: dict[tuple[int, int], int] = {}  # fill marks as the rows before this one will leave them
        appends = []
        for state, count in zip(self.states, self.rows.counts, strict=True):
            for unit, run in state.runs.items():
                filled, end = state.filled(unit), state.length + count
                if end <= filled:
                    continue  # no tokens, or known ones
                store, inside, copies = self.pool.stores[unit], filled % page_tokens, False
                if inside:
                    tail = int(run.ids[-1])
                    mark = marks.get((unit, tail), int(store.fill[tail]))
                    copies = mark != inside and int(store.refs[tail]) > 1
                    if not copies:
                        marks[unit, tail] = min(page_tokens, inside + end - filled)
                new_pages = -(-end // page_tokens) - -(-filled // page_tokens)
                appends.append(_Append(state, store, unit, run, filled, end, new_pages, copies))
        return appends

    def _plan_slots(self) -> tuple[list[State], list[State]]:
        """The states that will write a new slot, and those that need a copy of the one they share."""
        movers, copiers = [], []
        groups: dict[int, list[State]] = {}
        for state in self._active if self.pool.slot_store is not None else ():
            if state.slot is None:
                movers.append(state)
            elif not state.owns_slot:
                groups.setdefault(state.slot, []).append(state)
        for slot, group in groups.items():
            if self.pool.slot_refs(slot) == len(group):
                copiers += group[:-1]
            else:
                copiers += [state for state in group if state.transaction is not None]
                movers += [state for state in group if state.transaction is None]
        return movers, copiers

    def _take_points(self, cuts: Cuts | None, spare: int) -> list[dict[int, int | None]]:
        """For each row the lengths that will be points, with the slot of each; None where none of its own is needed.

        Points get only the slots that there are to spare: the latest cuts come first, others are skipped.
        """
        points: list[dict[int, int | None]] = [{} for _ in self.states]
        for row, wanted in enumerate(cuts or ()):
            end = self.rows.history[row] + self.rows.counts[row]
            for cut in sorted(set(wanted), reverse=True):
                if self.pool.slot_store is None:
                    points[row][cut] = None
                elif spare > 0:  # at the end the point shares the state's own slot, and the state will need another
                    points[row][cut] = None if cut == end else int(self.pool.stores[self.pool.slot_store].take(1)[0])
                    spare -= 1
        return points

    def step(self, tokens: Ids, masks: tuple[Mask | None, ...] | None = None) -> Step:
        runs = {unit: [state.runs[unit] for state in self.states] for unit in self.pool.page_stores}
        row_of = {state: row for row, state in enumerate(self.states)}
        for append in self._appends:
            runs[append.unit][row_of[append.state]] = append.run
        known = {unit: [state.filled(unit) for state in self.states] for unit in self.pool.page_stores}
        if self.pool.slot_store is None:
            numbers = HostNumbers(self.pool, self.rows, tokens, runs, known)
            return Step(self.pool, self.rows, numbers, masks=masks, states=tuple(self.states))
        store = self.pool.stores[self.pool.slot_store]
        inner = [sorted((c, s) for c, s in points.items() if s is not None) for points in self._points]
        offsets = [tuple(cut - h for cut, _ in each) for each, h in zip(inner, self.rows.history, strict=True)]
        rows = replace(self.rows, cuts=tuple(offsets)) if any(offsets) else self.rows
        read = tuple(store.scratch if state.slot is None else state.slot for state in self.states)
        recorded, recordings = self._recordings()
        return Step(
            self.pool,
            rows,
            HostNumbers(self.pool, rows, tokens, runs, known),
            read=read,
            write=tuple(self._target(state, r, store.scratch) for state, r in zip(self.states, read, strict=True)),
            cut=tuple(tuple(slot for _, slot in each) for each in inner),
            recorded=recorded,
            recordings=recordings,
            masks=masks,
            states=tuple(self.states),
        )

    def _recordings(self) -> tuple[tuple[bool, ...], Recordings | None]:
        """Which rows are recorded, and where the step keeps their inputs for the transactions to find."""
        recorded = tuple(state.transaction is not None for state in self.states)
        if not any(recorded):
            return recorded, None
        recordings = Recordings(self.pool)
        at = 0
        for state, count in zip(self.states, self.rows.counts, strict=True):
            if state.transaction is not None:
                state.transaction.recordings, state.transaction.at = recordings, at
            at += count if state.transaction is not None or self.rows.are_short else 0
        return recorded, recordings

    def _target(self, state: State, read: int, scratch: int) -> int:
        """The slot that the forward writes; nobody looks at what it makes of a state in a transaction."""
        return scratch if state.transaction is not None else self._new_slots.get(state, read)

    def finish(self) -> None:
        """The forward is done: every state is at its new length, and what fell out of reach is given back."""
        self.pool.unregister(self)
        for append in self._appends:
            append.finish()
        for state, count, points in zip(self.states, self.rows.counts, self._points, strict=True):
            slot = self._new_slots.get(state)
            if state.transaction is not None:
                state.transaction.fed, state.transaction.target = count, slot
                state.condition = "in a transaction"
                continue
            if slot is not None:
                self.pool.release(self.pool.slot_reference(state.slot))
                state.slot = slot
            state.length += count
            state.known = max(state.known, state.length)
            state.condition = "ready"
            self._set_points(state, points)
            for unit, run in state.runs.items():
                state.runs[unit] = self.pool.trim(unit, run, state.filled(unit))

    def _set_points(self, state: State, points: dict[int, int | None]) -> None:
        """Save what it takes to resume at each point, while the windows before it are still there."""
        windows = [unit for unit in state.runs if self.pool.stores[unit].unit.reach is not None]
        for length, slot in sorted(points.items()):
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
        for slot in [*self._new_slots.values(), *(slot for points in self._points for slot in points.values())]:
            self.pool.release(self.pool.slot_reference(slot))
        for state, count in zip(self.states, self.rows.counts, strict=True):
            if state.condition == "broken":  # before the forward began
                continue
            if state.transaction is not None:
                state.transaction.recordings = None
                state.condition = "in a transaction"
            else:
                in_place = count > 0 and state.slot is not None and state not in self._new_slots
                state.condition = "broken" if in_place else "ready"
