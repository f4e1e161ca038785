"""Ahead: the next step of many states, made ready while the device is at work on this one.

Between two draft rounds the device waits for the host, and rounds of the same states, of as many tokens, follow one
another. All that does not depend on how many of its tokens each keeps is written down before that is known: slots, the
pages that there are, with room behind them for those that may come, where each row's tokens are. What is left is
counted for all rows at once.

A draft round can even be launched before anybody knows how many tokens of the one before stand (`begin`): the device
has counted them, and makes the numbers of the round from those that say where each row was (ops/rounds.py). It has
pages for whatever is kept. Until that is known (`land`) all its states are in a step.

Nobody has to say that something has become of a state meanwhile. All that could have is looked at before anything is
done: where a state is not as it was left, but for what a commit of its tokens changes, the step is planned anew
(steady.py). What becomes of it is the same either way, and tests hold one against the other.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter

import numpy as np
from torch import Tensor

from bough.ops.spans import divided, shared_out
from bough.state.fixed import Fixed
from bough.state.live import State
from bough.state.recordings import PLACE, Journal, Recordings
from bough.state.steady import Batch
from bough.state.step import tokens_of
from bough.state.store import EMPTY, Ids, Run
from bough.state.transaction import Transaction

MANY = 6  # rows, from which on this takes less time than to plan them one by one
_looked_at = attrgetter("length", "slot", "condition", "owes", "owed")


class Ahead:
    """A steady step of states that have just been in one, each to be fed as many tokens again."""

    def __init__(
        self, fixed: Fixed, journal: Journal, into: Recordings, states: Sequence[State], counts: Sequence[int]
    ) -> None:
        self.states, self.counts, self.condition = tuple(states), list(counts), states[0].condition
        self._into, self._pool = into, fixed.pool
        (self._unit,), self._size = self._pool.page_stores, self._pool.layout.page_tokens
        self._slots, self._runs = tuple([state.slot for state in states]), [state.runs[self._unit] for state in states]
        self._slot_ids, self._fed = np.array(self._slots), np.array(self.counts)
        self._lasts, self._ends = np.array([(run.last, run.end) for run in self._runs]).T
        self._stretches = np.array(journal.stretches_of(states))
        self._row, self._from_first = tokens_of(tuple(counts))
        rooms = self._ends + -(-self._fed // self._size)  # pages, with all that may come
        self._at = rooms.cumsum() - rooms  # where those of each begin
        self._taken, self._growing = EMPTY.ids, list[tuple[int, int, int]]()  # these rows, from which page on, how many
        self._prepared = fixed.prepare(self._unit, len(states), len(self._row), int(rooms.sum()))
        if self._prepared is None:
            return
        self._numbers = self._prepared.numbers
        self._numbers["start"][:], self._numbers["tokens"][:] = self._fed.cumsum() - self._fed, self._fed
        self._numbers["read"][:], self._numbers["offset"][:] = self._slot_ids, self._at
        if self.condition == "ready":
            self._numbers["write"][:] = self._slot_ids
        self._numbers["pages"][:] = self._pool.stores[self._unit].scratch
        for row, run in enumerate(self._runs):
            self._put(row, run)

    @property
    def total(self) -> int:
        return len(self._row)

    def _put(self, row: int, run: Run) -> None:
        """Write down the pages of a row."""
        at = self._at.item(row)
        self._numbers["pages"][at : at + run.end] = run.ids
        self._runs[row], self._lasts[row], self._ends[row] = run, run.last, run.end

    def is_of(self, batch: Batch) -> bool:
        """Whether it is the step over these rows. Nothing changes yet."""
        if self._prepared is None or len(batch) != len(self.states):
            return False
        states, fed = zip(*batch, strict=True)
        if states != self.states or [*map(len, fed)] != self.counts:
            return False
        lengths, slots, conditions, owes, owed = zip(*map(_looked_at, states), strict=True)
        # Who still owes what was recorded was not fed since, is alone with its slot, and knows no more than its length:
        # whoever changes any of that has it settled first.
        rows = len(states)
        if conditions.count(self.condition) != rows or owes.count(self._into) != rows or slots != self._slots:
            return False
        runs = [state.runs[self._unit] for state in states]
        if runs != self._runs:  # commits have given pages back, or they were moved
            for row, run in enumerate(runs):
                if run is not self._runs[row]:
                    self._put(row, run)
        if self._pool.stores[self._unit].refs[self._lasts].max() > 1:
            return False
        self._history, self._tokens = np.array(lengths), fed
        self._owed = np.fromiter(chain.from_iterable(owed), np.int64, 2 * rows).reshape(rows, 2).T
        return True

    def take(self, journal: Journal, into: Recordings) -> None:
        """Take the pages that are missing, or raise PoolFull. What it records goes into a journal, or a part of it."""
        start, owed = self._owed
        self._places = journal.places_of_many(into, self._stretches, self._slot_ids, start, owed, self._fed)
        self._take_up_to(self._history + self._fed)

    def _take_up_to(self, lengths: Ids) -> None:
        """Take the pages that rows of these lengths lack, and write them down."""
        lacking = -(-lengths // self._size) - self._ends
        rows = (lacking > 0).nonzero()[0]
        if not len(rows):
            return
        needs, many = [0] * len(self._pool.stores), lacking[rows]
        needs[self._unit] = int(many.sum())
        self._taken = self._pool.take(needs)[self._unit]
        self._growing = list(zip(rows.tolist(), self._ends[rows].tolist(), many.tolist(), strict=True))
        table, at = self._numbers["pages"], 0
        for (_, _, pages), start in zip(self._growing, (self._at + self._ends)[rows].tolist(), strict=True):
            table[start : start + pages] = self._taken[at : at + pages]
            at += pages

    def fill(self, fixed: Fixed) -> None:
        """Send its numbers."""
        into, history, fed = self._numbers, self._history, self._fed
        into["history"][:] = history
        for name, values in zip(PLACE, self._places, strict=True):
            into[name][:] = values
        used, row = shared_out(history + fed, max(self.counts), fixed.programs[self._unit])
        into["used"][:], into["first"][:], into["row"][: len(row)] = used, used.cumsum() - used, row
        into["token"][:] = np.fromiter(chain.from_iterable(self._tokens), np.int32, len(self._row))
        position = history[self._row] + self._from_first
        number, inside = np.divmod(position, self._size)
        into["position"][:], into["place"][:] = position, inside
        into["page"][:] = into["pages"][self._at[self._row] + number]
        assert self._prepared is not None
        self._prepared.unsent.send()

    def finish(self, journal: Journal) -> None:
        """The forward is done, and has recorded in a journal: every state, or its transaction, is told."""
        fill, size, at = self._pool.stores[self._unit].fill, self._size, 0
        taken, self._taken = self._taken, EMPTY.ids  # the states have them, if not all yet
        for row, end, pages in self._growing:
            run, new = self._runs[row], taken[at : at + pages]
            grown = Run(run.first, np.concatenate([run.ids, new]))
            self.states[row].runs[self._unit] = grown
            fill[grown.ids[max(0, end - 1) :]] = size
            self._lasts[row], at = grown.last, at + pages
        fill[self._lasts] = (self._history + self._fed - 1) % size + 1
        after = journal.took_many(self._places, self._fed)
        for state, before, count, owed in zip(self.states, self._history.tolist(), self.counts, after, strict=True):
            if state.transaction is not None:
                state.owes = None
                state.transaction.was_fed(count, journal.all, owed)
            else:
                state.length = state.known = before + count
                state.owed = owed

    def abort(self) -> None:
        """The forward did not happen, or nobody knows: give the pages back that no state has yet."""
        self._pool.stores[self._unit].release(self._taken)

    # A round that is launched before it is known where it begins.

    def may_begin(self) -> bool:
        """Whether all states are still in the round before, and have been fed what this one feeds them."""
        if self._prepared is None:
            return False
        for row, state in enumerate(self.states):
            last, run = state.transaction, state.runs.get(self._unit)
            if last is None or state.condition != "in a transaction" or state.slot != self._slots[row] or run is None:
                return False
            if last.fed != self.counts[row] or last.recordings is not self._into:
                return False
            if run is not self._runs[row]:
                self._put(row, run)
        return True

    def take_for_all(self) -> None:
        """Take the pages that are missing if all tokens of the round before are kept, or raise PoolFull."""
        self._history = np.array([state.length for state in self.states])
        self._take_up_to(self._history + 2 * self._fed)
        self._pool.register(self)
        for state in self.states:
            state.condition = "in a step"

    def begin(self, fixed: Fixed, kept: Tensor, chosen: Tensor, tokens: Sequence[int]) -> None:
        """Send its numbers. Each row keeps `kept` [R] tokens of the round before, one at the least.

        It is fed `tokens`; but first, in the place of the first of each row, the one that was `chosen` [T] after those
        that it keeps.
        """
        into, last = self._numbers, [state.transaction for state in self.states]
        start, owed = self._owed = np.array([(each.at, each.before) for each in last if each is not None]).T
        into["history"][:], into["owed_start"][:] = self._history, start
        into["owed"][:] = into["late_owed"][:] = owed
        # Spans for the fewest keys that there can be: of more, each is a little longer, and none is empty.
        used, row = divided(self.counts, (self._history + 1).tolist(), None, fixed.programs[self._unit])
        into["used"][:], into["first"][:], into["row"][: len(row)] = used, np.cumsum(used) - used, row
        into["token"][:] = tokens
        assert self._prepared is not None
        self._prepared.unsent.send()
        fixed.go_on(kept, chosen)

    def land(self, journal: Journal, kept: Sequence[int]) -> list[Transaction]:
        """It is known how many tokens of the round before each row keeps. Returns the transactions they are in now."""
        count, (start, owed) = np.array(kept), self._owed
        assert ((count > 0) & (count <= self._fed)).all()
        places = journal.places_of_many(self._into, self._stretches, self._slot_ids, start, owed + count, self._fed)
        after = journal.took_many(places, self._fed)
        self._give_pages((self._history + count).tolist())
        opened = []
        for state, many, fed, owes in zip(self.states, count.tolist(), self.counts, after, strict=True):
            assert state.transaction is not None
            opened.append(state.transaction.followed(many, fed, owes))
        return opened

    def _give_pages(self, history: Sequence[int]) -> None:
        """Each state gets the pages of its tokens after so many. Others that it might have got go back."""
        self._pool.unregister(self)
        store, size, at, spare = self._pool.stores[self._unit], self._size, 0, [EMPTY.ids]
        taken, self._taken = self._taken, EMPTY.ids
        grown = {row: pages for row, _, pages in self._growing}
        for row, (state, before, count) in enumerate(zip(self.states, history, self.counts, strict=True)):
            run, many = state.runs[self._unit], grown.get(row, 0)
            ids, end = np.concatenate([run.ids, taken[at : at + many]]), -(-(before + count) // size)
            at += many
            if end != run.end:
                state.runs[self._unit] = Run(0, ids[:end])
            spare.append(ids[end:])
            store.fill[ids[before // size : end]] = size
            store.fill[ids[end - 1]] = (before + count - 1) % size + 1
        store.release(np.concatenate(spare))

    def lose(self) -> None:
        """Nobody will know what became of it."""
        self._pool.unregister(self)
        self.abort()
        for state in self.states:
            state.condition = "broken"

    def references(self) -> Iterator[tuple[int, Ids]]:
        """What was taken and is no state's yet."""
        yield self._unit, self._taken

    def moved(self, unit: int, where: Ids) -> None:
        """The device has written them before they were moved."""
        if unit == self._unit:
            self._taken = where[self._taken]
