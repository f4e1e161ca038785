"""The sampler against oracles written in plain Python, and its noise against what chance would give."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bough.config import SamplingParams
from bough.engine import noise, sampler
from bough.engine.noise import gumbel
from bough.engine.sampler import Biases, RowSampling, TokenCounts, resolve_seed, sample
from bough.errors import BadLogits, BoughError

MASK = 0xFFFFFFFF
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GREEDY = SamplingParams(temperature=0)


def row(index: int = 0, seed: int = 1, counts: TokenCounts | None = None, drafted=(), **options: Any) -> RowSampling:
    return row_of(SamplingParams(**options), index, seed, counts, drafted)


def row_of(params: SamplingParams, index: int, seed: int, counts: TokenCounts | None = None, drafted=(), **other: Any):
    device = "cpu" if counts is None else counts.written.device
    return RowSampling(params, seed, index, counts, Biases.wanted_by(params, device), drafted, **other)


def drawn(logits: list[float] | Tensor, draws: int, seed: int = 1, **options: Any) -> Tensor:
    """Tokens 0 .. draws of one request that always sees the same logits."""
    logits = torch.as_tensor(logits, dtype=torch.float32)
    rows = [row(index, seed, **options) for index in range(draws)]
    return sample(logits.expand(draws, -1), rows).ids


def chi_square(observed: Tensor, expected: Tensor) -> float:
    """How many standard deviations the statistic lies above its mean (its variance is twice its degrees)."""
    degrees = observed.numel() - 1
    statistic = ((observed.double() - expected) ** 2 / expected).sum().item()
    return (statistic - degrees) / math.sqrt(2 * degrees)


# Logits with many ties, which bfloat16 models produce all the time.
tied = st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=2, max_size=24)
distinct = st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=24)


def oracle_bits(seed: int, index: int, token: int) -> int:
    def mix64(x: int) -> int:
        x %= 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    def mix32(x: int) -> int:
        x = (x ^ x >> 16) * 0x7FEB352D & MASK
        x = (x ^ x >> 15) * 0x846CA68B & MASK
        return x ^ x >> 16

    step = 0x9E3779B97F4A7C15
    key = mix64(mix64(seed + step) + index * step)
    return mix32(mix32(token * 0x9E3779B1 + key & MASK) + (key >> 32) & MASK)


def uniforms(seeds: list[int], indices: list[int], count: int) -> Tensor:
    """The uniform numbers behind the noise, [R, count]."""
    noise = gumbel(seeds, indices, torch.arange(count, dtype=torch.int32)[None])
    return torch.exp(-torch.exp(-noise.double()))


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**31), st.lists(st.integers(0, 300_000), min_size=1, max_size=8))
@settings(max_examples=100)
def test_noise_is_the_stated_function_of_seed_index_and_token(seed: int, index: int, tokens: list[int]) -> None:
    found = gumbel([seed], [index], torch.tensor([tokens], dtype=torch.int32))[0].tolist()
    for token, drawn in zip(tokens, found, strict=True):
        # As signed 32-bit numbers, counted from the lowest.
        uniform = ((oracle_bits(seed, index, token) + 2**31 & MASK) + 0.5) / 2**32
        assert drawn == pytest.approx(-math.log(-math.log(uniform)), rel=1e-6, abs=1e-6)


def test_noise_is_finite_at_both_ends() -> None:
    low, high = noise._to_gumbel(torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32)).tolist()
    assert low == pytest.approx(-math.log(33 * math.log(2)), abs=1e-5)
    assert high == pytest.approx(33 * math.log(2), abs=1e-5)


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_noise_is_uniform(seed: int) -> None:
    found = uniforms([seed] * 16, list(range(16)), 1 << 16).flatten()
    cells = 1024
    counts = torch.bincount((found * cells).long(), minlength=cells)
    assert abs(chi_square(counts, torch.full((cells,), found.numel() / cells))) < 5
    tail = (found > 1 - 2.0**-14).sum().item()  # the end that wins draws
    assert abs(tail - 64) < 5 * 8


NEIGHBOURS = {
    "index i and i + 1": lambda u: (u([7] * 8, list(range(8))), u([7] * 8, list(range(1, 9)))),
    "index i and i + 256": lambda u: (u([7] * 8, list(range(8))), u([7] * 8, list(range(256, 264)))),
    "tokens v and v + 1": lambda u: (u([7] * 8, list(range(8)))[:, :-1], u([7] * 8, list(range(8)))[:, 1:]),
    "tokens v and v + 256": lambda u: (u([7] * 8, list(range(8)))[:, :-256], u([7] * 8, list(range(8)))[:, 256:]),
    "seed and index swapped": lambda u: (u(list(range(8, 16)), list(range(8))), u(list(range(8)), list(range(8, 16)))),
} | {
    f"seeds that differ in bit {bit}": lambda u, bit=bit: (
        u(list(range(8)), [3] * 8),
        u([seed ^ (1 << bit) for seed in range(8)], [3] * 8),
    )
    for bit in (0, 1, 31, 32, 62)
}


@pytest.mark.parametrize("pair", NEIGHBOURS)
def test_neighbouring_noise_is_independent(pair: str) -> None:
    first, second = NEIGHBOURS[pair](lambda seeds, indices: uniforms(seeds, indices, 1 << 15))
    cells = 32
    joint = (first * cells).long() * cells + (second * cells).long()
    counts = torch.bincount(joint.flatten(), minlength=cells * cells)
    assert abs(chi_square(counts, torch.full((cells * cells,), joint.numel() / cells**2))) < 5
    correlation = torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1].item()
    assert abs(correlation) < 5 / math.sqrt(first.numel())


@given(st.one_of(tied, distinct))
def test_greedy_takes_the_likeliest_and_of_equals_the_first(logits: list[float]) -> None:
    assert sample(torch.tensor([logits]), [RowSampling(GREEDY, 5, 0)]).tokens == [logits.index(max(logits))]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, 1.0, -1.0, -2.0, 0.5, -3.0])
    draws = 20_000
    counts = torch.bincount(drawn(logits, draws, temperature=temperature), minlength=8)
    assert chi_square(counts, (logits / temperature).double().softmax(-1) * draws) < 5


def test_tokens_follow_the_filtered_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, 1.0, -1.0, -2.0, 0.5, -3.0])
    draws = 20_000
    counts = torch.bincount(drawn(logits, draws, temperature=0.8, top_k=5, top_p=0.9), minlength=8)
    kept = [0, 1, 3, 6]  # of the five likeliest, which have 0.643, 0.184, 0.184, 0.099, 0.053 over 1.163
    assert counts.nonzero().flatten().tolist() == kept
    assert chi_square(counts[kept], (logits[kept] / 0.8).double().softmax(-1) * draws) < 5


def test_a_tiny_temperature_is_greedy_up_to_equals() -> None:
    assert set(drawn([1.0, 3.0, 2.9999, 3.0], 200, temperature=1e-60).tolist()) == {1, 3}


def test_masked_tokens_are_never_drawn() -> None:
    logits = [-math.inf, 0.0, -math.inf, 1.0]
    for options in ({}, {"top_k": 3}, {"top_p": 0.999}, {"min_p": 1e-9}, {"temperature": 100.0}):
        assert set(drawn(logits, 200, **options).tolist()) == {1, 3}


def test_seeds_repeat_and_differ() -> None:
    logits = torch.zeros(64)
    assert torch.equal(drawn(logits, 50, seed=3), drawn(logits, 50, seed=3))
    assert not torch.equal(drawn(logits, 50, seed=3), drawn(logits, 50, seed=4))
    assert resolve_seed(SamplingParams(seed=11)) == 11
    assert resolve_seed(SamplingParams()) != resolve_seed(SamplingParams())


def oracle_support(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens that may be drawn: top-k with lower ids first among equals, then top-p and min-p by value."""
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    ranked = ranked[: top_k or len(ranked)]
    weight = {token: math.exp((logits[token] - logits[ranked[0]]) / temperature) for token in ranked}
    total = math.fsum(weight.values())
    return {
        token
        for token in ranked
        if math.fsum(w for w in weight.values() if w > weight[token]) < top_p * total and weight[token] >= min_p
    }


def support(logits: list[float], **options: Any) -> set[int]:
    """The tokens that the sampler lets through, read off its scores rather than off many draws."""
    params = SamplingParams(**options)
    ids, kept = sampler._candidates(torch.tensor([logits]), [params.top_k])
    logp = (kept - max(logits)) / params.temperature
    allowed = (logp >= sampler._bound(logp, [params])) & (logp > -math.inf)
    return set(ids[allowed].tolist())


@given(tied, st.sampled_from([0.5, 1.0, 2.0]), st.integers(0, 30), st.floats(0.01, 1), st.sampled_from([0, 0.1, 0.9]))
def test_filters_keep_what_the_oracle_keeps(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    wanted = oracle_support(logits, **options)
    # A threshold within rounding of a token's own value may go either way; all others must agree.
    nearby = [
        oracle_support(logits, **(options | {"top_p": min(1.0, top_p * scale), "min_p": min_p * scale}))
        for scale in (1 - 1e-6, 1 + 1e-6)
    ]
    found = support(logits, **options)
    assert found in (wanted, *nearby)
    assert set(drawn(logits, 32, **options).tolist()) <= found


@given(distinct, st.integers(1, 30))
def test_top_k_keeps_exactly_k(logits: list[float], top_k: int) -> None:
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    assert support(logits, top_k=top_k) == set(ranked[:top_k])


def test_each_row_has_its_own_top_k() -> None:
    tokens = sample(torch.zeros(400, 8), [row(index, top_k=1 + index % 4) for index in range(400)]).tokens
    assert [set(tokens[first::4]) for first in range(4)] == [{0}, {0, 1}, {0, 1, 2}, {0, 1, 2, 3}]


def test_ties() -> None:
    equal = [1.0, 0.0, 1.0, 0.0, -0.0, 1.0]
    assert support(equal, top_k=2) == {0, 2}  # lower ids first
    assert support(equal, top_k=4) == {0, 1, 2, 5}
    assert support(equal, top_p=0.01) == {0, 2, 5}  # together or not at all
    assert support(equal, min_p=1.0) == {0, 2, 5}
    assert support(equal, top_k=2, top_p=0.01) == {0, 2}


def test_top_p_over_a_large_vocabulary() -> None:
    logits = torch.randn(50_000, generator=torch.Generator().manual_seed(0)) * 3
    probability, order = logits.double().softmax(-1).sort(descending=True)
    counts = [int((probability.cumsum(-1) - probability < top_p).sum()) for top_p in (0.1, 0.99, 0.999)]
    assert counts[0] < sampler.NUCLEUS < counts[1]  # found without sorting them all, and not
    for top_p, count in zip((0.1, 0.99, 0.999), counts, strict=True):
        assert support(logits.tolist(), top_p=top_p) == set(order[:count].tolist())


def oracle_penalised(logits: list[float], prompt: list[int], written: list[int], params: SamplingParams) -> list[float]:
    result = list(logits)
    for token in {*prompt, *written}:
        factor = params.repetition_penalty
        result[token] = result[token] / factor if result[token] > 0 else result[token] * factor
    for token in set(written):
        result[token] -= params.frequency_penalty * written.count(token) + params.presence_penalty
    return result


tokens = st.lists(st.integers(0, 7), max_size=12)


@given(
    st.lists(st.floats(-10, 10, width=32), min_size=8, max_size=8),
    tokens,
    tokens,
    tokens,
    st.floats(0.5, 2, width=16),
    st.floats(-2, 2, width=16),
    st.floats(-2, 2, width=16),
)
@settings(max_examples=50)
def test_penalties_equal_the_oracle(
    logits: list[float],
    prompt: list[int],
    written: list[int],
    draft: list[int],
    repeat: float,
    often: float,
    ever: float,
) -> None:
    params = SamplingParams(temperature=0, repetition_penalty=repeat, frequency_penalty=often, presence_penalty=ever)
    counts = TokenCounts.wanted_by(params, prompt, 8, "cpu")
    if counts is None:
        assert (repeat, often, ever) == (1, 0, 0)
        return
    counts.add(written)
    # Verifying a draft: position j also counts the first j drafted tokens.
    rows = [row_of(params, len(written) + j, 1, counts, draft[:j]) for j in range(len(draft) + 1)]
    found = sampler._penalise(torch.tensor([logits] * len(rows)), rows)
    wanted = torch.tensor([oracle_penalised(logits, prompt, written + draft[:j], params) for j in range(len(rows))])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert sample(torch.tensor([logits] * len(rows)), rows).tokens == found.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 3, "logprobs": 1}, {"repetition_penalty": 1.7}])
def test_biases_are_added_before_all_else(dtype: torch.dtype, options: dict[str, float]) -> None:
    """What is drawn is what logits with the biases in them would give; what is told of the model is without."""
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(3)).to(dtype)
    before, biases = logits.clone(), {3: 1.5, 39: -100.0, 0: 0.25}
    allowed = torch.tensor([0b11111101, 255, 255, 255, 255], dtype=torch.uint8)  # all but 1

    def row(index: int, bias: dict[int, float]) -> RowSampling:
        params = SamplingParams(**{"temperature": 1.0, **options}, logit_bias=bias)
        counts = TokenCounts.wanted_by(params, [3, 7], 40, "cpu")
        return row_of(params, index, 8, counts, allowed=allowed if index % 2 else None)

    found = sample(logits, [row(index, biases if index else {}) for index in range(6)])
    moved = logits.to(torch.float32, copy=True)
    for token, bias in biases.items():
        moved[1:, token] += bias
    assert found.tokens == sample(moved, [row(index, {}) for index in range(6)]).tokens
    assert logits.equal(before)
    if "logprobs" in options:
        plain = torch.log_softmax(logits.float(), -1)
        expected = [plain[index, token].item() for index, token in enumerate(found.tokens)]
        assert [each.chosen for each in found.logprobs] == pytest.approx(expected, abs=1e-5)


def test_penalties_change_greedy_and_noisy_tokens() -> None:
    logits = torch.tensor([[3.0, 2.5, -1.0]])
    for options in ({"repetition_penalty": 2.0}, {"presence_penalty": 1.0}, {"frequency_penalty": 0.5}):
        counts = TokenCounts([2], 3, "cpu")
        counts.add([0, 0])
        assert sample(logits, [row(temperature=0, counts=counts, **options)]).tokens == [1]
        assert sample(logits, [row(temperature=1e-3, counts=counts, **options)]).tokens == [1]
    assert logits.tolist() == [[3.0, 2.5, -1.0]]  # the caller's logits stay as they were


def test_counts_fold_and_fork() -> None:
    params = SamplingParams(temperature=0, frequency_penalty=0.25)
    counts = TokenCounts([0], 4, "cpu")
    for _ in range(TokenCounts.FOLD + 3):
        counts.add([1])
    assert counts.recent == [1] * 3
    twin = counts.fork()
    counts.add([2] * TokenCounts.FOLD)
    twin.add([3])
    written = [[0, TokenCounts.FOLD + 3, TokenCounts.FOLD, 0], [0, TokenCounts.FOLD + 3, 0, 1]]
    found = sampler._penalise(torch.zeros(2, 4), [RowSampling(params, 1, 0, each) for each in (counts, twin)])
    assert torch.equal(found, torch.tensor(written) * -0.25)


def test_counts_go_with_penalties() -> None:
    assert TokenCounts.wanted_by(SamplingParams(), [1], 4, "cpu") is None
    with pytest.raises(AssertionError):
        row(presence_penalty=1.0)


def mixed_rows(vocabulary: int, device: str = "cpu") -> list[RowSampling]:
    def counted(**options: Any) -> RowSampling:
        counts = TokenCounts([1, 2, 3], vocabulary, device)
        counts.add([4, 4, 5])
        return row(9, 3, counts, (6, 7), **options)

    return [
        row(temperature=0),
        row(3, 77),
        row(3, 78, temperature=0.3),
        row(4, 5, top_k=5, logprobs=3),
        row(5, 5, top_k=50, top_p=0.6),
        row(6, 6, top_p=0.7, logprobs=0),
        row(7, 7, top_p=0.7, min_p=0.05),
        row(8, 8, min_p=0.2, logprobs=8),
        row(9, 9, top_k=10 * vocabulary),
        counted(temperature=0, repetition_penalty=1.3, logprobs=2),
        counted(presence_penalty=0.7, top_k=7),
        counted(frequency_penalty=0.2, repetition_penalty=0.9, top_p=0.9),
        row(temperature=0, logit_bias={0: 2.5, vocabulary - 1: 3.5}, logprobs=2),
        counted(presence_penalty=0.7, top_k=7, logit_bias={4: 3, 7: -1}),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows_at_once", [1, 4, 1000])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_a_row_gets_what_it_gets_alone(
    device: str, rows_at_once: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocabulary = 1501  # odd, so that rows start at every alignment
    monkeypatch.setattr(sampler, "MAX_ELEMENTS", rows_at_once * vocabulary)
    rows = mixed_rows(vocabulary, device)
    for trial in range(4):
        logits = torch.randn(len(rows), vocabulary, generator=torch.Generator().manual_seed(trial)) * 2
        logits = logits.to(device, dtype)
        ids, scores = sampler.draw(logits, rows)
        together = sample(logits, rows)
        assert together.tokens == together.ids.tolist() == ids.tolist()
        for order in (list(range(len(rows))), list(range(0, len(rows), 3)), list(reversed(range(len(rows))))):
            part = sample(logits[order], [rows[r] for r in order])
            assert part.tokens == [together.tokens[r] for r in order]
            assert part.logprobs == [together.logprobs[r] for r in order]
        for r, each in enumerate(rows):
            alone_ids, alone_scores = sampler.draw(logits[r : r + 1].clone(), [each])
            assert torch.equal(alone_ids, ids[r : r + 1]) and torch.equal(alone_scores, scores[r : r + 1])
            assert sample(logits[r : r + 1], [each]).logprobs == [together.logprobs[r]]


def test_low_precision_logits_are_computed_in_float32() -> None:
    rows = mixed_rows(500)
    logits = (torch.randn(len(rows), 500, generator=torch.Generator().manual_seed(3)) * 4).bfloat16()
    low, full = sample(logits, rows), sample(logits.float(), rows)
    assert (low.tokens, low.logprobs) == (full.tokens, full.logprobs)


def test_no_rows() -> None:
    assert sample(torch.zeros(0, 5), []).tokens == []


@given(st.one_of(tied, distinct), st.integers(0, 30), st.sampled_from([0.0, 1.0]))
@settings(max_examples=50)
def test_logprobs_are_the_models_own(logits: list[float], count: int, temperature: float) -> None:
    options = {"temperature": temperature, "top_k": 2, "presence_penalty": 1.5, "logprobs": count}
    found = sample(torch.tensor([logits]), [row(counts=TokenCounts([0], len(logits), "cpu"), **options)])
    wanted = torch.log_softmax(torch.tensor(logits), -1).tolist()
    report = found.logprobs[0]
    assert report is not None
    assert report.chosen == pytest.approx(wanted[found.tokens[0]], abs=2e-6)
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:count]
    assert [token for token, _ in report.top] == ranked
    assert [value for _, value in report.top] == pytest.approx([wanted[token] for token in ranked], abs=2e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_logits_name_their_rows(bad: float) -> None:
    options = [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"top_k": 4, "top_p": 0.5, "min_p": 0.1}]
    rows = [row(logprobs=2, **each) for each in options for _ in range(2)]
    logits = torch.zeros(len(rows), 8)
    logits[1::2] = bad
    with pytest.raises(BadLogits, match="not finite") as raised:
        sample(logits, rows)
    assert isinstance(raised.value, BoughError)
    assert raised.value.rows == [1, 3, 5, 7, 9]
    sample(logits[::2], rows[::2])  # the others go on


def test_one_nan_is_enough() -> None:
    logits = torch.zeros(2, 8)
    logits[1, 5] = math.nan
    for options in ({"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.5}):
        with pytest.raises(BadLogits) as raised:
            sample(logits, [row(**options)] * 2)
        assert raised.value.rows == [1]


@needs_gpu
def test_noise_is_the_same_on_the_gpu() -> None:
    ids = torch.arange(150_000, dtype=torch.int32)[None]
    seeds, indices = [0, 1, 2**62 + 12345], [0, 7, 100_000]
    assert torch.equal(gumbel(seeds, indices, ids), gumbel(seeds, indices, ids.cuda()).cpu())


@needs_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_drawing_does_not_wait_for_the_gpu() -> None:
    rows = mixed_rows(1000, "cuda")
    logits = torch.randn(len(rows), 1000, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        ids, _ = sampler.draw(logits, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ids.tolist() == sample(logits, rows).tokens
