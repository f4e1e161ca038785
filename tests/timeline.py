"""Random timelines of requests through an engine with a cache, and what an engine without one answers to each.

Every answer is asked for with the logprobs of the whole vocabulary, so that two are compared by the distribution of
each of their tokens and not by the tokens alone: a state that is slightly wrong shows at once.
"""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from parity import TIE, randomise, remember, save
from test_mechanism_families import FAMILIES, SMALL

from bough import CacheConfig, Engine, SamplingParams
from bough.cache.tree import Tier
from bough.engine.load import Loaded
from bough.engine.noise import gumbel
from bough.engine.request import Handle, Output
from bough.models.load import load_model
from bough.state import capacity
from bough.state.layout import Layout
from bough.state.snapshot import Snapshot

VOCABULARY = SMALL["vocab_size"]
CLOSE = 1e-3  # logprobs of float32 models in another order of summation
END = 7  # the token that ends a reply
LONGEST = 72  # tokens of a request in a timeline, the reply included


@cache
def loaded(family: str) -> Loaded:
    """A tiny random model of a family, in float32, with margins that rounding does not cross."""
    kind, options = FAMILIES[family]
    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(kind(**{**SMALL, **options}, max_position_embeddings=512))
    randomise(reference.eval(), spread=0.15)
    remember(reference)
    with TemporaryDirectory() as folder:
        model = load_model(save(reference, Path(folder)), dtype="float32")
    return Loaded(family, model, None, frozenset({END}), SamplingParams(temperature=0))


def engine(family: str, *, running: int = 4, step: int = 512, context: int = 256, **options) -> Engine:
    cached = CacheConfig(**{"page_tokens": 4, "device_bytes": 4 << 20, **options})
    return Engine(loaded(family), cache=cached, max_running=running, step_tokens=step, context=context)


def room(family: str, tokens: int, *, page_tokens: int, running: int, step: int = 512) -> int:
    """Bytes that hold one sequence of so many tokens, and what all that may run need in any case."""
    model = loaded(family).model
    layout = Layout.of(model.kinds, page_tokens=page_tokens, dtype=model.dtype)
    return capacity.slabs(layout, 1, tokens, min(step, tokens), running) * layout.slab_bytes


@cache
def plain(family: str) -> Engine:
    """The engine that keeps nothing."""
    return engine(family, enabled=False)


@cache
def expected(family: str, prompt: tuple[int, ...], params: SamplingParams) -> Output:
    """What a from-scratch run answers. A salt changes nothing about that."""
    return plain(family).generate(list(prompt), replace(params, cache_salt=None))


def params(tokens: int = 6, seed: int | None = None, salt: str | None = None, **options) -> SamplingParams:
    temperature = 0.0 if seed is None else 0.8
    named = {"temperature": temperature, "seed": seed, "cache_salt": salt, "logprobs": VOCABULARY, **options}
    return SamplingParams(max_tokens=tokens, **named)


def agrees(family: str, prompt: Iterable[int], asked: SamplingParams, out: Output) -> bool:
    """Assert that this is the right answer; False: so it is up to a tie of two tokens."""
    right = expected(family, tuple(prompt), asked)
    cut = out.finish_reason == "cancelled"
    for i, (token, logprobs) in enumerate(zip(out.tokens, out.logprobs, strict=True)):
        ours, theirs = dict(logprobs.top), dict(right.logprobs[i].top)
        error = max(abs(ours[each] - theirs[each]) for each in theirs)
        assert error < CLOSE, f"logprobs of token {i} after {len(tuple(prompt))} differ by {error:.2e}"
        if token != right.tokens[i]:
            assert _margin(asked, theirs, i) < TIE, f"token {i} is {token}, not {right.tokens[i]}"
            return False
    assert out.tokens == right.tokens[: len(out.tokens)] if cut else out.tokens == right.tokens
    assert cut or out.finish_reason == right.finish_reason
    return True


def _margin(asked: SamplingParams, logprobs: dict[int, float], index: int) -> float:
    """By how much the token drawn won."""
    ids = torch.arange(VOCABULARY, dtype=torch.int32)
    scores = torch.tensor([logprobs[int(each)] for each in ids])
    if asked.temperature:
        scores = scores / asked.temperature + gumbel([asked.seed or 0], [index], ids[None])[0]
    first, second = scores.topk(2).values.tolist()
    return first - second


class Watched:
    """What an engine feeds its model, and requests to be cancelled after so many steps; checks it before each step."""

    def __init__(self, watched: Engine) -> None:
        self.engine, self.fed, self.steps = watched, 0, 0
        self.cancels: list[tuple[Handle, int]] = []
        self._forward = watched._runner.forward
        watched._runner.forward = self._watch  # type: ignore[method-assign]

    def _watch(self, batch, *rest, **options):
        self.steps += 1
        self.fed += sum(len(tokens) for _, tokens in batch)
        for handle, at in self.cancels:
            if at <= self.steps:
                handle.cancel()
        self.engine._check()
        return self._forward(batch, *rest, **options)

    def ask(self, requests: list[tuple[list[int], SamplingParams]], cancels: list[int | None] | None = None) -> list:
        """Submit all before the engine sees the first; the outputs. Some are cancelled in a step from now on."""
        gate = threading.Event()
        self.engine._loop._put(gate.wait)
        handles = [self.engine.submit(prompt, asked) for prompt, asked in requests]
        self.cancels = [
            (handle, self.steps + at) for handle, at in zip(handles, cancels or [], strict=False) if at is not None
        ]
        gate.set()
        return [handle.result() for handle in handles]


def audit(checked: Engine, *, tampered: bool = False) -> None:
    """Assert every invariant there is, with no request on its way. Files tampered with may have any size."""
    checked.check()
    checked.call(lambda: _audit(checked, tampered))
    for name, each in checked.cache.stats()["bytes"].items():
        assert each["used"] <= each["of"], f"{name} holds {each['used']} bytes of {each['of']}"


def _audit(checked: Engine, tampered: bool) -> None:
    found = checked._loop.cache
    tiers = found.tiers
    if tiers.host is not None:
        tiers.host.check()
        assert tiers.host.free_bytes >= 0
    if tiers.shelf is not None and not tampered:
        tiers.shelf.disk.check()
    for node in found.tree.walk():
        assert not node.pins, f"{node} is pinned, and nobody is there"
        for tier in (Tier.DEVICE, Tier.HOST):
            copy = node.copies[tier]
            if copy is not None:
                assert isinstance(copy, Snapshot)
                copy.check()
                assert (copy.start, copy.end) == (node.start, node.end), f"{node} has a copy of another edge"
        if (disk := node.copies[Tier.DISK]) is not None:
            assert disk.parts[0].start == node.start and disk.parts[-1].end == node.end, f"{node}: parts are missing"
            joints = zip(disk.parts, disk.parts[1:], strict=False)
            assert all(left.end == right.start for left, right in joints), f"{node}: parts do not follow each other"
    running = [*checked._loop._running, *checked._loop._waiting]
    assert not running and not tiers._loads, "somebody is still there"


def empty(checked: Engine) -> None:
    """Assert that clearing leaves nothing."""
    checked.cache.clear()
    audit(checked)
    tiers = checked._loop.cache.tiers
    assert checked._loop.cache.tree.size == 0 and not checked._loop.cache.tree.roots
    for pool in (tiers.device, tiers.host):
        if pool is not None:
            assert all(store.used == 1 for store in pool.stores), "something leaked"
    if tiers.shelf is not None:
        checked.call(tiers.take_news)
        assert not tiers.shelf.references and not tiers.shelf.disk.extents, "extents are left"


@dataclass(frozen=True)
class Talk:
    """A conversation: all its tokens, where its replies are, and whose it is."""

    tokens: tuple[int, ...]
    replies: tuple[tuple[int, int], ...]
    salt: str | None


class Timeline:
    """Conversations, and the things their users do."""

    def __init__(self, family: str, seed: int, folder: Path, options: dict[str, Any] | None = None) -> None:
        self.family, self.dice = family, Random(seed)
        self.options = options or self._some_options(folder)
        self.requests = self.cached = self.ties = self.cancelled = self.restarts = 0
        self.counters: dict[str, int] = {}
        self.systems = [self.some(self.dice.choice([1, 5, 9, 17])) for _ in range(3)]
        self.talks: list[Talk] = []
        self.open()

    def _some_options(self, folder: Path) -> dict[str, Any]:
        family, dice = self.family, self.dice
        sized = {"page_tokens": dice.choice([1, 3, 4, 4, 8]), "running": dice.choice([1, 2, 4])}
        sized["step"] = dice.choice([7, 16, 512])
        options = {**sized, "policy": dice.choice(["value", "lru"])}
        options["device_bytes"] = int(room(family, LONGEST, **sized) * dice.choice([1, 1.3, 2, 8]))
        if dice.random() < 0.6:
            some = dice.choice([4, LONGEST // 2, 2 * LONGEST])
            options["host_bytes"] = room(family, some, page_tokens=sized["page_tokens"], running=2)
        if dice.random() < 0.6:
            options |= {"disk_path": folder, "disk_write_rate": 1 << 40}
            options["disk_bytes"] = dice.choice([1000, 20_000, 60_000, 1 << 30])
        return options

    def open(self) -> None:
        self.engine = engine(self.family, **self.options)
        self.watched = Watched(self.engine)
        self._ticks = 0.0
        found = self.engine._loop.cache
        found.clock = found.tiers.clock = self.clock

    def clock(self) -> float:
        self._ticks += 1.0
        return self._ticks

    def some(self, count: int) -> tuple[int, ...]:
        return tuple(self.dice.choice([t for t in range(12) if t != END]) for _ in range(count))

    def step(self) -> None:
        action = self.dice.choices(
            [self.turns, self.regenerate, self.edit, self.strip, self.give_up, self.idle, self.restart],
            [6, 2, 2, 2, 3, 1, 0.5],
        )[0]
        action()
        audit(self.engine)

    def _prompt(self, talk: Talk) -> tuple[tuple[int, ...], SamplingParams]:
        seed = self.dice.choice([None, None, 1, 2])
        return talk.tokens, params(self.dice.choice([0, 1, 2, 3, 5, 8]), seed, talk.salt)

    def ask(self, talks: list[Talk], cancels: list[int | None] | None = None) -> list[Output]:
        """Send the talks as they are; the replies become part of them."""
        asked = [self._prompt(talk) for talk in talks]
        outs = self.watched.ask([(list(prompt), each) for prompt, each in asked], cancels)
        for talk, (prompt, each), out in zip(talks, asked, outs, strict=True):
            self.requests += 1
            self.cached += out.usage.cached_tokens
            assert out.usage.cached_tokens < len(prompt) == out.usage.prompt_tokens
            self.ties += not agrees(self.family, prompt, each, out)
            if cancels is None:
                ends = (*talk.replies, (len(prompt), len(prompt) + len(out.tokens)))
                self.talks.append(Talk((*prompt, *out.tokens), ends, talk.salt))
        del self.talks[:-8]
        return outs

    def more(self, talk: Talk) -> Talk:
        """The talk with something new said, or a new one where there is no room left in it."""
        left = LONGEST - 8 - len(talk.tokens)
        if left < 1:
            return self.fresh()
        return replace(talk, tokens=(*talk.tokens, *self.some(self.dice.randint(1, min(left, 14)))))

    def fresh(self) -> Talk:
        system, salt = self.dice.choice(self.systems), self.dice.choice([None, None, None, "a", "b"])
        return Talk((*system, *self.some(self.dice.choice([0, 1, 3, 11, 30]))), (), salt)

    def any(self) -> Talk:
        return self.dice.choice(self.talks) if self.talks and self.dice.random() < 0.8 else self.fresh()

    def turns(self) -> None:
        """One or several at once go on; two may go on from the same."""
        self.ask([self.more(self.any()) for _ in range(self.dice.choice([1, 1, 1, 2, 5]))])

    def regenerate(self) -> None:
        talk = self.any()
        at = self.dice.choice(talk.replies)[0] if talk.replies else len(talk.tokens)
        self.ask([replace(talk, tokens=talk.tokens[:at], replies=())] * self.dice.choice([1, 1, 3]))

    def edit(self) -> None:
        talk = self.any()
        at = self.dice.randint(0, len(talk.tokens))
        self.ask([self.more(replace(talk, tokens=(*talk.tokens[:at],), replies=()))])

    def strip(self) -> None:
        """The history comes back without the first part of a reply."""
        talk = self.any()
        if talk.replies:
            start, end = self.dice.choice(talk.replies)
            kept = self.dice.randint(start, end)
            self.ask([self.more(Talk((*talk.tokens[:start], *talk.tokens[kept:]), (), talk.salt))])

    def give_up(self) -> None:
        """Some are cancelled in any step of prefill or reply; the same is asked again."""
        talks = [self.more(self.any()) for _ in range(self.dice.choice([1, 1, 3]))]
        cancels = [self.dice.choice([None, *range(12)]) for _ in talks]
        state = self.dice.getstate()
        outs = self.ask(talks, cancels)
        self.cancelled += sum(out.finish_reason == "cancelled" for out in outs)
        self.dice.setstate(state)
        self.ask(talks)

    def idle(self) -> None:
        what = self.dice.choice([self.engine.cache.flush, self.engine.cache.clear, lambda: None])
        what()
        self.engine.cache.explain([1, 2, 3])

    def restart(self) -> None:
        self.end()
        self.restarts += 1
        self.open()

    def end(self) -> None:
        audit(self.engine)
        for name, count in self.engine.cache.stats().items():
            if isinstance(count, int):
                self.counters[name] = self.counters.get(name, 0) + count
        self.engine.close()
