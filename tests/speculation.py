"""Engines that speculate beside those that do not: tiny models of all families, drafters of all characters.

The oracle is a plain engine that is asked the same. Tokens must be equal; where the target's choice hangs by less than
float32 can tell, the comparison of that request ends there, and is counted.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
import transformers
from parity import feed, pool_for, random_tokens, randomise, remember, save
from test_assistant import assistant
from test_gemma4 import gemma4
from test_mechanism_families import FAMILIES
from test_mechanism_families import SMALL as TINY
from test_mtp import EXPERTS, SMALL, folder_with_head, mtp_tensors

from bough import CacheConfig, Engine, SamplingParams
from bough.cache.tree import Tier
from bough.draft import Drafter, Grown, Wanted
from bough.draft.assistant import AssistantDrafter
from bough.draft.model import ModelDrafter
from bough.draft.mtp import MTPDrafter, MTPHead
from bough.draft.ngram import NGram
from bough.engine import drafting as drafting_module
from bough.engine.load import Loaded, load
from bough.engine.request import Output
from bough.engine.sampler import Biases, RowSampling, TokenCounts, draw
from bough.models.gemma4_assistant import load_assistant
from bough.state.live import State

VOCABULARY = 97
WITH_HEAD = ("qwen3_next", "qwen3_5")
USED = ("llama", "mistral", "qwen3", "gemma3", "gemma4", "lfm2", *WITH_HEAD)
TIE = 5e-4  # of logits: a choice that so little changes may go either way


@cache
def target(family: str) -> Loaded:
    """A tiny random model; those of Qwen3-Next and Qwen3.5 have a head that drafts."""
    with TemporaryDirectory() as folder:
        return load(_saved(family, Path(folder)), dtype="float32")


def _saved(family: str, folder: Path) -> Path:
    torch.manual_seed(0)
    if family == "gemma4":
        return save(gemma4(), folder)
    if family not in WITH_HEAD:
        kind, options = FAMILIES[family]
        options = {**TINY, **options, "vocab_size": VOCABULARY, "max_position_embeddings": 256, "eos_token_id": 2}
        reference = transformers.AutoModelForCausalLM.from_config(kind(**options))
        randomise(reference, spread=0.2)
        return save(reference, folder)
    sparse = family == "qwen3_next"
    config = (
        transformers.Qwen3NextConfig(**SMALL, **EXPERTS, eos_token_id=2)
        if sparse
        else transformers.Qwen3_5TextConfig(**SMALL, eos_token_id=2)
    )
    reference = transformers.AutoModelForCausalLM.from_config(config)
    remember(reference)
    return folder_with_head(folder, reference, mtp_tensors(sparse=sparse))


class Written:
    """Drafts by what a function makes of the text so far. Keeps nothing but texts."""

    kinds, lag, reads_hidden = (), 0, False

    def __init__(self, guess: Callable[[list[int], int], object]) -> None:
        self.guess, self.texts = guess, {}  # type: ignore[var-annotated]

    def committed(self, rows: Sequence[Grown]) -> None:
        for row in rows:
            self.texts.setdefault(row.sequence, []).extend(row.tokens)

    def propose(self, rows: Sequence[Wanted], choose: object) -> list:
        return [self.guess(self.texts[row.sequence], row.most) for row in rows]

    def close(self, sequence: int) -> None:
        self.texts.pop(sequence, None)


class Right:
    """Continues the texts it was given: what a plain run wrote."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.known = [list(text) for text in texts]

    def __call__(self, text: list[int], most: int) -> list[int]:
        rest = next((each[len(text) :] for each in self.known if each[: len(text)] == text), [])
        return rest[:most]


def wild(right: Right, seed: int) -> Callable[[list[int], int], object]:
    """Now right, now wrong or half right, too long, no tokens at all, on a device, or of another type."""
    dice = Random(seed)

    def guess(text: list[int], most: int) -> object:
        good = right(text, 40)
        kept = dice.randint(0, len(good))
        draft = [*good[:kept], *(dice.randrange(VOCABULARY) for _ in range(dice.randint(0, 40)))]
        if dice.random() < 0.3:
            draft.insert(dice.randint(0, len(draft)), dice.choice([-1, VOCABULARY, 10**12, -(10**12)]))
        return dice.choice([draft, tuple(draft), torch.tensor(draft, dtype=torch.int64), draft[:most]])

    return guess


def drafter(name: str, family: str, texts: Sequence[Sequence[int]]) -> Drafter:
    """A drafter by name, for a target that wrote these texts when nobody drafted."""
    model, right = target(family).model, Right(texts)
    match name:
        case "ngram":
            return NGram()
        case "mtp":
            return MTPDrafter(MTPHead(model))
        case "assistant":
            with TemporaryDirectory() as folder:
                loaded = load_assistant(save(assistant(model.hidden_size), Path(folder)), model)
            return AssistantDrafter(loaded, model)
        case "itself":
            return ModelDrafter(model, VOCABULARY)
        case "another":
            return ModelDrafter(target("lfm2" if family != "lfm2" else "gemma3").model, VOCABULARY)
        case "right":
            return Written(right)
        case "wrong":
            return Written(lambda text, most: [(token + 1) % VOCABULARY for token in right(text, most)])
        case "wild":
            return Written(wild(right, seed=1))
    raise AssertionError(name)


def drafters_of(family: str) -> list[str]:
    own = {"gemma4": ["assistant"], "qwen3_next": ["mtp"], "qwen3_5": ["mtp"]}
    return ["ngram", *own.get(family, []), "itself", "another", "right", "wrong", "wild"]


class Dice:
    """Depths at random instead of the fastest ones."""

    def __init__(self, seed: int = 0, deepest: int = 8) -> None:
        self.dice, self.deepest = Random(seed), deepest

    def begin(self, *, greedy: bool) -> "Dice":
        return self

    def choose(self, rows: int, most: int) -> int:
        return min(most, self.dice.randint(0, self.deepest))

    def observe(self, depth: int, accepted: int, seconds: float, rows: int) -> None:
        assert 0 <= accepted <= depth <= self.deepest


class Fixed(Dice):
    """Always as deep as may be."""

    def choose(self, rows: int, most: int) -> int:
        return min(most, self.deepest)


@contextmanager
def engine(
    family: str,
    draft: Drafter | None = None,
    depth: Dice | None = None,
    *,
    page_tokens: int = 4,
    device_bytes: int | None = None,
    patience: float = 60,  # a busy machine is no failure
    **options,
) -> Iterator[Engine]:
    """An engine that must have lost nothing at the end, neither memory nor its drafter."""
    cached = CacheConfig(page_tokens=page_tokens, device_bytes=device_bytes)
    with (
        patch.object(drafting_module, "PATIENCE", patience),
        Engine(target(family), cache=cached, draft=draft, **{"max_running": 6, **options}) as made,
    ):
        empty = made.call(lambda: used(made))
        drafting = made._loop.drafting
        if depth is not None:
            drafting.depth = depth  # type: ignore[assignment]
        yield made
        assert drafting.failure is None, drafting.failure
        expect_idle(made)
        clear(made)
        assert made.call(lambda: used(made)) == empty, "something leaked"


def used(engine: Engine) -> list[int]:
    return [store.used for pool in engine._runner.pool.arena.pools for store in pool.stores]


def expect_idle(engine: Engine) -> None:
    """Nothing is running, so nothing is lent but what the caches hold, and drafters remember no text."""
    engine.check()
    drafting = engine._loop.drafting

    def look() -> None:
        assert not drafting._sides
        assert not any(pool.states for pool in engine._runner.pool.arena.pools)
        for name in ("texts", "_texts", "_last"):
            assert not getattr(drafting.drafter, name, None), f"{name} of sequences that have ended"
        if drafting.cache is not None:
            drafting.cache.check()

    engine.call(look)


def clear(engine: Engine) -> None:
    engine.cache.clear()
    cached = engine._loop.drafting.cache
    if cached is not None:
        engine.call(cached.clear)
    engine.check()


def held(engine: Engine) -> set[tuple]:
    """What the cache holds: salts, texts, and whether they can be resumed at."""

    def look() -> set[tuple]:
        nodes = set()
        for node in engine._loop.cache.tree.walk():
            text = tuple(symbol for each in node.path() for symbol in each.symbols.tolist())
            copy = node.copies[Tier.DEVICE]
            nodes.add((node.root().salt, text, copy is not None, copy is not None and copy.resumes))
        return nodes

    return engine.call(look)


def expect_same(family: str, params: SamplingParams, prompt: Sequence[int], plain: Output, ours: Output) -> bool:
    """The same tokens, and all that depends on them. False: up to a tie."""
    for at, (expected, token) in enumerate(zip(plain.tokens, ours.tokens, strict=False)):
        if expected != token:
            assert is_tie(family, params, prompt, plain.tokens[:at]), f"token {at}: {token} instead of {expected}"
            return False
    assert (ours.tokens, ours.finish_reason, ours.text) == (plain.tokens, plain.finish_reason, plain.text)
    assert len(ours.logprobs) == len(plain.logprobs)
    for mine, theirs in zip(ours.logprobs, plain.logprobs, strict=True):
        assert abs(mine.chosen - theirs.chosen) < 1e-3
        assert all(abs(a[1] - b[1]) < 1e-3 for a, b in zip(mine.top, theirs.top, strict=True))
    assert 0 <= ours.usage.accepted_tokens <= ours.usage.drafted_tokens
    assert ours.usage.accepted_tokens <= ours.usage.completion_tokens == len(ours.tokens)
    return True


@torch.inference_mode()
def is_tie(family: str, params: SamplingParams, prompt: Sequence[int], written: Sequence[int]) -> bool:
    """Whether the next token hangs by less than float32 can tell: noise on the logits changes it."""
    model = target(family).model
    pool = pool_for(model)
    logits = feed(model, pool, [(State(pool), [*prompt, *written])])[0][-1]
    counts = TokenCounts.wanted_by(params, prompt, VOCABULARY, "cpu")
    if counts is not None:
        counts.add(written)
    assert params.seed is not None or params.temperature == 0
    row = RowSampling(params, params.seed or 0, len(written), counts, Biases.wanted_by(params, "cpu"))
    noise = TIE * torch.randn(64, VOCABULARY, generator=torch.Generator().manual_seed(0))
    return len(draw(logits + noise, [row] * 64)[0].unique()) > 1


def prompt_of(length: int, seed: int) -> list[int]:
    return [3 + token % (VOCABULARY - 3) for token in random_tokens(VOCABULARY, length, seed)]
