"""Steady steps against the same ones by a Reservation: what is sent to the device, and what becomes of states and pool.

No model computes anything here: graphs do nothing when they are replayed.
"""

from random import Random
from types import SimpleNamespace

import pytest
import torch

from bough.engine.runner import Runner
from bough.errors import PoolFull, StateError
from bough.state.fixed import Fixed
from bough.state.graphs import Captured, Shape
from bough.state.kinds import FullKV, Recurrent, ShortConv, WindowKV
from bough.state.layout import Layout
from bough.state.live import State
from bough.state.pool import Pool
from bough.state.recordings import Recordings
from bough.state.steady import steady
from bough.state.transaction import commit

HYBRID = (FullKV(1, 4, 4), Recurrent(6, 3, 1, 2, 2), ShortConv(4, 3))


class Side:
    """A pool and its states, of which steps are captured, as if on a device."""

    def __init__(self, kinds=HYBRID, slabs: int = 400, page_tokens: int = 4) -> None:
        layout = Layout.of(kinds, page_tokens=page_tokens, dtype=torch.float32)
        self.pool = Pool(layout, slabs * layout.slab_bytes, max_running=6)
        self.runner = Runner(SimpleNamespace(context=256, logits=lambda hidden: hidden), self.pool)
        self.runner.model = self._computed
        self.runner._last = lambda step, last, hidden: (None, None)
        self.runner.graphs._memory, self.runner.graphs._capture = (0, 0), self._captured
        self.states = [State(self.pool) for _ in range(4)]
        self.replay = lambda: None
        self.sent: list[int] = []
        self.replayed = 0

    def _computed(self, step) -> torch.Tensor:
        return torch.zeros(step.rows.total, 1)

    def _captured(self, shape: Shape, like: None) -> Captured:
        graphs, fixed = self.runner.graphs, Fixed(self.pool, *shape[:2], 256)

        def replay() -> None:
            self.replay()
            self.sent = fixed._numbers[: fixed._used].tolist()
            self.replayed += 1

        room = torch.zeros(shape[0] * shape[1], 1)
        graph = SimpleNamespace(replay=replay)
        return Captured(graph, fixed, None, room, room, graphs._journal, graphs._into(shape))

    def draft(self, rows: list[int], tokens: list[list[int]], kept: list[int]) -> None:
        opened = [self.states[row].begin() for row in rows]
        self.feed(rows, tokens)
        commit(list(zip(opened, kept, strict=True)))

    def feed(self, rows: list[int], tokens: list[list[int]], given: torch.Tensor | None = None) -> None:
        batch = [(self.states[row], some) for row, some in zip(rows, tokens, strict=True)]
        self.runner.forward(batch, list(map(len, tokens)), given=given)

    @property
    def kept(self) -> tuple:
        """All that is known of the pool and its states, and what was sent last."""
        journal = self.runner.graphs._journal
        names = {None: None, journal.all: "all", journal.late: "late"}
        states = [
            (s.length, s.known, s.slot, s.condition, names[s.owes], s.owes and s.owed, s.runs[0].ids.tolist())
            for s in self.states
        ]
        stores = [(store.refs.tolist(), store.fill.tolist(), store.used, store.slabs) for store in self.pool.stores]
        return states, stores, self.sent

    def check(self) -> None:
        self.pool.check()
        for state in self.states:
            state.check()


@pytest.fixture(autouse=True)
def as_if_on_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(Recordings, "_replay", lambda self, rows: None)


@pytest.mark.parametrize("seed", range(6))
def test_what_a_reservation_makes_of_it(seed, monkeypatch):
    draw, both = Random(seed), [Side(page_tokens=(3, 4, 16)[seed % 3]) for _ in range(2)]
    monkeypatch.setattr(both[1].runner.graphs, "steady", lambda batch, given: None)
    found = []
    monkeypatch.setattr("bough.state.graphs.steady", lambda *given: found.append(steady(*given)) or found[-1])
    for _ in range(60):
        rows = draw.sample(range(4), draw.randint(1, 4))
        many = draw.choice([1, 1, 3, 5, 9, 20])  # the last one is no captured step
        tokens = [[draw.randrange(99) for _ in range(draw.randint(1, many))] for _ in rows]
        kept = [draw.randint(0, len(each)) for each in tokens]
        act = "feed" if many == 20 else draw.choice(["draft"] * 4 + ["feed"] * 3 + ["fork"])
        given = torch.tensor([draw.randrange(99) for each in tokens for _ in each]) if draw.random() < 0.3 else None
        for side in both:
            match act:
                case "draft":
                    side.draft(rows, tokens, kept)
                case "feed":
                    side.feed(rows, tokens, given)
                case "fork":
                    side.states[rows[-1]].release()
                    side.states[rows[-1]] = State(side.pool) if len(rows) == 1 else side.states[rows[0]].fork()
            side.check()
        assert both[0].kept == both[1].kept and both[0].replayed == both[1].replayed
    assert sum(each is not None for each in found) > 15 and None in found


def test_a_pool_that_is_full_leaves_all_as_it_was():
    side = Side(slabs=30)
    side.feed([0, 1], [[1] * 11, [2] * 12])
    side.draft([0, 1], [[1], [2]], [1, 1])
    taken = []
    while side.pool.slabs_for([1, 0]) <= side.pool.free_slabs:
        taken.append(side.pool.take([1, 0])[0])
    before = side.kept
    opened = [side.states[row].begin() for row in (0, 1)]
    with pytest.raises(PoolFull):
        side.feed([0, 1], [[1] * 9, [2] * 9])
    for each in opened:
        each.commit(0)
    assert side.kept == before
    side.pool.release((0, ids) for ids in taken)
    side.check()
    side.draft([0, 1], [[1] * 9, [2] * 9], [9, 0])
    side.check()


def test_a_step_that_breaks_off_gives_its_pages_back():
    side = Side()
    side.feed([0, 1], [[1] * 4, [2] * 5])
    used = side.pool.used_bytes
    side.replay = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        side.feed([0, 1], [[1], [2]])
    assert [state.condition for state in side.states[:2]] == ["broken"] * 2 and side.pool.used_bytes == used
    for state in side.states[:2]:
        state.release()
    side.pool.check()


def test_whatever_is_not_steady_is_left_to_others():
    side = Side()
    first, second, third, fresh = side.states
    side.feed([0, 1, 2], [[1] * 6, [2] * 6, [3] * 8])
    side.feed([0, 1, 2], [[1], [2], [3]])

    def is_steady(*rows: tuple[State, int], pool: Pool = side.pool) -> bool:
        return steady(pool, [(state, [1] * count) for state, count in rows]) is not None

    assert is_steady((first, 1)) and is_steady((first, 9), (second, 2))
    assert not is_steady() and not is_steady((first, 0)) and not is_steady((first, 10))
    assert not is_steady((fresh, 1)) and not is_steady((first, 1), (first, 1))
    assert not is_steady((first, 1), pool=Side().pool)
    transaction = second.begin()
    assert is_steady((second, 3)) and not is_steady((first, 1), (second, 1))
    side.feed([1], [[1, 2]])
    assert not is_steady((second, 1))
    with pytest.raises(StateError, match="has had its forward"):
        side.feed([1], [[1]])
    transaction.commit(1)
    assert is_steady((second, 1))
    fork = second.fork()
    assert not is_steady((second, 1)) and not is_steady((fork, 1))  # they share the slot, and the last page
    fork.release()
    assert is_steady((second, 1))
    third.release()
    assert not is_steady((third, 1))
    windows = Side((*HYBRID, WindowKV(1, 4, 4, 5)))
    windows.feed([0], [[1] * 3])
    assert not is_steady((windows.states[0], 1), pool=windows.pool)
    side.pool.check()
