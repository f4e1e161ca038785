"""Whole engines whose draft rounds are captured steps, against plain ones.

Where there is no CUDA device the kernels run in Triton's interpreter (test_triton.py).
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from random import Random

import pytest
import torch
from parity import random_tokens
from speculation import VOCABULARY, WITH_HEAD, Fixed, Right, Written, clear, expect_idle, used, wild
from test_fixed import without_graphs
from test_flight import engine, loaded, requests
from test_triton import DEVICE, HERE, plain_numbers  # noqa: F401 (a fixture)

from bough import Engine, SamplingParams
from bough.draft.mtp import MTPDrafter, MTPHead
from bough.engine import rounds
from bough.engine.drafting import SURE
from bough.errors import BadLogits, PoolFull
from bough.state.ahead import Ahead
from bough.state.recordings import PLACE, Journal

pytestmark = pytest.mark.skipif(not HERE, reason="needs CUDA, or triton's interpreter")


def answers(made: Engine) -> list:
    """To short requests that are read and written together."""
    some = [(prompt, replace(params, max_tokens=5)) for prompt, params in requests() if params.max_tokens > 5]
    return [handle.result() for handle in [made.submit(*each) for each in some[:3]]]


@pytest.mark.skipif(DEVICE == "cuda", reason="test_flight.py does this there")
@pytest.mark.parametrize("family", WITH_HEAD)
def test_commits_that_the_next_round_does(family, monkeypatch):
    done, places = [], Journal.places

    def counted(self, *given):
        done.extend(found := places(self, *given))
        return found

    monkeypatch.setattr(Journal, "places", counted)
    with engine(family, ahead=False) as plain:
        expected = answers(plain)
    head = MTPDrafter(MTPHead(loaded(family, "cpu").model))
    with engine(family, ahead=False, draft=head) as made:
        without_graphs(made._runner.graphs, monkeypatch)
        made._loop.drafting.depth = Fixed(deepest=3)  # what rounds take in the interpreter would decide otherwise
        for _ in range(2):  # the second time from the cache
            for mine, other in zip(answers(made), expected, strict=True):
                assert (mine.tokens, mine.finish_reason) == (other.tokens, other.finish_reason)
        made._runner.pool.check()
    assert any(dict(zip(PLACE, place, strict=True))["owed"] > 0 for place in done)


def texts(
    made: Engine, seed: int, lengths: Sequence[int] = (9, 14, 19)
) -> list[tuple[list[int], SamplingParams, list[int]]]:
    """Requests of several lengths, and what a plain engine answers."""
    draw = Random(seed)
    asked = []
    for at in range(3):
        prompt = random_tokens(VOCABULARY, draw.randint(2, 20), seed=10 * seed + at)
        params = SamplingParams(max_tokens=draw.choice(lengths), temperature=0, ignore_eos=at > 0)
        asked.append((prompt, params, made.generate(prompt, params).tokens))
    return asked


def often_right(right: Right, seed: int):
    """Drafts that stand, now and then all but one token."""
    draw = Random(seed)

    def guess(text: list[int], most: int) -> list[int]:
        draft = right(text, most)
        if draft and draw.random() < 0.15:
            draft[draw.randrange(len(draft))] ^= 1
        return draft

    return guess


@contextmanager
def in_flight(family: str, guess, monkeypatch) -> Iterator[tuple[Engine, list]]:
    """An engine that launches rounds before it has read others, on what a function guesses; and those it launched."""
    followed, follow = [], rounds.follow
    monkeypatch.setattr("bough.engine.drafting.STREAK", 1)
    monkeypatch.setattr("bough.engine.drafting.SURE", 0)
    monkeypatch.setattr("bough.engine.rounds.follow", lambda *given: followed.append(follow(*given)) or followed[-1])
    with engine(family, ahead=DEVICE == "cuda", draft=Written(guess)) as made:
        if DEVICE == "cpu":
            without_graphs(made._runner.graphs, monkeypatch)
        made._loop.flights.allowed, made._loop.drafting.depth = True, Fixed(deepest=2)
        empty = made.call(lambda: used(made))
        yield made, followed
        assert made._loop.drafting.failure is None
        expect_idle(made)
        clear(made)
        assert made.call(lambda: used(made)) == empty, "something leaked"


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
@pytest.mark.parametrize("character", ["right", "often right", "wild"])
def test_rounds_that_follow_before_others_are_read(family, character, monkeypatch):
    with engine(family, ahead=False) as plain:
        asked = texts(plain, seed=1)
    right = Right([[*prompt, *tokens] for prompt, _, tokens in asked])
    guess = {"right": right, "often right": often_right(right, 2), "wild": wild(right, 3)}[character]
    with in_flight(family, guess, monkeypatch) as (made, followed):
        for some in (asked[:1], asked, asked[1:]):
            handles = [(made.submit(prompt, params), tokens) for prompt, params, tokens in some]
            for handle, tokens in handles:
                output = handle.result()
                assert output.tokens == tokens
                assert output.usage.accepted_tokens <= output.usage.drafted_tokens
            made.check()
    if character != "wild":
        least = 6 if character == "right" else 2  # by who runs beside whom it is more
        assert sum(each is not None for each in followed) >= least


@pytest.mark.parametrize("seed", range(2))
def test_whatever_happens_while_rounds_are_in_the_air(seed, monkeypatch):
    """Some leave, others come, and memory is short: the answers are those of a plain engine, as far as they go."""
    draw, calls = Random(seed), count()
    with engine("lfm2", ahead=False) as plain:
        asked = texts(plain, seed=seed + 5, lengths=(40, 50))
    right, short = Right([[*prompt, *tokens] for prompt, _, tokens in asked]), []

    def take_for_all(self) -> None:
        if next(calls) % 4 == 1:
            short.append(self)
            raise PoolFull("there is none")
        taken(self)

    taken = Ahead.take_for_all
    monkeypatch.setattr(Ahead, "take_for_all", take_for_all)
    with in_flight("lfm2", often_right(right, seed), monkeypatch) as (made, followed):
        for _ in range(3):
            left, handles = draw.randrange(3), []
            for at, (prompt, params, tokens) in enumerate(asked):
                fewer = replace(params, max_tokens=draw.randint(10, params.max_tokens))
                handles.append((made.submit(prompt, fewer), tokens, at == left))
                time.sleep(draw.choice([0, 0.02, 0.1]))
            handles[left][0].cancel()
            for handle, tokens, leaves in handles:
                output = handle.result()
                assert output.tokens == tokens[: len(output.tokens)]
                assert leaves or output.finish_reason != "cancelled"
            made.check()
    assert short and any(each is not None for each in followed)


@pytest.mark.parametrize(("goes_astray", "least", "most"), [(False, 10, 20), (True, 1, 3)])
def test_nothing_is_launched_on_guesses_that_go_astray(goes_astray, least, most, monkeypatch):
    """Drafts stand, and so does what the drafter says after them; or that never does."""
    prompt, params = random_tokens(VOCABULARY, 9, seed=3), SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    with engine("lfm2", ahead=False) as plain:
        expected = plain.generate(prompt, params).tokens
    right = Right([[*prompt, *expected]])

    def guess(text: list[int], count: int) -> list[int]:
        return [token ^ (goes_astray and at > 1) for at, token in enumerate(right(text, count))]

    with in_flight("lfm2", guess, monkeypatch) as (made, followed):
        monkeypatch.setattr("bough.engine.drafting.SURE", SURE)
        for _ in range(2):
            followed.clear()
            assert made.generate(prompt, params).tokens == expected
        assert least <= sum(each is not None for each in followed) <= most


@pytest.mark.parametrize("seed", range(3))
def test_logits_that_are_no_numbers(seed, monkeypatch):
    """A request tries again without its draft, or fails if the next round went on from there. Others do not notice."""
    with engine("lfm2", ahead=False) as plain:
        asked = texts(plain, seed=1)[1:]
    right, dice, failed, bad = Right([[*prompt, *tokens] for prompt, _, tokens in asked]), Random(seed), 0, []
    drawing = rounds.drawing

    def spoilt(logits, sampling):
        if dice.random() < 0.4:
            bad.append(logits := logits.clone())
            logits[dice.randrange(len(logits))] = dice.choice([float("nan"), float("inf")])
        return drawing(logits, sampling)

    with in_flight("lfm2", right, monkeypatch) as (made, _):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rounds, "drawing", spoilt)
            for _ in range(3):
                handles = [(made.submit(prompt, params), tokens) for prompt, params, tokens in asked]
                for handle, tokens in handles:
                    try:
                        assert handle.result().tokens == tokens
                    except BadLogits:
                        failed += 1
                made.check()
        for prompt, params, tokens in asked:
            assert made.generate(prompt, params).tokens == tokens
    assert bad and failed < 6


@pytest.mark.parametrize("late", [False, True])
def test_no_memory_for_what_is_launched_on_guesses(late, monkeypatch):
    """Nobody knows what became of the states: they are made anew, and the answers are the same."""
    with engine("lfm2", ahead=False) as plain:
        asked = texts(plain, seed=1)
    right, calls, begin = Right([[*prompt, *tokens] for prompt, _, tokens in asked]), count(), Ahead.begin

    def short(*given):
        refuses = not next(calls)
        if late or not refuses:
            begin(*given)
        if refuses:
            raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Ahead, "begin", short)
    monkeypatch.setattr("bough.engine.budget.PATIENCE", 1)
    with in_flight("lfm2", right, monkeypatch) as (made, followed):
        for _ in range(20):  # until that is tried again
            if any(each is not None for each in followed):
                break
            handles = [(made.submit(prompt, params), tokens) for prompt, params, tokens in asked]
            for handle, tokens in handles:
                assert handle.result().tokens == tokens
            made.check()
        else:
            pytest.fail("nothing is launched on guesses any more")


@pytest.mark.parametrize("fault", ["read", "land", "follow"])
def test_a_round_that_cannot_be_read_ends_its_requests_alone(fault, monkeypatch):
    with engine("lfm2", ahead=False) as plain:
        asked = texts(plain, seed=1)[:2]
    right = Right([[*prompt, *tokens] for prompt, _, tokens in asked])
    with in_flight("lfm2", right, monkeypatch) as (made, followed):
        where = {"read": (rounds.Round, "read"), "land": (Ahead, "_give_pages"), "follow": (Ahead, "begin")}[fault]
        whole = getattr(*where)

        def faulty(*given):
            if any(each is not None for each in followed) or fault == "follow":
                raise ValueError("broken")
            return whole(*given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*where, faulty)
            handles = [made.submit(prompt, params) for prompt, params, _ in asked]
            for handle in handles:
                with pytest.raises(ValueError, match="broken"):
                    handle.result()
        followed.clear()
        for prompt, params, tokens in asked:
            assert made.generate(prompt, params).tokens == tokens
        assert followed
