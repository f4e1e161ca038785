"""Transaction: one forward over a state that can be kept in part, or forgotten.

A decode round feeds the current token and some drafted ones. `commit(n)` keeps the first n tokens *fed*. Pages forget
their tail. A slot is replayed: the forward leaves it as it was and records the few rows of inputs that its update
takes, and commit applies the first n of them — one read and one write of the state whatever the length of the draft,
and memory for n rows of inputs, not for n states. Windows are kept whole until the commit.

While a transaction is open its state can be fed once, and otherwise only be released (which is commit(0)).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bough.errors import StateError
from bough.ops.ragged import Recording, Replayed, ReplayedRow
from bough.state.kinds import Replay, SlotPart
from bough.state.pool import Pool

if TYPE_CHECKING:
    from bough.state.live import State


class Transaction:
    """The open end of a state. As a context manager it commits 0 unless something else was committed."""

    def __init__(self, state: "State") -> None:
        self.state = state
        self.fed: int | None = None  # tokens of its forward; None before it
        self.recordings: dict[tuple[int, str], Recording] = {}  # of its forward, by layer and part
        self.at = 0  # where its own tokens begin in there
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
        commit([(self, count)])

    def _expect_committable(self, count: int) -> None:
        if self.closed:
            raise StateError("the transaction is closed; begin another")
        if self.state.condition == "in a step":
            raise StateError("the transaction is in its forward; commit when that has ended")
        fed = self.fed or 0
        if not 0 <= count <= fed:
            raise StateError(f"{count} tokens cannot be kept: {fed} were fed")

    def _close(self, count: int) -> ReplayedRow | None:
        """The state is at its new length; what is left to do is the replay of its slot."""
        state, pool = self.state, self.state.pool
        self.closed, state.transaction = True, None
        state.length = state.known = state.length + count
        for index, run in state.runs.items():
            state.runs[index] = pool.trim(index, run, state.length)
        if not count or pool.slot_store is None:
            pool.release(pool.slot_reference(self.target))
            state.condition = "ready"
            return None
        state.condition = "broken"  # until all layers have moved on
        if state.slot is None:
            state.slot = self.target
            assert state.slot is not None
            for part in pool.stores[pool.slot_store].parts.values():
                part[state.slot] = 0
        return ReplayedRow(state.slot, self.at, count)

    def __enter__(self) -> "Transaction":
        return self

    def __exit__(self, *_: object) -> None:
        if not self.closed:
            self.commit(0)


def commit(kept: Sequence[tuple[Transaction, int]]) -> None:
    """Keep the first so many tokens that each was fed, and close them all. Those of one forward are replayed together.

    Raises StateError, and changes nothing, if one cannot be.
    """
    for transaction, count in kept:
        transaction._expect_committable(count)
    _expect_recorded(kept)
    forwards: dict[int, list[tuple[Transaction, ReplayedRow]]] = {}
    for transaction, count in kept:
        if (row := transaction._close(count)) is not None:
            forwards.setdefault(id(transaction.recordings), []).append((transaction, row))
    for together in forwards.values():
        first = together[0][0]
        _replay(first.state.pool, first.recordings, [row for _, row in together])
        for transaction, _ in together:
            transaction.state.condition = "ready"


def _expect_recorded(kept: Sequence[tuple[Transaction, int]]) -> None:
    needed: dict[int, tuple[Transaction, int]] = {}  # by forward: up to which token
    for transaction, count in kept:
        if count and transaction.state.pool.slot_store is not None:
            _, most = needed.get(id(transaction.recordings), (transaction, 0))
            needed[id(transaction.recordings)] = transaction, max(most, transaction.at + count)
    for transaction, most in needed.values():
        pool = transaction.state.pool
        fields = pool.stores[pool.slot_store].unit.fields if pool.slot_store is not None else {}
        lacking = [key for key in fields if transaction.recordings.get(key, Recording()).tokens < most]
        if lacking:
            raise StateError(f"the inputs of {len(lacking)} parts were not recorded, of layer {lacking[0][0]} first")


def _replay(pool: Pool, recordings: Mapping[tuple[int, str], Recording], rows: Sequence[ReplayedRow]) -> None:
    """Move slots on, the layers whose parts are alike together."""
    assert pool.slot_store is not None
    store = pool.stores[pool.slot_store]
    alike: dict[tuple[Replay, tuple[int, ...]], list[Replayed]] = {}
    for key, recording in recordings.items():
        part = store.unit.fields[key].part
        assert isinstance(part, SlotPart)
        alike.setdefault((part.replay, part.shape), []).append((store.parts[key], recording.inputs))
    for (replay, _), layers in alike.items():
        replay(layers, rows)
