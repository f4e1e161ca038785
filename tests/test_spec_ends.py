"""Where a request ends, whatever was drafted past that; what usage says of drafts; and how deep they become."""

from dataclasses import replace

import pytest
from speculation import Fixed, Right, Written, drafter, engine, expect_same, held, prompt_of

from bough import Engine, SamplingParams
from bough.draft.depth import Depth
from bough.engine.load import load

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
NOISY = replace(GREEDY, temperature=0.9, seed=3)
PROMPT = prompt_of(19, seed=8)
FAMILIES = ["llama", "gemma4", "lfm2", "qwen3_5"]


def written(family: str, params: SamplingParams = NOISY, prompt: list[int] = PROMPT) -> list[int]:
    with engine(family) as made:
        return made.generate(prompt, params).tokens


@pytest.fixture(scope="module", params=FAMILIES)
def told(request) -> tuple[str, list[int]]:
    """A family, and what it writes when nobody drafts and nothing ends it."""
    return request.param, written(request.param)


def right(tokens: list[int], prompt: list[int] = PROMPT) -> Written:
    return Written(Right([[*prompt, *tokens]]))


@pytest.mark.parametrize("limit", range(1, 12))
def test_no_more_tokens_than_asked_for(told, limit):
    family, tokens = told
    with engine(family, right(tokens), Fixed()) as made:
        handle = made.submit(PROMPT, replace(NOISY, max_tokens=limit))
        streamed = [token for piece in handle for token in piece.tokens]
        out = handle.result()
        assert out.tokens == streamed == tokens[:limit]
        assert out.finish_reason == "length"
        assert max(len(text) for _, text, *_ in held(made)) == len(PROMPT) + limit - 1


def test_the_context_ends_a_draft_too():
    family, size = "qwen3", 64
    prompt = prompt_of(50, seed=3)
    tokens = written(family, NOISY, prompt)
    with engine(family, right(tokens, prompt), Fixed(), context=size) as made:
        out = made.generate(prompt, replace(NOISY, max_tokens=100))
        assert (out.tokens, out.finish_reason) == (tokens[: size - 50], "length")


@pytest.mark.parametrize("at", [0, 1, 5, 9, 10, 23])
def test_an_end_token_inside_a_draft(told, at):
    """It ends the run and is not read; what was drafted after it leaves no trace."""
    family, tokens = told
    end, place = tokens[at], tokens.index(tokens[at])
    for params in (replace(NOISY, ignore_eos=False, logprobs=1), NOISY):
        stops = not params.ignore_eos
        expected = tokens[: place + 1] if stops else tokens
        with engine(family, right(tokens), Fixed()) as made:
            made.end_tokens = frozenset({end})
            handle = made.submit(PROMPT, params)
            streamed = [token for piece in handle for token in piece.tokens]
            out = handle.result()
            assert out.tokens == streamed == expected
            assert out.finish_reason == ("stop" if stops else "length")
            assert len(out.logprobs) == (len(expected) if stops else 0)
            assert max(len(text) for _, text, *_ in held(made)) == len(PROMPT) + len(expected) - 1
            again = made.generate(PROMPT, params)
            assert again.tokens == expected


def test_stop_strings_inside_a_draft(llama_folder):
    """With a tokenizer: text, tokens and reasons are those of a plain run, for strings at every place."""
    loaded = load(llama_folder, dtype="float32")
    params = SamplingParams(max_tokens=30, temperature=0.7, seed=2, ignore_eos=True)
    prompt = loaded.tokenizer.encode("the quick brown fox")
    with Engine(loaded, draft=None) as plain:
        whole = plain.generate(prompt, params)
        asked = [replace(params, stop=whole.text[at : at + 3]) for at in range(0, len(whole.text) - 3, 4)]
        asked += [replace(params, stop=("no such thing", whole.text[-2:]), logprobs=2)]
        expected = [plain.generate(prompt, each) for each in asked]
    assert {each.finish_reason for each in expected} == {"stop"}
    with Engine(loaded, draft=right(whole.tokens, prompt)) as made:
        made._loop.drafting.depth = Fixed()  # type: ignore[assignment]
        for each, theirs in zip(asked, expected, strict=True):
            handle = made.submit(prompt, each)
            pieces = list(handle)
            ours = handle.result()
            assert (ours.text, ours.tokens, ours.finish_reason) == (theirs.text, theirs.tokens, "stop")
            assert "".join(piece.text for piece in pieces) == theirs.text
            assert ours.usage.accepted_tokens or len(ours.tokens) < 3
        made.check()


@pytest.mark.parametrize("deepest", [1, 3, 8])
def test_usage_of_an_oracle_is_exact(told, deepest):
    """The first token comes with the prompt; then rounds of a draft and one more token, cut only at the end."""
    family, tokens = told
    with engine(family, right(tokens), Fixed(deepest=deepest)) as made:
        usage = made.generate(PROMPT, NOISY).usage
    drafted, left = 0, len(tokens) - 1
    while left:
        depth = min(deepest, left - 1)
        drafted, left = drafted + depth, left - depth - 1
    assert usage.drafted_tokens == usage.accepted_tokens == drafted
    assert usage.completion_tokens == len(tokens)


def test_usage_where_an_end_cuts_a_draft(told):
    """Accepted are those that became part of the reply: what stood after its end does not count."""
    family, tokens = told
    at = next(i for i in range(5, 24) if tokens.index(tokens[i]) == i)
    with engine(family, right(tokens), Fixed(deepest=8)) as made:
        made.end_tokens = frozenset({tokens[at]})
        usage = made.generate(PROMPT, replace(NOISY, ignore_eos=False)).usage
    rounds, rest = divmod(at, 9)  # tokens 1 to 9 come with the first draft, of which 9 is the one more
    assert usage.accepted_tokens == 8 * rounds + rest
    assert usage.drafted_tokens == sum(min(8, 24 - 1 - 9 * i - 1) for i in range(rounds + bool(rest)))


def test_usage_of_wrong_drafts(told):
    family, tokens = told
    with engine(family, drafter("wrong", family, [[*PROMPT, *tokens]]), Fixed(deepest=3)) as made:
        usage = made.generate(PROMPT, NOISY).usage
    assert usage.accepted_tokens == 0
    assert usage.drafted_tokens == sum(min(3, left - 1) for left in range(23, 0, -1))


def test_usage_of_half_right_drafts(told):
    """Two right tokens and a wrong one: three tokens a round."""
    family, tokens = told
    oracle = Right([[*PROMPT, *tokens]])

    def guess(text: list[int], most: int) -> list[int]:
        draft = oracle(text, most)
        return [*draft[:2], *((token + 1) % 97 for token in draft[2:])]

    with engine(family, Written(guess), Fixed(deepest=4)) as made:
        usage = made.generate(PROMPT, NOISY).usage
    rounds, left = [], 23
    while left:
        depth = min(4, left - 1)
        rounds.append((depth, min(2, depth)))
        left -= min(2, depth) + 1
    assert (usage.drafted_tokens, usage.accepted_tokens) == tuple(map(sum, zip(*rounds, strict=True)))


class Clock:
    """Seconds as rounds cost them on this made-up machine: a tenth more for each token drafted."""

    def __init__(self, engine: Engine) -> None:
        self.drafting, self.depths = engine._loop.drafting, []  # type: ignore[var-annotated]
        learn = self.drafting.learn

        def told(sequence, drafted, accepted, seconds, rows) -> None:
            self.depths.append(drafted)
            learn(sequence, drafted, accepted, 1 + 0.1 * drafted, rows)

        self.drafting.learn = told  # type: ignore[method-assign]


def test_depth_grows_with_a_drafter_that_is_right():
    prompt, params = prompt_of(10, seed=1), replace(GREEDY, max_tokens=200)
    tokens = written("llama", params, prompt)
    with engine("llama", right(tokens, prompt)) as made:
        assert isinstance(made._loop.drafting.depth, Depth)
        clock = Clock(made)
        out = made.generate(prompt, params)
        assert expect_same("llama", params, prompt, replace(out, tokens=tokens), out)
        assert max(clock.depths) == 8
        assert len(clock.depths) < 60
        clock.depths.clear()
        made.generate(prompt, replace(params, max_tokens=100))  # what was learnt holds for the next request
        assert len(clock.depths) < 20


def test_depth_goes_to_nothing_with_a_drafter_that_is_wrong():
    prompt, params = prompt_of(10, seed=1), replace(GREEDY, max_tokens=200)
    tokens = written("llama", params, prompt)
    with engine("llama", drafter("wrong", "llama", [[*prompt, *tokens]])) as made:
        clock = Clock(made)
        assert made.generate(prompt, params).tokens == tokens
        clock.depths.clear()
        out = made.generate(prompt, params)
        assert out.tokens == tokens
        assert clock.depths.count(0) > 0.9 * len(clock.depths)
        assert out.usage.drafted_tokens < 20


def test_a_drafter_too_slow_for_what_it_is_worth():
    """Right every time, and rounds with a draft take ten times as long: not worth it."""
    prompt, params = prompt_of(10, seed=1), replace(GREEDY, max_tokens=200)
    tokens = written("llama", params, prompt)
    with engine("llama", right(tokens, prompt)) as made:
        drafting, depths = made._loop.drafting, []
        learn = drafting.learn

        def slow(sequence, drafted, accepted, seconds, rows):
            depths.append(drafted)
            learn(sequence, drafted, accepted, 1.0 if not drafted else 10.0 + 10 * drafted, rows)

        drafting.learn = slow  # type: ignore[method-assign]
        made.generate(prompt, params)
        assert depths[50:].count(0) > 0.9 * len(depths[50:])


def test_what_a_prompt_costs_is_not_what_a_draft_costs():
    """Nothing is learnt from steps in which a prompt is read beside the drafts."""
    long = prompt_of(200, seed=2)
    with engine("llama", right(written("llama", GREEDY)), step_tokens=8) as made:
        learn, learnt = made._loop.drafting.learn, []
        rounds, advance = [], made._loop._advance

        def step(rows, computed) -> None:
            reading = any(count > 1 for _, count in rows)
            before = len(learnt)
            advance(rows, computed)
            rounds.append((reading, len(rows), len(learnt) - before))

        def told(*args) -> None:
            learnt.append(args)
            learn(*args)

        made._loop._advance, made._loop.drafting.learn = step, told  # type: ignore[method-assign]
        for handle in made.call(lambda: [made.submit(PROMPT, GREEDY), made.submit(long, GREEDY)]):
            handle.result()
        assert (True, 2, 0) in rounds
        assert all(bool(count) != reading for reading, _, count in rounds)
