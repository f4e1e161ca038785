"""A toy model of all four kinds, and its oracle: what a state must hold after given tokens.

The model is made of the real ops. The oracle is the same model written once more in float64, one token at a time,
remembered by prefix; `check` compares a state's K and V entries within reach, in token order, and its slot with it.
"""

from functools import cache

import numpy as np
import torch

from bough import ops
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

    def __init__(self, window: int, slots: bool = True) -> None:
        self.kinds = [
            FullKV(1, 3, 2),
            WindowKV(2, 2, 3, window),
            Recurrent(10, 3, 2, 2, 3),  # channels: q and k of one head, v of two
            None,
            ShortConv(WIDTH, 4),
        ]
        if not slots:  # layers without a kind are left out, but for the one that never has one
            self.kinds[DELTA] = self.kinds[CONV] = None
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
            if kind is None and layer != NOTHING:
                continue
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
            if kind is None and layer != NOTHING:
                continue
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
    # The oracle is float64. On an ill-conditioned text of 134 tokens a from-scratch run in float32, in any pieces,
    # is 1.2e-4 away from it as well.
    np.testing.assert_allclose(ours.numpy(), expected, atol=5e-4, err_msg=what)


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
    if tokens and pool.slot_store is not None:
        for layer in (DELTA, CONV):
            close(pool.part(layer, "conv")[state.slot], record["conv"][layer], f"conv of layer {layer}")
        close(pool.part(DELTA, "delta")[state.slot], record["delta"], "delta")


def text(length: int) -> tuple[int, ...]:
    return tuple((i * i + i // 3) % VOCABULARY for i in range(length))


def pool_of(model: Toy, page_tokens: int, slabs: int = 1500, max_running: int = 100) -> Pool:
    layout = model.layout(page_tokens)
    return Pool(layout, slabs * layout.slab_bytes, max_running=max_running)


def feed(model: Toy, *batch: tuple[State, tuple[int, ...]]) -> None:
    with forward(batch[0][0].pool, batch) as step:
        model(step)


def used(pool: Pool) -> list[int]:
    """Entries lent out, scratch left out: full pages, window pages, slots."""
    return [store.used - 1 for store in pool.stores]
