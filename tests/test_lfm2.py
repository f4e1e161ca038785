"""LFM2 against transformers: convolutions of several widths beside attention, and the states they keep."""

import json

import pytest
import torch
from parity import TOLERANCE, check_family, check_prompt, feed, pool_for, random_tokens, randomise, save
from transformers import DynamicCache, Lfm2Config, Lfm2ForCausalLM

from bough.errors import UnknownArchitecture
from bough.models.load import load_model
from bough.state.kinds import FullKV, ShortConv
from bough.state.live import State

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "block_multiple_of": 8,
    "max_position_embeddings": 128,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
}
SHAPES = {
    "hybrid": {},
    "odd-heads": {"num_attention_heads": 3, "num_key_value_heads": 1},
    "no-groups": {"num_attention_heads": 6, "num_key_value_heads": 6},
    "biased": {"conv_bias": True},
    "untied": {"tie_word_embeddings": False},
    "all-conv": {"layer_types": ["conv"] * 4},
    "all-attention": {"layer_types": ["full_attention"] * 4},
}


def tiny(**options) -> Lfm2ForCausalLM:
    torch.manual_seed(0)
    reference = Lfm2ForCausalLM(Lfm2Config(**{**SMALL, **options}))
    randomise(reference)
    return reference.eval()


@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES)
def test_shapes(options, tmp_path):
    model = check_family(tiny(**options), tmp_path)
    types = options.get("layer_types", SMALL["layer_types"])
    assert [type(kind) for kind in model.kinds] == [FullKV if each == "full_attention" else ShortConv for each in types]
    assert (model.head is model.embedding) == options.get("tie_word_embeddings", True)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 9])
def test_kernels(kernel, bias, tmp_path):
    check_family(tiny(conv_L_cache=kernel, conv_bias=bias), tmp_path)


@pytest.mark.parametrize(
    ("options", "width"),
    [
        ({"block_auto_adjust_ff_dim": False, "intermediate_size": 50}, 50),
        ({"intermediate_size": 100}, 72),  # 66, up to the next multiple of 8
        ({"intermediate_size": 100, "block_multiple_of": 7}, 70),
        ({"intermediate_size": 96, "block_ffn_dim_multiplier": 1.3}, 88),  # 64 → 83
        ({"intermediate_size": 96, "block_multiple_of": 256}, 256),
    ],
)
def test_width_of_the_mlp(options, width, tmp_path):
    reference = tiny(**options)
    save(reference, tmp_path)
    model = load_model(tmp_path)
    assert model.layers[0].mlp.down.weight.shape == (SMALL["hidden_size"], width)
    check_prompt(reference, model)


@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
def test_states(kernel, tmp_path):
    """After every piece of a text the tails are those of the reference, which keeps one column more than it needs."""
    reference = tiny(conv_L_cache=kernel)
    save(reference, tmp_path)
    model = load_model(tmp_path, dtype="float32")
    pool, cache, tokens = pool_for(model), DynamicCache(config=reference.config), random_tokens(97, 40, seed=1)
    state, at = State(pool), 0
    for size in (1, 1, 20, 2, 1, 1, 3, 1):  # prefill shorter than the tail, long pieces, decode
        piece = tokens[at : at + size]
        feed(model, pool, [(state, piece)])
        with torch.no_grad():
            reference(torch.tensor([piece]), past_key_values=cache, use_cache=True)
        at += size
        assert state.length == at
        for layer, kind in enumerate(model.kinds):
            if isinstance(kind, ShortConv):
                expected = cache.layers[layer].conv_states[0][0, :, 1:].T  # [C, K] → [K − 1, C]
                ours = pool.part(layer, "conv")[state.slot]
                assert ours.shape == expected.shape == (kernel - 1, SMALL["hidden_size"])
                torch.testing.assert_close(ours, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("tied", [True, False])
def test_an_older_config(tied, tmp_path):
    """As the first files on the hub have it: attention by index, other names, rope's theta on its own."""
    reference = tiny(tie_word_embeddings=tied)
    save(reference, tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["layer_types"], config["rope_parameters"]
    config["full_attn_idxs"] = [1]
    config["rope_theta"] = 1000000.0
    config["block_ff_dim"] = config.pop("intermediate_size")
    config["tie_embedding"], config["tie_word_embeddings"] = tied, not tied  # the older name is the one that counts
    path.write_text(json.dumps(config))
    model = load_model(tmp_path)
    assert [type(kind) for kind in model.kinds] == [ShortConv, FullKV, ShortConv, ShortConv]
    assert (model.head is model.embedding) == tied
    check_prompt(reference, model)


def test_what_a_config_may_leave_out(tmp_path):
    """Without a list of layers, all have attention; the rest has the values of the published models."""
    reference = tiny(layer_types=None, block_multiple_of=256)
    save(reference, tmp_path)
    path = tmp_path / "config.json"
    needed = set(SMALL) - {"layer_types", "block_multiple_of"} | {"model_type"}
    config = {name: value for name, value in json.loads(path.read_text()).items() if name in needed}
    path.write_text(json.dumps(config))
    model = load_model(tmp_path)
    assert all(isinstance(kind, FullKV) for kind in model.kinds)
    check_prompt(reference, model)


def test_a_layer_type_of_another_family(tmp_path):
    save(tiny(), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"full_attention"', '"sliding_attention"'))
    with pytest.raises(UnknownArchitecture, match=r"sliding_attention.*conv, full_attention"):
        load_model(tmp_path)


@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES)
def test_bfloat16(options, tmp_path):
    """Measured: at most 0.018 apart, where logits reach 2.4, and both are up to 0.025 off float32."""
    reference = tiny(**options)
    save(reference, tmp_path)
    check_prompt(reference.to(torch.bfloat16), load_model(tmp_path, dtype="bfloat16"), tolerance=0.04)
