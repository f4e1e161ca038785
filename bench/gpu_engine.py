"""What figures of a whole model are taken with: its sizes and floors, timed requests, and batches without a loop.

Requests are greedy, ignore the end of a text and have no drafter; prompts are random tokens that nobody has seen.
"""

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import gpu_shape
import torch
from gpu_figures import Run, seconds

from bough import CacheConfig, Engine, SamplingParams
from bough.engine.load import Loaded
from bough.engine.request import Handle, Usage
from bough.engine.sampler import RowSampling, drawing
from bough.ops import largest
from bough.ops.ragged import OWED
from bough.state.live import State
from bough.state.transaction import Transaction

GREEDY = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


@dataclass(frozen=True)
class Sizes:
    """How large a run is."""

    decode: Sequence[tuple[int, int]] = ((1, 4096), (16, 2048), (64, 1024))  # rows and their context
    draft: Sequence[tuple[int, int]] = ((1, 4096), (64, 1024))
    quant: Sequence[tuple[int, int]] = ((1, 4096), (16, 2048))
    steps: int = 64
    prompts: Sequence[int] = (2048, 8192, 32768)
    peer_prompts: Sequence[int] = (2048, 8192)
    again: int = 8000
    diverging: int = 4000
    long: int = 32768
    forks: int = 64
    device_bytes: int = 40 << 30
    host_bytes: int = 4 << 30


TINY = Sizes(
    decode=((1, 64), (3, 32)), draft=((1, 64), (3, 32)), quant=((1, 64), (3, 32)), steps=8, prompts=(64, 128),
    peer_prompts=(64,), again=600, diverging=300, long=1024, forks=4, device_bytes=64 << 20, host_bytes=32 << 20,
)  # fmt: skip


class Bench:
    """A run at one of the sizes."""

    def __init__(self, run: Run) -> None:
        self.run, self.tiny = run, not run.on_gpu
        self.sizes, self.shape = (TINY, "tiny") if self.tiny else (Sizes(), "4 B")

    def figure(self, name: str, **values: float | str | None) -> None:
        self.run.figure(f"{self.shape} {name}", **values)

    def loaded(self) -> Loaded:
        return gpu_shape.loaded(self.tensors(), self.run.device, tiny=self.tiny)

    def tensors(self) -> dict[str, torch.Tensor]:
        return gpu_shape.tensors(self.run.device, tiny=self.tiny)

    @contextmanager
    def engine(self, loaded: Loaded, running: int = 64, host_bytes: int = 0) -> Iterator[Engine]:
        cache = CacheConfig(device_bytes=self.sizes.device_bytes, host_bytes=host_bytes)
        with Engine(loaded, cache=cache, context=65536, max_running=running, draft=None) as engine:
            yield engine
        gc.collect()
        if self.run.on_gpu:
            torch.cuda.empty_cache()

    def prompt(self, count: int) -> list[int]:
        vocabulary = (gpu_shape.TINY if self.tiny else gpu_shape.SHAPE)["vocab_size"]
        return torch.randint(vocabulary, (count,)).tolist()

    def decode_floor(self, engine: Engine, rows: int, context: int) -> float:
        """ms to read weights, K and V and slots once, and to write slots once in so many tokens as may be owed."""
        model, layout = engine.model, engine.layout
        size = model.weight_bytes - (0 if model.head is model.embedding else model.embedding.nbytes)
        for unit in layout.units:
            moved = unit.nbytes * context // layout.page_tokens if unit.is_page else unit.nbytes * (1 + 1 / OWED)
            size += rows * int(moved)
        return size / self.run.rate / 1e3

    def prefill_floor(self, count: int, before: int = 0) -> float:
        """ms of the arithmetic of all layers: their weights, and what full attention compares, history included."""
        shape = gpu_shape.TINY if self.tiny else gpu_shape.SHAPE
        hidden, ffn, heads = shape["hidden_size"], shape["intermediate_size"], shape["num_attention_heads"]
        full = heads * shape["head_dim"]
        kv = shape["num_key_value_heads"] * shape["head_dim"]
        keys = shape["linear_num_key_heads"] * shape["linear_key_head_dim"]
        values = shape["linear_num_value_heads"] * shape["linear_value_head_dim"]
        layers, attention = shape["num_hidden_layers"], shape["num_hidden_layers"] // 4
        weights = layers * 3 * hidden * ffn + attention * hidden * (3 * full + 2 * kv)
        weights += (layers - attention) * hidden * (2 * keys + 3 * values)
        compared = count * before + count**2 // 2
        return (2 * weights * count + attention * 4 * compared * full) / self.run.flops / 1e3


class Watch:
    """When the pieces of a request came."""

    def __init__(self, handle: Handle) -> None:
        self.handle, self._news = handle, list[float]()
        handle.listen(lambda: self._news.append(time.perf_counter()))

    @property
    def times(self) -> list[float]:
        """Of a finished request. The first news is the listening itself, and the last one the end."""
        self.handle.result()
        return self._news[1:-1]


def decode_step(bench: Bench, engine: Engine, rows: int, context: int) -> tuple[float, float]:
    """Mean ms between the tokens of requests while all of them write (slots are written in some steps, not in all), and
    the most that was.

    From the second token of each on: before it the cache is told of the prompt.
    """
    reading = 2 * -(-rows * context // engine.step_tokens) + 8  # what the first may write while the others read
    params = SamplingParams(max_tokens=reading + bench.sizes.steps, temperature=0, ignore_eos=True)
    watches = [Watch(engine.submit(bench.prompt(context), params)) for _ in range(rows)]
    times = [watch.times for watch in watches]
    begun, ended = max(each[1] for each in times), min(each[-1] for each in times)
    steady = [at for at in times[-1] if begun <= at <= ended]
    assert len(steady) > bench.sizes.steps // 2, "the rows did not run together"
    taken = [1e3 * (end - begin) for begin, end in pairwise(steady)]
    return statistics.fmean(taken), max(taken)


class Batch:
    """Some sequences, fed together by the runner alone. Only the engine's thread may use one."""

    def __init__(self, engine: Engine, prompts: Sequence[list[int]]) -> None:
        self.runner, self.states, self.tokens = engine._runner, list[State](), list[int]()
        self.launched = 0.0  # when the host had launched the last round, by the clock for intervals
        for prompt in prompts:
            state = State(self.runner.pool)
            self.states.append(state)
            for at in range(0, len(prompt), engine.step_tokens):
                _, logits = self.runner.forward([(state, prompt[at : at + engine.step_tokens])], [1])
            self.tokens.append(int(logits[0].argmax()))

    def decode(self) -> None:
        batch = [(state, [token]) for state, token in zip(self.states, self.tokens, strict=True)]
        _, logits = self.runner.forward(batch, [1] * len(batch))
        self.tokens = largest(logits)[1].tolist()

    def round(self, draft: list[int]) -> list[Transaction]:
        """Feed each its token and a draft; whoever asked commits."""
        opened = [state.begin() for state in self.states]
        batch = [(state, [token]) for state, token in zip(self.states, self.tokens, strict=True)]
        _, logits = self.runner.forward(
            batch, [1 + len(draft)] * len(batch), drafts=dict.fromkeys(range(len(batch)), draft)
        )
        self.launched = time.perf_counter()
        largest(logits)[1].tolist()
        return opened

    def follow(self, drafts: Sequence[list[int]], kept: int) -> list[float]:
        """Rounds of which each is launched before the one before is read; when each was read. All keep so many tokens,
        whatever was chosen."""
        rows, each = len(self.states), 1 + len(drafts[0])
        stands, greedy = (
            torch.full((rows,), kept, dtype=torch.int32, device=self.runner.pool.device),
            _greedy(rows * each),
        )
        for state in self.states:
            state.begin()
        _, logits = self.runner.forward(
            [(state, [token, *drafts[0]]) for state, token in zip(self.states, self.tokens, strict=True)], [each] * rows
        )
        drawn, read = drawing(logits, greedy), list[float]()
        for draft in drafts[1:]:
            following = self.runner.go_on(stands, drawn.ids, [0, *draft] * rows)
            assert following is not None, "the round could not follow"
            before, drawn = drawn, drawing(following, greedy)
            before.result()
            read.append(time.perf_counter())
            self.runner.land([kept] * rows)
        drawn.result()
        return read

    def close(self) -> None:
        for state in self.states:
            state.release()


def _greedy(rows: int) -> list[RowSampling]:
    return [RowSampling(GREEDY, 0, 0)] * rows


def first_token(engine: Engine, prompt: list[int]) -> tuple[float, Usage]:
    """ms from the request to its first token, and what it cost."""
    began = time.perf_counter()
    handle = engine.submit(prompt, GREEDY)
    next(iter(handle))
    took = 1e3 * (time.perf_counter() - began)
    return took, handle.result().usage


def runner_step(bench: Bench, engine: Engine, rows: int, context: int) -> float:
    """Mean ms of a forward and its argmax, without the engine's loop."""
    batch = Batch(engine, [bench.prompt(context) for _ in range(rows)])
    took = [seconds(batch.decode) for _ in range(bench.sizes.steps)]
    batch.close()
    return 1e3 * statistics.fmean(took[len(took) // 4 :])
