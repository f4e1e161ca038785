"""Qwen3 against transformers: norms on the heads, windows on some layers, both kinds of output head."""

import json
from pathlib import Path

import pytest
import torch
from parity import check_family, check_prompt, randomise, save
from transformers import Qwen3Config, Qwen3ForCausalLM

from bough.errors import UnknownArchitecture
from bough.models.load import load_model
from bough.state.kinds import FullKV, WindowKV

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
MIXED = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
SHAPES = {
    "grouped": {},
    "odd-heads-tied": {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20, "tie_word_embeddings": True},
    "odd-heads-biased": {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 6, "attention_bias": True},
    "two-groups-of-three": {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8},
    "yarn": {"rope_parameters": YARN},
}


def tiny(**options) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    reference = Qwen3ForCausalLM(Qwen3Config(**{**SMALL, **options}))
    randomise(reference)
    return reference.eval()


def edit_config(folder: Path, change) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES)
def test_shapes(options, tmp_path):
    model = check_family(tiny(**options), tmp_path)
    assert all(isinstance(kind, FullKV) for kind in model.kinds)
    assert (model.head is model.embedding) == options.get("tie_word_embeddings", False)


@pytest.mark.parametrize("window", [1, 2, 7, 60, 500])  # the prompts have 40 to 61 tokens
def test_windows_above_a_layer(window, tmp_path):
    model = check_family(tiny(use_sliding_window=True, sliding_window=window, max_window_layers=1), tmp_path)
    assert [type(kind) for kind in model.kinds] == [FullKV, WindowKV, WindowKV, WindowKV]
    assert {kind.reach for kind in model.kinds} == {None, window - 1}


def test_windows_on_listed_layers(tmp_path):
    model = check_family(tiny(use_sliding_window=True, sliding_window=5, layer_types=MIXED), tmp_path)
    assert [type(kind) for kind in model.kinds] == [WindowKV, FullKV, FullKV, WindowKV]


def test_a_window_that_is_not_in_use(tmp_path):
    reference = tiny()
    save(reference, tmp_path)
    edit_config(tmp_path, lambda config: config.update(sliding_window=5, use_sliding_window=False, max_window_layers=0))
    edit_config(tmp_path, lambda config: config.pop("layer_types"))
    check_prompt(reference, load_model(tmp_path))


def test_an_older_config(tmp_path):
    """As the files on the hub have it: rope in two loose fields, and windows counted rather than listed."""
    reference = tiny(use_sliding_window=True, sliding_window=6, max_window_layers=2, rope_parameters=YARN)
    save(reference, tmp_path)

    def age(config):
        del config["rope_parameters"], config["layer_types"]
        config["rope_theta"] = YARN["rope_theta"]
        config["rope_scaling"] = {name: value for name, value in YARN.items() if name != "rope_theta"}
        config["torch_dtype"] = config.pop("dtype", "float32")

    edit_config(tmp_path, age)
    model = load_model(tmp_path)
    assert [type(kind) for kind in model.kinds] == [FullKV, FullKV, WindowKV, WindowKV]
    check_prompt(reference, model)


def test_a_layer_type_of_another_family(tmp_path):
    save(tiny(), tmp_path)
    edit_config(tmp_path, lambda config: config["layer_types"].__setitem__(1, "linear_attention"))
    with pytest.raises(UnknownArchitecture, match=r"linear_attention.*sliding_attention, full_attention"):
        load_model(tmp_path)


@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES)
def test_bfloat16(options, tmp_path):
    """Measured: at most 0.019 apart, where logits reach 1.6, and both are up to 0.03 off float32."""
    reference = tiny(**options)
    save(reference, tmp_path)
    check_prompt(reference.to(torch.bfloat16), load_model(tmp_path, dtype="bfloat16"), tolerance=0.04)
