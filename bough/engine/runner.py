"""Runner: one forward of the model over live states, and what it measures about itself.

The only place in the engine that touches the model and the pool together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from bough import ops
from bough.draft import Draft
from bough.models.model import Model
from bough.ops.sent import sent
from bough.state.graphs import Graphs, settle
from bough.state.live import State
from bough.state.pool import Pool
from bough.state.reservation import Cuts, forward
from bough.state.steady import Batch, Tokens
from bough.state.step import Ends, Step
from bough.state.transaction import Transaction

SCORE_ROWS = 256  # logits of so many rows at a time when a whole prompt is scored


class Runner:
    """A model and the pool its states live in."""

    def __init__(self, model: Model, pool: Pool, last_layer: int | None = None, context: int | None = None) -> None:
        self.model, self.pool = model, pool
        self.last_layer = last_layer  # where slots keep the last hidden row too, for a drafter that goes on from it
        self.graphs = Graphs(pool, self._all, context or model.context)

    def forward(
        self,
        batch: Batch,
        wanted: Sequence[int],
        cuts: Cuts | None = None,
        drafts: Mapping[int, Draft] | None = None,
        given: Tensor | None = None,
        *,
        hidden: bool = False,
    ) -> tuple[Tensor | None, Tensor]:
        """Feed the states; the hidden rows of all tokens, if they are asked for, and the logits of the last `wanted`
        tokens of each row.

        Rows with drafts are fed these after their own tokens; where tokens are `given` on the device, all are fed
        those. The logits hold until it is called again.
        """
        made = {row: draft for row, draft in drafts.items() if isinstance(draft, Tensor)} if drafts else {}
        fed = _with_drafts(batch, drafts, made) if drafts else batch
        if made and given is None:
            given = _with_made([tokens for _, tokens in fed], made, self.pool.device)
        every = list(wanted) == [len(tokens) for _, tokens in fed]
        if every and not any(cuts or ()) and (done := self.graphs.steady(fed, given)) is not None:
            return done[0].clone() if hidden else None, done[1]
        with forward(self.pool, fed, cuts=cuts, given=given, settled=False) as step:
            if every and step.rows.are_short:
                all_rows, logits = self.graphs(step)
                return all_rows.clone() if hidden else None, logits
            settle(step)
            return self._last(step, Ends.of(step.rows, wanted, self.pool.device), hidden=hidden)

    def go_on(self, kept: Tensor, chosen: Tensor, tokens: Sequence[int]) -> Tensor | None:
        """Begin the next round of the states that were fed last, before anybody knows how many tokens of it they keep.

        The logits of all its tokens, or None (Graphs.go_on); it has to `land` before anything else is fed.
        """
        done = self.graphs.go_on(kept, chosen, tokens)
        return None if done is None else done[1]

    def may_go_on(self) -> bool:
        """Whether that can be."""
        return self.graphs.may_go_on()

    def land(self, kept: Sequence[int]) -> list[Transaction]:
        """So many tokens of the round before are kept: the transactions of the one that has begun."""
        return self.graphs.land(kept)

    def lose(self) -> None:
        """Give up a round that has begun, if there is one, and its states."""
        self.graphs.lose()

    @torch.inference_mode()
    def _last(self, step: Step, last: Ends, *, hidden: bool) -> tuple[Tensor | None, Tensor]:
        """The hidden rows of all tokens, if they are asked for, and the logits of the last ones."""
        if not hidden and self.last_layer is None:
            return None, self.model.logits(self.model(replace(step, wanted=last)))
        all_rows = self._hidden(step)
        return all_rows if hidden else None, self.model.logits(all_rows[last.places])

    def _hidden(self, step: Step) -> Tensor:
        hidden = self.model(step)
        if self.last_layer is not None:
            ops.carry(hidden, step.rows, stored=step.slots(self.last_layer, "conv"))
        return hidden

    @torch.inference_mode()
    def _all(self, step: Step, _: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The hidden rows and the logits of all tokens."""
        hidden = self._hidden(step)
        return hidden, self.model.logits(hidden)

    def last_row(self, state: State | None) -> Tensor | None:
        """The hidden row of the last token that a state holds, where it is kept."""
        if self.last_layer is None or state is None or state.slot is None:
            return None
        state.settle()
        return self.pool.part(self.last_layer, "conv")[state.slot, 0].to(self.model.dtype).clone()

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


def _with_drafts(batch: Batch, drafts: Mapping[int, Draft], made: Mapping[int, Tensor]) -> Batch:
    """The rows with their drafts after their own tokens, or as many tokens in their place if these are on a device."""
    if made:
        drafts = {**drafts, **{row: [0] * len(draft) for row, draft in made.items()}}
    return [(state, [*tokens, *drafts[row]] if row in drafts else tokens) for row, (state, tokens) in enumerate(batch)]


def _with_made(fed: Sequence[Tokens], made: Mapping[int, Tensor], device: torch.device) -> Tensor:
    """The tokens of all rows on a device with the drafts that are there in their places: nobody waits for it."""
    ends = list(accumulate(map(len, fed)))
    places = [at for row, draft in made.items() for at in range(ends[row] - len(draft), ends[row])]
    lists = [token for tokens in fed for token in tokens], places
    tokens, where = (sent(torch.tensor(each, dtype=torch.int64), device) for each in lists)
    return tokens.index_copy(0, where, torch.cat(list(made.values())).to(tokens))
