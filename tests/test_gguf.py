"""GGUF files made from tiny transformers models: the same logits, the same config, and clear errors for bad files."""

import re
import struct
import sys
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from gguf_files import LLAMA3, MODELS, add_config, finish, qwen3_5, reference, write
from hypothesis import given
from hypothesis import strategies as st
from parity import check_prompt
from safetensors.torch import load_file
from test_mtp import HEADS
from transformers import AutoModelForCausalLM

from bough.draft.mtp import MTPHead
from bough.errors import BadWeights, BoughError, ModelError, UnknownArchitecture
from bough.models.config import ModelConfig
from bough.models.gguf import GGUFFile
from bough.models.gguf_architectures import ARCHITECTURES
from bough.models.gguf_header import read_header
from bough.models.gguf_tokenizer import gguf_tokenizer
from bough.models.load import load_model

HYBRIDS = ["lfm2-moe", "qwen3-next", "qwen3.5", "qwen3.5-moe"]


@pytest.mark.parametrize("name", MODELS)
def test_parity(name, tmp_path):
    model = reference(name)
    check_prompt(model, load_model(write(model, tmp_path / "tiny.gguf"), dtype="float32"))


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_1, Type.Q5_0, Type.F16, Type.BF16], ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "gemma3", "lfm2", "lfm2-moe", "qwen3-next", "qwen3.5", "qwen3.5-moe"]
)
def test_parity_quantised(name, kind, tmp_path):
    model = reference(name)
    file = write(model, tmp_path / "tiny.gguf", kind)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "conv" not in parameter_name:
                parameter.copy_(torch.tensor(dequantize(quantize(parameter.numpy(), kind), kind)))
    check_prompt(model, load_model(file, dtype="float32"))


@pytest.mark.parametrize("name", MODELS)
def test_config(name, tmp_path):
    """Every field that the reference's config has too says the same."""
    model = reference(name)
    ours = ModelConfig(GGUFFile(write(model, tmp_path / "tiny.gguf", eos_token_id=3, eot_token_id=5)).config())
    theirs = model.config.to_dict() | {"dtype": "float32", "eos_token_id": [3, 5]}
    if name.startswith("qwen3-next"):  # whose files have the inputs of the delta rule as those of its successor
        theirs["model_type"] = "qwen3_5_moe_text"
    if not any("mlp.gate_proj" in each or "w1" in each for each in model.state_dict()):  # it has experts alone
        del theirs["intermediate_size"]
    if name == "lfm2":  # the file has the width that comes out
        theirs["block_auto_adjust_ff_dim"] = False
        theirs["intermediate_size"] = model.model.layers[0].feed_forward.w1.out_features
    ropes = theirs.pop("rope_parameters")
    if name == "llama3-rope":  # the file has the result of the other parameters, by frequency
        assert len(ours.rope()["divisors"]) == model.config.head_dim // 2
        ropes = {"rope_theta": ropes["rope_theta"]}
    shared = [field for field in theirs if field in ours]
    assert len(shared) > 12
    for field in shared:
        assert ours[field] == pytest.approx(theirs[field]), field
    for layer_type, rope in ropes.items() if "full_attention" in ropes else [(None, ropes)]:
        assert {field: ours.rope(layer_type)[field] for field in rope} == pytest.approx(rope)


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5-moe"])
def test_gates_and_values_of_experts_together(name, tmp_path):
    model = reference(name)
    check_prompt(model, load_model(write(model, tmp_path / "tiny.gguf", together=True), dtype="float32"))


@pytest.mark.parametrize("family", HEADS)
def test_a_head_that_drafts(family, tmp_path):
    """It is behind the last layer in these files. Its weights are those of a folder."""
    folder = HEADS[family](tmp_path / "folder")
    tensors = {name: each for name, each in load_file(folder / "model.safetensors").items() if name.startswith("mtp.")}
    model = AutoModelForCausalLM.from_pretrained(folder)
    ours = load_model(write(model, tmp_path / "tiny.gguf", head=tensors), dtype="float32")
    check_prompt(model, ours)
    assert ours.extra.keys() == tensors.keys() and MTPHead(ours)
    for name, expected in tensors.items():
        assert ours.extra[name].shape == expected.shape
        assert torch.allclose(ours.extra[name], expected, atol=1e-6), name


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Type.F32, "float32"), (Type.F16, "float16"), (Type.BF16, "bfloat16"), (Type.Q8_0, "bfloat16")]
)
def test_dtype(kind, dtype, tmp_path):
    assert GGUFFile(write(reference("llama"), tmp_path / "tiny.gguf", kind)).config()["dtype"] == dtype


def lone_tensor(path: Path, data: np.ndarray, kind: Type) -> GGUFFile:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", data, raw_dtype=kind)
    finish(writer)
    return GGUFFile(path)


@pytest.mark.parametrize("kind", [*sorted(gguf.quants._type_traits), Type.F32, Type.F16], ids=lambda kind: kind.name)
def test_dequantised_in_pieces(kind, tmp_path):
    """A tensor larger than what is dequantised at once, for every type there is."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 256, (300, 512 // block * size), np.uint8)
    with np.errstate(all="ignore"):  # random bits are not always numbers
        file = lone_tensor(tmp_path / "one.gguf", data, kind)
        assert file.shape("model.embed_tokens.weight") == (300, 512)
        np.testing.assert_array_equal(file.read("model.embed_tokens.weight"), dequantize(data, kind))


def test_type_without_dequantisation(tmp_path):
    file = lone_tensor(tmp_path / "one.gguf", np.zeros((4, 8), np.int32), Type.I32)
    with pytest.raises(BadWeights, match=r"token_embd.weight .* I32.* another quantisation"):
        file.read("model.embed_tokens.weight")


def patched(path: Path, old: bytes, new: bytes) -> Path:
    """The file with one place in it changed."""
    data = path.read_bytes()
    assert data.count(old) == 1 and len(old) == len(new)
    path.write_bytes(data.replace(old, new))
    return path


def test_unknown_type(tmp_path):
    path = tmp_path / "one.gguf"
    lone_tensor(path, np.zeros((4, 8), np.int32), Type.I32)
    dimensions = struct.pack("<IQQ", 2, 8, 4)
    patched(path, dimensions + struct.pack("<I", Type.I32), dimensions + struct.pack("<I", 250))
    with pytest.raises(BadWeights, match=r"type 250.*pip install -U gguf"):
        GGUFFile(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    """A file with a model and a tokenizer."""
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "ab", "▁ab", *(f"<0x{i:02X}>" for i in range(87))]
    metadata = {
        "tokenizer_model": "llama",
        "token_list": tokens,
        "token_scores": [-float(i) for i in range(96)],
        "token_types": [2, 3, 3, 1, 1, 1, 1, 1, 1] + [6] * 87,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "chat_template": "{{ messages }}",
    }
    return write(reference("llama"), tmp_path_factory.mktemp("whole") / "a.gguf", **metadata).read_bytes()


def load_all(path: Path) -> None:
    gguf_tokenizer(GGUFFile(path))
    load_model(path)


def test_cut_short(whole, tmp_path):
    """Wherever a file ends too early, that is said."""
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole)
    load_all(path)
    start = read_header(np.frombuffer(whole, np.uint8), "the whole").data_start
    for size in [*range(0, start, 5), *range(start, len(whole), 4999), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"download it again|not a GGUF file"):
            GGUFFile(path)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("damaged") / "a.gguf"


@given(st.data())
def test_damaged(whole, damaged, data):
    """Changed bytes in the header are an error of ours or go unnoticed; nothing else comes out."""
    content = bytearray(whole)
    change(content, data, whole.index(b"output_norm.weight"))
    damaged.write_bytes(content)
    try:
        load_all(damaged)
    except BoughError as error:
        said = str(error)
        assert str(damaged) in said


@pytest.mark.parametrize("name", HYBRIDS)
@given(data=st.data())
def test_damaged_hybrids(name, hybrids, data):
    """The same of what only these have."""
    path, whole = hybrids[name]
    content = bytearray(whole)
    change(content, data, read_header(np.frombuffer(whole, np.uint8), "").data_start)
    path.write_bytes(content)
    with suppress(BoughError):
        load_model(path)


def change(content: bytearray, data: st.DataObject, stop: int) -> None:
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(4, stop))] = data.draw(st.sampled_from([0, 1, 2, 8, 9, 12, 127, 128, 255]))


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory) -> dict[str, tuple[Path, bytes]]:
    folder = tmp_path_factory.mktemp("hybrids")
    files = {name: write(reference(name), folder / f"{name}.gguf") for name in HYBRIDS}
    return {name: (path, path.read_bytes()) for name, path in files.items()}


@pytest.mark.parametrize("huge", [2**24 + 1, 2**32, 2**62, 2**64 - 1])
@pytest.mark.parametrize(
    ("after", "skip"),
    [
        (b"GGUF", 4),
        (b"GGUF", 12),
        (b"GGUF", 20),
        (b"tokenizer.ggml.tokens", 8),
        (b"tokenizer.ggml.scores", 8),
        (b"token_embd.weight", 4),
    ],
    ids=["tensors", "keys", "string", "strings", "numbers", "side"],
)
def test_lying_counts(whole, after, skip, huge, tmp_path):
    place = whole.index(after) + len(after) + skip
    path = tmp_path / "lie.gguf"
    path.write_bytes(whole[:place] + struct.pack("<Q", huge) + whole[place + 8 :])
    with pytest.raises(BadWeights, match="download it again"):
        GGUFFile(path)


@pytest.mark.parametrize("value", [0, 9, 1000, 2**32 - 1])
@pytest.mark.parametrize("key", ["block_count", "embedding_length", "feed_forward_length", "attention.head_count"])
def test_lying_sizes(whole, key, value, tmp_path):
    place = whole.index(f"llama.{key}".encode() + struct.pack("<I", 4)) + len(f"llama.{key}") + 4
    path = tmp_path / "lie.gguf"
    path.write_bytes(whole[:place] + struct.pack("<I", value) + whole[place + 4 :])
    with pytest.raises(ModelError, match=str(path)):
        load_model(path)


@pytest.mark.parametrize("name", HYBRIDS)
def test_lying_sizes_of_hybrids(name, hybrids):
    """Whatever is said of their sizes: an error of ours, or what other weights would have been."""
    path, whole = hybrids[name]
    keys = re.findall(rb"(?:lfm2moe|qwen3next|qwen35moe|qwen35)\.[a-z_.]+", whole)
    refused = 0
    for key in keys:
        place = whole.index(key) + len(key)
        if whole[place : place + 4] != struct.pack("<I", 4):
            continue
        for value in (0, 1, 3, 7, 1000, 2**31, 2**32 - 1):
            path.write_bytes(whole[: place + 4] + struct.pack("<I", value) + whole[place + 8 :])
            try:
                load_model(path)
            except BoughError:
                refused += 1
    assert refused > 3 * len(keys) > 20


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not a GGUF file"),
        (b"GG", "not a GGUF file"),
        (b"PK\3\4" + bytes(100), "not a GGUF file"),
        (b"GGUF", "cut short"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1.* convert"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "lacks general.architecture"),
    ],
)
def test_foreign(content, said, tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=said):
        load_model(path)


def test_missing(tmp_path):
    with pytest.raises(ModelError, match=r"a\.gguf.* give"):
        load_model(tmp_path / "a.gguf")
    with pytest.raises(ModelError, match="cannot be opened"):
        GGUFFile(tmp_path / "a.gguf")


@pytest.mark.parametrize("architecture", ["mamba", "clip", "gpt2"])
def test_unknown_architecture(architecture, tmp_path):
    finish(gguf.GGUFWriter(path := tmp_path / "a.gguf", architecture))
    with pytest.raises(UnknownArchitecture, match=f"{architecture}.*gemma3, lfm2, lfm2moe, llama, qwen3"):
        load_model(path)


@pytest.mark.parametrize(
    ("metadata", "error", "said"),
    [
        ({"expert_count": 8}, UnknownArchitecture, "mixture of experts"),
        ({"rope_dimension_count": 8}, UnknownArchitecture, "a part of each head"),
        ({"causal_attention": False}, UnknownArchitecture, "both directions"),
        (
            {"rope_scaling_type": gguf.RopeScalingType.LONGROPE, "rope_scaling_factor": 2.0},
            UnknownArchitecture,
            "longrope",
        ),
    ],
)
def test_unknown_kinds_of_llama(metadata, error, said, tmp_path):
    with pytest.raises(error, match=said):
        load_model(write(reference("llama"), tmp_path / "a.gguf", **metadata))


def test_parts(tmp_path):
    writer = gguf.GGUFWriter(path := tmp_path / "a-00001-of-00003.gguf", "llama")
    writer.add_uint16("split.count", 3)
    finish(writer)
    with pytest.raises(ModelError, match="one of 3 parts; join them"):
        load_model(path)


def test_tensors_that_do_not_belong(tmp_path):
    model = reference("llama")
    model.config.intermediate_size = 32
    writer = gguf.GGUFWriter(path := tmp_path / "a.gguf", "llama")
    add_config(writer, model.config)
    writer.add_feed_forward_length(32)
    for index in range(3):
        writer.add_tensor(f"blk.{index}.attn_norm.weight", np.ones(64, np.float32))
    writer.add_tensor("token_embd.weight", np.ones((96, 64), np.float32))
    writer.add_tensor("blk.0.ffn_gate_exps.weight", np.ones((4, 4), np.float32))
    finish(writer)
    with pytest.raises(BadWeights, match=r"missing: .*model.layers.2.mlp.down_proj.*unexpected: blk.0.ffn_gate_exps"):
        load_model(path)


@pytest.mark.parametrize(
    ("architecture", "shapes", "said"),
    [
        ("llama", {"blk.0.attn_norm.weight": (4,), "blk.00.attn_norm.weight": (4,)}, "input_layernorm.weight twice"),
        ("qwen35", {"blk.1.ffn_norm.weight": (4,), "blk.1.post_attention_norm.weight": (4,)}, "twice"),
        ("qwen35moe", {"blk.0.ffn_gate_up_exps.weight": (2, 8, 8), "blk.0.ffn_up_exps.weight": (2, 4, 8)}, "twice"),
        ("qwen3next", {"blk.0.ssm_ba.weight": (13, 8)}, r"\[13, 8\], of 2 tensors"),
        ("lfm2moe", {"blk.0.ffn_up_exps.weight": (1 << 40, 0, 8)}, "which no experts have"),
    ],
)
def test_tensors_that_are_not_what_they_are_called(architecture, shapes, said, tmp_path):
    writer = gguf.GGUFWriter(path := tmp_path / "a.gguf", architecture)
    for name, shape in shapes.items():
        writer.add_tensor(name, np.ones(shape, np.float32))
    finish(writer)
    with pytest.raises(BadWeights, match=f"{said}.*download it again"):
        GGUFFile(path)


def test_names_that_nobody_gives(tmp_path):
    """They are reported as they are, or nearly."""
    writer = gguf.GGUFWriter(path := tmp_path / "a.gguf", "llama")
    for name in ("{}{}", "{}.{x}"):
        writer.add_tensor(name, np.ones((1, 2, 4), np.float32))
    finish(writer)
    assert GGUFFile(path).names() == ["00", "0.{x}"]


def test_names_of_other_architectures():
    """Gates of the delta rule are together in files of Qwen3-Next and apart in those of Qwen3.5, never otherwise."""
    for name, stranger in [("qwen3next", "ssm_beta"), ("qwen35", "ssm_ba"), ("qwen35moe", "ssm_ba")]:
        assert ARCHITECTURES[name].rename(f"blk.0.{stranger}.weight") == [f"blk.0.{stranger}.weight"]


def test_names_of_a_head_of_several_layers():
    """Converters repeat in each what the first has beside its layer."""
    found = [ARCHITECTURES["qwen35"].rename(f"blk.{index}.nextn.enorm.weight", 4) for index in (4, 5)]
    assert found == [["mtp.pre_fc_norm_embedding.weight"], ["mtp.layers.1.nextn.enorm.weight"]]


def test_divisors_of_what_is_not_rotated(tmp_path):
    model = qwen3_5(rope_parameters=LLAMA3 | {"partial_rotary_factor": 0.25})
    with pytest.raises(BadWeights, match="does not fit 4 dimensions"):  # they are for all 16
        load_model(write(model, tmp_path / "a.gguf"))


def test_without_the_package(whole, tmp_path, monkeypatch):
    path = tmp_path / "a.gguf"
    path.write_bytes(whole)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=r"pip install 'bough\[gguf\]'"):
        load_model(path)
