"""Tiny transformers models of the architectures that GGUF files have, and their conversion to such files.

The writer does what the converters in the wild do, with the names and the packing of the gguf package.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import quantize
from parity import randomise, remember
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
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
WHOLE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
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


def lfm2_moe(**options):
    options = {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_dense_layers": 1,
        **options,
    }
    config = Lfm2MoeConfig(
        **{**SMALL, **options},
        num_key_value_heads=2,
        layer_types=["conv", "full_attention", "conv"],
    )
    return Lfm2MoeForCausalLM(config)


DELTA = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 32,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS |= {"shared_expert_intermediate_size": 64}


def qwen3_5(**options):
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**SMALL, **DELTA, **options}))


def qwen3_5_moe(**options):
    return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**{**SMALL, **DELTA, **EXPERTS, **options}))


def qwen3_next(**options):
    return Qwen3NextForCausalLM(Qwen3NextConfig(**{**SMALL, **DELTA, **EXPERTS, **options}))


MODELS = {
    "llama": lambda: llama(),
    "llama-tied": lambda: llama(tie_word_embeddings=True, num_key_value_heads=1),
    "llama-ungrouped": lambda: llama(num_key_value_heads=4),
    "llama-biased": lambda: llama(attention_bias=True, mlp_bias=True, head_dim=10),
    "llama3-rope": lambda: llama(rope_parameters=LLAMA3),
    "llama-yarn": lambda: llama(rope_parameters=YARN),
    "llama-yarn-by-hand": lambda: llama(rope_parameters=YARN | {"attention_factor": 1.3, "beta_fast": 16.0}),
    "llama-linear": lambda: llama(rope_parameters=LINEAR),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL, num_key_value_heads=2, head_dim=16, sliding_window=9)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=24)),
    "gemma3": lambda: gemma3(),
    "gemma3-scaled": lambda: gemma3(rope_parameters=GEMMA_ROPE, final_logit_softcapping=30.0),
    "gemma3-62-layers": lambda: gemma3(num_hidden_layers=62, query_pre_attn_scalar=16),  # the 27B model has as many
    "lfm2": lfm2,
    "lfm2-moe": lfm2_moe,
    "lfm2-moe-unbiased": lambda: lfm2_moe(use_expert_bias=False, num_dense_layers=0),
    "qwen3-next": qwen3_next,
    "qwen3-next-ungrouped": lambda: qwen3_next(linear_num_key_heads=3, linear_num_value_heads=3, head_dim=24),
    "qwen3.5": qwen3_5,
    "qwen3.5-two-to-one": lambda: qwen3_5(
        linear_num_key_heads=3, linear_conv_kernel_dim=3, tie_word_embeddings=True, attention_bias=True
    ),
    "qwen3.5-rotated-whole": lambda: qwen3_5(rope_parameters=WHOLE),
    "qwen3.5-ungrouped": lambda: qwen3_5(linear_num_key_heads=1, linear_num_value_heads=1),
    "qwen3.5-moe": qwen3_5_moe,
}
ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3", "lfm2_moe": "lfm2moe", "qwen3_next": "qwen3next"}
ARCHITECTURES |= {"qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe"}


def reference(name: str) -> torch.nn.Module:
    model = MODELS[name]()
    randomise(model)
    remember(model)
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):  # enough to decide who is asked
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=torch.Generator().manual_seed(1)))
    return model.eval()


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a projection from rope's halves to its neighbours, as converters of Llama order them."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def tiled(values: np.ndarray, config, axis: int = 0) -> np.ndarray:
    """Value heads from those of a key head next to each other to the first of each, then the second of each."""
    keys = config.linear_num_key_heads
    each = config.linear_num_value_heads // keys
    shape = values.shape
    heads = values.reshape(*shape[:axis], keys, each, -1, *shape[axis + 1 :])
    return heads.swapaxes(axis, axis + 1).reshape(shape)


def stored(config, name: str, value: np.ndarray) -> np.ndarray:
    """What a converter makes of a tensor."""
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
        return permuted(value, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return value + 1
    if architecture.startswith("qwen3") and architecture != "qwen3":
        return stored_delta(config, name, value, tiles=architecture != "qwen3next")
    return value.squeeze(1) if name.endswith("conv.conv.weight") else value


def stored_delta(config, name: str, value: np.ndarray, *, tiles: bool) -> np.ndarray:
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return value + 1
    if name.endswith("A_log"):
        value = -np.exp(value)
    if name.endswith("conv1d.weight"):
        value = value.squeeze(1)
    if not tiles or ".linear_attn." not in name or name.endswith("linear_attn.norm.weight"):
        return value
    if "out_proj" in name:
        return tiled(value, config, axis=1)
    before = 2 * config.linear_num_key_heads * config.linear_key_head_dim if "qkv" in name or "conv1d" in name else 0
    return np.concatenate([value[:before], tiled(value[before:], config)])


def taken_apart(config, name: str, value: np.ndarray, *, together: bool) -> dict[str, np.ndarray]:
    """Tensors that converters make several of, or call by a name that is not theirs."""
    if name.endswith(".in_proj_qkvz.weight"):
        group = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
        sizes = np.cumsum([config.linear_key_head_dim, config.linear_key_head_dim, group])
        heads = value.reshape(config.linear_num_key_heads, -1, value.shape[1])
        q, k, v, z = (each.reshape(-1, value.shape[1]) for each in np.split(heads, sizes, axis=1))
        prefix = name.removesuffix("qkvz.weight")
        return {f"{prefix}qkv.weight": np.concatenate([q, k, v]), f"{prefix}z.weight": z}
    if name.endswith(".experts.gate_up_proj") and not together:
        gate, up = np.split(value, 2, axis=1)
        return {f"{name.replace('gate_up', each)}.weight": part for each, part in (("gate", gate), ("up", up))}
    if ".experts." in name:
        return {f"{name}.weight": value}
    return {name.replace(".dt_bias", ".dt_proj.bias").replace("expert_bias", "expert_bias.bias"): value}


NEXT = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm"}
NEXT |= {"lm_head": "shared_head_head"}


def as_layers(config, head: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of an MTP head as converters call them: what a layer has is of one behind the last."""
    tensors = {}
    for name, value in head.items():
        if (expert := re.search(r"\.experts\.(\d+)\.", name)) and expert[1] != "0":
            continue
        if expert:
            one, other = name.split(".experts.0.")
            value = torch.stack([head[f"{one}.experts.{each}.{other}"] for each in range(config.num_experts)])
            name = name.replace(".experts.0.", ".experts.").removesuffix(".weight")
        stem, part = name.removeprefix("mtp.").rsplit(".", 1)
        renamed = name.replace("mtp.layers.0", f"model.layers.{config.num_hidden_layers}")
        if renamed == name:
            renamed = f"blk.{config.num_hidden_layers}.nextn.{NEXT.get(stem, stem)}.{part}"
        tensors[renamed] = value
    return tensors


def add_config(writer: gguf.GGUFWriter, config, layers: int | None = None) -> None:
    writer.add_block_count(layers or config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", None) or config.norm_eps)
    if config.model_type.startswith("lfm2"):
        attends = [each == "full_attention" for each in config.layer_types]
        writer.add_head_count_kv([config.num_key_value_heads * each for each in attends])
        writer.add_shortconv_l_cache(config.conv_L_cache)
    else:
        listed = config.model_type == "qwen3_5_moe_text"  # as some converters do it
        attends = [each == "full_attention" for each in config.layer_types] if listed else []
        writer.add_head_count_kv([config.num_key_value_heads * each for each in attends] or config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
    if hasattr(config, "linear_num_key_heads"):
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_full_attention_interval(4)
        writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    if hasattr(config, "num_experts"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if hasattr(config, "num_dense_layers"):
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
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
        if "attention_factor" in rope:
            writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    if rope["rope_type"] == "llama3":
        waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, config.head_dim, 2) / config.head_dim)
        turns = rope["original_max_position_embeddings"] / waves
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        writer.add_tensor("rope_freqs.weight", (1 / (smooth + (1 - smooth) / rope["factor"])).astype(np.float32))


def write(
    model: torch.nn.Module,
    path: Path,
    kind: Type = Type.F32,
    *,
    head: Mapping[str, torch.Tensor] | None = None,
    together: bool = False,
    **metadata,
) -> Path:
    """The model as a GGUF file, its matrices of the given type; with an MTP head, or gate and up `together`."""
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    add_config(writer, config, layers=config.num_hidden_layers + (head is not None))
    if head is not None:
        writer.add_nextn_predict_layers(1)
    code = next(code for code, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(code, config.num_hidden_layers + 1)
    widths = set()
    for name, value in {**model.state_dict(), **as_layers(config, head or {})}.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith((".mlp.gate_proj.weight", ".feed_forward.w1.weight")):
            widths.add(len(value))
        for one, part in taken_apart(config, name, value.numpy(), together=together).items():
            data = stored(config, one, part)
            found = one if one.startswith("blk.") else names.get_name(one, try_suffixes=(".weight", ".bias"))
            packed = kind if found.endswith(".weight") and data.ndim > 1 and "conv" not in found else Type.F32
            writer.add_tensor(found, quantize(data, packed), raw_dtype=packed)
    for width in widths:
        writer.add_feed_forward_length(width)
    for key, value in metadata.items():
        getattr(writer, f"add_{key}")(value)
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
