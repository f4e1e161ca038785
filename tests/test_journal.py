"""Captured steps that leave large parts of slots behind, against the readable ops over the same states.

Where they run, test_fixed.py says.
"""

from contextlib import suppress

import pytest
import torch
from test_fixed import Pair, pair_of, qwen3_5  # noqa: F401 (a fixture)
from test_triton import kernels, plain_numbers  # noqa: F401 (a fixture)

from bough.state.live import State
from bough.state.recordings import Recordings
from bough.state.reservation import forward

pytestmark = kernels


OWED = 5  # tokens that may be owed here: fewer steps show the same


@pytest.fixture
def pair(pair_of, monkeypatch) -> Pair:  # noqa: F811
    """Three texts over two layers of the delta rule, and one of attention."""
    monkeypatch.setattr("bough.state.recordings.OWED", OWED)
    made = pair_of(qwen3_5)
    for tokens in ([1, 2, 3], [4, 5], [6, 7]):
        made.start(tokens)
    return made


def deltas(runner, state: State) -> torch.Tensor:
    """What its slot has of the delta rule."""
    return torch.stack([runner.pool.part(layer, "delta")[state.slot].cpu() for layer in range(2)])


def expect_equal_slots(pair: Pair, row: int) -> None:
    """Whoever looks finds what the readable ops have."""
    copies = [state.fork() for state in pair.states[row]]
    assert all(copy.owes is None for copy in copies)
    mine, other = (deltas(runner, copy) for runner, copy in zip((pair.plain, pair.fast), copies, strict=True))
    torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)
    for copy in copies:
        copy.release()


def test_states_are_written_once_in_a_while(pair):
    """Each in its own time, and before anyone looks."""
    journal, written = None, []
    pair.step([[1], [2]], [0, 1])
    for step in range(2 * OWED):
        rows = [0, 1, 2] if step > 1 else [0, 1]
        before = [deltas(pair.fast, pair.states[row][1]) for row in rows]
        pair.step([[step + row] for row in rows], rows)
        after = [deltas(pair.fast, pair.states[row][1]) for row in rows]
        written.append([not torch.equal(*both) for both in zip(before, after, strict=True)])
        journal = pair.fast.graphs._journal
        assert all(pair.states[row][1].owes is journal.late for row in rows)
        assert max(pair.states[row][1].owed[1] for row in rows) <= OWED
        pair.fast.pool.check()
    assert [sum(rows[i] for rows in written if i < len(rows)) for i in range(3)] == [2, 2, 1]
    assert [any(rows) for rows in written].count(True) == 3  # the first two together, the third when its turn comes
    for row in range(3):
        expect_equal_slots(pair, row)
    pair.step([[3], [4], [5]])


def test_rounds_store_once_in_a_while(pair):
    """Whatever stands of them: what was owed before is owed still, and once."""
    stored = []
    for kept in ([2, 2], [2, 0], [0, 2], [1, 1], [2, 2], [0, 0], [2, 1]):
        before = deltas(pair.fast, pair.states[0][1])
        pair.draft([[5, 6], [7, 8]], kept, [0, 1])
        stored.append(not torch.equal(before, deltas(pair.fast, pair.states[0][1])))
    assert 0 < sum(stored) < len(stored) - 2
    pair.step([[1], [2]], [0, 1])  # nothing is drafted: all that was owed is settled first
    pair.draft([[5, 6], [7, 8]], [1, 2], [0, 1])
    for row in (0, 1):
        expect_equal_slots(pair, row)


def test_a_round_that_fails_when_all_is_done_leaves_what_was_owed(pair):
    pair.draft([[1, 2]], [2], [0])
    state, owed = pair.states[0][1], pair.states[0][1].owed
    transaction = state.begin()
    with suppress(KeyError), forward(pair.fast.pool, [(state, [3, 4])], settled=False) as step:
        pair.fast.graphs(step)
        raise KeyError
    transaction.commit(0)
    assert state.owes is not None and state.owed == owed
    expect_equal_slots(pair, 0)
    pair.step([[5]], [0])


def test_points_at_the_end_of_a_step_are_settled(pair):
    for token in range(3):
        pair.step([[token]], [0])
    for state, runner in zip(pair.states[0], (pair.plain, pair.fast), strict=True):
        runner.forward([(state, [9])], [1], [[state.length + 1]])
    length = pair.states[0][0].length
    assert pair.states[0][1].owes is None and list(pair.states[0][1].points) == [length]
    pair.step([[5]], [0])
    for state in pair.states[0]:
        state.rewind(length)
    pair.step([[6]], [0])
    pair.fast.pool.check()


def test_a_point_that_cannot_be_settled_breaks_its_state_alone(pair, monkeypatch):
    pair.step([[1], [2]], [0, 1])
    (one, other), pool = [pair.states[row][1] for row in range(2)], pair.fast.pool

    def fails(self, rows):
        raise MemoryError("no more of it")

    with monkeypatch.context() as patch:
        patch.setattr(Recordings, "_replay", fails)
        with pytest.raises(MemoryError):
            pair.fast.forward([(one, [1]), (other, [2])], [1, 1], [[one.length + 1], []])
    assert (one.condition, other.condition) == ("broken", "ready") and not one.points
    pool.check()
    pair.plain.forward([(pair.states[1][0], [2])], [0])
    pair.step([[7]], [1])
    one.release()
    pool.check()


def test_a_step_that_breaks_off_leaves_no_state_that_goes_on(pair, monkeypatch):
    """Not even one in a transaction: its slot may have been moved on by what it owed, or not."""
    pair.step([[1]], [0])
    state = pair.states[0][1]
    transaction = state.begin()

    def fails(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(pair.fast.graphs._journal, "took", fails)
    with pytest.raises(KeyboardInterrupt):
        pair.fast.forward([(state, [5, 6])], [2])
    transaction.commit(0)
    assert state.condition == "broken"
    state.release()
    pair.fast.pool.check()


def test_more_states_than_there_is_room_for(pair, monkeypatch):
    """Those that are not in a step give theirs to those that are: what they owe is settled, an open end kept."""
    monkeypatch.setattr("bough.state.graphs.ROOM", 1)
    opened = [state.begin() for state in pair.states[0]]
    pair.step([[1, 2, 3]], [0])
    for rows in ([1], [2], [1], [1, 2]):
        pair.step([[3]] * len(rows), rows)
        assert sum(states[1].owes is not None for states in pair.states) <= pair.fast.graphs._journal.states
        pair.fast.pool.check()
    for each in opened:
        each.commit(2)
    for row in range(3):
        expect_equal_slots(pair, row)
    pair.step([[3], [4], [5]])


def test_what_is_captured_stays_where_there_is_no_memory_for_more(pair, monkeypatch):
    monkeypatch.setattr("bough.state.graphs.ROOM", 1)
    pair.step([[1]], [0])
    shape, captured = next(iter(pair.fast.graphs._captured.items()))
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 29, 1 << 40))
        pair.step([[1], [2], [3]])
    assert pair.fast.graphs._captured[shape] is captured is not None
    pair.step([[1]], [0])
    pair.step([[1], [2], [3]])


def test_the_same_text_gives_the_same_bits(pair):
    found = []
    for _ in range(2):
        state = State(pair.fast.pool)
        pair.fast.forward([(state, list(range(12)))], [0])
        found.append([pair.fast.forward([(state, [token])], [1])[1].clone() for token in range(OWED + 2)])
        state.release()
        pair.step([[1], [2], [3]])  # others, in between
    assert all(torch.equal(*both) for both in zip(*found, strict=True))
