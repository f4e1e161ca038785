"""Draft rounds that begin before it is known how many tokens of the one before stand, against rounds that wait for it.

As in test_steady.py no model computes anything: what the device is told is looked at, and what becomes of states.
"""

from random import Random

import numpy as np
import pytest
import torch
from test_ahead import Told, move
from test_steady import as_if_on_a_device  # noqa: F401 (a fixture)

from bough.errors import PoolFull, StateError
from bough.state.fixed import Fixed
from bough.state.transaction import Transaction, commit

DIVIDED = ("first", "used", "row")  # which spans there are is for whoever plans


class Begun(Told):
    """A side whose rounds follow one another without a wait."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.opened: list[Transaction] = []

    def first(self, rows: list[int], tokens: list[list[int]]) -> None:
        self.opened = [self.states[row].begin() for row in rows]
        self.feed(rows, tokens)

    def go_on(self, kept: list[int], tokens: list[list[int]]) -> bool:
        """`tokens` of each row, of which the first is chosen after those that it keeps."""
        starts = np.cumsum([0, *map(len, tokens[:-1])]).tolist()
        chosen = torch.full((sum(map(len, tokens)),), -1)
        for start, count, some in zip(starts, kept, tokens, strict=True):
            chosen[start + count - 1] = some[0]
        fed = [token for some in tokens for token in (-1, *some[1:])]
        return self.runner.graphs.go_on(torch.tensor(kept, dtype=torch.int32), chosen, fed) is not None

    def land(self, kept: list[int]) -> None:
        self.opened = self.runner.graphs.land(kept)


def expect_same(begun: Begun, waited: Told, rows: list[int]) -> None:
    """What both were told, but for which pages these are: those that lie under the tokens of their states."""
    size = begun.pool.layout.page_tokens
    for side in (begun, waited):
        told, total = side.told, sum(side.told["tokens"])
        row_of = [row for row, count in zip(rows, told["tokens"], strict=False) for _ in range(count)]
        where = zip(row_of, told["position"], told["page"], strict=False)
        for row, position, page in where:
            assert page == side.states[row].runs[0].ids[position // size], "a token is in no page of its state"
        assert len(row_of) == total
    named = [name for name in begun.told if name not in (*DIVIDED, "page", "pages")]
    assert {name: begun.told[name] for name in named} == {name: waited.told[name] for name in named}
    for name in named:
        assert len(begun.told[name]) > 0


def known(side: Told) -> tuple:
    journal = side.runner.graphs._journal
    return [
        (s.length, s.known, s.slot, s.condition, s.owes is journal.all, s.owes and s.owed, s.runs[0].end)
        for s in side.states
    ], [(store.used, store.slabs) for store in side.pool.stores]


@pytest.mark.parametrize("seed", range(12))
def test_what_rounds_that_wait_are_told(seed):
    draw = Random(seed)
    begun, waited = (kind(page_tokens=(3, 4, 16, 5)[seed % 4]) for kind in (Begun, Told))
    for row in range(6):
        for side in (begun, waited):
            side.feed([row], [[1] * (2 + 3 * row)])
    for _ in range(6):
        rows = draw.sample(range(6), draw.randint(1, 6))
        counts = [draw.randint(1, 5) for _ in rows]

        def some(counts=counts):
            return [[draw.randrange(99) for _ in range(count)] for count in counts]

        tokens = some()
        begun.first(rows, tokens)
        opened = [waited.states[row].begin() for row in rows]
        waited.feed(rows, tokens)
        for _ in range(draw.randint(1, 9)):
            kept, tokens = [draw.randint(1, count) for count in counts], some()
            assert begun.go_on(kept, tokens)
            begun.check()
            assert {begun.states[row].condition for row in rows} == {"in a step"}
            commit(list(zip(opened, kept, strict=True)))
            opened = [waited.states[row].begin() for row in rows]
            waited.feed(rows, tokens)
            if draw.random() < 0.2:
                begun.pool.compact([99 * begun.pool.slabs, 0])  # the device has been told where they were
                begun.land(kept)
            else:
                begun.land(kept)
                expect_same(begun, waited, rows)
            begun.check()
            assert known(begun) == known(waited)
            for one, other in zip(begun.opened, opened, strict=True):
                assert (one.fed, one.at, one.before) == (other.fed, other.at, other.before)
        kept = [draw.randint(0, count) for count in counts]
        commit(list(zip(begun.opened, kept, strict=True)))
        commit(list(zip(opened, kept, strict=True)))
        begun.check()
        assert known(begun) == known(waited)


def two(**options) -> Begun:
    side = Begun(**options)
    side.feed([0, 1], [[1] * 6, [2] * 7])
    side.first([0, 1], [[1, 2, 3], [4, 5, 6]])
    return side


def test_states_of_a_round_that_has_begun_cannot_be_used_before_it_lands():
    side = two()
    before = [state.length for state in side.states[:2]]
    assert side.go_on([1, 3], [[7, 8, 9]] * 2)
    for use in (side.states[0].release, side.states[0].fork, lambda: side.opened[1].commit(1)):
        with pytest.raises(StateError, match=r"step|forward"):
            use()
    with pytest.raises(AssertionError, match="land it first"):
        side.feed([2], [[1]])
    side.land([1, 3])
    assert [state.length for state in side.states[:2]] == [before[0] + 1, before[1] + 3]
    side.states[0].release()
    side.opened[1].commit(2)
    side.check()


def test_what_was_not_left_by_a_round_does_not_go_on():
    side = two()
    commit([(side.opened[0], 1)])
    assert not side.go_on([1, 1], [[7, 8, 9]] * 2)
    commit([(side.opened[1], 1)])
    assert not side.go_on([1, 1], [[7, 8, 9]] * 2)  # nor when it has been asked for
    side.first([0, 1], [[1, 2, 3], [4, 5, 6]])
    assert side.go_on([1, 1], [[7, 8, 9]] * 2)
    side.land([1, 1])
    side.check()
    side.states[0].release()
    assert not side.go_on([1, 1], [[7, 8, 9]] * 2)
    side.opened[1].commit(1)
    side.feed([1, 2], [[7], [8]])  # no round
    assert not side.go_on([1, 1], [[7], [8]])
    side.pool.check()


@pytest.mark.parametrize("fault", ["send", "replay", "landing"])
def test_a_round_that_is_lost_breaks_its_states_and_loses_no_page(fault, monkeypatch):
    side = two()
    used = side.pool.used_bytes
    if fault == "send":
        monkeypatch.setattr(Fixed, "go_on", lambda *given: 1 / 0)
    if fault == "replay":
        side.replay = lambda: 1 / 0
    if fault == "landing":
        assert side.go_on([2, 2], [[7, 8, 9]] * 2)
        side.runner.graphs.lose()
    else:
        with pytest.raises(ZeroDivisionError):
            side.go_on([2, 2], [[7, 8, 9]] * 2)
    assert [state.condition for state in side.states[:2]] == ["broken"] * 2
    assert side.pool.used_bytes == used
    for state in side.states[:2]:
        state.release()
    side.pool.check()
    side.replay = lambda: None
    side.feed([2], [[1]])  # others go on


def test_a_pool_that_is_full_leaves_the_round_before_as_it_was():
    side = two(slabs=30)
    taken = []
    while side.pool.slabs_for([1, 0]) <= side.pool.free_slabs:
        taken.append(side.pool.take([1, 0])[0])
    before = side.kept
    with pytest.raises(PoolFull):
        side.go_on([1, 1], [[7, 8, 9]] * 2)
    assert side.kept == before
    commit([(each, 3) for each in side.opened])
    side.pool.release((0, ids) for ids in taken)
    side.check()


def test_pages_that_move_before_it_lands():
    side = two(page_tokens=4)
    assert side.go_on([3, 3], [[7, 8, 9]] * 2)  # up to 12 and 13 tokens: one of them has got a page
    (ids,) = [ids for unit, ids in side.runner.graphs._begun[1].references() if len(ids)]
    move(side, 0, int(ids[0]))
    side.check()
    side.land([3, 3])
    side.check()
    assert [state.runs[0].end for state in side.states[:2]] == [3, 4]
