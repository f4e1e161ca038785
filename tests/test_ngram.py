"""Drafts from n-grams: matches against a search of the whole text, siblings, salts, and bounds."""

import random
import subprocess
import sys

import pytest

from bough.draft import Drafter, Grown, Wanted
from bough.draft.ngram import LONGEST, SIBLING_SIZES, SIZES, Lookup, NGram, Siblings, reach


def longest_match(tokens: list[int]) -> tuple[int, int]:
    """The longest match of the end with what came before, the latest of equal ones, by looking everywhere."""
    best = (0, 0)
    for place in range(1, len(tokens)):
        length = 0
        while length < min(place, LONGEST) and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= best[0]:
            best = (length, place)
    return best if best[0] >= min(SIZES) else (0, 0)


def text_of(*tokens: int) -> Lookup:
    lookup = Lookup()
    lookup.extend(tokens)
    return lookup


@pytest.mark.parametrize("vocabulary", [40, 12])
def test_matches_are_those_of_a_search_of_the_whole_text(vocabulary):
    """Where no n-gram stands in more places than are looked at, which random texts of this size rarely do."""
    random.seed(vocabulary)
    lookup, tokens, found = Lookup(), [], 0
    for _ in range(120):
        piece = [random.randrange(vocabulary) for _ in range(random.randrange(1, 4))]
        if len(tokens) > 20 and random.random() < 0.4:  # say something again
            start = random.randrange(len(tokens) - 12)
            piece = tokens[start : start + random.randrange(3, 12)]
        tokens += piece
        lookup.extend(piece)
        expected = longest_match(tokens)
        if max(SIZES) > expected[0] and vocabulary < 20:
            assert lookup.match()[0] <= expected[0]  # its pairs stand in many places
        else:
            assert lookup.match() == expected
            found += expected[0] > 0
    assert lookup.tokens == tokens and found > 10


def test_one_token_at_a_time_is_all_at_once():
    random.seed(1)
    tokens = [random.randrange(5) for _ in range(200)]
    single, whole = Lookup(), text_of(*tokens)
    for token in tokens:
        single.extend([token])
    assert (single.tokens, single._last, single._before) == (whole.tokens, whole._last, whole._before)


def test_the_latest_of_equal_matches_wins_and_the_longest_of_all():
    assert text_of(1, 2, 3, 1, 2, 4, 9, 1, 2).match() == (2, 5)
    assert text_of(7, 1, 2, 3, 9, 1, 2, 4, 7, 1, 2).match() == (3, 3)
    assert text_of(1, 2, 3, 4).match() == (0, 0)
    assert text_of(5).match() == Lookup().match() == (0, 0)


def test_a_text_that_repeats_itself_goes_on():
    lookup = text_of(9, 1, 2, 3, 1, 2, 3, 1, 2)
    length, place = lookup.match()
    assert length == 5
    assert lookup.after(place, 8) == [3, 1, 2, 3, 1, 2, 3, 1]
    assert text_of(4, 4, 4).after(text_of(4, 4, 4).match()[1], 5) == [4] * 5


def test_a_place_is_looked_for_in_few_places_only():
    """However often an n-gram stands there."""
    lookup = Lookup()
    lookup.extend([1, 2] * 50_000)
    calls = 0

    def counted(place: int, of=lookup._common) -> int:
        nonlocal calls
        calls += 1
        return of(place)

    lookup._common = counted  # type: ignore[method-assign]
    assert lookup.match()[0] == LONGEST
    assert calls <= 8


class TestSiblings:
    def test_walks_along_what_followed(self):
        siblings = Siblings()
        siblings.learn(list(range(30)), 0)
        assert siblings.match([4, 5, 6, 7]) == 4
        assert siblings.match(list(range(8))) == 8
        assert siblings.match([5, 6, 7]) == siblings.match([9, 8, 7, 6]) == siblings.match([]) == 0
        assert list(siblings.walk([99, 4, 5, 6, 7])) == list(range(8, 30))

    def test_the_latest_of_two_continuations(self):
        siblings = Siblings()
        siblings.learn([1, 2, 3, 4, 5], 0)
        siblings.learn([1, 2, 3, 4, 6], 0)
        assert list(siblings.walk([1, 2, 3, 4])) == [6]

    def test_the_longer_words_decide(self):
        siblings = Siblings()
        siblings.learn([10, 11, 12, 13, 1, 2, 3, 4, 5], 0)
        siblings.learn([0, 1, 2, 3, 4, 6], 0)
        assert next(siblings.walk([10, 11, 12, 13, 1, 2, 3, 4])) == 5
        assert next(siblings.walk([3, 1, 2, 3, 4])) == 6

    def test_learns_only_from_the_start_on(self):
        siblings = Siblings()
        siblings.learn(list(range(10)), 8)
        assert len(siblings) == 2 * len(SIBLING_SIZES)
        assert siblings.match([3, 4, 5, 6]) == 0
        assert siblings.match([4, 5, 6, 7]) == 4

    def test_entries_are_bounded_and_the_longest_unused_go_first(self):
        siblings = Siblings(entries=10)
        siblings.learn([1, 2, 3, 4, 5], 0)
        for start in range(100, 200, 20):
            assert next(siblings.walk([1, 2, 3, 4])) == 5  # used, so kept
            siblings.learn(list(range(start, start + 8)), 0)
            assert len(siblings) <= 10
        assert siblings.match([180, 181, 182, 183]) == 4
        assert siblings.match([100, 101, 102, 103]) == 0


class TestNGram:
    def test_is_a_drafter_that_keeps_nothing_in_the_pool(self):
        drafter: Drafter = NGram()
        assert list(drafter.kinds) == []

    def test_drafts_for_each_row_as_far_as_wanted(self):
        drafter = NGram()
        text = [7, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 7, 1, 2, 3]
        drafter.committed([Grown(1, "a", text), Grown(2, "a", [50, 51])])
        rows = [Wanted(2, 5), Wanted(1, 5), Wanted(1, 0), Wanted(3, 5), Wanted(1, 99)]
        assert drafter.propose(rows) == [[], [4, 5, 6, 7, 8], [], [], [4, 5, 6, 7, 8, 9][: reach(4)]]

    def test_longer_matches_give_longer_drafts(self):
        text = list(range(40))
        lengths = []
        for match in range(2, 9):
            drafter = NGram()
            drafter.committed([Grown(1, "", [*text, 99, *text[5 : 5 + match]])])
            (draft,) = drafter.propose([Wanted(1, 99)])
            assert draft == text[5 + match :][: len(draft)]
            lengths.append(len(draft))
        assert lengths == sorted(set(lengths))

    def test_learns_from_siblings_of_its_salt_alone(self):
        drafter = NGram()
        drafter.committed([Grown(1, "a", list(range(20)))])
        drafter.close(1)
        drafter.committed([Grown(2, "a", [3, 4, 5, 6]), Grown(3, "b", [3, 4, 5, 6])])
        drafter.committed([Grown(4, "", [3, 4, 5, 6])])
        assert drafter.propose([Wanted(2, 4), Wanted(3, 4), Wanted(4, 4)]) == [[7, 8, 9, 10], [], []]

    def test_its_own_text_comes_before_siblings_unless_theirs_matches_longer(self):
        drafter = NGram()
        drafter.committed([Grown(1, "", [1, 2, 3, 4, 5, 60, 61, 62, 63])])
        drafter.committed([Grown(2, "", [1, 2, 3, 4, 70, 71, 0, 1, 2, 3, 4])])
        assert drafter.propose([Wanted(2, 2)]) == [[70, 71]]
        drafter.committed([Grown(3, "", [4, 80, 81, 82, 0, 2, 3, 4])])
        assert drafter.propose([Wanted(3, 2)])[0] == []
        drafter.committed([Grown(4, "", [3, 4, 80, 81, 82, 0, 1, 2, 3, 4])])
        assert drafter.propose([Wanted(4, 2)])[0] == [70, 71]

    def test_what_was_not_committed_is_never_drafted(self):
        """Drafts that are refused leave no trace: the same is drafted after any number of them."""
        drafter, other = NGram(), NGram()
        text = [1, 2, 3, 4, 5, 6, 9, 1, 2, 3]
        for each in (drafter, other):
            each.committed([Grown(1, "", text)])
        for _ in range(5):
            assert drafter.propose([Wanted(1, 3)]) == [[4, 5, 6]]
        for each in (drafter, other):
            each.committed([Grown(1, "", [8, 2, 3])])
        assert drafter.propose([Wanted(1, 4)]) == other.propose([Wanted(1, 4)])
        assert drafter._texts[1][0].tokens == [*text, 8, 2, 3]

    def test_salts_are_bounded_and_the_longest_unused_goes_first(self):
        drafter = NGram(salts=3)
        for i, salt in enumerate("abcad"):
            drafter.committed([Grown(i, salt, [*range(10), i])])
        assert set(drafter._siblings) == {"c", "a", "d"}

    def test_a_closed_sequence_is_forgotten(self):
        drafter = NGram()
        drafter.committed([Grown(1, "", [1, 2, 1, 2])])
        drafter.close(1)
        drafter.close(2)
        assert drafter.propose([Wanted(1, 4)]) == [[]]
        assert not drafter._texts


def test_reaches_no_torch():
    code = "import sys; import bough.draft.ngram, bough.draft.depth; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
