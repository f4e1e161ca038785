"""The drafters in the engine are right, not only harmless: level with their texts on every exit, and warm after a hit.

What a drafter's state holds when its sequence ends is compared with a from-scratch run over the same tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from parity import TOLERANCE, pool_for
from speculation import USED, Dice, Fixed, drafter, engine, prompt_of
from test_model_drafter import contents, from_nothing

from bough import CacheConfig, Engine, SamplingParams
from bough.cli import BUNDLED
from bough.draft.mtp import MTPDrafter
from bough.engine.drafting import Side
from bough.engine.load import load
from bough.state.live import State
from bough.state.reservation import forward

GREEDY = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True)
NOISY = replace(GREEDY, temperature=0.9, seed=4)
PROMPT = prompt_of(30, seed=1)


@pytest.mark.parametrize("family", USED)
def test_a_model_that_drafts_for_itself_is_accepted_in_full(family):
    """Cold, warm, in a second turn, forked and in a batch, greedy and with noise."""
    with engine(family, drafter("itself", family, []), Fixed(deepest=5)) as made:
        first = made.generate(PROMPT, GREEDY)
        prompts = [PROMPT, [*PROMPT, *first.tokens, *prompt_of(3, seed=2)], [*PROMPT[:16], *prompt_of(8, seed=3)]]
        outputs = [first, *(made.generate(prompt, NOISY) for prompt in prompts), *made.generate(prompts, GREEDY)]
        for output in outputs:
            assert output.usage.drafted_tokens == output.usage.accepted_tokens == 10  # 1, 6, 6 and 1 tokens


@contextmanager
def watched(made: Engine) -> Iterator[list[tuple[bool, int]]]:
    """What became of each sequence's draft state: whether it is whole, and how long it was at the end.

    One that is whole must be what its tokens make from scratch.
    """
    drafting, ended, faults = made._loop.drafting, [], []
    keep = drafting._keep

    def kept(sequence, side: Side, *, ended: bool) -> None:
        if ended and side.whole:
            try:
                expect_level(drafting.drafter, sequence.tokens, side.state)
            except AssertionError as error:
                faults.append(error)
        if ended:
            seen.append((side.whole, side.state.length - sequence.computed))
        keep(sequence, side, ended=ended)

    seen: list[tuple[bool, int]] = ended
    drafting._keep = kept  # type: ignore[method-assign]
    yield seen
    assert not faults, faults[0]


@torch.inference_mode()
def expect_level(drafts, tokens: list[int], state: State) -> None:
    state.check()
    if isinstance(drafts, MTPDrafter):
        model, own = drafts.head.target, pool_for(drafts.head)
        pool, expected = pool_for(model), State(own)
        with forward(pool, [(State(pool), tokens)]) as step:
            hidden = model(step)
        with forward(own, [(expected, tokens[1 : state.length + 1])]) as step:
            drafts.head(step, hidden[: state.length])
        pairs = zip(state.view(0), expected.view(0), strict=True)
    else:
        expected, _ = from_nothing(drafts.model, tokens[: state.length])
        pairs = zip(contents(drafts.model, state), contents(drafts.model, expected), strict=True)
    for ours, theirs in pairs:
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= TOLERANCE


LEVEL = [("qwen3_next", "mtp"), ("qwen3_5", "mtp"), ("gemma4", "another"), ("lfm2", "another"), ("qwen3_5", "itself")]


@pytest.mark.parametrize(("family", "name"), LEVEL)
def test_level_with_the_target_on_every_exit(family, name):
    drafts = drafter(name, family, [])
    ahead = 1 - drafts.lag  # a model reads the last token too; the head has no row for it
    with engine(family, drafts, Dice(seed=3), step_tokens=24) as made, watched(made) as seen:
        first = made.generate(PROMPT, NOISY).tokens
        second = [*PROMPT, *first, *prompt_of(5, seed=6)]
        made.generate(PROMPT, NOISY)  # at all but its last token
        made.generate([*PROMPT[:-1], 5, 7, 9], NOISY)  # a branch where the one before can be resumed
        made.generate([*PROMPT[:13], *prompt_of(6, seed=7)], NOISY)  # one where it perhaps cannot
        made.generate(second, GREEDY)
        made.generate([second, PROMPT, prompt_of(9, seed=8), prompt_of(50, seed=9)], NOISY)
        handle = made.submit(second, replace(NOISY, max_tokens=100))
        next(iter(handle))
        handle.cancel()
        handle.result()
        assert len(seen) == 10
        assert seen == [(True, ahead)] * 10


class Begun:
    """How the drafter's side of each sequence began: what the target resumed, what the drafter did, and its rows."""

    def __init__(self, made: Engine) -> None:
        self.seen: list[tuple[int, int, bool, int]] = []
        drafting = made._loop.drafting
        begin = drafting.begin

        def watch(sequence, resumed: int) -> None:
            begin(sequence, resumed)
            side = drafting._sides[sequence]
            self.seen.append((resumed, side.state.length, side.whole, sum(map(len, side.rows))))

        drafting.begin = watch  # type: ignore[method-assign]


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_the_head_resumes_where_the_target_does(family):
    with engine(family, drafter("mtp", family, []), Fixed(deepest=2)) as made:
        begun = Begun(made)
        first = made.generate(PROMPT, GREEDY).tokens
        made.generate(PROMPT, GREEDY)
        made.generate([*PROMPT, *first, 5, 6, 7], GREEDY)
        made.generate([*PROMPT[:-1], 1, 2, 3], GREEDY)
        made.generate([*PROMPT, *first[:-1], 1 + first[-1] % 90, 2, 3], GREEDY)
        length, end = len(PROMPT), len(PROMPT) + len(first) - 1
        assert begun.seen == [
            (0, 0, True, 0),
            (length - 1, length - 2, True, 1),  # the pair of the last entry is not in the prompt's beginning
            (end, end, True, 0),
            (length - 1, length - 2, True, 1),  # another token follows: the row saved there is paired anew
            (end, end - 1, True, 1),
        ]


def test_the_head_starts_in_the_middle_where_its_own_cache_has_nothing():
    family = "qwen3_5"
    with engine(family, drafter("mtp", family, []), Fixed(deepest=3)) as made:
        first = made.generate(PROMPT, GREEDY).tokens
        cached = made._loop.drafting.cache
        made.call(cached.clear)
        begun = Begun(made)
        assert made.generate(PROMPT, GREEDY).tokens == first
        assert begun.seen == [(len(PROMPT) - 1, 0, False, 1)]
        assert not list(cached.tree.walk()), "what has a gap is not kept"


@pytest.mark.parametrize("name", ["another", "itself"])
def test_a_draft_model_reads_what_is_new_and_no_more(name):
    """In a second turn its own resume point serves it, though it is one token further than the target's."""
    family = "qwen3_5"
    drafts = drafter(name, family, [])
    fed: list[int] = []
    committed = drafts.committed
    drafts.committed = lambda rows: (fed.append(sum(len(row.tokens) for row in rows)), committed(rows))[1]
    with engine(family, drafts, Fixed(deepest=3)) as made:
        first = made.generate(PROMPT, GREEDY).tokens
        fed.clear()
        made.generate([*PROMPT, *first, 5, 6, 7], GREEDY)
        assert sum(fed) == 3 + len(first), "new tokens of the prompt, and the reply"
        fed.clear()
        assert made.generate(PROMPT, GREEDY).tokens == first
        assert sum(fed) == 1 + len(first), "the same prompt again: its last token, and the reply"


@pytest.fixture(scope="module")
def bundled():
    return load(BUNDLED, dtype="float32")


def test_the_trained_head_drafts_as_well_warm_as_cold(bundled):
    """The bundled model's head on a conversation: half of what it drafts stands, also after a hit and a fork."""
    params = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
    beginning = bundled.tokenizer.encode("The old man looked at the sea, and after a while he said to the boy that")
    with Engine(bundled, draft="mtp", cache=CacheConfig(page_tokens=8), max_running=2, context=512) as made:
        made._loop.drafting.depth = Fixed(deepest=2)  # type: ignore[assignment]
        begun = Begun(made)
        cold = made.generate(beginning, params)
        warm = made.generate(beginning, params)
        turn = [*beginning, *cold.tokens, *bundled.tokenizer.encode(" He was glad, and")]
        second = made.generate(turn, params)
        made.cache.clear()
        made.call(made._loop.drafting.cache.clear)
        afresh = made.generate(turn, params)
        assert [whole for _, _, whole, _ in begun.seen] == [True] * 4
        assert [resumed > 0 for resumed, *_ in begun.seen] == [False, True, True, False]
    assert (warm.tokens, second.tokens) == (cold.tokens, afresh.tokens)
    rates = [each.usage.accepted_tokens / each.usage.drafted_tokens for each in (cold, warm, second, afresh)]
    assert rates[0] > 0.3
    assert rates[1] == pytest.approx(rates[0], abs=0.1)
    assert rates[2] == pytest.approx(rates[3], abs=0.1)
