"""Reservation: the memory one forward may write, taken before it starts.

Everything the forward can need (new pages, copies of shared tails, slots) is taken at once: either all of it is
there, or PoolFull is raised and nothing has changed. `finish()` moves the states on; `abort()` puts everything back.

A shared last page is appended to in place by whoever is exactly at its fill mark — the others do not look past their
own length — and copied first by anyone else. So sharing is token-granular whatever the page size is. A slot is
written in place by its only holder; anyone else reads the shared one and writes another.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bough.errors import StateError
from bough.ops.attention import Mask
from bough.ops.ragged import Rows
from bough.state.live import EMPTY, Run, State
from bough.state.pool import Ids, Pool, Store
from bough.state.step import Step

Batch = Sequence[tuple[State, Sequence[int]]]


@contextmanager
def forward(pool: Pool, batch: Batch, masks: tuple[Mask | None, ...] | None = None) -> Iterator[Step]:
    """The step that feeds each state its tokens. States move on when the body ends, and stay when it raises."""
    tokens = torch.tensor([token for _, tokens in batch for token in tokens], dtype=torch.int64, device=pool.device)
    if masks is not None and len(masks) != len(batch):
        raise ValueError(f"{len(masks)} masks for {len(batch)} rows; give each row one, or None")
    reservation = Reservation(pool, batch)
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
        self.run = Run(self.old.first, np.concatenate([kept, ids]))
        written = self.run.ids[self.state.length // page_tokens - self.run.first :]
        self.store.fill[written] = page_tokens
        self.store.fill[written[-1]] = self.end - (self.run.end - 1) * page_tokens

    def finish(self, page_tokens: int) -> None:
        """Give the state its new run, less the pages that lie wholly before its reach."""
        if self.copies_tail:
            self.store.release(self.old.ids[-1:])
        first = self.store.unit.earliest(self.end) // page_tokens
        passed = first - self.run.first
        if passed:
            self.store.release(self.run.ids[:passed])
        self.state.runs[self.unit] = Run(first, self.run.ids[passed:])

    def abort(self) -> None:
        self.store.release(self.taken)
        if len(self.old.ids) and not self.copies_tail:
            self.store.fill[self.old.ids[-1]] = self.old_fill


class Reservation:
    """The pages and slots that one forward over `batch` reads and writes."""

    def __init__(self, pool: Pool, batch: Batch) -> None:
        self.pool = pool
        self.states = [state for state, _ in batch]
        if len(set(self.states)) != len(self.states):
            raise StateError("a state is twice in one step; give each sequence a state of its own (fork)")
        for state in self.states:
            assert state.pool is pool, "a state of another pool"
            state.expect_ready()
        self.rows = Rows(tuple(len(tokens) for _, tokens in batch), tuple(state.length for state in self.states))
        self._appends = self._plan()
        moved = [s for s in self._active if self._needs_slot(s)]
        needs = [0] * len(pool.stores)
        for append in self._appends:
            needs[append.unit] += append.takes
        if pool.slot_store is not None:
            needs[pool.slot_store] = len(moved)
        taken = pool.take(needs)  # the only thing here that can fail
        for append in self._appends:
            ids = taken[append.unit]
            append.apply(ids[: append.takes], pool.layout.page_tokens)
            taken[append.unit] = ids[append.takes :]
        slots = taken[pool.slot_store].tolist() if pool.slot_store is not None else []
        self._new_slots: dict[State, int] = dict(zip(moved, slots, strict=True))
        for state in self.states:
            state.condition = "in a step"
        pool.register(self)

    def references(self) -> Iterator[tuple[int, Ids]]:
        """What was taken and is no state's yet."""
        for append in self._appends:
            yield append.unit, append.taken
        if self.pool.slot_store is not None:
            yield self.pool.slot_store, np.array([*self._new_slots.values()], np.int64)

    @property
    def _active(self) -> Iterator[State]:
        return (state for state, count in zip(self.states, self.rows.counts, strict=True) if count)

    def _plan(self) -> list[_Append]:
        page_tokens = self.pool.layout.page_tokens
        marks: dict[tuple[int, int], int] = {}  # fill marks as the rows before this one will leave them
        appends = []
        for state, count in zip(self.states, self.rows.counts, strict=True):
            for unit, run in state.runs.items() if count else ():
                store, inside, copies = self.pool.stores[unit], state.length % page_tokens, False
                if inside:
                    tail = int(run.ids[-1])
                    mark = marks.get((unit, tail), int(store.fill[tail]))
                    copies = mark != inside and int(store.refs[tail]) > 1
                    if not copies:
                        marks[unit, tail] = min(page_tokens, inside + count)
                end = state.length + count
                new_pages = -(-end // page_tokens) - -(-state.length // page_tokens)
                appends.append(_Append(state, store, unit, run, end, new_pages, copies))
        return appends

    def _needs_slot(self, state: State) -> bool:
        if self.pool.slot_store is None:
            return False
        return state.slot is None or int(self.pool.stores[self.pool.slot_store].refs[state.slot]) > 1

    def step(self, tokens: Tensor, masks: tuple[Mask | None, ...] | None = None) -> Step:
        runs = {unit: [state.runs[unit] for state in self.states] for unit in self.pool.page_stores}
        row_of = {state: row for row, state in enumerate(self.states)}
        for append in self._appends:
            runs[append.unit][row_of[append.state]] = append.run
        read: tuple[int, ...] = ()
        write: tuple[int, ...] = ()
        if self.pool.slot_store is not None:
            scratch = self.pool.stores[self.pool.slot_store].scratch
            read = tuple(scratch if state.slot is None else state.slot for state in self.states)
            write = tuple(self._new_slots.get(state, r) for state, r in zip(self.states, read, strict=True))
        return Step.of(self.pool, self.rows, tokens, runs, read, write, masks)

    def finish(self) -> None:
        """The forward is done: every state is at its new length, and what fell out of reach is given back."""
        self.pool.unregister(self)
        for append in self._appends:
            append.finish(self.pool.layout.page_tokens)
        for state, slot in self._new_slots.items():
            if state.slot is not None:
                self._release_slot(state.slot)
            state.slot = slot
        for state, count in zip(self.states, self.rows.counts, strict=True):
            state.length += count
            state.condition = "ready"

    def abort(self) -> None:
        """The forward did not happen: give everything back. A slot written in place cannot be put back."""
        self.pool.unregister(self)
        for append in self._appends:
            append.abort()
        for slot in self._new_slots.values():
            self._release_slot(slot)
        for state, count in zip(self.states, self.rows.counts, strict=True):
            in_place = count > 0 and state.slot is not None and state not in self._new_slots
            state.condition = "broken" if in_place else "ready"

    def _release_slot(self, slot: int) -> None:
        assert self.pool.slot_store is not None
        self.pool.stores[self.pool.slot_store].release(np.array([slot], np.int64))
