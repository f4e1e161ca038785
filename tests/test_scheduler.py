"""Who gets how much of a step, and who starts first: bounds that hold whatever comes."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough import CacheConfig, Engine, SamplingParams
from bough.engine.scheduler import MOST_PASSED, order, plan
from bough.engine.sequence import Sequence


@dataclass(eq=False)
class Row:
    pending: int
    passed: int = 0


rows = st.lists(st.integers(1, 3000), max_size=40).map(lambda counts: [Row(count) for count in counts])


@given(rows, st.integers(1, 600), st.integers(0, 10**6))
def test_a_plan_keeps_to_its_budget_and_wastes_none_of_it(running, budget, turn):
    planned = plan(running, budget, turn)
    total = sum(count for _, count in planned)
    assert len({id(row) for row, _ in planned}) == len(planned)
    assert all(1 <= count <= row.pending for row, count in planned)
    assert total <= budget
    assert total >= min(budget - budget // 8, sum(row.pending for row in running))
    writers, readers = (sum((row.pending == 1) is one for row in running) for one in (True, False))
    assert sum(row.pending == 1 for row, _ in planned) >= min(
        writers, max(1, budget - budget // 8 if readers else budget)
    )


@given(rows, st.integers(2, 64))
def test_everybody_who_writes_has_a_turn(running, budget):
    writers = [row for row in running if row.pending == 1]
    served = {id(row) for turn in range(2 * len(writers) + 1) for row, _ in plan(running, budget, turn)}
    assert all(id(row) in served for row in writers)


@given(st.lists(st.integers(2, 3000), min_size=1, max_size=20), st.integers(2, 600))
def test_the_oldest_prompt_goes_on_and_short_ones_do_not_wait_for_it(counts, budget):
    running = [Row(count) for count in counts]
    planned = {id(row): count for row, count in plan(running, budget)}
    oldest, others = running[0], running[1:]
    assert planned[id(oldest)] >= min(oldest.pending, budget / 2)
    if others and oldest.pending >= budget and budget >= 4:
        shortest = min(others, key=lambda row: row.pending)
        assert planned[id(shortest)] == min(shortest.pending, budget // 2)


def test_order_prefers_the_warm_and_starves_nobody():
    """One cold prompt, and warm ones that never cease to come."""
    chance = random.Random(0)
    cold = Row(5000)
    waiting, started = [cold, *(Row(chance.randrange(2, 50)) for _ in range(9))], 0
    while cold in waiting:
        first = order(waiting, lambda row: row.pending)[0]
        for other in waiting[: waiting.index(first)]:
            other.passed += 1
        waiting.remove(first)
        waiting.append(Row(chance.randrange(2, 50)))
        started += 1
    assert started == MOST_PASSED + 1


@pytest.fixture
def alone(hybrid_folder):
    """An engine that runs one request at a time."""
    with Engine.load(hybrid_folder, dtype="float32", cache=CacheConfig(), max_running=1) as engine:
        yield engine
        engine.check()


def test_a_warm_request_starts_before_a_cold_one(alone, monkeypatch):
    text, short = [3 + i % 200 for i in range(90)], SamplingParams(max_tokens=2, temperature=0)
    alone.generate(text, short)
    ended, finish = [], Sequence.finish
    monkeypatch.setattr(Sequence, "finish", lambda self, reason: (ended.append(self.handle), finish(self, reason)))

    def submit():  # in the loop's thread, so that all of them wait before any starts
        return [alone.submit(prompt, short) for prompt in ([9] * 80, [8] * 80, text)]

    cold, colder, warm = alone.call(submit)
    outputs = [handle.result() for handle in (cold, colder, warm)]
    assert ended == [warm, cold, colder]
    assert [output.usage.cached_tokens for output in outputs] == [0, 0, 89]
