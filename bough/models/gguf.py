"""GGUF files as a source of weights: tensors under Hugging Face names and in their layout, and a config to match.

What conversion to GGUF changed is undone here, so that a model family sees no difference to a Hugging Face folder.
Tensors are dequantised one at a time, when they are read. The tokenizer in the file is the matter of
gguf_tokenizer.py.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bough.errors import BadWeights, ModelError, UnknownArchitecture
from bough.models.gguf_header import Entry, Header, Metadata, read_header
from bough.models.gguf_tokenizer import gguf_tokenizer

__all__ = ["GGUFFile", "gguf_tokenizer"]

PIECE = 1 << 17  # elements dequantised at once: few enough that the steps in between stay in the processor's cache
FREQUENCIES = "rope_freqs.weight"  # what each frequency of the rope is divided by; part of the config


class GGUFFile:
    """A GGUF file: the Source of its tensors, its config, and its metadata."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self._data, header = _open(path)
        self._quants = _quants(self.where)
        self.metadata: Metadata = header.metadata
        name = self.metadata.need("general.architecture", str)
        if name not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            raise UnknownArchitecture(f"{self.where} is of type {name!r}; from GGUF files Bough runs {known}")
        if (parts := self.metadata.size("split.count", 1)) > 1:
            raise ModelError(f"{self.where} is one of {parts} parts; join them with llama-gguf-split --merge")
        self.own = self.metadata.under(f"{name}.")  # the part that describes the model
        self._architecture = ARCHITECTURES[name]
        self._start = header.data_start
        self._stored = {self._architecture.rename(entry.name): entry for entry in header.tensors}
        self._bytes = {name: self._place(entry) for name, entry in self._stored.items()}

    def _place(self, entry: Entry) -> slice:
        """Where the tensor's bytes are; a place outside the file is an error."""
        try:
            block, size = self._quants.GGML_QUANT_SIZES[self._quants.GGMLQuantizationType(entry.type)]
        except (ValueError, KeyError):
            raise BadWeights(
                f"{entry.name} in {self.where} is of type {entry.type}, which the gguf package does not know;"
                " upgrade it (pip install -U gguf) or take another quantisation"
            ) from None
        if (entry.shape or (1,))[-1] % block:
            raise BadWeights(f"{entry.name} in {self.where} does not fill its blocks of {block}; download it again")
        start = self._start + entry.offset
        stop = start + entry.elements // block * size
        if stop > len(self._data):
            raise BadWeights(
                f"{self.where} has {len(self._data)} bytes, and {entry.name} would end at {stop};"
                " it is cut short or damaged: download it again"
            )
        return slice(start, stop)

    def names(self) -> Iterable[str]:
        return [name for name in self._stored if name != FREQUENCIES]

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._stored[name].shape
        if name.endswith(".conv.conv.weight") and len(shape) == 2:
            return (shape[0], 1, shape[1])  # GGUF leaves out the one input channel of a depthwise convolution
        return shape

    def read(self, name: str) -> Tensor:
        """The tensor in float32, as the Hugging Face checkpoint has it."""
        return self._architecture.restore(self, name, self._dequantise(name).view(self.shape(name)))

    def _dequantise(self, name: str) -> Tensor:
        entry, data = self._stored[name], self._data[self._bytes[name]]
        kind = self._quants.GGMLQuantizationType(entry.type)
        block, size = self._quants.GGML_QUANT_SIZES[kind]
        values, blocks = torch.empty(entry.elements), max(1, PIECE // block)
        try:
            for i, piece in enumerate(values.split(blocks * block)):
                part = data[i * blocks * size : (i + 1) * blocks * size]
                piece.numpy()[:] = self._quants.dequantize(part, kind)
        except NotImplementedError:
            raise BadWeights(
                f"{entry.name} in {self.where} is of type {kind.name}, which Bough cannot dequantise;"
                " take another quantisation of the model"
            ) from None
        return values

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def config(self) -> dict[str, Any]:
        """What config.json would say."""
        return self._architecture.config(self)

    @property
    def dtype(self) -> str:
        """What to compute in: the type of the matrices, or for quantised ones bfloat16, finer than their steps."""
        types = {self._quants.GGMLQuantizationType(entry.type).name for entry in self._stored.values()}
        if types <= {"F32"}:
            return "float32"
        return "float16" if types <= {"F32", "F16"} else "bfloat16"


def _quants(where: str) -> Any:
    try:
        from gguf import quants  # an optional dependency: only these files need it
    except ImportError:
        raise ModelError(f"{where} needs the gguf package to be read: pip install 'bough[gguf]'") from None
    return quants


def _open(path: Path) -> tuple[np.ndarray, Header]:
    try:
        data = np.asarray(np.memmap(path, mode="r")) if path.stat().st_size else np.empty(0, np.uint8)
    except OSError as error:
        raise ModelError(f"{path} cannot be opened ({error.strerror}); give the path of a .gguf file") from None
    return data, read_header(data, str(path))


@dataclass(frozen=True)
class Architecture:
    """How to read the files of one `general.architecture`."""

    config: Callable[[GGUFFile], dict[str, Any]]
    layer_names: Mapping[str, str]
    names: Mapping[str, str]
    restore: Callable[[GGUFFile, str, Tensor], Tensor]

    def rename(self, name: str) -> str:
        """The Hugging Face name of a tensor; one that is not known keeps its own, and is reported under it."""
        stem, _, part = name.rpartition(".")
        layer = re.fullmatch(r"blk\.(\d+)\.(.+)", stem)
        if layer and layer[2] in self.layer_names:
            return f"model.layers.{layer[1]}.{self.layer_names[layer[2]]}.{part}"
        return f"{self.names[stem]}.{part}" if stem in self.names else name


def _decoder(file: GGUFFile) -> dict[str, Any]:
    """The fields that all architectures have in common."""
    own = file.own
    layers, hidden, heads = own.size("block_count"), own.size("embedding_length"), own.size("attention.head_count")
    held = {int(match[1]) for name in file.names() if (match := re.match(r"model\.layers\.(\d+)\.", name))}
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
        "dtype": file.dtype,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": _end_tokens(file.metadata),
    }


def _rope(file: GGUFFile, head_dim: int) -> dict[str, Any]:
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


def _llama(file: GGUFFile) -> dict[str, Any]:
    config, own = _decoder(file), file.own
    if own.get("expert_count", int):
        raise UnknownArchitecture(f"{file.where} is a mixture of experts; Bough runs llama models without experts")
    return config | {
        "model_type": "llama",
        "num_key_value_heads": own.size("attention.head_count_kv", config["num_attention_heads"]),
        "sliding_window": own.get("attention.sliding_window", int),
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in file,
        "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in file,
    }


def _qwen3(file: GGUFFile) -> dict[str, Any]:
    return _decoder(file) | {"model_type": "qwen3", "num_key_value_heads": file.own.size("attention.head_count_kv")}


def _gemma3(file: GGUFFile) -> dict[str, Any]:
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


def _lfm2(file: GGUFFile) -> dict[str, Any]:
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


def _as_stored(file: GGUFFile, name: str, tensor: Tensor) -> Tensor:
    return tensor


def _half_rotated(file: GGUFFile, name: str, tensor: Tensor) -> Tensor:
    """Rows of q and k in our order: rope turns dimension j with j + half, in these files with its neighbour."""
    projection = re.search(r"\.self_attn\.([qk])_proj\.", name)
    if projection is None:
        return tensor
    heads = file.own.size("attention.head_count")
    if projection[1] == "k":
        heads = file.own.size("attention.head_count_kv", heads)
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _zero_centred(file: GGUFFile, name: str, tensor: Tensor) -> Tensor:
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
