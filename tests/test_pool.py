"""Layout and Pool: every byte has one owner, and what is lent comes back."""

import copy
import math
import resource
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bough.errors import PoolFull
from bough.ops import Pages, Rows, Slots, causal_conv, write_pages
from bough.state.kinds import FullKV, PageKind, Recurrent, ShortConv, WindowKV
from bough.state.layout import ALIGN, FIELD_ALIGN, Layout
from bough.state.pool import Pool
from bough.state.store import Run

SIZE = st.integers(1, 70)
FEW = st.integers(1, 5)
WINDOW = st.sampled_from([1, 2, 17, 4096])
KIND = st.one_of(
    st.none(),
    st.builds(FullKV, heads=FEW, k_dim=SIZE, v_dim=SIZE),
    st.builds(WindowKV, heads=FEW, k_dim=SIZE, v_dim=SIZE, window=WINDOW),
    st.builds(Recurrent, channels=SIZE, kernel=FEW, heads=FEW, k_dim=SIZE, v_dim=SIZE),
    st.builds(ShortConv, width=SIZE, kernel=FEW),
)
LAYOUT = st.builds(
    Layout.of,
    st.lists(KIND, max_size=10),
    page_tokens=st.sampled_from([1, 2, 3, 16, 32]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    kv_dtype=st.sampled_from([None, torch.float16, torch.float32]),
)


def filled(layout: Layout, slabs: int) -> Pool:
    return Pool(layout, slabs * layout.slab_bytes, max_running=0)


def least(layout: Layout) -> int:
    """Slabs for a scratch entry and one more of every unit."""
    return sum(math.ceil(2 / unit.per_slab) for unit in layout.units)


@given(LAYOUT)
def test_units_hold_their_layers(layout):
    groups = {(kind.reach if isinstance(kind, PageKind) else "slot") for kind in layout.kinds if kind is not None}
    assert len(layout.units) == len(groups)
    assert sorted(layout.unit_of) == [i for i, kind in enumerate(layout.kinds) if kind is not None]
    for layer, index in layout.unit_of.items():
        kind, unit = layout.kinds[layer], layout.units[index]
        assert unit.is_page == isinstance(kind, PageKind)
        if isinstance(kind, PageKind):
            assert unit.reach == (kind.window - 1 if isinstance(kind, WindowKV) else None)
            shapes = {"k": (kind.heads, kind.k_dim), "v": (kind.heads, kind.v_dim)}
            shapes = {name: (layout.page_tokens, *shape) for name, shape in shapes.items()}
        else:
            shapes = {"conv": (kind.kernel - 1, kind.channels if isinstance(kind, Recurrent) else kind.width)}
            if isinstance(kind, Recurrent):
                shapes["delta"] = (kind.heads, kind.k_dim, kind.v_dim)
                assert unit.fields[layer, "delta"].part.dtype == torch.float32
        assert {name: field.shape for (at, name), field in unit.fields.items() if at == layer} == shapes
    assert sum(len(unit.fields) for unit in layout.units) == sum(
        2 if isinstance(kind, PageKind | Recurrent) else 1 for kind in layout.kinds if kind is not None
    )


@settings(max_examples=300)
@given(LAYOUT)
def test_fields_lie_side_by_side_and_padding_is_bounded(layout):
    largest = ALIGN
    for unit in layout.units:
        end = 0
        for field in sorted(unit.fields.values(), key=lambda field: (field.offset, field.nbytes)):
            assert field.offset % FIELD_ALIGN == 0
            assert end <= field.offset < end + FIELD_ALIGN, "fields overlap, or lie too far apart"
            end = field.offset + field.nbytes
        assert unit.nbytes == end
        assert unit.stride % ALIGN == 0 and unit.stride * unit.per_slab == layout.slab_bytes
        rounded = math.ceil(max(1, unit.nbytes) / ALIGN) * ALIGN
        assert unit.stride >= rounded > 0.75 * unit.stride, "a quarter or more is padding"
        largest = max(largest, rounded)
    assert largest <= layout.slab_bytes <= 9 * largest


@given(LAYOUT, st.integers(0, 3))
def test_entries_do_not_overlap(layout, more):
    """Every value written to every part of every entry of a full pool is still there at the end."""
    pool = filled(layout, least(layout) + more)
    taken = [store.scratch + np.zeros(1, np.int64) for store in pool.stores]
    for index, store in enumerate(pool.stores):
        while True:
            try:
                lent = pool.take([int(i == index) for i in range(len(pool.stores))])[index]
            except PoolFull:
                break
            taken[index] = np.concatenate([taken[index], lent])
        assert store.used == len(taken[index]) == len(set(taken[index].tolist()))
    assert not pool.stores or sum(store.slabs for store in pool.stores) == pool.slabs
    parts = [(ids, store.parts[key]) for store, ids in zip(pool.stores, taken, strict=True) for key in store.parts]
    for number, (ids, part) in enumerate(parts):
        for entry in ids.tolist():
            part[entry] = (number * 31 + entry) % 251
    for number, (ids, part) in enumerate(parts):
        for entry in ids.tolist():
            assert (part[entry] == (number * 31 + entry) % 251).all()


class Hand:
    """A holder of references, as states and snapshots are."""

    def __init__(self, pool: Pool, ids: list[np.ndarray]) -> None:
        self.ids = ids
        pool.register(self)

    def references(self):
        return enumerate(self.ids)


def dump(pool: Pool) -> tuple[bytes, list[dict]]:
    """All there is to know of a pool: the bytes of its arena, and the books of every store."""
    views = {"unit", "data", "parts"}
    books = [{name: value for name, value in vars(store).items() if name not in views} for store in pool.stores]
    return pool.stores[0].data.numpy().tobytes(), [
        {
            name: value.tolist() if isinstance(value, np.ndarray) else copy.deepcopy(value)
            for name, value in each.items()
        }
        for each in books
    ]


KINDS = {
    "four": [FullKV(1, 8, 4), WindowKV(1, 8, 8, 4), ShortConv(100, 3), None, Recurrent(16, 4, 2, 8, 8)],
    "pages": [FullKV(2, 8, 8), FullKV(1, 3, 5)],
    "unequal": [FullKV(1, 64, 64), WindowKV(1, 4, 4, 9), WindowKV(1, 24, 8, 2)],
}


class PoolMachine(RuleBasedStateMachine):
    """take, share and release in any order, against a dictionary of references."""

    @initialize(kinds=st.sampled_from(sorted(KINDS)), page_tokens=st.sampled_from([1, 4]), more=st.integers(0, 6))
    def make(self, kinds, page_tokens, more):
        layout = Layout.of(KINDS[kinds], page_tokens=page_tokens, dtype=torch.float32)
        self.pool = filled(layout, least(layout) + more)
        self.refs: dict[tuple[int, int], int] = {}
        self.hands: list[Hand] = []
        self.scratch = [store.scratch for store in self.pool.stores]

    def slabs(self, index: int) -> set[int]:
        """The slabs that the unit must own."""
        used = [self.scratch[index], *(entry for unit, entry in self.refs if unit == index)]
        return {entry // self.pool.stores[index].unit.per_slab for entry in used}

    @rule(counts=st.lists(st.integers(0, 9), min_size=3, max_size=3))
    def take(self, counts):
        stores = self.pool.stores
        counts = counts[: len(stores)]
        needed = 0
        for index, count in enumerate(counts):
            owned = len(self.slabs(index)) * stores[index].unit.per_slab
            unused = owned - 1 - sum(unit == index for unit, _ in self.refs)
            needed += max(0, math.ceil((count - unused) / stores[index].unit.per_slab))
        free = self.pool.slabs - sum(len(self.slabs(index)) for index in range(len(stores)))
        if needed > free:
            before = dump(self.pool)
            with pytest.raises(PoolFull, match=f"{needed} more slabs .* and {free} of {self.pool.slabs} are free"):
                self.pool.take(counts)
            assert dump(self.pool) == before, "a refused request left a trace"
            return
        ids = self.pool.take(counts)
        assert [len(each) for each in ids] == counts
        for index, each in enumerate(ids):
            for entry in each.tolist():
                assert (index, entry) not in self.refs and entry != self.scratch[index], "lent twice"
                self.refs[index, entry] = 1
                assert stores[index].fill[entry] == 0, "marked by the one who had it before"
                stores[index].fill[entry] = 3
        self.hands.append(Hand(self.pool, ids))

    @precondition(lambda self: self.hands)
    @rule(data=st.data())
    def share(self, data):
        ids = data.draw(st.sampled_from(self.hands)).ids
        kept = [each[: data.draw(st.integers(0, len(each)))] for each in ids]
        for index, each in enumerate(kept):
            self.pool.stores[index].share(each)
            for entry in each.tolist():
                self.refs[index, entry] += 1
        self.hands.append(Hand(self.pool, kept))

    @precondition(lambda self: self.hands)
    @rule(data=st.data())
    def release(self, data):
        hand = self.hands.pop(data.draw(st.integers(0, len(self.hands) - 1)))
        self.pool.unregister(hand)
        for index, each in enumerate(hand.ids):
            self.pool.stores[index].release(each)
            for entry in each.tolist():
                self.refs[index, entry] -= 1
                if not self.refs[index, entry]:
                    del self.refs[index, entry]

    @invariant()
    def holds(self):
        self.pool.check()
        for index, store in enumerate(self.pool.stores):
            lent = {entry: count for (unit, entry), count in self.refs.items() if unit == index}
            expected = np.zeros(store.capacity, np.int32)
            expected[[*lent, self.scratch[index]]] = [*lent.values(), 1]
            assert np.array_equal(store.refs, expected)
            assert store.used == len(lent) + 1
            assert store.slabs == len(self.slabs(index)), "an empty slab is kept"
        used = sum(store.used * store.unit.stride for store in self.pool.stores)
        assert (self.pool.used_bytes, self.pool.free_bytes) == (used, self.pool.nbytes - used)

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        while self.hands:
            hand = self.hands.pop()
            self.pool.unregister(hand)
            for index, each in enumerate(hand.ids):
                self.pool.stores[index].release(each)
        self.pool.check()
        assert all(store.used == store.slabs == 1 for store in self.pool.stores), "something leaked"


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=25)


@pytest.mark.long
class TestPoolLong(PoolMachine.TestCase):
    settings = settings(max_examples=1000, stateful_step_count=80)


def test_a_slab_serves_another_unit_once_it_is_empty():
    layout = Layout.of(KINDS["unequal"], page_tokens=4, dtype=torch.float32)
    pool = filled(layout, least(layout) + 2)
    for index, store in enumerate(pool.stores):
        room = (pool.slabs - sum(s.slabs for s in pool.stores) + 1) * store.unit.per_slab - 1
        counts = [room * (i == index) for i in range(len(pool.stores))]
        lent = pool.take(counts)[index]
        for other in range(len(pool.stores)):
            with pytest.raises(PoolFull):
                pool.take([99 * (i == other) for i in range(len(pool.stores))])
        store.release(lent)
        pool.check()


def test_what_went_back_is_lent_in_the_order_it_lies_in():
    """Whole pages and slots, in whatever order they went back: pages from the front, slots from the back."""
    layout = Layout.of([FullKV(1, 64, 64), Recurrent(8, 2, 2, 16, 16)], page_tokens=4, dtype=torch.float32)
    pool = filled(layout, 20)
    pages, slots = pool.stores
    most = 6 * pages.unit.per_slab
    first = pool.take([most, 3])
    for each in torch.randperm(most, generator=torch.Generator().manual_seed(0)).tolist():
        pages.release(first[0][each : each + 1])
    slots.release(first[1])
    pool.check()
    assert pool._free_slabs == sorted(pool._free_slabs, reverse=True)
    again = pool.take([most, 3])
    own = pages.scratch // pages.unit.per_slab
    rest = again[0][again[0] // pages.unit.per_slab != own]  # of slabs that were empty
    assert (np.diff(rest) == 1).all() and set(again[0].tolist()) == set(first[0].tolist())
    assert again[1].min() * slots.unit.stride > again[0].max() * pages.unit.stride
    pages.release(again[0])
    assert pool.take([most, 0])[0].tolist() == sorted(again[0].tolist()), "a run that went back is a run again"


@given(st.lists(st.integers(0, 9), unique=True))
def test_a_run_knows_its_pages_however_they_lie(ids):
    run = Run(2, np.array(ids, np.int64))
    numbers = np.arange(10)
    assert numbers[run.entries].tolist() == ids
    assert isinstance(run.entries, slice) == (ids == list(range(ids[0], ids[0] + len(ids))) if ids else True)


def test_check_finds_what_is_wrong():
    layout = Layout.of(KINDS["four"], page_tokens=4, dtype=torch.float32)
    pool = filled(layout, 9)
    store = pool.stores[0]
    ids = store.take(1)
    with pytest.raises(AssertionError, match="held"):
        pool.check()
    store.release(ids)
    pool.check()
    with pytest.raises(AssertionError, match="released more often"):
        store.release(ids)
    slab = pool._free_slabs.pop()
    with pytest.raises(AssertionError, match="slab is lost"):
        pool.check()
    pool._free_slabs.append(slab)
    pool.check()


@given(LAYOUT)
def test_a_pool_that_is_too_small_says_what_it_takes(layout):
    nbytes = least(layout) * layout.slab_bytes
    assert Pool(layout, nbytes, max_running=1).nbytes == nbytes
    assert Pool(layout, nbytes + layout.slab_bytes - 1, max_running=1).nbytes == nbytes
    if nbytes:
        with pytest.raises(PoolFull, match=f"takes {nbytes:,} at the least"):
            Pool(layout, nbytes - 1, max_running=1)


def test_offsets_past_32_bits():
    """Pages and slots past 2³¹ bfloat16 values are written, copied and read as all others are.

    The arena is only mapped; the few entries touched are all that takes memory.
    """
    kinds = [FullKV(8, 128, 64), Recurrent(1024, 4, 4, 64, 64), FullKV(8, 64, 128)]
    layout = Layout.of(kinds, page_tokens=64, dtype=torch.bfloat16)
    front = math.ceil(2 * 2**31 / layout.slab_bytes)  # slabs
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pool = filled(layout, front + 8)
    pages, slots = pool.stores
    pool.take([front * pages.unit.per_slab, slots.unit.per_slab])
    page, slot = pool.take([2, 2])
    assert page.min() * pages.unit.stride // 2 > 2**31 < slot.min() * slots.unit.stride // 2
    for layer in (0, 2):
        part_k, part_v = pool.part(layer, "k"), pool.part(layer, "v")
        k, v = torch.randn(64, *part_k.shape[2:]).bfloat16(), torch.randn(64, *part_v.shape[2:]).bfloat16()
        written = Pages(
            part_k, part_v, torch.from_numpy(page[:1]), (0,), torch.full((64,), int(page[0])), torch.arange(64)
        )
        write_pages(k, v, written)
        pages.copy(page[:1], page[1:])
        for seen in (written, replace(written, table=torch.from_numpy(page[1:]))):
            assert torch.equal(seen.span(0, 3, 61)[0], k[3:61]) and torch.equal(seen.span(0, 3, 61)[1], v[3:61])
    x, taps = torch.randn(9, 1024).bfloat16(), torch.randn(4, 1024)
    conv, (read, write) = pool.part(1, "conv"), slot.tolist()
    causal_conv(x[:5], taps, Rows((5,), (0,)), stored=Slots(conv, (read,), (read,)))
    causal_conv(x[5:], taps, Rows((4,), (5,)), stored=Slots(conv, (read,), (write,)))
    assert torch.equal(conv[read], x[2:5]) and torch.equal(conv[write], x[6:])
    delta = pool.part(1, "delta")
    delta[read] = torch.arange(delta[0].numel()).view(delta[0].shape)
    slots.copy(slot[:1], slot[1:])
    assert torch.equal(delta[write], delta[read]) and torch.equal(conv[write], x[2:5])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 2**28, "the arena was touched all over"
