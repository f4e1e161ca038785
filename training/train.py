"""Trains the model that ships with Bough: `python -m training.train --corpus FOLDER --out FOLDER --minutes 8`.

On one GPU, or on a CPU for a look at tiny sizes. See README.md for the commands and what they gave.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from training.data import Batches, books, encode, learn_tokenizer, opening
from training.evaluate import acceptance, bits_per_byte, samples
from training.export import load_state, save_model, save_state
from training.model import Network, Shape
from training.optimizer import Optimizer

STARTED = time.monotonic()
DRAFT_WEIGHTS = (0.2, 0.1, 0.05)  # of the MTP passes; small: they pull at the trunk, the head learns well either way
MUON_RATE, ADAM_RATE, DECAY = 0.02, 0.003, 0.05
WARMUP, COOLDOWN = 100, 0.45  # steps up; share of the steps down to zero
SETTLE, MEASURED = 20, 60  # with --minutes, the time of the steps between these two sets the number of steps
LOG_EVERY, SAMPLE_TOKENS = 20, 120


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder with *.train.txt.xz and *.val.txt.xz")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json to use instead of learning one")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model and log.jsonl")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int)
    length.add_argument("--minutes", type=float, help="as many steps as end this long after the start of the process")
    parser.add_argument("--plain", action="store_true", help="full attention in every layer: the baseline")
    parser.add_argument("--shape", default="{}", help='fields of Shape to change, as JSON: {"num_hidden_layers": 4}')
    parser.add_argument("--batch", type=int, default=64, help="rows in a step")
    parser.add_argument("--context", type=int, default=1024, help="tokens in a row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--state", type=Path, help="file to go on from where it exists, and to write at a pause")
    parser.add_argument("--pause", type=float, help="minutes after which to write --state and stop, to be run again")
    parser.add_argument("--evaluate-every", type=int, default=500)
    options = parser.parse_args()
    if options.pause and not options.state:
        parser.error("--pause needs --state, the file to go on from")
    return options


class Log:
    """Lines of JSON in a file, and on the screen."""

    def __init__(self, path: Path, fresh: bool) -> None:
        self.path = path
        if fresh:
            path.write_text("")

    def __call__(self, **fields: Any) -> None:
        line = json.dumps({"at": round(time.monotonic() - STARTED, 1), **fields}, ensure_ascii=False)
        print(line, flush=True)
        with self.path.open("a") as file:
            file.write(line + "\n")


def main_loss(hidden: Tensor, embedding: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy, and the logits as constants for the drafts to follow."""
    logits = F.linear(hidden, embedding)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()), logits.detach()


def draft_loss(hidden: Tensor, embedding: Tensor, followed: Tensor) -> Tensor:
    """Cross-entropy of each row against the network's own distribution: a draft is right if the network agrees."""
    logits = F.linear(hidden, embedding).float()
    return logits.logsumexp(-1) - (followed.float().softmax(-1) * logits).sum(-1)


class Trainer:
    """One network, its optimizer and its losses; `step` does one update."""

    def __init__(self, network: Network, compiled: bool) -> None:
        self.network = network
        self.optimizer = Optimizer(network, MUON_RATE, ADAM_RATE, DECAY)
        self.main_loss, self.draft_loss = main_loss, draft_loss
        if compiled:  # layer by layer: equal layers share what was compiled for the first
            self.main_loss = torch.compile(main_loss, dynamic=False)
            self.draft_loss = torch.compile(draft_loss, dynamic=False)
            for layer in (*network.model.layers, *network.mtp.layers):
                layer.compile(dynamic=False)

    def step(self, tokens: Tensor, number: int, scale: float) -> Tensor:
        """Losses by depth, [1 + drafts]; entry 0 is the network's own."""
        network, depth = self.network, len(DRAFT_WEIGHTS)
        length = tokens.shape[1] - depth - 1
        with torch.autocast(tokens.device.type, torch.bfloat16):
            hidden = network(tokens[:, :length])
            own, followed = self.main_loss(hidden, network.embedding, tokens[:, 1 : length + 1])
            losses = [own]
            for ahead, draft in enumerate(network.drafts(hidden, tokens, depth), 1):
                # Row t of this pass predicts what row t + ahead of the network does: move it there.
                rows = self.draft_loss(draft.roll(ahead, dims=1), network.embedding, followed)
                losses.append(rows[:, ahead:].mean())
        total = own + sum(weight * loss for weight, loss in zip(DRAFT_WEIGHTS, losses[1:], strict=True))
        total.backward()
        self.optimizer.step(number, scale)
        return torch.stack(losses).detach()


def rate(step: int, steps: int | None) -> float:
    """Share of the full learning rate: up, level, down. Before the cooldown it does not depend on `steps`."""
    down = 1.0 if steps is None else (steps - step) / (COOLDOWN * steps)
    return min(1.0, (step + 1) / WARMUP, down)


def corpus(options: argparse.Namespace, vocabulary: int) -> tuple[Tokenizer, Tensor, Tensor]:
    """The tokenizer, the training row and the validation row."""
    train = books(next(options.corpus.glob("*.train.txt.xz")))
    validation = [opening(book) for book in books(next(options.corpus.glob("*.val.txt.xz")))]
    if options.tokenizer:
        tokenizer = Tokenizer.from_file(str(options.tokenizer))
    else:
        tokenizer = learn_tokenizer(train, vocabulary)
    return tokenizer, encode(tokenizer, train), encode(tokenizer, validation)


def synchronize(device: torch.device) -> float:
    """The time once the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.monotonic()


def train(
    trainer: Trainer, batches: Batches, options: argparse.Namespace, evaluate: Callable[[], float], log: Log
) -> tuple[int, int]:
    """Runs the steps, and returns how many there are and how many are done: fewer after a pause."""
    device, steps, step, measured_from = batches.row.device, options.steps, 0, 0.0
    if options.state and options.state.exists():
        numbers = load_state(options.state, trainer.network, trainer.optimizer)
        step, steps = numbers["step"], numbers["steps"]
    losses = []
    while steps is None or step < steps:
        losses.append(trainer.step(batches.at(step), step + 1, rate(step, steps)))
        step += 1
        if steps is None and step == SETTLE:
            measured_from = synchronize(device)
        if steps is None and step == MEASURED:
            now = synchronize(device)
            each = (now - measured_from) / (MEASURED - SETTLE)
            steps = MEASURED + max(
                0, int((options.minutes * 60 - (now - STARTED)) / (1.04 * each))
            )  # 4% for evaluation
            log(steps=steps, seconds_per_step=round(each, 4))
        if step % LOG_EVERY == 0 or step == steps:
            own, *drafts = (round(loss, 4) for loss in torch.stack(losses).mean(0).tolist())
            if not math.isfinite(own):
                raise SystemExit(f"the loss is {own} at step {step}: lower MUON_RATE and ADAM_RATE")
            log(step=step, loss=own, drafts=drafts, rate=round(rate(step, steps), 4))
            losses = []
            if options.pause and time.monotonic() - STARTED > options.pause * 60 and steps and step < steps:
                save_state(options.state, trainer.network, trainer.optimizer, step=step, steps=steps)
                return steps, step
        if step % options.evaluate_every == 0 and step != steps:
            log(step=step, bits_per_byte=round(evaluate(), 4))
    return steps, step


def main() -> None:
    options = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(options.seed)
    shape = replace(Shape(), **json.loads(options.shape))
    if options.plain:
        shape = replace(shape, full_attention_interval=1)
    options.out.mkdir(parents=True, exist_ok=True)
    log = Log(options.out / "log.jsonl", fresh=not (options.state and options.state.exists()))

    tokenizer, row, validation = corpus(options, shape.vocab_size)
    row, validation = row.to(device), validation.to(device)
    network = Network(shape).to(device)
    count = sum(p.numel() for p in network.parameters())
    log(parameters=count, mtp=sum(p.numel() for p in network.mtp.parameters()), layers=shape.layer_types)
    log(tokens=len(row), validation_tokens=len(validation), batch=options.batch, context=options.context)
    log(torch=torch.__version__, device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu")

    def evaluate() -> float:
        with torch.compiler.set_stance("force_eager"), torch.autocast(device.type, torch.bfloat16):
            return bits_per_byte(network, validation, tokenizer, options.context)

    trainer = Trainer(network, compiled=not options.eager)
    batches = Batches(row, options.context, len(DRAFT_WEIGHTS) + 1, options.batch, options.seed)
    steps, done = train(trainer, batches, options, evaluate, log)
    if done < steps:
        log(paused=done, steps=steps)
    else:
        finish(network, tokenizer, validation, options, steps, log)


@torch.no_grad()
def finish(
    network: Network, tokenizer: Tokenizer, validation: Tensor, options: argparse.Namespace, steps: int, log: Log
) -> None:
    """Saves first, then measures what was saved: weights rounded to bf16, computed in float32."""
    save_model(network, tokenizer, options.out)
    for parameter in network.parameters():
        parameter.copy_(parameter.bfloat16())
    torch.set_float32_matmul_precision("highest")
    with torch.compiler.set_stance("force_eager"):
        bits = bits_per_byte(network, validation, tokenizer, options.context)
        log(step=steps, bits_per_byte=round(bits, 4), tokens_seen=steps * options.batch * options.context)
        log(acceptance=[round(x, 4) for x in acceptance(network, validation, length=options.context)])
        for text in samples(network, tokenizer, SAMPLE_TOKENS):
            log(sample=text)


if __name__ == "__main__":
    main()
