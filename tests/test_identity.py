"""The name that state goes by on disk: it differs whenever the state would, and never otherwise."""

import shutil
from pathlib import Path

import pytest
import torch
from folders import SMALL, edit_config
from parity import randomise
from safetensors.torch import load_file, save_file
from test_config import FAMILIES

from bough import CacheConfig, Engine, SamplingParams
from bough.cli import BUNDLED
from bough.models.identity import fingerprint, identity
from bough.models.load import load_model
from bough.state.layout import Layout

GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


@pytest.fixture(scope="session", params=FAMILIES)
def original(request, tmp_path_factory) -> Path:
    """A tiny model of a family. Not to be changed."""
    model, config, options = FAMILIES[request.param]
    torch.manual_seed(0)
    reference = model(config(**SMALL, **options))
    randomise(reference)
    folder = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(original, tmp_path) -> Path:
    """A copy to change."""
    return shutil.copytree(original, tmp_path / "model")


def name_of(folder: Path, *, dtype: str = "float32", page_tokens: int = 4, kv_dtype: torch.dtype | None = None) -> str:
    model = load_model(folder, dtype=dtype)
    return identity(model, Layout.of(model.kinds, page_tokens=page_tokens, dtype=model.dtype, kv_dtype=kv_dtype))


def test_two_loads_have_one_name(original):
    name = name_of(original)
    assert name == name_of(original)
    assert len(name) == 32 and int(name, 16)


def test_any_one_weight(folder):
    original, names = load_file(folder / "model.safetensors"), {name_of(folder)}
    generator = torch.Generator().manual_seed(0)
    for key, tensor in original.items():
        changed = tensor.clone()
        at = int(torch.randint(changed.numel(), (), generator=generator))
        changed.view(-1)[at] = 2 * changed.view(-1)[at] + 1
        save_file({**original, key: changed}, folder / "model.safetensors", {"format": "pt"})
        names.add(name_of(folder))
    assert len(names) == 1 + len(original)


@pytest.mark.parametrize("field", [{"rms_norm_eps": 3e-5}, {"norm_eps": 3e-5}, {"of no meaning": 1}], ids=str)
def test_any_field_of_the_config(folder, field):
    name = name_of(folder)
    edit_config(folder, **field)
    assert name_of(folder) != name


def test_dtypes_and_page_size(original):
    names = [
        name_of(original),
        name_of(original, dtype="bfloat16"),
        name_of(original, kv_dtype=torch.bfloat16),
        name_of(original, page_tokens=8),
    ]
    assert len(set(names)) == len(names)


def test_the_model_in_the_box():
    model = load_model(BUNDLED)
    layout = Layout.of(model.kinds, page_tokens=32, dtype=model.dtype)
    assert identity(model, layout) == identity(load_model(BUNDLED), layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_fingerprints(dtype):
    tensor = torch.arange(1, 52).to(dtype)  # in bytes no multiple of four, for the smaller ones
    seen = {fingerprint(tensor)}
    for at in range(len(tensor)):
        changed = tensor.clone()
        changed[at] = 0
        seen.add(fingerprint(changed))
    for a, b in ((0, 1), (3, 40), (49, 50)):
        swapped = tensor.clone()
        swapped[a], swapped[b] = tensor[b], tensor[a]
        seen.add(fingerprint(swapped))
    assert len(seen) == 1 + len(tensor) + 3
    square = tensor[:49].view(7, 7)
    assert fingerprint(square.T) == fingerprint(square.T.contiguous()) != fingerprint(square)


def test_a_folder_serves_only_the_model_that_filled_it(llama_folder, tmp_path):
    other = shutil.copytree(llama_folder, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.weight"][3, 5] += 0.5
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    disk, prompt = tmp_path / "disk", list(range(40, 90))

    def ask(folder: Path, cache: CacheConfig) -> tuple[list[int], int]:
        with Engine.load(folder, dtype="float32", cache=cache) as engine:
            out = engine.generate(prompt, GREEDY)
            return out.tokens, out.usage.cached_tokens

    cached = CacheConfig(disk_path=disk)
    first = ask(llama_folder, cached)
    assert first[1] == 0
    assert ask(llama_folder, cached) == (first[0], len(prompt) - 1)
    alone = ask(other, CacheConfig(enabled=False))
    assert ask(other, cached) == alone == (alone[0], 0)
    assert ask(other, cached) == (alone[0], len(prompt) - 1)
    assert ask(llama_folder, cached) == (first[0], len(prompt) - 1)
    assert len(list(disk.iterdir())) == 2
