"""Speculation draws from the target's own distribution: chi-square tests with fixed seeds, of verify and of the engine.

Expected frequencies are computed here from the definition of the filters, in float64.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
import torch
import transformers
from parity import feed, pool_for, randomise, save
from speculation import Fixed, Written
from torch import Tensor

from bough import Engine, SamplingParams
from bough.draft.model import ModelDrafter
from bough.engine.load import Loaded, load
from bough.engine.request import Handle, Request
from bough.engine.sampler import draw
from bough.engine.sequence import Sequence
from bough.engine.verify import verify
from bough.state.live import State

WORDS = 32
CONFIGS = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.6),
    "hot": SamplingParams(temperature=1.7),
    "top-k": SamplingParams(temperature=1.2, top_k=6),
    "top-p": SamplingParams(temperature=0.9, top_p=0.8),
    "min-p": SamplingParams(min_p=0.1),
    "all": SamplingParams(temperature=1.4, top_k=12, top_p=0.9, min_p=0.02),
}


def expected(logits: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities [R, V] after temperature, top-k, top-p and min-p, one row at a time."""
    rows = []
    for row in logits.double():
        p = (row / params.temperature).softmax(-1)
        order = p.argsort(descending=True).tolist()
        kept = order[: params.top_k or len(order)]
        share = p[kept] / p[kept].sum()
        before = share.cumsum(0) - share
        kept = [t for t, mass in zip(kept, before.tolist(), strict=True) if mass < params.top_p]
        kept = [t for t in kept if p[t] >= params.min_p * p[order[0]]]
        rows.append(torch.zeros_like(p).index_copy(0, torch.tensor(kept), p[kept] / p[kept].sum()))
    return torch.stack(rows)


def likelihood(seen: Counter, probabilities: dict[object, Tensor]) -> float:
    """How likely counts of (context, token) are to be so far off, or further: the upper tail of chi-square.

    Tokens expected fewer than five times in a context are taken together.
    """
    totals: Counter = Counter()
    for (context, _), count in seen.items():
        totals[context] += count
    statistic, freedom = 0.0, 0
    for context, total in totals.items():
        wanted = (probabilities[context] * total).tolist()
        found = [seen[context, token] for token in range(len(wanted))]
        assert not any(f for f, w in zip(found, wanted, strict=True) if w == 0), "a token that the filters remove"
        often = [t for t, w in enumerate(wanted) if w >= 5]
        cells = [(found[t], wanted[t]) for t in often]
        rest = (total - sum(f for f, _ in cells), total - sum(w for _, w in cells))
        cells += [rest] if rest[1] >= 5 else []
        if len(cells) > 1:
            scale = sum(f for f, _ in cells) / sum(w for _, w in cells)
            statistic += sum((f - w * scale) ** 2 / (w * scale) for f, w in cells)
            freedom += len(cells) - 1
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()


def begun(params: SamplingParams, seed: int) -> Sequence:
    """A request over a chain in which each word depends on the one before."""
    request = Request((seed % WORDS,), replace(params, max_tokens=1_000_000), seed)
    return Sequence(Handle(request, has_text=False), context=10**9, end_tokens=frozenset(), tokenizer=None, counts=None)


Guess = Callable[[list[Sequence], Tensor, list[int]], list[list[int]]]


def likeliest(requests: list[Sequence], chain: Tensor, depths: list[int]) -> list[list[int]]:
    return _followed(requests, depths, lambda rows, words, at: chain[words].argmax(-1))


def drawn(requests: list[Sequence], chain: Tensor, depths: list[int]) -> list[list[int]]:
    """From another chain, with the requests' own noise, as drafters with a network do."""
    other = chain + chain.roll(1, dims=-1)
    return _followed(
        requests, depths, lambda rows, words, at: draw(other[words], [row.sampling_at(at) for row in rows])[0]
    )


def _followed(requests: list[Sequence], depths: list[int], choose: Callable[..., Tensor]) -> list[list[int]]:
    words = [torch.tensor([request.tokens[-1] for request in requests])]
    for at in range(max(depths)):
        words.append(choose(requests, words[-1], at))
    made = torch.stack(words[1:], 1).tolist() if max(depths) else [[] for _ in requests]
    return [draft[:depth] for draft, depth in zip(made, depths, strict=True)]


def shifted(requests: list[Sequence], chain: Tensor, depths: list[int]) -> list[list[int]]:
    """By place alone."""
    return [
        [(7 * len(request.tokens) + request.request.seed + i) % WORDS for i in range(depth)]
        for request, depth in zip(requests, depths, strict=True)
    ]


def walked(params: SamplingParams, chain: Tensor, guess: Guess, words: int, rows: int) -> tuple[Counter, float]:
    """Pairs of words that follow each other in so many words, and the share of drafts that stood."""
    dice, seen = Random(1), Counter()
    requests = [begun(params, seed) for seed in range(rows)]
    drafted = stood = made = 0
    while made < words:
        drafts = guess(requests, chain, [dice.randint(0, 4) for _ in requests])
        befores = [[request.tokens[-1], *draft] for request, draft in zip(requests, drafts, strict=True)]
        logits = chain[torch.tensor([word for before in befores for word in before])]
        given = [torch.tensor(d, dtype=torch.int64) if i % 2 else d for i, d in enumerate(drafts)]
        for request, draft, verdict in zip(
            requests, drafts, verify(logits, list(zip(requests, given, strict=True))), strict=True
        ):
            assert [token for token, _ in verdict.tokens[:-1]] == draft[: verdict.accepted]
            for token, logprobs in verdict.tokens:
                seen[request.tokens[-1], token] += 1
                request.append(token, logprobs)
            drafted, stood, made = drafted + len(draft), stood + verdict.accepted, made + len(verdict.tokens)
    return seen, stood / drafted


def chain() -> Tensor:
    return 1.5 * torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(5))


def expect_chain(name: str, guess: Guess, words: int, rows: int) -> None:
    params = CONFIGS[name]
    seen, rate = walked(params, chain(), guess, words, rows)
    assert sum(seen.values()) >= words
    assert rate > 0.01
    assert likelihood(seen, dict(enumerate(expected(chain(), params)))) > 1e-3


@pytest.mark.parametrize("guess", [likeliest, drawn, shifted])
@pytest.mark.parametrize("name", ["plain", "all"])
def test_verify(name, guess):
    expect_chain(name, guess, words=10_000, rows=64)


@pytest.mark.long
@pytest.mark.parametrize("guess", [likeliest, drawn, shifted])
@pytest.mark.parametrize("name", CONFIGS)
def test_verify_long(name, guess):
    expect_chain(name, guess, words=200_000, rows=256)


def test_the_test_would_notice():
    """A temperature a fifth off, and drafts that stand too often, are found out by as many words."""
    seen, _ = walked(CONFIGS["plain"], chain(), likeliest, 10_000, 64)
    assert likelihood(seen, dict(enumerate(expected(chain(), SamplingParams(temperature=1.2))))) < 1e-6
    for word in range(WORDS):
        seen[word, int(chain()[word].argmax())] += 40
    assert likelihood(seen, dict(enumerate(expected(chain(), CONFIGS["plain"])))) < 1e-6


@pytest.fixture(scope="module")
def small() -> Loaded:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    reference = transformers.LlamaForCausalLM(config)
    randomise(reference, spread=0.3)
    with TemporaryDirectory() as folder:
        return load(save(reference, Path(folder)), dtype="float32")


def expect_engine(loaded: Loaded, params: SamplingParams, requests: int) -> None:
    """Three words after one prompt, for many seeds: the second and third come out of rounds with drafts."""
    model, prompt, seen, starts = loaded.model, [3, 1, 4, 1, 5], Counter(), set()
    with torch.inference_mode():
        pool = pool_for(model, running=1)
        first = feed(model, pool, [(State(pool), prompt)])[0][-1:]
    favourite = expected(first, params)[0].argsort(descending=True)[:3].tolist()
    for drafts in (ModelDrafter(model, WORDS), Written(lambda text, most: favourite)):
        with Engine(loaded, draft=drafts, max_running=64) as engine:
            engine._loop.drafting.depth = Fixed(deepest=2)  # type: ignore[assignment]
            outputs = []
            for start in range(0, requests // 2, 512):
                seeds = range(2 * start + isinstance(drafts, Written), min(2 * start + 1024, requests), 2)
                handles = [engine.submit(prompt, replace(params, max_tokens=3, seed=seed)) for seed in seeds]
                outputs += [handle.result() for handle in handles]
            assert sum(output.usage.accepted_tokens for output in outputs) > 0.02 * len(outputs)
            for a, b, c in (output.tokens for output in outputs):
                seen.update([((), a), ((a,), b), ((a, b), c)])
                starts |= {(a,), (a, b)}
    probabilities: dict[object, Tensor] = {(): expected(first, params)[0]}
    for some in (list(starts)[at : at + 256] for at in range(0, len(starts), 256)):
        with torch.inference_mode():
            pool = pool_for(model, running=256)
            logits = feed(model, pool, [(State(pool), [*prompt, *words]) for words in some])
        probabilities |= dict(zip(some, expected(torch.stack([each[-1] for each in logits]), params), strict=True))
    assert likelihood(seen, probabilities) > 1e-3


def test_the_engine(small):
    expect_engine(small, CONFIGS["top-p"], requests=1_200)


@pytest.mark.long
@pytest.mark.parametrize("name", ["plain", "top-k", "all"])
def test_the_engine_long(small, name):
    expect_engine(small, CONFIGS[name], requests=12_000)
