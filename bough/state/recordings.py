"""Recordings: what a forward kept of its rows' inputs, and who has yet to be moved on by some of it.

A commit decides how many of the recorded tokens move a state's slot on. Whoever looks at the slot next must find that
done (`State.settle`). But where captured forwards will feed the same state again, their recordings last (Journal), and
the next one does that on the way: slots are read once a round, and not for the commit again. Nor are they written every
time: every forward moves what it read on by all that is owed, and stores that once in a while. (Where nothing is
drafted that is so of parts that are late; the others are small, and written at once.)

Invariants:
- What a state owes is recorded in one half of its stretch, from the beginning on; what a forward records goes behind
  it, or to the beginning of the other half once it has been stored. So no kernel writes what another one reads.
- A slot that others see too is owed nothing: whoever shares it has it settled first.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from bough.ops.ragged import NONE, OWED, STRETCH, Recording, Replayed, ReplayedRow
from bough.state.kinds import Replay, SlotPart
from bough.state.pool import Pool
from bough.state.store import Ids

if TYPE_CHECKING:
    from bough.state.live import State

Parts = dict[tuple[int, str], Recording]  # by layer and part


class Recordings:
    """The recorded inputs of one forward, for each layer and part of the slots."""

    def __init__(self, pool: Pool, parts: Parts | None = None) -> None:
        self.pool = pool
        if parts is not None:
            self.parts = parts
        self.lasts = False  # whether it is there until the next forward does what is owed
        self.journal: Journal | None = None  # where a captured forward has recorded them instead
        self.after: list[tuple[int, int]] = []  # and what each row's state owes to it, if all that it was fed is kept

    @cached_property
    def parts(self) -> Parts:
        """Empty ones are made when they are asked for: a captured forward has its own."""
        return {key: Recording() for key in _fields(self.pool)}

    @property
    def is_made(self) -> bool:
        """Whether there is room for all parts, where they last: the first forward makes it."""
        return all(each.inputs for each in self.parts.values())

    @property
    def nbytes(self) -> int:
        return sum(recording.nbytes for recording in self.parts.values())

    def lacking(self, tokens: int) -> list[tuple[int, str]]:
        """The parts of which fewer tokens were recorded."""
        return [key for key, recording in self.parts.items() if recording.tokens < tokens]

    def apart(self, start: int, tokens: int) -> "Recordings":
        """Copies of what was recorded of some tokens."""
        some = slice(start, start + tokens)
        parts = {key: Recording(tuple([each[some].clone() for each in r.inputs])) for key, r in self.parts.items()}
        return Recordings(self.pool, parts)

    def settle(self, states: Iterable["State"]) -> None:
        """Move those of them on that owe something of it. One whose slot is left half-way is broken."""
        states = [state for state in states if state.owes is self]
        rows, conditions = [], [state.condition for state in states]
        for state in states:
            assert state.slot is not None
            rows.append(ReplayedRow(state.slot, *state.owed))
            state.owes, state.condition = None, "broken"
        if rows:
            self._replay(rows)
        for state, condition in zip(states, conditions, strict=True):
            state.condition = condition

    def _replay(self, rows: list[ReplayedRow]) -> None:
        """The layers whose parts are alike together."""
        assert self.pool.slot_store is not None
        store = self.pool.stores[self.pool.slot_store]
        alike: dict[tuple[Replay, tuple[int, ...]], list[Replayed]] = {}
        for key, recording in self.parts.items():
            part = store.unit.fields[key].part
            assert isinstance(part, SlotPart)
            alike.setdefault((part.replay, part.shape), []).append((store.parts[key], recording.inputs))
        for (replay, _), layers in alike.items():
            replay(layers, rows)


# What a captured forward does with the slot of one row: with the parts that are late, and with the others.
Place = tuple[int, int, int, int, int, int]
PLACE = {  # its names, and what stands there for a row that records nothing
    "owed_start": 0,  # where what the row owes begins in the journal
    "record": 0,  # and where its own tokens are recorded
    "owed": 0,  # tokens that the slot is first moved on by
    "keep": NONE,  # the slot that this is stored to
    "late_owed": 0,
    "late_keep": NONE,
}


class Journal:
    """What captured forwards record of up to so many states: each has a stretch of two halves."""

    def __init__(self, pool: Pool, states: int = 0) -> None:
        self.states, most = states, states * STRETCH
        parts = {key: Recording(most=most, late=_is_late(pool, key)) for key in _fields(pool)}
        self.all = Recordings(pool, parts)
        self.late = Recordings(pool, {key: each for key, each in parts.items() if each.late})
        self.all.lasts = self.late.lasts = True
        self._stretches: dict[State, int] = {}

    def settle(self) -> None:
        """Move all states on that owe something."""
        self.all.settle(self._stretches)
        self.late.settle(self._stretches)

    def places(
        self,
        into: Recordings,
        states: Sequence["State"],
        counts: Sequence[int],
        read: Sequence[int],
        write: Sequence[int],
    ) -> list[Place]:
        """What a forward that records `into` all parts, or the late ones, does with the slots of these states.

        All else that they owe is settled.
        """
        stretches, whole, late, places = self.stretches_of(states), self.all, self.late, []
        for state, first, count, slot, to in zip(states, stretches, counts, read, write, strict=True):
            owes = state.owes
            if owes is not late and owes is not into and owes is not None:
                state.settle()
                owes = None
            start, owed = (first, 0) if owes is None else state.owed
            # When it is stored depends on the state alone: the same text gives the same bits whatever was before.
            stores = owed and (owes is not into or owed + count > OWED)
            record = first + (OWED if start == first else 0) if stores else start + owed
            early = owed if owes is whole else 0
            if state.transaction is not None:  # the slot stays where it is
                keep, late_keep = slot if early and stores else NONE, slot if stores else NONE
            else:
                keep, late_keep = NONE, to if stores or to != slot or not state.length else NONE
            places.append((start, record, early, keep, owed, late_keep))
        return places

    def took(self, states: Sequence["State"], counts: Sequence[int], places: Sequence[Place]) -> list[tuple[int, int]]:
        """A forward did what they say. Returns what each state will owe if all that it was fed is kept."""
        after = []
        for state, count, (start, record, _, _, owed, late_keep) in zip(states, counts, places, strict=True):
            state.owes = None
            stays = owed > 0 and late_keep == NONE
            after.append((start, owed + count) if stays else (record, count))
        return after

    def took_many(self, places: tuple[Ids | int, ...], counts: Ids) -> list[tuple[int, int]]:
        """The same of the places of many, of whom each owes something. Their states are as before."""
        start, record, _, _, owed, keep = places
        stays = np.equal(keep, NONE)
        at, many = np.where(stays, start, record), np.where(stays, owed, 0) + counts
        return list(zip(at.tolist(), many.tolist(), strict=True))

    def places_of_many(
        self, into: Recordings, stretches: Ids, slots: Ids, start: Ids, owed: Ids, counts: Ids
    ) -> tuple[Ids | int, ...]:
        """The places of states that owe `into` alone, from where on and how much, and go on in their slots."""
        stores = owed + counts > OWED
        record = np.where(stores, stretches + OWED * (start == stretches), start + owed)
        keep = np.where(stores, slots, NONE)
        early = (owed, keep) if into is self.all else (0, NONE)
        return start, record, *early, owed, keep

    def stretches_of(self, states: Sequence["State"]) -> list[int]:
        """Where that of each begins."""
        if lacking := [state for state in states if state not in self._stretches]:
            self._give_stretches(lacking, states)
        return [self._stretches[state] for state in states]

    def _give_stretches(self, lacking: Sequence["State"], states: Sequence["State"]) -> None:
        """Give some of the states theirs: of those that nobody has, or that others do not need now."""
        all_of_them = range(0, self.states * STRETCH, STRETCH)
        free = sorted(set(all_of_them) - set(self._stretches.values()), reverse=True)
        others = [other for other in self._stretches if other not in states]
        others.sort(key=lambda other: other.condition != "released")
        for other in others[: max(0, len(lacking) - len(free))]:
            self._clear(other)
            free.append(self._stretches.pop(other))
        for state in lacking:
            self._stretches[state] = free.pop()

    def _clear(self, state: "State") -> None:
        """What is recorded of a state is settled; or, if its commit is yet to come, kept elsewhere."""
        if state.owes in (self.all, self.late):
            state.settle()
        open_end = state.transaction
        if open_end is not None and open_end.recordings is self.all:
            open_end.recordings = self.all.apart(open_end.at, open_end.before + (open_end.fed or 0))
            open_end.at = 0


def _is_late(pool: Pool, key: tuple[int, str]) -> bool:
    assert pool.slot_store is not None
    part = pool.stores[pool.slot_store].unit.fields[key].part
    return isinstance(part, SlotPart) and part.late


def _fields(pool: Pool) -> Iterable[tuple[int, str]]:
    return () if pool.slot_store is None else pool.stores[pool.slot_store].unit.fields
