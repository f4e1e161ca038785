"""Which drafter each `draft` option gives, and what is said where there is none to be had."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from gguf_files import reference, write
from parity import save
from test_assistant import assistant
from test_gemma4 import gemma4
from test_mtp import dense, mtp_tensors

from bough.draft.assistant import AssistantDrafter
from bough.draft.load import drafter_for, tokens_of
from bough.draft.model import ModelDrafter
from bough.draft.mtp import MTPDrafter
from bough.draft.ngram import NGram
from bough.errors import BadWeights, ModelError, OptionError
from bough.models.load import load_model
from bough.models.model import Model
from bough.models.shards import INDEX, WHOLE, write_tensors


@pytest.fixture(scope="module")
def hybrid(hybrid_folder) -> Model:
    return load_model(hybrid_folder, dtype="float32")


@pytest.fixture(scope="module")
def gemma_folder(tmp_path_factory) -> Path:
    """A Gemma 4 with its assistant in it."""
    folder, target = tmp_path_factory.mktemp("gemma"), gemma4()
    save(assistant(target.config.hidden_size), folder / "assistant")
    return save(target, folder)


@pytest.fixture
def another(tmp_path, llama_folder):
    """A copy of the Llama whose tokenizer was changed."""

    def changed(change) -> Path:
        folder = Path(shutil.copytree(llama_folder, tmp_path / "another"))
        file = folder / "tokenizer.json"
        tokenizer = json.loads(file.read_text())
        change(tokenizer)
        file.write_text(json.dumps(tokenizer))
        return folder

    return changed


def test_none_and_ngram(hybrid):
    assert drafter_for(None, hybrid) is None
    assert isinstance(drafter_for("ngram", hybrid), NGram)


def test_auto_takes_what_the_model_ships(tmp_path, gemma_folder, hybrid):
    shipped = {
        MTPDrafter: drafter_for("auto", load_model(dense(tmp_path / "mtp"))),
        AssistantDrafter: drafter_for("auto", load_model(gemma_folder), path=gemma_folder),
        NGram: drafter_for("auto", hybrid),
    }
    for kind, drafter in shipped.items():
        assert isinstance(drafter, kind)


def test_auto_makes_do_and_says_why(tmp_path, gemma_folder, caplog):
    tensors = mtp_tensors(sparse=False)
    more = {name.replace("layers.0", "layers.1"): value.clone() for name, value in tensors.items() if "layers" in name}
    with caplog.at_level(logging.WARNING, "bough"):
        assert isinstance(drafter_for("auto", load_model(dense(tmp_path / "two", {**tensors, **more}))), NGram)
        broken = Path(shutil.copytree(gemma_folder, tmp_path / "broken"))
        (broken / "assistant" / "model.safetensors").write_bytes(b"no")
        assert isinstance(drafter_for("auto", load_model(broken), path=broken), NGram)
    head, damaged = (record.getMessage() for record in caplog.records)
    assert "the MTP head has 2 layers" in head
    assert str(broken / "assistant") in damaged


def test_mtp(tmp_path, hybrid):
    assert isinstance(drafter_for("mtp", load_model(dense(tmp_path))), MTPDrafter)
    with pytest.raises(ModelError, match="no MTP head; draft with ngram"):
        drafter_for("mtp", hybrid)


def test_a_head_in_files_of_its_own(tmp_path, hybrid, gemma_folder):
    """In one, or in several, with a config or without; it goes before the model's own."""
    target, tensors = load_model(dense(tmp_path / "target")), mtp_tensors(sparse=False)
    for at, most in enumerate((1 << 30, 20_000)):
        folder = tmp_path / f"head{at}"
        folder.mkdir()
        own = {name: tensor + at + 1 for name, tensor in tensors.items()}
        write_tensors(folder, own, most)
        paths = [folder, folder / (INDEX if at else WHOLE)]
        for path in (*paths, folder):
            drafter = drafter_for(path, target)
            assert isinstance(drafter, MTPDrafter)
            assert all(torch.equal(target.extra[name], own[name]) for name in own)
            shutil.copy(tmp_path / "target" / "config.json", folder)
    with pytest.raises(ModelError, match="the model is of another family"):
        drafter_for(folder, load_model(gemma_folder))
    with pytest.raises(ModelError, match="has no MTP head, since no tensor in it is called mtp"):
        drafter_for(gemma_folder / "model.safetensors", hybrid)
    with pytest.raises(BadWeights, match="of the wrong shape"):
        drafter_for(folder, hybrid)
    (folder / INDEX).write_text("{}")
    with pytest.raises(BadWeights, match="has no weight_map"):
        drafter_for(folder / INDEX, target)
    (tmp_path / "broken.safetensors").write_bytes(b"no")
    with pytest.raises(BadWeights, match="is damaged or cut short"):
        drafter_for(tmp_path / "broken.safetensors", target)


def test_assistant(gemma_folder, hybrid, tmp_path):
    target = load_model(gemma_folder)
    for option, path in (("assistant", gemma_folder), (gemma_folder / "assistant", None)):
        drafter = drafter_for(option, target, path=path)
        assert isinstance(drafter, AssistantDrafter)
        assert drafter.target is target
    for path in (None, tmp_path):
        with pytest.raises(OptionError, match="give the path of the assistant as draft"):
            drafter_for("assistant", target, path=path)
    with pytest.raises(ModelError, match="another family"):
        drafter_for(gemma_folder / "assistant", hybrid)


def test_a_draft_model(hybrid, hybrid_folder, llama_folder):
    """In the target's dtype, told of as it loads, and given as a string or a path."""
    told: list[tuple[int, int]] = []
    drafter = drafter_for(str(llama_folder), hybrid, path=hybrid_folder, progress=lambda *each: told.append(each))
    assert isinstance(drafter, ModelDrafter)
    assert told[-1][0] == told[-1][1]
    half = load_model(hybrid_folder, dtype="bfloat16")
    drafter = drafter_for(llama_folder, half)
    assert isinstance(drafter, ModelDrafter)
    assert (drafter.model.dtype, half.dtype) == (torch.bfloat16, torch.bfloat16)
    assert drafter.kinds == drafter.model.kinds


def test_a_home_folder_is_found(hybrid, llama_folder, monkeypatch):
    monkeypatch.setenv("HOME", str(llama_folder.parent))
    assert isinstance(drafter_for(f"~/{llama_folder.name}", hybrid), ModelDrafter)


def test_tokens_of_another_tokenizer(hybrid, hybrid_folder, another):
    def reverse(tokenizer: dict) -> None:
        vocab = tokenizer["model"]["vocab"]
        ids = sorted(vocab.values())
        tokenizer["model"]["vocab"] = {token: ids[-1 - ids.index(i)] for token, i in vocab.items()}
        tokenizer["added_tokens"] = []

    with pytest.raises(ModelError, match="tokens are others in the model's tokenizer; give a smaller model of the"):
        drafter_for(another(reverse), hybrid, path=hybrid_folder)


def test_a_few_special_tokens_may_differ(hybrid, hybrid_folder, another):
    def rename(tokenizer: dict) -> None:
        tokenizer["added_tokens"][1]["content"] = "<start>"
        vocab = tokenizer["model"]["vocab"]
        vocab["<start>"] = vocab.pop("<|im_start|>")
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][1], "id": 300, "content": "<more>"})

    assert isinstance(drafter_for(another(rename), hybrid, path=hybrid_folder), ModelDrafter)


def test_a_broken_tokenizer(hybrid, hybrid_folder, another):
    folder = another(lambda tokenizer: tokenizer["model"].update(type="?"))
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a usable tokenizer"):
        drafter_for(folder, hybrid, path=hybrid_folder)


def test_gguf_files(tmp_path, hybrid):
    """Their tokens are in the file; without them sizes must agree, with them padding may differ."""
    words = [f"t{i}" for i in range(96)]
    plain = write(reference("llama"), tmp_path / "plain.gguf")
    known = write(reference("qwen3"), tmp_path / "known.gguf", token_list=words)
    other = write(reference("lfm2"), tmp_path / "other.gguf", token_list=words[::-1])
    target = load_model(plain)
    assert tokens_of(plain) is None
    assert tokens_of(known) == dict(enumerate(words))
    for path, draft in ((None, known), (plain, known), (known, plain), (known, known)):
        assert isinstance(drafter_for(draft, target, path=path), ModelDrafter)
    with pytest.raises(ModelError, match="96 of its 96 tokens are others"):
        drafter_for(other, target, path=known)
    with pytest.raises(ModelError, match=r"it has 96 of them, and the model \d+; give a smaller model"):
        drafter_for(plain, hybrid)


def test_padding_may_differ(tmp_path, hybrid, hybrid_folder):
    """As many real models of one family are padded to sizes of their own."""
    draft = dense(tmp_path, {}, vocab_size=320)
    with pytest.raises(ModelError, match="it has 320 of them, and the model 300"):
        drafter_for(draft, hybrid, path=hybrid_folder)
    shutil.copy(hybrid_folder / "tokenizer.json", draft)
    assert isinstance(drafter_for(draft, hybrid, path=hybrid_folder), ModelDrafter)


class Own:
    kinds = ()
    lag, reads_hidden = 0, False

    def committed(self, rows) -> None: ...

    def propose(self, rows, choose):
        return [[] for _ in rows]

    def close(self, sequence: int) -> None: ...


def test_an_object_is_taken_as_it_is(hybrid):
    own = Own()
    assert drafter_for(own, hybrid) is own


@pytest.mark.parametrize(
    "option", ["", "mpt", "org/no-such-model", Path("/no/such/model"), 3, True, Own, object(), ["ngram"]]
)
def test_anything_else_is_refused_with_what_is_allowed(hybrid, option):
    with pytest.raises(OptionError, match=r'"mtp", "assistant", "ngram", the path of a draft model'):
        drafter_for(option, hybrid)


def test_a_path_that_is_no_model(hybrid, tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        drafter_for(tmp_path, hybrid)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(BadWeights, match=r"has no \*\.safetensors"):
        drafter_for(tmp_path, hybrid)
