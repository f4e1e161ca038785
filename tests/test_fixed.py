"""Steps over fixed numbers, padded, against the readable ops over the same states.

On a machine with CUDA they are captured graphs. Elsewhere the kernels run in Triton's interpreter, as test_triton.py
says, without a graph.
"""

import sys
from contextlib import contextmanager

import pytest
import torch
from parity import randomise, remember, save
from test_triton import DEVICE, kernels, plain_numbers  # noqa: F401 (a fixture)

from bough.engine.runner import Runner
from bough.models.load import load_model
from bough.state.fixed import Fixed
from bough.state.graphs import Graphs, bucket
from bough.state.layout import Layout
from bough.state.live import State
from bough.state.pool import Pool
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

    linear = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 16}
    linear = {f"linear_{name}": value for name, value in linear.items()}
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHAPE, **linear, num_hidden_layers=4))


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
        return Runner(model, Pool(layout, 60 * layout.slab_bytes, max_running=8, device=model.device))

    def start(self, tokens: list[int]) -> None:
        pair = State(self.plain.pool), State(self.fast.pool)
        self.states.append(pair)
        if tokens:
            for state, runner in zip(pair, (self.plain, self.fast), strict=True):
                runner.forward([(state, tokens)], [0])

    def step(self, tokens: list[list[int]], monkeypatch) -> None:
        """Feed all, and compare the logits."""
        wanted = [len(each) for each in tokens]
        expected, ours = (
            runner.forward([(pair[side], some) for pair, some in zip(self.states, tokens, strict=True)], wanted)[1]
            for side, runner in ((0, self.plain), (1, self._by_kernels(monkeypatch)))
        )
        torch.testing.assert_close(ours.cpu(), expected, rtol=1e-3, atol=2e-4)

    def _by_kernels(self, monkeypatch) -> Runner:
        if DEVICE == "cpu":
            graphs = self.fast.graphs

            def interpreted(step):
                fixed = Fixed(graphs.pool, bucket(len(step.rows.counts)), max(step.rows.counts), graphs.context)
                fixed.fill(step)
                over = fixed.step(recorded=step.recordings is not None)
                with by_kernels():
                    hidden, logits = graphs.compute(over, None)
                for key, recording in (over.recordings or {}).items():
                    step.recordings[key].inputs = recording.inputs
                return hidden[: step.rows.total], logits[: step.rows.total]

            compute = Graphs.__call__
            monkeypatch.setattr(
                Graphs, "__call__", lambda self, step: interpreted(step) if self is graphs else compute(self, step)
            )
        return self.fast


@contextmanager
def by_kernels():
    """As if tensors lay on a CUDA device."""
    from bough.ops import triton as twin

    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("bough.ops.") and hasattr(module, "twins") and not name.endswith(".twins"):
                patch.setattr(module, "twins", lambda tensor: twin)
        yield


@kernels
@pytest.mark.parametrize("family", [qwen3_5, gemma3, lfm2])
def test_padded_steps_equal_the_readable_ones(family, tmp_path, monkeypatch):
    model = family()
    randomise(model, spread=0.2)
    remember(model)
    pair = Pair(save(model, tmp_path))
    for tokens in ([], list(range(5)), list(range(7, 30))):
        pair.start(tokens)
    pair.step([[3], [4], [5]], monkeypatch)
    pair.step([[3, 9], [4], [5, 6, 7]], monkeypatch)
    transactions = [[state.begin() for state in states] for states in pair.states[1:]]
    pair.step([[1], [4, 8, 2], [5, 6]], monkeypatch)  # the first row is not in a transaction
    for kept, (plain, fast) in zip((2, 1), transactions, strict=True):
        plain.commit(kept)
        with by_kernels():
            commit([(fast, kept)])
    pair.step([[3], [4], [5]], monkeypatch)
    pair.fast.pool.check()


@pytest.mark.parametrize("family", [qwen3_5, gemma3])
def test_readable_ops_refuse_what_only_kernels_can_read(family, tmp_path):
    """What no kernel does must not be captured: it would read rows that are not there."""
    runner = Pair(save(family(), tmp_path)).plain
    with pytest.raises(RuntimeError, match="only be read by kernels"):
        runner.graphs.compute(Fixed(runner.pool, 2, 1, 64).step(recorded=False), None)


def test_buckets():
    assert [bucket(rows) for rows in (1, 2, 3, 5, 7, 9, 12, 13, 17, 24, 25, 33, 64)] == [
        1, 2, 4, 6, 8, 12, 12, 16, 24, 24, 32, 48, 64,
    ]  # fmt: skip
