"""Qwen3.5 against transformers: models of many shapes, with experts too, their states, and files with a tower."""

import json

import pytest
import torch
from parity import check_family, check_prompt, check_recurrent, randomise, remember, save
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

from bough.errors import BadWeights
from bough.models.load import load_model
from bough.state.kinds import FullKV, Recurrent

LINEAR, FULL = "linear_attention", "full_attention"
SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "max_position_embeddings": 128,
}
MROPE = {"rope_type": "default", "rope_theta": 1e5, "mrope_section": [2, 1, 1], "mrope_interleaved": True}


def heads(of_keys: int, of_values: int) -> dict[str, int]:
    return {"linear_num_key_heads": of_keys, "linear_num_value_heads": of_values}


SHAPES = {
    "grouped": {},
    "odd-heads": heads(1, 3) | {"num_attention_heads": 3, "num_key_value_heads": 1},
    "no-groups": heads(3, 3) | {"linear_value_head_dim": 10, "num_key_value_heads": 4},
    "wide-keys": heads(2, 2) | {"linear_key_head_dim": 24, "linear_value_head_dim": 3},
    "kernel-1": {"linear_conv_kernel_dim": 1},
    "kernel-3": {"linear_conv_kernel_dim": 3},
    "odd-places": {"layer_types": [FULL, LINEAR, LINEAR, FULL, LINEAR], "num_hidden_layers": 5},
    "all-delta": {"layer_types": [LINEAR] * 2, "num_hidden_layers": 2},
    "all-attention": {"layer_types": [FULL] * 2, "num_hidden_layers": 2},
    "tied-and-biased": {"tie_word_embeddings": True, "attention_bias": True},
    "mrope": {"head_dim": 32, "rope_parameters": MROPE | {"partial_rotary_factor": 0.25}},
}
CACHED = {name: each for name, each in SHAPES.items() if name != "all-delta"}  # for that the reference has no cache


def tiny(**options) -> Qwen3_5ForCausalLM:
    torch.manual_seed(0)
    reference = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**SMALL, **options}))
    randomise(reference)
    remember(reference)
    return reference.eval()


@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES)
def test_shapes(options, tmp_path):
    reference = tiny(**options)
    model = check_family(reference, tmp_path)
    assert [type(each) for each in model.kinds] == [
        FullKV if each == FULL else Recurrent for each in reference.config.layer_types
    ]
    assert (model.head is model.embedding) == options.get("tie_word_embeddings", False)


SPARSE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
}
SPARSE_SHAPES = {
    "experts": {},
    "five-of-odd-size": {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 17},
    "one-of-three": {"num_experts": 3, "num_experts_per_tok": 1, "tie_word_embeddings": True},
    "a-field-of-qwen3-next": {"norm_topk_prob": False},  # which the reference does not read here
}


def tiny_sparse(**options) -> Qwen3_5MoeForCausalLM:
    torch.manual_seed(0)
    reference = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**{**SMALL, **SPARSE, **options}))
    reference.set_experts_implementation("eager")  # the others want sizes that are multiples
    randomise(reference)
    remember(reference)
    return reference.eval()


@pytest.mark.parametrize("options", SPARSE_SHAPES.values(), ids=SPARSE_SHAPES)
def test_experts(options, tmp_path):
    reference = tiny_sparse(**options)
    check_recurrent(reference, check_family(reference, tmp_path), tolerance=5e-6)


@pytest.mark.parametrize("options", SPARSE_SHAPES.values(), ids=SPARSE_SHAPES)
def test_experts_in_bfloat16(options, tmp_path):
    reference = tiny_sparse(**options)
    model = load_model(save(reference, tmp_path), dtype="bfloat16")
    check_prompt(reference.to(torch.bfloat16), model, tolerance=0.15)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_checkpoint_with_experts_and_a_vision_tower(stacked, tmp_path):
    """Experts one by one, or stacked as on the hub."""
    torch.manual_seed(0)
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen3_5MoeConfig(text_config=SMALL | SPARSE, vision_config=vision | {"num_position_embeddings": 16})
    whole = Qwen3_5MoeForConditionalGeneration(config).eval()
    randomise(whole)
    remember(whole)
    file = save(whole, tmp_path) / "model.safetensors"
    kept = {name: value for name, value in load_file(file).items() if ".experts." not in name}
    stacks = {name: value for name, value in whole.state_dict().items() if ".experts." in name}
    assert len(stacks) == 2 * 4 and any(name.startswith("model.visual.") for name in kept)
    each = {
        f"{name.rsplit('.', 1)[0]}.{index}.{part}.weight": value.contiguous()
        for name, stack in stacks.items()
        for index, matrix in enumerate(stack)
        for part, value in (
            zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True)
            if name.endswith("gate_up_proj")
            else [("down_proj", matrix)]
        )
    }
    save_file(kept | (stacks if stacked else each), file)
    check_prompt(whole, load_model(tmp_path))


@pytest.mark.parametrize("options", CACHED.values(), ids=CACHED)
def test_states(options, tmp_path):
    reference = tiny(**options)
    check_recurrent(reference, load_model(save(reference, tmp_path), dtype="float32"), tolerance=5e-6)


@pytest.mark.parametrize("options", CACHED.values(), ids=CACHED)
def test_bfloat16(options, tmp_path):
    """Measured: logits at most 0.072 apart, where they reach 1.4, and states 0.024."""
    reference = tiny(**options)
    model = load_model(save(reference, tmp_path), dtype="bfloat16")
    reference.to(torch.bfloat16)
    check_prompt(reference, model, tolerance=0.1)
    check_recurrent(reference, model, tolerance=0.04)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_a_checkpoint_with_a_vision_tower(tied, inner, tmp_path):
    """The tower is left out, and the language model is what it would be alone. The outer config ties the head."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    torch.manual_seed(0)
    whole = Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(
            text_config=SMALL | {"tie_word_embeddings": inner},
            vision_config=vision | {"num_position_embeddings": 16},
            tie_word_embeddings=tied,
        )
    ).eval()
    randomise(whole)
    remember(whole)
    file = save(whole, tmp_path) / "model.safetensors"
    names = load_file(file).keys()
    assert any(name.startswith("model.visual.") for name in names)
    assert "model.language_model.layers.0.linear_attn.in_proj_qkv.weight" in names
    assert ("lm_head.weight" in names) != tied
    save_file(load_file(file) | {"mtp.norm.weight": torch.ones(32)}, file)
    model = load_model(tmp_path)
    assert (model.head is model.embedding) == tied
    assert list(model.extra) == ["mtp.norm.weight"]
    check_prompt(whole, model)


def test_what_a_config_may_leave_out(tmp_path):
    reference = tiny()
    path = save(reference, tmp_path) / "config.json"
    config = {name: value for name, value in json.loads(path.read_text()).items() if name in {*SMALL, "model_type"}}
    path.write_text(json.dumps(config))
    check_prompt(reference, load_model(tmp_path))


def test_missing_and_unexpected_tensors_are_listed(tmp_path):
    file = save(tiny(), tmp_path) / "model.safetensors"
    tensors = load_file(file)
    lost = [
        "model.layers.0.linear_attn.in_proj_qkv.weight",
        "model.layers.1.linear_attn.in_proj_b.weight",
        "model.layers.1.linear_attn.dt_bias",
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.3.self_attn.k_norm.weight",
    ]
    for name in lost:
        del tensors[name]
    tensors["model.layers.0.linear_attn.in_proj_z.weight"] = torch.ones(24, 31)
    tensors["model.layers.3.linear_attn.A_log"] = torch.ones(4)
    save_file(tensors, file)
    with pytest.raises(BadWeights) as error:
        load_model(tmp_path)
    said = str(error.value)
    assert f"{len(lost)} tensors missing" in said and all(name in said for name in lost)
    assert "model.layers.0.linear_attn.in_proj_z.weight is [24, 31], expected [24, 32]" in said
    assert "1 tensors unexpected: model.layers.3.linear_attn.A_log" in said


def test_mtp_tensors_are_kept(tmp_path):
    reference = tiny()
    file = save(reference, tmp_path) / "model.safetensors"
    mtp = {"mtp.fc.weight": torch.randn(32, 64), "mtp.layers.0.self_attn.q_proj.weight": torch.randn(8, 32)}
    save_file(load_file(file) | mtp, file)
    model = load_model(tmp_path)
    assert model.extra.keys() == mtp.keys()
    assert all(torch.equal(model.extra[name], mtp[name]) for name in mtp)
    check_prompt(reference, model)
