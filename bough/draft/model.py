"""The drafter that is a model itself: a smaller one that reads the same tokens, whatever its layers keep.

Every token told is fed at once, the last one too, and the hidden row of that one is kept. So the first token of a draft
takes no pass, and each one more takes one pass for all rows that want it. These passes are tried out on forks, which
are then released; where every layer reads all tokens, on the states themselves, which are then rewound.

A text that outgrows what the model can read is drafted for no longer. A model whose vocabulary is padded to another
size than the target's gives logits of the target's size all the same, and reads ids that it does not have as its last.
"""

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from bough.draft import Choose, Draft, Grown, Wanted
from bough.errors import PoolFull
from bough.models.model import Model
from bough.state.kinds import FullKV
from bough.state.live import State
from bough.state.reservation import forward

STEP_TOKENS = 512  # that one forward feeds at most, of all rows together


class ModelDrafter:
    """Keeps a state of the model level with each text, and drafts from its end.

    With layers of other kinds than FullKV it forks the states it drafts on: so many more must have room in the pool.
    """

    lag, reads_hidden = 0, False

    def __init__(self, model: Model, vocabulary: int, *, step_tokens: int = STEP_TOKENS) -> None:
        self.model, self.kinds = model, model.kinds
        self._vocabulary, self._step_tokens = vocabulary, step_tokens  # the target's size, and ours
        self._rewinds = all(kind is None or isinstance(kind, FullKV) for kind in model.kinds)
        self._last: dict[int, Tensor] = {}  # the model's row of the last token of each text

    @torch.inference_mode()
    def committed(self, rows: Sequence[Grown]) -> None:
        """Feed what each text has grown by, from where its state ends.

        If that fails (PoolFull, too), every state is at some length of its text, and rows not fed whole are not drafted
        for until they are.
        """
        told = [row for row in rows if row.tokens]
        states = [row.own for row in told]
        starts = [state.length for state in states]
        ends = [start + len(row.tokens) for start, row in zip(starts, told, strict=True)]
        for row in told:
            self.close(row.sequence)  # until its new end has been computed
        while behind := [i for i, state in enumerate(states) if state.length < min(ends[i], self.model.context)]:
            batch, cuts, room = [], [], self._step_tokens
            for i in behind:
                length = states[i].length
                count = min(room, ends[i] - length, self.model.context - length)
                piece = told[i].tokens[length - starts[i] : length - starts[i] + count]
                batch.append((states[i], [min(token, self.model.vocab_size - 1) for token in piece]))
                cuts.append([cut for cut in told[i].cuts if length < cut <= length + count])
                room -= count
            with forward(states[0].pool, batch, cuts=cuts) as step:
                hidden = self.model(step)
            for place, _, end in step.rows:
                i = behind[place]
                if states[i].length == ends[i]:
                    self._last[told[i].sequence] = hidden[end - 1].clone()

    @torch.inference_mode()
    def propose(self, rows: Sequence[Wanted], choose: Choose) -> Sequence[Draft]:
        """As many tokens as were asked for, or fewer where memory or what the model can read comes to an end."""
        drafts: list[Draft] = [[] for _ in rows]
        most = [min(row.most, self.model.context - row.own.length + 1) for row in rows]
        asked = [i for i, row in enumerate(rows) if most[i] > 0 and row.sequence in self._last]
        if not asked:
            return drafts
        asked.sort(key=lambda i: -most[i])  # so that those which go on are the first ones
        ids = torch.zeros(len(asked), most[asked[0]], dtype=torch.int64, device=self.model.device)
        hidden = torch.stack([self._last[rows[i].sequence] for i in asked])
        ids[:, 0] = choose(self._logits(hidden), asked, 0)
        made = 1
        with suppress(PoolFull), ExitStack() as undo:
            tried = [self._trial(rows[i].own, undo) for i in asked if most[i] > 1]
            for depth in range(1, most[asked[0]]):
                deeper = [i for i in asked if most[i] > depth]
                fed = ids[: len(deeper), depth - 1].clamp(max=self.model.vocab_size - 1)
                with forward(tried[0].pool, [(state, [0]) for state in tried[: len(deeper)]]) as step:
                    hidden = self.model(replace(step, given=fed))
                ids[: len(deeper), depth] = choose(self._logits(hidden), deeper, depth)
                made += 1
        for i, draft in zip(asked, ids, strict=True):
            drafts[i] = draft[: min(most[i], made)]
        return drafts

    def close(self, sequence: int) -> None:
        self._last.pop(sequence, None)

    def _trial(self, state: State, undo: ExitStack) -> State:
        """A state to feed guesses to, of which `undo` leaves no trace."""
        if self._rewinds:
            undo.callback(state.rewind, state.length)
            return state
        fork = state.fork()
        undo.callback(fork.release)
        return fork

    def _logits(self, hidden: Tensor) -> Tensor:
        """[N, the target's vocabulary]; ids that the model does not have are never drawn."""
        logits = self.model.logits(hidden)
        more = self._vocabulary - logits.shape[-1]  # below 0: some are cut off
        return F.pad(logits, (0, more), value=float("-inf")) if more else logits
