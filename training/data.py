"""From compressed text to batches: books, the tokenizer learnt from them, and which tokens a step sees.

Batches depend only on the seed and the step, so a run that stops and resumes sees what an unbroken one would.
"""

import lzma
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

END = "<|endoftext|>"
END_ID = 0  # special tokens come first in the vocabulary
VALIDATION_BYTES_PER_BOOK = 80_000
# What BPE never merges across: words with their leading space, digits one by one, signs with the line ends after them.
WORDS = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+\n*|\s*\n+|\s+(?!\S)|\s+"


def books(path: Path) -> list[str]:
    """The books of an .xz text file, in which END stands between them."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [book.strip() for book in file.read().split(END)]


def opening(book: str) -> str:
    """The part of a validation book that is scored, cut at a line's end."""
    return book.encode()[:VALIDATION_BYTES_PER_BOOK].decode(errors="ignore").rpartition("\n")[0]


def learn_tokenizer(library: list[str], vocabulary: int) -> Tokenizer:
    """Byte-level BPE; a tenth of every book is enough to learn from, and ten times quicker."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((book[: len(book) // 10] for book in library), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, library: list[str]) -> Tensor:
    """All books in one row of tokens, END before each of them and at the end."""
    rows = [np.array([END_ID], dtype=np.int32)]
    for start in range(0, len(library), 64):  # a bounded number of encodings at a time: each is large
        for encoding in tokenizer.encode_batch_fast(library[start : start + 64]):
            rows.append(np.array([*encoding.ids, END_ID], dtype=np.int32))
    return torch.from_numpy(np.concatenate(rows))


class Batches:
    """Windows of `length` tokens that tile the row, shuffled anew and shifted anew in every epoch."""

    def __init__(self, row: Tensor, length: int, ahead: int, size: int, seed: int) -> None:
        """A window comes with `ahead` tokens after it: targets, and what drafts are predicted from."""
        self.row, self.length, self.ahead, self.size, self.seed = row, length, ahead, size, seed
        self.per_epoch = (len(row) - 2 * length - ahead) // length // size
        if self.per_epoch < 1:
            raise ValueError(f"{len(row)} tokens are too few for one batch of {size} windows of {length}")
        self.epoch = -1

    def at(self, step: int) -> Tensor:
        """[size, length + ahead] tokens."""
        epoch, position = divmod(step, self.per_epoch)
        if epoch != self.epoch:
            random = np.random.default_rng((self.seed, epoch))
            starts = random.permutation(self.per_epoch * self.size) * self.length + random.integers(self.length)
            self.starts, self.epoch = torch.from_numpy(starts).to(self.row.device), epoch
        starts = self.starts[position * self.size : (position + 1) * self.size]
        return self.row[starts[:, None] + torch.arange(self.length + self.ahead, device=starts.device)].long()
