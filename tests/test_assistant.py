"""Gemma 4's assistant against transformers: its logits and rows over what the target's own cache holds."""

import json
from pathlib import Path

import pytest
import torch
from parity import TOLERANCE, pool_for, random_tokens, randomise, save
from safetensors.torch import load_file, save_file
from test_gemma4 import FULL, K_IS_V, SHARED, SMALL, WINDOW, edit_config, gemma4
from torch import Tensor
from transformers import DynamicCache, Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

from bough.draft import Drafter, Grown, Wanted
from bough.draft.assistant import AssistantDrafter
from bough.errors import BadWeights, ModelError
from bough.models.gemma4_assistant import load_assistant
from bough.models.load import load_model
from bough.state.live import State
from bough.state.reservation import forward

SMALLER = {
    **SMALL,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "layer_types": [WINDOW, WINDOW, FULL],
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
CLUSTERED = {"use_ordered_embeddings": True, "num_centroids": 8, "centroid_intermediate_top_k": 3}
WHOLE = {"vocab_size": 96, "vocab_size_per_layer_input": 96}
WHOLE_TEXT = {"vocab_size": 96, "vocab_size_per_layer_input": 0}
DEPTH = 4


def assistant(width: int, text: dict | None = None, **options) -> Gemma4AssistantForCausalLM:
    torch.manual_seed(1)
    config = Gemma4TextConfig(**json.loads(json.dumps({**SMALLER, **(text or {})})))
    reference = Gemma4AssistantForCausalLM(
        Gemma4AssistantConfig(text_config=config, backbone_hidden_size=width, **options)
    )
    randomise(reference, seed=2)
    if reference.masked_embedding is not None:
        order = torch.randperm(config.vocab_size, generator=torch.Generator().manual_seed(3))
        reference.masked_embedding.token_ordering.copy_(order)
    return reference.eval()


class Pair:
    """A target and its assistant, theirs and ours."""

    def __init__(self, folder: Path, target: dict | None = None, text: dict | None = None, **options) -> None:
        self.target = gemma4(**(target or {}))
        self.assistant = assistant(self.target.config.hidden_size, text, **options)
        self.model = load_model(save(self.target, folder / "target"), dtype="float32")
        self.ours = load_assistant(save(self.assistant, folder / "assistant"), self.model)

    @torch.no_grad()
    def theirs(self, tokens: list[int], pieces: tuple[int, ...], depth: int) -> tuple[list[int], list[Tensor], Tensor]:
        """A greedy draft after `tokens`, the last of which was not fed: the tokens, their logits, and the last row.

        The target reads the text in pieces through a cache, whose K and V are then what the assistant sees: all keys,
        or those that the window of the next token covers.
        """
        cache, at, size = DynamicCache(config=self.target.config), 0, len(tokens) - 1
        for piece in [*pieces, size]:
            part = tokens[at : min(at + piece, size)]
            at += len(part)
            if part:
                out = self.target.model(torch.tensor([part]), past_key_values=cache, use_cache=True)
        shared = {}
        for i in range(len(cache.layers)):
            shared[self.target.config.layer_types[i]] = (cache.layers[i].keys, cache.layers[i].values)
        hidden, drafted, logits = out.last_hidden_state[:, -1:], [], []
        for _ in range(depth):
            embedded = self.target.model.embed_tokens(torch.tensor([[[*tokens, *drafted][-1]]]))
            step = self.assistant(
                inputs_embeds=torch.cat([embedded, hidden], -1),
                position_ids=torch.tensor([[size]]),
                shared_kv_states=shared,
            )
            hidden = step.last_hidden_state
            logits.append(step.logits[0, 0])
            drafted.append(int(logits[-1].argmax()))
        return drafted, logits, hidden[0, 0]


FULL_ONLY = {"global_head_dim": 8, "num_key_value_heads": 1, "num_attention_heads": 2, "layer_types": [FULL] * 3}
PAIRS = {
    "plain": {},
    "shared": {"target": SHARED},
    "k-is-v": {"target": {**SHARED, **K_IS_V}, "text": K_IS_V},
    "wide-window": {"target": {"sliding_window": 30}, "text": {"sliding_window": 30}},
    "one-head-full-only": {
        "target": {"global_head_dim": 8, "num_key_value_heads": 1},
        "text": FULL_ONLY,
    },
    "untied": {"tie_word_embeddings": False},
    "clustered": {"target": WHOLE, "text": WHOLE_TEXT, **CLUSTERED},
    "all-clusters": {
        "target": WHOLE,
        "text": WHOLE_TEXT,
        **CLUSTERED,
        "centroid_intermediate_top_k": 8,
    },
}


@pytest.fixture(params=PAIRS.values(), ids=PAIRS, scope="module")
def pair(request, tmp_path_factory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"), **request.param)


def read(pair: Pair, pool, texts: list[list[int]]) -> list[tuple[State, Tensor]]:
    """Feed all but the last token of each text, in two forwards; the states, and the rows of all tokens fed."""
    states = [State(pool) for _ in texts]
    pieces = []
    for start, end in ((0, 3), (3, None)):
        with (
            torch.inference_mode(),
            forward(pool, [(s, t[:-1][start:end]) for s, t in zip(states, texts, strict=True)]) as step,
        ):
            pieces.append(pair.model(step).split(step.rows.counts))
    return [(state, torch.cat(rows)) for state, *rows in zip(states, *pieces, strict=True)]


def test_logits_and_rows_at_several_depths(pair):
    """Rows of unequal lengths in one draft: before, at and past the window, and at page edges."""
    pool = pool_for(pair.model, page_tokens=4)
    texts = [random_tokens(pair.model.vocab_size, n, seed=n) for n in (2, 4, 5, 6, 7, 9, 10, 40)]
    fed = read(pair, pool, texts)
    seen: list[Tensor] = []

    def choose(logits: Tensor, rows, depth: int) -> Tensor:
        assert (list(rows), depth) == (list(range(len(texts))), len(seen))
        seen.append(logits)
        return logits.argmax(-1)

    drafter: Drafter = AssistantDrafter(pair.ours, pair.model)
    drafter.committed([Grown(i, "", t, rows, None) for i, (t, (_, rows)) in enumerate(zip(texts, fed, strict=True))])
    drafts = drafter.propose([Wanted(i, DEPTH, state) for i, (state, _) in enumerate(fed)], choose)
    for row, text in enumerate(texts):
        drafted, logits, _ = pair.theirs(text, (3,), DEPTH)
        for depth in range(DEPTH):
            error = (seen[depth][row] - logits[depth]).abs().max().item()
            assert error <= TOLERANCE, f"logits differ by {error:.2e} at row {row}, depth {depth}"
        assert drafts[row].tolist() == drafted
    for state, _ in fed:
        state.check()
        state.release()
    pool.check()


def test_rows_to_go_on_from(pair):
    pool, text = pool_for(pair.model), random_tokens(pair.model.vocab_size, 12, seed=4)
    ((state, rows),) = read(pair, pool, [text])
    with torch.inference_mode():
        embedded, seen = pair.model.embed(torch.tensor(text[-1:])), pair.ours.see([state])
        _, hidden = pair.ours(embedded, rows[-1:], torch.tensor([11]), seen)
    assert (hidden[0] - pair.theirs(text, (3,), 1)[2]).abs().max() <= TOLERANCE


def test_drafts_as_far_as_wanted_and_where_it_can(pair):
    pool, text = pool_for(pair.model), random_tokens(pair.model.vocab_size, 12, seed=5)
    ((state, rows),) = read(pair, pool, [text])
    drafter = AssistantDrafter(pair.ours, pair.model)

    def greedy(logits: Tensor, asked, depth: int) -> Tensor:
        assert asked == [1, 3]
        return logits.argmax(-1)

    drafter.committed([Grown(7, "", text, rows), Grown(8, "", text, None), Grown(9, "", text, rows)])
    wanted = [Wanted(8, 3, state), Wanted(7, 2, state), Wanted(5, 3, state), Wanted(9, 3, state), Wanted(7, 0, state)]
    drafts = [list(map(int, draft)) for draft in drafter.propose(wanted, greedy)]
    expected = pair.theirs(text, (3,), 3)[0]
    assert drafts == [[], expected[:2], [], expected, []]
    drafter.close(7)
    assert drafter.propose([Wanted(7, 2, state)], greedy) == [[]]


def test_drafts_after_a_round_that_was_kept_in_part(pair):
    """What the target forgot is not seen, and windows are those of the length it has now."""
    pool, text = pool_for(pair.model, page_tokens=4), random_tokens(pair.model.vocab_size, 20, seed=6)
    ((state, rows),) = read(pair, pool, [text[:10]])
    with torch.inference_mode(), state.begin() as transaction:
        with forward(pool, [(state, text[9:17])]) as step:
            more = pair.model(step)
        transaction.commit(3)
    drafter = AssistantDrafter(pair.ours, pair.model)
    drafter.committed([Grown(1, "", text[:10], rows), Grown(1, "", text[10:13], more[:3])])
    (draft,) = drafter.propose([Wanted(1, 3, state)], lambda logits, rows, depth: logits.argmax(-1))
    assert draft.tolist() == pair.theirs(text[:13], (3,), 3)[0]
    assert state.length == 12


class TestRefusals:
    @pytest.fixture
    def target(self, tmp_path):
        return load_model(save(gemma4(**WHOLE), tmp_path / "target"))

    @pytest.mark.parametrize(
        ("width", "text", "said"),
        [
            (48, {"vocab_size": 97}, "a vocabulary of 97, where the model's is 96"),
            (40, {}, "hidden rows of 40, where the model's is 48"),
            (48, {"head_dim": 16}, "sliding_attention layers that read WindowKV"),
            (48, {"sliding_window": 6}, "sliding_attention layers that read WindowKV"),
            (48, {"global_head_dim": 8}, "full_attention layers that read FullKV"),
        ],
    )
    def test_assistants_of_other_models(self, width, text, said, target, tmp_path):
        text = WHOLE_TEXT | text
        with pytest.raises(ModelError, match=said):
            load_assistant(save(assistant(width, text), tmp_path / "assistant"), target)

    def test_targets_of_other_kinds(self, tmp_path, target, llama_folder):
        folder = save(assistant(48, WHOLE_TEXT), tmp_path / "assistant")
        with pytest.raises(ModelError, match="another family"):
            load_assistant(folder, load_model(llama_folder))
        with pytest.raises(ModelError, match="is of type 'llama'"):
            load_assistant(llama_folder, target)
        with pytest.raises(ModelError, match="not a folder"):
            load_assistant(tmp_path / "nowhere", target)
        edit_config(
            folder / ".",
            text_config={**json.loads((folder / "config.json").read_text())["text_config"], "enable_moe_block": True},
        )
        with pytest.raises(ModelError, match="experts"):
            load_assistant(folder, target)

    def test_heads_that_do_not_cluster(self, tmp_path, target):
        folder = save(assistant(48, WHOLE_TEXT, **CLUSTERED), tmp_path / "assistant")
        path = folder / "model.safetensors"
        tensors = load_file(path)
        order = tensors["masked_embedding.token_ordering"]
        save_file({**tensors, "masked_embedding.token_ordering": order.clamp(max=90)}, path, metadata={"format": "pt"})
        with pytest.raises(BadWeights, match="every token once"):
            load_assistant(folder, target)
        edit_config(folder, num_centroids=7)
        with pytest.raises(ModelError, match="num_centroids 7"):
            load_assistant(folder, target)

    def test_missing_and_left_over_tensors(self, tmp_path, target):
        folder = save(assistant(48, WHOLE_TEXT), tmp_path / "assistant")
        path = folder / "model.safetensors"
        tensors = load_file(path)
        del tensors["post_projection.weight"]
        save_file({**tensors, "other": torch.zeros(1)}, path, metadata={"format": "pt"})
        with pytest.raises(BadWeights, match=r"missing: post_projection\.weight; 1 tensors unexpected: other"):
            load_assistant(folder, target)
