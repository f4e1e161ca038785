"""Transaction: one forward over a state that can be kept in part, or forgotten.

A decode round feeds the current token and some drafted ones. `commit(n)` keeps the first n tokens *fed*. Pages forget
their tail. A slot is replayed: the forward leaves it as it was and records the few rows of inputs that its update
takes, and commit applies the first n of them — one read and one write of the state whatever the length of the draft,
and memory for n rows of inputs, not for n states. Windows are kept whole until the commit.

While a transaction is open its state can be fed once, and otherwise only be released (which is commit(0)).
"""

from typing import TYPE_CHECKING

from bough.errors import StateError
from bough.ops.ragged import Recording
from bough.state.kinds import SlotPart

if TYPE_CHECKING:
    from bough.state.live import State


class Transaction:
    """The open end of a state. As a context manager it commits 0 unless something else was committed."""

    def __init__(self, state: "State") -> None:
        self.state = state
        self.fed: int | None = None  # tokens of its forward; None before it
        self.recordings: dict[tuple[int, str], Recording] = {}  # by layer and part
        self.target: int | None = None  # the slot that commit writes, where the state has none yet
        self.closed = False

    @property
    def nbytes(self) -> int:
        """Bytes of the recorded inputs."""
        return sum(recording.nbytes for recording in self.recordings.values())

    def expect_feedable(self) -> None:
        if self.fed is not None:
            raise StateError("the transaction has had its forward; commit it and begin another")

    def commit(self, count: int) -> None:
        """Keep the first `count` tokens fed, and close. Raises StateError, and changes nothing, if that cannot be."""
        if self.closed:
            raise StateError("the transaction is closed; begin another")
        if self.state.condition == "in a step":
            raise StateError("the transaction is in its forward; commit when that has ended")
        fed = self.fed or 0
        if not 0 <= count <= fed:
            raise StateError(f"{count} tokens cannot be kept: {fed} were fed")
        self._expect_recorded(count)
        state, pool = self.state, self.state.pool
        self.closed, state.transaction, state.condition = True, None, "broken"  # until all layers have moved on
        if count and pool.slot_store is not None:
            self._replay(count)
        else:
            pool.release(pool.slot_reference(self.target))
        state.length = state.known = state.length + count
        for index, run in state.runs.items():
            state.runs[index] = pool.trim(index, run, state.length)
        state.condition = "ready"

    def _expect_recorded(self, count: int) -> None:
        pool = self.state.pool
        fields = {} if pool.slot_store is None else pool.stores[pool.slot_store].unit.fields
        lacking = [key for key in fields if self.recordings.get(key, Recording()).tokens < count]
        if lacking:
            raise StateError(f"the inputs of {len(lacking)} parts were not recorded, of layer {lacking[0][0]} first")

    def _replay(self, count: int) -> None:
        """Move the slot on by the first `count` recorded rows, in place; a state without one gets the one set aside."""
        state, pool = self.state, self.state.pool
        assert pool.slot_store is not None
        store = pool.stores[pool.slot_store]
        if state.slot is None:
            state.slot = self.target
            for part in store.parts.values():
                part[state.slot] = 0
        for key, recording in self.recordings.items():
            slot, kind = store.parts[key][state.slot], store.unit.fields[key].part
            assert isinstance(kind, SlotPart)
            kind.replay(slot, slot, recording.inputs, count)

    def __enter__(self) -> "Transaction":
        return self

    def __exit__(self, *_: object) -> None:
        if not self.closed:
            self.commit(0)
