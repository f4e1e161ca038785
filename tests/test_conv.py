"""The causal convolution against a slow loop in float64: ragged rows, cuts, tails longer than rows."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bough.ops import Rows, Slots, causal_conv


@dataclass(frozen=True)
class Case:
    """The inputs of one call, made from a seed."""

    rows: Rows
    x: Tensor
    taps: Tensor
    bias: Tensor | None
    tail: Tensor

    @staticmethod
    def of(rows: Rows, *, kernel=4, channels=5, biased=False, seed=0) -> "Case":
        random = torch.Generator().manual_seed(seed)
        normal = lambda *shape: torch.randn(*shape, generator=random)  # noqa: E731
        return Case(
            rows,
            x=normal(rows.total, 2 * channels)[:, :channels],  # a part of a wider projection
            taps=normal(kernel, channels),
            bias=normal(channels) if biased else None,
            tail=normal(len(rows.counts), kernel - 1, channels),
        )

    def run(self, **state):
        state = state or {"explicit": self.tail}
        return causal_conv(self.x, self.taps, self.rows, bias=self.bias, activation=F.silu, **state)


def slow(case: Case, row: int, tokens: int) -> tuple[Tensor, Tensor]:
    """The outputs of a row's first tokens, and its tail after them: the sum as it is written, in float64."""
    start, kernel = sum(case.rows.counts[:row]), len(case.taps)
    inputs = torch.cat([case.tail[row], case.x[start : start + tokens]]).double()
    out = torch.zeros(tokens, case.x.shape[1], dtype=torch.float64)
    for t in range(tokens):
        for i in range(kernel):
            out[t] += case.taps[i].double() * inputs[t + i]
    if case.bias is not None:
        out += case.bias.double()
    return F.silu(out), inputs[tokens:]


def close(ours: Tensor, expected: Tensor) -> None:
    assert ours.shape == expected.shape
    torch.testing.assert_close(ours.double(), expected.double(), atol=1e-5, rtol=1e-5)


@st.composite
def ragged(draw) -> Rows:
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    cuts = [draw(st.sets(st.integers(1, n), max_size=4)) if n else set() for n in lengths]
    history = [draw(st.integers(0, 2)) for _ in lengths]
    return Rows(tuple(lengths), tuple(history), tuple(tuple(sorted(each)) for each in cuts))


cases = st.builds(
    Case.of,
    ragged(),
    kernel=st.integers(1, 5),
    channels=st.integers(1, 7),
    biased=st.booleans(),
    seed=st.integers(0, 1000),
)


@given(cases)
def test_equals_the_slow_loop(case):
    ours = case.run()
    start = 0
    for row, count in enumerate(case.rows.counts):
        out, tail = slow(case, row, count)
        close(ours.out[start : start + count], out)
        assert torch.equal(ours.state[row].double(), tail)
        for index, cut in enumerate(case.rows.cuts_of(row)):
            assert torch.equal(ours.cuts[row][index].double(), slow(case, row, cut)[1])
        assert len(ours.cuts[row]) == len(case.rows.cuts_of(row))
        start += count


@given(cases, st.data())
def test_stored_and_explicit_tails_give_the_same(case, data):
    """A slot may be written where it was read, or elsewhere; one that is not written stays, a new one may hold junk."""
    rows = case.rows
    size = 2 * len(rows.counts) + sum(map(len, rows.cuts)) + 1
    ids = iter(data.draw(st.permutations(range(size))))
    read = tuple(next(ids) for _ in rows.counts)
    write = tuple(slot if data.draw(st.booleans()) else next(ids) for slot in read)
    cut = tuple(tuple(next(ids) for _ in cuts) for cuts in rows.cuts)
    slots = torch.full((size, *case.tail.shape[1:]), torch.nan)
    explicit = case.tail.clone()
    for row, slot in enumerate(read):
        if rows.history[row]:
            slots[slot] = case.tail[row]
        else:
            explicit[row] = 0
    before = slots.clone()

    stored = case.run(stored=Slots(slots, read, write, cut))
    ours = case.run(explicit=explicit)
    assert stored.state is None and stored.cuts == ()
    assert torch.equal(stored.out, ours.out)
    written = set()
    for row, _, _ in rows:
        assert torch.equal(slots[write[row]], ours.state[row])
        assert torch.equal(slots[list(cut[row])], ours.cuts[row])
        written |= {write[row], *cut[row]}
    for slot in set(range(size)) - written:
        assert torch.equal(slots[slot].nan_to_num(7), before[slot].nan_to_num(7))


@given(cases)
def test_feeding_in_pieces_changes_nothing(case):
    """Also pieces shorter than the tail, and none of the inputs is written to."""
    whole, x = case.run(), case.x.clone()
    for row, start, end in case.rows:
        tail, outs = case.tail[row : row + 1], []
        for t in range(start, end):
            one = Case(Rows((1,), (1,)), case.x[t : t + 1], case.taps, case.bias, tail).run()
            tail = one.state
            outs.append(one.out)
        close(torch.cat(outs), whole.out[start:end])
        assert torch.equal(tail[0], whole.state[row])
    assert torch.equal(case.x, x)


def test_without_activation_and_tokens():
    case = Case.of(Rows((3,), (1,)))
    plain = causal_conv(case.x, case.taps, case.rows, explicit=case.tail)
    close(F.silu(plain.out), case.run().out)
    nothing = Case.of(Rows((0, 0), (2, 0)))
    ours = nothing.run()
    assert ours.out.shape == (0, 5)
    assert torch.equal(ours.state, nothing.tail)


@pytest.mark.parametrize("count", [1, 2, 12])
def test_bfloat16_is_summed_in_float32_and_rounded_once(count):
    case = Case.of(Rows((count,), (1,)), channels=33, biased=True)
    rounded = [each.bfloat16() for each in (case.x, case.taps, case.bias, case.tail)]
    exact = Case(case.rows, *(each.float() for each in rounded)).run()
    ours = Case(case.rows, *rounded).run()
    assert ours.out.dtype == ours.state.dtype == torch.bfloat16
    assert torch.equal(ours.out, exact.out.bfloat16())
    assert torch.equal(ours.state, exact.state.bfloat16())


def test_state_is_stored_or_explicit():
    case = Case.of(Rows((2,), (1,)))
    with pytest.raises(ValueError, match="exactly one"):
        causal_conv(case.x, case.taps, case.rows)
    with pytest.raises(ValueError, match="exactly one"):
        case.run(explicit=case.tail, stored=Slots(case.tail, (0,), (0,)))
