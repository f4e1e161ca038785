"""Speculation changes nothing but speed: every family with every drafter against an engine that does not speculate."""

from dataclasses import dataclass, replace
from functools import cache
from random import Random

import pytest
from speculation import USED, Dice, Fixed, drafter, drafters_of, engine, expect_same, held, prompt_of, target

from bough import CacheConfig, Engine, SamplingParams
from bough.engine.request import Output
from bough.state import capacity

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
NOISY = replace(GREEDY, temperature=0.8, seed=5)
EVERYTHING = SamplingParams(
    max_tokens=12, temperature=1.3, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.2,
    frequency_penalty=0.1, logit_bias={3: 2.0, 11: -1.0}, seed=6, logprobs=3, ignore_eos=True,
)  # fmt: skip
PIECE = prompt_of(9, seed=1)
BEGINNING = [*PIECE, *prompt_of(5, seed=2), *PIECE, *prompt_of(7, seed=3), *PIECE[:5]]  # something for n-grams to find
CASES = [(family, name) for family in USED for name in drafters_of(family)]

KINDS = ("llama", "gemma4", "lfm2", "qwen3_5")  # every kind of layer is among these
EVERY = [pytest.param(family, marks=() if family in KINDS else pytest.mark.long) for family in USED]

Ask = tuple[list[int], SamplingParams]


@dataclass
class Plain:
    """What a plain engine was asked, in groups that run together, what it wrote, and what its cache held then."""

    groups: list[list[Ask]]
    outputs: list[list[Output]]
    held: set[tuple]

    @property
    def texts(self) -> list[list[int]]:
        asked = [prompt for group in self.groups for prompt, _ in group]
        wrote = [output.tokens for outputs in self.outputs for output in outputs]
        return [[*prompt, *tokens] for prompt, tokens in zip(asked, wrote, strict=True)]


def run(engine: Engine, group: list[Ask]) -> list[Output]:
    handles = [engine.submit(prompt, params) for prompt, params in group]
    return [handle.result() for handle in handles]


@cache
def plain(family: str) -> Plain:
    """Cold, warm, a second turn, forks, long ones, and a batch of which only some may draft."""
    with engine(family) as made:
        first = made.generate(BEGINNING, GREEDY).tokens
        groups: list[list[Ask]] = [
            [(BEGINNING, GREEDY)],
            [(BEGINNING, NOISY)],
            [([*BEGINNING, *first, *prompt_of(6, seed=4)], EVERYTHING)],
            [([*BEGINNING[:21], *prompt_of(4, seed=5)], replace(NOISY, max_tokens=30, top_k=5))],
            [(BEGINNING, replace(GREEDY, cache_salt="another", repetition_penalty=1.3, logprobs=0))],
            [
                (prompt_of(11 * i + 3, seed=10 + i), replace(params, seed=i, draft="auto" if i % 2 else None))
                for i, params in enumerate([NOISY, EVERYTHING, GREEDY, GREEDY])
            ],
            [(prompt_of(12, seed=20 + i), replace(NOISY, max_tokens=i)) for i in range(4)],
        ]
        made.cache.clear()
        outputs = [run(made, group) for group in groups]
        return Plain(groups, outputs, held(made))


@pytest.mark.parametrize(("family", "name"), CASES)
def test_the_same_tokens_and_the_same_cache(family, name):
    expected, ties = plain(family), 0
    drafts = drafter(name, family, expected.texts)
    with engine(family, drafts, Dice(seed=len(name))) as made:
        for group, outputs in zip(expected.groups, expected.outputs, strict=True):
            for (prompt, params), theirs, ours in zip(group, outputs, run(made, group), strict=True):
                ties += not expect_same(family, params, prompt, theirs, ours)
                assert params.draft is not None or not ours.usage.drafted_tokens
        assert ties <= 1
        assert ties or held(made) == expected.held


@pytest.mark.parametrize("page_tokens", [1, 32])
@pytest.mark.parametrize("family", EVERY)
def test_page_edges(family, page_tokens):
    expected = plain(family)
    name = {"qwen3_next": "mtp", "qwen3_5": "mtp", "gemma4": "assistant"}.get(family, "another")
    for which in ("wild", name):
        with engine(family, drafter(which, family, expected.texts), Dice(), page_tokens=page_tokens) as made:
            for (prompt, params), theirs in zip(expected.groups[3], expected.outputs[3], strict=True):
                for _ in range(2):
                    assert expect_same(family, params, prompt, theirs, made.generate(prompt, params))


@pytest.mark.parametrize("family", USED)
def test_cancelled_and_resumed(family):
    """At whatever round it is cancelled: what was written stays, is in the cache, and can be gone on from."""
    asked = replace(GREEDY, max_tokens=36)
    with engine(family) as made:
        whole = made.generate(BEGINNING, asked)
    text = [*BEGINNING, *whole.tokens]
    for name in ("right", "wild", drafters_of(family)[1]):
        with engine(family, drafter(name, family, [text]), Dice(), step_tokens=16) as made:
            written: list[int] = []
            for pieces in (0, 2, 5, 9):
                handle = made.submit([*BEGINNING, *written], replace(asked, max_tokens=36 - len(written)))
                for _ in zip(range(pieces), handle, strict=False):
                    pass
                handle.cancel()
                written += handle.result().tokens
            rest = made.generate([*BEGINNING, *written], replace(asked, max_tokens=36 - len(written)))
            together = replace(rest, tokens=[*written, *rest.tokens])
            assert together.tokens == whole.tokens
            assert all(tuple(text[: len(tokens)]) == tokens for _, tokens, *_ in held(made))


def begins(engine: Engine) -> list[tuple]:
    """Grows with every sequence that starts, or starts over."""
    begun, begin = list[tuple](), engine._loop.drafting.begin
    engine._loop.drafting.begin = lambda *args: (begun.append(args), begin(*args))[1]  # type: ignore[method-assign]
    return begun


@pytest.mark.parametrize("family", EVERY)
def test_memory_for_fewer_than_are_running(family):
    """Sequences give their memory back in the middle, the drafter's too, and go on later."""
    asked = replace(NOISY, max_tokens=32)
    prompts = [prompt_of(28 + 3 * i, seed=30 + i) for i in range(4)]
    with engine(family) as made:
        expected = made.generate(prompts, asked)
    texts = [[*prompt, *output.tokens] for prompt, output in zip(prompts, expected, strict=True)]
    for name in ("right", "another" if family in ("llama", "lfm2") else drafters_of(family)[1]):
        with engine(family, drafter(name, family, texts)) as made:
            pools = made._runner.pool.arena.pools
            slabs = sum(capacity.slabs(pool.layout, 1, 80, 32, pool.max_running) for pool in pools)
            nbytes = slabs * made.layout.slab_bytes
        with engine(family, drafter(name, family, texts), Fixed(), device_bytes=nbytes, step_tokens=32) as made:
            begun = begins(made)
            outputs = made.generate(prompts, asked)
            for prompt, theirs, ours in zip(prompts, expected, outputs, strict=True):
                assert expect_same(family, asked, prompt, theirs, ours)
            # Windows alone do not grow; where slots are small, it is enough that the drafter gives its memory back.
            assert len(begun) > len(prompts) or family in ("mistral", "lfm2"), "nothing was short of memory"


def test_a_prompt_read_in_small_steps_beside_those_that_draft():
    expected = plain("qwen3_5")
    with engine("qwen3_5", drafter("mtp", "qwen3_5", []), Dice(), step_tokens=5) as made:
        asks = [ask for group in expected.groups for ask in group]
        outputs = [output for group in expected.outputs for output in group]
        for (prompt, params), theirs, ours in zip(asks, outputs, run(made, asks), strict=True):
            assert expect_same("qwen3_5", params, prompt, theirs, ours)


@pytest.mark.parametrize("family", ["gemma3", "lfm2"])
def test_a_resume_point_at_the_last_token_of_a_prompt(family):
    """A step that leaves a resume point for one that waits for it is no round with a draft, which saves nothing."""
    prompts = [prompt_of(17, seed=17), [*prompt_of(17, seed=17), *prompt_of(5, seed=5)]]
    with engine(family) as made:
        expected = made.generate(prompts, GREEDY)
    texts = [[*prompt, *output.tokens] for prompt, output in zip(prompts, expected, strict=True)]
    with engine(family, drafter("right", family, texts), Fixed(), step_tokens=8) as made:
        handles = made.call(lambda: [made.submit(prompt, GREEDY) for prompt in prompts])  # both at once
        assert [handle.result().tokens for handle in handles] == [output.tokens for output in expected]
        assert handles[1].result().usage.cached_tokens >= 16


def test_without_a_prefix_cache():
    expected = plain("qwen3_5")
    for name in ("mtp", "another", "ngram"):
        drafts = drafter(name, "qwen3_5", expected.texts)
        with Engine(target("qwen3_5"), cache=CacheConfig(enabled=False, page_tokens=4), draft=drafts) as made:
            made._loop.drafting.depth = Dice()  # type: ignore[assignment]
            for (prompt, params), theirs in zip(expected.groups[0], expected.outputs[0], strict=True):
                assert expect_same("qwen3_5", params, prompt, theirs, made.generate(prompt, params))
            made.check()
            assert not any(pool.states for pool in made._runner.pool.arena.pools)


def some_asks(dice: Random, count: int) -> list[Ask]:
    """Prompts of a few pieces that come back, so that they share beginnings; parameters of every sort."""
    pieces = [prompt_of(length, seed=length) for length in (1, 3, 8, 17)]
    asks = []
    for seed in range(count):
        prompt = [token for _ in range(dice.randint(1, 4)) for token in dice.choice(pieces)]
        params = dice.choice([GREEDY, NOISY, EVERYTHING, replace(NOISY, temperature=2.0, min_p=0.2)])
        salt, draft = dice.choice([None, None, "a"]), dice.choice(["auto", "auto", None])
        asks.append((prompt, replace(params, max_tokens=dice.randint(0, 30), seed=seed, cache_salt=salt, draft=draft)))
    return asks


def soak(family: str, name: str, seed: int, count: int = 40) -> None:
    dice = Random(seed)
    asks = some_asks(dice, count)
    with engine(family) as made:
        expected = [made.generate(prompt, params) for prompt, params in asks]
    texts = [[*prompt, *output.tokens] for (prompt, _), output in zip(asks, expected, strict=True)]
    with engine(family, drafter(name, family, texts)) as made:
        pools, some = made._runner.pool.arena.pools, dice.randint(110, 400)
        slabs = sum(capacity.slabs(pool.layout, 1, some, 32, pool.max_running) for pool in pools)
        options = {"device_bytes": slabs * made.layout.slab_bytes, "step_tokens": dice.choice([7, 32])}
    with engine(family, drafter(name, family, texts), Dice(seed), **options) as made:
        waiting = list(range(len(asks)))
        while waiting:
            now, waiting = waiting[: dice.randint(1, 8)], waiting[8:]
            handles = [(i, made.submit(*asks[i])) for i in now]
            cancelled = [i for i in now if dice.random() < 0.2]
            for i, handle in handles:
                if i in cancelled:
                    for _ in zip(range(dice.randint(0, 12)), handle, strict=False):
                        pass
                    handle.cancel()
                    got = handle.result().tokens
                    assert got == expected[i].tokens[: len(got)]
                else:
                    prompt, params = asks[i]
                    assert expect_same(family, params, prompt, expected[i], handle.result())


def test_at_random():
    soak("qwen3_5", "mtp", seed=0, count=20)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize(("family", "name"), CASES)
def test_at_random_long(family, name, seed):
    soak(family, name, seed)
