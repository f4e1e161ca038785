"""Bad weights: real files, damaged one way at a time, each a typed error that names the file and the remedy.

Also what must load: shards, links, repeated heads, every dtype.
"""

import json
import os
import re
import shutil
import struct
from pathlib import Path

import pytest
import torch
from folders import SMALL, edit_config, logits, refusal
from parity import randomise
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from bough.errors import BadWeights, OptionError
from bough.models.load import load_model


@pytest.fixture(scope="session")
def original(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    reference = LlamaForCausalLM(LlamaConfig(**SMALL))
    randomise(reference)
    folder = tmp_path_factory.mktemp("original")
    reference.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(original, tmp_path) -> Path:
    """A Llama to damage."""
    return Path(shutil.copytree(original, tmp_path / "model"))


def edit_weights(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    path.unlink()  # the tensors may still lie in the file that is to be replaced
    change(tensors)
    save_file(tensors, path)


def split(folder: Path, count: int = 3) -> Path:
    """Deal the tensors out to shards, with an index; returns the index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    placed = {tensor: names[i % count] for i, tensor in enumerate(sorted(tensors))}
    for name in names:
        save_file({tensor: tensors[tensor].clone() for tensor in placed if placed[tensor] == name}, folder / name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return index


def test_a_folder_that_is_not_there(tmp_path):
    missing = tmp_path / "nowhere"
    assert re.search(rf"{missing} is not there; give a folder", refusal(missing))


# The files with the weights


def test_a_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    assert re.search(rf"{folder} has no \*.safetensors; give a folder", refusal(folder, BadWeights))


def test_weights_in_pickle_files_only(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = refusal(folder, BadWeights)
    assert "pickle" in message and "refuses" in message and "save_pretrained" in message


def test_a_truncated_file_wherever_it_is_cut(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    for end in (0, 1, 7, 8, 9, header // 2, header - 1, header, header + 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        assert re.search(rf"{path} is damaged or cut short .*; download", refusal(folder, BadWeights)), end
    path.write_bytes(whole + b"\0")
    assert f"{path} is damaged or cut short" in refusal(folder, BadWeights)


def with_header(header: object, data: bytes = bytes(64), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(**fields) -> dict:
    return {"x": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64], **fields}}


@pytest.mark.parametrize(
    "damaged",
    [
        with_header(entry(), length=2**63),
        with_header(entry(), length=2**40),
        with_header(entry(), length=10**6),
        with_header(entry(data_offsets=[0, 6400])),
        with_header(entry(data_offsets=[64, 0])),
        with_header(entry(data_offsets=[-64, 0])),
        with_header(entry(data_offsets=[2**62, 2**62 + 64])),
        with_header(entry(shape=[2**40, 2**40])),
        with_header(entry(shape=[-4, -4])),
        with_header(entry(shape=[5, 4])),
        with_header(entry(dtype="F99")),
        with_header(entry(dtype="F16")),
        with_header({"x": 3}),
        with_header([1, 2]),
        with_header(b"{" * 50),
        with_header(b"\xff\xfe" * 20),
        with_header(b'{"x":' * 10_000),
        b"PK\x03\x04 a zip file, say" * 10,
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n",
    ],
)
def test_a_header_that_lies(damaged, folder):
    (folder / "model.safetensors").write_bytes(damaged)
    assert f"{folder / 'model.safetensors'} is damaged or cut short" in refusal(folder, BadWeights)


def test_a_folder_in_place_of_a_file(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    assert f"{folder / 'model.safetensors'} is damaged" in refusal(folder, BadWeights)


# Shards and their index


def test_shards_are_equal_to_one_file(folder):
    expected = logits(load_model(folder))
    index = split(folder)
    torch.testing.assert_close(logits(load_model(folder)), expected, rtol=0, atol=0)
    index.unlink()  # shards without an index are taken as they are
    torch.testing.assert_close(logits(load_model(folder)), expected, rtol=0, atol=0)


def test_shards_that_are_links_as_in_the_hub_cache(folder):
    expected = logits(load_model(folder))
    split(folder)
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / f"{number:064x}")
        path.symlink_to(os.path.relpath(blobs / f"{number:064x}", folder))
    torch.testing.assert_close(logits(load_model(folder)), expected, rtol=0, atol=0)


def test_a_missing_shard(folder):
    split(folder)
    shard = folder / "model-00002-of-00003.safetensors"
    shard.unlink()
    assert f"{shard} is missing; download the model again" in refusal(folder, BadWeights)
    shard.symlink_to("nowhere")
    assert f"{shard} is missing; download the model again" in refusal(folder, BadWeights)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"weight_map": 3}',
        '{"weight_map": ["a"]}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {}}',
    ],
)
def test_an_index_that_is_none(text, folder):
    index = split(folder)
    index.write_text(text)
    message = refusal(folder)
    assert str(index) in message and "again" in message


def test_an_index_that_lists_what_no_shard_has(folder):
    index = split(folder)
    content = json.loads(index.read_text())
    content["weight_map"]["model.a"] = content["weight_map"]["model.b"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps(content))
    assert re.search(rf"{index} lists tensors that their shards do not have: model.a, model.b;", refusal(folder))


@pytest.mark.parametrize(
    "shard",
    ["../x.safetensors", "a/../../x.safetensors", "/{outside}", "..\\x.safetensors", "..", ".", "", "config.json"],
)
def test_an_index_that_leads_out_of_the_folder(shard, folder):
    index = split(folder)
    outside = folder.parent / "x.safetensors"
    shutil.copy(folder / "model-00001-of-00003.safetensors", outside)
    shard = shard.replace("/{outside}", str(outside))
    text = index.read_text().replace('"model-00001-of-00003.safetensors"', json.dumps(shard))
    index.write_text(text)
    message = refusal(folder, BadWeights)
    assert str(index) in message and "in its folder" in message and shard in message


def test_a_tensor_in_two_shards(folder):
    """The index decides; without one it is an error."""
    expected = logits(load_model(folder))
    index = split(folder)
    placed = json.loads(index.read_text())["weight_map"]
    norm = next(name for name in placed if name.endswith("input_layernorm.weight"))
    other = folder / next(shard for shard in sorted(set(placed.values())) if shard != placed[norm])
    tensors = {name: tensor.clone() for name, tensor in load_file(other).items()}
    save_file({**tensors, norm: torch.zeros(SMALL["hidden_size"])}, other)
    torch.testing.assert_close(logits(load_model(folder)), expected, rtol=0, atol=0)
    index.unlink()
    assert re.search(rf"repeats tensors of another file there: {norm}; remove", refusal(folder, BadWeights))


# The tensors in them


def test_wrong_shapes_are_all_listed(folder):
    edit_config(folder, intermediate_size=32, vocab_size=30)
    message = refusal(folder, BadWeights)
    assert f"the weights in {folder} do not fit the config" in message and "config.json" in message
    assert "8 tensors of the wrong shape" in message  # three of the MLP in two layers, embedding and head
    assert "model.layers.1.mlp.down_proj.weight is [16, 24], expected [16, 32]" in message
    assert "model.embed_tokens.weight is [29, 16], expected [30, 16]" in message


def test_missing_and_unexpected_tensors_are_all_listed(folder):
    lost = ["model.norm.weight", "lm_head.weight", "model.layers.0.self_attn.k_proj.weight"]
    extra = ["model.layers.0.self_attn.q_norm.weight", "something", "model.layers.2.mlp.up_proj.weight"]

    def change(tensors):
        for name in lost:
            del tensors[name]
        tensors.update({name: torch.ones(4) for name in extra})

    edit_weights(folder, change)
    message = refusal(folder, BadWeights)
    assert "3 tensors missing" in message and "3 tensors unexpected" in message
    for name in [*lost, *extra]:
        assert name in message


def test_frequencies_of_ropes_in_older_files(folder):
    expected = logits(load_model(folder))
    places = ["model", "model.layers.0.self_attn", "model.layers.1.self_attn"]
    edit_weights(folder, lambda ts: ts.update({f"{place}.rotary_emb.inv_freq": torch.ones(2) for place in places}))
    torch.testing.assert_close(logits(load_model(folder)), expected, rtol=0, atol=0)
    edit_weights(folder, lambda tensors: tensors.update({"model.rotary_emb": torch.ones(2)}))
    assert "1 tensors unexpected: model.rotary_emb." in refusal(folder, BadWeights)


def test_fewer_and_more_layers_than_the_config_says(folder):
    edit_config(folder, num_hidden_layers=1)
    assert "9 tensors unexpected: model.layers.1.input_layernorm.weight" in refusal(folder, BadWeights)
    edit_config(folder, num_hidden_layers=3)
    assert "9 tensors missing: model.layers.2.input_layernorm.weight" in refusal(folder, BadWeights)
    edit_config(folder, num_hidden_layers=1000)
    assert "and 8882 more" in (message := refusal(folder, BadWeights)) and len(message) < 10_000


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64])
def test_tensors_that_are_no_floating_point(dtype, folder):
    edit_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(16, dtype=dtype)}))
    assert f"model.norm.weight holds {dtype}, expected floating point" in refusal(folder, BadWeights)


def test_a_head_that_repeats_the_tied_embedding(folder):
    edit_weights(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert "1 tensors missing: lm_head.weight" in refusal(folder, BadWeights)
    edit_config(folder, tie_word_embeddings=True)
    tied = load_model(folder)
    edit_weights(folder, lambda ts: ts.update({"lm_head.weight": ts["model.embed_tokens.weight"].clone()}))
    repeated = load_model(folder)
    assert repeated.head is repeated.embedding and repeated.weight_bytes == tied.weight_bytes
    torch.testing.assert_close(logits(repeated), logits(tied), rtol=0, atol=0)


def test_a_head_that_was_trained_apart_though_the_config_says_tied(folder):
    expected = logits(load_model(folder))
    edit_config(folder, tie_word_embeddings=True)
    torch.testing.assert_close(logits(load_model(folder)), expected, rtol=0, atol=0)
    edit_weights(folder, lambda tensors: tensors.update({"lm_head.weight": torch.ones(3, 3)}))
    assert "lm_head.weight is [3, 3], expected [29, 16]" in refusal(folder, BadWeights)


def test_the_names_of_a_model_with_other_senses(folder):
    expected = logits(load_model(folder))

    def prefix(tensors):
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)

    edit_weights(folder, prefix)
    torch.testing.assert_close(logits(load_model(folder)), expected, rtol=0, atol=0)
    edit_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(16)}))
    assert "has both" in refusal(folder, BadWeights)


# Dtypes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(stored, dtype, folder):
    expected = logits(load_model(folder))
    edit_weights(folder, lambda ts: ts.update({name: tensor.to(stored) for name, tensor in ts.items()}))
    model = load_model(folder, dtype=dtype)
    assert model.dtype == model.embedding.dtype == model.head.dtype == getattr(torch, dtype)
    assert all(layer.mlp.down.weight.dtype == model.dtype for layer in model.layers)
    assert (logits(model) - expected).abs().max() < 0.05


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "float32"}, torch.float32),
        ({"dtype": "float16"}, torch.float32),  # on a CPU
        ({"dtype": None, "torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "torch.bfloat16"}, torch.bfloat16),
        ({"dtype": "float8_e4m3fn"}, torch.float32),
        ({"dtype": None}, torch.float32),
    ],
)
def test_auto_dtype_is_what_the_config_says(fields, expected, folder):
    edit_config(folder, **fields)
    assert load_model(folder).dtype == expected


@pytest.mark.parametrize("dtype", ["int8", "", "half", "torch.float32"])
def test_a_dtype_that_is_none(dtype, folder):
    with pytest.raises(OptionError, match="is not one of auto, float32, bfloat16, float16"):
        load_model(folder, dtype=dtype)


def test_progress_counts_up_to_all_tensors(folder):
    seen = []
    load_model(folder, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == list(range(1, len(seen) + 1))
    assert {total for _, total in seen} == {len(seen)}
