"""Steps that are launched before the tokens of the one before are known: the answers are those of a plain engine.

Where there is a CUDA device the engines that launch ahead run on it, by kernels and captured graphs, in float32: so
this is also where every family is compared between the two. Elsewhere both run on the CPU.
"""

import time
from dataclasses import replace
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from parity import random_tokens
from speculation import USED, VOCABULARY, WITH_HEAD, Fixed, Right, Written, _saved

from bough import CacheConfig, Engine, SamplingParams
from bough.draft.mtp import MTPDrafter, MTPHead
from bough.engine import budget, flight
from bough.engine.load import Loaded, load
from bough.engine.sequence import Sequence

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@cache
def loaded(family: str, device: str) -> Loaded:
    with TemporaryDirectory() as folder:
        return load(_saved(family, Path(folder)), dtype="float32", device=device)


def engine(family: str, *, ahead: bool, draft: object = None) -> Engine:
    made = Engine(
        loaded(family, DEVICE if ahead else "cpu"),
        cache=CacheConfig(page_tokens=4, device_bytes=8 << 20),
        max_running=8,
        context=256,
        draft=draft,
    )
    made._loop.flights.allowed = ahead
    return made


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Of all that can decide how a sequence goes on and when it ends, some of each."""
    options = [
        {"max_tokens": 24},
        {"max_tokens": 24, "temperature": 0.9, "seed": 5},
        {"max_tokens": 1},
        {"max_tokens": 17, "temperature": 1.0, "top_k": 9, "seed": 8, "logprobs": 3},
        {"max_tokens": 20, "repetition_penalty": 1.3},
        {"max_tokens": 30, "ignore_eos": True},
        {"max_tokens": 11, "temperature": 0.7, "top_p": 0.8, "seed": 2},
    ]
    lengths = (3, 40, 12, 1, 25, 70, 9)
    prompts = [random_tokens(VOCABULARY, length, seed=at) for at, length in enumerate(lengths)]
    return [
        (prompt, SamplingParams(**{"temperature": 0, **some})) for prompt, some in zip(prompts, options, strict=True)
    ]


def answers(made: Engine) -> list:
    handles = [made.submit(prompt, params) for prompt, params in requests()]
    return [handle.result() for handle in handles]


def same(ours: list, theirs: list) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.tokens, mine.finish_reason) == (other.tokens, other.finish_reason)
        for one, two in zip(mine.logprobs, other.logprobs, strict=True):
            assert [token for token, _ in one.top] == [token for token, _ in two.top]
            assert one.chosen == pytest.approx(two.chosen, abs=1e-3)


@pytest.mark.parametrize("family", USED)
def test_answers_are_those_of_a_plain_engine(family, monkeypatch):
    with engine(family, ahead=False) as plain:
        expected = answers(plain)
    launched = []
    monkeypatch.setattr("bough.engine.flights.launch", lambda *given: launched.append(given) or flight.launch(*given))
    with engine(family, ahead=True) as made:
        for _ in range(2):  # the second time from the cache
            same(answers(made), expected)
        made._runner.pool.check()
    assert any(len(given) > 2 for given in launched), "nothing was launched ahead"


@pytest.mark.parametrize("draft", ["ngram", "mtp"])
@pytest.mark.parametrize("family", ["llama", *WITH_HEAD])
def test_with_a_drafter(family, draft):
    if draft == "mtp" and family not in WITH_HEAD:
        pytest.skip("it has no head")
    with engine(family, ahead=False) as plain:
        expected = answers(plain)
    target = loaded(family, DEVICE).model
    with engine(family, ahead=True, draft=MTPDrafter(MTPHead(target)) if draft == "mtp" else draft) as made:
        for _ in range(2):
            same(answers(made), expected)
        made._runner.pool.check()


class ReadsRows(Written):
    """Is told hidden rows too."""

    reads_hidden = True

    def __init__(self, guess) -> None:
        super().__init__(guess)
        self.told: list[tuple[int, int]] = []

    def committed(self, rows) -> None:
        super().committed(rows)
        self.told += [(len(row.tokens), 0 if row.hidden is None else len(row.hidden)) for row in rows]


def test_rounds_of_who_reads_rows_are_read_before_the_next():
    prompt, params = random_tokens(VOCABULARY, 9, seed=3), SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    with engine("qwen3_5", ahead=False) as plain:
        expected = plain.generate(prompt, params).tokens
    drafter = ReadsRows(Right([[*prompt, *expected]]))
    with engine("qwen3_5", ahead=True, draft=drafter) as made:
        made._loop.drafting.depth = Fixed(deepest=3)
        output = made.generate(prompt, params)
        assert output.tokens == expected and output.usage.accepted_tokens > 10
    assert drafter.told and all(tokens - rows <= 1 for tokens, rows in drafter.told), drafter.told


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_whoever_leaves_while_a_step_is_under_way_changes_nothing_for_others(family):
    prompts = [random_tokens(VOCABULARY, 20, seed=at) for at in range(4)]
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    with engine(family, ahead=False) as plain:
        expected = [plain.generate(prompt, params).tokens for prompt in prompts]
    with engine(family, ahead=True) as made:
        handles = [made.submit(prompt, params) for prompt in prompts]
        while handles[1].prefilled < 20:
            time.sleep(0.001)
        handles[1].cancel()
        left = handles[1].result()
        assert left.finish_reason == "cancelled" and left.tokens == expected[1][: len(left.tokens)]
        assert [handles[at].result().tokens for at in (0, 2, 3)] == [expected[at] for at in (0, 2, 3)]
        again = made.generate(prompts[1], params)
        assert again.tokens == expected[1] and again.usage.cached_tokens >= 19
        made._runner.pool.check()


def test_a_fault_while_tokens_are_read_ends_one_request_alone(monkeypatch):
    append, (first, second) = Sequence.append, [random_tokens(VOCABULARY, 9, seed=at) for at in (1, 2)]
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)

    def faulty(self, token, logprobs, **options):
        if self.request.params.seed == 13 and len(self.written) == 5:
            raise ValueError("broken")
        return append(self, token, logprobs, **options)

    with engine("qwen3_5", ahead=True) as made:
        expected = made.generate(second, params).tokens
        monkeypatch.setattr(Sequence, "append", faulty)
        bad, good = made.submit(first, replace(params, seed=13)), made.submit(second, params)
        with pytest.raises(ValueError, match="broken"):
            bad.result()
        assert good.result().tokens == made.generate(second, params).tokens == expected
        made._runner.pool.check()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_no_memory_for_what_is_launched_ahead(family, late, monkeypatch):
    """Before or after the states have the tokens. It is tried again soon."""
    monkeypatch.setattr(budget, "PATIENCE", 2)
    prompts, calls, refused = [random_tokens(VOCABULARY, 5 + 9 * at, seed=at) for at in range(3)], count(), []
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    with engine(family, ahead=False) as plain:
        expected = [plain.generate(prompt, params).tokens for prompt in prompts]
    with engine(family, ahead=True) as made:
        forward = made._runner.forward

        def short(*given, **options):
            refuses = options.get("given") is not None and next(calls) % 3 == 1
            found = forward(*given, **options) if late or not refuses else None
            if refuses:
                refused.append(given)
                raise torch.OutOfMemoryError("no memory")
            return found

        monkeypatch.setattr(made._runner, "forward", short)
        assert [out.tokens for out in made.generate(prompts, params)] == expected
        made.check()
    assert refused


class NoneToTakeSomeOf(torch.Tensor):
    """Tokens on a device that has no memory for some of them."""

    refused = 0

    def __getitem__(self, rows):
        if isinstance(rows, list):
            NoneToTakeSomeOf.refused += 1
            raise torch.OutOfMemoryError("no memory")
        return super().__getitem__(rows)


def test_no_memory_for_the_tokens_of_those_who_go_on(monkeypatch):
    """Others end with the step whose tokens are read."""
    prompts, drawing = [random_tokens(VOCABULARY, 9, seed=at) for at in (1, 2)], flight.drawing
    asked = [SamplingParams(max_tokens=most, temperature=0, ignore_eos=True) for most in (12, 30)]

    def drawn(logits, sampling):
        made = drawing(logits, sampling)
        made.ids = made.ids.as_subclass(NoneToTakeSomeOf)
        return made

    with engine("qwen3_5", ahead=True) as made:
        expected = [made.generate(prompt, params).tokens for prompt, params in zip(prompts, asked, strict=True)]
        monkeypatch.setattr(flight, "drawing", drawn)
        handles = [made.submit(prompt, params) for prompt, params in zip(prompts, asked, strict=True)]
        assert [handle.result().tokens for handle in handles] == expected
        made.check()
    assert NoneToTakeSomeOf.refused


def test_the_last_token_of_a_prompt_is_read_by_a_plain_step():
    """What is learnt of a prompt, and told of it, is when it has been read."""
    with engine("llama", ahead=True) as made:
        for prompt in ([5], [5, 6], [5, 6, 7]):
            handle = made.submit(prompt, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
            assert len(handle.result().tokens) == 4 and handle.prefilled == len(prompt)
