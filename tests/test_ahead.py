"""Steps that were made ready ahead, against the same ones planned when they came: what the device is told, and what
becomes of states and pool.

As in test_steady.py no model computes anything.
"""

from math import ceil, sqrt
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_steady import HYBRID, Side, as_if_on_a_device  # noqa: F401 (a fixture)

from bough.errors import PoolFull, StateError
from bough.ops.spans import JOIN, REST, SPAN, divided, shared_out
from bough.state.ahead import Ahead
from bough.state.fixed import OF_PAGES, PER_ROW, PER_TOKEN, Fixed
from bough.state.graphs import Captured, Shape
from bough.state.live import State
from bough.state.recordings import PLACE
from bough.state.store import Run
from bough.state.transaction import commit

ROWS = 6


class Told(Side):
    """A side that knows what its last step was told, whatever lies where."""

    def __init__(self, page_tokens: int = 4, slabs: int = 4000) -> None:
        super().__init__(HYBRID, slabs, page_tokens)
        self.states += [State(self.pool) for _ in range(ROWS - len(self.states))]
        self.told: dict = {}

    def _captured(self, shape: Shape, like: None) -> Captured:
        graphs, fixed = self.runner.graphs, Fixed(self.pool, *shape[:2], 256)

        def replay() -> None:
            self.replay()
            self.told = told(fixed, self.pool.layout.page_tokens)

        room, graph = torch.zeros(shape[0] * shape[1], 1), SimpleNamespace(replay=replay)
        return Captured(graph, fixed, None, room, room, graphs._journal, graphs._into(shape))

    @property
    def kept(self) -> tuple:
        return *super().kept[:2], self.told


def told(fixed: Fixed, size: int) -> dict:
    """What a step's numbers say, with each row's pages in the place of where these are."""
    (unit,) = fixed.pool.page_stores
    of = {name: fixed._view(name).tolist() for name in (*PER_ROW, *PER_TOKEN)}
    of |= {name: fixed._view(f"{name} {unit}").tolist() for name in (*OF_PAGES, "page", "row")}
    pages, offset = fixed._numbers[fixed._end :].tolist(), of.pop("offset")
    rows = zip(offset, of["history"], of["tokens"], strict=True)
    of["pages"] = [pages[at : at + -(-(before + count) // size)] if count else [] for at, before, count in rows]
    for name in ("start", "first"):  # of rows that are not there anything may stand
        of[name] = [at for at, count in zip(of[name], of["tokens"], strict=True) if count]
    return of


@pytest.fixture
def both(monkeypatch):
    """Two sides, of which the second plans every step when it comes; and how many the first had made ready."""
    monkeypatch.setattr("bough.state.graphs.MANY", 1)
    used, is_of = [], Ahead.is_of
    monkeypatch.setattr(Ahead, "is_of", lambda self, batch: bool(is_of(self, batch) and (used.append(self) or True)))

    def made(**options) -> list[Told]:
        sides = [Told(**options) for _ in range(2)]
        monkeypatch.setattr(sides[1].runner.graphs, "_planned", _not_ahead(sides[1].runner.graphs))
        return sides

    made.used = used
    return made


def _not_ahead(graphs):
    planned = graphs._planned

    def plan(batch):
        graphs._ahead = None
        return planned(batch)

    return plan


def same(sides: list[Told]) -> None:
    for side in sides:
        side.check()
    assert sides[0].kept == sides[1].kept


@pytest.mark.parametrize("seed", range(8))
def test_whatever_comes_between(seed, both):
    draw, sides = Random(seed), both(page_tokens=(3, 4, 16, 5)[seed % 4])
    for row in range(ROWS):
        for side in sides:
            side.feed([row], [[1] * (2 + row)])
    rows, counts, drafted = [0, 1, 2], [3, 3, 3], True
    for _ in range(90):
        if draw.random() < 0.15:  # other steps from here on
            rows = draw.sample(range(ROWS), draw.randint(1, ROWS))
            counts, drafted = [draw.randint(1, 5) for _ in rows], draw.random() < 0.6
        if draw.random() < 0.2:
            disturb(draw, sides, rows)
            same(sides)
        tokens = [[draw.randrange(99) for _ in range(count)] for count in counts]
        kept = [draw.randint(0, count) if draw.random() < 0.7 else count for count in counts]
        given = torch.tensor([token + 100 for some in tokens for token in some]) if draw.random() < 0.2 else None
        for side in sides:
            side.draft(rows, tokens, kept) if drafted else side.feed(rows, tokens, given)
        same(sides)
    assert len(both.used) > 25


def disturb(draw: Random, sides: list[Told], rows: list[int]) -> None:
    """Something becomes of states between two steps."""
    what, one, other = draw.randrange(8), rows[0], draw.randrange(ROWS)
    for side in sides:
        state = side.states[one]
        match what:
            case 0:  # another state shares its slot and pages
                side.states[(one + 1) % ROWS].release()
                side.states[(one + 1) % ROWS] = state.fork()
            case 1:
                side.states[other].release()
                side.states[other] = State(side.pool)
                side.feed([other], [[5] * 7])
            case 2:
                state.settle()
            case 3:
                side.feed([one], [[2] * 20])  # no captured step
            case 4:  # a transaction that nothing becomes of
                state.begin().commit(0)
            case 5:
                side.feed([other], [[7]])
            case 6:
                side.pool.compact([99 * side.pool.slabs, 0])  # as far as it goes
            case 7:
                opened = state.begin()
                side.feed([one], [[1, 2]])
                opened.commit(1)


def test_pages_that_were_shared_meanwhile_are_copied(both):
    sides = both()
    for side in sides:
        side.feed([0, 1], [[1] * 5, [2] * 5])
        for _ in range(2):
            side.draft([0, 1], [[1, 2], [3, 4]], [1, 1])
        last = [(0, side.states[1].runs[0].ids[-1:])]
        side.pool.share(last)
        side.pool.stores[0].fill[last[0][1]] = 4  # another one has gone on there
        side.draft([0, 1], [[1, 2], [3, 4]], [1, 1])
        assert side.states[1].runs[0].last not in last[0][1]
        side.pool.release(last)
    same(sides)


def test_slots_and_pages_that_were_moved(both):
    sides = both()
    for side in sides:
        side.feed([0, 1], [[1] * 9, [2] * 9])
        for _ in range(3):
            side.draft([0, 1], [[1, 2], [3, 4]], [1, 2])
        state = side.states[1]
        move(side, 1, state.slot)
        side.draft([0, 1], [[1, 2], [3, 4]], [1, 2])
        assert side.told["read"][1] == state.slot
        move(side, 0, state.runs[0].last)
        side.draft([0, 1], [[1, 2], [3, 4]], [1, 2])
        assert side.told["pages"][1] == state.runs[0].ids.tolist()
    same(sides)


def move(side: Told, unit: int, entry: int) -> None:
    """To another place, as a pool does that is compacted."""
    store, needs = side.pool.stores[unit], [0, 0]
    needs[unit] = 1
    target, where = int(side.pool.take(needs)[unit][0]), np.arange(len(store.refs))
    where[entry], store.fill[target] = target, store.fill[entry]
    for holder in side.pool._holders:
        holder.moved(unit, where)
    store.release(np.array([entry]))


def test_states_that_are_not_all_in_transactions(both):
    sides = both()
    for side in sides:
        side.feed([0, 1], [[1] * 6, [2] * 6])
        for _ in range(2):
            side.feed([0, 1], [[1], [2]])
        opened = side.states[1].begin()
        side.feed([0, 1], [[1], [2]])
        opened.commit(0)
    assert [state.length for state in sides[0].states[:2]] == [9, 8]
    same(sides)


def test_a_state_that_broke_meanwhile(both):
    side = both()[0]
    side.feed([0, 1], [[1] * 3, [2] * 4])
    for _ in range(2):
        side.feed([0, 1], [[1], [2]])
    side.states[1].condition = "broken"
    with pytest.raises(StateError, match="broken"):
        side.feed([0, 1], [[1], [2]])
    assert side.states[0].length == 5


def test_what_cannot_be_made_ready_breaks_states_and_loses_no_page(both, monkeypatch):
    side = both()[0]
    side.feed([0, 1], [[1] * 3, [2] * 4])
    for _ in range(2):
        side.feed([0, 1], [[1] * 5, [2] * 5])
    ready = len(both.used)
    monkeypatch.setattr(Fixed, "prepare", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        side.feed([0, 1], [[1] * 5, [2] * 5])
    assert len(both.used) == ready + 1
    side.pool.check()
    assert [state.condition for state in side.states[:2]] == ["broken"] * 2
    for state in side.states[:2]:
        state.release()
    side.pool.check()


@pytest.mark.parametrize("drafted", [False, True])
def test_a_pool_that_is_full_leaves_all_as_it_was(both, drafted):
    side = both(slabs=30)[0]
    side.feed([0, 1], [[1] * 10, [2] * 10])
    for _ in range(2):
        side.draft([0, 1], [[1] * 5, [2] * 5], [1, 1])
    taken = []
    while side.pool.slabs_for([1, 0]) <= side.pool.free_slabs:
        taken.append(side.pool.take([1, 0])[0])
    before, ready = side.kept, len(both.used)
    opened = [side.states[row].begin() for row in (0, 1)]
    with pytest.raises(PoolFull):
        side.feed([0, 1], [[1] * 5, [2] * 5])
    commit([(each, 0) for each in opened])
    assert side.kept == before and len(both.used) == ready + 1
    side.pool.release((0, ids) for ids in taken)
    side.check()
    side.draft([0, 1], [[1] * 5, [2] * 5], [5, 0]) if drafted else side.feed([0, 1], [[1] * 5, [2] * 5])
    side.check()


def test_a_step_that_breaks_off(both):
    side = both()[0]
    side.feed([0, 1], [[1] * 3, [2] * 4])
    for _ in range(2):
        side.feed([0, 1], [[1], [2]])
    used, ready = side.pool.used_bytes, len(both.used)
    side.replay = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        side.feed([0, 1], [[1], [2]])
    assert len(both.used) == ready + 1 and side.pool.used_bytes == used
    assert [state.condition for state in side.states[:2]] == ["broken"] * 2
    for state in side.states[:2]:
        state.release()
    side.pool.check()


def test_an_interruption_when_states_are_told_gives_no_page_back_twice(both, monkeypatch):
    side, grown = both()[0], []
    side.feed([0, 1], [[1] * 3, [2] * 3])
    for _ in range(2):
        side.feed([0, 1], [[1] * 4, [2] * 4])

    def interrupted(*given) -> Run:
        grown.append(given)
        if len(grown) == 2:
            raise KeyboardInterrupt
        return Run(*given)

    monkeypatch.setattr("bough.state.ahead.Run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        side.feed([0, 1], [[1] * 4, [2] * 4])
    for state in side.states[:2]:
        assert state.condition == "broken"
        state.release()  # which would notice


def test_steps_that_there_is_no_room_for_are_planned_anew(both):
    """With room for what may come, pages are more than a graph has numbers for; without, they are not."""
    sides = both()
    for side in sides:
        side.feed([0, 1], [[1] * 5, [2] * 5])
        side.feed([0, 1], [[1], [2]])
        (fixed,) = [each.fixed for each in side.runner.graphs._captured.values() if each.fixed.each == 1]
        fixed._numbers = fixed._numbers[: fixed._end + 2 * 2 + 1]  # of 6 tokens in pages of 4
        for _ in range(2):
            side.feed([0, 1], [[1], [2]])
    assert len(both.used) == 1  # what was made ready before
    same(sides)


@pytest.mark.parametrize("seed", range(4))
def test_keys_are_shared_out_in_spans_that_cover_them(seed):
    """As many whole spans as the keys of a row fill, and one more for what is more than a small rest."""
    draw, programs = np.random.default_rng(seed), (132, 4000)[seed % 2]
    counts, history = draw.integers(0, 10, 30).tolist(), draw.integers(0, 3000, 30).tolist()
    keys = [before + count if count else 0 for before, count in zip(history, counts, strict=True)]
    size = ceil(max(sum(keys) / programs, sqrt(JOIN * max(counts) * max(keys))) / SPAN) * SPAN
    used = [n // size + (n % size > size // REST) if n >= size else int(n > 0) for n in keys]
    rows = [row for row, spans in enumerate(used) for _ in range(spans)]
    found = shared_out(np.array(keys), max(counts), programs)
    assert [each.tolist() for each in found] == [used, rows]
    assert tuple(divided(counts, history, None, programs)) == (used, rows)


def test_places_of_many_are_those_of_each(both):
    side = both()[0]
    side.feed([0, 1, 2], [[1] * 4, [2] * 5, [3] * 6])
    for kept in ([5, 1, 0], [5, 1, 5], [4, 1, 5]):
        side.draft([0, 1, 2], [[1] * 5] * 3, kept)
        states, journal = side.states[:3], side.runner.graphs._journal
        owing = [state for state in states if state.owes is journal.all]
        slots, counts = [state.slot for state in owing], [5] * len(owing)
        opened = [state.begin() for state in owing]
        each = journal.places(journal.all, owing, counts, slots, slots)
        start, owed = np.array([state.owed for state in owing]).T
        stretches = np.array(journal.stretches_of(owing))
        many = journal.places_of_many(journal.all, stretches, np.array(slots), start, owed, np.array(counts))
        assert [tuple(place) for place in each] == list(zip(*(np.asarray(of).tolist() for of in many), strict=True))
        assert len(many) == len(PLACE)
        commit([(one, 0) for one in opened])
