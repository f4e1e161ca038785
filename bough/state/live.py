"""State: what one sequence remembers, across all layers.

A state is a length, for each page group the run of pages that hold what its reach asks for, and at most one slot.
It owns references, not memory. It changes only when a step finishes (reservation.py), so a forward that fails leaves
it as it was — unless it wrote the slot in place: then the state is broken, and can only be released.

Invariants (`check()` asserts them):
- A run is the pages from that of the earliest token within reach to that of the last token.
- All pages of a run but the last are full; the last one's fill mark is at least what the state has in it.
- There is a slot exactly when the model has slot kinds and the length is above 0.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bough.errors import PoolFull, StateError
from bough.state.pool import Ids, Pool


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Consecutive pages of a sequence: `ids[j]` is its page number `first + j`."""

    first: int
    ids: Ids

    @property
    def end(self) -> int:
        return self.first + len(self.ids)


EMPTY = Run(0, np.empty(0, np.int64))


class State:
    """The state of one sequence. Made by `State(pool)`, given back by `release()`."""

    def __init__(self, pool: Pool) -> None:
        if pool.running >= pool.max_running:
            raise PoolFull(f"{pool.max_running} sequences are running already; wait for one or raise max_running")
        self.pool = pool
        self.length = 0
        self.runs = dict.fromkeys(pool.page_stores, EMPTY)
        self.slot: int | None = None
        self.condition = "ready"  # or: in a step, broken, released
        pool.register(self)
        pool.running += 1

    def references(self) -> Iterator[tuple[int, Ids]]:
        for index, run in self.runs.items():
            yield index, run.ids
        if self.slot is not None:
            assert self.pool.slot_store is not None
            yield self.pool.slot_store, np.array([self.slot], np.int64)

    def expect_ready(self) -> None:
        if self.condition != "ready":
            raise StateError(f"the state is {self.condition}; only a state that is ready can be used")

    def fork(self) -> "State":
        """A second state at the same length that shares everything; nothing is copied until one of them writes."""
        self.expect_ready()
        other = State(self.pool)
        for index, ids in self.references():
            self.pool.stores[index].share(ids)
        other.length, other.runs, other.slot = self.length, dict(self.runs), self.slot
        return other

    def release(self) -> None:
        """Give everything back. A second call does nothing."""
        if self.condition == "released":
            return
        if self.condition == "in a step":
            raise StateError("the state is in a step; finish or abort the step first")
        for index, ids in self.references():
            self.pool.stores[index].release(ids)
        self.runs, self.slot, self.condition = {}, None, "released"
        self.pool.unregister(self)
        self.pool.running -= 1

    def check(self) -> None:
        if self.condition == "released":
            return
        page_tokens = self.pool.layout.page_tokens
        for index, run in self.runs.items():
            store = self.pool.stores[index]
            earliest = store.unit.earliest(self.length)
            assert run.first == earliest // page_tokens, "a page out of reach is kept, or one within reach missing"
            assert run.end == -(-self.length // page_tokens), "a page past the end is kept, or the last one missing"
            assert len(set(run.ids.tolist())) == len(run.ids), "a page is twice in a run"
            assert (store.fill[run.ids[:-1]] == page_tokens).all(), "a page before the last is not full"
            inside = self.length - (run.end - 1) * page_tokens
            assert (store.fill[run.ids[-1:]] >= inside).all(), "a token is past the fill mark"
        assert (self.slot is not None) == (self.pool.slot_store is not None and self.length > 0)
