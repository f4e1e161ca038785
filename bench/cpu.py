"""Decode and prefill on a CPU, beside transformers in the same run.

    python bench/cpu.py [--shapes llama,qwen3_5,lfm2] [--dtypes bfloat16,float32] [--out bench/results/cpu.jsonl]

Three shapes of about 130 M parameters with random weights, the same for both sides. Rounds are interleaved, so that
whatever else the machine does falls on both, and the median of the rounds counts. transformers runs as its forward
with a DynamicCache and an argmax; Bough runs both so (`forward`) and as a whole engine: scheduling, sampling, thread.
Each figure is one JSON line: tokens per second of both, and their ratio.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import transformers

from bough import Engine, SamplingParams
from bough.config import SamplingParams as Params
from bough.engine.load import Loaded
from bough.models.config import ModelConfig
from bough.models.load import build_model
from bough.state.live import State

PROMPT, DECODE, PREFILL = 128, 24, 512
COMMON = {
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def llama() -> transformers.PreTrainedConfig:
    """SmolLM2-135M."""
    return transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, **COMMON,
    )  # fmt: skip


def qwen3_5() -> transformers.PreTrainedConfig:
    return transformers.Qwen3_5TextConfig(
        vocab_size=49152, hidden_size=768, intermediate_size=2048, num_hidden_layers=12,
        num_attention_heads=6, num_key_value_heads=2, head_dim=128,
        linear_num_key_heads=6, linear_num_value_heads=12, linear_key_head_dim=64, linear_value_head_dim=64, **COMMON,
    )  # fmt: skip


def lfm2() -> transformers.PreTrainedConfig:
    kinds = ["conv", "conv", "full_attention"] * 4 + ["conv", "conv"]
    return transformers.Lfm2Config(
        vocab_size=49152, hidden_size=768, intermediate_size=2048, num_hidden_layers=14, block_auto_adjust_ff_dim=False,
        num_attention_heads=12, num_key_value_heads=4, layer_types=kinds, **COMMON,
    )  # fmt: skip


SHAPES: dict[str, Callable[[], transformers.PreTrainedConfig]] = {"llama": llama, "qwen3_5": qwen3_5, "lfm2": lfm2}


class InMemory:
    """The tensors of a transformers model as a source of weights."""

    where = "memory"

    def __init__(self, model: torch.nn.Module) -> None:
        self._tensors = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}

    def names(self) -> Iterable[str]:
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]


class Peer:
    """transformers, as fast as its plain forward goes."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self.model = model

    @torch.inference_mode()
    def prefill(self, tokens: list[int]) -> int:
        self.cache = transformers.DynamicCache(config=self.model.config)
        return self._feed(tokens)

    @torch.inference_mode()
    def decode(self, token: int, count: int) -> int:
        for _ in range(count):
            token = self._feed([token])
        return token

    def _feed(self, tokens: list[int]) -> int:
        out = self.model(torch.tensor([tokens]), past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return int(out.logits[0, -1].argmax())


class Ours:
    """Bough's forward, on the states of an engine that has nothing else to do."""

    def __init__(self, engine: Engine) -> None:
        self.runner, self.state = engine._runner, State(engine._runner.pool)

    def prefill(self, tokens: list[int]) -> int:
        self.state.release()
        self.state = State(self.runner.pool)
        return self._feed(tokens)

    def decode(self, token: int, count: int) -> int:
        for _ in range(count):
            token = self._feed([token])
        return token

    def _feed(self, tokens: list[int]) -> int:
        _, logits = self.runner.forward([(self.state, tokens)], [1])
        return int(logits[0].argmax())


def timed(work: Callable[[], int]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(shape: str, dtype: str, rounds: int, report: Callable[..., None]) -> None:
    torch.manual_seed(0)
    config = SHAPES[shape]()
    with torch.device("cpu"):
        reference = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    model = build_model(
        ModelConfig(json.loads(config.to_json_string(use_diff=False))), InMemory(reference), dtype=dtype
    )
    parameters = sum(each.numel() for each in reference.parameters())
    loaded = Loaded(shape, model, None, frozenset(), Params())
    with Engine(loaded, context=2048, max_running=4) as engine:
        peer, ours = Peer(reference), Ours(engine)
        tokens = torch.randint(3, config.vocab_size, (PREFILL,)).tolist()
        prefills = {"transformers": lambda: peer.prefill(tokens), "bough": lambda: ours.prefill(tokens)}
        seconds = interleave(prefills, rounds)
        report(shape, dtype, "prefill", parameters, {name: PREFILL / each for name, each in seconds.items()})
        first = {"peer": peer.prefill(tokens[:PROMPT]), "ours": ours.prefill(tokens[:PROMPT])}
        greedy = SamplingParams(max_tokens=DECODE + 1, temperature=0, ignore_eos=True)
        decodes = {
            "transformers": lambda: peer.decode(first["peer"], DECODE),
            "bough": lambda: ours.decode(first["ours"], DECODE),
            "engine": lambda: decode_of(engine, tokens[:PROMPT], greedy),
        }
        seconds = interleave(decodes, rounds, given={"engine"})
        report(shape, dtype, "decode", parameters, {name: DECODE / each for name, each in seconds.items()})


def decode_of(engine: Engine, prompt: list[int], params: SamplingParams) -> float:
    """Seconds from the first token to the last."""
    pieces = engine.stream(prompt, params)
    next(pieces)
    began = time.perf_counter()
    assert len(list(pieces)) == DECODE
    return time.perf_counter() - began


def interleave(works: dict[str, Callable[[], float]], rounds: int, given: Iterable[str] = ()) -> dict[str, float]:
    """Median seconds of each, after a round to warm up. Those in `given` measure themselves."""
    seen: dict[str, list[float]] = {name: [] for name in works}
    for round_ in range(rounds + 1):
        for name, work in works.items():
            seconds = work() if name in given else timed(work)
            if round_:
                seen[name].append(seconds)
    return {name: statistics.median(each) for name, each in seen.items()}


def machine() -> str:
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()

    def report(shape: str, dtype: str, what: str, parameters: int, speeds: dict[str, float]) -> None:
        line = {
            "bench": "cpu", "what": what, "shape": shape, "parameters": parameters, "dtype": dtype,
            "tokens_per_second": {name: round(each, 2) for name, each in speeds.items()},
            "ratio": {name: round(each / speeds["transformers"], 3) for name, each in speeds.items()},
            "machine": machine(), "torch": torch.__version__, "transformers": transformers.__version__,
            "threads": torch.get_num_threads(), "rounds": options.rounds,
        }  # fmt: skip
        text = json.dumps(line)
        print(text, flush=True)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a") as file:
                file.write(text + "\n")

    for shape in options.shapes.split(","):
        for dtype in options.dtypes.split(","):
            measure(shape, dtype, options.rounds, report)


if __name__ == "__main__":
    main()
