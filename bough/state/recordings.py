"""Recordings: what a forward kept of its rows' inputs, and who has yet to be moved on by some of it.

A commit decides how many of the recorded tokens move a state's slot on. Whoever looks at the slot next must find that
done (`State.settle`). But where a captured forward will feed the same rows again, its recordings last until then, and
it does that on the way: slots are read and written once a round, and not once for the draft and once for its commit.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from bough.ops.ragged import Recording, Replayed, ReplayedRow
from bough.state.kinds import Replay, SlotPart
from bough.state.pool import Pool

if TYPE_CHECKING:
    from bough.state.live import State

Parts = dict[tuple[int, str], Recording]  # by layer and part


class Recordings:
    """The recorded inputs of one forward, for each layer and part of the slots."""

    def __init__(self, pool: Pool, parts: Parts | None = None) -> None:
        self.pool = pool
        if parts is not None:
            self.parts = parts
        self.lasting: Recordings | None = None  # those of a captured forward that did the work, where one did
        self.owing: dict[State, tuple[int, int]] = {}  # from which token on, and how many
        self.least = 0  # tokens that are known to be recorded of all parts

    @cached_property
    def parts(self) -> Parts:
        """Empty ones are made when they are asked for: a captured forward has its own."""
        return {key: Recording() for key in _fields(self.pool)}

    @property
    def kept(self) -> "Recordings":
        """Where the inputs are kept."""
        return self.lasting or self

    @property
    def nbytes(self) -> int:
        return sum(recording.nbytes for recording in self.parts.values())

    def lacking(self, tokens: int) -> list[tuple[int, str]]:
        """The parts of which fewer tokens were recorded."""
        if tokens <= self.least:
            return []
        return [key for key, recording in self.parts.items() if recording.tokens < tokens]

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


class Turns:
    """What captured forwards record, by turns: each writes one half, and first does what is owed to the other."""

    def __init__(self, pool: Pool, most: int = 0) -> None:
        self.most = most  # tokens of a forward
        self.room = Recordings(pool, {key: Recording(most=most) for key in _fields(pool)})  # where kernels find both
        self.turn = 0  # whose it was last

    @property
    def made(self) -> bool:
        """Whether there is room for all parts: the first forward makes it."""
        return all(each.halves for each in self.room.parts.values())

    def settle(self) -> None:
        """Move all states on that owe something."""
        for half in self.halves if self.made else ():
            half.settle()

    @cached_property
    def halves(self) -> tuple[Recordings, Recordings]:
        parts = [
            {key: Recording(tuple(half[turn] for half in each.halves)) for key, each in self.room.parts.items()}
            for turn in range(2)
        ]
        first, second = (Recordings(self.room.pool, each) for each in parts)
        first.least = second.least = self.most
        return first, second

    def owed(self, states: Sequence["State"]) -> list[tuple[int, int]]:
        """What each state owes to the half that was written last, for the next forward to do. All else is settled."""
        before, now = self.halves[self.turn], self.halves[1 - self.turn]
        if now.owing:  # whoever was not in the last forward
            now.settle()
        for state in states:
            if state.owes is not before:
                state.settle()
        return [before.owing.get(state, (0, 0)) for state in states]

    def took(self, states: Sequence["State"]) -> Recordings:
        """A forward did what they owed, and wrote the other half, which is this one."""
        for state in states:
            self.halves[self.turn].forgive(state)
        self.turn = 1 - self.turn
        return self.halves[self.turn]


def _fields(pool: Pool) -> Iterable[tuple[int, str]]:
    return () if pool.slot_store is None else pool.stores[pool.slot_store].unit.fields
