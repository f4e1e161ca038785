"""No memory for what steps compute on their way, in any place at any time: the answers are those of a plain engine."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from random import Random

import pytest
import torch
from speculation import Fixed, Right, Written
from test_flight import engine as flying
from timeline import VOCABULARY, loaded

from bough import CacheConfig, Engine, SamplingParams
from bough.cache.prefix_cache import PrefixCache
from bough.engine import budget, loop
from bough.engine.budget import FEW, Budget
from bough.engine.runner import Runner
from bough.state.recordings import Recordings

FAMILIES = ["llama", "gemma3", "lfm2", "qwen3_5"]
GREEDY = SamplingParams(max_tokens=30, temperature=0)


class Faults:
    """No memory where `places` are called, before or after they did their work: now and then, never twice in a row."""

    def __init__(self, patch: pytest.MonkeyPatch, seed: int) -> None:
        self._patch, self._draw, self._quiet, self.met = patch, Random(seed), 10, set[tuple[str, bool]]()

    def put_into(self, owner: object, name: str) -> None:
        whole: Callable = getattr(owner, name)

        def faulty(*given, **options):
            self._quiet -= 1
            fault, late = self._quiet <= 0 and self._draw.random() < 0.3, self._draw.random() < 0.5
            if not fault:
                return whole(*given, **options)
            self._quiet = self._draw.randint(20, 60)
            if late:
                whole(*given, **options)
            self.met.add((name, late))
            raise torch.OutOfMemoryError("no memory")

        self._patch.setattr(owner, name, faulty)


def made(family: str, draft: object = None, ends: frozenset[int] = frozenset(), **options) -> Engine:
    cache = CacheConfig(page_tokens=4, device_bytes=4 << 20)
    target = replace(loaded(family), end_tokens=ends)
    return Engine(target, cache=cache, max_running=4, context=256, draft=draft, **options)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_in_any_place(family, seed, monkeypatch):
    """Prompts, replies that end by themselves, drafts, scores."""
    monkeypatch.setattr(budget, "PATIENCE", 4)
    draw = Random(seed)
    prompts = [[draw.randrange(8, VOCABULARY) for _ in range(draw.randint(3, 60))] for _ in range(6)]
    with made(family) as endless:
        ends = frozenset(endless.generate(prompt, GREEDY).tokens[12] for prompt in prompts[:3])
    with made(family, ends=ends) as plain:
        expected = [plain.generate(prompt, GREEDY).tokens for prompt in prompts]
        scores = [plain.score(prompt) for prompt in prompts]
    right = Right([[*prompt, *tokens] for prompt, tokens in zip(prompts, expected, strict=True)])
    with made(family, Written(right), ends, step_tokens=32) as short:
        short._loop.drafting.depth = Fixed(deepest=3)
        faults = Faults(monkeypatch, seed)
        for place in ((loop, "verify"), (Runner, "forward"), (Runner, "scores"), (Recordings, "_replay")):
            faults.put_into(*place)
        faults.put_into(PrefixCache, "admit")
        for _ in range(3):
            handles = [short.submit(prompt, GREEDY) for prompt in prompts]
            for prompt, logprobs in zip(prompts, scores, strict=True):
                assert short.score(prompt) == pytest.approx(logprobs, abs=1e-4)
            assert [handle.result().tokens for handle in handles] == expected
        short.check()
    assert len(faults.met) > 3 and any(tokens[-1] in ends for tokens in expected)


@pytest.mark.parametrize("place", ["admit", "acquire"])
def test_where_a_request_leaves_or_comes(place, monkeypatch):
    """It costs nobody else their answer."""
    with made("qwen3_5") as engine:
        expected = engine.generate([9, 10, 11], GREEDY).tokens
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, seed=1)
            faults.put_into(PrefixCache, place)
            for _ in range(20):
                other = engine.submit([19, 10, 11], SamplingParams(max_tokens=200, temperature=0, ignore_eos=True))
                handle = engine.submit([9, 10, 11], GREEDY)
                with suppress(torch.OutOfMemoryError):
                    next(iter(handle))
                other.cancel()
                for each in (other, handle):
                    with suppress(torch.OutOfMemoryError):
                        assert each.result().tokens == expected or each is other
        assert faults.met
        assert engine.generate([9, 10, 11], GREEDY).tokens == expected
        engine.check()


@pytest.mark.parametrize("late", [False, True])
def test_launches_ahead_that_always_fail_cost_little(late, monkeypatch):
    """They are given up for a while, so that replies are not read again and again."""
    with flying("qwen3_5", ahead=True) as engine:
        forward, fed = engine._runner.forward, []

        def short(batch, *given, **options):
            fed.append(sum(len(tokens) for _, tokens in batch))
            ahead = options.get("given") is not None
            found = forward(batch, *given, **options) if late or not ahead else None
            if ahead:
                raise torch.OutOfMemoryError("no memory")
            return found

        monkeypatch.setattr(engine._runner, "forward", short)
        engine.generate([9, 10, 11], SamplingParams(max_tokens=150, temperature=0, ignore_eos=True))
        assert 150 < sum(fed) < 250


def test_steps_become_smaller_and_larger_again():
    """What a short shortage leaves is over in some times as many steps."""
    tokens = Budget(4096)
    assert tokens.failed(4096) and tokens.tokens(beside_writers=False) == 2048 and tokens.is_short
    for size in (2048, 1024, 512, 256, 128, 64, 32, 16):  # one shortage
        assert tokens.failed(size) and tokens.tokens(beside_writers=False) == size // 2
    steps = 0
    while tokens.is_short:
        tokens.went_well()
        steps += 1
    assert steps == 9 * budget.PATIENCE  # doubled as often as it had been halved
    assert tokens.tokens(beside_writers=False) == 4096 and tokens.tokens(beside_writers=True) == 2048


def test_larger_steps_are_tried_less_often_where_they_fail():
    tokens, tries, since = Budget(1024), [], 0
    tokens.failed(1024)
    for _ in range(100_000):
        if tokens.tokens(beside_writers=False) > 512:
            tries.append(since)
            tokens.failed(1024)
            since = 0
        tokens.went_well()
        since += 1
    assert tries == [budget.PATIENCE * 4**at for at in range(len(tries))] and len(tries) == 5


def test_few_tokens_are_no_reason():
    """At first; if they fail twice they are, down to one alone."""
    tokens = Budget(4096)
    assert tokens.failed(3) and tokens.tokens(beside_writers=False) == FEW
    assert tokens.failed(3) and tokens.tokens(beside_writers=False) == 1
    assert not tokens.failed(1) and not tokens.is_short
    assert tokens.failed(1) and tokens.tokens(beside_writers=False) == FEW
    tokens.went_well()
    assert tokens.failed(1) and tokens.tokens(beside_writers=False) == FEW
