"""States and reservations on the toy model of all four kinds: whatever happens, a state holds what its tokens say."""

from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_pool import dump
from toy import VOCABULARY, WIDTH, WINDOW, check, close, feed, pool_of, text, toy, used

from bough.errors import PoolFull, StateError
from bough.ops import Mask
from bough.state import capacity
from bough.state.live import State
from bough.state.pool import Pool
from bough.state.reservation import forward
from bough.state.step import Step


def books(pool: Pool) -> list:
    """References, and the fill marks of whatever is referred to."""
    return [(s.used, s.slabs, s.refs.tolist(), s.fill[s.refs > 0].tolist()) for s in pool.stores]


# Dice spread well, where hypothesis by itself prefers small batches. What it still shrinks is the list of rules.
DICE = st.builds(Random, st.integers(0, 2**20))


def some_tokens(dice: Random) -> tuple[int, ...]:
    return tuple(dice.choices(range(VOCABULARY), k=dice.choice([0, 1, 1, 1, 2, 3, 5, 9, 40])))


class StateMachine(RuleBasedStateMachine):
    """extend, fork, release and failures in any order."""

    @initialize(
        window=st.sampled_from([1, 2, 3, 5, 9, 40]),
        page_tokens=st.sampled_from([1, 2, 4, 32]),
        slabs=st.sampled_from([0, 5, 20, 60, 200]),
        max_running=st.integers(3, 8),
        length=st.integers(0, 12),
        slots=st.sampled_from([True, True, False]),
    )
    def make(self, window, page_tokens, slabs, max_running, length, slots):
        self.model = toy(window, slots)
        layout = self.model.layout(page_tokens)
        slabs += capacity.slabs(layout, 1, length or 1, length or 1, max_running)
        self.pool = Pool(layout, slabs * layout.slab_bytes, max_running=max_running)
        self.tokens: dict[State, tuple[int, ...]] = {State(self.pool): ()}
        self.feed([(state, text(length)) for state in self.tokens])

    def batch(self, dice: Random) -> list[tuple[State, tuple[int, ...]]]:
        """Some states in some order, with some or no tokens for each."""
        states = dice.sample(list(self.tokens), dice.randint(1, len(self.tokens)))
        return [(state, self.some_for(state, dice)) for state in states]

    def some_for(self, state: State, dice: Random) -> tuple[int, ...]:
        """Tokens that the state may be fed."""
        return some_tokens(dice)

    def feed(self, batch) -> None:
        with forward(self.pool, batch) as step:
            self.pool.check()
            rows = iter(self.model(step))
        for state, tokens in batch:
            for token in tokens:
                self.tokens[state] += (token,)
                close(next(rows), self.model.record(self.tokens[state])["hidden"], "hidden row")

    def may_be_full(self, batch) -> bool:
        """Whether the pool lacks room for pages when every row copies its tail. Slots never lack."""
        size, needs = self.pool.layout.page_tokens, [0] * len(self.pool.stores)
        for state, tokens in batch:
            for unit, store in enumerate(self.pool.stores):
                pages = -(-(state.length + len(tokens)) // size) - state.length // size + 1
                needs[unit] += pages if store.unit.is_page and tokens else 0
        if (index := self.pool.slot_store) is not None:
            sharers = Counter(state.slot for state in self.tokens if state.slot is not None)
            kept = sum(self.pool.stores[index].refs[slot] == count for slot, count in sharers.items())
            needs[index] = self.pool.max_running - kept
        free = self.pool.slabs - sum(store.slabs for store in self.pool.stores)
        return sum(store.slabs_for(need) for store, need in zip(self.pool.stores, needs, strict=True)) > free

    @rule()
    def new(self):
        if len(self.tokens) == self.pool.max_running:
            with pytest.raises(PoolFull, match=f"{self.pool.max_running} sequences"):
                State(self.pool)
        else:
            self.tokens[State(self.pool)] = ()

    @precondition(lambda self: self.tokens)
    @rule(dice=DICE)
    def extend(self, dice):
        batch = self.batch(dice)
        before = dump(self.pool)
        try:
            self.feed(batch)
        except PoolFull:
            assert self.may_be_full(batch)
            assert dump(self.pool) == before

    @precondition(lambda self: self.tokens)
    @rule(dice=DICE, layer=st.integers(0, 4))
    def fail(self, dice, layer):
        """A forward that raises leaves all as it was, but for states whose slot it may have written in place."""
        batch = self.batch(dice)
        before, full = self.page_books(), False
        moving = Counter(state.slot for state, tokens in batch if tokens and state.slot is not None)
        alone = {slot for slot, count in moving.items() if self.pool.slot_refs(slot) == count}
        broken = {state for state, tokens in batch if tokens and state.slot in alone}
        try:
            with forward(self.pool, batch) as step:
                self.model(step, fail_after=layer)
        except InterruptedError:
            pass
        except PoolFull:
            assert self.may_be_full(batch)
            full = True
        assert self.page_books() == before
        for state, _ in batch:
            assert state.condition == ("broken" if state in broken and not full else "ready")
            if state.condition == "broken":
                for use in (state.fork, lambda state=state: forward(self.pool, [(state, [0])]).__enter__()):
                    with pytest.raises(StateError, match="broken"):
                        use()
                self.give_back(state)

    def page_books(self) -> list:
        return [each for index, each in enumerate(books(self.pool)) if index != self.pool.slot_store]

    @precondition(lambda self: self.tokens)
    @rule(dice=DICE)
    def fork(self, dice):
        """Once or more, and let the forks and the state itself go on in one step."""
        state = dice.choice(list(self.tokens))
        batch = [(state, self.some_for(state, dice))]
        for _ in range(dice.randint(1, 3)):
            before = dump(self.pool)
            if len(self.tokens) == self.pool.max_running:
                with pytest.raises(PoolFull):
                    state.fork()
                assert dump(self.pool) == before
                break
            self.tokens[fork := state.fork()] = self.tokens[state]
            after = dump(self.pool)
            assert after[0] == before[0], "bytes were written"
            assert [books["used"] for books in after[1]] == [books["used"] for books in before[1]]
            batch.append((fork, some_tokens(dice)))
        self.holds()
        try:
            self.feed(dice.sample(batch, len(batch)))
        except PoolFull:
            assert self.may_be_full(batch)

    @precondition(lambda self: self.tokens)
    @rule(dice=DICE)
    def release(self, dice):
        self.give_back(dice.choice(list(self.tokens)))

    def give_back(self, state):
        state.release()
        state.release()  # a second time does nothing
        del self.tokens[state]
        with pytest.raises(StateError, match="released"):
            state.fork()

    @invariant()
    def holds(self):
        self.pool.check()
        assert self.pool.states == set(self.tokens)
        for state, tokens in self.tokens.items():
            check(self.model, state, tokens)

    def teardown(self):
        if hasattr(self, "pool"):
            for state in list(self.tokens):
                self.give_back(state)
            self.pool.check()
            assert not self.pool.states and all(store.used == 1 for store in self.pool.stores), "something leaked"


TestState = StateMachine.TestCase
TestState.settings = settings(max_examples=120, stateful_step_count=25)


@pytest.mark.long
class TestStateLong(StateMachine.TestCase):
    settings = settings(max_examples=2000, stateful_step_count=60)


def test_forking_a_long_state_copies_nothing():
    model = toy(9)
    pool = pool_of(model, 32)
    state, tokens = State(pool), text(1003)
    feed(model, (state, tokens))
    counts, before = used(pool), dump(pool)
    assert counts == [32, 1, 1]
    forks = [state.fork() for _ in range(64)]
    assert used(pool) == counts and dump(pool)[0] == before[0]
    feed(model, *((fork, (i % VOCABULARY,)) for i, fork in enumerate(forks)))
    assert used(pool) == [32 + 63, 1 + 63, 1 + 64], "the first appends in place, the others copy one tail each"
    for i, fork in enumerate(forks):
        check(model, fork, (*tokens, i % VOCABULARY))
        fork.release()
    check(model, state, tokens)
    assert used(pool) == counts


@pytest.mark.parametrize("inside", [1, 2, 3])
def test_who_appends_in_place(inside):
    """At the fill mark: in place, though others hold the page. Short of it: on a copy, or in place when alone."""
    model = toy(4)
    pool = pool_of(model, 4)
    first, tokens = State(pool), text(4 + inside)
    feed(model, (first, tokens))
    second, third = first.fork(), first.fork()
    tail = first.runs[0].ids[1]
    feed(model, (second, (1,)))
    assert second.runs[0].ids[1] == tail, "at the mark"
    feed(model, (first, (2,)))
    assert first.runs[0].ids[1] != tail, "another has written there"
    second.release()
    feed(model, (third, (3,)))
    assert third.runs[0].ids[1] == tail, "alone on it"
    check(model, first, (*tokens, 2))
    check(model, third, (*tokens, 3))
    assert used(pool)[0] == 3


def test_a_full_page_is_never_copied():
    model = toy(4)
    pool = pool_of(model, 4)
    first = State(pool)
    feed(model, (first, text(8)))
    second = first.fork()
    feed(model, (second, (1,)), (first, (2,)))
    assert first.runs[0].ids[:2].tolist() == second.runs[0].ids[:2].tolist() and used(pool)[0] == 4
    check(model, first, (*text(8), 2))
    check(model, second, (*text(8), 1))


@pytest.mark.parametrize("page_tokens", [1, 2, 4, 32])
def test_forks_append_in_one_step(page_tokens):
    """Each gets its own continuation, whoever of them writes the shared tail in place and in whatever order."""
    model = toy(3)
    for length in (1, 5, 8, 33):
        pool = pool_of(model, page_tokens)
        first = State(pool)
        feed(model, (first, text(length)))
        states = [first, first.fork(), first.fork(), first.fork()]
        added = [(1, 2, 3), (), (4,), (0,) * 9]
        feed(model, *zip(states[::-1], added, strict=True))
        for state, more in zip(states[::-1], added, strict=True):
            check(model, state, (*text(length), *more))
        pool.check()


@given(
    st.sampled_from([1, 2, 5, 17, 100]),
    st.sampled_from([1, 2, 4, 32]),
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
)
@settings(max_examples=40)
def test_a_window_takes_window_and_step(window, page_tokens, steps):
    """Exactly the pages of [length − window + 1, length) between steps, and of that and the step's tokens in one."""
    model = toy(window)
    pool, length = pool_of(model, page_tokens), 0
    state, (_, most, _) = State(pool), capacity.entries(pool.layout, sum(steps), max(steps))
    for count in steps:
        low = max(0, length - window + 1) // page_tokens
        length += count
        with forward(pool, [(state, text(length)[length - count :])]) as step:
            during = -(-length // page_tokens) - low
            assert used(pool) == [-(-length // page_tokens), during, 1]
            assert during <= most
            model(step)
        kept = -(-length // page_tokens) - max(0, length - window + 1) // page_tokens
        assert used(pool) == [-(-length // page_tokens), kept, 1]
        assert kept <= -(-(window - 1) // page_tokens) + 1
    check(model, state, text(length))


def test_a_full_pool_can_be_used_again():
    model = toy(5)
    layout = model.layout(4)
    pool = Pool(layout, capacity.slabs(layout, 2, 16, 16, 3) * layout.slab_bytes, max_running=3)
    states = [State(pool) for _ in range(3)]
    feed(model, (states[0], text(10)), (states[1], text(12)))
    before, lengths = dump(pool), [state.length for state in states]
    everything = [(state, text(99)) for state in states]
    with pytest.raises(PoolFull, match="release sequences or give the cache more memory"):
        feed(model, *everything)
    assert dump(pool) == before and [state.length for state in states] == lengths
    assert all(state.condition == "ready" for state in states)
    states[0].release()
    feed(model, (states[2], text(6)), (states[1], (1,)))
    check(model, states[2], text(6))
    check(model, states[1], (*text(12), 1))


def test_forks_get_their_slots_whatever_pages_take():
    """A pool filled up with pages keeps back one slot for every sequence that may run, forks among them."""
    model = toy(4)
    pool = pool_of(model, 4, slabs=40, max_running=5)
    first = State(pool)
    feed(model, (first, text(3)))
    hoard = []
    while True:
        try:
            hoard.append(pool.take([1, 0, 0])[0])
        except PoolFull:
            break
    forks = [first.fork() for _ in range(4)]
    for i, fork in enumerate(forks):
        if i:  # the first appends in place; make room for copies of the two tails
            pool.stores[0].release(np.concatenate([hoard.pop(), hoard.pop()]))
        feed(model, (fork, (i,)))
        check(model, fork, (*text(3), i))
    assert used(pool)[2] == 5 and pool.slot_refs(first.slot) == 1


@pytest.mark.parametrize(
    ("counts", "history"), [((70,), (0,)), ((1,), (33,)), ((1, 0, 9, 30), (80, 4, 2, 0)), ((), ())]
)
def test_a_rehearsal_leaves_the_pool_alone(counts, history):
    model = toy(6)
    pool = pool_of(model, 4)
    state = State(pool)
    feed(model, (state, text(21)))
    for store in pool.stores:
        store.data[store.scratch] = 0
    before = dump(pool)
    step = Step.rehearsal(pool, counts, history)
    first = [run.first for run in step.numbers.runs[1]]
    assert first == [max(0, h - 5) // 4 for h in history], "no pages that a window has left behind"
    assert model(step).shape == (sum(counts), WIDTH)
    for store in pool.stores:
        store.data[store.scratch] = 0
    assert dump(pool) == before
    check(model, state, text(21))


def test_a_state_in_a_step_is_left_alone():
    model = toy(4)
    pool = pool_of(model, 4)
    state, other = State(pool), State(pool)
    with forward(pool, [(state, [1, 2])]) as step:
        for use in (state.fork, state.release, lambda: feed(model, (state, (1,)))):
            with pytest.raises(StateError, match="in a step"):
                use()
        feed(model, (other, (3,)))  # others go on
        model(step)
    check(model, state, (1, 2))
    check(model, other, (3,))
    with pytest.raises(StateError, match="twice"):
        feed(model, (state, (1,)), (state, (2,)))
    check(model, state, (1, 2))


def test_wrong_input_is_refused_before_anything_is_reserved():
    """So that it does not break a state whose slot would have been written in place."""
    model = toy(4)
    pool = pool_of(model, 4)
    state = State(pool)
    feed(model, (state, (1, 2, 3)))
    before = dump(pool)
    with pytest.raises((TypeError, ValueError)):
        feed(model, (state, ("a", None)))
    with pytest.raises(ValueError, match="2 masks for 1 rows"), forward(pool, [(state, [1])], (None, Mask())):
        pass
    assert state.condition == "ready" and dump(pool) == before
    feed(model, (state, (4,)))
    check(model, state, (1, 2, 3, 4))


def test_masks_reach_the_layers():
    """A span lets its first token see the second, so K and V above differ; the state takes it like any other step."""
    model = toy(4)
    pool = pool_of(model, 4)
    state, plain = State(pool), State(pool)
    feed(model, (plain, (1, 2, 3)))
    with forward(pool, [(state, (1, 2, 3))], (Mask(spans=((0, 2),)),)) as step:
        model(step)
    state.check()
    masked, causal = (pool.part(WINDOW, "k")[each.runs[1].ids[0], :3] for each in (state, plain))
    assert (masked != causal).flatten(1).any(1).tolist() == [True, False, False]
