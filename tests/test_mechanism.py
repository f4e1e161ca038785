"""Snapshots, forks, rewinds, cuts and transactions, in any order, on a toy model of all four kinds.

Whatever was done, every live state holds what a from-scratch run of its tokens would have left (see test_state).
"""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from test_pool import dump
from test_state import DICE, StateMachine
from toy import DELTA, FULL, WINDOW, check, close, feed, pool_of, text, toy, used

from bough.errors import PoolFull, StateError
from bough.state.live import State
from bough.state.pool import Pool
from bough.state.recordings import Journal
from bough.state.reservation import forward
from bough.state.snapshot import Snapshot, merge
from bough.state.store import Run


class Mechanism(StateMachine):
    """All that can be done to states and snapshots."""

    def __init__(self):
        super().__init__()
        self.snapshots: dict[Snapshot, tuple[int, ...]] = {}  # with the tokens up to its end
        self.paths: dict[State, tuple[int, ...]] = {}  # the tokens that a state was restored on

    def some_for(self, state, dice):
        """A state that knows the entries of tokens it has not read is fed exactly these first."""
        tokens = super().some_for(state, dice)
        if state.known == state.length:
            return tokens
        return (self.paths[state][state.length : state.known] + tokens)[: max(1, len(tokens))]

    @precondition(lambda self: self.tokens)
    @rule(dice=DICE)
    def extend_with_cuts(self, dice):
        batch = self.batch(dice)
        cuts = [
            dice.sample(range(s.length + 1, s.length + len(t) + 1), min(len(t), dice.randint(0, 4))) for s, t in batch
        ]
        before = dump(self.pool)
        try:
            with forward(self.pool, batch, cuts=cuts) as step:
                self.pool.check()
                self.model(step)
        except PoolFull:
            assert self.may_be_full(batch) and dump(self.pool) == before
            return
        for (state, tokens), wanted in zip(batch, cuts, strict=True):
            self.tokens[state] += tuple(tokens)
            assert {at for at in state.points if at > len(self.tokens[state]) - len(tokens)} <= set(wanted)
            assert all(state.can_resume(at) for at in state.points)

    def resumable(self, state: State, length: int) -> bool:
        """Which lengths the kinds allow, said once more: the window before it is held, and a slot was saved."""
        if length in (0, state.length):
            return True
        point, size = state.points.get(length), self.pool.layout.page_tokens
        if self.pool.slot_store is not None:
            return point is not None and point.slot is not None  # a point has its windows too
        wanted = range(max(0, length - self.model.kinds[WINDOW].window + 1) // size, -(-length // size))
        held = set(range(state.runs[1].first, state.runs[1].end))
        for at, each in state.points.items():  # a page is good up to the point that holds it
            held |= {
                page for page in range(each.runs[1].first, each.runs[1].end) if min(length, page * size + size) <= at
            }
        return held.issuperset(wanted)

    @precondition(lambda self: self.tokens)
    @rule(dice=DICE, forks=st.booleans())
    def rewind(self, dice, forks):
        state = dice.choice(list(self.tokens))
        lengths = [0, *state.points, state.length, *range(max(0, state.length - 3), state.length + 2)]
        length = dice.choice(lengths)
        before, wrong = dump(self.pool), length > state.length or not self.resumable(state, length)
        assert state.can_resume(length) == (not wrong)
        if wrong:
            with pytest.raises(StateError):
                state.fork(length) if forks else state.rewind(length)
            assert dump(self.pool) == before
        elif not forks:
            state.rewind(length)
            self.tokens[state] = self.tokens[state][:length]
        elif len(self.tokens) < self.pool.max_running:
            self.tokens[state.fork(length)] = self.tokens[state][:length]
        assert dump(self.pool)[0] == before[0], "bytes were written"

    @precondition(lambda self: self.tokens)
    @rule(dice=DICE)
    def snapshot(self, dice):
        state = dice.choice(list(self.tokens))
        end = dice.choice([state.length, *state.points, *range(max(0, state.length - 2), state.length)])
        start = dice.randint(0, end)
        before = dump(self.pool)
        taken = state.snapshot(start, end)
        assert dump(self.pool)[0] == before[0], "bytes were written"
        assert (taken is None) == (start == end)
        if taken is not None:
            self.snapshots[taken] = self.tokens[state][:end]

    @precondition(lambda self: self.snapshots)
    @rule(dice=DICE)
    def split(self, dice):
        snapshot = dice.choice(list(self.snapshots))
        at = dice.randint(snapshot.start - 1, snapshot.end + 1)
        tokens = self.snapshots.pop(snapshot)
        left, right = snapshot.split(at)
        for half, end in ((left, min(at, len(tokens))), (right, len(tokens))):
            if half is not None:
                self.snapshots[half] = tokens[:end]
        if left is not None and right is not None:
            assert snapshot.closed and left.end == right.start == at
            if 1 in right.runs:  # the left half keeps the window as far as it covers its own reach
                wanted = self.pool.layout.pages(self.pool.stores[1].unit.earliest(at), at)
                assert (1 in left.runs) == (right.runs[1].first <= wanted[0] and wanted[1] <= right.runs[1].end)
        else:
            assert snapshot in (left, right) and not snapshot.closed

    @precondition(lambda self: self.snapshots)
    @rule(dice=DICE)
    def join(self, dice):
        left = dice.choice(list(self.snapshots))
        after = [
            each
            for each, tokens in self.snapshots.items()
            if each.start == left.end and tokens[: left.end] == self.snapshots[left]
        ]
        right = dice.choice([None, *after])
        kept = self.snapshots.get(right)
        merged = merge(left, right)
        for half in (left, right):
            self.snapshots.pop(half, None)
        assert left.closed and (merged is None) == (right is None)
        if merged is not None:
            self.snapshots[merged] = kept

    @precondition(lambda self: self.snapshots)
    @rule(dice=DICE)
    def close_snapshot(self, dice):
        snapshot = dice.choice(list(self.snapshots))
        snapshot.close()
        snapshot.close()
        del self.snapshots[snapshot]

    @precondition(lambda self: self.snapshots and self.tokens)
    @rule(dice=DICE)
    def restore(self, dice):
        """Any state that shares the tokens before the path can be put on it."""
        last = dice.choice(list(self.snapshots))
        tokens, path = self.snapshots[last], [last]
        while path[0].start:
            before = [
                each
                for each, held in self.snapshots.items()
                if each.start < path[0].start == each.end and held == tokens[: each.end]
            ]
            if not before or dice.random() < 0.5:
                break
            path.insert(0, dice.choice(before))
        states = [s for s, held in self.tokens.items() if held[: path[0].start] == tokens[: path[0].start]]
        if not states:
            return
        state = dice.choice(states)
        length = dice.choice([last.end, last.end, *(each.start for each in path), last.end - 1])
        known = dice.choice([None, length, last.end, dice.randint(length, last.end)])
        before = dump(self.pool)
        try:
            state.restore(path, length, known)
        except StateError:
            assert dump(self.pool) == before
            assert length != last.end or not last.resumes or state.length < path[0].start
            return
        self.paths[state] = tokens
        assert dump(self.pool)[0] == before[0], "bytes were written"
        self.tokens[state] = tokens[:length] if length > path[0].start else self.tokens[state][:length]

    @rule(dice=DICE, spare=st.booleans())
    def compact(self, dice, spare):
        """Entries move together when that makes room, and nobody loses one."""
        counts = [dice.choice([0, 1, 2, 5, 20]) for _ in self.pool.stores]
        free = len(self.pool._free_slabs)
        self.pool.compact(counts, spare=spare)
        assert (self.pool.slabs_for(counts, spare=spare) <= len(self.pool._free_slabs)) == self.pool.fits(
            counts, spare=spare
        )
        assert len(self.pool._free_slabs) >= free

    @precondition(lambda self: self.tokens)
    @rule(dice=DICE)
    def draft(self, dice):
        """Some rows in transactions and some not, in one forward; each transaction keeps its own part."""
        batch = self.batch(dice)
        for state, _ in batch:
            if state.known > state.length:
                with pytest.raises(StateError, match="are known"):
                    state.begin()
        drafting = {s: s.begin() for s, _ in batch if s.known == s.length and dice.random() < 0.5}
        before = dump(self.pool)
        try:
            with forward(self.pool, batch) as step:
                hidden = self.model(step)
        except PoolFull:
            assert self.may_be_full(batch) and dump(self.pool) == before
            for transaction in drafting.values():
                transaction.commit(0)
            return
        self.pool.check()
        rows = iter(hidden)
        for state, tokens in batch:
            for i in range(len(tokens)):
                known = self.tokens[state] + tuple(tokens[: i + 1])
                close(next(rows), self.model.record(known)["hidden"], "hidden row")
        for state, tokens in batch:
            kept = len(tokens)
            if state in drafting:
                for misuse in (state.fork, state.begin, lambda s=state: s.rewind(0), lambda s=state: s.snapshot(0)):
                    with pytest.raises(StateError, match="transaction"):
                        misuse()
                kept = dice.randint(0, len(tokens))
                if dice.random() < 0.1:
                    self.give_back(state)
                    continue
                drafting[state].commit(kept)
            self.tokens[state] += tuple(tokens[:kept])

    @precondition(lambda self: self.tokens)
    @rule(dice=DICE, layer=st.integers(0, 4))
    def failing_draft(self, dice, layer):
        """A forward that raises inside a transaction breaks nothing: the slot was not touched."""
        state = dice.choice(list(self.tokens))
        if state.known > state.length:
            return
        before = [each[:3] for each in self.page_books()]  # fill marks may come down
        with state.begin() as transaction:
            for _ in range(2):  # it may be tried again
                try:
                    with forward(self.pool, [(state, [0, 1, 0])]) as step:
                        self.model(step, fail_after=layer)
                except (InterruptedError, PoolFull):
                    assert transaction.fed is None
        assert [each[:3] for each in self.page_books()] == before and state.condition == "ready"

    @invariant()
    def holds_snapshots(self):
        for snapshot in self.snapshots:
            snapshot.check()
        assert not hasattr(self, "pool") or self.pool.spare_slots >= 0, "a running sequence might get no slot"

    def teardown(self):
        for snapshot in self.snapshots:
            snapshot.close()
        super().teardown()


TestMechanism = Mechanism.TestCase
TestMechanism.settings = settings(max_examples=100, stateful_step_count=30)


@pytest.mark.long
class TestMechanismLong(Mechanism.TestCase):
    settings = settings(max_examples=2500, stateful_step_count=50)


def grown(model, pool, tokens, cuts=()) -> State:
    """A state that has read the tokens in one forward."""
    state = State(pool)
    with forward(pool, [(state, tokens)], cuts=[cuts]) as step:
        model(step)
    return state


@pytest.mark.parametrize("pages", [256, pytest.param(1024, marks=pytest.mark.long)])
def test_forking_a_long_state_copies_nothing(pages):
    model = toy(9)
    pool = pool_of(model, 32, slabs=3 * pages)
    tokens = text(32 * pages)
    state = State(pool)
    for start in range(0, len(tokens), 4096):
        feed(model, (state, tokens[start : start + 4096]))
    before = dump(pool)
    forks = [state.fork() for _ in range(64)]
    assert dump(pool)[0] == before[0]
    assert used(pool) == [pages, 1, 1]
    for i, fork in enumerate(forks[:3]):  # each goes its own way; tails and slots are copied then, whole pages never
        feed(model, (fork, (i,)))
    assert used(pool) == [pages + 3, 1 + 3, 1 + 3]


@pytest.mark.parametrize("cuts", [(1, 2, 3), (4, 8), (5, 17, 40), (39, 40), ()], ids=str)
def test_one_prefill_yields_all_cuts(cuts):
    """Cuts nearer to the start than a convolution's tail is long, at page edges, within windows, at the very end."""
    model, tokens = toy(6), text(40)
    pool = pool_of(model, 4)
    state = grown(model, pool, tokens, cuts)
    assert set(state.points) == set(cuts)
    for cut in cuts:
        fork = state.fork(cut)
        check(model, fork, tokens[:cut])
        feed(model, (fork, tokens[cut : cut + 3]))
        check(model, fork, tokens[: cut + 3])
        fork.release()
    with pytest.raises(StateError, match="not all among"), forward(pool, [(state, (0,))], cuts=[(40,)]):
        pass


def test_cuts_across_a_chunked_prefill():
    model, tokens = toy(6), text(50)
    pool = pool_of(model, 4)
    state, wanted = State(pool), (3, 16, 17, 33, 49)
    for start in range(0, 50, 16):
        piece = tokens[start : start + 16]
        inside = [cut for cut in wanted if start < cut <= start + len(piece)]
        with forward(pool, [(state, piece)], cuts=[inside]) as step:
            model(step)
    assert tuple(state.points) == wanted
    for cut in reversed(wanted):
        state.rewind(cut)
        check(model, state, tokens[:cut])


def test_a_chat_of_many_turns_taken_back_and_taken_up_again():
    """Windows move on turn by turn; snapshots of the turns bring any of them back, and going on from there is exact."""
    model, pool = toy(7), pool_of(toy(7), 4)
    state, tokens, path, texts = State(pool), (), [], []
    for turn in range(12):
        said = text(9 + turn)[turn % 5 :]
        with forward(pool, [(state, said)], cuts=[(len(tokens) + len(said),)]) as step:
            model(step)
        tokens += said
        path.append(state.snapshot(len(texts[-1]) if texts else 0))
        texts.append(tokens)
        feed(model, (state, (turn % 5,)))  # a reply
        tokens += (turn % 5,)
    assert not state.can_resume(len(texts[3]) - 1)
    for turn in (11, 3, 8, 0, 5):
        state.restore(path[: turn + 1], len(texts[turn]))
        check(model, state, texts[turn])
        feed(model, (state, (1, 2)))
        check(model, state, (*texts[turn], 1, 2))
    for each in path:
        each.close()


def test_restore_refuses_gaps_and_nonsense():
    model, tokens = toy(5), text(30)
    pool = pool_of(model, 4)
    state = grown(model, pool, tokens, (10, 20))
    first, second, third = (state.snapshot(a, b) for a, b in ((0, 10), (10, 20), (20, 30)))
    other, before = State(pool), dump(pool)
    for path, length, fault in [
        ([second], 20, "gap"),
        ([first, third], 30, "gap"),
        ([first], -1, "below"),
        ([first], 11, "past"),
        ([first, second], 15, "no slot|window"),
        ([], 1, "past"),
    ]:
        with pytest.raises(StateError, match=fault):
            other.restore(path, length)
        assert dump(pool) == before
    other.restore([], 0)  # where it is already
    other.restore([first, second, third], 20)  # the path may go on past the length
    check(model, other, tokens[:20])
    feed(model, (other, (0, 0)))
    other.restore([second], 20)  # what the state has from the start of the path on is replaced
    check(model, other, tokens[:20])
    assert state.snapshot(7, 7) is None
    for wrong in ((-1, 5), (5, 4), (0, 31)):
        with pytest.raises(StateError, match="not a range"):
            state.snapshot(*wrong)
    first.close()
    with pytest.raises(StateError, match="closed"):
        other.restore([first], 10)
    with pytest.raises(StateError, match="closed"):
        first.split(5)


@pytest.mark.parametrize("at", range(1, 12))
def test_halves_merge_again(at):
    model, tokens = toy(5), text(12)
    pool = pool_of(model, 4)
    state = grown(model, pool, tokens)
    snapshot = state.snapshot(0)
    whole = snapshot.nbytes
    left, right = snapshot.split(at)
    assert right.resumes and right.slot is not None and left.slot is None
    boundary = pool.stores[0].unit.stride if at % 4 else 0
    full = [len(half.runs[0].ids) * pool.stores[0].unit.stride for half in (left, right)]
    assert sum(full) == 3 * pool.stores[0].unit.stride + boundary
    merged = merge(left, right)
    assert merged.nbytes == whole
    other = State(pool)
    other.restore([merged], 12)
    check(model, other, tokens)


@pytest.mark.parametrize("at", [1, 4, 6, 11])
def test_halves_that_came_back_as_copies_merge_too(at):
    """Each half moved away and back by itself: whole pages, so that the page on the border is there twice."""
    model, tokens = toy(5), text(12)
    pool = pool_of(model, 4)
    state = grown(model, pool, tokens)
    halves = []
    for half in state.snapshot(0).split(at):
        runs = {}
        for index, run in half.runs.items():
            counts = [len(run.ids) if i == index else 0 for i in range(len(pool.stores))]
            ids, store = pool.take(counts)[index], pool.stores[index]
            store.copy(run.ids, ids)
            store.fill[ids] = store.fill[run.ids]
            runs[index] = Run(run.first, ids)
        halves.append(Snapshot(pool, half.start, half.end, runs, half.slot))
        pool.release((index, run.ids) for index, run in runs.items())  # what taking them lent
        half.close()
    state.release()
    merged = merge(*halves)
    merged.check()
    other = State(pool)
    other.restore([merged], 12)
    check(model, other, tokens)
    feed(model, (other, (1, 2, 3)))
    check(model, other, (*tokens, 1, 2, 3))
    pool.check()


def test_a_missing_half_keeps_nothing():
    model = toy(5)
    pool = pool_of(model, 4)
    state = grown(model, pool, text(12))
    for left in (True, False):
        snapshot = state.snapshot(0)
        assert merge(*((snapshot, None) if left else (None, snapshot))) is None
        assert snapshot.closed
    assert merge(None, None) is None
    pool.check()


@pytest.mark.parametrize("page_tokens", [1, 3, 4, 32])
@pytest.mark.parametrize("before", [0, 1, 2, 3, 4, 5, 8, 11])
def test_every_commit_at_every_edge(page_tokens, before):
    """commit(0..k) around the edges of a page and a window, with fewer tokens than the tails of convolutions."""
    model, tokens, k = toy(5), text(30), 9
    pool = pool_of(model, page_tokens)
    for count in range(k + 1):
        state = grown(model, pool, tokens[:before]) if before else State(pool)
        transaction = state.begin()
        feed(model, (state, tokens[before : before + k]))
        assert state.length == before
        transaction.commit(count)
        check(model, state, tokens[: before + count])
        feed(model, (state, tokens[before + count : before + count + 3]))
        check(model, state, tokens[: before + count + 3])
        state.release()
    assert used(pool) == [0, 0, 0]


def test_misused_transactions():
    model, tokens = toy(5), text(12)
    pool = pool_of(model, 4)
    state = grown(model, pool, tokens)
    transaction = state.begin()
    with pytest.raises(StateError, match="0 were fed"):
        transaction.commit(1)
    feed(model, (state, (1, 2, 3)))
    with pytest.raises(StateError, match="had its forward"):
        feed(model, (state, (1,)))
    for count in (4, -1):
        with pytest.raises(StateError, match="3 were fed"):
            transaction.commit(count)
    transaction.commit(2)
    with pytest.raises(StateError, match="closed"):
        transaction.commit(1)
    check(model, state, (*tokens, 1, 2))
    with state.begin():
        feed(model, (state, (4, 4)))  # left without a commit
    check(model, state, (*tokens, 1, 2))


def test_a_transaction_that_is_fed_nothing_beside_a_long_row():
    model, tokens = toy(5), text(12)
    pool = pool_of(model, 4)
    state, other = grown(model, pool, tokens), State(pool)
    with state.begin():
        feed(model, (state, ()), (other, text(20)))
    check(model, state, tokens)
    check(model, other, text(20))


def test_a_commit_without_recordings_changes_nothing():
    model, tokens = toy(5), text(12)
    pool = pool_of(model, 4)
    state = grown(model, pool, tokens)
    transaction = state.begin()
    feed(model, (state, (1, 2)))
    recording = transaction.recordings.parts[DELTA, "delta"]
    lost, recording.inputs = recording.inputs, ()
    before = dump(pool)
    with pytest.raises(StateError, match=f"not recorded, of layer {DELTA}"):
        transaction.commit(2)
    assert dump(pool) == before
    recording.inputs = lost
    transaction.commit(2)
    check(model, state, (*tokens, 1, 2))


def test_a_replay_that_fails_breaks_the_state_and_nothing_else():
    model, tokens = toy(5), text(12)
    pool = pool_of(model, 4)
    state, other = grown(model, pool, tokens), grown(model, pool, tokens[:5])
    transaction = state.begin()
    feed(model, (state, (1, 2)))
    transaction.recordings.parts[DELTA, "delta"].inputs = (np.zeros(2),) * 4
    with pytest.raises(ValueError, match="unpack"):
        transaction.commit(2)
    with pytest.raises(StateError, match="closed"):
        transaction.commit(0)
    with pytest.raises(StateError, match="broken"):
        state.fork()
    state.release()
    pool.check()
    check(model, other, tokens[:5])


def test_what_broke_in_a_step_stays_broken():
    """A commit that is owed may be settled in the step after, and fail there."""
    model, tokens = toy(5), text(12)
    pool = pool_of(model, 4)
    state = grown(model, pool, tokens)
    lasting = Journal(pool, 1).all
    with state.begin() as transaction:
        feed(model, (state, (1, 2)))
        lasting.parts, transaction.recordings = transaction.recordings.parts, lasting
        transaction.commit(2)
    assert state.owes is lasting and state.condition == "ready"
    state.check()
    lasting.parts[DELTA, "delta"].inputs = (np.zeros(2),) * 4
    state.begin()
    with pytest.raises(ValueError, match="unpack"), forward(pool, [(state, [3])], settled=False):
        state.settle()
    assert state.condition == "broken" and state.owes is None
    state.release()
    pool.check()


def test_what_is_owed_is_done_for_whoever_looks():
    model, tokens = toy(5), text(12)
    pool = pool_of(model, 4)

    def owing() -> State:
        state, journal = grown(model, pool, tokens), Journal(pool, 1)
        with state.begin() as transaction:
            feed(model, (state, (1, 2, 3)))
            journal.all.parts, transaction.recordings = transaction.recordings.parts, journal.all
            transaction.commit(2)
        assert state.owes is journal.all
        return state

    kept = (*tokens, 1, 2)
    fed, forked, rewound, saved, gone = (owing() for _ in range(5))
    feed(model, (fed, (4,)))
    check(model, fed, (*kept, 4))
    check(model, forked.fork(), kept)
    check(model, forked, kept)
    rewound.rewind(len(kept))
    check(model, rewound, kept)
    snapshot = saved.snapshot(0)
    feed(model, (saved, (4, 0)))
    saved.restore([snapshot], len(kept))
    check(model, saved, kept)
    gone.release()
    assert gone.owes is None
    pool.check()


def test_forks_draft_together():
    model, tokens = toy(5), text(13)
    pool = pool_of(model, 4)
    states = [grown(model, pool, tokens)]
    states += [states[0].fork() for _ in range(5)]
    transactions = [state.begin() for state in states[:4]]
    feed(model, *((state, text(9)[i:]) for i, state in enumerate(states)))
    pool.check()
    for i, transaction in enumerate(transactions):
        transaction.commit(2 * i)
    for i, state in enumerate(states):
        kept = 2 * i if i < 4 else 9
        check(model, state, tokens + text(9)[i:][:kept])


def test_a_draft_costs_rows_of_inputs_not_states():
    """The bytes that a draft of k tokens keeps grow by the inputs of a token, and no slot is taken for it."""
    model, tokens = toy(5), text(20)
    pool = pool_of(model, 4)
    state, sizes = grown(model, pool, tokens), []
    slots = used(pool)[2]
    for k in (1, 2, 8):
        with state.begin() as transaction:
            feed(model, (state, (0,) * k))
            sizes.append(transaction.nbytes)
            assert used(pool)[2] == slots
            kept = {
                e.untyped_storage().data_ptr(): e.untyped_storage().nbytes()
                for r in transaction.recordings.parts.values()
                for e in r.inputs
            }
            assert sum(kept.values()) == sizes[-1], "whatever the inputs were part of is not kept"
    row = 4 * (10 + (2 + 2 + 6) + 6)  # pre-conv rows; k, g and what is changed; the inputs of the short convolution
    assert sizes == [row, 2 * row, 8 * row]


def test_view_after_the_window_moved():
    model, tokens = toy(5), text(23)
    pool = pool_of(model, 4)
    state = State(pool)
    assert state.view(FULL) is None and state.view(WINDOW) is None
    feed(model, (state, tokens))
    for layer, start in ((FULL, 0), (WINDOW, 23 - 4)):
        for held, expected in zip(state.view(layer), model.record(tokens)["kv"][layer], strict=True):
            np.testing.assert_allclose(held.numpy(), expected[start:], atol=1e-4)
    alone = toy(1)
    assert grown(alone, pool_of(alone, 4), tokens).view(WINDOW) is None


def test_running_sequences_get_slots_and_points_only_what_is_spare():
    model, tokens = toy(5), text(24)
    layout = model.layout(4)
    slots = next(unit for unit in layout.units if not unit.is_page)
    pool = Pool(layout, 60 * layout.slab_bytes, max_running=30 * slots.per_slab)
    state = grown(model, pool, tokens, range(1, 24))
    kept = len(state.points)
    assert kept < 23 and max(state.points) == 23, "the latest cuts are kept"
    assert state.snapshot(0).slot is None or pool.spare_slots >= 0
    states = [state]

    def run_others():
        for _ in range(pool.max_running):
            states.append(State(pool))
            feed(model, (states[-1], tokens[:2]))

    with pytest.raises(PoolFull):
        run_others()
    assert pool.spare_slots >= 0, "a running sequence might get no slot"
    for each in states[1:-1]:
        check(model, each, tokens[:2])
