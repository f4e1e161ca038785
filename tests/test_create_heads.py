"""MTP heads as drafts: in one file or several, alone or among the weights of a checkpoint."""

import re

import pytest
import torch
from parity import save
from safetensors.torch import load_file, save_file
from storing import bough_home, check, make, small_llama  # noqa: F401 (a fixture that is always used)
from test_cli import bough
from test_create import GREEDY, HEADS, PROMPT, eager, head, misfit, pair, sharded  # noqa: F401 (eager is a fixture)
from test_gemma4 import gemma4
from test_mtp import dense, mtp_tensors
from transformers import AutoModelForCausalLM

from bough import Engine
from bough.draft.mtp import MTPDrafter
from bough.models.shards import write_tensors
from bough.store import create as creating
from bough.store.store import Store


def test_a_head_replaces_the_one_that_was_there(tmp_path):
    """Whether the weights are in one file or in shards."""
    dense(tmp_path / "whole")
    model = AutoModelForCausalLM.from_pretrained(dense(tmp_path / "bare", {}))
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()
    head = {name: tensor + 1 for name, tensor in mtp_tensors(sparse=False).items()}
    save_file(head, tmp_path / "head.safetensors")
    small_llama(tmp_path / "small")
    make("FROM ./whole\nDRAFT ./small", tmp_path, "drafted")
    other = make("FROM drafted\nDRAFT ./head.safetensors", tmp_path, "drafted")
    assert other.about.drafter == "mtp" and not any(name.startswith("draft/") for name in other.files)
    for folder in ("whole", "shards"):
        stored = make(f"FROM ./{folder}\nDRAFT ./head.safetensors", tmp_path)
        with Engine.load(stored.path, dtype="float32") as engine:
            assert isinstance(engine.drafting.drafter, MTPDrafter)
            assert torch.equal(engine.model.extra["mtp.fc.weight"], head["mtp.fc.weight"])
        again = make("FROM made", tmp_path, "again")
        assert make(f"FROM ./{folder}", tmp_path, "own").about.drafter == ("mtp" if folder == "whole" else None)
        assert again.about.drafter == "mtp" and again.files.keys() == stored.files.keys()


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_is_stored_without_what_lies_beside_it(kind, tmp_path):
    """Bit for bit, and once, wherever it came from."""
    draft, _ = pair(kind, tmp_path)
    stored = make(f"FROM ./target\nDRAFT {draft}", tmp_path)
    kept = load_file(stored.folder / "model-mtp.safetensors")
    expected = mtp_tensors(sparse=False)
    assert kept.keys() == expected.keys() and all(torch.equal(kept[name], expected[name]) for name in expected)
    assert stored.about.draft_weights.count == sum(tensor.numel() for tensor in expected.values())
    save_file(expected, tmp_path / "one.safetensors")
    again = make("FROM ./target\nDRAFT ./one.safetensors", tmp_path, "again")
    assert again.files["model-mtp.safetensors"] == stored.files["model-mtp.safetensors"]


def test_a_checkpoint_in_shards_brings_its_own_head(tmp_path):
    folder = sharded(dense(tmp_path / "target"))
    assert len(list(folder.glob("*.safetensors"))) > 2
    stored = make("FROM ./target", tmp_path)
    assert (
        stored.about.drafter == "mtp" and make("FROM ./target", tmp_path, "small", scheme="int4").about.drafter == "mtp"
    )
    with Engine.load(stored.path, dtype="float32") as engine:
        assert isinstance(engine.drafting.drafter, MTPDrafter)


def test_heads_of_several_shards(tmp_path, monkeypatch):
    """Such as are too large for one file. One that is replaced leaves none of its own behind."""
    draft, _ = pair("mtp", tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(creating, "write_tensors", lambda folder, tensors: write_tensors(folder, tensors, most=20_000))
        first = make(f"FROM ./target\nDRAFT {draft}", tmp_path)
    heads = {name for name in first.files if name.startswith("mtp-")}
    assert len(heads) > 2
    other = {name: tensor + 1 for name, tensor in mtp_tensors(sparse=False).items()}
    save_file(other, tmp_path / "other.safetensors")
    second = make("FROM made\nDRAFT ./other.safetensors", tmp_path, "second")
    assert first.files.keys() - second.files.keys() == heads
    for stored, tensors in ((first, mtp_tensors(sparse=False)), (second, other)):
        with Engine.load(stored.path, dtype="float32") as engine:
            assert isinstance(engine.drafting.drafter, MTPDrafter)
            assert all(torch.equal(engine.model.extra[name], tensor) for name, tensor in tensors.items())


def test_nothing_of_an_old_head_stays(tmp_path):
    """Where it is of other tensors than the new one: those of its own embedding, or its scales."""
    draft = head("mtp", tmp_path)
    more = mtp_tensors(sparse=False, own=("embed_tokens",))
    sharded(dense(tmp_path / "target", more))
    make("FROM ./target", tmp_path, "small", scheme="int8")
    made = [
        make(f"FROM {source}\nDRAFT {draft}", tmp_path, f"new{at}") for at, source in enumerate(("./target", "small"))
    ]
    made.append(make(f"FROM ./target\nDRAFT {draft}", tmp_path, "both", scheme="int8", draft_scheme="int4"))
    made.append(make(f"FROM both\nDRAFT {draft}", tmp_path, "again"))
    plain = mtp_tensors(sparse=False)
    for stored in made:
        with Engine.load(stored.path, dtype="float32") as engine:
            assert isinstance(engine.drafting.drafter, MTPDrafter)
            found = {name for name in engine.model.extra if not name.endswith((".scale", ".zero"))}
            assert found == plain.keys()
            if stored.name.model != "both":
                assert engine.model.extra.keys() == plain.keys()
    check(Store())


@pytest.mark.usefixtures("eager")
def test_a_head_may_be_named_to_draft(tmp_path):
    draft, _ = pair("mtp-shards", tmp_path)
    plain = bough("run", tmp_path / "target", PROMPT, "--draft", "none", *GREEDY)
    ours = bough("run", tmp_path / "target", PROMPT, "--draft", tmp_path / draft, "--stats", *GREEDY)
    assert (ours.exit_code, ours.stdout) == (0, plain.stdout), ours.stderr
    assert re.search(r"\([1-9]\d* drafted", ours.stderr)


@pytest.mark.parametrize(
    ("more", "less", "told"),
    [
        ({}, ("mtp.fc.weight",), "1 tensors missing: mtp.fc.weight"),
        ({"mtp.norm.weight": torch.ones(33)}, (), "of the wrong shape"),
        ({"mtp.layers.1.input_layernorm.weight": torch.ones(32)}, (), "the MTP head has 2 layers"),
        (
            {"other": torch.ones(1)},
            tuple(mtp_tensors(sparse=False)),
            "has no MTP head, since no tensor in it is called",
        ),
    ],
)
def test_a_head_that_does_not_fit(more, less, told, tmp_path):
    dense(tmp_path / "target", {})
    tensors = mtp_tensors(sparse=False) | more
    save_file({name: tensors[name] for name in tensors.keys() - set(less)}, tmp_path / "head.safetensors")
    misfit(tmp_path, "./head.safetensors", f"line 2: DRAFT does not fit: .*{told}")


def test_a_head_for_another_family(tmp_path):
    save(gemma4(), tmp_path / "target")
    misfit(tmp_path, head("mtp", tmp_path), "DRAFT does not fit: .*is an MTP head, which Qwen3-Next and Qwen3.5 have")


def test_heads_whose_files_are_wrong(tmp_path):
    dense(tmp_path / "target", {})
    draft, more = head("mtp-shards", tmp_path), tmp_path / "head" / "more.safetensors"
    save_file({"mtp.fc.weight": torch.ones(32, 64)}, more)
    misfit(tmp_path, draft, "DRAFT does not fit: .*repeats tensors of another file there: mtp.fc.weight")
    more.rename(tmp_path / "elsewhere.safetensors")
    more.symlink_to(tmp_path / "elsewhere.safetensors")
    misfit(tmp_path, draft, "is a link that leads out of its folder")
    folder = sharded(dense(tmp_path / "draft", {}))
    misfit(tmp_path, "./draft/model.safetensors.index.json", "has no MTP head, since no tensor in it is called")
    next(folder.glob("model-00001*")).unlink()
    misfit(tmp_path, "./draft/model.safetensors.index.json", "lacks files that its index lists: model-00001")
