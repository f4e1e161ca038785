"""What conversion to GGUF changes, by architecture: the names of tensors and settings, and the layout of some tensors.

Each is undone here, so that a model family sees no difference to a Hugging Face folder.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from bough.errors import BadWeights, UnknownArchitecture
from bough.models.gguf_header import Metadata

if TYPE_CHECKING:
    from bough.models.gguf import GGUFFile

FREQUENCIES = "rope_freqs.weight"  # what each frequency of the rope is divided by: a setting, though stored as a tensor


@dataclass(frozen=True)
class Architecture:
    """How to read the files of one `general.architecture`."""

    config: Callable[["GGUFFile"], dict[str, Any]]
    layer_names: Mapping[str, str]
    names: Mapping[str, str]
    restore: Callable[["GGUFFile", str, Tensor], Tensor]

    def rename(self, name: str) -> str:
        """The Hugging Face name of a tensor; one that is not known keeps its own, and is reported under it."""
        stem, _, part = name.rpartition(".")
        layer = re.fullmatch(r"blk\.([0-9]{1,6})\.(.+)", stem)
        if layer and layer[2] in self.layer_names:
            return f"model.layers.{layer[1]}.{self.layer_names[layer[2]]}.{part}"
        return f"{self.names[stem]}.{part}" if stem in self.names else name

    def shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in the checkpoint: depthwise convolutions have one input channel, which these files leave out."""
        return (shape[0], 1, shape[1]) if name.endswith(".conv.conv.weight") and len(shape) == 2 else shape


def _decoder(file: "GGUFFile") -> dict[str, Any]:
    """The fields that all architectures have in common."""
    own = file.own
    layers, hidden, heads = own.size("block_count"), own.size("embedding_length"), own.size("attention.head_count")
    held = {int(match[1]) for name in file.names() if (match := re.match(r"model\.layers\.([0-9]{1,6})\.", name))}
    if len(held) != layers or max(held) != layers - 1:
        raise BadWeights(
            f"{file.where} is to have {layers} layers, and holds tensors of {len(held)}; download it again"
        )
    if "model.embed_tokens.weight" not in file:
        raise BadWeights(f"{file.where} has no token_embd.weight; give a file with a whole model")
    head_dim = own.size("attention.key_length", -(-hidden // heads))
    if own.size("rope.dimension_count", head_dim) != head_dim:
        raise UnknownArchitecture(f"{file.where} rotates a part of each head; from GGUF files Bough runs whole ones")
    return {
        "vocab_size": file.shape("model.embed_tokens.weight")[0],
        "hidden_size": hidden,
        "intermediate_size": own.size("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "max_position_embeddings": own.size("context_length"),
        "rms_norm_eps": own.need("attention.layer_norm_rms_epsilon", float),
        "rope_parameters": _rope(file, head_dim),
        "tie_word_embeddings": "lm_head.weight" not in file,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": _end_tokens(file.metadata),
    }


def _rope(file: "GGUFFile", head_dim: int) -> dict[str, Any]:
    own, scaling = file.own, file.own.under("rope.scaling.")
    kind = scaling.get("type", str) or "none"
    rope = {
        "rope_type": "default" if kind == "none" else kind,
        "rope_theta": own.get("rope.freq_base", float) or 10000.0,
    }
    if FREQUENCIES in file:
        if file.shape(FREQUENCIES) != (head_dim // 2,):
            raise BadWeights(f"{FREQUENCIES} in {file.where} does not fit heads of {head_dim}; download it again")
        return rope | {"rope_type": "divided", "divisors": file.read(FREQUENCIES).tolist()}
    if kind != "none":
        rope["factor"] = scaling.need("factor", float)
    if kind == "yarn":
        rope["original_max_position_embeddings"] = scaling.size("original_context_length")
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
    return config | {
        "model_type": "llama",
        "num_key_value_heads": own.size("attention.head_count_kv", config["num_attention_heads"]),
        "sliding_window": own.get("attention.sliding_window", int) or None,
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
ARCHITECTURES = {
    "llama": Architecture(_llama, LAYER_NAMES, NAMES, _half_rotated),
    "qwen3": Architecture(_qwen3, LAYER_NAMES, NAMES, _as_stored),
    "gemma3": Architecture(_gemma3, GEMMA3_LAYER_NAMES, NAMES, _zero_centred),
    "lfm2": Architecture(_lfm2, LFM2_LAYER_NAMES, NAMES | {"token_embd_norm": "model.embedding_norm"}, _as_stored),
}
