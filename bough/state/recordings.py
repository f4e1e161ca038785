"""Recordings: what a forward kept of its rows' inputs, and who has yet to be moved on by some of it.

A commit decides how many of the recorded tokens move a state's slot on. Whoever looks at the slot next must find that
done (`State.settle`). But where captured forwards will feed the same state again, their recordings last (Journal), and
the next one does that on the way: slots are read and written once a round, not once for the draft and once for its
commit. Parts that are late are not even written once a forward: every forward moves what it read on by all that is
owed, and stores that once in a while.

Invariants:
- What a state owes is recorded in one half of its stretch, from the beginning on; what a forward records goes behind
  it, or to the beginning of the other half once it has been stored. So no kernel writes what another one reads.
- A slot that others see too is owed nothing: whoever shares it has it settled first.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from bough.ops.ragged import Recording, Replayed, ReplayedRow
from bough.ops.spans import FEW
from bough.state.kinds import Replay, SlotPart
from bough.state.pool import Pool

if TYPE_CHECKING:
    from bough.state.live import State
    from bough.state.step import Step

NONE = -1  # no slot
HALF = FEW  # tokens that a half of a stretch has room for
STRETCH = 2 * HALF
EVERY = 5  # tokens that may be owed: to add up more of them, time after time, takes longer than to store what they make
Parts = dict[tuple[int, str], Recording]  # by layer and part


class Recordings:
    """The recorded inputs of one forward, for each layer and part of the slots."""

    def __init__(self, pool: Pool, parts: Parts | None = None) -> None:
        self.pool = pool
        if parts is not None:
            self.parts = parts
        self.journal: Journal | None = None  # where a captured forward has recorded them instead
        self.after: dict[State, tuple[int, int]] = {}  # and what each state owes to it, if all that it was fed is kept
        self.owing: dict[State, tuple[int, int]] = {}  # from which token on, and how many
        self.least = 0  # tokens that are known to be recorded of all parts

    @cached_property
    def parts(self) -> Parts:
        """Empty ones are made when they are asked for: a captured forward has its own."""
        return {key: Recording() for key in _fields(self.pool)}

    @property
    def kept(self) -> "Recordings":
        """Where the inputs are kept."""
        return self if self.journal is None else self.journal.all

    @property
    def is_made(self) -> bool:
        """Whether there is room for all parts, where they last: the first forward makes it."""
        return all(each.inputs for each in self.parts.values())

    @property
    def nbytes(self) -> int:
        return sum(recording.nbytes for recording in self.parts.values())

    def lacking(self, tokens: int) -> list[tuple[int, str]]:
        """The parts of which fewer tokens were recorded."""
        if tokens <= self.least:
            return []
        return [key for key, recording in self.parts.items() if recording.tokens < tokens]

    def apart(self, start: int, tokens: int) -> "Recordings":
        """Copies of what was recorded of some tokens."""
        some = slice(start, start + tokens)
        parts = {key: Recording(tuple([each[some].clone() for each in r.inputs])) for key, r in self.parts.items()}
        return Recordings(self.pool, parts)

    def owe(self, state: "State", start: int, tokens: int) -> None:
        """The state is to be moved on by these tokens; if it did not owe that, it would be at its length."""
        self.owing[state], state.owes = (start, tokens), self

    def forgive(self, state: "State") -> None:
        """The state was moved on, or will never be."""
        self.owing.pop(state, None)
        state.owes = None

    def settle(self, states: Iterable["State"] | None = None) -> None:
        """Move states on by what they owe: these, or all. One whose slot is left half-way is broken."""
        states = list(self.owing if states is None else states)
        rows, conditions = [], [state.condition for state in states]
        for state in states:
            assert state.slot is not None
            rows.append(ReplayedRow(state.slot, *self.owing[state]))
            self.forgive(state)
            state.condition = "broken"
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


class Place(NamedTuple):
    """What a captured forward does with the slot of one row: with the parts that are late, and with the others."""

    owed_start: int = 0  # where what the row owes begins in the journal
    record: int = 0  # and where its own tokens are recorded
    owed: int = 0  # tokens that the slot is first moved on by
    keep: int = NONE  # the slot that this is stored to
    late_owed: int = 0
    late_keep: int = NONE


class Journal:
    """What captured forwards record of up to so many states: each has a stretch of two halves."""

    def __init__(self, pool: Pool, states: int = 0) -> None:
        self.states, most = states, states * STRETCH
        parts = {key: Recording(most=most, late=_is_late(pool, key)) for key in _fields(pool)}
        self.all = Recordings(pool, parts)
        self.late = Recordings(pool, {key: each for key, each in parts.items() if each.late})
        self.all.least = self.late.least = most
        self._stretches: dict[State, int] = {}

    def settle(self) -> None:
        """Move all states on that owe something."""
        self.all.settle()
        self.late.settle()

    def places(self, step: "Step", into: Recordings) -> list[Place]:
        """What a forward that records `into` all parts, or the late ones, does with its slots. All else is settled."""
        self._give_stretches(step.states)
        counts, history = step.rows.counts, step.rows.history
        by_row = zip(step.states, counts, history, step.read, step.write, step.recorded, strict=True)
        return [self._place(into, *row) for row in by_row]

    def _place(
        self, into: Recordings, state: "State", count: int, before: int, read: int, write: int, recorded: bool
    ) -> Place:
        if state.owes not in (None, self.late, into):
            state.settle()
        first = self._stretches[state] * STRETCH
        start, owed = (first, 0) if state.owes is None else state.owes.owing[state]
        # When it is stored depends on the state alone: the same text gives the same bits whatever was before.
        stores = owed and (into is self.all or owed + count > EVERY)
        moves = not recorded and (write != read or not before)
        early = owed if state.owes is self.all else 0
        record = first + (HALF if start == first else 0) if stores else start + owed
        keep = read if early and recorded else NONE
        late_keep = (read if recorded else write) if moves or stores else NONE
        return Place(start, record, early, keep, owed, late_keep)  # by name it would take twice as long

    def took(self, step: "Step", places: Sequence[Place]) -> None:
        """A forward did what they say. Rows that are in no transaction owe the late parts of it when it ends."""
        assert step.recordings is not None
        step.recordings.journal = self
        for state, count, place in zip(step.states, step.rows.counts, places, strict=True):
            if state.owes is not None:
                state.owes.forgive(state)
            stays = place.late_owed > 0 and place.late_keep == NONE
            start, owed = (place.owed_start, place.late_owed) if stays else (place.record, 0)
            step.recordings.after[state] = start, owed + count

    def _give_stretches(self, states: Sequence["State"]) -> None:
        """See to it that each has one: of those that nobody has, or that others do not need now."""
        lacking = [state for state in states if state not in self._stretches]
        if not lacking:
            return
        free = sorted(set(range(self.states)) - set(self._stretches.values()), reverse=True)
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
        if open_end is not None and open_end.recordings is not None and open_end.recordings.journal is self:
            open_end.recordings = self.all.apart(open_end.at, open_end.fed or 0)
            open_end.at = 0


def _is_late(pool: Pool, key: tuple[int, str]) -> bool:
    assert pool.slot_store is not None
    part = pool.stores[pool.slot_store].unit.fields[key].part
    return isinstance(part, SlotPart) and part.late


def _fields(pool: Pool) -> Iterable[tuple[int, str]]:
    return () if pool.slot_store is None else pool.stores[pool.slot_store].unit.fields
