"""The drafter that asks Gemma 4's assistant. It keeps nothing but the target's last row and token of each text."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bough.draft import Choose, Draft, Grown, Wanted
from bough.models.gemma4 import Gemma4
from bough.models.gemma4_assistant import Gemma4Assistant
from bough.state.kinds import Kind


class AssistantDrafter:
    """Drafts from the K and V of the target's states, gathered once a draft."""

    kinds: Sequence[Kind | None] = ()
    lag, reads_hidden = 0, True

    def __init__(self, assistant: Gemma4Assistant, target: Gemma4) -> None:
        self.assistant, self.target = assistant, target
        self._last: dict[int, tuple[int, Tensor]] = {}  # the last token of each text, and the row of the one before

    def committed(self, rows: Sequence[Grown]) -> None:
        for row in rows:
            self.close(row.sequence)
            if row.hidden is not None and len(row.hidden):
                self._last[row.sequence] = (row.tokens[-1], row.hidden[-1].clone())

    @torch.inference_mode()
    def propose(self, rows: Sequence[Wanted], choose: Choose) -> Sequence[Draft]:
        asked = [i for i, row in enumerate(rows) if row.most and row.sequence in self._last]
        drafts: list[Draft] = [[] for _ in rows]
        if not asked:
            return drafts
        states = [state for i in asked if (state := rows[i].target) is not None]
        seen = self.assistant.see(states)
        device = self.target.device
        positions = torch.tensor([state.length for state in states], device=device)
        last = [self._last[rows[i].sequence] for i in asked]
        ids = torch.tensor([token for token, _ in last], device=device)
        hidden = torch.stack([row for _, row in last])
        columns: list[Tensor] = []
        for depth in range(max(rows[i].most for i in asked)):
            logits, hidden = self.assistant(self.target.embed(ids), hidden, positions, seen)
            ids = choose(logits, asked, depth)
            columns.append(ids)
        for i, draft in zip(asked, torch.stack(columns, 1), strict=True):
            drafts[i] = draft[: rows[i].most]
        return drafts

    def close(self, sequence: int) -> None:
        self._last.pop(sequence, None)
