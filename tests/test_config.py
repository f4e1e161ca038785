"""Bad config.json: each a typed error that names the file and the remedy, whatever the field and whatever is in it.

And bad settings of the cache.
"""

import itertools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from folders import SMALL, edit_config, logits, refusal
from hypothesis import given
from hypothesis import strategies as st
from parity import randomise
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

import bough.models
from bough.config import CacheConfig
from bough.errors import ModelError, OptionError, UnknownArchitecture
from bough.models.fields import OBJECTS, RULES
from bough.models.load import load_model

MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "partial_rotary_factor": 0.5,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"use_sliding_window": True, "rope_parameters": YARN, **MIXED}),
    "lfm2": (Lfm2ForCausalLM, Lfm2Config, {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, MIXED),
    "qwen3_next": (Qwen3NextForCausalLM, Qwen3NextConfig, {**HYBRID, **EXPERTS}),
    "qwen3_5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, HYBRID),
    "qwen3_5_moe": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, {**HYBRID, **EXPERTS}),
    "lfm2_moe": (
        Lfm2MoeForCausalLM,
        Lfm2MoeConfig,
        {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    ),
    "gemma4": (Gemma4ForCausalLM, Gemma4TextConfig, {"hidden_size_per_layer_input": 0, "global_head_dim": 8, **MIXED}),
}


@pytest.fixture(scope="session")
def originals(tmp_path_factory) -> dict[str, Path]:
    """A folder with a tiny model of each family, as transformers writes it. Not to be changed."""
    folders = {}
    for name, (model, config, options) in FAMILIES.items():
        torch.manual_seed(0)
        reference = model(config(**SMALL, **options))
        randomise(reference)
        folders[name] = tmp_path_factory.mktemp(name)
        reference.save_pretrained(folders[name])
    return folders


@pytest.fixture
def folder(originals, tmp_path) -> Path:
    """A Llama to damage."""
    return Path(shutil.copytree(originals["llama"], tmp_path / "model"))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_not_damaged_loads(family, originals):
    assert logits(load_model(originals[family])).isfinite().all()


def test_a_folder_without_config(folder):
    (folder / "config.json").unlink()
    assert re.search(rf"{folder} has no config.json; give a folder", refusal(folder))


@pytest.mark.parametrize(
    "text", ["", "{", "[1, 2]", "null", "3", '"config"', "\ufeff{}", "[" * 100_000, '{"a": 1e999999', "9" * 5000]
)
def test_a_config_that_is_no_json_object(text, folder):
    (folder / "config.json").write_text(text)
    assert re.search(r"config.json (cannot be read as JSON|is not a JSON object).*download it again", refusal(folder))


def test_a_config_that_is_not_text(folder):
    (folder / "config.json").write_bytes(b"\xff\xfe\x00{}")
    assert "config.json cannot be read as JSON" in refusal(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    assert "config.json cannot be read as JSON" in refusal(folder)


@pytest.mark.parametrize("name", ["gpt2", "", "Llama", "llama.Llama", "../llama"])
def test_an_unknown_architecture(name, folder):
    edit_config(folder, model_type=name)
    message = refusal(folder, UnknownArchitecture)
    assert f"config.json is of type {name!r}; Bough runs " in message and "llama" in message and "lfm2" in message


def test_a_config_without_model_type(folder):
    edit_config(folder, model_type=None)
    assert "config.json is of type '(none)'" in refusal(folder, UnknownArchitecture)


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "num_attention_heads", "rms_norm_eps"])
def test_a_config_that_lacks_a_field(name, folder):
    config = json.loads((folder / "config.json").read_text())
    del config[name]
    (folder / "config.json").write_text(json.dumps(config))
    assert re.search(rf"config.json lacks '{name}'; take the config.json that belongs to the weights", refusal(folder))


def test_fields_that_contradict_each_other(folder):
    edit_config(folder, num_attention_heads=3)
    assert "num_attention_heads 3, which is no multiple of num_key_value_heads 2" in refusal(folder)
    edit_config(folder, num_attention_heads=3, num_key_value_heads=1, head_dim=None)
    assert "hidden_size 16, which num_attention_heads 3 does not divide, and no head_dim" in refusal(folder)
    edit_config(folder, num_attention_heads=4, layer_types=["full_attention"] * 3)
    assert "3 layer_types for num_hidden_layers 2" in refusal(folder)


def test_a_text_config_that_is_no_object(folder):
    edit_config(folder, text_config=[1])
    assert "config.json (text_config) is [1], and must be an object" in refusal(folder)


def test_rope_that_lacks_a_parameter(folder):
    for kind, name in [("linear", "factor"), ("llama3", "factor"), ("llama3", "high_freq_factor")]:
        rope = {key: value for key, value in LLAMA3.items() if key != name}
        edit_config(folder, rope_parameters={**rope, "rope_type": kind})
        assert f"lack '{name}'" in refusal(folder)
    for kind in ("longrope", "divided"):  # the second is for GGUF files alone
        edit_config(folder, rope_parameters={"rope_type": kind})
        assert f"rope type '{kind}' is not supported" in refusal(folder, UnknownArchitecture)
    edit_config(folder, rope_parameters={"rope_type": "divided", "divisors": [1.0, "x"]})
    assert "divisors [1.0, 'x'], and it must be a list of numbers" in refusal(folder)


# No field of a config.json brings up anything but a ModelError

WRONG = [None, "x", "4", "", -1, 0, 1, 3, 7, 1.5, 0.0, -2.0, 1e300, 10**30, True, False]
WRONG += [[], [1], ["x"], {}, {"x": 1}, [[]], [None]]


def try_config(folder: Path, config: dict) -> Exception | None:
    """Load with that config and feed some tokens; the error, if it is one that a user should not see."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        logits(load_model(folder))
    except ModelError:
        return None
    except Exception as error:  # noqa: BLE001 (what is looked for)
        return error
    return None


def places(fields: dict, inside: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path to every field that a model may read, also to those in fields."""
    for name, value in fields.items():
        if inside or name in RULES or name in OBJECTS:
            yield (*inside, name)
        if isinstance(value, dict):
            yield from places(value, (*inside, name))


def with_value(fields: dict, place: tuple[str, ...], value: object) -> dict:
    name, *rest = place
    return {**fields, name: with_value(fields[name], tuple(rest), value) if rest else value}


@pytest.mark.parametrize("family", FAMILIES)
def test_any_one_field_wrong(family, originals, tmp_path):
    folder = Path(shutil.copytree(originals[family], tmp_path / "model"))
    good = json.loads((folder / "config.json").read_text())
    surprises = []
    for place, value in itertools.product(places(good), WRONG):
        error = try_config(folder, with_value(good, place, value))
        if error:
            surprises.append(f"{'.'.join(place)} = {value!r}: {error!r}")
    assert not surprises, "\n".join(surprises)


@pytest.mark.parametrize("family", FAMILIES)
def test_any_one_field_missing(family, originals, tmp_path):
    folder = Path(shutil.copytree(originals[family], tmp_path / "model"))
    good = json.loads((folder / "config.json").read_text())
    for name in good:
        error = try_config(folder, {key: value for key, value in good.items() if key != name})
        assert error is None, f"without {name}: {error!r}"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(RULES)), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.sampled_from(sorted(FAMILIES)), st.dictionaries(st.sampled_from(sorted({*RULES, *OBJECTS})), JSON, max_size=6)
)
def test_any_fields_wrong(originals, family, fields):
    fields.pop("model_type", None)
    folder = originals[family]
    original = (folder / "config.json").read_text()
    try:
        error = try_config(folder, {**json.loads(original), **fields})
    finally:
        (folder / "config.json").write_text(original)
    assert error is None, f"{fields}: {error!r}"


def test_every_field_that_a_model_reads_has_a_rule():
    """A field without one would be a traceback when it is wrong. A new field goes into fields.py."""
    source = "".join(path.read_text() for path in Path(bough.models.__path__[0]).glob("*.py"))
    read = set(re.findall(r"\bconfig\.get\(\"(\w+)\"", source)) | set(re.findall(r"\bconfig\.(\w+)\b(?!\()", source))
    own = {"where", "text", "head_size", "json", "defaults", "raw"}
    assert read - own - set(RULES) - OBJECTS == set()


@pytest.mark.parametrize(
    "settings",
    [
        {"device_bytes": None, "host_bytes": 0, "disk_bytes": None},
        {"device_bytes": 1, "host_bytes": 2**63 - 1, "disk_bytes": 1},
        {"disk_path": "somewhere"},
        {"disk_path": Path("somewhere"), "disk_write_rate": 1},
        {"enabled": False, "policy": "lru"},
    ],
    ids=str,
)
def test_settings_of_the_cache(settings):
    config = CacheConfig(**settings)
    assert {name: getattr(config, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("enabled", [1, None, "yes"]),
        ("device_bytes", [0, -1, 1.5, True, "1G", 2**63]),
        ("host_bytes", [-1, 1.5, False, "1G", 2**63]),
        ("disk_bytes", [0, -1, 1.5, True, "1G", 2**63]),
        ("disk_path", [1, b"somewhere", ["somewhere"]]),
        ("disk_write_rate", [0, -1, 1.5, None, True, 2**63]),
        ("policy", ["", "LRU", "fifo", None]),
        ("page_tokens", [0, 1025, 2.0, None]),
        ("dtype", ["float8", None]),
    ],
)
def test_wrong_settings_of_the_cache(name, wrong):
    for value in wrong:
        with pytest.raises(OptionError, match=name):
            CacheConfig(**{name: value})
    with pytest.raises(TypeError):
        CacheConfig(**{name + "s": None})
