"""Stores to put tiny models into, and processes that are killed while they do."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from parity import randomise, save

from bough.store.create import create
from bough.store.modelfile import parse_modelfile
from bough.store.names import Name
from bough.store.store import Store, Stored

MADE = Name.parse("made")


@pytest.fixture(autouse=True)
def bough_home(tmp_path, monkeypatch) -> Path:
    """Each test has a store of its own."""
    monkeypatch.setenv("BOUGH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def make(text: str, folder: Path, name: str = "made", **options) -> Stored:
    return create(Store(), Name.parse(name), parse_modelfile(text, folder), **options)


def small_llama(folder: Path, **options) -> Path:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        **{
            "vocab_size": 97, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256, "eos_token_id": 2,
            **options,
        }
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    randomise(model, spread=0.2)
    return save(model, folder)


def check(store: Store) -> None:
    """All that is named is whole, and nothing is there that nothing names."""
    stored = store.all()
    for each in stored:
        each.require_whole()
        assert each.damaged() == []
    assert {each.name for each in store.folder.glob("trees/*")} == {each.digest for each in stored}
    assert set(store.blobs.all()) == {entry.digest for each in stored for entry in each.files.values()}
    assert list((store.folder / "tmp").iterdir()) == []


class Children:
    """Work on stores in processes of their own, which may be killed (store_child.py)."""

    def __enter__(self) -> "Children":
        command = [sys.executable, str(Path(__file__).parent / "store_child.py")]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.communicate()

    def killed(self, what: str, home: Path, where: object, at: int = 0) -> bool:
        """Whether the process was killed, at the moment of that number, before it was done."""
        return self._ask(what, home, where, at) is None

    def count(self, what: str, home: Path, where: object) -> int:
        """How many moments there are."""
        found = self._ask(what, home, where, 0)
        assert found is not None
        return found

    def _ask(self, what: str, home: Path, where: object, at: int) -> int | None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([what, str(home), str(where), at]) + "\n")
        self._process.stdin.flush()
        code, count = json.loads(self._process.stdout.readline())
        assert code in (0, -9), "the child failed; see its stderr"
        return count if code == 0 else None
