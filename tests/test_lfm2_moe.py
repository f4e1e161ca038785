"""LFM2 with experts against transformers: how experts are chosen, dense layers before them, and files of both forms."""

import json

import pytest
import torch
from parity import check_family, check_prompt, randomise, save
from safetensors.torch import load_file, save_file
from transformers import Lfm2MoeConfig, Lfm2MoeForCausalLM

from bough.errors import BadWeights
from bough.models.blocks import GatedMLP
from bough.models.load import load_model
from bough.models.quantize import quantize

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 72,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_dense_layers": 1,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
}
SHAPES = {
    "hybrid": {},
    "no-bias": {"use_expert_bias": False},
    "scaled": {"routed_scaling_factor": 2.5, "norm_topk_prob": False},
    "all-sparse": {"num_dense_layers": 0, "num_experts_per_tok": 3},
    "all-dense": {"num_dense_layers": 4},
    "one-of-five": {"num_experts": 5, "num_experts_per_tok": 1, "conv_bias": True, "tie_word_embeddings": False},
    "everyone": {"num_experts": 3, "num_experts_per_tok": 3},
}


def tiny(**options) -> Lfm2MoeForCausalLM:
    torch.manual_seed(0)
    reference = Lfm2MoeForCausalLM(Lfm2MoeConfig(**{**SMALL, **options}))
    randomise(reference)
    generator = torch.Generator().manual_seed(1)
    for name, buffer in reference.named_buffers():
        if name.endswith("expert_bias"):  # enough to decide who is asked
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return reference.eval()


@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES)
def test_shapes(options, tmp_path):
    model = check_family(tiny(**options), tmp_path)
    dense = [isinstance(layer.mlp, GatedMLP) for layer in model.layers]
    assert dense == [index < {**SMALL, **options}["num_dense_layers"] for index in range(4)]


@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES)
def test_bfloat16(options, tmp_path):
    reference = tiny(**options)
    save(reference, tmp_path)
    biases = {name: buffer.clone() for name, buffer in reference.named_buffers() if name.endswith("expert_bias")}
    reference.to(torch.bfloat16)
    for name, bias in biases.items():  # which both add in float32
        reference.get_submodule(name.rsplit(".", 1)[0]).expert_bias = bias
    check_prompt(reference, load_model(tmp_path, dtype="bfloat16"), tolerance=0.06)


def test_experts_one_by_one_and_stacked(tmp_path):
    reference = tiny()
    file = save(reference, tmp_path) / "model.safetensors"
    names = load_file(file).keys()
    assert "model.layers.1.feed_forward.experts.5.w3.weight" in names  # as on the hub
    kept = {name: value for name, value in load_file(file).items() if ".experts." not in name}
    save_file(kept | {n: v for n, v in reference.state_dict().items() if ".experts." in n}, file)
    check_prompt(reference, load_model(tmp_path))


def test_what_a_config_may_leave_out(tmp_path):
    reference = tiny(num_dense_layers=2)
    path = save(reference, tmp_path) / "config.json"
    needed = {*SMALL, "model_type"} - {"num_dense_layers"}
    config = {name: value for name, value in json.loads(path.read_text()).items() if name in needed}
    path.write_text(json.dumps(config))
    check_prompt(reference, load_model(tmp_path))


def test_missing_tensors_are_listed(tmp_path):
    file = save(tiny(), tmp_path) / "model.safetensors"
    lost = ["model.layers.1.feed_forward.expert_bias", "model.layers.2.feed_forward.experts.4.w2.weight"]
    save_file({name: value for name, value in load_file(file).items() if name not in lost}, file)
    with pytest.raises(BadWeights, match="2 tensors missing") as error:
        load_model(tmp_path)
    assert all(name in str(error.value) for name in lost)


def test_routers_are_not_quantised(tmp_path):
    options = {"hidden_size": 128, "moe_intermediate_size": 64, "intermediate_size": 128}
    folder = save(tiny(**options), tmp_path / "whole")
    quantize(folder, tmp_path / "few", "int4")
    names = load_file(tmp_path / "few" / "model.safetensors")
    assert names["model.layers.1.feed_forward.gate.weight"].is_floating_point()
    assert "model.layers.1.feed_forward.experts.0.w1.weight.scale" in names
    check_prompt(tiny(**options), load_model(tmp_path / "few"), tolerance=1.0)
