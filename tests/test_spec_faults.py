"""A drafter that is wrong, late or broken costs speed and nothing else: it is logged, left out, and nothing leaks."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from speculation import VOCABULARY, Fixed, Right, Written, drafter, engine, expect_idle, expect_same, prompt_of

from bough import SamplingParams
from bough.draft.ngram import NGram
from bough.errors import BadLogits, PoolFull

GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
PROMPTS = [prompt_of(length, seed=length) for length in (17, 9, 25)]


@pytest.fixture(scope="module")
def plain():
    """What each prompt is answered by a family, when nobody drafts."""
    known: dict[str, list] = {}

    def of(family: str) -> list:
        if family not in known:
            with engine(family) as made:
                known[family] = made.generate(PROMPTS, GREEDY)
        return known[family]

    return of


def texts(outputs) -> list[list[int]]:
    return [[*prompt, *output.tokens] for prompt, output in zip(PROMPTS, outputs, strict=True)]


def expect_plain(family: str, outputs, expected) -> None:
    for prompt, ours, theirs in zip(PROMPTS, outputs, expected, strict=True):
        expect_same(family, GREEDY, prompt, theirs, ours)


def expect_dropped(made, caplog, why: str) -> None:
    """It was said once, and what it kept is free again."""
    given_up = made._loop.drafting
    assert why in given_up.failure
    said = [record.getMessage() for record in caplog.records if record.name == "bough"]
    assert len(said) == 1, said
    assert why in said[0]
    assert "decoding goes on without it" in said[0]
    expect_idle(made)
    for pool in made._runner.pool.arena.pools[1:]:
        assert all(store.used == 1 for store in pool.stores), "the drafter's memory was not given back"
    given_up.failure = None  # as expected


class Broken(Written):
    """Does well until the n-th time that it is asked one thing."""

    def __init__(self, guess, place: str, at: int, fault) -> None:
        super().__init__(guess)
        self.place, self.left, self.fault = place, at, fault

    def _count(self, place: str) -> None:
        self.left -= place == self.place
        if self.left < 0:
            self.fault()

    def committed(self, rows) -> None:
        self._count("committed")
        super().committed(rows)

    def propose(self, rows, choose) -> list:
        self._count("propose")
        return super().propose(rows, choose)

    def close(self, sequence) -> None:
        self._count("close")
        super().close(sequence)


def raises(error: BaseException):
    def fault() -> None:
        raise error

    return fault


@pytest.mark.parametrize("place", ["committed", "propose", "close"])
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("error", [ValueError("on purpose"), SystemExit("on purpose"), MemoryError("on purpose")])
def test_one_that_crashes(plain, caplog, place, at, error):
    drafts = Broken(Right(texts(plain("qwen3_5"))), place, at, raises(error))
    with engine("qwen3_5", drafts, Fixed()) as made:
        for _ in range(2):
            expect_plain("qwen3_5", made.generate(PROMPTS, GREEDY), plain("qwen3_5"))
        expect_dropped(made, caplog, "on purpose")
        again = made.generate(PROMPTS[0], GREEDY)
        assert again.usage.drafted_tokens == 0
        assert made._loop.drafting.drafter is None


@pytest.mark.parametrize("place", ["committed", "propose", "close"])
def test_one_that_hangs(plain, caplog, place):
    awake = threading.Event()
    drafts = Broken(Right(texts(plain("gemma3"))), place, 1, awake.wait)
    with engine("gemma3", drafts, Fixed(), patience=0.05) as made:
        expect_plain("gemma3", made.generate(PROMPTS, GREEDY), plain("gemma3"))
        expect_dropped(made, caplog, "TimeoutError")
        awake.set()  # what it says now, nobody hears
        expect_plain("gemma3", made.generate(PROMPTS, GREEDY), plain("gemma3"))


def generator(*tokens: int) -> Iterator[int]:
    yield from tokens


NONSENSE = {
    "nothing": None,
    "a number": 5,
    "text": "draft",
    "a list of nothing": [None],
    "texts": ["a", "b"],
    "a generator": generator(1, 2),
    "a table": torch.zeros(2, 2, dtype=torch.int64),
    "a tensor that is a number": torch.tensor(5),
}


@pytest.mark.parametrize("draft", NONSENSE.values(), ids=NONSENSE)
def test_one_that_talks_nonsense(plain, caplog, draft):
    with engine("lfm2", Written(lambda text, most: draft), Fixed()) as made:
        expect_plain("lfm2", made.generate(PROMPTS, GREEDY), plain("lfm2"))
        expect_dropped(made, caplog, "Error")


ODD = {
    "no rows": lambda rows: [],
    "too few rows": lambda rows: rows[:1],
    "too many rows": lambda rows: [*rows, [1], [2]],
    "fractions": lambda rows: [[float(token) for token in row] for row in rows],
    "no numbers": lambda rows: [[float("nan")] for row in rows],
    "tensors of no numbers": lambda rows: [torch.tensor([float("nan"), float("inf"), -1e30]) for _ in rows],
    "tensors of small numbers": lambda rows: [torch.tensor(row, dtype=torch.uint8) for row in rows],
    "tensors of truth": lambda rows: [torch.tensor(row) > 40 for row in rows],
    "tensors of others": lambda rows: [torch.full((9,), 2**62) for _ in rows],
    "nothing in tensors": lambda rows: [torch.tensor([], dtype=torch.int64) for _ in rows],
    "all at once": lambda rows: torch.full((len(rows), 30), 7),
    "ids of nobody": lambda rows: [[*row[:1], VOCABULARY, *row[1:]] for row in rows],
    "negative ids": lambda rows: [[-1, *row] for row in rows],
}


@pytest.mark.parametrize("twist", ODD.values(), ids=ODD)
def test_odd_answers_that_can_be_used(plain, twist):
    """They are cut or clamped to what are tokens, and then judged like any others."""

    class Odd(Written):
        def propose(self, rows, choose):
            return twist(super().propose(rows, choose))

    with engine("qwen3_5", Odd(Right(texts(plain("qwen3_5")))), Fixed()) as made:
        expect_plain("qwen3_5", made.generate(PROMPTS, GREEDY), plain("qwen3_5"))


def test_cut_at_the_first_id_that_is_no_token(plain):
    """Of right tokens with such an id after the first, the first stands: 1 token, 7 rounds of 2, and 1 at the end."""
    right = Right(texts(plain("llama")))
    with engine("llama", Written(lambda text, most: [*right(text, 1), -1, 5, 5]), Fixed()) as made:
        usage = made.generate(PROMPTS[0], GREEDY).usage
        assert usage.drafted_tokens == usage.accepted_tokens == 7


class Leaky(NGram):
    """Raises PoolFull now and then, which is no fault."""

    left = 0

    def propose(self, rows, choose=None):
        self.left += 1
        if self.left % 3 == 0:
            raise PoolFull("on purpose")
        return super().propose(rows, choose)


def test_no_memory_is_no_fault(plain, caplog):
    with engine("qwen3_next", Leaky(), Fixed()) as made:
        for _ in range(3):
            expect_plain("qwen3_next", made.generate(PROMPTS, GREEDY), plain("qwen3_next"))
        assert not caplog.records
        assert made._loop.drafting.drafter is not None


@pytest.mark.parametrize(("family", "name"), [("qwen3_5", "mtp"), ("llama", "another"), ("qwen3", "itself")])
@pytest.mark.parametrize("at", [0, 1, 6])
def test_a_network_that_fails_in_its_forward(plain, caplog, monkeypatch, family, name, at):
    """Its states are in a step then; they are released all the same, and its cache is emptied."""
    drafts, calls = drafter(name, family, []), 0
    network = drafts.head if name == "mtp" else drafts.model

    class Failing:
        def __getattr__(self, attribute: str):
            return getattr(network, attribute)

        def __call__(self, *args):
            nonlocal calls
            calls += 1
            if calls > at:
                raise ValueError("on purpose")
            return network(*args)

    monkeypatch.setattr(drafts, "head" if name == "mtp" else "model", Failing())
    with engine(family, drafts, Fixed()) as made:
        expect_plain(family, made.generate(PROMPTS, GREEDY), plain(family))
        expect_dropped(made, caplog, "on purpose")


def test_the_target_failing_beside_drafts(plain, monkeypatch):
    """The requests of that step end with what was raised; those after it are served, and drafted for."""
    with engine("qwen3_5", Written(Right(texts(plain("qwen3_5")))), Fixed()) as made:
        whole, kind = type(made.model).logits, type(made.model)

        def fail_on_drafts(self, hidden):
            if len(hidden) > len(PROMPTS):
                raise ZeroDivisionError
            return whole(self, hidden)

        monkeypatch.setattr(kind, "logits", fail_on_drafts)
        for handle in [made.submit(prompt, GREEDY) for prompt in PROMPTS]:
            with pytest.raises(ZeroDivisionError):
                handle.result()
        expect_idle(made)
        monkeypatch.setattr(kind, "logits", whole)
        outputs = made.generate(PROMPTS, GREEDY)
        expect_plain("qwen3_5", outputs, plain("qwen3_5"))
        assert all(output.usage.accepted_tokens for output in outputs)


@pytest.mark.parametrize(("family", "name"), [("qwen3_5", "right"), ("qwen3_5", "mtp"), ("gemma3", "another")])
def test_logits_that_are_no_numbers_beside_a_draft(plain, monkeypatch, family, name):
    """Such a row goes on without drafts, and the others with theirs. One that has no draft, or none left, fails."""
    expected = plain(family)
    with engine(family, drafter(name, family, texts(expected)), Fixed()) as made:
        whole, kind, left = type(made.model).logits, type(made.model), [1]

        def spoilt(self, hidden):
            logits = whole(self, hidden)
            if threading.current_thread().name == "bough-engine" and len(logits) > len(PROMPTS) and left[0]:
                left[0] -= 1
                logits[-1] = float("nan")
            return logits

        monkeypatch.setattr(kind, "logits", spoilt)
        expect_plain(family, made.generate(PROMPTS, GREEDY), expected)
        assert not left[0]
        monkeypatch.setattr(kind, "logits", lambda self, hidden: whole(self, hidden) * float("nan"))
        with pytest.raises(BadLogits):
            made.generate(PROMPTS[0], GREEDY)
        expect_idle(made)


def test_a_request_may_go_without(plain):
    with engine("llama", Written(Right(texts(plain("llama")))), Fixed()) as made:
        plainly = made.generate(PROMPTS, replace(GREEDY, draft=None))
        assert [output.usage.drafted_tokens for output in plainly] == [0, 0, 0]
        assert not made.score(PROMPTS[0])[0] > 0
        expect_plain("llama", plainly, plain("llama"))
