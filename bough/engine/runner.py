"""Runner: one forward of the model over live states, and what it measures about itself.

The only place in the engine that touches the model and the pool together.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from bough.models.model import Model
from bough.state.live import State
from bough.state.pool import Pool
from bough.state.reservation import Cuts, forward
from bough.state.step import Step

SCORE_ROWS = 256  # logits of so many rows at a time when a whole prompt is scored


class Runner:
    """A model and the pool its states live in."""

    def __init__(self, model: Model, pool: Pool) -> None:
        self.model, self.pool = model, pool

    @torch.inference_mode()
    def forward(
        self, batch: Sequence[tuple[State, Sequence[int]]], wanted: Sequence[int], cuts: Cuts | None = None
    ) -> tuple[Tensor, Tensor]:
        """Feed the states; the hidden rows of all tokens, and the logits of the last token of rows `wanted`."""
        with forward(self.pool, batch, cuts=cuts) as step:
            hidden = self.model(step)
            ends = torch.tensor(step.rows.counts).cumsum(0) - 1
            last = hidden[ends[list(wanted)].to(hidden.device)]
            return hidden, self.model.logits(last)

    @torch.inference_mode()
    def scores(self, hidden: Tensor, following: Sequence[int]) -> list[float]:
        """The logprob of each following token given its hidden row."""
        values: list[float] = []
        for start in range(0, len(following), SCORE_ROWS):
            rows = hidden[start : start + SCORE_ROWS][: len(following) - start]
            chosen = torch.tensor(following[start : start + SCORE_ROWS], device=rows.device)
            logprobs = torch.log_softmax(self.model.logits(rows).float(), -1)
            values += logprobs.gather(1, chosen[:, None])[:, 0].tolist()
        return values

    @torch.inference_mode()
    def rehearse(self, counts: Sequence[int], history: Sequence[int]) -> None:
        """A forward of this shape over made-up tokens; the pool is as before, but for its scratch entries."""
        step = Step.rehearsal(self.pool, counts, history)
        hidden = self.model(step)
        ends = torch.tensor(step.rows.counts).cumsum(0) - 1
        self.model.logits(hidden[ends.to(hidden.device)])
