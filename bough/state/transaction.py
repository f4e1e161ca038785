"""Transaction: one forward over a state that can be kept in part, or forgotten.

A decode round feeds the current token and some drafted ones. `commit(n)` keeps the first n tokens *fed*. Pages forget
their tail. A slot is replayed: the forward leaves it as it was and records the few rows of inputs that its update
takes, and the first n of them are applied — one read and one write of the state whatever the length of the draft, and
memory for n rows of inputs, not for n states. That is done at once, or by later forwards where these can
(recordings.py). Windows are kept whole until the commit.

While a transaction is open its state can be fed once, and otherwise only be released (which is commit(0)).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bough.errors import StateError
from bough.state.recordings import Recordings

if TYPE_CHECKING:
    from bough.state.live import State


class Transaction:
    """The open end of a state. As a context manager it commits 0 unless something else was committed."""

    fed: int | None = None  # tokens of its forward; None before it
    recordings: Recordings | None = None  # of its forward
    at = 0  # where what the state will owe begins in there
    before = 0  # tokens of that which it has owed before; its own ones follow
    target: int | None = None  # the slot that commit writes, where the state has none yet
    closed = False

    def __init__(self, state: "State") -> None:
        self.state = state

    @property
    def nbytes(self) -> int:
        """Bytes of the recorded inputs."""
        return 0 if self.recordings is None else self.recordings.nbytes

    def expect_feedable(self) -> None:
        if self.fed is not None:
            raise StateError("the transaction has had its forward; commit it and begin another")

    def was_fed(self, tokens: int, recordings: Recordings | None, owed: tuple[int, int]) -> None:
        """It has had its forward. `owed` is what the state will owe if all of it is kept: from where on, how much."""
        self.fed, self.recordings = tokens, recordings
        self.at, self.before = owed[0], owed[1] - tokens

    def commit(self, count: int) -> None:
        """Keep the first `count` tokens fed, and close. Raises StateError, and changes nothing, if that cannot be."""
        commit([(self, count)])

    def followed(self, count: int, fed: int, owed: tuple[int, int]) -> "Transaction":
        """Keep the first `count` tokens fed, and be in the next transaction, which has had its forward already.

        That was launched before anybody knew how many are kept (ahead.py), and did on its way what they owe.
        """
        state = self.state
        self.closed, state.condition = True, "in a transaction"
        state.length = state.known = state.length + count
        state.transaction = after = Transaction(state)
        after.was_fed(fed, self.recordings, owed)
        return after

    def _expect_committable(self, count: int) -> None:
        if self.closed:
            raise StateError("the transaction is closed; begin another")
        if self.state.condition == "in a step":
            raise StateError("the transaction is in its forward; commit when that has ended")
        fed = self.fed or 0
        if not 0 <= count <= fed:
            raise StateError(f"{count} tokens cannot be kept: {fed} were fed")

    def _close(self, count: int) -> None:
        """The state is at its new length; what is left to do is owed."""
        state, pool = self.state, self.state.pool
        self.closed, state.transaction = True, None
        if state.condition != "broken":
            state.condition = "ready"
        state.length = state.known = state.length + count
        if count != self.fed or pool.has_windows:  # else there is nothing to give back
            state.trim()
        if not self.before + count or pool.slot_store is None:
            pool.release(pool.slot_reference(self.target))
            return
        if state.slot is None:
            state.slot = self.target
            assert state.slot is not None
            for part in pool.stores[pool.slot_store].parts.values():
                part[state.slot] = 0
        assert self.recordings is not None
        state.owes, state.owed = self.recordings, (self.at, self.before + count)

    def __enter__(self) -> "Transaction":
        return self

    def __exit__(self, *_: object) -> None:
        if not self.closed:
            self.commit(0)


def commit(kept: Sequence[tuple[Transaction, int]]) -> None:
    """Keep the first so many tokens that each was fed, and close them all. Those of one forward are replayed together.

    Raises StateError, and changes nothing, if one cannot be.
    """
    needed: dict[Recordings, int] = {}  # those that do not last, up to which token
    for transaction, count in kept:
        transaction._expect_committable(count)
        recordings = transaction.recordings
        if count and recordings is not None and not recordings.lasts:
            needed[recordings] = max(needed.get(recordings, 0), transaction.at + transaction.before + count)
    for recordings, most in needed.items():
        if lacking := recordings.lacking(most):
            raise StateError(f"the inputs of {len(lacking)} parts were not recorded, of layer {lacking[0][0]} first")
    for transaction, count in kept:
        transaction._close(count)
    for recordings in needed:
        recordings.settle([transaction.state for transaction, _ in kept])  # what those that last are owed waits
