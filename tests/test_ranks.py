"""A sorted list in blocks gives what sorting everything anew would."""

from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from bough.cache import ranks
from bough.cache.ranks import Ranks

STEPS = st.lists(st.tuples(st.sampled_from(["put", "drop"]), st.integers(0, 30), st.integers(0, 4), st.integers(0, 2)))


@given(STEPS)
def test_order_is_that_of_sorting_all_anew(steps):
    found, entries = Ranks[int](), dict[int, tuple]()
    with mock.patch.object(ranks, "BLOCK", 4):
        for number, (what, thing, worth, time) in enumerate(steps):
            if what == "put":
                found.put(thing, worth, time)
                entries[thing] = worth, time, number
            else:
                found.drop(thing)
                entries.pop(thing, None)
            found.check()
            expected = [(*entries[each][:2], each) for each in sorted(entries, key=entries.__getitem__)]
            assert [found.at(place) for place in range(len(entries) + 1)] == [*expected, None]
            assert len(found) == len(entries) and (thing in found) is (thing in entries)


def test_equals_stand_in_order_of_time_then_of_coming():
    found = Ranks[str]()
    for thing, worth, time in [("a", 1, 5), ("b", 1, 3), ("c", 0, 9), ("d", 1, 3), ("b", 1, 3)]:
        found.put(thing, worth, time)
    assert [found.at(place) for place in range(4)] == [(0, 9, "c"), (1, 3, "d"), (1, 3, "b"), (1, 5, "a")]


def test_many_come_and_go():
    found = Ranks[int]()
    for each in range(5000):
        found.put(each, each * 7919 % 5000)
    found.check()
    assert found.at(0) == (0, 0, 0) and found.at(4999)[0] == 4999
    for each in range(0, 5000, 2):
        found.drop(each)
    found.check()
    assert len(found) == 2500 and 2 not in found and 3 in found
