"""Forks, rewinds, snapshots, cuts and transactions on a tiny model of every family, against transformers.

A random walk over a few states; after each step every state touched is asked for the logits of one more token (on a
fork, so that asking changes nothing), and they must be those of a from-scratch run of the reference. A tiny alphabet
makes prefixes come back, so that the reference, remembered by prefix, is not the slow part.
"""

from contextlib import suppress
from functools import cache
from random import Random

import pytest
import torch
import transformers
from parity import pool_for, randomise, save

from bough.errors import StateError
from bough.models.load import load_model
from bough.state.live import State
from bough.state.reservation import forward
from bough.state.snapshot import merge

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
FAMILIES = {
    "llama": (transformers.LlamaConfig, {"num_hidden_layers": 2}),
    "mistral": (transformers.MistralConfig, {"num_hidden_layers": 2, "head_dim": 8, "sliding_window": 7}),
    "qwen3": (transformers.Qwen3Config, {"num_hidden_layers": 2, "head_dim": 8}),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {"num_hidden_layers": 3, "head_dim": 8, "sliding_window": 6,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "gemma4": (
        transformers.Gemma4TextConfig,
        {"num_hidden_layers": 4, "head_dim": 8, "global_head_dim": 16, "sliding_window": 6, "num_kv_shared_layers": 2,
         "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64,
         "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "lfm2": (
        transformers.Lfm2Config,
        {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    ),
    "lfm2_moe": (
        transformers.Lfm2MoeConfig,
        {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1,
         "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "qwen3_next": (
        transformers.Qwen3NextConfig,
        {"num_hidden_layers": 4, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, **LINEAR},
    ),
    "qwen3_5": (transformers.Qwen3_5TextConfig, {"num_hidden_layers": 4, "head_dim": 8, **LINEAR}),
    "qwen3_5_moe": (
        transformers.Qwen3_5MoeTextConfig,
        {"num_hidden_layers": 4, "head_dim": 8, "num_experts": 3, "num_experts_per_tok": 1,
         "moe_intermediate_size": 16, "shared_expert_intermediate_size": 8, **LINEAR},
    ),
}  # fmt: skip


class Walk:
    """States with their tokens, snapshots with theirs, and the things that can be done to them."""

    def __init__(self, reference, model, seed: int) -> None:
        self.reference, self.model, self.dice = reference, model, Random(seed)
        self.pool = pool_for(model, tokens=6000, page_tokens=4, running=16)
        self.tokens: dict[State, list[int]] = {State(self.pool): []}
        self.snapshots: list[tuple] = []
        self.oracle = cache(self._oracle)

    @torch.no_grad()
    def _oracle(self, tokens: tuple[int, ...]) -> torch.Tensor:
        return self.reference(torch.tensor([tokens]), use_cache=False).logits[0, -1].float()

    def some(self, least: int, most: int) -> list[int]:
        return [self.dice.randrange(3) for _ in range(self.dice.randint(least, most))]

    def feed(self, batch, cuts=None) -> torch.Tensor:
        with torch.inference_mode(), forward(self.pool, batch, cuts=cuts) as step:
            return self.model.logits(self.model(step))

    def step(self) -> None:
        actions = [self.extend, self.extend, self.fork, self.rewind, self.snapshot, self.split, self.join, self.restore,
                   self.restore, self.draft, self.draft, self.cancel, self.release]  # fmt: skip
        action = self.dice.choice(actions)
        for state in action():
            self.probe(state)
        self.pool.check()

    def probe(self, state: State) -> None:
        state.check()
        token = self.dice.randrange(3)
        fork = state.fork()
        ours = self.feed([(fork, [token])])[-1]
        fork.release()
        error = (ours - self.oracle((*self.tokens[state], token))).abs().max().item()
        assert error < 1e-4, f"logits differ by {error:.2e}"

    def extend(self) -> list[State]:
        states = self.dice.sample(list(self.tokens), min(2, len(self.tokens)))
        batch = [(state, self.some(0, 9)) for state in states]
        cuts = [sorted(self.dice.sample(range(s.length + 1, s.length + len(t) + 1), len(t) // 3)) for s, t in batch]
        self.feed(batch, cuts)
        for state, tokens in batch:
            self.tokens[state] += tokens
            if state.length > 60:
                self.back_to(state, 0)
        return states

    def back_to(self, state: State, length: int) -> None:
        state.rewind(length)
        self.tokens[state] = self.tokens[state][:length]

    def fork(self) -> list[State]:
        if len(self.tokens) > 6:
            return []
        state = self.dice.choice(list(self.tokens))
        length = self.dice.choice([state.length, *state.points])
        other = state.fork(length)
        self.tokens[other] = self.tokens[state][:length]
        return [other]

    def rewind(self) -> list[State]:
        state = self.dice.choice(list(self.tokens))
        length = self.dice.randint(0, state.length)
        if state.can_resume(length):
            self.back_to(state, length)
        else:
            with pytest.raises(StateError):
                state.rewind(length)
        return [state]

    def snapshot(self) -> list[State]:
        state = self.dice.choice(list(self.tokens))
        end = self.dice.choice([state.length, *state.points])
        taken = state.snapshot(self.dice.choice([0, end // 2]), end)
        if taken is not None:
            self.snapshots.append((taken, self.tokens[state][:end]))
        while len(self.snapshots) > 8:
            self.snapshots.pop(0)[0].close()
        return []

    def split(self) -> list[State]:
        if self.snapshots:
            snapshot, tokens = self.snapshots.pop(self.dice.randrange(len(self.snapshots)))
            at = self.dice.randint(snapshot.start, snapshot.end)
            for half in snapshot.split(at):
                if half is not None:
                    self.snapshots.append((half, tokens[: half.end]))
        return []

    def followers(self, snapshot, tokens) -> list[tuple]:
        return [each for each in self.snapshots if each[0].start == snapshot.end and each[1][: snapshot.end] == tokens]

    def join(self) -> list[State]:
        for left, tokens in self.snapshots:
            for right, longer in self.followers(left, tokens):
                self.snapshots = [each for each in self.snapshots if each[0] not in (left, right)]
                self.snapshots.append((merge(left, right), longer))
                return []
        return []

    def restore(self) -> list[State]:
        """Along a path of one or more snapshots, under any state that shares the tokens before it."""
        if not self.snapshots:
            return []
        snapshot, tokens = self.dice.choice(self.snapshots)
        path = [snapshot]
        while following := self.followers(path[-1], tokens):
            snapshot, tokens = self.dice.choice(following)
            path.append(snapshot)
        for state, held in self.tokens.items():
            if held[: path[0].start] == tokens[: path[0].start]:
                try:
                    state.restore(path, path[-1].end)
                    self.tokens[state] = list(tokens)
                except StateError:  # others of the path may have what the last one lacks, but need not
                    assert not path[-1].resumes
                return [state]
        return []

    def cancel(self) -> list[State]:
        """A forward that breaks off: in a transaction nothing is lost; otherwise a slot written in place is."""
        state, drafts = self.dice.choice(list(self.tokens)), self.dice.random() < 0.5
        transaction = state.begin() if drafts else None
        with suppress(InterruptedError), forward(self.pool, [(state, self.some(1, 5))]) as step:
            self.model(step)
            raise InterruptedError
        if transaction is not None:
            transaction.commit(0)
        if state.condition == "ready":
            return [state]
        state.release()
        del self.tokens[state]
        self.tokens[State(self.pool)] = []
        return []

    def draft(self) -> list[State]:
        states = self.dice.sample(list(self.tokens), min(3, len(self.tokens)))
        batch = [(state, self.some(1, 6)) for state in states]
        open_ones = {state: state.begin() for state in states if self.dice.random() < 0.8}
        self.feed(batch)
        for state, tokens in batch:
            kept = len(tokens)
            if state in open_ones:
                kept = self.dice.randint(0, len(tokens))
                open_ones[state].commit(kept)
            self.tokens[state] += tokens[:kept]
        return states

    def release(self) -> list[State]:
        if len(self.tokens) > 1:
            state = self.dice.choice(list(self.tokens))
            state.release()
            del self.tokens[state]
        return []

    def end(self) -> None:
        for state in self.tokens:
            state.release()
        for snapshot, _ in self.snapshots:
            snapshot.close()
        self.pool.check()
        assert all(store.used == 1 for store in self.pool.stores), "something leaked"


def walk(family: str, tmp_path, seeds: range, steps: int) -> None:
    kind, options = FAMILIES[family]
    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(kind(**{**SMALL, **options}, max_position_embeddings=128))
    randomise(reference.eval())
    model = load_model(save(reference, tmp_path), dtype="float32")
    for seed in seeds:
        one = Walk(reference, model, seed)
        for _ in range(steps):
            one.step()
        one.end()


@pytest.mark.parametrize("family", FAMILIES)
def test_walk(family, tmp_path):
    walk(family, tmp_path, range(2), steps=60)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_long_walk(family, tmp_path):
    walk(family, tmp_path, range(100, 112), steps=400)
