"""States and reservations on a toy model of all four kinds: whatever happens, a state holds what its tokens say.

The oracle is the model written once more in float64, one token at a time, remembered by prefix. After every step the
K and V entries within reach, in token order, and the slot of every live state are compared with it.
"""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_pool import dump, same

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
        self.taps = {DELTA: weight(10, 3), CONV: weight(WIDTH, 4)}
        self.out = {FULL: weight(4, WIDTH), WINDOW: weight(12, WIDTH), DELTA: weight(6, WIDTH), NOTHING: weight(6, 6)}
        self.out[CONV] = weight(WIDTH, WIDTH)
        self.float64 = {
            name: {k: v.double().numpy() for k, v in value.items()}
            if isinstance(value, dict)
            else value.double().numpy()
            for name, value in vars(self).items()
            if isinstance(value, dict | torch.Tensor)
        }
        self.record = cache(self._record)

    def split(self, layer: int, x):
        """q [.., H, dk], k [.., Hkv, dk] and v [.., Hkv, dv] of a projection."""
        kind = self.kinds[layer]
        q, k = 2 * kind.heads * kind.k_dim, kind.heads * kind.k_dim
        shape = x.shape[:-1]
        return (
            x[..., :q].reshape(*shape, -1, kind.k_dim),
            x[..., q : q + k].reshape(*shape, -1, kind.k_dim),
            x[..., q + k :].reshape(*shape, -1, kind.v_dim),
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

    def _record(self, tokens: tuple[int, ...]) -> dict:
        """What there is after `tokens`: K and V of all of them, the slots, and the last hidden row."""
        if not tokens:
            tails = {DELTA: np.zeros((2, 10)), CONV: np.zeros((3, WIDTH))}
            nothing = {layer: (np.zeros((0, 1, 3)), np.zeros((0, 1, 2))) for layer in (FULL,)}
            nothing[WINDOW] = (np.zeros((0, 2, 2)), np.zeros((0, 2, 3)))
            return {"kv": nothing, "conv": tails, "delta": np.zeros((2, 2, 3)), "hidden": None}
        before, w = self.record(tokens[:-1]), self.float64
        kv, conv, state = dict(before["kv"]), dict(before["conv"]), before["delta"]
        x = w["embedding"][tokens[-1]]
        for layer, kind in enumerate(self.kinds):
            if layer in (FULL, WINDOW):
                q, k, v = self.split(layer, x @ w["qkv"][layer])
                kv[layer] = keys, values = (np.concatenate([old, new[None]]) for old, new in zip(kv[layer], (k, v)))
                kv[layer] = keys, values
                low = max(0, len(tokens) - kind.window) if layer == WINDOW else 0
                heads = []
                for head, query in enumerate(q):
                    scores = np.exp(0.7 * keys[low:, head // 2] @ query)
                    heads.append(scores / scores.sum() @ values[low:, head // 2])
                y = np.concatenate(heads)
            elif layer in (DELTA, CONV):
                inputs = np.concatenate([conv[layer], (x @ w["delta_in"] if layer == DELTA else x)[None]])
                conv[layer], y = inputs[1:], (inputs * w["taps"][layer].T).sum(0)
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


def books(pool: Pool) -> list:
    """References, and the fill marks of whatever is referred to."""
    return [(s.used, s.slabs, s.refs.tolist(), s.fill[s.refs > 0].tolist()) for s in pool.stores]


class StateMachine(RuleBasedStateMachine):
    """extend, fork, release and failures in any order."""

    @initialize(
        window=st.sampled_from([1, 2, 3, 5, 9, 40]),
        page_tokens=st.sampled_from([1, 2, 4, 32]),
        slabs=st.integers(2, 40),
        max_running=st.integers(2, 7),
    )
    def make(self, window, page_tokens, slabs, max_running):
        self.model = toy(window)
        layout = self.model.layout(page_tokens)
        slabs += capacity.slabs(layout, 1, 1, 1)
        self.pool = Pool(layout, slabs * layout.slab_bytes, max_running=max_running)
        self.tokens: dict[State, tuple[int, ...]] = {}

    def draw_batch(self, data) -> list[tuple[State, list[int]]]:
        """Some states in some order, with some or no tokens for each."""
        states = list(self.tokens)
        chosen = data.draw(st.lists(st.integers(0, len(states) - 1), unique=True, max_size=4), label="states")
        few, many = st.lists(st.integers(0, 1), max_size=6), st.lists(st.just(0), min_size=20, max_size=50)
        return [(states[i], data.draw(st.one_of(few, few, few, many), label="tokens")) for i in chosen]

    def may_be_full(self, batch) -> bool:
        """Whether the pool lacks room when every row copies its tail and takes a slot."""
        size, needs = self.pool.layout.page_tokens, [0] * len(self.pool.stores)
        for state, tokens in batch:
            for unit, store in enumerate(self.pool.stores):
                pages = -(-(state.length + len(tokens)) // size) - state.length // size + 1
                needs[unit] += (pages if store.unit.is_page else 1) if tokens else 0
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
    @rule(data=st.data())
    def extend(self, data):
        batch = self.draw_batch(data)
        before = dump(self.pool)
        try:
            with forward(self.pool, batch) as step:
                self.pool.check()
                hidden = self.model(step)
        except PoolFull:
            assert self.may_be_full(batch) and same(before, dump(self.pool))
            return
        rows = iter(hidden)
        for state, tokens in batch:
            for token in tokens:
                self.tokens[state] += (token,)
                close(next(rows), self.model.record(self.tokens[state])["hidden"], "hidden row")

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), layer=st.integers(0, 4))
    def fail(self, data, layer):
        """A forward that raises leaves all as it was, but for states whose only slot it may have written."""
        batch = self.draw_batch(data)
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
    @rule(data=st.data())
    def fork(self, data):
        state = data.draw(st.sampled_from(list(self.tokens)))
        before = dump(self.pool)
        if len(self.tokens) == self.pool.max_running:
            with pytest.raises(PoolFull):
                state.fork()
            assert same(before, dump(self.pool))
        else:
            self.tokens[state.fork()] = self.tokens[state]
            after = dump(self.pool)
            assert all(a["bytes"] == b["bytes"] and a["used"] == b["used"] for a, b in zip(before, after, strict=True))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def release(self, data):
        self.give_back(data.draw(st.sampled_from(list(self.tokens))))

    def give_back(self, state):
        state.release()
        state.release()  # a second time does nothing
        del self.tokens[state]
        with pytest.raises(StateError, match="released"):
            state.fork()

    @invariant()
    def holds(self):
        self.pool.check()
        assert self.pool.running == len(self.tokens)
        for state, tokens in self.tokens.items():
            check(self.model, state, tokens)

    def teardown(self):
        if hasattr(self, "pool"):
            for state in list(self.tokens):
                self.give_back(state)
            self.pool.check()
            assert self.pool.running == 0 and all(store.used == 1 for store in self.pool.stores), "something leaked"


TestState = StateMachine.TestCase
TestState.settings = settings(max_examples=60, stateful_step_count=20)


@pytest.mark.long
class TestStateLong(StateMachine.TestCase):
    settings = settings(max_examples=2000, stateful_step_count=60)
