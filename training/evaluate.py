"""What a network is worth: bits per byte on unseen books, how often drafts are right, and a few samples to read."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from training.data import END_ID
from training.model import Network

PROMPTS = (
    "## CHAPTER I\n\n",
    "Once upon a time, in a small village by the sea, there lived",
    "The old man looked up from his book and said,",
    "It was a dark and stormy night; the rain fell in torrents, and",
)


def windows(row: Tensor, length: int, batch: int, ahead: int) -> Iterator[tuple[Tensor, int]]:
    """Batches of windows that advance by half their length, and from which row on they are news.

    Every token but the first half of the first window is seen with at least half a window before it.
    """
    half = length // 2
    starts = range(0, len(row) - length - ahead, half)
    yield torch.stack([row[: length + ahead]]).long(), 0
    for first in range(1, len(starts), batch):
        rows = [row[start : start + length + ahead] for start in starts[first : first + batch]]
        yield torch.stack(rows).long(), half


@torch.inference_mode()
def bits_per_byte(network: Network, row: Tensor, tokenizer: Tokenizer, length: int = 1024, batch: int = 32) -> float:
    """Cost of each token given those before it, over the bytes of the text they spell."""
    bits = 0.0
    scored = []
    for tokens, new in windows(row, length, batch, ahead=1):
        logits = network.logits(network(tokens[:, :-1])[:, new:]).float()
        targets = tokens[:, new + 1 :]
        bits += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item() / math.log(2)
        scored += targets.flatten().tolist()
    return bits / len(tokenizer.decode(scored).encode())


@torch.inference_mode()
def acceptance(network: Network, row: Tensor, depth: int = 3, length: int = 1024, batch: int = 32) -> list[float]:
    """For each depth, how often the draft is the network's own greedy choice, the drafts before it being the text."""
    right = torch.zeros(depth, device=row.device)
    seen = torch.zeros(depth, device=row.device)
    for tokens, new in windows(row, length, batch, ahead=depth):
        hidden = network(tokens[:, :length])
        choice = network.logits(hidden).argmax(-1)
        for ahead, draft in enumerate(network.drafts(hidden, tokens, depth), 1):
            # Row t of pass `ahead` and row t + ahead of the network predict the same token.
            agree = network.logits(draft).argmax(-1)[:, new : length - ahead] == choice[:, new + ahead :]
            right[ahead - 1] += agree.sum()
            seen[ahead - 1] += agree.numel()
    return (right / seen).tolist()


@torch.inference_mode()
def samples(network: Network, tokenizer: Tokenizer, tokens: int, temperature: float = 0.8, seed: int = 0) -> list[str]:
    """A continuation of each prompt. Every token is computed from the whole row: slow and simple."""
    random = torch.Generator(network.embedding.device).manual_seed(seed)
    texts = []
    for prompt in PROMPTS:
        row = torch.tensor([[END_ID, *tokenizer.encode(prompt).ids]], device=network.embedding.device)
        for _ in range(tokens):
            logits = network.logits(network(row)[:, -1]).float()
            drawn = torch.multinomial((logits / temperature).softmax(-1), 1, generator=random)
            row = torch.cat((row, drawn), dim=1)
        texts.append(tokenizer.decode(row[0, 1:].tolist()))
    return texts
