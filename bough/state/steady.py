"""Steady: a step of states that go on where only they write.

Most captured steps are of this kind: each state is the only one that refers to its last page and to its slot, and all
are in transactions or none is. Nothing is copied, handed over or shared then; only some pages may have to be taken. It
is planned in one pass, for speed: between two draft rounds the device waits for the host. What becomes of it is what a
Reservation would make of it (reservation.py), and tests hold one against the other.

Code that runs once in some milliseconds finds the processor's caches used for other things, and takes several times as
long as it would again and again. So what counts is how little of it there is.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bough.ops.spans import FEW
from bough.state.live import State
from bough.state.pool import Pool
from bough.state.store import EMPTY, Run

if TYPE_CHECKING:
    from bough.state.fixed import Fixed
    from bough.state.recordings import Journal, Place, Recordings

Tokens = Sequence[int] | NDArray[np.int32]  # of a row; an array where there are many
Batch = Sequence[tuple[State, Tokens]]


class Steady:
    """The rows of such a step."""

    def __init__(self, pool: Pool, unit: int, condition: str) -> None:
        self.pool, self.unit = pool, unit
        self.condition = condition  # of all states
        self.states: list[State] = []
        self.counts: list[int] = []
        self.history: list[int] = []
        self.slots: list[int] = []
        self.runs: list[Run] = []  # after the step
        self.lasts: list[int] = []  # the last page of each before it
        self.tokens: list[int] = []
        self.across: list[tuple[int, list[int]]] = []  # of rows that get pages: their first token, the page of each
        self._growing: list[tuple[int, int, int]] = []  # these rows, how many pages, their first token
        self._taken = EMPTY.ids
        self.places: list[Place] = []

    @property
    def total(self) -> int:
        return len(self.tokens)

    @property
    def drafted(self) -> bool:
        """Whether its states are in transactions."""
        return self.condition == "in a transaction"

    def take(self, journal: "Journal", into: "Recordings") -> None:
        """Take the pages that are missing, or raise PoolFull. What it records goes into a journal, or a part of it."""
        self.places = journal.places(into, self.states, self.counts, self.slots, self.slots)
        if not self._growing:
            return
        size, needs = self.pool.layout.page_tokens, [0] * len(self.pool.stores)
        needs[self.unit] = sum([pages for _, pages, _ in self._growing])
        self._taken = taken = self.pool.take(needs)[self.unit]
        for row, pages, start in self._growing:
            run, inside, new, taken = self.runs[row], self.history[row] % size, taken[:pages], taken[pages:]
            self.runs[row] = Run(run.first, np.concatenate([run.ids, new]))
            written = [run.last, *new.tolist()] if inside else new.tolist()
            self.across.append((start, [written[at // size] for at in range(inside, inside + self.counts[row])]))

    def fill(self, fixed: "Fixed") -> None:
        """Send its numbers."""
        fixed.fill_steady(self)

    def finish(self, journal: "Journal") -> None:
        """The forward is done, and has recorded in a journal: every state, or its transaction, is told."""
        after = journal.took(self.states, self.counts, self.places)
        size, fill = self.pool.layout.page_tokens, self.pool.stores[self.unit].fill
        self._taken = EMPTY.ids  # the states have them, if not all yet
        for row, pages, _ in self._growing:
            self.states[row].runs[self.unit] = self.runs[row]
            fill[self.runs[row].ids[-pages - 1 :]] = size
        by_row = zip(self.states, self.runs, self.history, self.counts, after, strict=True)
        for state, run, before, count, owed in by_row:
            fill[run.last] = (before + count - 1) % size + 1
            if state.transaction is not None:
                state.transaction.was_fed(count, journal.all, owed)
            else:
                state.length = state.known = before + count
                state.owes, state.owed = journal.late, owed

    def abort(self) -> None:
        """The forward did not happen, or nobody knows: give the pages back that no state has yet."""
        self.pool.stores[self.unit].release(self._taken)


def steady(pool: Pool, batch: Batch) -> Steady | None:
    """The step over these rows, if it is a steady one of pages that are all kept, and of slots. Nothing changes yet."""
    if not batch or pool.slot_store is None or len(pool.page_stores) != 1:
        return None
    (unit,), size, condition = pool.page_stores, pool.layout.page_tokens, batch[0][0].condition
    pages, slot_refs, made = pool.stores[unit], pool.stores[pool.slot_store].refs, Steady(pool, unit, condition)
    if pages.unit.reach is not None or condition not in ("ready", "in a transaction"):
        return None
    for state, tokens in batch:
        count, before, slot, open_end = len(tokens), state.length, state.slot, state.transaction
        if state.condition != condition or state.pool is not pool or slot is None or slot_refs.item(slot) > 1:
            return None
        if state.known != before or not 0 < count <= FEW or (open_end is not None and open_end.fed is not None):
            return None
        run, end = state.runs[unit], before + count
        if before % size and pages.refs.item(run.last) > 1:
            return None
        if end > run.end * size:
            made._growing.append((len(made.states), -(-end // size) - run.end, len(made.tokens)))
        made.states.append(state)
        made.counts.append(count)
        made.history.append(before)
        made.slots.append(slot)
        made.runs.append(run)
        made.lasts.append(run.last)
        made.tokens += tokens
    return made if len(set(made.states)) == len(made.states) else None
