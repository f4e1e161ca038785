"""Verifying drafts: which of them the target would have written itself, and what it writes after them.

A draft token stands while it equals the token that the target draws there with the request's own noise. So the tokens
are those of a plain run, whatever was drafted. One transfer to the host, however many rows there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from bough.draft import Draft
from bough.engine.grammar import masks
from bough.engine.sampler import Logprobs, sample
from bough.engine.sequence import Sequence as Running


@dataclass(frozen=True, slots=True)
class Verdict:
    """The next tokens of a sequence: those of its draft that stand, and one more."""

    tokens: list[tuple[int, Logprobs | None]]

    @property
    def accepted(self) -> int:
        return len(self.tokens) - 1


def verify(logits: Tensor, rows: Sequence[tuple[Running, Draft]]) -> list[Verdict]:
    """Judge drafts by logits [R, V]: for each sequence those after its text and after each of its draft's tokens.

    Raises BadLogits, which names the rows at fault.
    """
    sampling = []
    drafts = [_looked_at(sequence, draft) for sequence, draft in rows]
    allowed = masks([(sequence.matcher, drafted) for (sequence, _), drafted in zip(rows, drafts, strict=True)])
    for (sequence, draft), drafted, mask in zip(rows, drafts, allowed, strict=True):
        follow = [None] * (len(draft) + 1) if mask is None else mask.unbind()
        sampling += [sequence.sampling_at(depth, drafted[:depth], may) for depth, may in enumerate(follow)]
    on_device = [draft for _, draft in rows if isinstance(draft, Tensor)]
    sampled = sample(logits, sampling, along=on_device)
    along, chosen = iter(sampled.along), iter(zip(sampled.tokens, sampled.logprobs, strict=True))
    verdicts = []
    for _, draft in rows:
        guesses = [next(along) for _ in draft] if isinstance(draft, Tensor) else list(draft)
        verdicts.append(judged(guesses, [next(chosen) for _ in range(len(draft) + 1)]))
    return verdicts


def judged(draft: Sequence[int], options: Sequence[tuple[int, Logprobs | None]]) -> Verdict:
    """What becomes of a draft, by what was drawn before and after each of its tokens."""
    stood = 0
    while stood < len(draft) and draft[stood] == options[stood][0]:
        stood += 1
    return Verdict(list(options[: stood + 1]))


def _looked_at(sequence: Running, draft: Draft) -> list[int]:
    """The draft on the host; without its tokens if it is on a device and nobody asks for them."""
    if not isinstance(draft, Tensor):
        return list(draft)
    # Penalties count the drafted tokens as written in the rows after them; what a grammar allows depends on them.
    known: list[int] = draft.tolist() if sequence.counts is not None or sequence.matcher is not None else []
    return known
