"""Models of 8 and 4 bits beside bfloat16, in the same run: decode and prefill on a CPU, and what perplexity they lose.

    python bench/quant.py [--shapes llama,qwen3_5] [--rounds 7] [--out bench/results/quant.jsonl]
    python bench/quant.py --perplexity MODEL --text FILE.xz [--tokens 8192]

Speed: shapes with random weights that are far larger than the processor's caches. Rounds are interleaved, so that
whatever else the machine does falls on all, and the median of the rounds counts; the ratios are to bfloat16. "rows" is
how many sequences are decoded together. Perplexity: of windows of 512 tokens, each read at once and in bfloat16.
"""

import argparse
import json
import lzma
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
import transformers
from cpu import interleave, machine

from bough import Engine
from bough.config import SamplingParams
from bough.engine.load import Loaded, load
from bough.models.load import load_model
from bough.models.model import Model
from bough.models.quantize import SCHEMES, bits_per_weight, quantize
from bough.models.shards import Entry, write_shards
from bough.state.live import State

PROMPT, DECODE, PREFILL, WINDOW = 64, 12, 256, 512
COMMON = {"vocab_size": 32768, "max_position_embeddings": 4096, "tie_word_embeddings": True, "dtype": torch.bfloat16}


def llama() -> transformers.PreTrainedConfig:
    """Layers of a model of 1.1 B parameters."""
    return transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=6, num_attention_heads=32, num_key_value_heads=4,
        **COMMON,
    )  # fmt: skip


def qwen3_5() -> transformers.PreTrainedConfig:
    """Layers of a model of 2 B parameters."""
    return transformers.Qwen3_5TextConfig(
        hidden_size=2048, intermediate_size=6144, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=2,
        head_dim=256, linear_num_key_heads=16, linear_num_value_heads=16, linear_key_head_dim=128,
        linear_value_head_dim=128, **COMMON,
    )  # fmt: skip


SHAPES: dict[str, Callable[[], transformers.PreTrainedConfig]] = {"llama": llama, "qwen3_5": qwen3_5}


def write_random(config: transformers.PreTrainedConfig, folder: Path) -> int:
    """A model folder of that shape with random weights; returns how many."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    entries = [
        Entry(name, torch.bfloat16, tuple(value.shape))
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    ]
    folder.mkdir()
    (folder / "config.json").write_text(config.to_json_string(use_diff=False))
    torch.manual_seed(0)

    def drawn() -> Iterator[torch.Tensor]:
        for entry in entries:
            yield (torch.randn(entry.shape) * 0.02 + ("norm" in entry.name)).to(entry.dtype)

    write_shards(folder, entries, drawn(), lambda count: None)
    return sum(entry.nbytes // 2 for entry in entries)


class Rows:
    """Some sequences, fed together through the forward of an engine that has nothing else to do."""

    def __init__(self, engine: Engine, count: int) -> None:
        self.runner, self.count = engine._runner, count
        self.states: list[State] = []

    def prefill(self, tokens: list[int]) -> list[int]:
        for state in self.states:
            state.release()
        self.states = [State(self.runner.pool) for _ in range(self.count)]
        return self._feed([tokens] * self.count)

    def decode(self, tokens: list[int], count: int) -> None:
        for _ in range(count):
            tokens = self._feed([[token] for token in tokens])

    def _feed(self, tokens: list[list[int]]) -> list[int]:
        _, logits = self.runner.forward(list(zip(self.states, tokens, strict=True)), [1] * self.count)
        return logits.argmax(-1).tolist()


def speed(shape: str, rounds: int, report: Callable[..., None]) -> None:
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folders = {"bfloat16": Path(scratch) / "bfloat16"}
        parameters = write_random(SHAPES[shape](), folders["bfloat16"])
        for scheme in SCHEMES:
            folders[scheme] = Path(scratch) / scheme
            quantize(folders["bfloat16"], folders[scheme], scheme)
        bits = {name: round(bits_per_weight(folder), 2) for name, folder in folders.items()}
        models = {name: load_model(folder, dtype="bfloat16") for name, folder in folders.items()}
        engines = {
            name: stack.enter_context(
                Engine(Loaded(name, model, None, frozenset(), SamplingParams()), context=1024, max_running=8)
            )
            for name, model in models.items()
        }
        tokens = torch.randint(3, 32768, (PREFILL,)).tolist()
        told = {"shape": shape, "parameters": parameters, "bits_per_weight": bits}
        one = {name: Rows(engine, 1) for name, engine in engines.items()}
        seconds = interleave({name: partial(rows.prefill, tokens) for name, rows in one.items()}, rounds)
        report(told | {"what": "prefill"}, {name: PREFILL / each for name, each in seconds.items()})
        for count in (1, 4):
            several = {name: Rows(engine, count) for name, engine in engines.items()}
            first = {name: rows.prefill(tokens[:PROMPT]) for name, rows in several.items()}
            works = {name: partial(rows.decode, first[name], DECODE) for name, rows in several.items()}
            seconds = interleave(works, rounds)
            told |= {"what": "decode", "rows": count}
            report(told, {name: count * DECODE / each for name, each in seconds.items()})


@torch.inference_mode()
def perplexity(model: Model, tokens: list[int]) -> float:
    nats = 0.0
    loaded = Loaded("", model, None, frozenset(), SamplingParams())
    with Engine(loaded, context=2 * WINDOW, max_running=1) as engine:
        for at in range(0, len(tokens) - WINDOW, WINDOW):
            nats -= sum(engine.score(tokens[at : at + WINDOW + 1]))
    return math.exp(nats / ((len(tokens) - 1) // WINDOW * WINDOW))


def losses(source: Path, text: Path, count: int, report: Callable[..., None]) -> None:
    loaded = load(source, dtype="bfloat16")
    assert loaded.tokenizer is not None
    opened = lzma.decompress(text.read_bytes()) if text.suffix == ".xz" else text.read_bytes()
    tokens = loaded.tokenizer.encode(opened[300_000 : 300_000 + 10 * count].decode(errors="ignore"))[: count + 1]
    found = {"bfloat16": perplexity(loaded.model, tokens)}
    bits = {}
    with tempfile.TemporaryDirectory() as scratch:
        for scheme in SCHEMES:
            quantize(source, Path(scratch) / scheme, scheme)
            bits[scheme] = round(bits_per_weight(Path(scratch) / scheme), 2)
            found[scheme] = perplexity(load_model(Path(scratch) / scheme, dtype="bfloat16"), tokens)
    report({"what": "perplexity", "model": source.name, "tokens": count, "bits_per_weight": bits}, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--perplexity", type=Path, help="a model to measure, in place of speed")
    parser.add_argument("--text", type=Path, help="what it reads")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()

    def report(told: dict[str, object], found: dict[str, float]) -> None:
        line = {
            "bench": "quant", **told, "found": {name: round(each, 3) for name, each in found.items()},
            "ratio": {name: round(each / found["bfloat16"], 4) for name, each in found.items()},
            "machine": machine(), "torch": torch.__version__, "threads": torch.get_num_threads(),
            "rounds": options.rounds,
        }  # fmt: skip
        text = json.dumps(line)
        print(text, flush=True)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a") as file:
                file.write(text + "\n")

    if options.perplexity:
        losses(options.perplexity, options.text, options.tokens, report)
        return
    for shape in options.shapes.split(","):
        speed(shape, options.rounds, report)


if __name__ == "__main__":
    main()
