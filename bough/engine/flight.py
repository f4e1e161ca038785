"""Flight: a decode step whose tokens the host has not seen yet.

While nothing that the host knows decides what a sequence writes (no draft, no grammar, no penalty), its next step can
be launched on the tokens that the device has just chosen. The host reads them, tells clients and plans while the device
is at work on that step: neither waits for the other. A sequence that turns out to have ended leaves its row of that
step to nobody; its state holds one token more, the last one of its text.
"""

import time
from dataclasses import dataclass

from torch import Tensor

from bough.engine.runner import Runner
from bough.engine.sampler import Drawing, drawing
from bough.engine.sequence import Sequence
from bough.state.live import State


@dataclass(frozen=True, slots=True)
class Flight:
    """The sequences that were each fed a token, and what is being drawn for them."""

    sequences: list[Sequence]
    drawn: Drawing
    began: float  # seconds, by the clock for intervals

    def going_on(self) -> list[int]:
        """The rows whose sequences will take one more token after the one that is on its way, as far as one knows."""
        return [
            row
            for row, sequence in enumerate(self.sequences)
            if not sequence.handle.done and len(sequence.tokens) + 1 < sequence.limit
        ]


def can_fly(sequence: Sequence) -> bool:
    """Whether the host need not know a token to choose the next."""
    state = sequence.state
    return (
        sequence.matcher is None
        and sequence.counts is None
        and state is not None
        and state.known == state.length >= len(sequence.request.prompt)
        and not any(at > state.length for at in sequence.cuts)
    )


def launch(runner: Runner, sequences: list[Sequence], chosen: Tensor | None = None) -> Flight:
    """Feed each sequence its last token; or the one just `chosen` on the device, which it has yet to be told of."""
    began, depth = time.perf_counter(), 0 if chosen is None else 1
    batch: list[tuple[State, list[int]]] = []
    for sequence in sequences:
        assert sequence.state is not None
        batch.append((sequence.state, [0] if depth else sequence.tokens[-1:]))
    _, logits = runner.forward(batch, [1] * len(batch), given=chosen)
    return Flight(sequences, drawing(logits, [sequence.sampling_at(depth) for sequence in sequences]), began)
