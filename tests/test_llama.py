"""Llama, Mistral and SmolLM2 shapes against transformers."""

import pytest
from parity import check_family, randomise
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

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


@pytest.mark.parametrize(
    "options",
    [
        {"num_attention_heads": 4, "num_key_value_heads": 2},
        {"num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True},
        {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10, "attention_bias": True, "mlp_bias": True},
        {"num_attention_heads": 4, "num_key_value_heads": 4, "rope_parameters": LLAMA3},
        {"num_attention_heads": 4, "num_key_value_heads": 1, "rope_parameters": YARN},
    ],
    ids=["grouped", "smollm", "biased", "llama3-rope", "yarn"],
)
def test_llama(options, tmp_path):
    reference = LlamaForCausalLM(LlamaConfig(**SMALL, **options))
    randomise(reference)
    check_family(reference, tmp_path)


@pytest.mark.parametrize("window", [1, 5, 16, 500])
def test_mistral_window(window, tmp_path):
    config = MistralConfig(**SMALL, num_attention_heads=4, num_key_value_heads=2, head_dim=12, sliding_window=window)
    reference = MistralForCausalLM(config)
    randomise(reference)
    check_family(reference, tmp_path)
