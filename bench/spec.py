"""What speculation gains, and what it costs, beside plain decoding in the same run.

    python bench/spec.py [--parts text,depth,commit] [--corpus FILE] [--rounds 5] [--out bench/results/spec.jsonl]

text    A trained model (`--model`, the bundled one if not given) with each of `--drafters` and with none: greedy and at
        temperature 0.8, on short prompts and on pieces of `--corpus`, a text file, perhaps .xz. Requests are of a salt
        of their own, so that nothing is known of them, or (`again`) are asked a second time, as when a reply is made
        anew. The first token comes with the prompt, and the others are what is timed. Depths (`--depths`) are chosen as
        the engine does (`learnt`), or fixed.
depth   Shapes of about 130 M parameters of several families (as in bench/cpu.py) with random weights, and a drafter
        that knows the reply, or that is always wrong, at fixed depths: what a round costs in plain steps, and the share
        of drafts that has to stand for it to be worth it.
commit  The same shapes: a transaction's commit alone, and what part of its round that is.

Rounds are interleaved, so that whatever else the machine does falls on all sides, and the median of the rounds counts.
Each figure is one JSON line.
"""

import argparse
import json
import lzma
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
import transformers
from cpu import SHAPES, InMemory, machine

from bough import CacheConfig, Engine, SamplingParams
from bough.cli import BUNDLED
from bough.draft import Draft, Drafter, Grown, Wanted
from bough.engine.load import Loaded
from bough.models.config import ModelConfig
from bough.models.load import build_model
from bough.models.model import Model
from bough.state.live import State

PROMPTS = [
    "Once upon a time, in a small village by the sea,",
    "The old captain looked at the sky and",
    "It was a dark night when the two brothers",
    '"I do not believe it," said the doctor,',
]
PIECES, PIECE = 4, 200  # of the corpus, and how many tokens of each are the prompt
DEPTHS = (1, 2, 4, 8)
Report = Callable[..., None]


@dataclass
class Spent:
    """Seconds, rounds and tokens of some replies, without their first tokens; and what was drafted."""

    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, engine: Engine, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        handle = engine.submit(prompt, params)
        pieces = iter(handle)
        next(pieces)
        began = time.perf_counter()
        for _ in pieces:
            pass
        self.seconds += time.perf_counter() - began
        output = handle.result()
        self.tokens += len(output.tokens) - 1
        self.rounds += len(output.tokens) - 1 - output.usage.accepted_tokens  # each gives one token more than stood
        self.drafted += output.usage.drafted_tokens
        self.accepted += output.usage.accepted_tokens
        return output.tokens


def median(spent: Sequence[Spent], value: Callable[[Spent], float]) -> float:
    return statistics.median(map(value, spent))


def compared(plain: Sequence[Spent], ours: Sequence[Spent]) -> dict[str, float]:
    """Medians of rounds, each side's by itself."""
    step = median(plain, lambda each: each.seconds / each.tokens)
    token = median(ours, lambda each: each.seconds / each.tokens)
    figures = {
        "tokens_per_round": median(ours, lambda each: each.tokens / each.rounds),
        "drafted_per_round": median(ours, lambda each: each.drafted / each.rounds),
        "accepted_share": median(ours, lambda each: each.accepted / max(each.drafted, 1)),
        "round_cost": median(ours, lambda each: each.seconds / each.rounds) / step,
        "speed_up": step / token,
        "tokens_per_second": 1 / token,
        "plain_tokens_per_second": 1 / step,
    }
    return {name: round(value, 3) for name, value in figures.items()}


# text


def texts(engine: Engine, corpus: Path | None) -> dict[str, list[list[int]]]:
    found = {"prompts": [engine.tokenize(prompt) for prompt in PROMPTS]}
    if corpus is None or not corpus.exists():
        print(json.dumps({"note": f"no corpus at {corpus}: prompts only" if corpus else "no --corpus: prompts only"}))
        return found
    whole = (lzma.open if corpus.suffix == ".xz" else open)(corpus, "rt", encoding="utf-8").read()
    starts = [whole.index(" ", len(whole) * i // PIECES) for i in range(PIECES)]
    found["corpus"] = [engine.tokenize(whole[start : start + 20 * PIECE])[:PIECE] for start in starts]
    return found


def measure_text(options: argparse.Namespace, report: Report) -> None:
    def loaded(draft: str | None, depth: str = "learnt") -> Engine:
        engine = Engine.load(options.model, dtype=options.dtype, draft=draft, context=1024, max_running=4)
        if depth != "learnt":
            engine._loop.drafting.depth = Fixed(int(depth))  # type: ignore[assignment]
        return engine

    ways = [(drafter, depth) for drafter in options.drafters.split(",") for depth in options.depths.split(",")]
    plain, engines = loaded(None), {way: loaded(*way) for way in ways}
    salts = count()
    for text, prompts in texts(plain, options.corpus).items():
        for temperature in (0.0, 0.8):
            for again in (False, True):
                params = SamplingParams(max_tokens=options.tokens, temperature=temperature, seed=1, ignore_eos=True)
                seen: dict[Engine, list[Spent]] = {engine: [] for engine in (plain, *engines.values())}
                for turn in range(options.rounds + 1):
                    for engine, spent in seen.items():
                        asked = _asked(engine, prompts, replace(params, cache_salt=str(next(salts))), again)
                        if turn:  # the first one is to warm up
                            spent.append(asked)
                for (drafter, depth), engine in engines.items():
                    report(
                        "text", model=Path(options.model).name, drafter=drafter, depth=depth, text=text,
                        temperature=temperature, again=again, **compared(seen[plain], seen[engine]),
                    )  # fmt: skip
    for engine in (plain, *engines.values()):
        assert engine._loop.drafting.failure is None, engine._loop.drafting.failure
        engine.close()


def _asked(engine: Engine, prompts: list[list[int]], params: SamplingParams, again: bool) -> Spent:
    spent = Spent()
    for prompt in prompts:
        spent.add(engine, prompt, params)
    if again:
        spent = Spent()
        for prompt in prompts:
            spent.add(engine, prompt, params)
    return spent


# depth


class Told:
    """Drafts what it is told follows, or something else."""

    kinds, lag, reads_hidden = (), 0, False

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary, self.known, self.shift = vocabulary, list[int](), 0
        self._length: dict[int, int] = {}

    def committed(self, rows: Sequence[Grown]) -> None:
        for row in rows:
            self._length[row.sequence] = self._length.get(row.sequence, 0) + len(row.tokens)

    def propose(self, rows: Sequence[Wanted], choose: object) -> Sequence[Draft]:
        return [
            [(t + self.shift) % self.vocabulary for t in self.known[self._length[row.sequence] :][: row.most]]
            for row in rows
        ]

    def close(self, sequence: int) -> None:
        self._length.pop(sequence, None)


class Fixed:
    """Always one depth."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def begin(self, *, greedy: bool) -> "Fixed":
        return self

    def choose(self, rows: int, most: int) -> int:
        return min(self.depth, most)

    def observe(self, depth: int, accepted: int, seconds: float, rows: int) -> None:
        pass


def made(shape: str, dtype: str, draft: Callable[[Model], Drafter | None]) -> Engine:
    torch.manual_seed(0)
    config = SHAPES[shape]()
    reference = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    model = build_model(
        ModelConfig(json.loads(config.to_json_string(use_diff=False))), InMemory(reference), dtype=dtype
    )
    loaded = Loaded(shape, model, None, frozenset(), SamplingParams())
    return Engine(loaded, cache=CacheConfig(enabled=False), context=1024, max_running=4, draft=draft(model))


def measure_depth(options: argparse.Namespace, report: Report) -> None:
    for shape in options.shapes.split(","):
        dtype = "bfloat16" if options.dtype == "auto" else options.dtype
        with made(shape, dtype, lambda model: Told(model.vocab_size)) as engine:
            drafting = engine._loop.drafting
            told: Any = drafting.drafter
            prompt = torch.randint(3, engine.model.vocab_size, (128,)).tolist()
            params = SamplingParams(max_tokens=options.tokens, temperature=0, ignore_eos=True)
            told.known = [*prompt, *engine.generate(prompt, replace(params, draft=None)).tokens]
            works = {(depth, shift): list[Spent]() for depth in (0, *DEPTHS) for shift in (0, 1) if depth or not shift}
            for turn in range(options.rounds + 1):
                for (depth, shift), seen in works.items():
                    drafting.depth, told.shift = Fixed(depth), shift  # type: ignore[assignment]
                    spent = Spent()
                    spent.add(engine, prompt, params)
                    if turn:
                        seen.append(spent)
            assert drafting.failure is None, drafting.failure
        for depth in DEPTHS:
            right, wrong = (compared(works[0, 0], works[depth, shift]) for shift in (0, 1))
            report(
                "depth", shape=shape, dtype=dtype, depth=depth, round_cost_right=right["round_cost"],
                round_cost_wrong=wrong["round_cost"], speed_up_right=right["speed_up"],
                speed_up_wrong=wrong["speed_up"], tokens_per_round=right["tokens_per_round"],
                worth_it_from=worth_it(depth, right["round_cost"]),
                plain_tokens_per_second=right["plain_tokens_per_second"],
            )  # fmt: skip


def worth_it(depth: int, cost: float) -> float | None:
    """How often each token has to stand, for a round to give as many tokens as plain steps would; None: never."""
    for rate in range(101):
        if sum((rate / 100) ** i for i in range(depth + 1)) >= cost:
            return rate / 100
    return None


# commit


def measure_commit(options: argparse.Namespace, report: Report) -> None:
    dtype = "bfloat16" if options.dtype == "auto" else options.dtype
    for shape in options.shapes.split(","):
        with made(shape, dtype, lambda model: None) as engine:
            runner = engine._runner
            state = State(runner.pool)
            runner.forward([(state, torch.randint(3, engine.model.vocab_size, (128,)).tolist())], [1])
            seen: dict[tuple[int, int], list[tuple[float, float]]] = {}
            for _ in range(20 * options.rounds):
                for depth in DEPTHS:
                    for kept in {0, 1, depth + 1}:
                        transaction = state.begin()
                        began = time.perf_counter()
                        runner.forward([(state, [5] * (depth + 1))], [depth + 1])
                        fed = time.perf_counter()
                        transaction.commit(kept)
                        seen.setdefault((depth, kept), []).append((time.perf_counter() - fed, fed - began))
                        if state.length > 900:
                            state.release()
                            state = State(runner.pool)
                            runner.forward([(state, [5] * 128)], [1])
            state.release()
        for (depth, kept), times in sorted(seen.items()):
            commit, forward = (statistics.median(each) for each in zip(*times, strict=True))
            report(
                "commit", shape=shape, dtype=dtype, fed=depth + 1, kept=kept, microseconds=round(1e6 * commit, 1),
                of_the_forward=round(commit / forward, 4),
            )  # fmt: skip


PARTS = {"text": measure_text, "depth": measure_depth, "commit": measure_commit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--model", default=str(BUNDLED))
    parser.add_argument("--drafters", default="mtp,ngram", help="as `draft` takes them: names, or paths")
    parser.add_argument("--depths", default="learnt,1,3", help="of text")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--corpus", type=Path, help="text that the model has not seen")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=96, help="of a reply")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()

    def report(what: str, **figures: object) -> None:
        about = {"machine": machine(), "torch": torch.__version__, "threads": torch.get_num_threads()}
        line = json.dumps({"bench": "spec", "what": what, **figures, **about, "rounds": options.rounds})
        print(line, flush=True)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a") as file:
                file.write(line + "\n")

    for part in options.parts.split(","):
        PARTS[part](options, report)


if __name__ == "__main__":
    main()
