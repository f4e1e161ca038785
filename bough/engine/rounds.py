"""Rounds: draft rounds whose tokens the host has not seen yet.

A drafter that reads nothing but a text can go on past its draft, as if all of that stood. Where that is likely enough,
the next round is launched on such a guess before the tokens of this one are read: neither the host nor the device
waits for the other. What it feeds first is the token that the device has chosen itself, behind as many as the device
has seen to stand. So if the guess was wrong the round gives one token, as a plain step does, and the answers are the
same.
"""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from bough import ops
from bough.engine import flight
from bough.engine.runner import Runner
from bough.engine.sampler import Drawing, RowSampling, drawing
from bough.engine.sequence import Sequence
from bough.engine.verify import Verdict, judged
from bough.ops.sent import sent
from bough.state.live import State
from bough.state.transaction import Transaction, commit


@dataclass(slots=True)
class Round:
    """The sequences that were each fed a token and a draft, and what is being drawn after each of these."""

    sequences: list[Sequence]
    fed: list[list[int]]  # a token, which may be a guess, and a draft
    numbers: Tensor  # on the device: where each row's tokens begin, how many it has, and all of them
    drawn: Drawing
    began: float  # seconds, by the clock for intervals
    opened: list[Transaction]  # none before the round before has landed
    astray: list[bool]  # whether a row's draft was for another text, as it turned out

    @property
    def drafts(self) -> list[list[int]]:
        return [tokens[1:] for tokens in self.fed]

    @property
    def kept(self) -> Tensor:
        """How many of its tokens stand, as the device sees it."""
        start, count, fed = self.numbers.tensor_split((len(self.fed), 2 * len(self.fed)))
        return ops.standing(self.drawn.ids, fed, start, count)

    def read(self) -> tuple[list[Verdict], set[int]]:
        """What stands of each draft, and the rows whose next tokens were drawn from what are no numbers."""
        sampled, start, verdicts, bad = self.drawn.result(), 0, [], set()
        options = list(zip(sampled.tokens, sampled.logprobs, strict=True))
        for row, draft in enumerate(self.drafts):
            verdicts.append(judged(draft, options[start : start + len(draft) + 1]))
            if not set(range(start, start + len(verdicts[row].tokens))).isdisjoint(sampled.bad):
                bad.add(row)
            start += len(draft) + 1
        return verdicts, bad


def can_fly(sequence: Sequence, draft: Tokens[int]) -> bool:
    """Whether the device alone can tell where the sequence goes on after this draft, if it goes on at all.

    Nothing in the draft may end it: its state would be behind its end. And what is drawn must not depend on how many
    tokens there were.
    """
    ends = sequence.stops is not None or not sequence.end_tokens.isdisjoint(draft)
    return flight.can_fly(sequence) and not ends and sequence.request.params.temperature == 0


def launch(runner: Runner, sequences: list[Sequence], drafts: list[list[int]], began: float) -> Round:
    """Feed each sequence its last token and its draft, which to make was begun then."""
    states, opened = list[State](), list[Transaction]()
    for sequence in sequences:
        assert sequence.state is not None
        states.append(sequence.state)
    fed = [[sequence.tokens[-1], *draft] for sequence, draft in zip(sequences, drafts, strict=True)]
    try:
        opened += [state.begin() for state in states]
        _, logits = runner.forward(list(zip(states, fed, strict=True)), [len(tokens) for tokens in fed])
    except BaseException:
        commit([(each, 0) for each in opened])
        raise
    return _drawn(runner, sequences, fed, logits, began, opened)


def follow(runner: Runner, before: Round, fed: list[list[int]], began: float) -> Round | None:
    """Feed each sequence the token that the device has chosen for it last, and a draft as long as before; None where
    that cannot be. Of `fed` the first token is a guess at that one. It has to land when the round before is read."""
    logits = runner.go_on(before.kept, before.drawn.ids, [token for tokens in fed for token in tokens])
    return None if logits is None else _drawn(runner, before.sequences, fed, logits, began, [])


def _drawn(
    runner: Runner,
    sequences: list[Sequence],
    fed: list[list[int]],
    logits: Tensor,
    began: float,
    opened: list[Transaction],
) -> Round:
    counts = [len(tokens) for tokens in fed]
    flat = [*accumulate(counts[:-1], initial=0), *counts, *(token for tokens in fed for token in tokens)]
    numbers = sent(torch.tensor(flat, dtype=torch.int32), runner.pool.device)
    sampling = list[RowSampling]()  # greedy: what comes before a token makes no difference
    for sequence, count in zip(sequences, counts, strict=True):
        sampling += [sequence.sampling_at(0)] * count
    return Round(sequences, fed, numbers, drawing(logits, sampling), began, opened, [False] * len(fed))
