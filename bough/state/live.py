"""State: what one sequence remembers, across all layers.

A state is a length, for each page group the run of pages that hold what its reach asks for, and at most one slot; and
points: lengths before it at which a forward was asked to save what it takes to resume there. Groups whose reach is all
may be ahead of it: a state restored to a resume point keeps the entries of tokens up to `known` that were read before,
and the forwards over these tokens write windows and slots alone. It owns references, not memory. It changes only when a
step finishes (reservation.py), so a forward that fails leaves it as it was, unless it wrote the slot in place: then
the state is broken, and can only be released.

Invariants (`check()` asserts them):
- A run is the pages from that of the earliest token within reach to that of the last token (or the last known one).
- known is at least the length, and is the length in a transaction.
- All pages of a run but the last are full; the last one's fill mark is at least what the state has in it.
- There is a slot exactly when the model has slot kinds and the length is above 0.
- Points lie at lengths in (0, length].
- The slot is where the state is, or the state owes what moves it there (recordings.py).
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from bough.errors import PoolFull, StateError
from bough.state.pool import Pool
from bough.state.recordings import Recordings
from bough.state.snapshot import Snapshot
from bough.state.store import EMPTY, Ids, Run
from bough.state.transaction import Transaction


class State:
    """The state of one sequence. Made by `State(pool)`, given back by `release()`."""

    def __init__(self, pool: Pool) -> None:
        if len(pool.states) >= pool.max_running:
            raise PoolFull(f"{pool.max_running} sequences are running already; wait for one or raise max_running")
        self.pool = pool
        self.length = 0
        self.known = 0
        self.runs = dict.fromkeys(pool.page_stores, EMPTY)
        self.slot: int | None = None
        self.points: dict[int, Snapshot] = {}  # of empty edges, by length
        self.transaction: Transaction | None = None
        self.owes: Recordings | None = None  # inputs that its slot has yet to be moved on by
        self.owed = (0, 0)  # from which token in there on, and how many
        self.condition = "ready"  # or: in a step, in a transaction, broken, released
        pool.register(self)
        pool.states.add(self)

    def references(self) -> Iterator[tuple[int, Ids]]:
        for index, run in self.runs.items():
            yield index, run.ids
        yield from self.pool.slot_reference(self.slot)
        yield from self.pool.slot_reference(self.target)

    def moved(self, unit: int, where: Ids) -> None:
        if unit == self.pool.slot_store:
            self.slot = None if self.slot is None else int(where[self.slot])
            if self.transaction is not None and self.target is not None:
                self.transaction.target = int(where[self.target])
        else:
            self.runs[unit] = self.runs[unit].moved(where)

    @property
    def target(self) -> int | None:
        """The slot that was set aside for its commit."""
        return None if self.transaction is None else self.transaction.target

    def own_copy(self, slot: int) -> None:
        """Go on with this slot, made a copy of the one that it shared until now."""
        self.settle()
        assert self.slot is not None and self.pool.slot_store is not None
        store = self.pool.stores[self.pool.slot_store]
        store.copy(np.array([self.slot]), np.array([slot]))
        self.pool.release(self.pool.slot_reference(self.slot))
        self.slot = slot

    def settle(self) -> None:
        """See to it that the slot is where the state is."""
        if self.owes is not None:
            self.owes.settle([self])

    def filled(self, unit: int) -> int:
        """How many tokens have their entries in a page group."""
        return self.known if self.pool.stores[unit].unit.reach is None else self.length

    def trim(self) -> None:
        """Give back the pages that it does not need to go on from its length."""
        size = self.pool.layout.page_tokens
        for index, run in self.runs.items():
            store, first, filled = self.pool.stores[index], 0, self.known
            if store.unit.reach is not None:
                first, filled = store.unit.earliest(self.length) // size, self.length
            end = -(-filled // size)
            if first > run.first or end < run.end:
                self.runs[index] = kept = run.part(first, end)
                store.release(run.ids[: kept.first - run.first])
                store.release(run.ids[kept.end - run.first :])
                run = kept
            if filled % size and store.refs.item(run.last) == 1:
                store.fill[run.last] = filled % size  # nobody else knows what came after

    def expect_ready(self) -> None:
        if self.condition != "ready":
            remedy = "release it and start again" if self.condition == "broken" else "only a ready one can be used"
            raise StateError(f"the state is {self.condition}; {remedy}")

    def can_resume(self, length: int) -> bool:
        """Whether `rewind(length)` and `fork(length)` would succeed."""
        self.expect_ready()
        return not isinstance(self._resolve((), length, length), str)

    def fork(self, length: int | None = None) -> "State":
        """A second state that shares everything up to `length`, points too; nothing is copied until one writes."""
        self.expect_ready()
        self.settle()
        length = self.length if length is None else length
        whole = length == self.length == self.known
        runs, slot = (dict(self.runs), self.slot) if whole else self._expect_resolved((), length)
        other = State(self.pool)
        other._hold(length, runs, slot)
        other.points = {at: point.held() for at, point in self.points.items() if at <= length}
        return other

    def rewind(self, length: int) -> None:
        """Forget all tokens from `length` on. Raises StateError, and changes nothing, where a kind cannot."""
        self.restore((), length)

    def restore(self, path: Sequence[Snapshot], length: int, known: int | None = None) -> None:
        """Be at `length` on the tokens of `path`, which must follow each other from within this state on.

        What the state has from the start of the path on is replaced. The path may end past `length`, as long as each
        kind can resume there; entries of the tokens up to `known` are kept then, where the reach is all, for a caller
        who will feed exactly these tokens. Raises StateError, and changes nothing, where that cannot be or the path has
        a gap.
        """
        self.expect_ready()
        runs, slot = self._expect_resolved(path, length, length if known is None else known)
        own = min(length, path[0].start if path else self.length)
        self._become(length, runs, slot, known)
        for at in [at for at in self.points if at > own]:
            self.forget(at)

    def snapshot(self, start: int, end: int | None = None) -> Snapshot | None:
        """What it takes to be at `end` (now: the length) again given the path before `start`; None if that is nothing.

        Windows that have moved on and slots that were not saved are left out; so is the slot of the state itself
        while the pool could not lend it another one.
        """
        self.expect_ready()
        end = self.length if end is None else end
        if not 0 <= start <= end <= self.length:
            raise StateError(f"[{start}, {end}) is not a range of the {self.length} tokens the state holds")
        if start == end:
            return None
        runs = {}
        for index in self.pool.page_stores:
            unit = self.pool.stores[index].unit
            run = self._assemble(index, (), start if unit.reach is None else unit.earliest(end), end)
            if run is not None:
                runs[index] = run
        slot = self._saved_slot(end)
        if slot is not None and not self.pool.can_keep_slot(slot):
            slot = None
        return Snapshot(self.pool, start, end, runs, slot)

    def adopt(self, path: Sequence[Snapshot]) -> None:
        """Use the pages of a path of the same tokens instead of own ones that hold the same, where the reach is all."""
        self.expect_ready()
        for index in self.pool.page_stores:
            if self.pool.stores[index].unit.reach is None:
                sources = [(self.runs[index], self.known), *((each.runs[index], each.end) for each in path)]
                run = self.pool.assembled(sources, 0, self.known)
                assert run is not None
                self.pool.stores[index].share(run.ids)
                self.pool.stores[index].release(self.runs[index].ids)
                self.runs[index] = run

    def forget(self, length: int) -> None:
        """Drop the point at `length`, if there is one."""
        if length in self.points:
            self.points.pop(length).close()

    def view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """K and V [S, H, dim] of a layer in token order, to read: all tokens, or those within reach of the next one.

        They are gathered from the pages, so a view costs as much as it is long.
        """
        self.expect_ready()
        index = self.pool.layout.unit_of.get(layer)
        if index is None or not self.pool.stores[index].unit.is_page:
            raise StateError(f"layer {layer} keeps no K and V of its own; ask one that does")
        store = self.pool.stores[index]
        start = store.unit.earliest(self.length)
        if start == self.length:
            return None
        pages = torch.from_numpy(self.runs[index].ids).to(self.pool.device)
        low = start - self.runs[index].first * self.pool.layout.page_tokens
        k, v = (
            self.pool.part(layer, part).index_select(0, pages).flatten(0, 1)[low : low + self.length - start]
            for part in ("k", "v")
        )
        return k, v

    def begin(self) -> Transaction:
        """Open a transaction: the next forward over this state can be kept in part, or forgotten."""
        self.expect_ready()
        if self.known > self.length:
            raise StateError(f"the entries of [{self.length}, {self.known}) are known; feed these tokens first")
        self.transaction = Transaction(self)
        self.condition = "in a transaction"
        return self.transaction

    def release(self) -> None:
        """Give everything back. A second call does nothing."""
        if self.condition == "released":
            return
        if self.condition == "in a step":
            raise StateError("the state is in a step; finish or abort the step first")
        if self.transaction is not None:
            self.transaction.commit(0)
        self.owes = None
        for point in self.points.values():
            point.close()
        self.pool.release(self.references())
        self.runs, self.slot, self.points, self.condition = {}, None, {}, "released"
        self.pool.unregister(self)
        self.pool.states.remove(self)

    def _become(self, length: int, runs: dict[int, Run], slot: int | None, known: int | None = None) -> None:
        """Refer to these pages and this slot instead of the present ones."""
        before = list(self.references())
        self._hold(length, runs, slot, known)
        self.pool.release(before)

    def _hold(self, length: int, runs: dict[int, Run], slot: int | None, known: int | None = None) -> None:
        """Refer to these pages and this slot."""
        for index, run in runs.items():
            self.pool.stores[index].share(run.entries)
        if slot is not None:
            self.pool.share_slot(slot)
        self.owes = None
        self.length, self.known, self.runs, self.slot = length, length if known is None else known, runs, slot

    def _expect_resolved(
        self, path: Sequence[Snapshot], length: int, known: int | None = None
    ) -> tuple[dict[int, Run], int | None]:
        found = self._resolve(path, length, length if known is None else known)
        if isinstance(found, str):
            raise StateError(found)
        return found

    def _resolve(self, path: Sequence[Snapshot], length: int, known: int) -> tuple[dict[int, Run], int | None] | str:
        """The pages and the slot of `length` along the path, or why it cannot be resumed at. Changes nothing."""
        if fault := self._path_fault(path, length, known):
            return fault
        runs = {}
        for index in self.pool.page_stores:
            unit = self.pool.stores[index].unit
            run = self._assemble(index, path, unit.earliest(length), known if unit.reach is None else length)
            if run is None:
                return f"length {length} cannot be resumed at: the window before it is no longer held"
            runs[index] = run
        if self.pool.slot_store is None or length == 0:
            return runs, None
        slot = next((each.slot for each in path if each.end == length and each.slot is not None), None)
        if slot is None and (not path or length <= path[0].start):
            slot = self._saved_slot(length)
        return (runs, slot) if slot is not None else f"length {length} cannot be resumed at: no slot was saved there"

    def _path_fault(self, path: Sequence[Snapshot], length: int, known: int) -> str | None:
        if not 0 <= length <= known:
            return f"length {length} is below 0, or past the {known} tokens known"
        end = self.length
        for index, each in enumerate(path):
            if each.closed:
                return "a snapshot of the path is closed"
            if each.start > end:
                return f"the path has a gap: nothing covers [{end}, {each.start})"
            if index and each.start < end:
                return f"the path overlaps itself: [{each.start}, {end}) is there twice"
            end = each.end
        return f"length {known} is past the end of what is held, {end}" if known > end else None

    def _assemble(self, index: int, path: Sequence[Snapshot], start: int, length: int) -> Run | None:
        """The pages of tokens [start, length) from all that is held; None: not all are."""
        own = path[0].start if path else self.length
        sources = [(point.runs.get(index, EMPTY), at) for at, point in self.points.items() if at <= own]
        sources += [(self.runs[index], min(own, self.length))]
        sources += [(each.runs.get(index, EMPTY), each.end) for each in path]
        return self.pool.assembled(sources, start, length)

    def _saved_slot(self, length: int) -> int | None:
        if length == self.length:
            self.settle()
            return self.slot
        return self.points[length].slot if length in self.points else None

    def check(self) -> None:
        if self.condition in ("released", "broken"):
            return
        page_tokens = self.pool.layout.page_tokens
        fed = self.transaction is not None and self.transaction.fed is not None
        for index, run in self.runs.items() if not fed else ():
            store = self.pool.stores[index]
            assert run.first == store.unit.earliest(self.length) // page_tokens, (
                "a page out of reach is kept, or one missing"
            )
            filled = self.filled(index)
            assert run.end == -(-filled // page_tokens), "a page past the end is kept, or the last one missing"
            assert len(set(run.ids.tolist())) == len(run.ids), "a page is twice in a run"
            assert (store.fill[run.ids[:-1]] == page_tokens).all(), "a page before the last is not full"
            inside = filled - (run.end - 1) * page_tokens
            assert (store.fill[run.ids[-1:]] >= inside).all(), "a token is past the fill mark"
        assert self.known >= self.length and (self.transaction is None or self.known == self.length)
        assert self.owes is None or (self.slot is not None and self.owed[1] > 0), "it owes what moves nothing on"
        assert (self.slot is not None) == (self.pool.slot_store is not None and self.length > 0)
        for at, point in self.points.items():
            assert 0 < at <= self.length and (point.start, point.end) == (at, at)
            point.check()
