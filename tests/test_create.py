"""From Modelfiles to models that run: what is stored, that it fits, and that it gives the same tokens."""

import json
import os
import re
import shutil
import threading
from pathlib import Path

import pytest
import torch
from conftest import add_tokenizer
from gguf_files import reference, write
from parity import save
from safetensors.torch import load_file, save_file
from serving import until
from speculation import USED, Fixed, _saved
from storing import bough_home, check, make, small_llama  # noqa: F401 (a fixture that is always used)
from test_assistant import assistant
from test_cli import bough
from test_gemma4 import gemma4
from test_mtp import dense, mtp_tensors
from transformers import AutoModelForCausalLM

from bough import Engine, SamplingParams
from bough.draft.assistant import AssistantDrafter
from bough.draft.model import ModelDrafter
from bough.draft.mtp import MTPDrafter
from bough.engine import drafting
from bough.errors import ModelError, OptionError, RequestError
from bough.models.shards import write_tensors
from bough.store.names import Name
from bough.store.store import Store

GREEDY = ["--temperature", "0", "--max-tokens", "10", "--dtype", "float32"]
PROMPT = "5 6 7 8 9"


@pytest.fixture
def eager(monkeypatch):
    """Drafts are always as deep as may be, however long that takes."""
    monkeypatch.setattr(drafting, "Depth", lambda deepest: Fixed(deepest=4))


def pair(kind: str, folder: Path) -> tuple[str, type]:
    """A target in ./target, a draft in the path returned, and the drafter that it makes."""
    if kind == "assistant":
        target = gemma4()
        save(target, folder / "target")
        save(assistant(target.config.hidden_size), folder / "draft")
        return "./draft", AssistantDrafter
    if kind.startswith("mtp"):
        dense(folder / "target", {})
        return head(kind, folder), MTPDrafter
    _saved("llama", folder / "target")
    small_llama(folder / "draft")
    return "./draft", ModelDrafter


def head(kind: str, folder: Path) -> str:
    """An MTP head, as files have them: one, or several of its own, or among the weights of a checkpoint."""
    tensors = mtp_tensors(sparse=False)
    if kind == "mtp":
        save_file(tensors, folder / "head.safetensors")
        return "./head.safetensors"
    if kind == "mtp-shards":
        (folder / "head").mkdir()
        for part in (0, 1):
            names = list(tensors)[part::2]
            save_file({name: tensors[name] for name in names}, folder / f"head/mtp-0000{part + 1}-of-00002.safetensors")
        return "./head"
    sharded(dense(folder / "checkpoint", tensors))
    return "./checkpoint/model.safetensors.index.json"


def sharded(folder: Path) -> Path:
    """The weights of a folder, in several files."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    write_tensors(folder, dict(sorted(tensors.items(), key=lambda each: each[0][::-1])), most=20_000)
    return folder


HEADS = ("mtp", "mtp-shards", "mtp-index")
KINDS = ("assistant", "model", *HEADS)


@pytest.mark.parametrize("family", USED)
def test_every_family_gives_the_same_tokens(family, tmp_path):
    """As its folder does; and transformers reads what is stored as it reads the folder."""
    folder = _saved(family, tmp_path / "folder")
    stored = make("FROM ./folder", tmp_path)
    asked = SamplingParams(max_tokens=8, temperature=0)
    written = []
    for path in (folder, stored.path):
        with Engine.load(path, dtype="float32", draft=None) as engine:
            written.append(engine.generate([5, 6, 7, 8], asked).tokens)
    assert written[0] == written[1] and len(written[0]) > 1
    if family == "llama":
        theirs = AutoModelForCausalLM.from_pretrained(stored.path)(torch.tensor([[5, 6, 7, 8]])).logits[0, -1]
        assert int(theirs.argmax()) == written[0][0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_draft_drafts(kind, tmp_path, eager):
    draft, drafter = pair(kind, tmp_path)
    (tmp_path / "Modelfile").write_text(f"FROM ./target\nDRAFT {draft}\n")
    done = bough("create", "paired", "-f", tmp_path / "Modelfile")
    assert done.exit_code == 0, done.stderr
    plain = bough("run", tmp_path / "target", PROMPT, "--draft", "none", *GREEDY)
    ours = bough("run", "paired", PROMPT, "--stats", *GREEDY)
    assert (ours.exit_code, ours.stdout) == (0, plain.stdout), ours.stderr
    drafted, accepted = map(int, re.search(r"\((\d+) drafted, (\d+) accepted\)", ours.stderr).groups())
    assert drafted > 0 and 0 <= accepted <= drafted
    with Engine.load(Store().get(Name.parse("paired")).path, dtype="float32") as engine:
        assert isinstance(engine.drafting.drafter, drafter)
    told = bough("show", "paired", "--cache-bytes", "8M").stdout
    assert {"assistant": "assistant from", "model": "small model from"}.get(kind, "MTP head from") in told
    assert re.search(r"3[2-9]\.\d\d bits each", told) and "paired (" in told  # float32, and what headers take


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_draft_drafts(kind, tmp_path, eager):
    draft, drafter = pair(kind, tmp_path)
    (tmp_path / "Modelfile").write_text(f"FROM ./target\nDRAFT {draft}\n")
    done = bough("create", "small", "-f", tmp_path / "Modelfile", "--quantize-draft", "int8")
    assert done.exit_code == 0, done.stderr
    plain = bough("run", tmp_path / "target", PROMPT, "--draft", "none", *GREEDY)
    ours = bough("run", "small", PROMPT, "--stats", *GREEDY)
    assert (ours.exit_code, ours.stdout) == (0, plain.stdout), ours.stderr
    drafted, _ = map(int, re.search(r"\((\d+) drafted, (\d+) accepted\)", ours.stderr).groups())
    assert drafted > 0
    stored = Store().get(Name.parse("small"))
    with Engine.load(stored.path, dtype="float32") as engine:
        assert isinstance(engine.drafting.drafter, drafter)
    assert stored.about.draft_weights.scheme == "int8" and stored.about.weights.scheme is None
    assert stored.about.draft_weights.bits < 32


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_target_can_be_drafted_for_and_gone_on_from(kind, tmp_path, eager):
    """First the target is made smaller, then it is given a draft: that is checked against what is stored."""
    draft, drafter = pair(kind, tmp_path)
    small = make("FROM ./target", tmp_path, "small", scheme="int8")
    assert small.about.weights.scheme == "int8" and small.about.weights.bits < 24
    stored = make(f"FROM small\nDRAFT {draft}", tmp_path, draft_scheme="int4")
    assert (stored.about.weights, stored.about.draft_weights.scheme) == (small.about.weights, "int4")
    asked = SamplingParams(max_tokens=8, temperature=0)
    with Engine.load(small.path, dtype="float32", draft=None) as engine:
        plain = engine.generate([5, 6, 7], asked).tokens
    with Engine.load(stored.path, dtype="float32") as engine:
        assert isinstance(engine.drafting.drafter, drafter)
        ours = engine.generate([5, 6, 7], asked)
    assert ours.tokens == plain and ours.usage.drafted_tokens > 0
    with pytest.raises(ModelError, match="quantised already"):
        make("FROM small", tmp_path, "smaller", scheme="int4")


def test_a_gguf_file_is_quantised_with_its_tokenizer(tmp_path):
    words = {"tokenizer_model": "gpt2", "token_list": [*(f"t{i}" for i in range(95)), "t0t1"]}
    write(reference("llama"), tmp_path / "m.gguf", **words, token_merges=["t0 t1"])
    stored = make("FROM ./m.gguf", tmp_path, scheme="int8")
    assert {"tokenizer.json", "config.json", "bough.json"} < stored.files.keys() and stored.path.is_dir()
    with Engine.load(stored.path, dtype="float32") as engine:
        assert len(engine.generate([5, 6, 7], SamplingParams(max_tokens=4, temperature=0)).tokens) > 0


def test_quantising_that_was_finished_is_not_done_again(tmp_path, monkeypatch):
    small_llama(tmp_path / "llama")
    with monkeypatch.context() as patched:
        patched.setattr(Store, "publish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            make("FROM ./llama", tmp_path, scheme="int8")
    monkeypatch.setattr("bough.store.create.quantize", lambda *_, **__: 1 / 0)
    assert make("FROM ./llama", tmp_path, scheme="int8").about.weights.scheme == "int8"
    with pytest.raises(ZeroDivisionError):
        make("FROM ./llama", tmp_path, scheme="int4")


def test_a_stored_model_may_be_named_to_draft(tmp_path, eager):
    pair("model", tmp_path)
    make("FROM ./draft", tmp_path, "small")
    done = bough("run", tmp_path / "target", PROMPT, "--draft", "small", "--stats", *GREEDY)
    assert done.exit_code == 0 and re.search(r"\(\d+ drafted", done.stderr), done.stderr


def test_the_same_files_are_stored_once(tmp_path):
    small_llama(tmp_path / "folder")
    first = make("FROM ./folder\nSYSTEM one", tmp_path, "one")
    second = make("FROM one\nSYSTEM two", tmp_path, "two")
    assert first.digest != second.digest
    weights = [each.folder / "model.safetensors" for each in (first, second)]
    assert weights[0].samefile(weights[1]) and weights[0].stat().st_nlink == 3
    assert len(Store().blobs.all()) == len(first.files) + 1  # bough.json differs


def test_the_same_model_may_be_stored_by_two_at_once(tmp_path, monkeypatch):
    """The second is done when the first is about to put its tree in place."""
    small_llama(tmp_path / "folder")
    rename, second = os.rename, threading.Thread(target=make, args=("FROM ./folder", tmp_path, "second"))

    def second_first(source, target) -> None:
        if Path(target).parent.name == "trees":
            monkeypatch.setattr(os, "rename", rename)
            second.start()
            assert until(lambda: Store().has(Name.parse("second")))
        rename(source, target)

    monkeypatch.setattr(os, "rename", second_first)
    first = make("FROM ./folder", tmp_path, "first")
    second.join()
    assert first.digest == Store().get(Name.parse("second")).digest
    check(Store())


def test_what_was_said_before_stays_unless_it_is_said_again(tmp_path, llama_folder):
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    said = "SYSTEM be brief\nPARAMETER temperature 0\nPARAMETER top_k 3\nLICENSE A"
    make(f"FROM {llama_folder}\nTEMPLATE {template}\n{said}", tmp_path, "base")
    about = make("FROM base\nSYSTEM be long\nPARAMETER top_k 5\nLICENSE B", tmp_path, "other").about
    assert (about.template, about.system, about.license) == (template, "be long", ("A", "B"))
    assert about.parameters == {"temperature": 0.0, "top_k": 5} and about.source == "base"


def test_template_system_and_parameters_are_used(tmp_path, llama_folder):
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    make(
        f"FROM {llama_folder}\nTEMPLATE {template}\nSYSTEM be brief\nPARAMETER num_predict 5\nPARAMETER num_ctx 64\n"
        'PARAMETER temperature 0\nPARAMETER stop "qq"',
        tmp_path,
    )
    expected = SamplingParams(max_tokens=5, temperature=0)
    with Engine.load(llama_folder, dtype="float32") as engine:
        text = engine.generate("<system>be brief<user>the fox", expected).text
        other = engine.generate("<system>be long<user>the fox", expected).text
    done = bough("run", "made", "the fox", "--dtype", "float32")
    assert (done.exit_code, done.stdout) == (0, text + "\n"), done.stderr
    done = bough("run", "made:latest", "the fox", "--dtype", "float32", "--system", "be long")
    assert done.stdout == other + "\n"
    longer = bough("run", "made", "the fox", "--dtype", "float32", "-n", "6", "--stats")
    assert "6 written" in longer.stderr
    stored = Store().get(Name.parse("made"))
    with Engine.load(stored.path, dtype="float32") as engine:
        assert engine.context == 64 and engine.defaults.stop == ("qq",) and engine.defaults.max_tokens == 5


def test_gguf_files(tmp_path, eager):
    words = {"tokenizer_model": "gpt2", "token_list": [*(f"t{i}" for i in range(95)), "t0t1"]}
    for name in ("m", "d"):
        write(reference("llama"), tmp_path / f"{name}.gguf", **words, token_merges=["t0 t1"])
    stored = make("FROM ./m.gguf\nDRAFT ./d.gguf\nPARAMETER temperature 0", tmp_path)
    assert set(stored.files) == {"model.gguf", "draft/model.gguf", "bough.json"}
    assert stored.path.name == "model.gguf" and stored.about.drafter == "model"
    with Engine.load(stored.path) as engine:
        assert isinstance(engine.drafting.drafter, ModelDrafter)
        written = engine.generate([5, 6, 7], SamplingParams(max_tokens=6, temperature=0)).tokens
    with Engine.load(tmp_path / "m.gguf", draft=None) as engine:
        assert engine.generate([5, 6, 7], SamplingParams(max_tokens=6, temperature=0)).tokens == written
    again = make("FROM made", tmp_path, "again")
    assert set(again.files) == set(stored.files) and again.about.drafter == "model"


def test_an_assistant_in_the_folder_comes_along(tmp_path):
    target = gemma4()
    save(target, tmp_path / "target")
    save(assistant(target.config.hidden_size), tmp_path / "target" / "assistant")
    stored = make("FROM ./target", tmp_path)
    assert "assistant/model.safetensors" in stored.files
    with Engine.load(stored.path) as engine:
        assert isinstance(engine.drafting.drafter, AssistantDrafter)


def misfit(folder: Path, draft: str, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        make(f"FROM ./target\nDRAFT {draft}", folder)
    assert Store().all() == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("vocabulary", "line 2: DRAFT does not fit: .*it has 90 of them, and the model 97"),
        ("width", "line 2: DRAFT does not fit: .*hidden rows of 32, where the model's is 48"),
        ("layers", "line 2: DRAFT does not fit: .*layers that read"),
        ("family", "line 2: DRAFT does not fit: .*another family"),
        ("broken", "line 2: DRAFT does not fit: .*do not fit the config"),
    ],
)
def test_a_draft_that_does_not_fit(change, told, tmp_path):
    if change in ("width", "layers", "family"):
        _saved("llama", tmp_path / "target") if change == "family" else save(gemma4(), tmp_path / "target")
        other = {"head_dim": 16} if change == "layers" else None
        save(assistant(32 if change == "width" else 48, other), tmp_path / "draft")
    else:
        _saved("llama", tmp_path / "target")
        small_llama(tmp_path / "draft", vocab_size=90 if change == "vocabulary" else 97)
        if change == "broken":
            config = tmp_path / "draft" / "config.json"
            config.write_text(config.read_text().replace('"hidden_size": 16', '"hidden_size": 32'))
    misfit(tmp_path, "./draft", told)


def test_tokens_of_another_tokenizer(tmp_path, llama_folder):
    shutil.copytree(llama_folder, tmp_path / "draft")
    file = tmp_path / "draft" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = dict(zip(vocab, reversed(vocab.values()), strict=True))
    tokenizer["added_tokens"] = []
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match=r"DRAFT does not fit: .*tokens are others in the model's tokenizer"):
        make(f"FROM {llama_folder}\nDRAFT ./draft", tmp_path)


@pytest.mark.parametrize(
    ("text", "options", "told"),
    [
        ("FROM ./nothing", {}, "line 1: FROM names .*nothing, and there is no such file or folder"),
        ("FROM nothing", {}, "'nothing', which is no file, folder or stored model; write ./nothing for a path"),
        ("FROM ../../etc", {}, "no such file or folder"),
        ("FROM ./llama\nDRAFT ./nothing.gguf", {}, "line 2: DRAFT names .*no such file or folder"),
        ("FROM ./llama", {"scheme": "int3"}, "--quantize is 'int3'; it must be one of int8, int4"),
        ("FROM ./llama", {"draft_scheme": "int8"}, "--draft-quantize needs a DRAFT"),
        (
            "FROM ./llama/model.safetensors",
            {},
            "FROM names weights without a config.json; name the folder that has both",
        ),
        ("FROM ./bare", {}, "FROM names weights without a config.json"),
        ("FROM ./llama/config.json", {}, "is no model"),
        ("FROM ./llama\nTEMPLATE {{ messages }}", {}, "TEMPLATE needs a model with a tokenizer"),
        ("FROM ./llama", {"only_stored": True}, "'./llama' is not in the store"),
    ],
)
def test_mistakes(text, options, told, tmp_path):
    small_llama(tmp_path / "llama")
    shutil.copytree(tmp_path / "llama", tmp_path / "bare", ignore=shutil.ignore_patterns("*.json"))
    with pytest.raises((OptionError, ModelError, RequestError), match=told):
        make(text, tmp_path, **options)
    assert Store().all() == []


def test_a_broken_template_is_told_when_it_is_stored(tmp_path):
    add_tokenizer(small_llama(tmp_path / "llama", vocab_size=300))
    with pytest.raises(RequestError, match="template"):
        make("FROM ./llama\nTEMPLATE {% for m in messages %}", tmp_path)


def test_names_that_cannot_be_run(tmp_path):
    small_llama(tmp_path / "llama")
    with pytest.raises(OptionError, match="the model in the box"):
        make("FROM ./llama", tmp_path, "bundled")
    for name in ("", "..", "a/../b", "/a", "a/b/c", "a:", ":b", "a b", "a\n", "é", "-a", "a" * 97, "a\x00"):
        with pytest.raises(OptionError, match="is no name of a model"):
            Name.parse(name)
    for name, full in (
        ("a", "a:latest"),
        ("n/a:1.2", "n/a:1.2"),
        ("library/a", "a:latest"),
        ("Q_x-1.5", "Q_x-1.5:latest"),
    ):
        assert Name.parse(name).full == full


@pytest.mark.parametrize(
    "said",
    [
        [], {"version": 2}, {"version": 1, "template": {}}, {"version": 1, "parameters": []}, {"version": 1, "more": 1},
        {"version": 1, "parameters": {"num_predict": "x"}}, {"version": 1, "parameters": {"stop": [3]}},
        {"version": 1, "license": [3]}, {"version": 1, "weights": {"count": "x", "size": 1}},
        {"version": 1, "parameters": {"num_ctx": -1}}, {"version": 1, "drafter": "model"},
    ],
)  # fmt: skip
def test_a_folder_that_says_odd_things_of_itself(said, tmp_path):
    folder = small_llama(tmp_path / "llama")
    (folder / "bough.json").write_text(json.dumps(said))
    done = bough("run", folder, PROMPT)
    assert done.exit_code == 1 and done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    (tmp_path / "Modelfile").write_text("FROM ./llama")
    done = bough("create", "made", "-f", tmp_path / "Modelfile")
    assert done.exit_code == 1 and done.stderr.startswith("error: ")


def test_a_path_goes_before_a_name(tmp_path, monkeypatch):
    small_llama(tmp_path / "llama")
    make("FROM ./llama\nPARAMETER num_predict 3", tmp_path, "llama")
    monkeypatch.chdir(tmp_path)
    assert len(bough("run", "llama", PROMPT, *GREEDY).stdout.split()) == 10
    monkeypatch.chdir("/")
    assert len(bough("run", "llama", PROMPT, "-t", "0").stdout.split()) == 3
    done = bough("run", "no-such", PROMPT)
    assert done.exit_code == 1 and "bough pull" in done.stderr and "bough create" in done.stderr
