"""The multi-token-prediction head of Qwen3-Next and Qwen3.5, and the drafter that uses it.

Entry t of the head is made of the target's hidden row of token t and of token t + 1, and says what token t + 2 is. Fed
its own row and the token drafted from it, it says the one after that. The head is one decoder layer with K and V of its
own; embedding and unembedding are the target's, unless the file has others for it.

An entry stands at the place in its state that it was fed to. Rope turns by differences of positions alone, so a state
may begin anywhere in a text.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bough import ops
from bough.draft import Choose, Draft, Grown, Wanted
from bough.errors import ModelError
from bough.models.blocks import GatedMLP, activation
from bough.models.layered import Layer
from bough.models.model import Model
from bough.models.qwen3_next import Qwen3Next, SparseMLP
from bough.models.weights import Weights
from bough.state.graphs import Graphs
from bough.state.kinds import Kind
from bough.state.reservation import forward
from bough.state.step import Step


class Kept:
    """The tensors that the target's loader kept, as a source of weights."""

    def __init__(self, tensors: Mapping[str, Tensor], where: str) -> None:
        self.tensors, self.where = tensors, where

    def names(self) -> Iterable[str]:
        return self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str) -> Tensor:
        return self.tensors[name]


class MTPHead:
    """Hidden rows and the tokens after them in, the head's own hidden rows out. Keeps nothing between calls."""

    def __init__(self, target: Model) -> None:
        if not isinstance(target, Qwen3Next) or not target.extra:
            raise ModelError("the model has no MTP head; draft with ngram or another model, or not at all")
        layers = {name.split(".")[2] for name in target.extra if name.startswith("mtp.layers.")}
        if layers != {"0"}:
            raise ModelError(f"the MTP head has {len(layers)} layers, and Bough drafts with those of one; use ngram")
        weights = Weights(Kept(target.extra, "mtp.*"), dtype=target.dtype, device=target.device)
        hidden = target.hidden_size
        self.target, self.dtype = target, target.dtype
        self.embedding_norm = target.read_norm(weights, "mtp.pre_fc_norm_embedding", hidden)
        self.hidden_norm = target.read_norm(weights, "mtp.pre_fc_norm_hidden", hidden)
        self.project = weights.linear("mtp.fc", hidden, 2 * hidden)
        attention = target.read_attention(weights, "mtp.layers.0.self_attn", 0)
        self.layer = Layer(
            target.read_norm(weights, "mtp.layers.0.input_layernorm", hidden),
            attention,
            target.read_norm(weights, "mtp.layers.0.post_attention_layernorm", hidden),
            _mlp(target, weights, "mtp.layers.0.mlp"),
        )
        self.norm = target.read_norm(weights, "mtp.norm", hidden)
        self.embedding, self.head = (
            weights.tensor(name, (target.vocab_size, hidden)) if name in weights else None
            for name in ("mtp.embed_tokens.weight", "mtp.lm_head.weight")
        )
        weights.finish()
        self.weight_bytes = weights.nbytes
        self.kinds: Sequence[Kind | None] = [attention.kind]

    def __call__(self, step: Step, hidden: Tensor) -> Tensor:
        """The head's rows [T, hidden] after its norm, of the step's tokens and the rows `hidden` of those before."""
        both = torch.cat([self.embedding_norm(self.embed(step.tokens)), self.hidden_norm(hidden)], -1)
        x, y = self.layer(self.project(both), None, step, self.target.rope(step.positions))
        return self.norm.whole(x, y)[1]

    def embed(self, tokens: Tensor) -> Tensor:
        return self.target.embed(tokens) if self.embedding is None else ops.embedding(tokens, self.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.target.logits(hidden) if self.head is None else ops.linear(hidden, self.head)


def _mlp(target: Qwen3Next, weights: Weights, prefix: str) -> GatedMLP | SparseMLP:
    """With experts where the file has a router for them, whatever the target's layers have."""
    config = target.config
    if f"{prefix}.gate.weight" in weights:
        return SparseMLP(config, weights, prefix)
    return GatedMLP(weights, prefix, target.hidden_size, config.intermediate_size, activation(config.hidden_act))


class MTPDrafter:
    """Keeps a state of the head level with each text, and drafts from its end."""

    lag, reads_hidden = 1, True

    def __init__(self, head: MTPHead) -> None:
        self.head, self.kinds = head, head.kinds
        self._last: dict[int, Tensor] = {}  # the head's row at the end of each text
        self._reads: Graphs | None = None  # of rows alone, and of rows and their logits
        self._says: Graphs | None = None

    @torch.inference_mode()
    def committed(self, rows: Sequence[Grown]) -> None:
        grown = [(row, row.hidden) for row in rows if row.hidden is not None and len(row.hidden)]
        for row in rows:
            self.close(row.sequence)  # until its new end has been computed
        if not grown:
            return
        batch = [(row.own, row.tokens[-len(hidden) :]) for row, hidden in grown]
        with forward(batch[0][0].pool, batch) as step:
            out = self._read(step, torch.cat([hidden for _, hidden in grown]))
        for (row, _), (_, _, end) in zip(grown, step.rows, strict=True):
            self._last[row.sequence] = out[end - 1].clone()

    @torch.inference_mode()
    def propose(self, rows: Sequence[Wanted], choose: Choose) -> Sequence[Draft]:
        """The first token is in the row kept; each one more takes a pass, whose entries are forgotten at the end."""
        asked = [i for i, row in enumerate(rows) if row.most and row.sequence in self._last]
        drafts: list[Draft] = [[] for _ in rows]
        if not asked:
            return drafts
        hidden = torch.stack([self._last[rows[i].sequence] for i in asked])
        states = [rows[i].own for i in asked]
        lengths = [state.length for state in states]
        columns: list[Tensor] = []
        try:
            for depth in range(max(rows[i].most for i in asked)):
                if depth:
                    with forward(states[0].pool, [(state, [0]) for state in states]) as step:
                        hidden, logits = self._say(replace(step, given=columns[-1]), hidden)
                else:
                    logits = self.head.logits(hidden)
                columns.append(choose(logits, asked, depth))
        finally:
            for state, length in zip(states, lengths, strict=True):
                state.rewind(length)
        for i, draft in zip(asked, torch.stack(columns, 1), strict=True):
            drafts[i] = draft[: rows[i].most]
        return drafts

    def _read(self, step: Step, hidden: Tensor) -> Tensor:
        """The head's rows of a step's tokens."""
        if self._reads is None:
            self._reads = Graphs(step.pool, self._head_alone, self.head.target.context)
        return self._reads(step, hidden)[0]

    def _say(self, step: Step, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The same, and their logits."""
        if self._says is None:
            self._says = Graphs(step.pool, self._head_and_logits, self.head.target.context)
        return self._says(step, hidden)

    def _head_alone(self, step: Step, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        assert hidden is not None
        out = self.head(step, hidden)
        return out, out

    def _head_and_logits(self, step: Step, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        assert hidden is not None
        out = self.head(step, hidden)
        return out, self.head.logits(out)

    def close(self, sequence: int) -> None:
        self._last.pop(sequence, None)
