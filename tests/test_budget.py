"""No memory for what steps compute on their way, in any place at any time: the answers are those of a plain engine."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from random import Random

import pytest
import torch
from speculation import Fixed, Right, Written, expect_idle
from test_flight import engine as flying
from test_flight import loaded as with_head
from timeline import VOCABULARY, loaded

from bough import CacheConfig, Engine, SamplingParams
from bough.cache.prefix_cache import PrefixCache
from bough.draft.model import ModelDrafter
from bough.draft.mtp import MTPDrafter, MTPHead
from bough.engine import budget, loop
from bough.engine.budget import FEW, Budget
from bough.engine.drafting import SHORTAGES
from bough.engine.runner import Runner
from bough.state.live import State
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
    return Engine(target, cache=cache, context=256, draft=draft, **{"max_running": 4} | options)


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
        for turn in range(20):  # who runs beside whom decides where they are met
            if turn > 2 and len(faults.met) > 3:
                break
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


@pytest.mark.parametrize("drafts", ["mtp", "model"])
def test_where_a_drafter_s_state_is_given_back(drafts, monkeypatch):
    """A request that is cancelled then ends as any other, and nobody notices."""
    target, admit = with_head("qwen3_5", "cpu").model, PrefixCache.admit
    drafter = MTPDrafter(MTPHead(target)) if drafts == "mtp" else ModelDrafter(target, target.vocab_size)
    with flying("qwen3_5", ahead=False, draft=drafter) as engine:
        expected, refused = engine.generate([9, 10, 11], GREEDY).tokens, []

        def short(self, *given, ended):
            if ended and self is engine.drafting.cache:
                refused.append(given)
                raise torch.OutOfMemoryError("no memory")
            admit(self, *given, ended=ended)

        monkeypatch.setattr(PrefixCache, "admit", short)
        other = engine.submit([19, 10, 11], SamplingParams(max_tokens=200, temperature=0, ignore_eos=True))
        handle = engine.submit([9, 10, 11], GREEDY)
        next(iter(other))
        other.cancel()
        assert other.result().finish_reason == "cancelled" and handle.result().tokens == expected
        assert len(refused) == 2 and engine.drafting.failure is None
        expect_idle(engine)


def test_where_a_drafter_s_state_is_made(monkeypatch):
    """The request goes on without drafts, and nothing is left behind."""
    prompt, head = list(range(10, 40)), MTPHead(with_head("qwen3_5", "cpu").model)
    with flying("qwen3_5", ahead=False, draft=MTPDrafter(head)) as engine:
        expected, faults = engine.generate(prompt, GREEDY).tokens, Faults(monkeypatch, seed=1)
        faults.put_into(Runner, "last_row")
        for _ in range(60):
            assert engine.generate(prompt, replace(GREEDY, max_tokens=4)).tokens == expected[:4]
        assert faults.met
        expect_idle(engine)
        nodes = engine.call(lambda: list(engine.drafting.cache.tree.walk()))
        assert nodes and not any(node.pins for node in nodes)


@pytest.mark.parametrize("ahead", [False, True])
def test_no_memory_for_drafts(ahead, monkeypatch):
    """Whether their rounds fly or not: then nobody drafts."""
    forward, prompt = Runner.forward, [9, 10, 11]
    with flying("qwen3_5", ahead=False) as plain:
        expected = plain.generate(prompt, GREEDY).tokens
    with flying("qwen3_5", ahead=ahead, draft=Written(Right([[*prompt, *expected]]))) as engine:
        engine._loop.drafting.depth, refused = Fixed(deepest=3), []

        def short(self, batch, wanted, *given, **options):
            if sum(wanted) > 1:
                refused.append(wanted)
                raise torch.OutOfMemoryError("no memory")
            return forward(self, batch, wanted, *given, **options)

        monkeypatch.setattr(Runner, "forward", short)
        assert engine.generate(prompt, GREEDY).tokens == expected
        assert refused


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


def test_who_cannot_start_leaves_its_place_to_others(monkeypatch):
    restore, prompts, begun = PrefixCache.restore, [[at, 10, 11] for at in (9, 19, 29)], []

    def short(self, match, state):
        begun.append(state)
        if len(begun) == 2:
            raise torch.OutOfMemoryError("no memory")
        restore(self, match, state)

    with made("qwen3_5", max_running=2) as engine:
        expected = [engine.generate(prompt, GREEDY).tokens for prompt in prompts]
        monkeypatch.setattr(PrefixCache, "restore", short)
        handles = engine.call(lambda: [engine.submit(prompt, GREEDY) for prompt in prompts])
        with pytest.raises(torch.OutOfMemoryError):
            handles[1].result()
        assert [handles[at].result().tokens for at in (0, 2)] == [expected[0], expected[2]]
        engine.check()


def test_where_what_a_state_owes_is_settled(monkeypatch):
    """The tree has no node that holds nothing."""
    settle, prompt = State.settle, list(range(10, 20))

    def end() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(State, "settle", short)
            handle.cancel()
            engine._loop._drop_unwanted()

    def short(self):
        raise torch.OutOfMemoryError("no memory")

    with made("qwen3_5") as engine:
        expected = engine.generate(prompt, GREEDY).tokens
        engine.cache.clear()
        handle = engine.submit(prompt, replace(GREEDY, max_tokens=200))
        next(iter(handle))
        engine.call(end)
        assert handle.result().finish_reason == "cancelled" and State.settle is settle
        engine.check()
        assert engine.generate(prompt, GREEDY).tokens == expected


@pytest.mark.parametrize("drafts", ["mtp", "model"])
@pytest.mark.parametrize("place", ["committed", "propose"])
@pytest.mark.parametrize("late", [False, True])
def test_where_a_drafter_computes(drafts, place, late, monkeypatch):
    """Those that run go on without it; others after them have drafts again, unless it is short each time."""
    target, prompt = with_head("qwen3_5", "cpu").model, [9, 10, 11]
    drafter = MTPDrafter(MTPHead(target)) if drafts == "mtp" else ModelDrafter(target, target.vocab_size)
    compute, left = getattr(type(drafter), place), [0]

    def short(self, *given):
        left[0] -= 1
        found = compute(self, *given) if late or left[0] >= 0 else None
        if left[0] < 0:
            raise torch.OutOfMemoryError("no memory")
        return found

    with flying("qwen3_5", ahead=False, draft=drafter) as engine:
        engine._loop.drafting.depth = Fixed(deepest=3)
        expected = engine.generate(prompt, GREEDY).tokens
        for count in range(2):
            left[0] = count
            with monkeypatch.context() as patch:
                patch.setattr(type(drafter), place, short)
                assert engine.generate(prompt, GREEDY).tokens == expected
            assert left[0] < 0 and engine.drafting.failure is None
            expect_idle(engine)
            again = engine.generate(prompt, GREEDY)
            assert again.tokens == expected and again.usage.drafted_tokens
        monkeypatch.setattr(type(drafter), place, short)
        for _ in range(SHORTAGES):
            assert engine.drafting.failure is None
            assert engine.generate(prompt, GREEDY).tokens == expected
        assert "no memory" in engine.drafting.failure
        expect_idle(engine)
        engine.drafting.failure = None  # as expected
