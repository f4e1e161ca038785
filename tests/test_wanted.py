"""Hidden rows that nobody asks for are not computed; those that somebody does are the same, and so is all state."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from parity import pool_for, random_tokens, save
from speculation import USED, Fixed, drafter, engine, target
from test_gemma4 import EXPERTS, SHARED, gemma4
from test_model_drafter import contents

from bough import SamplingParams
from bough.engine import drafting
from bough.engine.runner import Runner
from bough.models.load import load_model
from bough.models.model import Model
from bough.state.live import State
from bough.state.reservation import forward
from bough.state.step import Ends

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
COUNTS = (20, 1, 12, 3)
VARIANTS = {"gemma4 sharing": SHARED, "gemma4 sharing, with experts": {**SHARED, **EXPERTS}}

every_family = pytest.mark.parametrize("name", [*USED, *VARIANTS])


@cache
def model_of(name: str) -> Model:
    if name not in VARIANTS:
        return target(name).model
    with TemporaryDirectory() as folder:
        return load_model(save(gemma4(**VARIANTS[name]), Path(folder)), dtype="float32")


def texts(model: Model) -> list[list[int]]:
    return [random_tokens(model.vocab_size, count, seed) for seed, count in enumerate(COUNTS)]


def batch_for(model: Model) -> list[tuple[State, list[int]]]:
    """Rows in a pool of their own, the second without history."""
    pool = pool_for(model, tokens=512, running=16)
    states = [State(pool) for _ in COUNTS]
    with forward(pool, [(state, [3, 5, 7, 9]) for row, state in enumerate(states) if row != 1]) as step:
        model(step)
    return list(zip(states, texts(model), strict=True))


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert ours.shape == expected.shape
    if len(ours):
        assert (ours - expected).abs().max() <= 2e-6 * max(1.0, expected.abs().max().item())


def expect_alike(model: Model, ours, theirs) -> None:
    for (state, _), (other, _) in zip(ours, theirs, strict=True):
        state.check()
        for held, expected in zip(contents(model, state), contents(model, other), strict=True):
            close(held, expected)


@every_family
@pytest.mark.parametrize("counts", [(1, 1, 1, 1), (1, 0, 3, 0), (0, 1, 0, 3), COUNTS, (0, 0, 0, 0)])
@torch.inference_mode()
def test_the_rows_that_are_wanted_are_those_of_a_whole_forward(name, counts):
    model = model_of(name)
    whole, part = batch_for(model), batch_for(model)
    with forward(whole[0][0].pool, whole) as step:
        every = model(step)
    with forward(part[0][0].pool, part) as step:
        ends = Ends.of(step.rows, counts, model.device)
        some = model(replace(step, wanted=ends))
    rows = [row[len(row) - count :] for row, count in zip(every.split(COUNTS), counts, strict=True)]
    close(some, torch.cat(rows))
    close(model.logits(some), model.logits(torch.cat(rows)))
    expect_alike(model, part, whole)


@every_family
def test_a_runner_that_is_not_asked_for_hidden_rows_gives_the_same_logits(name):
    """Of prompts with cuts, and after them."""
    model = model_of(name)
    whole, part = batch_for(model), batch_for(model)
    runners = [Runner(model, batch[0][0].pool) for batch in (whole, part)]
    for wanted in ([1, 0, 2, 1], [0, 0, 0, 0], [1, 1, 1, 1]):
        cuts = [[state.length + len(tokens) // 2] if len(tokens) > 5 else [] for state, tokens in whole]
        hidden, expected = runners[0].forward(whole, wanted, cuts, hidden=True)
        none, logits = runners[1].forward(part, wanted, cuts)
        assert hidden is not None and len(hidden) == sum(COUNTS)
        assert none is None
        close(logits, expected)
        expect_alike(model, part, whole)
    for (state, _), (other, _) in zip(part, whole, strict=True):
        assert state.points.keys() == other.points.keys()


@pytest.mark.parametrize(
    ("family", "name", "read"),
    [("qwen3_5", "mtp", True), ("gemma4", "assistant", True), ("gemma4", "another", False), ("lfm2", "ngram", False)],
)
def test_hidden_rows_are_asked_for_by_those_who_read_them(family, name, read, monkeypatch):
    prompt, asked, run = random_tokens(90, 60, seed=1), list[bool](), Runner.forward

    def watch(self, *args, hidden=False, **options):
        asked.append(hidden)
        return run(self, *args, hidden=hidden, **options)

    monkeypatch.setattr(Runner, "forward", watch)
    with engine(family, drafter(name, family, []), Fixed(), step_tokens=24) as made:
        made.generate(prompt, GREEDY)
        assert made.generate(prompt, GREEDY).usage.drafted_tokens  # n-grams have learnt from the first answer
        assert set(asked) == {read}
        asked.clear()
        made.generate(prompt, replace(GREEDY, draft=None))
        assert set(asked) == {False}
        asked.clear()
        made.score(prompt)
        assert set(asked) == {True}


def test_a_long_prompt_is_told_as_it_is_read(monkeypatch):
    """However large its steps are, and what a drafter is told at once of a text that was resumed."""
    monkeypatch.setattr(drafting, "PIECE", 16)
    monkeypatch.setattr(drafting, "UNTOLD", 2)
    prompt = random_tokens(90, 12, seed=1) * 8
    with engine("llama", None, Fixed()) as made:
        plain = made.generate(prompt, GREEDY).tokens
    with engine("llama", drafter("right", "llama", [[*prompt, *plain]]), Fixed(), step_tokens=24) as made:
        for _ in range(2):  # the second time most of it is resumed
            out = made.generate(prompt, GREEDY)
            assert out.tokens == plain
            assert out.usage.drafted_tokens
