"""The gated delta op against a slow loop in float64: ragged rows, cuts, both forms, both ways of giving state."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bough.ops import Rows, Slots, delta_gates, gated_delta
from bough.ops.delta import CHUNK, advance_chunk, advance_token

TOLERANCE = 2e-5  # of values around 1; float32 sums of up to 100 tokens
DECAYS = {  # g of [T, Hv] uniform numbers in [0, 1)
    "usual": lambda u: -u,
    "none": lambda u: -0.0 * u,
    "strong": lambda u: -20 - 20 * u,
    "now and then strong": lambda u: torch.where(u > 0.8, -30.0, -0.01 * u),
}


@dataclass(frozen=True)
class Case:
    """The inputs of one call, made from a seed."""

    rows: Rows
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor

    @staticmethod
    def of(rows: Rows, *, k_heads=2, group=2, k_dim=8, v_dim=6, decay="usual", alike=0.0, seed=0) -> "Case":
        """`alike` pulls all keys of a head towards one, which makes the tokens of a chunk depend on each other."""
        random, total, heads = torch.Generator().manual_seed(seed), rows.total, k_heads * group
        normal = lambda *shape: torch.randn(*shape, generator=random)  # noqa: E731
        uniform = lambda: torch.rand(total, heads, generator=random)  # noqa: E731
        return Case(
            rows,
            q=normal(total, k_heads, k_dim),
            k=normal(total, k_heads, k_dim) * (1 - alike) + normal(1, k_heads, k_dim) * alike,
            v=normal(total, heads, v_dim),
            g=DECAYS[decay](uniform()),
            beta=uniform() if alike < 1 else torch.ones(total, heads),
            state=normal(len(rows.counts), heads, k_dim, v_dim),
        )

    def piece(self, row: int, first: int, last: int, state: Tensor) -> "Case":
        """Tokens [first, last) of one row as a call of their own, from `state`."""
        start = sum(self.rows.counts[:row])
        at = slice(start + first, start + last)
        parts = (each[at] for each in (self.q, self.k, self.v, self.g, self.beta))
        return Case(Rows((last - first,), (1,)), *parts, state[None])

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.g, self.beta

    def run(self):
        return gated_delta(*self.inputs, self.rows, explicit=self.state)


def slow(case: Case) -> tuple[Tensor, list[list[Tensor]]]:
    """The outputs, and for each row its state after 0, 1, 2 … tokens: the rule as it is written, in float64."""
    q, k, v, g, beta = (each.double() for each in case.inputs)
    group = v.shape[1] // k.shape[1]
    unit = [each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k)]
    q, k = (each.repeat_interleave(group, 1) for each in unit)
    out, states = torch.zeros_like(v), [[state.double()] for state in case.state]
    for row, start, end in case.rows:
        for t in range(start, end):
            for_heads = states[row][-1] * g[t].exp()[:, None, None]
            change = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", for_heads, k[t]))
            states[row].append(for_heads + k[t][:, :, None] * change[:, None])
            out[t] = torch.einsum("hkv,hk->hv", states[row][-1], q[t]) * q.shape[-1] ** -0.5
    return out, states


def close(ours: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    assert ours.shape == expected.shape
    torch.testing.assert_close(ours.double(), expected.double(), atol=tolerance, rtol=tolerance)


counts = st.one_of(st.integers(0, 5), st.integers(0, 3 * CHUNK), st.sampled_from([CHUNK - 1, CHUNK, CHUNK + 1]))


@st.composite
def ragged(draw) -> Rows:
    lengths = draw(st.lists(counts, min_size=1, max_size=4))
    cuts = [draw(st.sets(st.integers(1, n), max_size=4)) if n else set() for n in lengths]
    history = [draw(st.integers(0, 2)) for _ in lengths]
    return Rows(tuple(lengths), tuple(history), tuple(tuple(sorted(each)) for each in cuts))


cases = st.builds(
    Case.of,
    ragged(),
    k_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    k_dim=st.integers(1, 9),
    v_dim=st.integers(1, 9),
    decay=st.sampled_from(sorted(DECAYS)),
    alike=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 1000),
)


@given(cases)
def test_equals_the_slow_loop(case):
    out, states = slow(case)
    ours = case.run()
    close(ours.out, out)
    for row, count in enumerate(case.rows.counts):
        close(ours.state[row], states[row][count])
        close(ours.cuts[row], torch.stack([states[row][0], *(states[row][c] for c in case.rows.cuts_of(row))])[1:])


@given(cases)
def test_a_cut_is_the_state_of_the_prefix_alone_and_one_can_go_on_from_it(case):
    ours = case.run()
    for row, start, end in case.rows:
        for index, cut in enumerate(case.rows.cuts_of(row)):
            prefix = case.piece(row, 0, cut, case.state[row]).run()
            close(ours.cuts[row][index], prefix.state[0])
            rest = case.piece(row, cut, end - start, ours.cuts[row][index]).run()
            close(torch.cat([prefix.out, rest.out]), ours.out[start:end])
            close(rest.state[0], ours.state[row])


@given(cases)
def test_rows_get_what_they_would_get_alone(case):
    ours = case.run()
    for row, start, end in case.rows:
        alone = case.piece(row, 0, end - start, case.state[row]).run()
        close(ours.out[start:end], alone.out, 1e-6)
        close(ours.state[row], alone.state[0], 1e-6)
    for row, count in enumerate(case.rows.counts):
        assert count or torch.equal(ours.state[row], case.state[row])


@given(cases, st.data())
def test_stored_and_explicit_state_give_the_same(case, data):
    """A slot may be written where it was read, or elsewhere; one that is not written stays, a new one may hold junk."""
    rows = case.rows
    count, shape = len(rows.counts), case.state.shape[1:]
    ids = iter(data.draw(st.permutations(range(2 * count + sum(map(len, rows.cuts)) + 1))))
    read = tuple(next(ids) for _ in rows.counts)
    write = tuple(slot if data.draw(st.booleans()) else next(ids) for slot in read)
    cut = tuple(tuple(next(ids) for _ in cuts) for cuts in rows.cuts)
    slots = torch.full((2 * count + sum(map(len, rows.cuts)) + 1, *shape), torch.nan)
    fresh = torch.tensor([not history for history in rows.history])
    explicit = torch.where(fresh[:, None, None, None], 0.0, case.state)
    for row, slot in enumerate(read):
        if rows.history[row]:
            slots[slot] = case.state[row]
    before = slots.clone()

    stored = gated_delta(*case.inputs, rows, stored=Slots(slots, read, write, cut))
    ours = gated_delta(*case.inputs, rows, explicit=explicit)
    assert stored.state is None and stored.cuts == ()
    assert torch.equal(stored.out, ours.out)
    written = {slot for row, slot in enumerate(write) if rows.counts[row]} | {slot for each in cut for slot in each}
    for row, _, _ in rows:
        assert torch.equal(slots[write[row]], ours.state[row])
        for index, slot in enumerate(cut[row]):
            assert torch.equal(slots[slot], ours.cuts[row][index])
    for slot in set(range(len(slots))) - written:
        assert torch.equal(slots[slot].nan_to_num(7), before[slot].nan_to_num(7))


@settings(max_examples=50)
@given(cases)
def test_a_chunk_equals_its_tokens(case):
    for row, start, end in case.rows:
        state = case.state[row].clone()
        piece = case.piece(row, 0, min(end - start, CHUNK), state)
        target = torch.full_like(state, torch.nan)
        out, _ = advance_chunk(*piece.inputs, state, target)
        assert torch.equal(state, case.state[row]), "the state was written where it was only to be read"
        tokens = [
            advance_token(*(each[t : t + 1] for each in piece.inputs), state, state)[0] for t in range(len(piece.q))
        ]
        close(out, torch.cat(tokens))
        close(target, state)


@pytest.mark.parametrize("decay", sorted(DECAYS))
def test_large_heads_over_many_chunks(decay):
    case = Case.of(Rows((300,), (1,), ((1, 100, 299),)), k_heads=1, k_dim=64, v_dim=48, decay=decay, alike=0.3)
    out, states = slow(case)
    ours = case.run()
    close(ours.out, out)
    close(ours.state[0], states[0][-1])
    close(ours.cuts[0], torch.stack([states[0][cut] for cut in (1, 100, 299)]))


def test_weak_decay_after_a_strong_one_keeps_its_digits():
    """A running sum of g would reach −600 within the chunk, and there resolve 6e-5 at best."""
    case = Case.of(Rows((CHUNK,), (1,)), alike=0.9)
    case.g[: CHUNK // 2] = -40
    case.g[CHUNK // 2 :] = -0.003
    out, states = slow(case)
    close(case.run().out, out, 2e-6)
    close(case.run().state[0], states[0][-1], 2e-6)


def test_extremes_stay_finite():
    for value in (0.0, -1e-30, -90.0, -1e4, -3e38):
        case = Case.of(Rows((CHUNK + 1, 1), (1, 1)), alike=1.0)
        case.g[:] = value
        case.q[0], case.k[0] = 0, 0
        ours = case.run()
        assert ours.out.isfinite().all() and ours.state.isfinite().all()
        close(ours.out, slow(case)[0])


def test_no_tokens():
    case = Case.of(Rows((0, 0), (3, 0)))
    ours = case.run()
    assert ours.out.shape == (0, 4, 6)
    assert torch.equal(ours.state, case.state)


@pytest.mark.parametrize("count", [1, 2 * CHUNK + 3])
def test_bfloat16_differs_by_rounding_alone(count):
    case = Case.of(Rows((count,), (1,)))
    rounded = tuple(each.bfloat16() for each in (case.q, case.k, case.v))
    ours = gated_delta(*rounded, case.g, case.beta, case.rows, explicit=case.state)
    exact = gated_delta(*(each.float() for each in rounded), case.g, case.beta, case.rows, explicit=case.state)
    assert ours.out.dtype == torch.bfloat16 and ours.state.dtype == torch.float32
    assert torch.equal(ours.out, exact.out.bfloat16())
    assert torch.equal(ours.state, exact.state)


def test_state_is_stored_or_explicit():
    case = Case.of(Rows((2,), (1,)))
    with pytest.raises(ValueError, match="exactly one"):
        gated_delta(*case.inputs, case.rows)
    with pytest.raises(ValueError, match="exactly one"):
        gated_delta(*case.inputs, case.rows, explicit=case.state, stored=Slots(case.state, (0,), (0,)))


def test_gates():
    a = torch.tensor([[-1e4, -100.0, -1.0, 0.0, 1.0, 100.0, 1e4]]).T.expand(-1, 3)
    a_log, dt_bias = torch.tensor([-4.0, 0.5, 2.7]), torch.tensor([-3.0, 0.0, 5.0])
    g, beta = delta_gates(a, -a, -a_log.exp(), dt_bias)
    expected = -a_log.double().exp() * torch.nn.functional.softplus(a.double() + dt_bias.double())
    torch.testing.assert_close(g.double(), expected, rtol=1e-6, atol=1e-30)
    torch.testing.assert_close(beta.double(), torch.sigmoid(-a.double()), rtol=1e-6, atol=1e-30)
    assert (g <= 0).all()
    rounded = delta_gates(a.bfloat16(), a.bfloat16(), -a_log.exp(), dt_bias)
    assert all(each.dtype == torch.float32 for each in rounded)
