"""The memory of all state on one device: one arena, cut into slabs, lent out as pages and slots.

Invariants (`check()` asserts them):
- refs(entry) is the number of live holders (states, snapshots, open reservations, begun rounds) that list it; scratch
  has one more.
- A slab is free or belongs to exactly one unit; a unit owns a slab exactly while one of its entries there is used.
- free + used == all, in slabs and in bytes.
- A page's fill mark is at least what any holder has in it.
- Every sequence that may run can get a slot of its own: so much is kept back from pages and from snapshots.
Entry 0 of a unit's first slab is scratch: padded rows read and write it, and nobody looks at what it holds.

Knows nothing of models or trees.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from bough.errors import PoolFull
from bough.state.capacity import slabs
from bough.state.layout import Layout
from bough.state.store import EMPTY, Ids, Run, Store


class Holder(Protocol):
    """Whoever keeps references to entries of the pool."""

    def references(self) -> Iterable[tuple[int, Ids]]:
        """Pairs of a unit's index and the entries held there."""

    def moved(self, unit: int, where: Ids) -> None:
        """Entry i of the unit is at where[i] now."""


class Running(Protocol):
    """A holder that needs a slot that it can write to go on."""

    slot: int | None

    @property
    def target(self) -> int | None:
        """A slot set aside for it beside its present one."""


@dataclass(slots=True)
class Arena:
    """Memory in slabs, and the pools that share it."""

    data: torch.Tensor  # uint8
    free: list[int]  # slabs, from the last to the first
    pools: "list[Pool]" = field(default_factory=list)


class Pool:
    """The stores of one layout, in an arena of `nbytes`, of its own or shared with the pool that it stands `beside`."""

    def __init__(
        self,
        layout: Layout,
        nbytes: int = 0,
        *,
        max_running: int,
        device: torch.device | str = "cpu",
        pinned: bool = False,
        beside: "Pool | None" = None,
    ) -> None:
        self.layout, self.max_running = layout, max_running
        if beside is None:
            self.slabs = nbytes // layout.slab_bytes
            self._expect_enough(nbytes)
            data = torch.empty(self.slabs * layout.slab_bytes, dtype=torch.uint8, device=device, pin_memory=pinned)
            self.device = data.device  # with its index, where it has one
            self.arena = Arena(data, list(range(self.slabs - 1, -1, -1)))
        else:
            assert layout.slab_bytes == beside.layout.slab_bytes, "layouts of one arena are made together"
            self.slabs, self.device, self.arena = beside.slabs, beside.device, beside.arena
        self.nbytes = self.slabs * layout.slab_bytes
        self._free_slabs = self.arena.free
        self.stores = tuple(Store(unit, self.arena.data, layout.slab_bytes, self._free_slabs) for unit in layout.units)
        self.page_stores = tuple(i for i, store in enumerate(self.stores) if store.unit.is_page)
        self.has_windows = any(self.stores[i].unit.reach is not None for i in self.page_stores)
        slots = [i for i, store in enumerate(self.stores) if not store.unit.is_page]
        self.slot_store = slots[0] if slots else None
        self.states: set[Running] = set()
        self._holders: set[Holder] = set()
        self.arena.pools.append(self)

    def _expect_enough(self, nbytes: int) -> None:
        least = slabs(self.layout, 1, tokens=1, step_tokens=1, max_running=self.max_running) * self.layout.slab_bytes
        if self.slabs * self.layout.slab_bytes < least:
            raise PoolFull(
                f"{nbytes:,} bytes are too few: the state of {self.max_running} sequences takes {least:,} at the least;"
                " give more (CacheConfig.device_bytes, or --cache-bytes) or run fewer (max_running)"
            )

    def part(self, layer: int, name: str) -> torch.Tensor:
        """A layer's part of every entry of its unit: [entries, *shape]."""
        return self.stores[self.layout.unit_of[layer]].parts[layer, name]

    def take(self, counts: Sequence[int], *, spare: bool = False) -> list[Ids]:
        """Lend so many entries of each unit, or none at all: raises PoolFull and changes nothing.

        Slots are for states, and there whatever pages and snapshots take; or, if `spare`, for whoever can do without.
        """
        if not any(counts):
            return [EMPTY.ids] * len(counts)
        needed = self.slabs_for(counts, spare=spare) if self._takes_slabs(counts) else 0
        if needed > len(self._free_slabs):
            wanted = ", ".join(f"{n} {s.unit.name}" for n, s in zip(counts, self.stores, strict=True) if n)
            raise PoolFull(
                f"{wanted} take {needed} more slabs of {self.layout.slab_bytes:,} bytes, and {len(self._free_slabs)} of"
                f" {self.slabs} are free; release sequences or give the cache more memory",
                list(counts),
            )
        return [store.take(count) for store, count in zip(self.stores, counts, strict=True)]

    def _takes_slabs(self, counts: Sequence[int]) -> bool:
        """Whether what is kept back for running sequences may change."""
        return any(
            count and (not store.unit.is_page or store.slabs_for(count))
            for store, count in zip(self.stores, counts, strict=True)
        )

    def slabs_for(self, counts: Sequence[int], *, spare: bool = False) -> int:
        """How many free slabs it takes to lend these, and to keep back what running sequences may still ask for."""
        return sum(store.slabs_for(count) for store, count in self._all_needs(counts, spare))

    def fits(self, counts: Sequence[int], *, spare: bool = False) -> bool:
        """Whether these can be lent, if need be after moving entries together (`compact`)."""
        needs = self._all_needs(counts, spare)
        return sum(-(-(store.used + count) // store.unit.per_slab) for store, count in needs) <= self.slabs

    def compact(self, counts: Sequence[int], *, spare: bool = False) -> None:
        """Move entries together until slabs enough are free to lend these, as far as that helps. Between steps only."""
        for pool in self.arena.pools:
            for index, store in enumerate(pool.stores):
                lacking = self.slabs_for(counts, spare=spare) - len(self._free_slabs)
                if lacking > 0 and (where := store.gather(lacking)) is not None:
                    for holder in pool._holders:
                        holder.moved(index, where)

    def _all_needs(self, counts: Sequence[int], spare: bool) -> Iterator[tuple[Store, int]]:
        """The stores of all pools of the arena, with what is asked of each or owed by it."""
        for pool in self.arena.pools:
            asked = counts if pool is self else [0] * len(pool.stores)
            yield from zip(pool.stores, pool._with_owed(asked, spare), strict=True)

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
        sharers = Counter([state.slot for state in self.states if state.slot is not None])
        kept = int((self.refs_of(list(sharers)) == list(sharers.values())).sum())
        return self.max_running - kept - sum([state.target is not None for state in self.states])

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
        owed = sum(
            pool.stores[pool.slot_store].slabs_for(pool._owed_slots)
            for pool in self.arena.pools
            if pool is not self and pool.slot_store is not None
        )
        unused = (store.slabs + len(self._free_slabs) - owed) * store.unit.per_slab - store.used
        return unused - self._owed_slots

    def slot_reference(self, slot: int | None) -> list[tuple[int, Ids]]:
        """A slot as a holder lists it."""
        if slot is None:
            return []
        assert self.slot_store is not None
        return [(self.slot_store, np.array([slot], np.int64))]

    def slot_refs(self, slot: int) -> int:
        return int(self.refs_of([slot])[0])

    def refs_of(self, slots: Sequence[int]) -> NDArray[np.int32]:
        """How many refer to each of these slots."""
        assert self.slot_store is not None
        return self.stores[self.slot_store].refs[np.array(slots, np.int64)]

    def share_slot(self, slot: int) -> None:
        """Add one reference to it."""
        assert self.slot_store is not None
        refs = self.stores[self.slot_store].refs
        assert refs[slot], "a slot is shared that nobody holds"
        refs[slot] += 1

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
            low, high = run.clip(first, last if end >= length else end // self.layout.page_tokens)
            ids[low - first : high - first] = run.ids[low - run.first : high - run.first]
        return None if (ids < 0).any() else Run(first, ids)

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
        """Assert every invariant of the arena against the holders of its pools. For tests and for an idle engine."""
        owned: list[int] = []
        for pool in self.arena.pools:
            held = [np.zeros(store.capacity, np.int32) for store in pool.stores]
            for holder in pool._holders:
                for index, ids in holder.references():
                    np.add.at(held[index], ids, 1)
            for store, refs in zip(pool.stores, held, strict=True):
                owned += store.check(refs)
        assert sorted([*self._free_slabs, *owned]) == list(range(self.slabs)), "a slab is lost or owned twice"
