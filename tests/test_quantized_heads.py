"""Heads that are the embedding: in a quantised model they are 8 bits of their own, and the embedding stays as it is."""

import math
from pathlib import Path

import pytest
import torch
from folders import edit_config
from gguf_files import reference, write
from parity import feed, pool_for, random_tokens, save
from safetensors.torch import save_file
from speculation import USED, _saved
from test_assistant import CLUSTERED, WHOLE, WHOLE_TEXT, assistant
from test_gemma4 import gemma4
from test_llama import SMALL
from test_mtp import dense
from test_quantize import SCHEMES, expanded, expect_close, logits_of, quantised_to, tensors_of, weights_of
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from bough import ops
from bough.cli import BUNDLED
from bough.draft.mtp import MTPHead
from bough.errors import BadWeights
from bough.models.gemma4_assistant import load_assistant
from bough.models.load import load_model
from bough.models.quantize import bits_per_weight
from bough.models.rounding import quantised
from bough.state.live import State
from bough.store.fit import count, skeleton

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def edit(folder: Path, tensors: dict[str, Tensor]) -> Path:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tied(folder: Path) -> Path:
    """The model in the folder, with its embedding for a head."""
    edit_config(folder, tie_word_embeddings=True)
    return edit(folder, {name: value for name, value in tensors_of(folder).items() if name != HEAD})


def without_head(folder: Path) -> Path:
    """A quantised folder as it was written before heads had bits of their own."""
    return edit(folder, {name: value for name, value in tensors_of(folder).items() if not name.startswith(HEAD)})


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", USED)
def test_every_family(tmp_path, family, scheme):
    source = tied(_saved(family, tmp_path / "source"))
    small = quantised_to(source, scheme, tmp_path / "small")
    stored, embedding = tensors_of(small), tensors_of(source)[EMBEDDING]
    assert torch.equal(stored[EMBEDDING], embedding) and stored[EMBEDDING].dtype == embedding.dtype
    assert torch.equal(stored[HEAD], quantised(embedding, 8).data)
    ours = load_model(small, dtype="float32")
    theirs = load_model(expanded(small, tmp_path / "plain"), dtype="float32")
    assert not isinstance(ours.head, Tensor)
    expect_close(ops.linear(torch.eye(embedding.shape[1]), ours.head).T, theirs.head, 1e-6)
    tokens = random_tokens(97, 40, seed=3)
    expected = logits_of(theirs, tokens, ())
    expect_close(logits_of(ours, tokens, (17, 1, 1, 5)), expected)
    assert count(small) == count(source) and skeleton(small).vocab_size == 97
    assert ours.parameters == load_model(source).parameters

    before = load_model(without_head(small), dtype="float32")
    assert before.head is before.embedding
    plain = load_model(expanded(small, tmp_path / "before"), dtype="float32")
    expect_close(logits_of(before, tokens, ()), logits_of(plain, tokens, ()))


@pytest.mark.parametrize("kind", ["llama-tied", "gemma3"])
def test_gguf(tmp_path, kind):
    small = quantised_to(write(reference(kind), tmp_path / "tiny.gguf"), "int4", tmp_path / "small")
    assert tensors_of(small)[HEAD].dtype == torch.int8
    ours, theirs = (load_model(each, dtype="float32") for each in (small, expanded(small, tmp_path / "plain")))
    tokens = random_tokens(ours.vocab_size, 20, seed=0)
    expect_close(logits_of(ours, tokens, (3,)), logits_of(theirs, tokens, ()))


def test_a_head_in_a_file_of_a_tied_model_is_the_one_that_is_rounded(tmp_path):
    """It is what the model is run with: mostly the embedding once more, and if not then one that was trained apart."""
    source = tied(_saved("gemma3", tmp_path / "source"))
    plain = tensors_of(quantised_to(source, "int4", tmp_path / "plain"))
    tensors = tensors_of(source)
    repeated = tensors_of(
        quantised_to(edit(source, {**tensors, HEAD: tensors[EMBEDDING].clone()}), "int4", tmp_path / "repeated")
    )
    assert plain.keys() == repeated.keys() and all(torch.equal(plain[name], repeated[name]) for name in plain)
    apart = quantised_to(edit(source, {**tensors, HEAD: 2 - tensors[EMBEDDING]}), "int4", tmp_path / "apart")
    assert torch.equal(tensors_of(apart)[HEAD], quantised(2 - tensors[EMBEDDING], 8).data)


@pytest.mark.parametrize("name", ["model.language_model.{}", "language_model.model.{}"])
def test_the_names_of_a_model_with_other_senses(tmp_path, name):
    source = tied(_saved("gemma3", tmp_path / "source"))
    tokens = random_tokens(97, 9, seed=0)
    expected = logits_of(load_model(quantised_to(source, "int8", tmp_path / "plain"), dtype="float32"), tokens, ())
    edit(source, {name.format(each.removeprefix("model.")): value for each, value in tensors_of(source).items()})
    model = load_model(quantised_to(source, "int8", tmp_path / "small"), dtype="float32")
    assert not isinstance(model.head, Tensor) and torch.equal(logits_of(model, tokens, ()), expected)


def test_an_embedding_that_is_the_codes_of_its_head(tmp_path):
    """All zeros, which is no repetition either."""
    source = tied(_saved("llama", tmp_path / "source"))
    edit(source, {name: value * (name != EMBEDDING) for name, value in tensors_of(source).items()})
    model = load_model(quantised_to(source, "int8", tmp_path / "small"), dtype="float32")
    assert not isinstance(model.head, Tensor)


@pytest.mark.parametrize(("vocabulary", "has_head"), [(1000, True), (1010, False)])
def test_a_head_that_would_take_more_than_is_saved(tmp_path, vocabulary, has_head):
    config = LlamaConfig(**{**SMALL, "vocab_size": vocabulary}, num_attention_heads=2, tie_word_embeddings=True)
    source = save(LlamaForCausalLM(config), tmp_path / "source")
    small = quantised_to(source, "int8", tmp_path / "small")
    assert (HEAD in tensors_of(small)) == has_head and bits_per_weight(small) < bits_per_weight(source)


def test_an_embedding_without_groups(tmp_path):
    config = LlamaConfig(**{**SMALL, "hidden_size": 20}, num_attention_heads=2, tie_word_embeddings=True)
    source = save(LlamaForCausalLM(config), tmp_path / "source")
    small = quantised_to(source, "int8", tmp_path / "small")
    model = load_model(small)
    assert HEAD not in tensors_of(small) and model.head is model.embedding


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_an_embedding_that_holds_no_number(tmp_path, value):
    source = tied(_saved("llama", tmp_path / "source"))
    tensors = tensors_of(source)
    tensors[EMBEDDING][-1, -1] = value
    with pytest.raises(BadWeights, match=rf"{EMBEDDING} in .* no finite number"):
        quantised_to(edit(source, tensors), "int8", tmp_path / "small")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bits_per_weight(tmp_path, scheme):
    """The head takes room, and is no more weights."""
    small = quantised_to(BUNDLED, scheme, tmp_path / "small")
    assert torch.equal(tensors_of(small)[EMBEDDING], tensors_of(BUNDLED)[EMBEDDING])
    weights = sum(value.numel() for value in tensors_of(BUNDLED).values())
    size = sum(value.nbytes for value in tensors_of(small).values())
    assert count(small) == weights and math.isclose(bits_per_weight(small), 8 * size / weights)
    head = sum(value.nbytes for name, value in tensors_of(small).items() if name.startswith(HEAD))
    assert math.isclose(bits_per_weight(without_head(small)), 8 * (size - head) / weights)
    untied = quantised_to(_saved("llama", tmp_path / "source"), scheme, tmp_path / "untied")
    assert count(untied) == sum(value.numel() for value in tensors_of(tmp_path / "source").values())


def test_mtp_heads_have_that_of_the_target(tmp_path):
    small = quantised_to(dense(tmp_path / "source", tie_word_embeddings=True), "int4", tmp_path / "small")
    head, x = MTPHead(load_model(small, dtype="float32")), torch.randn(3, 32)
    expect_close(head.logits(x), x @ weights_of(small)[HEAD].T)


@pytest.mark.parametrize("clustered", [False, True])
def test_assistants_stay_as_they_are(tmp_path, clustered):
    """Theirs may be read by rows, of the best clusters."""
    target = load_model(save(gemma4(**(WHOLE if clustered else {})), tmp_path / "target"), dtype="float32")
    options = {"text": WHOLE_TEXT, **CLUSTERED} if clustered else {}
    small = quantised_to(save(assistant(48, **options), tmp_path / "source"), "int8", tmp_path / "small")
    assert HEAD not in tensors_of(small)
    ours, theirs = load_assistant(small, target), load_assistant(expanded(small, tmp_path / "plain"), target)
    pool = pool_for(target)
    state = State(pool)
    feed(target, pool, [(state, random_tokens(90, 20, seed=2))])
    asked = (torch.randn(1, 48), torch.randn(1, 48), torch.tensor([20]))
    with torch.inference_mode():
        expect_close(ours(*asked, ours.see([state]))[0], theirs(*asked, theirs.see([state]))[0])
