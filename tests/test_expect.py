"""What is learned with time is learned in slices: no call does all of it, and in the end it is the same."""

from contextlib import contextmanager
from random import Random
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_policy import Cache
from timeline import engine, params

from bough.cache.expect import Learned
from bough.cache.ranks import Ranks
from bough.cache.reuse import Model, Use

WEEK = 7 * 24 * 3600.0
ALL = 1 << 40  # a slice that leaves nothing for the next call
LITTLE = 300  # lessons, or moves


@contextmanager
def counted():
    """Lists that lessons, and what was given another place in an order, are added to."""
    lessons, moves, learn, put = list[tuple](), list[object](), Model.learn, Ranks.put

    def learned(self: Model, use: Use, at: int, came: bool) -> None:
        lessons.append((use.kind, use.since, use.length, at, came))
        learn(self, use, at, came)

    def moved(self: Ranks, thing: object, *key: float) -> None:
        moves.append(thing)
        put(self, thing, *key)

    with mock.patch.object(Model, "learn", learned), mock.patch.object(Ranks, "put", moved):
        yield lessons, moves


def life(requests: int, budget: float = 1e9, point: float = 0.0) -> tuple[Cache, float]:
    """A cache after a few busy minutes, and the time."""
    cache, dice, now = Cache("value", budget, point), Random(5), 1000.0
    for number in range(requests):
        now += dice.uniform(0, 0.3)
        cache.ask([number if dice.random() < 0.7 else dice.randint(0, 9), *dice.choices(range(3), k=5)], now)
    return cache, now


@pytest.mark.parametrize("point", [0.0, 8.0])
@pytest.mark.parametrize("requests", [150, 600])
def test_after_a_lull_no_call_has_to_do_more_than_a_little(requests, point):
    """However much there is to learn, and however long nothing had to go: the first calls cost what others do."""
    cache, now = life(requests, point=point)
    now += WEEK
    for call in range(20):
        with counted() as (lessons, moves):
            cache.ask([5000 + call, 1, 2], now) if call % 2 else cache.evict(now)
        assert len(lessons) <= LITTLE and len(moves) <= 2 * LITTLE
    with counted() as (lessons, _):
        cache.index.advance(now, ALL)
    assert len(lessons) > 10 * requests > 4 * LITTLE, "there was not much to learn"


@pytest.mark.parametrize("point", [0.0, 8.0])
def test_slices_teach_what_one_look_at_all_would(point):
    once, now = life(300, point=point)
    slices, _ = life(300, point=point)
    now += WEEK
    with counted() as (expected, _):
        once.index.advance(now, ALL)
    with counted() as (learned, _):
        while len(learned) < len(expected):
            before = len(learned)
            slices.index.advance(now)
            assert before < len(learned) <= before + LITTLE
    assert learned == expected
    for cache in (once, slices):
        cache.index.check(cache.tree.walk())


ASKED = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.3, 2.1, 17.7, 300.3, 9000.9]),  # after so many seconds
        st.lists(st.integers(0, 2), min_size=1, max_size=7),
    ),
    max_size=25,
)


@given(ASKED, st.integers(1, 4), st.sampled_from([0.0, 8.0]))
def test_each_use_teaches_the_same_however_thin_the_slices(asked, most, point):
    """Every bin that it outlived, in order, and the one it came back in, even if it came back before its turn."""
    taught = []
    for each in (most, ALL):
        now, cache = 1000.0, Cache("value", 1e9, point)
        with counted() as (lessons, _):
            with slices_of(each):
                for gap, symbols in asked:
                    now += gap
                    cache.ask(symbols, now)
            cache.index.advance(now, ALL)
        taught.append(sorted(lessons, key=lambda lesson: (lesson[0].name, *lesson[1:])))
    assert taught[0] == taught[1]


def slices_of(most: int):
    advance = Learned.advance
    return mock.patch.object(Learned, "advance", lambda self, now, _: advance(self, now, most))


def test_each_step_of_an_engine_lets_time_pass():
    with engine("llama") as opened:
        opened.generate([[1, 2, 3], [4, 5, 6, 8]], params(3))
        tiers = opened._loop.cache.tiers
        clock = tiers.clock
        tiers.clock = lambda: clock() + WEEK
        with counted() as (lessons, _):
            opened.call(tiers.settle)
        assert lessons
