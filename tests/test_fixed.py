"""Steps over fixed numbers, padded, against the readable ops over the same states.

On a machine with CUDA they are captured graphs. Elsewhere the kernels run in Triton's interpreter, as test_triton.py
says, without a graph.
"""

import sys
from contextlib import contextmanager
from random import Random
from types import SimpleNamespace

import pytest
import torch
from parity import randomise, remember, save
from test_triton import DEVICE, kernels, plain_numbers  # noqa: F401 (a fixture)
from test_triton_experts import poisoned_memory

from bough.engine.runner import Runner
from bough.models.load import load_model
from bough.ops.ragged import Recording
from bough.state.ahead import Ahead
from bough.state.fixed import Fixed
from bough.state.graphs import EACH, Captured, Graphs, Shape, bucket
from bough.state.kinds import FullKV
from bough.state.layout import Layout
from bough.state.live import State
from bough.state.pool import Pool
from bough.state.recordings import STRETCH, Recordings
from bough.state.reservation import forward
from bough.state.transaction import commit

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}


def qwen3_5():
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    types = ["linear_attention", "linear_attention", "full_attention"]
    linear = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 16}
    linear = {f"linear_{name}": value for name, value in linear.items()}
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHAPE, **linear, num_hidden_layers=3, layer_types=types))


def gemma3():
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    types = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, num_hidden_layers=2, layer_types=types, sliding_window=9))


def lfm2():
    from transformers import Lfm2Config, Lfm2ForCausalLM

    shape = {name: value for name, value in SHAPE.items() if name != "head_dim"}
    return Lfm2ForCausalLM(Lfm2Config(**shape, num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"]))


class Pair:
    """The same texts twice: in states that short steps move on by kernels, and in others that readable ops do."""

    def __init__(self, folder) -> None:
        self.plain = self._runner(folder, "cpu")
        self.fast = self._runner(folder, DEVICE)
        self.states: list[tuple[State, State]] = []

    def _runner(self, folder, device: str) -> Runner:
        model = load_model(folder, dtype="float32", device=device)
        layout = Layout.of(model.kinds, page_tokens=4, dtype=model.dtype)
        return Runner(model, Pool(layout, 240 * layout.slab_bytes, max_running=8, device=model.device))

    def start(self, tokens: list[int]) -> None:
        pair = State(self.plain.pool), State(self.fast.pool)
        self.states.append(pair)
        if tokens:
            for state, runner in zip(pair, (self.plain, self.fast), strict=True):
                runner.forward([(state, tokens)], [0])

    def step(self, tokens: list[list[int]], rows: list[int] | None = None) -> None:
        """Feed some, or all, and compare the logits."""
        wanted, fed = [len(each) for each in tokens], [self.states[row] for row in rows or range(len(self.states))]
        expected, ours = (
            runner.forward([(pair[side], some) for pair, some in zip(fed, tokens, strict=True)], wanted)[1]
            for side, runner in ((0, self.plain), (1, self.fast))
        )
        torch.testing.assert_close(ours.cpu(), expected, rtol=1e-3, atol=2e-4)

    def draft(self, tokens: list[list[int]], kept: list[int], rows: list[int]) -> None:
        opened = [[state.begin() for state in self.states[row]] for row in rows]
        self.step(tokens, rows)
        for side in range(2):
            commit([(pair[side], count) for pair, count in zip(opened, kept, strict=True)])
        self.fast.pool.check()

    def decode(self, draw: Random, rows: list[int]) -> None:
        """Some steps of a token a row."""
        for _ in range(draw.randint(2, 7)):
            self.step([[draw.randrange(61)] for _ in rows], rows)


def without_graphs(graphs: Graphs, monkeypatch) -> None:
    """Where there is no CUDA, steps that would be captured are computed anew whenever they would be replayed."""

    def capture(shape: Shape, like: None) -> Captured:
        into = graphs._into(shape)
        step = Fixed(graphs.pool, *shape[:2], graphs.context).step(into)

        def compute() -> tuple[torch.Tensor, torch.Tensor]:
            with by_kernels(), poisoned_memory():  # as if others had used a graph's memory meanwhile
                return graphs.compute(step, None)

        hidden, logits = compute()

        @torch.inference_mode()  # a graph writes to what it was captured with in any mode
        def replay() -> None:
            for kept, made in zip((hidden, logits), compute(), strict=True):
                kept.copy_(made)

        return Captured(SimpleNamespace(replay=replay), step.numbers, None, hidden, logits, graphs._journal, into)

    monkeypatch.setattr(graphs, "_memory", (0, 0))
    monkeypatch.setattr(graphs, "_capture", capture)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


@contextmanager
def by_kernels():
    """As if tensors lay on a CUDA device."""
    from bough.ops import triton as twin

    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("bough.ops.") and hasattr(module, "twins") and not name.endswith(".twins"):
                patch.setattr(module, "twins", lambda tensor: twin)
        yield


@pytest.fixture
def pair_of(tmp_path, monkeypatch):
    def made(family) -> Pair:
        model = family()
        randomise(model, spread=0.2)
        remember(model)
        pair = Pair(save(model, tmp_path))
        if DEVICE == "cpu":
            without_graphs(pair.fast.graphs, monkeypatch)
        return pair

    return made


@kernels
@pytest.mark.parametrize("family", [qwen3_5, gemma3, lfm2])
def test_padded_steps_equal_the_readable_ones(family, pair_of):
    pair = pair_of(family)
    for tokens in ([], list(range(5)), list(range(7, 30))):
        pair.start(tokens)
    pair.step([[3], [4], [5]])
    pair.step([[3, 9], [4], [5, 6, 7]])
    transactions = [[state.begin() for state in states] for states in pair.states[1:]]
    pair.step([[1], [4, 8, 2], [5, 6]])  # the first row is not in a transaction
    for kept, both in zip((2, 1), transactions, strict=True):
        for each in both:
            each.commit(kept)
    pair.step([[3], [4], [5]])
    pair.fast.pool.check()


@kernels
@pytest.mark.parametrize("family", [qwen3_5, lfm2])
def test_a_round_does_the_commit_of_the_round_before(family, pair_of, monkeypatch):
    """No slot is written in between, unless somebody looks at it."""
    settled = []
    settle = Recordings._replay
    monkeypatch.setattr(Recordings, "_replay", lambda self, rows: settled.append(len(rows)) or settle(self, rows))
    pair = pair_of(family)
    for tokens in ([1, 2, 3], [4, 5], []):
        pair.start(tokens)
    fast = [states[1] for states in pair.states]
    for kept in ([2, 0, 1], [1, 2, 3], [3, 1, 2]):
        settled.clear()
        pair.draft([[1, 2, 3, 4], [4, 5, 6, 7], [7, 8, 9, 0]], kept, [0, 1, 2])
        assert [state.owes is not None for state in fast] == [count > 0 for count in kept]
        assert settled == [count for count in [sum(count > 0 for count in kept)] if count]  # the readable ones alone
    settled.clear()
    pair.draft([[1, 2], [4, 5]], [1, 1], [0, 1])  # whatever its shape
    assert settled == [2] and fast[2].owes is not None
    pair.draft([[4, 5, 6, 7]], [2], [1])
    assert settled == [2, 1] and fast[0].owes is not None  # whoever is in no round goes on owing
    settled.clear()
    pair.draft([[4, 5, 6, 7]] * 3, [2] * 3, [0, 1, 2])
    assert settled == [3] and fast[2].owes is not None
    settled.clear()
    pair.states.append(tuple(states.fork() for states in pair.states[2]))  # whoever looks finds it done
    assert fast[2].owes is None and settled == [1]
    settled.clear()
    fast[0].release()  # who goes owes nothing
    assert fast[0].owes is None and not settled
    pair.states[0][0].release()
    pair.step([[3], [4], [5]], [1, 2, 3])
    pair.fast.pool.check()


@kernels
def test_room_for_more_rows(pair_of, monkeypatch):
    monkeypatch.setattr("bough.state.graphs.ROOM", 1)
    pair = pair_of(qwen3_5)
    for tokens in ([1, 2, 3], [4, 5], [6]):
        pair.start(tokens)
    journals = []
    for rows in ([0], [0, 1], [0, 1, 2], [1, 2]):
        pair.draft([[1, 2]] * len(rows), [1] * len(rows), rows)
        journals.append(pair.fast.graphs._journal)
    assert len({id(each) for each in journals}) == 2  # for two rows, and for all
    assert all(states[1].owes is journals[-1].all for states in pair.states)
    pair.step([[3], [4], [5]])


@kernels
def test_too_little_memory_to_record_for_many_rows(pair_of, monkeypatch):
    """They are computed plainly; fewer rows are captured all the same."""
    monkeypatch.setattr("bough.state.graphs.ROOM", 1)
    pair = pair_of(lfm2)
    for tokens in ([1, 2, 3], [4, 5], [6]):
        pair.start(tokens)
    room, tried = Recording.room, []

    def short(self, *inputs):
        if self.most > 2 * STRETCH:
            tried.append(self.most)
            raise MemoryError("no more of it")
        return room(self, *inputs)

    monkeypatch.setattr(Recording, "room", short)
    for rows in ([0], [0, 1, 2], [0, 1, 2], [1, 2], [0, 1], [0]):
        pair.draft([[1, 2]] * len(rows), [1] * len(rows), rows)
    if DEVICE == "cpu":
        assert len(tried) == 1 and pair.fast.graphs._journal.all.is_made
    pair.step([[3], [4], [5]])


@kernels
@pytest.mark.parametrize("family", [qwen3_5, lfm2])
def test_steps_that_were_made_ready(family, pair_of, monkeypatch):
    used, fill = [], Ahead.fill
    monkeypatch.setattr("bough.state.graphs.MANY", 1)
    monkeypatch.setattr("bough.state.recordings.OWED", 5)
    monkeypatch.setattr(Ahead, "fill", lambda self, fixed: used.append(self) or fill(self, fixed))
    pair = pair_of(family)
    for tokens in ([1, 2, 3], list(range(20)), [4]):
        pair.start(tokens)
    for kept in ([2, 0], [1, 2], [2, 2], [0, 1]):
        pair.draft([[5, 6], [7, 8]], kept, [0, 2])
    for token in range(3):
        pair.step([[token], [9], [10]])
    pair.fast.pool.check()
    assert len(used) >= 2


@kernels
@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 30))])
@pytest.mark.parametrize("family", [qwen3_5, lfm2])
def test_random_rounds(family, seed, pair_of, monkeypatch):
    """Few tokens may be owed, so that slots are stored in some rounds and not in others."""
    monkeypatch.setattr("bough.state.recordings.OWED", 5)
    draw, pair = Random(seed), pair_of(family)
    for tokens in ([1, 2, 3], [], list(range(20)), [4]):
        pair.start(tokens)
    for _ in range(8):
        rows = sorted(draw.sample(range(4), draw.choice([2, 3, 3, 4])))
        tokens = [[draw.randrange(61) for _ in range(draw.randint(1, 3))] for _ in rows]
        match draw.choice(["draft", "draft", "draft", "plain", "decode", "decode", "fork", "long", "snapshot"]):
            case "draft":
                pair.draft(tokens, [draw.randint(0, len(each)) for each in tokens], rows)
            case "plain":
                pair.step(tokens, rows)
            case "decode":
                pair.decode(draw, rows)
            case "long":
                pair.step([[*some, *range(12)] for some in tokens], rows)
            case "fork":
                kept, gone = rows[0], rows[-1]
                for state in pair.states[gone]:
                    state.release()
                pair.states[gone] = tuple(state.fork() for state in pair.states[kept])
            case "snapshot":  # what is saved of a state is what it was, whatever comes after
                states = pair.states[rows[0]]
                length = states[0].length
                saved = [state.snapshot(0) for state in states]
                pair.step([tokens[0]], rows[:1])
                for state, one in zip(states, saved, strict=True):
                    if one is not None and length:
                        state.restore([one], length)
                        one.close()
                    else:
                        state.rewind(0) if not length else None
        pair.fast.pool.check()
    pair.step([[draw.randrange(61)] for _ in range(4)])


@pytest.mark.parametrize("family", [qwen3_5, gemma3])
def test_readable_ops_refuse_what_only_kernels_can_read(family, tmp_path):
    """What no kernel does must not be captured: it would read rows that are not there."""
    runner = Pair(save(family(), tmp_path)).plain
    with pytest.raises(RuntimeError, match="only be read by kernels"):
        runner.graphs.compute(Fixed(runner.pool, 2, 1, 64).step(), None)


def test_numbers_of_rows_that_are_longer_than_those_before():
    """What is made ready for them is too small. They may be sent in inference mode or not."""
    layout = Layout.of([FullKV(1, 4, 4)], page_tokens=4, dtype=torch.float32)
    pool = Pool(layout, 128 * layout.slab_bytes, max_running=4)
    with torch.inference_mode():
        fixed = Fixed(pool, 2, 1, 256)
    for lengths, inference in (((3, 5), True), ((90, 5), False), ((90, 201), True), ((2, 7), False)):
        states = [State(pool) for _ in lengths]
        with forward(pool, [(state, [0] * length) for state, length in zip(states, lengths, strict=True)]):
            pass
        with torch.inference_mode(inference), forward(pool, [(state, [1]) for state in states]) as step:
            fixed.fill(step)
            fixed.make_ready()
        table = fixed.table(0)
        assert table.spans is not None
        for state, at in zip(states, table.spans.offset.tolist(), strict=True):
            ids = state.runs[0].ids.tolist()
            assert table.table[at : at + len(ids)].tolist() == ids
            state.release()
    pool.check()


def test_buckets():
    assert [bucket(rows) for rows in (1, 2, 3, 5, 7, 9, 12, 13, 17, 24, 25, 33, 64)] == [
        1, 2, 4, 6, 8, 12, 12, 16, 24, 24, 32, 48, 64,
    ]  # fmt: skip
    assert [bucket(rows, 5) for rows in (1, 33, 64, 70, 96)] == [1, 48, 64, 102, 102]  # of up to 320 tokens, 512
    assert all(rows <= bucket(rows, each) for rows in range(1, 257) for each in EACH)
