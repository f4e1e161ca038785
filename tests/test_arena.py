"""Two pools in one arena, copies between pools, entries moved together: nobody's state changes by any of it."""

from random import Random

import numpy as np
import pytest
import torch
from toy import VOCABULARY, check, close, toy

from bough import ops
from bough.errors import PoolFull, StateError
from bough.ops.ragged import Rows, Slots
from bough.state.layout import layouts
from bough.state.live import State
from bough.state.pool import Pool
from bough.state.reservation import forward
from bough.state.snapshot import Snapshot


def two_pools(slabs: int, page_tokens: int = 4, max_running: int = 4):
    """Models of all kinds and of pages alone, whose pools share an arena."""
    models = toy(5), toy(9, slots=False)
    first, second = layouts([m.kinds for m in models], page_tokens=page_tokens, dtype=torch.float32)
    pool = Pool(first, slabs * first.slab_bytes, max_running=max_running)
    return models, (pool, Pool(second, max_running=max_running, beside=pool))


def feed(model, state: State, tokens: tuple[int, ...], cuts=()) -> None:
    with forward(state.pool, [(state, tokens)], cuts=[cuts]) as step:
        model(step)


def some(dice: Random, most: int = 12) -> tuple[int, ...]:
    return tuple(dice.choices(range(VOCABULARY), k=dice.randint(1, most)))


class Life:
    """States of two pools in one arena, what was copied aside of them, and what may happen to them."""

    def __init__(self, dice: Random) -> None:
        self.dice = dice
        self.models, self.pools = two_pools(slabs=dice.choice([12, 20, 40]), page_tokens=dice.choice([1, 4]))
        layout = self.pools[0].layout
        self.spare = Pool(layout, 40 * layout.slab_bytes, max_running=0)
        self.states: list[tuple[int, State, tuple[int, ...]]] = []
        self.aside: list[tuple[Snapshot, tuple[int, ...]]] = []

    def new(self) -> None:
        which = self.dice.randint(0, 1)
        if len(self.pools[which].states) < 4:
            self.states.append((which, State(self.pools[which]), ()))

    def grow(self) -> None:
        which, state, tokens = self.pick()
        more = some(self.dice)
        try:
            feed(self.models[which], state, more)
        except PoolFull as error:
            if not self.pools[which].fits(error.needs):
                return
            self.pools[which].compact(error.needs)
            feed(self.models[which], state, more)
        self.states.remove((which, state, tokens))
        self.states.append((which, state, tokens + more))

    def keep(self) -> None:
        which, state, tokens = self.pick()
        snapshot = state.snapshot(0) if which == 0 and tokens else None
        if snapshot is not None:
            if self.spare.fits(snapshot.sizes(), spare=True):
                self.aside.append((snapshot.copy_to(self.spare), tokens))
            snapshot.close()

    def give_back(self) -> None:
        gone = self.pick()
        self.states.remove(gone)
        gone[1].release()

    def compact(self) -> None:
        pool = self.pools[1]
        counts = [self.dice.choice([0, 1, 3, 9]) for _ in pool.stores]
        pool.compact(counts)
        assert pool.fits(counts) == (pool.slabs_for(counts) <= pool.free_slabs)

    def pick(self) -> tuple[int, State, tuple[int, ...]]:
        if not self.states:
            self.states.append((0, State(self.pools[0]), ()))
        return self.dice.choice(self.states)

    def check(self) -> None:
        for pool in (*self.pools, self.spare):
            pool.check()
        assert sum(pool.used_bytes for pool in self.pools) <= self.pools[0].nbytes
        for which, state, tokens in self.states:
            check(self.models[which], state, tokens)


@pytest.mark.parametrize("seed", range(6))
def test_pools_share_an_arena(seed):
    """States of both grow, are saved, copied aside and given up until memory is full, and never take it twice."""
    dice = Random(seed)
    life = Life(dice)
    for _ in range(120):
        move = dice.choices([life.new, life.grow, life.keep, life.give_back, life.compact], [5, 9, 2, 2, 2])[0]
        move()
        life.check()
    for _, state, _ in life.states:
        state.release()
    for snapshot, tokens in life.aside:
        came_back(life.models[0], snapshot, tokens)
        snapshot.close()
    life.states = []
    life.check()
    scratch = sum(store.unit.stride for pool in life.pools for store in pool.stores)
    assert sum(pool.used_bytes for pool in life.pools) == scratch


def test_the_slot_set_aside_for_a_commit_moves_too():
    (model, _), (pool, _) = two_pools(slabs=20)
    before, state = State(pool), State(pool)
    feed(model, before, (1, 2, 3))
    with state.begin() as transaction:
        feed(model, state, (4, 0, 2))
        before.release()
        store = pool.stores[pool.slot_store]
        old, new, swapped = transaction.target, int(store.take(1)[0]), np.arange(store.capacity)
        swapped[[old, new]] = new, old
        store.release(np.array([old]))
        for holder in list(pool._holders):
            holder.moved(pool.slot_store, swapped)
        pool.check()
        transaction.commit(2)
    check(model, state, (4, 0))


def came_back(model, snapshot: Snapshot, tokens: tuple[int, ...]) -> None:
    """A snapshot copied elsewhere and into a fresh pool is as good as the state it was taken from."""
    layout = snapshot.pool.layout
    pool = Pool(layout, 60 * layout.slab_bytes, max_running=1)
    back, state = snapshot.copy_to(pool), State(pool)
    if back.resumes:
        state.restore([back], len(tokens))
        check(model, state, tokens)
    else:
        with pytest.raises(StateError):
            state.restore([back], len(tokens))
    back.close()
    state.release()
    pool.check()


def test_an_edge_and_its_point_can_be_copied_apart():
    model = toy(5)
    layout = model.layout(4)
    pool, other = (Pool(layout, 60 * layout.slab_bytes, max_running=2) for _ in range(2))
    state, tokens = State(pool), tuple(i % VOCABULARY for i in range(21))
    feed(model, state, tokens)
    snapshot = state.snapshot(0)
    edge = snapshot.copy_to(other, point=False)
    point = snapshot.copy_to(other, edge=False)
    assert not edge.resumes and point.start == point.end == 21
    whole = edge.with_point(point)
    assert whole.resumes and whole.sizes() == snapshot.sizes()
    fresh = State(other)
    fresh.restore([whole], 21)
    check(model, fresh, tokens)
    bare = whole.without_point()
    assert not bare.resumes and bare.sizes() == snapshot.sizes(point=False)
    for each in (snapshot, bare):
        each.close()
    for each in (state, fresh):
        each.release()
    pool.check()
    other.check()


def test_known_entries_are_read_and_not_written():
    """Resumed at a point with pages known beyond it, a state computes again without touching them."""
    model = toy(5)
    layout = model.layout(4)
    pool = Pool(layout, 60 * layout.slab_bytes, max_running=3)
    state, tokens = State(pool), tuple((3 * i) % VOCABULARY for i in range(26))
    feed(model, state, tokens, cuts=[10])
    early, late = state.snapshot(0, 10), state.snapshot(10, 26)
    full = next(i for i in pool.page_stores if pool.layout.units[i].reach is None)
    other = State(pool)
    other.restore([early, late], 10, known=23)
    assert (other.length, other.known) == (10, 23)
    pages, before = other.runs[full].ids.copy(), pool.stores[full].data[other.runs[full].ids].clone()
    feed(model, other, tokens[10:17])
    assert other.known == 23 and other.runs[full].ids.tolist() == pages.tolist()
    feed(model, other, tokens[17:23])
    assert torch.equal(pool.stores[full].data[pages], before), "known entries were written"
    check(model, other, tokens[:23])
    feed(model, other, (1, 2))
    check(model, other, (*tokens[:23], 1, 2))
    check(model, state, tokens)
    for each in (early, late):
        each.close()
    for each in (state, other):
        each.release()
    pool.check()


def test_two_that_computed_the_same_keep_it_once():
    model = toy(5, slots=False)
    layout = model.layout(4)
    pool = Pool(layout, 60 * layout.slab_bytes, max_running=3)
    tokens = tuple(i % VOCABULARY for i in range(19))
    one, two = State(pool), State(pool)
    feed(model, one, tokens)
    feed(model, two, (*tokens, 3))
    snapshot, used = one.snapshot(0), pool.used_bytes
    two.adopt([snapshot])
    assert pool.used_bytes < used
    check(model, two, (*tokens, 3))
    feed(model, two, (1, 0))
    check(model, two, (*tokens, 3, 1, 0))
    check(model, one, tokens)
    snapshot.close()
    one.release()
    two.release()
    pool.check()


def test_carry_keeps_the_last_row():
    rows = Rows((3, 0, 1), (0, 4, 2), cuts=((1, 3), (), ()))
    data = torch.randn(8, 1, 5)
    kept = data.clone()
    x = torch.randn(4, 5)
    ops.carry(x, rows, stored=Slots(data, (0, 1, 2), (3, 1, 4), ((5, 6), (), ())))
    close(data[3], x[2:3].double(), "the last of three")
    close(data[4], x[3:4].double(), "a single one")
    close(data[5], x[0:1].double(), "at a cut")
    close(data[6], x[2:3].double(), "at a cut at the end")
    assert torch.equal(data[1], kept[1]) and np.isfinite(data.numpy()).all()
