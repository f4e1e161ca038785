"""Compares a trained folder with transformers: `python -m training.check FOLDER`. Float32 on a CPU.

Prints the largest difference of the logits on a text, and a greedy continuation by each.
"""

import json
import sys
from dataclasses import fields
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import Qwen3_5ForCausalLM

from training.data import END_ID
from training.evaluate import PROMPTS
from training.model import Network, Shape


def load(folder: Path) -> Network:
    config = json.loads((folder / "config.json").read_text())
    config |= config["rope_parameters"]
    network = Network(Shape(**{field.name: config[field.name] for field in fields(Shape)}))
    weights = {name: w.float() for file in folder.glob("*.safetensors") for name, w in load_file(file).items()}
    network.load_state_dict(weights)
    return network


@torch.inference_mode()
def main() -> None:
    folder = Path(sys.argv[1])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    network, reference = load(folder), Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    row = torch.tensor([[END_ID, *tokenizer.encode(" ".join(PROMPTS)).ids]])
    difference = network.logits(network(row)) - reference(row).logits
    print(f"logits differ by at most {difference.abs().max().item():.2e}")
    theirs = reference.generate(row, max_new_tokens=40, do_sample=False)
    for _ in range(40):
        row = torch.cat((row, network.logits(network(row)[:, -1:]).argmax(-1)), dim=1)
    same = torch.equal(row[:, : theirs.shape[1]], theirs)
    print(f"greedy continuations are {'equal' if same else 'different'}: {tokenizer.decode(row[0, -40:].tolist())!r}")


if __name__ == "__main__":
    main()
