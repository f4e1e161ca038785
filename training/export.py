"""Writes a trained network as a model folder: bf16 safetensors in files of at most 16 MB, configs and tokenizer.

Also the state of an unfinished run, in the same format.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from training.data import END, END_ID
from training.model import Network, Shape
from training.optimizer import Optimizer

FILE_BYTES = 15_900_000


def config(shape: Shape) -> dict[str, Any]:
    fields = asdict(shape)
    interval = fields.pop("full_attention_interval")
    frequencies = int(shape.head_dim * shape.partial_rotary_factor) // 2
    third = -(-frequencies // 3)
    rope = {
        "rope_type": "default",
        "rope_theta": fields.pop("rope_theta"),
        "partial_rotary_factor": fields.pop("partial_rotary_factor"),
        "mrope_interleaved": True,
        "mrope_section": [third, third, frequencies - 2 * third],  # all three are one for text
    }
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        **fields,
        "full_attention_interval": interval,
        "layer_types": shape.layer_types,
        "mtp_num_hidden_layers": 1,
        "rope_parameters": rope,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": END_ID,
        "eos_token_id": END_ID,
        "pad_token_id": END_ID,
        "dtype": "bfloat16",
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def save_model(network: Network, tokenizer: Tokenizer, folder: Path) -> None:
    weights = {name: p.bfloat16().contiguous().cpu() for name, p in network.state_dict().items()}
    files: list[dict[str, Tensor]] = [{}]
    for name, weight in weights.items():
        if sum(w.nbytes for w in files[-1].values()) + weight.nbytes > FILE_BYTES:
            files.append({})
        files[-1][name] = weight
    place = {}
    for number, part in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # safetensors keeps files to their owner
        place |= dict.fromkeys(part, file)
    size = sum(weight.nbytes for weight in weights.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": place})
    write_json(folder / "config.json", config(network.shape))
    special = {"bos_token_id": END_ID, "eos_token_id": END_ID, "pad_token_id": END_ID}
    write_json(folder / "generation_config.json", special | {"do_sample": True, "temperature": 0.8, "top_p": 0.95})
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END,
            "eos_token": END,
            "pad_token": END,
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": network.shape.max_position_embeddings,
        },
    )


def save_state(path: Path, network: Network, optimizer: Optimizer, **numbers: float) -> None:
    """Everything to go on from, numbers included. Replaces an older state only once it is whole."""
    tensors = {f"weight.{name}": p for name, p in network.state_dict().items()} | optimizer.state
    fresh = path.with_suffix(".new")
    save_file(tensors, fresh, metadata={"numbers": json.dumps(numbers)})
    fresh.replace(path)


@torch.no_grad()
def load_state(path: Path, network: Network, optimizer: Optimizer) -> dict[str, Any]:
    """Fills the network and the optimizer, and returns the numbers."""
    weights = network.state_dict()
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (it is no dict)
            kind, _, rest = name.partition(".")
            (weights[rest] if kind == "weight" else optimizer.state[name]).copy_(file.get_tensor(name))
        return json.loads(file.metadata()["numbers"])
