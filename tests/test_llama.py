"""Llama, Mistral and SmolLM2 shapes against transformers."""

import json

import pytest
import torch
from parity import check_family, check_prompt, randomise, save
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from bough.models.load import load_model

SMALL = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
SHAPES = {
    "grouped": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "smollm": {"num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "biased": {
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 10,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama3-rope": {"num_attention_heads": 4, "num_key_value_heads": 4, "rope_parameters": LLAMA3},
    "yarn": {"num_attention_heads": 4, "num_key_value_heads": 1, "rope_parameters": YARN},
    "dynamic-rope": {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": DYNAMIC},
}


@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES)
def test_llama(options, tmp_path):
    reference = LlamaForCausalLM(LlamaConfig(**SMALL, **options))
    randomise(reference)
    check_family(reference, tmp_path)


def test_an_original_context_beside_the_rope(tmp_path):
    """The reference prefers it to the one inside."""
    reference = LlamaForCausalLM(LlamaConfig(**SMALL, num_attention_heads=4, rope_parameters=YARN))
    randomise(reference)
    path = save(reference, tmp_path) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "original_max_position_embeddings": 8}))
    check_prompt(LlamaForCausalLM.from_pretrained(tmp_path).eval(), load_model(tmp_path))


@pytest.mark.parametrize("window", [1, 5, 16, 500])
def test_mistral_window(window, tmp_path):
    config = MistralConfig(**SMALL, num_attention_heads=4, num_key_value_heads=2, head_dim=12, sliding_window=window)
    reference = MistralForCausalLM(config)
    randomise(reference)
    check_family(reference, tmp_path)


def test_a_mistral_that_names_no_window(tmp_path):
    """Left out it is the reference's, and null is none."""
    save(
        MistralForCausalLM(MistralConfig(**SMALL, num_attention_heads=4, num_key_value_heads=2, sliding_window=None)),
        tmp_path,
    )
    assert load_model(tmp_path).windows() == [None] * 3
    config = json.loads((tmp_path / "config.json").read_text())
    del config["sliding_window"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = MistralConfig.from_pretrained(tmp_path).sliding_window
    assert load_model(tmp_path).windows() == [expected] * 3 == [4096] * 3


def test_a_llama_has_no_window(tmp_path):
    """Mistrals under the name of Llama still have the field, which the reference does not read there."""
    reference = LlamaForCausalLM(LlamaConfig(**SMALL, num_attention_heads=4, sliding_window=5))
    randomise(reference)
    save(reference, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["sliding_window"] == 5
    check_prompt(reference, load_model(tmp_path))


@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES)
def test_bfloat16(options, tmp_path):
    """Measured: equal. bfloat16 itself costs up to 0.018, where logits reach 2, and other machines may sum in another
    order."""
    reference = LlamaForCausalLM(LlamaConfig(**SMALL, **options))
    randomise(reference)
    save(reference, tmp_path)
    rounded = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    check_prompt(rounded, load_model(tmp_path, dtype="bfloat16"), tolerance=0.02)
