"""The memory of all state on one device: one arena, cut into slabs, lent out as pages and slots.

Invariants (`check()` asserts them):
- refs(entry) is the number of live holders (states, snapshots, open reservations) that list it; scratch has one more.
- A slab is free or belongs to exactly one unit; a unit owns a slab exactly while one of its entries there is used.
- free + used == all, in slabs and in bytes.
- A page's fill mark is at least what any holder has in it.
- Every sequence that may run can get a slot of its own: so much is kept back from pages and from snapshots.
Entry 0 of a unit's first slab is scratch: padded rows read and write it, and nobody looks at what it holds.

Knows nothing of models or trees.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from bough.errors import PoolFull
from bough.state.capacity import slabs
from bough.state.layout import Field, Layout, Unit

Ids = NDArray[np.int64]


class Holder(Protocol):
    """Whoever keeps references to entries of the pool."""

    def references(self) -> Iterable[tuple[int, Ids]]:
        """Pairs of a unit's index and the entries held there."""

    def moved(self, unit: int, where: Ids) -> None:
        """Entry i of the unit is at where[i] now."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Consecutive pages of a sequence: `ids[j]` is its page number `first + j`."""

    first: int
    ids: Ids

    @property
    def end(self) -> int:
        return self.first + len(self.ids)

    def part(self, first: int, end: int) -> "Run":
        """Those of its pages that are numbered [first, end)."""
        low = min(max(first, self.first), self.end)
        high = max(low, min(end, self.end))
        return Run(low, self.ids[low - self.first : high - self.first])

    def moved(self, where: Ids) -> "Run":
        return Run(self.first, where[self.ids])


EMPTY = Run(0, np.empty(0, np.int64))


class Running(Protocol):
    """A holder that needs a slot that it can write to go on."""

    slot: int | None

    @property
    def target(self) -> int | None:
        """A slot set aside for it beside its present one."""


class Store:
    """The entries of one unit: where they are, how many refer to each, how far each page is filled."""

    def __init__(self, unit: Unit, arena: torch.Tensor, slab_bytes: int, free_slabs: list[int]) -> None:
        self.unit = unit
        self.capacity = arena.numel() // slab_bytes * unit.per_slab
        self.refs = np.zeros(self.capacity, np.int32)
        self.fill = np.zeros(self.capacity, np.int32)
        self.data = arena.view(-1, unit.stride)  # [capacity, stride] uint8: one row is one page or slot
        self.parts = {key: self._part(field) for key, field in unit.fields.items()}
        self.used = 0  # entries
        self.slabs = 0  # those this unit owns
        self._unused: dict[int, list[int]] = {}  # by slab that is partly used: its other entries
        self._free_slabs = free_slabs  # shared by all stores
        self.scratch = int(self.take(1)[0])

    def _part(self, field: Field) -> torch.Tensor:
        """One layer's part of every entry: [capacity, *shape], at the unit's stride."""
        raw = self.data[:, field.offset : field.offset + field.nbytes]
        return raw.view(field.part.dtype).view(self.capacity, *field.shape)

    def slabs_for(self, count: int) -> int:
        """How many more slabs it takes to lend `count` entries."""
        unused = self.slabs * self.unit.per_slab - self.used
        return max(0, -(-(count - unused) // self.unit.per_slab))

    def take(self, count: int) -> Ids:
        """Lend `count` entries, each with one reference. The caller has made sure that they fit."""
        taken: list[int] = []
        while len(taken) < count:
            if not self._unused:
                slab = self._free_slabs.pop()
                first = slab * self.unit.per_slab
                self._unused[slab] = list(range(first + self.unit.per_slab - 1, first - 1, -1))
                self.slabs += 1
            slab, unused = next(iter(self._unused.items()))
            keep = max(0, len(unused) - (count - len(taken)))
            taken += reversed(unused[keep:])
            del unused[keep:]
            if not unused:
                del self._unused[slab]
        ids = np.array(taken, np.int64)
        self.refs[ids] = 1
        self.fill[ids] = 0
        self.used += count
        return ids

    def share(self, ids: Ids) -> None:
        """Add one reference to each."""
        assert self.refs[ids].all(), "an entry is shared that nobody holds"
        self.refs[ids] += 1

    def release(self, ids: Ids) -> None:
        """Drop one reference to each; entries nobody refers to go back, and so do slabs that are empty."""
        left = self.refs[ids] - 1
        assert (left >= 0).all(), "an entry is released more often than it was lent"
        self.refs[ids] = left
        gone = ids[left == 0]
        self.used -= len(gone)
        for entry in gone.tolist():
            slab = entry // self.unit.per_slab
            unused = self._unused.setdefault(slab, [])
            unused.append(entry)
            if len(unused) == self.unit.per_slab:
                del self._unused[slab]
                self._free_slabs.append(slab)
                self.slabs -= 1

    def copy(self, source: Ids, target: Ids) -> None:
        """Copy whole entries, all layers at once."""
        self.copy_from(self, source, target)

    def copy_from(self, other: "Store", source: Ids, target: Ids) -> None:
        """Copy whole entries of another store of the same unit. Copies to or from a device are not waited for."""
        for a, b in zip(source.tolist(), target.tolist(), strict=True):
            self.data[b].copy_(other.data[a], non_blocking=True)

    def gather(self, slabs: int) -> Ids | None:
        """Empty up to so many slabs by moving what they hold to unused entries of others; where everything is then."""
        room = {slab: len(unused) for slab, unused in self._unused.items()}
        left = sum(room.values())
        sources: list[int] = []
        for slab in sorted(room, key=lambda slab: -room[slab]):
            if slab == self.scratch // self.unit.per_slab:
                continue
            left -= self.unit.per_slab  # the room that it has, and the room that what it holds will take
            if len(sources) == slabs or left < 0:
                break
            sources.append(slab)
        if not sources:
            return None
        where = np.arange(self.capacity)
        leaving = {slab: self._unused.pop(slab) for slab in sources}
        for slab, not_held in leaving.items():
            first = slab * self.unit.per_slab
            moving = np.setdiff1d(np.arange(first, first + self.unit.per_slab), not_held)
            there = self.take(len(moving))
            self.copy(moving, there)
            self.refs[there], self.fill[there] = self.refs[moving], self.fill[moving]
            self.refs[moving] = 0
            where[moving] = there
            self.used -= len(moving)
            self.slabs -= 1
            self._free_slabs.append(slab)
        return where

    def check(self, held: NDArray[np.int32]) -> set[int]:
        """Assert the invariants, given how many holders list each entry; returns the slabs this unit owns."""
        held[self.scratch] += 1
        wrong = np.flatnonzero(held != self.refs)[:8]
        assert not len(wrong), f"{self.unit.name} {wrong}: refs {self.refs[wrong]}, held {held[wrong]}"
        used = np.flatnonzero(self.refs)
        slabs = set((used // self.unit.per_slab).tolist())
        assert (self.used, self.slabs) == (len(used), len(slabs)), f"{self.unit.name}: miscounted"
        owned = {s * self.unit.per_slab + i for s in slabs for i in range(self.unit.per_slab)}
        unused = [entry for entries in self._unused.values() for entry in entries]
        assert sorted(unused) == sorted(owned.difference(used.tolist())), f"{self.unit.name}: an entry is lost"
        return slabs


class Pool:
    """One arena of `nbytes` and the stores that share its slabs."""

    def __init__(
        self,
        layout: Layout,
        nbytes: int,
        *,
        max_running: int,
        device: torch.device | str = "cpu",
        pinned: bool = False,
    ) -> None:
        self.layout = layout
        self.device = torch.device(device)
        self.max_running = max_running
        self.slabs = nbytes // layout.slab_bytes
        self.nbytes = self.slabs * layout.slab_bytes
        least = slabs(layout, 1, tokens=1, step_tokens=1, max_running=max_running) * layout.slab_bytes
        if self.nbytes < least:
            raise PoolFull(
                f"{nbytes:,} bytes are too few: the state of {max_running} sequences takes {least:,} at the least;"
                " give more (CacheConfig.device_bytes, or --cache-bytes) or run fewer (max_running)"
            )
        arena = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device, pin_memory=pinned)
        self._free_slabs = list(range(self.slabs - 1, -1, -1))
        self.stores = tuple(Store(unit, arena, layout.slab_bytes, self._free_slabs) for unit in layout.units)
        self.page_stores = tuple(i for i, store in enumerate(self.stores) if store.unit.is_page)
        slots = [i for i, store in enumerate(self.stores) if not store.unit.is_page]
        self.slot_store = slots[0] if slots else None
        self.states: set[Running] = set()
        self._holders: set[Holder] = set()

    def part(self, layer: int, name: str) -> torch.Tensor:
        """A layer's part of every entry of its unit: [entries, *shape]."""
        return self.stores[self.layout.unit_of[layer]].parts[layer, name]

    def take(self, counts: Sequence[int], *, spare: bool = False) -> list[Ids]:
        """Lend so many entries of each unit, or none at all: raises PoolFull and changes nothing.

        Slots are for states, and there whatever pages and snapshots take; or, if `spare`, for whoever can do without.
        """
        needed = self.slabs_for(counts, spare=spare)
        if needed > len(self._free_slabs):
            wanted = ", ".join(f"{n} {s.unit.name}" for n, s in zip(counts, self.stores, strict=True) if n)
            raise PoolFull(
                f"{wanted} take {needed} more slabs of {self.layout.slab_bytes:,} bytes, and {len(self._free_slabs)} of"
                f" {self.slabs} are free; release sequences or give the cache more memory",
                list(counts),
            )
        return [store.take(count) for store, count in zip(self.stores, counts, strict=True)]

    def slabs_for(self, counts: Sequence[int], *, spare: bool = False) -> int:
        """How many free slabs it takes to lend these, and to keep back what running sequences may still ask for."""
        needs = self._with_owed(counts, spare)
        return sum(store.slabs_for(count) for store, count in zip(self.stores, needs, strict=True))

    def fits(self, counts: Sequence[int], *, spare: bool = False) -> bool:
        """Whether these can be lent, if need be after moving entries together (`compact`)."""
        needs = zip(self.stores, self._with_owed(counts, spare), strict=True)
        return sum(-(-(store.used + count) // store.unit.per_slab) for store, count in needs) <= self.slabs

    def compact(self, counts: Sequence[int], *, spare: bool = False) -> None:
        """Move entries together until slabs enough are free to lend these, as far as that helps. Between steps only."""
        for index, store in enumerate(self.stores):
            lacking = self.slabs_for(counts, spare=spare) - len(self._free_slabs)
            if lacking > 0 and (where := store.gather(lacking)) is not None:
                for holder in self._holders:
                    holder.moved(index, where)

    def _with_owed(self, counts: Sequence[int], spare: bool) -> list[int]:
        needs = list(counts)
        if self.slot_store is not None:
            owed, asked = self._owed_slots, needs[self.slot_store]
            needs[self.slot_store] = asked + owed if spare and asked else max(asked, owed)
        return needs

    @property
    def _owed_slots(self) -> int:
        """How many slots the sequences that may run could still ask for.

        Of the states that share a slot among themselves alone the last one to move on keeps it.
        """
        sharers = Counter(state.slot for state in self.states if state.slot is not None)
        kept = sum(self.slot_refs(slot) == count for slot, count in sharers.items())
        return self.max_running - kept - sum(state.target is not None for state in self.states)

    def can_keep_slot(self, slot: int) -> bool:
        """Whether one more may refer to the slot for good: nobody needs it for himself, or there is one to spare."""
        sharers = sum(state.slot == slot for state in self.states)
        return self.slot_refs(slot) > sharers or self.spare_slots > 0

    @property
    def spare_slots(self) -> int:
        """How many slots can be lent to whoever can do without."""
        if self.slot_store is None:
            return 0
        store = self.stores[self.slot_store]
        unused = (store.slabs + len(self._free_slabs)) * store.unit.per_slab - store.used
        return unused - self._owed_slots

    def slot_reference(self, slot: int | None) -> list[tuple[int, Ids]]:
        """A slot as a holder lists it."""
        if slot is None:
            return []
        assert self.slot_store is not None
        return [(self.slot_store, np.array([slot], np.int64))]

    def slot_refs(self, slot: int) -> int:
        assert self.slot_store is not None
        return int(self.stores[self.slot_store].refs[slot])

    def share(self, references: Iterable[tuple[int, Ids]]) -> None:
        for index, ids in references:
            self.stores[index].share(ids)

    def release(self, references: Iterable[tuple[int, Ids]]) -> None:
        for index, ids in references:
            self.stores[index].release(ids)

    def assembled(self, sources: Iterable[tuple[Run, int]], start: int, length: int) -> Run | None:
        """The pages of tokens [start, length) from runs and the lengths they are good up to; None: not all are there.

        A page that goes on past that may hold another continuation there. Later sources go before earlier ones.
        """
        first, last = self.layout.pages(start, length)
        ids = np.full(last - first, -1, np.int64)
        for run, end in sources:
            part = run.part(first, last if end >= length else end // self.layout.page_tokens)
            ids[part.first - first : part.end - first] = part.ids
        return None if (ids < 0).any() else Run(first, ids)

    def trim(self, index: int, run: Run, length: int) -> Run:
        """The pages of a run that a state of this length needs; the others are given back."""
        store = self.stores[index]
        _, last = self.layout.pages(0, length)
        kept = run.part(store.unit.earliest(length) // self.layout.page_tokens, last)
        if len(kept.ids) < len(run.ids):
            store.release(run.ids[: kept.first - run.first])
            store.release(run.ids[kept.end - run.first :])
        inside = length % self.layout.page_tokens
        if inside and store.refs[kept.ids[-1]] == 1:
            store.fill[kept.ids[-1]] = inside  # nobody else knows what came after
        return kept

    @property
    def free_slabs(self) -> int:
        return len(self._free_slabs)

    @property
    def used_bytes(self) -> int:
        """Bytes of all pages and slots that are lent out, each once; the scratch entries included."""
        return sum(store.used * store.unit.stride for store in self.stores)

    @property
    def free_bytes(self) -> int:
        """Bytes that no page and no slot uses. Those in slabs of one unit cannot serve another."""
        return self.nbytes - self.used_bytes

    def register(self, holder: Holder) -> None:
        self._holders.add(holder)

    def unregister(self, holder: Holder) -> None:
        self._holders.remove(holder)

    def check(self) -> None:
        """Assert every invariant of the pool against its holders. For tests and for an idle engine."""
        held = [np.zeros(store.capacity, np.int32) for store in self.stores]
        for holder in self._holders:
            for index, ids in holder.references():
                np.add.at(held[index], ids, 1)
        owned = [slab for store, refs in zip(self.stores, held, strict=True) for slab in store.check(refs)]
        assert sorted([*self._free_slabs, *owned]) == list(range(self.slabs)), "a slab is lost or owned twice"
