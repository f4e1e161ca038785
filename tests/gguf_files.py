"""Tiny transformers models of the architectures that GGUF files have, and their conversion to such files.

The writer does what the converters in the wild do, with the names and the packing of the gguf package.
"""

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import quantize
from parity import randomise
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SMALL = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def llama(**options):
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, **options}))


def gemma3(**options):
    options = {"num_key_value_heads": 2, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 7, **options}
    return Gemma3ForCausalLM(Gemma3TextConfig(**{**SMALL, "num_hidden_layers": 7, **options}))


def lfm2():
    config = Lfm2Config(
        **{**SMALL, "num_hidden_layers": 4},
        num_key_value_heads=2,
        layer_types=["conv", "conv", "full_attention", "conv"],
    )
    return Lfm2ForCausalLM(config)


MODELS = {
    "llama": lambda: llama(),
    "llama-tied": lambda: llama(tie_word_embeddings=True, num_key_value_heads=1),
    "llama-ungrouped": lambda: llama(num_key_value_heads=4),
    "llama-biased": lambda: llama(attention_bias=True, mlp_bias=True, head_dim=10),
    "llama3-rope": lambda: llama(rope_parameters=LLAMA3),
    "llama-yarn": lambda: llama(rope_parameters=YARN),
    "llama-linear": lambda: llama(rope_parameters=LINEAR),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL, num_key_value_heads=2, head_dim=16, sliding_window=9)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=24)),
    "gemma3": lambda: gemma3(),
    "gemma3-scaled": lambda: gemma3(rope_parameters=GEMMA_ROPE, final_logit_softcapping=30.0),
    "gemma3-62-layers": lambda: gemma3(num_hidden_layers=62, query_pre_attn_scalar=16),  # the 27B model has as many
    "lfm2": lfm2,
}
ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}


def reference(name: str) -> torch.nn.Module:
    model = MODELS[name]()
    randomise(model)
    return model.eval()


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a projection from rope's halves to its neighbours, as converters of Llama order them."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def stored(config, name: str, value: np.ndarray) -> np.ndarray:
    """What a converter makes of a tensor."""
    if ARCHITECTURES.get(config.model_type, config.model_type) == "llama" and ("q_proj" in name or "k_proj" in name):
        return permuted(value, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
    if config.model_type == "gemma3_text" and name.endswith("norm.weight"):
        return value + 1
    return value.squeeze(1) if name.endswith("conv.conv.weight") else value


def add_config(writer: gguf.GGUFWriter, config) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", None) or config.norm_eps)
    if config.model_type == "lfm2":
        attends = [each == "full_attention" for each in config.layer_types]
        writer.add_head_count_kv([config.num_key_value_heads * each for each in attends])
        writer.add_shortconv_l_cache(config.conv_L_cache)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    add_rope(writer, config.rope_parameters.get("full_attention", config.rope_parameters), config)


def add_rope(writer: gguf.GGUFWriter, rope: dict, config) -> None:
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, config.head_dim, 2) / config.head_dim)
        turns = rope["original_max_position_embeddings"] / waves
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        writer.add_tensor("rope_freqs.weight", (1 / (smooth + (1 - smooth) / rope["factor"])).astype(np.float32))


def write(model: torch.nn.Module, path: Path, kind: Type = Type.F32, **metadata) -> Path:
    """The model as a GGUF file, its matrices of the given type."""
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    add_config(writer, config)
    code = next(code for code, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(code, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith((".0.mlp.gate_proj.weight", ".0.feed_forward.w1.weight")):
            writer.add_feed_forward_length(len(value))
        data = stored(config, name, value.numpy())
        packed = kind if value.dim() == 2 else Type.F32
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight", ".bias")), quantize(data, packed), raw_dtype=packed
        )
    for key, value in metadata.items():
        getattr(writer, f"add_{key}")(value)
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
