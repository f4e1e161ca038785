"""Gemma 3 against transformers: text models, the language model inside a vision checkpoint, and older configs."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from parity import check_family, check_prompt, pool_for, random_tokens, randomise, reference_logits, save
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForCausalLM, Gemma3ForConditionalGeneration, Gemma3TextConfig

from bough.engine.load import load
from bough.errors import BadWeights, ModelError, UnknownArchitecture
from bough.models.load import load_model
from bough.ops import Mask
from bough.state.kinds import FullKV, WindowKV
from bough.state.live import State
from bough.state.reservation import forward

WINDOW, FULL = "sliding_attention", "full_attention"
SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "query_pre_attn_scalar": 20,
    "sliding_window": 5,
    "layer_types": [WINDOW, FULL, WINDOW],
}
ROPES = {
    WINDOW: {"rope_type": "default", "rope_theta": 5000.0},
    FULL: {"rope_type": "linear", "rope_theta": 200000.0, "factor": 8.0},
}


def gemma3(**options) -> Gemma3ForCausalLM:
    torch.manual_seed(0)
    reference = Gemma3ForCausalLM(Gemma3TextConfig(**{**SMALL, **options}))
    randomise(reference)
    return reference.eval()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10, "sliding_window": 16},
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "sliding_window": 500,
            "layer_types": [FULL, WINDOW, FULL],
        },
        {"sliding_window": 1},
        {"num_hidden_layers": 7, "layer_types": None},
        {"layer_types": [WINDOW] * 3, "final_logit_softcapping": 2.0},
        {"rope_parameters": ROPES, "attention_bias": True, "tie_word_embeddings": False},
    ],
    ids=["plain", "odd-heads", "wide-window", "window-1", "default-pattern", "soft-capped", "ropes-bias-untied"],
)
def test_gemma3(options, tmp_path):
    check_family(gemma3(**options), tmp_path)


def test_attention_softcap(tmp_path):
    """The reference keeps attn_logit_softcapping but hands it to no layer; given by name, its eager form applies it."""
    reference = gemma3(attn_logit_softcapping=0.5, attn_implementation="eager")
    plain = reference_logits(reference, random_tokens(97, 40, seed=0))
    reference.forward = partial(reference.forward, softcap=0.5)
    assert (reference_logits(reference, random_tokens(97, 40, seed=0)) - plain).abs().max() > 1e-2
    check_family(reference, tmp_path)


def test_kinds(tmp_path):
    model = load_model(save(gemma3(), tmp_path))
    assert model.kinds == [WindowKV(2, 12, 12, 5), FullKV(2, 12, 12), WindowKV(2, 12, 12, 5)]


def test_span_seen_both_ways(tmp_path):
    """A span longer than the window, inside the second of three pieces, sees itself both ways within the window."""
    reference = gemma3()
    model = load_model(save(reference, tmp_path), dtype="float32")
    tokens, start, end, window = random_tokens(97, 40, seed=3), 14, 23, SMALL["sliding_window"]
    query, key = torch.arange(40)[:, None], torch.arange(40)
    seen = (key <= query) | ((query >= start) & (query < end) & (key >= start) & (key < end))
    masks = {FULL: seen[None, None], WINDOW: (seen & (key > query - window))[None, None]}
    with torch.no_grad():
        expected = reference(torch.tensor([tokens]), attention_mask=masks, use_cache=False).logits[0]

    pool = pool_for(model)
    state, logits = State(pool), []
    for piece, mask in [(slice(0, 10), None), (slice(10, 30), Mask(spans=((start, end),))), (slice(30, 40), None)]:
        with forward(pool, [(state, tokens[piece])], masks=(mask,)) as step:
            logits.append(model.logits(model(step)))
    torch.testing.assert_close(torch.cat(logits), expected, atol=1e-4, rtol=0)
    assert (expected - reference_logits(reference, tokens)).abs().max() > 1e-2, "the span makes no difference"


# Vision checkpoints

VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def vision_model(text: dict) -> Gemma3ForConditionalGeneration:
    torch.manual_seed(0)
    config = Gemma3Config(text_config=dict(text), vision_config=VISION, mm_tokens_per_image=4)
    reference = Gemma3ForConditionalGeneration(config)
    randomise(reference)
    return reference.eval()


def rename_weights(folder: Path, renames: dict[str, str]) -> None:
    """Give tensors whose names start so another start."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for old, new in renames.items():
        tensors = {new + n.removeprefix(old) if n.startswith(old) else n: tensor for n, tensor in tensors.items()}
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("nested", [False, True], ids=["language_model.model", "model.language_model"])
def test_vision_checkpoint(nested, tmp_path):
    reference = vision_model(SMALL)
    save(reference, tmp_path)
    if nested:
        parts = ["vision_tower.", "multi_modal_projector."]
        rename_weights(
            tmp_path, {"language_model.model.": "model.language_model.", **{part: f"model.{part}" for part in parts}}
        )
    check_prompt(reference, load_model(tmp_path))


def test_hub_vision_config(tmp_path):
    """What the hub has: a text_config with little more than sizes, from before ropes were listed by layer type."""
    text = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 6,
    }
    reference = vision_model(text)
    save(reference, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    model = load_model(tmp_path)
    assert model.vocab_size == 262_208 and model.context == 131_072
    assert model.kinds == [*[WindowKV(4, 256, 256, 6)] * 5, FullKV(4, 256, 256), WindowKV(4, 256, 256, 6)]
    check_prompt(reference, model)


@pytest.mark.parametrize("inner", [None, 1])
def test_end_tokens_beside_the_text_config(inner, tmp_path):
    """There the hub's configs have the end of a turn too, which the inner default leaves out."""
    save(vision_model(SMALL), tmp_path)
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    text = {**config["text_config"], "eos_token_id": inner}
    (tmp_path / "config.json").write_text(json.dumps({**config, "text_config": text, "eos_token_id": [1, 10]}))
    assert load(tmp_path).end_tokens == {1, 10}


def test_older_text_config(tmp_path):
    """The pattern of layers as one number, and both ropes as loose fields."""
    older = {name: value for name, value in SMALL.items() if name != "layer_types"} | {
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "sliding_window_pattern": 2,
        "rope_theta": 300000.0,
        "rope_local_base_freq": 3000.0,
        "rope_scaling": {"factor": 4.0, "rope_type": "linear"},
    }
    torch.manual_seed(0)
    reference = Gemma3ForCausalLM(Gemma3TextConfig(**json.loads(json.dumps(older)))).eval()
    randomise(reference)
    save(reference, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(older))
    model = load_model(tmp_path)
    assert [kind.reach for kind in model.kinds] == [4, None, 4, None]
    check_prompt(reference, model)


# bfloat16, and what is refused

# No more than bfloat16 itself costs: these logits reach 2.2, and rounded weights and activations move them by up to
# 0.045 from float32. Both sides round in the same places, so only the order of sums inside a product may differ:
# measured, a prompt agrees bit for bit and single steps within 0.008.
BFLOAT16_TOLERANCE = 3 / 64


def test_bfloat16(tmp_path):
    save(gemma3(hidden_size=96), tmp_path)
    model = load_model(tmp_path, dtype="bfloat16")
    assert model.embedding_scale == 9.8125  # √96 = 9.798 as bfloat16 has it
    reference = Gemma3ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    check_prompt(reference, model, tolerance=BFLOAT16_TOLERANCE)


def edit_config(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_weights_that_do_not_fit(tmp_path):
    save(gemma3(), tmp_path)
    rename_weights(tmp_path, {"model.layers.1.self_attn.q_norm.weight": "model.layers.1.self_attn.other.weight"})
    with pytest.raises(BadWeights) as raised:
        load_model(tmp_path)
    assert "1 tensors missing: model.layers.1.self_attn.q_norm.weight" in str(raised.value)
    assert "1 tensors unexpected: model.layers.1.self_attn.other.weight" in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({"layer_types": [WINDOW, FULL]}, ModelError, "2 layer_types for num_hidden_layers 3"),
        ({"layer_types": [WINDOW, FULL, "chunked_attention"]}, UnknownArchitecture, "chunked_attention"),
        ({"use_bidirectional_attention": True}, UnknownArchitecture, "decoders only"),
    ],
)
def test_configs_refused(fields, error, said, tmp_path):
    save(gemma3(), tmp_path)
    edit_config(tmp_path, **fields)
    with pytest.raises(error, match=said):
        load_model(tmp_path)
