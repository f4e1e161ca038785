"""States and reservations on a toy model of all four kinds: whatever happens, a state holds what its tokens say.

The oracle is the model written once more in float64, one token at a time, remembered by prefix. After every step the
K and V entries within reach, in token order, and the slot of every live state are compared with it.
"""

from contextlib import suppress
from functools import cache
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_pool import dump

from bough import ops
from bough.errors import PoolFull, StateError
from bough.ops import Mask
from bough.state import capacity
from bough.state.kinds import FullKV, Recurrent, ShortConv, WindowKV
from bough.state.layout import Layout
from bough.state.live import State
from bough.state.pool import Pool
from bough.state.reservation import forward
from bough.state.step import Step

WIDTH, VOCABULARY = 6, 5
FULL, WINDOW, DELTA, NOTHING, CONV = range(5)


class Toy:
    """A residual model with a layer of each kind and one without state. K and V widths differ; heads are grouped."""

    def __init__(self, window: int) -> None:
        self.kinds = [
            FullKV(1, 3, 2),
            WindowKV(2, 2, 3, window),
            Recurrent(10, 3, 2, 2, 3),  # channels: q and k of one head, v of two
            None,
            ShortConv(WIDTH, 4),
        ]
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) * shape[0] ** -0.5

        self.embedding = weight(VOCABULARY, WIDTH) * 2
        self.qkv = {FULL: weight(WIDTH, 2 * 3 + 3 + 2), WINDOW: weight(WIDTH, 4 * 2 + 2 * 2 + 2 * 3)}
        self.delta_in, self.delta_gates = weight(WIDTH, 10), weight(WIDTH, 4)
        self.taps = {DELTA: weight(3, 10), CONV: weight(4, WIDTH)}
        self.out = {FULL: weight(4, WIDTH), WINDOW: weight(12, WIDTH), DELTA: weight(6, WIDTH), NOTHING: weight(6, 6)}
        self.out[CONV] = weight(WIDTH, WIDTH)
        self.float64 = {
            name: {k: v.double().numpy() for k, v in value.items()}
            if isinstance(value, dict)
            else value.double().numpy()
            for name, value in vars(self).items()
            if isinstance(value, dict | torch.Tensor)
        }
        self.records: dict[tuple[int, ...], dict] = {}

    def split(self, layer: int, x):
        """q [.., H, dk], k [.., Hkv, dk] and v [.., Hkv, dv] of a projection; two heads share a key head."""
        kind = self.kinds[layer]
        q, k = 2 * kind.heads * kind.k_dim, kind.heads * kind.k_dim
        return (
            x[..., :q].reshape(*x.shape[:-1], 2 * kind.heads, kind.k_dim),
            x[..., q : q + k].reshape(*x.shape[:-1], kind.heads, kind.k_dim),
            x[..., q + k :].reshape(*x.shape[:-1], kind.heads, kind.v_dim),
        )

    @torch.no_grad()
    def __call__(self, step: Step, fail_after: int | None = None) -> torch.Tensor:
        """The hidden rows [T, WIDTH] by the real ops; raises before layer `fail_after`."""
        x = self.embedding[step.tokens]
        for layer, kind in enumerate(self.kinds):
            if layer == fail_after:
                raise InterruptedError
            if layer in (FULL, WINDOW):
                q, k, v = self.split(layer, x @ self.qkv[layer])
                pages = step.pages(layer)
                ops.write_pages(k, v, pages)
                window = kind.window if layer == WINDOW else None
                y = ops.attention(q, step.rows, scale=0.7, stored=pages, window=window, masks=step.masks).flatten(1)
            elif layer == DELTA:
                inputs = x @ self.delta_in
                y = ops.causal_conv(inputs, self.taps[layer], step.rows, stored=step.slots(layer, "conv")).out
                q, k, v = y[:, None, :2], y[:, None, 2:4], y[:, 4:].view(-1, 2, 3)
                g, beta = (x @ self.delta_gates).chunk(2, -1)
                slots = step.slots(layer, "delta")
                y = ops.gated_delta(q, k, v, -g.exp(), beta.sigmoid(), step.rows, stored=slots).out.flatten(1)
            elif layer == CONV:
                y = ops.causal_conv(x, self.taps[layer], step.rows, stored=step.slots(layer, "conv")).out
            else:
                y = x
            x = x + torch.tanh(y @ self.out[layer])
        return x

    def record(self, tokens: tuple[int, ...]) -> dict:
        """What there is after `tokens`: K and V of all of them, the slots, and the last hidden row."""
        known = len(tokens)
        while known and tokens[:known] not in self.records:
            known -= 1
        for end in range(known, len(tokens) + 1):
            if tokens[:end] not in self.records:
                self.records[tokens[:end]] = self._record(tokens[:end])
        return self.records[tokens]

    def _record(self, tokens: tuple[int, ...]) -> dict:
        if not tokens:
            tails = {DELTA: np.zeros((2, 10)), CONV: np.zeros((3, WIDTH))}
            kv = {FULL: (np.zeros((0, 1, 3)), np.zeros((0, 1, 2))), WINDOW: (np.zeros((0, 2, 2)), np.zeros((0, 2, 3)))}
            return {"kv": kv, "conv": tails, "delta": np.zeros((2, 2, 3)), "hidden": None}
        before, w = self.records[tokens[:-1]], self.float64
        kv, conv, state = dict(before["kv"]), dict(before["conv"]), before["delta"]
        x = w["embedding"][tokens[-1]]
        for layer, kind in enumerate(self.kinds):
            if layer in (FULL, WINDOW):
                q, k, v = self.split(layer, x @ w["qkv"][layer])
                keys, values = (np.concatenate([old, new[None]]) for old, new in zip(kv[layer], (k, v), strict=True))
                kv[layer] = keys, values
                low = max(0, len(tokens) - kind.window) if layer == WINDOW else 0
                heads = []
                for head, query in enumerate(q):
                    scores = np.exp(0.7 * keys[low:, head // 2] @ query)
                    heads.append(scores / scores.sum() @ values[low:, head // 2])
                y = np.concatenate(heads)
            elif layer in (DELTA, CONV):
                inputs = np.concatenate([conv[layer], (x @ w["delta_in"] if layer == DELTA else x)[None]])
                conv[layer], y = inputs[1:], (inputs * w["taps"][layer]).sum(0)
            if layer == DELTA:
                q, k = (each / np.sqrt((each**2).sum() + 1e-6) for each in (y[:2], y[2:4]))
                g, beta = np.split(x @ w["delta_gates"], 2)
                state = state * np.exp(-np.exp(g))[:, None, None]
                change = (y[4:].reshape(2, 3) - k @ state) / (1 + np.exp(-beta))[:, None]
                state = state + k[None, :, None] * change[:, None]
                y = (q @ state / np.sqrt(2)).reshape(-1)
            x = x + np.tanh((x if layer == NOTHING else y) @ w["out"][layer])
        return {"kv": kv, "conv": conv, "delta": state, "hidden": x}

    def layout(self, page_tokens: int) -> Layout:
        return Layout.of(self.kinds, page_tokens=page_tokens, dtype=torch.float32)


toy = cache(Toy)


def close(ours: torch.Tensor, expected: np.ndarray, what: str) -> None:
    assert ours.shape == expected.shape, what
    np.testing.assert_allclose(ours.numpy(), expected, atol=1e-4, err_msg=what)


def check(model: Toy, state: State, tokens: tuple[int, ...]) -> None:
    """The state's invariants, and that it holds what a from-scratch run of its tokens would have left."""
    state.check()
    pool, record = state.pool, model.record(tokens)
    assert state.length == len(tokens)
    for layer in (FULL, WINDOW):
        unit = pool.layout.unit_of[layer]
        run, start = state.runs[unit], pool.layout.units[unit].earliest(state.length)
        for name, expected in zip("kv", record["kv"][layer], strict=True):
            held = pool.part(layer, name)[run.ids].flatten(0, 1)
            skip = start - run.first * pool.layout.page_tokens
            close(held[skip : skip + len(tokens) - start], expected[start:], f"{name} of layer {layer}")
    if tokens:
        for layer in (DELTA, CONV):
            close(pool.part(layer, "conv")[state.slot], record["conv"][layer], f"conv of layer {layer}")
        close(pool.part(DELTA, "delta")[state.slot], record["delta"], "delta")


def text(length: int) -> tuple[int, ...]:
    return tuple((i * i + i // 3) % VOCABULARY for i in range(length))


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
        slabs=st.sampled_from([5, 20, 60, 200]),
        max_running=st.integers(3, 8),
        length=st.integers(0, 12),
    )
    def make(self, window, page_tokens, slabs, max_running, length):
        self.model = toy(window)
        layout = self.model.layout(page_tokens)
        slabs += capacity.slabs(layout, 1, length, length or 1, max_running)
        self.pool = Pool(layout, slabs * layout.slab_bytes, max_running=max_running)
        self.tokens: dict[State, tuple[int, ...]] = {State(self.pool): ()}
        self.feed([(state, text(length)) for state in self.tokens])

    def batch(self, dice: Random) -> list[tuple[State, tuple[int, ...]]]:
        """Some states in some order, with some or no tokens for each."""
        states = dice.sample(list(self.tokens), dice.randint(1, len(self.tokens)))
        return [(state, some_tokens(dice)) for state in states]

    def feed(self, batch) -> None:
        with forward(self.pool, batch) as step:
            self.pool.check()
            rows = iter(self.model(step))
        for state, tokens in batch:
            for token in tokens:
                self.tokens[state] += (token,)
                close(next(rows), self.model.record(self.tokens[state])["hidden"], "hidden row")

    def may_be_full(self, batch) -> bool:
        """Whether the pool lacks room when every row copies its tail and takes a slot."""
        size, needs = self.pool.layout.page_tokens, [0] * len(self.pool.stores)
        for state, tokens in batch:
            for unit, store in enumerate(self.pool.stores):
                pages = -(-(state.length + len(tokens)) // size) - state.length // size + 1
                needs[unit] += (pages if store.unit.is_page else 1) if tokens else 0
        slots = self.pool.slot_store  # those that the sequences that may run could still ask for are kept back
        needs[slots] = max(needs[slots], self.pool.max_running - sum(state.owns_slot for state in self.tokens))
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
        """A forward that raises leaves all as it was, but for states whose only slot it may have written."""
        batch = self.batch(dice)
        before, full = books(self.pool), False
        slots = self.pool.stores[self.pool.slot_store]
        broken = {state for state, tokens in batch if tokens and state.slot is not None and slots.refs[state.slot] == 1}
        try:
            with forward(self.pool, batch) as step:
                self.model(step, fail_after=layer)
        except InterruptedError:
            pass
        except PoolFull:
            assert self.may_be_full(batch)
            full = True
        assert books(self.pool) == before
        for state, _ in batch:
            assert state.condition == ("broken" if state in broken and not full else "ready")
            if state.condition == "broken":
                for use in (state.fork, lambda state=state: forward(self.pool, [(state, [0])]).__enter__()):
                    with pytest.raises(StateError, match="broken"):
                        use()
                self.give_back(state)

    @precondition(lambda self: self.tokens)
    @rule(dice=DICE)
    def fork(self, dice):
        """Once or more, and let the forks and the state itself go on in one step."""
        state = dice.choice(list(self.tokens))
        batch = [(state, some_tokens(dice))]
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
        with suppress(PoolFull):
            self.feed(dice.sample(batch, len(batch)))

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


def pool_of(model: Toy, page_tokens: int, slabs: int = 1500, max_running: int = 100) -> Pool:
    layout = model.layout(page_tokens)
    return Pool(layout, slabs * layout.slab_bytes, max_running=max_running)


def feed(model: Toy, *batch: tuple[State, tuple[int, ...]]) -> None:
    with forward(batch[0][0].pool, batch) as step:
        model(step)


def used(pool: Pool) -> list[int]:
    """Entries lent out, scratch left out: full pages, window pages, slots."""
    return [store.used - 1 for store in pool.stores]


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
    assert step.tables[1].first == tuple(max(0, h - 5) // 4 for h in history), "no pages that a window has left behind"
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
