"""What conversion to GGUF changes, by architecture: the names of tensors and settings, and the layout of some tensors.

Each is undone here, so that a model family sees no difference to a Hugging Face folder.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bough.errors import BadWeights, UnknownArchitecture
from bough.models.gguf_header import Metadata

if TYPE_CHECKING:
    from bough.models.gguf import GGUFFile

SIGMOID = 2  # the number of a way to score experts
FREQUENCIES = "rope_freqs.weight"  # what each frequency of the rope is divided by: a setting, though stored as a tensor


Names = Mapping[str, str | tuple[str, str]]
ANY = 1 << 24  # layers: more than any model has


@dataclass(frozen=True)
class Architecture:
    """How to read the files of one `general.architecture`.

    A name with {} stands for as many as a tensor has experts, stacked; two names for one tensor are of what it has for
    each expert one after the other, or of what `restore` takes apart.
    """

    config: Callable[["GGUFFile"], dict[str, Any]]
    layer_names: Names
    names: Mapping[str, str]
    restore: Callable[["GGUFFile", str, Tensor], Tensor]

    def rename(self, name: str, layers: int = ANY) -> list[str]:
        """The Hugging Face names of what is in a tensor; one that is not known keeps its own, and is reported under it.

        Layers behind so many are those of an MTP head.
        """
        stem, _, part = name.rpartition(".")
        layer = re.fullmatch(r"blk\.([0-9]{1,6})\.(.+)", name)
        if layer is None:
            return [f"{self.names[stem]}.{part}" if stem in self.names else name]
        index, own = int(layer[1]), layer[2]
        if index >= layers and own in HEAD_NAMES:  # each further layer of a head repeats them
            return [HEAD_NAMES[own] if index == layers else f"mtp.layers.{index - layers}.{own}"]
        prefix, part = f"model.layers.{index}" if index < layers else f"mtp.layers.{index - layers}", ""
        if own not in self.layer_names:  # which are those that are not the weight or the bias of something
            own, _, part = own.rpartition(".")
        if own not in self.layer_names:
            return [name]
        found = self.layer_names[own]
        return [f"{prefix}.{each}.{part}".rstrip(".") for each in ([found] if isinstance(found, str) else found)]

    def shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in the checkpoint: convolutions have one input channel and a gate one output, which is left out."""
        if name.endswith((".conv.conv.weight", ".conv1d.weight")) and len(shape) == 2:
            return (shape[0], 1, shape[1])
        return (1, *shape) if name.endswith(".shared_expert_gate.weight") and len(shape) == 1 else shape


def _decoder(file: "GGUFFile", *, rotates_part: bool = False) -> dict[str, Any]:
    """The fields that all architectures have in common."""
    own, layers = file.own, layers_of(file.own)
    hidden, heads = own.size("embedding_length"), own.size("attention.head_count")
    held = {int(match[1]) for name in file.names() if (match := re.match(r"model\.layers\.([0-9]{1,6})\.", name))}
    if len(held) != layers or max(held) != layers - 1:
        raise BadWeights(
            f"{file.where} is to have {layers} layers, and holds tensors of {len(held)}; download it again"
        )
    if "model.embed_tokens.weight" not in file:
        raise BadWeights(f"{file.where} has no token_embd.weight; give a file with a whole model")
    if own.get("attention.causal", bool) is False:
        raise UnknownArchitecture(f"{file.where} attends in both directions, to embed texts; Bough runs decoders only")
    head_dim = own.size("attention.key_length", -(-hidden // heads))
    rotated = own.size("rope.dimension_count", head_dim)
    if rotated != head_dim and not rotates_part:
        raise UnknownArchitecture(f"{file.where} rotates a part of each head; from GGUF files Bough runs whole ones")
    return {
        "vocab_size": file.shape("model.embed_tokens.weight")[0],
        "hidden_size": hidden,
        "intermediate_size": own.size("feed_forward_length", own.get("expert_feed_forward_length", int)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "max_position_embeddings": own.size("context_length"),
        "rms_norm_eps": own.need("attention.layer_norm_rms_epsilon", float),
        "rope_parameters": _rope(file, rotated) | (_part(rotated, head_dim) if rotates_part else {}),
        "tie_word_embeddings": "lm_head.weight" not in file,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": _end_tokens(file.metadata),
    }


def layers_of(own: Metadata) -> int:
    """How many layers there are, without those of an MTP head."""
    layers, head = own.size("block_count"), own.get("nextn_predict_layers", int) or 0
    if not 0 <= head < layers:
        raise BadWeights(
            f"{own.where} has {layers} layers, {head} of them for drafts; it is damaged: download it again"
        )
    return layers - head


def _part(rotated: int, head_dim: int) -> dict[str, float]:
    """Which part of a head is rotated, even if it is all; a touch more, since what is made of it is rounded down."""
    return {"partial_rotary_factor": math.nextafter(rotated / head_dim, 1)}


def _rope(file: "GGUFFile", rotated: int) -> dict[str, Any]:
    own, scaling = file.own, file.own.under("rope.scaling.")
    kind = scaling.get("type", str) or "none"
    rope = {
        "rope_type": "default" if kind == "none" else kind,
        "rope_theta": own.get("rope.freq_base", float) or 10000.0,
    }
    if FREQUENCIES in file:
        if file.shape(FREQUENCIES) != (rotated // 2,):
            raise BadWeights(f"{FREQUENCIES} in {file.where} does not fit {rotated} dimensions; download it again")
        return rope | {"rope_type": "divided", "divisors": file.read(FREQUENCIES).tolist()}
    if kind != "none":
        rope["factor"] = scaling.need("factor", float)
    if kind == "yarn":
        rope["original_max_position_embeddings"] = scaling.size("original_context_length")
        rope["attention_factor"] = scaling.get("yarn_attn_factor", float)
        rope["beta_fast"] = scaling.get("yarn_beta_fast", float)
        rope["beta_slow"] = scaling.get("yarn_beta_slow", float)
    return rope


def _end_tokens(metadata: Metadata) -> list[int] | None:
    """All tokens that end a text: of a document, of a turn, of a message to a tool."""
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id", int) for name in ("eos", "eot", "eom")]
    return sorted({token for token in ids if token is not None}) or None


def _llama(file: "GGUFFile") -> dict[str, Any]:
    config, own = _decoder(file), file.own
    if own.get("expert_count", int):
        raise UnknownArchitecture(f"{file.where} is a mixture of experts; Bough runs llama models without experts")
    window = own.get("attention.sliding_window", int) or None
    return config | {
        "model_type": "mistral" if window else "llama",  # whose files call themselves llama too
        "num_key_value_heads": own.size("attention.head_count_kv", config["num_attention_heads"]),
        "sliding_window": window,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in file,
        "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in file,
    }


def _qwen3(file: "GGUFFile") -> dict[str, Any]:
    return _decoder(file) | {"model_type": "qwen3", "num_key_value_heads": file.own.size("attention.head_count_kv")}


def _gemma3(file: "GGUFFile") -> dict[str, Any]:
    config, own = _decoder(file), file.own
    layers, every = config["num_hidden_layers"], own.size("attention.sliding_window_pattern", 6)
    # The file does not give the scale of attention: the 27B model alone, of 62 layers, departs from the head's size.
    scale = config["hidden_size"] // config["num_attention_heads"] if layers == 62 else config["head_dim"]
    return config | {
        "model_type": "gemma3_text",
        "num_key_value_heads": own.size("attention.head_count_kv"),
        "sliding_window": own.size("attention.sliding_window"),
        "layer_types": ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)],
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": own.get("rope.freq_base_swa", float) or 10000.0,
            },
        },
        "query_pre_attn_scalar": scale,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": own.get("final_logit_softcapping", float),
    }


def _lfm2(file: "GGUFFile") -> dict[str, Any]:
    config = _decoder(file)
    kv_heads = file.own.need("attention.head_count_kv", np.ndarray).tolist()  # 0 in the layers with a convolution
    return config | {
        "model_type": "lfm2",
        "num_key_value_heads": max(kv_heads, default=0),
        "layer_types": ["full_attention" if heads else "conv" for heads in kv_heads],
        "norm_eps": config["rms_norm_eps"],
        "conv_L_cache": file.own.size("shortconv.l_cache"),
        "conv_bias": any(name.endswith(".conv.in_proj.bias") for name in file.names()),
        "block_auto_adjust_ff_dim": False,  # the width in the file is the final one
    }


def _lfm2_moe(file: "GGUFFile") -> dict[str, Any]:
    own = file.own
    if own.get("expert_gating_func", int) not in (None, SIGMOID):
        raise UnknownArchitecture(f"{file.where} scores its experts in a way that Bough does not know of this family")
    return (
        _lfm2(file)
        | _experts(file)
        | {
            "model_type": "lfm2_moe",
            "num_dense_layers": own.get("leading_dense_block_count", int) or 0,
            "use_expert_bias": any(name.endswith(".expert_bias") for name in file.names()),
            "routed_scaling_factor": own.get("expert_weights_scale", float),
        }
    )


def _qwen3_5(file: "GGUFFile") -> dict[str, Any]:
    config, own = _decoder(file, rotates_part=True), file.own
    attends = [f"model.layers.{index}.self_attn.q_proj.weight" in file for index in range(config["num_hidden_layers"])]
    heads = own.size("ssm.time_step_rank")
    return config | {
        "model_type": "qwen3_5_text",
        "num_key_value_heads": max(own.sizes("attention.head_count_kv"), default=0),
        "layer_types": ["full_attention" if each else "linear_attention" for each in attends],
        "hidden_act": "silu",
        "attention_bias": any(name.endswith(".self_attn.q_proj.bias") for name in file.names()),
        "linear_num_key_heads": own.size("ssm.group_count"),
        "linear_key_head_dim": own.size("ssm.state_size"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": own.size("ssm.inner_size") // heads,
        "linear_conv_kernel_dim": own.size("ssm.conv_kernel"),
    }


def _qwen3_5_moe(file: "GGUFFile") -> dict[str, Any]:
    """Of Qwen3-Next too, whose files have the inputs of the delta rule in the order of Qwen3.5."""
    shared = {"shared_expert_intermediate_size": file.own.size("expert_shared_feed_forward_length")}
    return _qwen3_5(file) | _experts(file) | shared | {"model_type": "qwen3_5_moe_text"}


def _experts(file: "GGUFFile") -> dict[str, Any]:
    own = file.own
    return {
        "num_experts": own.size("expert_count"),
        "num_experts_per_tok": own.size("expert_used_count"),
        "moe_intermediate_size": own.size("expert_feed_forward_length"),
        "norm_topk_prob": own.get("expert_weights_norm", bool),
    }


def _as_stored(file: "GGUFFile", name: str, tensor: Tensor) -> Tensor:
    return tensor


def _half_rotated(file: "GGUFFile", name: str, tensor: Tensor) -> Tensor:
    """Rows of q and k in our order: rope turns dimension j with j + half, in these files with its neighbour."""
    projection = re.search(r"\.self_attn\.([qk])_proj\.", name)
    if projection is None:
        return tensor
    heads = file.own.size("attention.head_count")
    if projection[1] == "k":
        heads = file.own.size("attention.head_count_kv", heads)
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _zero_centred(file: "GGUFFile", name: str, tensor: Tensor) -> Tensor:
    """Norm weights as in the checkpoint, around 0; these files have them with the 1 added."""
    return tensor - 1 if name.endswith("norm.weight") else tensor


def _delta(file: "GGUFFile", name: str, tensor: Tensor) -> Tensor:
    """As Qwen3-Next has it: norms but for one around 0, decays as logarithms, and b and a apart, which these files have
    together for each key head."""
    if re.search(r"(?<!linear_attn\.)norm(_embedding|_hidden)?\.weight$", name):
        return tensor - 1
    if name.endswith(".A_log"):
        return torch.log(-tensor)
    if gate := re.search(r"\.in_proj_([ba])\.", name):
        return tensor.unflatten(0, (file.own.size("ssm.group_count"), 2, -1))[:, "ba".index(gate[1])].flatten(0, 1)
    return tensor


def _delta_by_key_head(file: "GGUFFile", name: str, tensor: Tensor) -> Tensor:
    """The same of Qwen3.5, where b and a are apart, and the value heads of a key head next to each other. These files
    have the first of each key head, then the second of each."""
    part = re.search(r"\.linear_attn\.(in_proj_qkv|in_proj_z|in_proj_b|in_proj_a|A_log|dt_bias|conv1d|out_proj)", name)
    if part is None:
        return _delta(file, name, tensor)
    ssm = file.own.under("ssm.")
    keys = ssm.size("group_count")
    heads = (ssm.size("time_step_rank") // keys, keys, -1)
    if part[1] == "out_proj":
        return tensor.unflatten(1, heads).transpose(1, 2).flatten(1, 3)
    before = 2 * keys * ssm.size("state_size") if part[1] in ("in_proj_qkv", "conv1d") else 0  # rows of q and k
    values = tensor[before:].unflatten(0, heads).transpose(0, 1).flatten(0, 2)
    tensor = torch.cat([tensor[:before], values])
    return torch.log(-tensor) if part[1] == "A_log" else tensor


NAMES = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA3_LAYER_NAMES = LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LFM2_LAYER_NAMES = LAYER_NAMES | {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
}
LFM2_NAMES = NAMES | {"token_embd_norm": "model.embedding_norm"}
LFM2_MOE_LAYER_NAMES = LFM2_LAYER_NAMES | {
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    "ffn_gate_exps": "feed_forward.experts.{}.w1",
    "ffn_up_exps": "feed_forward.experts.{}.w3",
    "ffn_down_exps": "feed_forward.experts.{}.w2",
}
DELTA_LAYER_NAMES: Names = {
    **LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_gate_up_exps": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
TOGETHER: Names = {**DELTA_LAYER_NAMES, "ssm_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a")}
APART: Names = {**DELTA_LAYER_NAMES, "ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a"}
HEAD_NAMES = {  # of an MTP head, beside its layer
    "nextn.eh_proj.weight": "mtp.fc.weight",
    "nextn.enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "nextn.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm.weight": "mtp.norm.weight",
    "nextn.embed_tokens.weight": "mtp.embed_tokens.weight",
    "nextn.shared_head_head.weight": "mtp.lm_head.weight",
}
ARCHITECTURES = {
    "llama": Architecture(_llama, LAYER_NAMES, NAMES, _half_rotated),
    "qwen3": Architecture(_qwen3, LAYER_NAMES, NAMES, _as_stored),
    "gemma3": Architecture(_gemma3, GEMMA3_LAYER_NAMES, NAMES, _zero_centred),
    "lfm2": Architecture(_lfm2, LFM2_LAYER_NAMES, LFM2_NAMES, _as_stored),
    "lfm2moe": Architecture(_lfm2_moe, LFM2_MOE_LAYER_NAMES, LFM2_NAMES, _as_stored),
    "qwen3next": Architecture(_qwen3_5_moe, TOGETHER, NAMES, _delta),
    "qwen35": Architecture(_qwen3_5, APART, NAMES, _delta_by_key_head),
    "qwen35moe": Architecture(_qwen3_5_moe, APART, NAMES, _delta_by_key_head),
}
