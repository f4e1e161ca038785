"""Models of 8 and 4 bits: written as the format says, run as their weights say, and nothing half-made left behind."""

import json
import math
import re
import shutil
import struct
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from folders import refusal
from gguf_files import reference, write
from parity import feed, pool_for, random_tokens, save
from safetensors.torch import load_file, save_file
from speculation import USED, Fixed, _saved, prompt_of
from test_assistant import assistant
from test_gemma4 import EXPERTS, PLAIN, gemma4
from test_mtp import dense, mtp_tensors, sparse
from torch import Tensor

from bough import Engine, SamplingParams, ops
from bough.cli import BUNDLED
from bough.draft.mtp import MTPHead
from bough.engine.load import load
from bough.errors import BadWeights, ModelError, OptionError
from bough.models import quantize as quantize_module
from bough.models.gemma4_assistant import load_assistant
from bough.models.identity import identity
from bough.models.load import load_model
from bough.models.model import Model
from bough.models.quantize import bits_per_weight, quantize
from bough.models.rounding import quantised
from bough.models.shards import write_shards
from bough.models.weights import SafetensorsFolder
from bough.ops import Parts, Quantised, quant_cpu
from bough.ops.quant_cpu import Planes, Tables
from bough.state.layout import Layout
from bough.state.live import State

SCHEMES = ("int8", "int4")


def quantised_to(source: Path, scheme: str, target: Path) -> Path:
    quantize(source, target, scheme)
    return target


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def weights_of(folder: Path) -> dict[str, Tensor]:
    """What the tensors in the folder stand for, weight by weight as docs/quantisation.md has it."""
    stored, plain = tensors_of(folder), {}
    for name, data in stored.items():
        if re.search(r"\.(scale|zero)$", name) and re.sub(r"\.(scale|zero)$", "", name) in stored:
            continue
        if f"{name}.scale" not in stored:
            plain[name] = data.float() if data.is_floating_point() else data
            continue
        scale, four = stored[f"{name}.scale"].double(), f"{name}.zero" in stored
        assert data.dtype == (torch.uint8 if four else torch.int8)
        inputs = data.shape[-1] * (2 if four else 1)
        group = inputs // scale.shape[-1]
        each = torch.arange(inputs)
        if four:
            inside, half = each % group, group // 2
            byte = data[..., each // group * half + inside % half].int()
            code = torch.where(inside < half, byte % 16, byte // 16).double() - 8
            value = code * scale[..., each // group] + stored[f"{name}.zero"].double()[..., each // group]
        else:
            value = data.double() * scale[..., each // group]
        plain[name] = value.float()
    return plain


def expanded(folder: Path, target: Path) -> Path:
    """The same model in plain float32."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    save_file(weights_of(folder), target / "model.safetensors", metadata={"format": "pt"})
    return target


def logits_of(model: Model, tokens: list[int], pieces: tuple[int, ...]) -> Tensor:
    pool, at, found = pool_for(model), 0, []
    state = State(pool)
    for size in (*pieces, len(tokens)):
        found += feed(model, pool, [(state, tokens[at : at + size])]) if tokens[at : at + size] else []
        at += size
    return torch.cat(found)


def expect_close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-4) -> None:
    assert (error := (ours.float() - theirs.float()).abs().max().item()) <= tolerance, f"they differ by {error:.2e}"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", USED)
def test_every_family(tmp_path, family, scheme):
    small = quantised_to(_saved(family, tmp_path / "source"), scheme, tmp_path / "small")
    assert any(name.endswith(".scale") for name in tensors_of(small))
    ours = load_model(small, dtype="float32")
    theirs = load_model(expanded(small, tmp_path / "plain"), dtype="float32")
    tokens = random_tokens(97, 40, seed=3)
    expected = logits_of(theirs, tokens, ())
    expect_close(logits_of(ours, tokens, ()), expected)
    expect_close(logits_of(ours, tokens, (17, 1, 1, 5)), expected)
    assert ours.weight_bytes < theirs.weight_bytes


def test_stacked_experts(tmp_path):
    small = quantised_to(save(gemma4(**PLAIN, **EXPERTS), tmp_path / "source"), "int4", tmp_path / "small")
    assert tensors_of(small)["model.layers.0.experts.gate_up_proj"].shape == (7, 48, 24)
    plain = load_model(expanded(small, tmp_path / "plain"), dtype="float32")
    tokens = random_tokens(97, 30, seed=1)
    expect_close(logits_of(load_model(small, dtype="float32"), tokens, (4,)), logits_of(plain, tokens, ()))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bfloat16_is_as_far_from_float32_as_it_is_without(tmp_path, scheme):
    small = quantised_to(BUNDLED, scheme, tmp_path / "small")
    plain, tokens = expanded(small, tmp_path / "plain"), random_tokens(6144, 60, seed=1)
    exact = logits_of(load_model(plain, dtype="float32"), tokens, ())
    model = load_model(small)
    assert isinstance(model.layers[0].mlp.down.weight, Planes)
    assert isinstance(model.head, Tables if quant_cpu.has_bags() else Planes)
    assert isinstance(model.layers[0].mixer.inputs.weight, Parts)
    theirs = (logits_of(load_model(plain, dtype="bfloat16"), tokens, ()).float() - exact).abs().mean()
    for pieces in ((), (1,) * 40):
        assert (logits_of(model, tokens, pieces).float() - exact).abs().mean() < 1.5 * theirs


@pytest.mark.parametrize(("bits", "has_bags"), [(8, True), (8, False), (4, False)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("out", "inputs"), [(64, 64), (192, 96), (320, 640), (33, 128), (64, 24), (7, 1000)])
def test_a_row_does_not_depend_on_the_rows_beside_it(bits, has_bags, dtype, out, inputs, monkeypatch):
    if has_bags and not quant_cpu.has_bags():
        pytest.skip("torch comes without FBGEMM here")
    monkeypatch.setattr(quant_cpu, "has_bags", lambda: has_bags)
    for name, value in (("SMALL", 0), ("WIDTH", 64), ("TILE", 1 << 12)):  # so that there are several of everything
        monkeypatch.setattr(quant_cpu, name, value)
    weight = quantised(torch.randn(out, inputs), bits)
    weight = Quantised(weight.data, *(each.to(dtype) for each in (weight.scale, weight.zero) if each is not None))
    x, served = torch.randn(70, inputs).to(dtype), ops.arranged(weight)
    exact = x.float() @ weight.expanded().float().T
    near = 0.02 if dtype == torch.bfloat16 else 1e-5
    for count in (1, 2, 5, 24, 25, 70):
        expect_close(ops.linear(x[:count], served), exact[:count], near * exact.abs().max().item())
    apart = torch.stack([x, x + 1], -1)[..., 0]  # no two of a row next to each other
    expect_close(ops.linear(apart[:1], served), exact[:1], near * exact.abs().max().item())
    assert ops.linear(x[:0], served).shape == (0, out)
    bias = torch.randn(out).to(dtype)
    expect_close(ops.linear(x, served, bias), exact + bias.float(), near * exact.abs().max().item())
    if dtype == torch.float32:
        several = ops.linear(x[:5], served)
        expect_close(torch.cat([ops.linear(row[None], served) for row in x[:5]]), several, 1e-4)


def test_rounding_errs_by_half_a_step_at_most():
    weight = torch.randn(40, 256)
    eight, four = quantised(weight, 8), quantised(weight, 4)
    step = eight.scale.float().repeat_interleave(128, 1)
    assert ((weight - eight.expanded().float()).abs() <= 0.51 * step + 0.004 * weight.abs()).all()
    plain = (weight.view(40, 8, 32).amax(-1) - weight.view(40, 8, 32).amin(-1)) / 15
    assert (weight - four.expanded().float()).square().mean() < plain.square().mean() / 12


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0])
@pytest.mark.parametrize("bits", [8, 4])
def test_weights_that_are_all_the_same(bits, value):
    assert torch.equal(quantised(torch.full((4, 64), value), bits).expanded().float(), torch.full((4, 64), value))


def test_what_is_spared(tmp_path):
    stored = tensors_of(quantised_to(BUNDLED, "int4", tmp_path / "small"))
    spared = {name for name, value in stored.items() if value.dtype == torch.bfloat16}
    spared = {re.sub(r"\.\d+", ".N", name) for name in spared if not re.search(r"\.(scale|zero)$", name)}
    matrices = {re.sub(r"\.\d+", ".N", name) for name, value in stored.items() if value.dtype == torch.uint8}
    assert {name for name in spared if not re.search("norm|A_log|dt_bias", name)} == {
        "model.embed_tokens.weight",
        "model.layers.N.linear_attn.conv1d.weight",
        "model.layers.N.linear_attn.in_proj_a.weight",
        "model.layers.N.linear_attn.in_proj_b.weight",
    }
    assert {name.split(".")[-2] for name in matrices} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        *("in_proj_qkv", "in_proj_z", "out_proj", "fc"),
    }


def test_a_head_of_its_own_has_eight_bits(tmp_path, llama_folder):
    stored = tensors_of(quantised_to(llama_folder, "int4", tmp_path / "small"))
    assert stored["lm_head.weight"].dtype == torch.int8
    assert stored["model.layers.0.mlp.up_proj.weight"].dtype == torch.uint8


@pytest.mark.parametrize("own", [(), ("embed_tokens", "lm_head")])
def test_mtp_heads(tmp_path, own):
    source = dense(tmp_path / "source", mtp_tensors(sparse=False, own=own)) if own else sparse(tmp_path / "source")
    small = quantised_to(source, "int4", tmp_path / "small")
    plain = expanded(small, tmp_path / "plain")
    ours, theirs = (MTPHead(load_model(folder, dtype="float32")) for folder in (small, plain))
    assert (ours.embedding is None) == (not own) and ours.weight_bytes < theirs.weight_bytes
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    expect_close(ours.project(x), theirs.project(x))
    expect_close(ours.layer.mlp(x[:, :32]), theirs.layer.mlp(x[:, :32]))
    expect_close(ours.logits(x[:, :32]), theirs.logits(x[:, :32]))


def test_assistants(tmp_path):
    target = load_model(save(gemma4(), tmp_path / "target"), dtype="float32")
    small = quantised_to(save(assistant(48), tmp_path / "source"), "int8", tmp_path / "small")
    ours = load_assistant(small, target)
    theirs = load_assistant(expanded(small, tmp_path / "plain"), target)
    pool, tokens = pool_for(target), random_tokens(97, 20, seed=2)
    state = State(pool)
    feed(target, pool, [(state, tokens)])
    asked = (torch.randn(1, 48), torch.randn(1, 48), torch.tensor([20]))
    with torch.inference_mode():
        for mine, expected in zip(ours(*asked, ours.see([state])), theirs(*asked, theirs.see([state])), strict=True):
            expect_close(mine, expected)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_warm_equals_cold_and_drafts_change_nothing(tmp_path, scheme):
    loaded = load(quantised_to(_saved("qwen3_5", tmp_path / "source"), scheme, tmp_path / "small"), dtype="float32")
    greedy = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    prompts = [prompt_of(40, seed=1), [*prompt_of(40, seed=1)[:30], *prompt_of(9, seed=2)], prompt_of(12, seed=3)]
    with Engine(loaded, max_running=4, draft=None) as plain:
        cold = [plain.generate(prompt, greedy).tokens for prompt in prompts]
    with Engine(loaded, max_running=4, draft="mtp") as engine:
        engine._loop.drafting.depth = Fixed(deepest=4)
        for _ in range(2):
            outs = [engine.generate(prompt, greedy) for prompt in prompts]
            assert [out.tokens for out in outs] == cold
        assert outs[0].usage.cached_tokens > 0 and sum(out.usage.drafted_tokens for out in outs) > 0


def test_gguf(tmp_path):
    source = write(reference("llama"), tmp_path / "tiny.gguf")
    small = quantised_to(source, "int8", tmp_path / "small")
    tokens = random_tokens(97, 20, seed=0)
    plain = load_model(expanded(small, tmp_path / "plain"), dtype="float32")
    expect_close(logits_of(load_model(small, dtype="float32"), tokens, ()), logits_of(plain, tokens, ()))
    assert json.loads((small / "config.json").read_text())["model_type"] == "llama"


def test_what_is_written(tmp_path, llama_folder):
    told: list[tuple[int, int]] = []
    quantize(llama_folder, tmp_path / "small", "int8", progress=lambda *each: told.append(each))
    done, totals = zip(*told, strict=True)
    assert list(done) == sorted(done) and set(totals) == {done[-1]}
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "bough", "version": 1, "scheme": "int8", "group_size": 128}
    assert config["dtype"] == "bfloat16" and config["hidden_size"] == 48
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "small" / name).read_bytes() == (llama_folder / name).read_bytes()
    file = (tmp_path / "small" / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", file[:8])
    header = json.loads(file[8 : 8 + length])
    assert length % 8 == 0 and max(each["data_offsets"][1] for k, each in header.items() if k[0] != "_") == done[-1]
    assert {entry.name for entry in tmp_path.iterdir()} == {"small"}


def test_bits_per_weight(tmp_path):
    assert bits_per_weight(BUNDLED) == 16
    sizes = {name: value.nbytes for name, value in tensors_of(BUNDLED).items()}
    weights = sum(sizes.values()) / 2
    for scheme, each in (("int8", 8 + 16 / 64), ("int4", 5)):  # 320 and 704 inputs make groups of 64, and of 32
        found = bits_per_weight(quantised_to(BUNDLED, scheme, tmp_path / scheme))
        spared = sum(
            size / 2 for name, size in sizes.items() if re.search(r"embed|norm|conv1d|_[ab]\.|A_log|dt_b", name)
        )
        head = (8 + 16 / 64) * sizes["model.embed_tokens.weight"] / 2
        assert math.isclose(found, (16 * spared + each * (weights - spared) + head) / weights, rel_tol=0.01)


def test_several_shards(tmp_path, llama_folder, monkeypatch):
    whole = quantised_to(llama_folder, "int4", tmp_path / "whole")
    monkeypatch.setattr(quantize_module, "write_shards", partial(write_shards, most=20_000))
    parts = quantised_to(llama_folder, "int4", tmp_path / "parts")
    assert len(list(parts.glob("model-*-of-*.safetensors"))) > 2
    assert identity_of(load_model(parts)) == identity_of(load_model(whole))
    assert identity_of(load_model(whole)) != identity_of(load_model(quantised_to(llama_folder, "int8", tmp_path / "8")))


def identity_of(model: Model) -> str:
    return identity(model, Layout.of(model.kinds, page_tokens=4, dtype=model.dtype))


def test_one_tensor_at_a_time(tmp_path, monkeypatch):
    alive: list[weakref.ref] = []
    read = SafetensorsFolder.read

    def watched(self, name: str) -> Tensor:
        assert not [each for each in alive if each() is not None], "another tensor is still in memory"
        tensor = read(self, name)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(SafetensorsFolder, "read", watched)
    quantize(BUNDLED, tmp_path / "small", "int4")
    assert len(alive) > 100


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_run_leaves_nothing(tmp_path, llama_folder, error):
    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise error

    with pytest.raises(error):
        quantize(llama_folder, tmp_path / "small", "int8", progress=stop)
    assert not list(tmp_path.iterdir())


def test_refusals(tmp_path, llama_folder):
    def refused(source: Path, scheme: str, kind: type[Exception], target: str = "new") -> str:
        with pytest.raises(kind) as caught:
            quantize(source, tmp_path / target, scheme)
        assert not (tmp_path / "new").exists()
        return str(caught.value)

    small = quantised_to(llama_folder, "int8", tmp_path / "small")
    assert "int8, int4" in refused(llama_folder, "int3", OptionError)
    assert "already" in refused(llama_folder, "int8", ModelError, target="small")
    assert "quantised already" in refused(small, "int8", ModelError)
    assert "is not there" in refused(tmp_path / "nowhere", "int8", ModelError)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_bytes((llama_folder / "config.json").read_bytes())
    (pickled / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert "pickle" in refused(pickled, "int8", BadWeights)


def test_links_out_of_the_folder_are_not_followed(tmp_path, llama_folder):
    source = Path(shutil.copytree(llama_folder, tmp_path / "source"))
    (tmp_path / "secret.json").write_text("{}")
    (source / "extra.json").symlink_to(tmp_path / "secret.json")
    assert not (quantised_to(source, "int8", tmp_path / "small") / "extra.json").exists()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"quant_method": "gptq"}, "'gptq', which Bough does not"),
        ({"quant_method": "bough", "version": 2}, "reads version 1"),
        ("int8", "must be an object"),
    ],
)
def test_weights_quantised_otherwise(tmp_path, llama_folder, how, said):
    folder = Path(shutil.copytree(llama_folder, tmp_path / "other"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": how}))
    assert said in refusal(folder)


def test_tensors_that_do_not_fit(tmp_path, llama_folder):
    small = quantised_to(llama_folder, "int4", tmp_path / "small")
    stored, mlp = tensors_of(small), "model.layers.0.mlp"
    del stored[f"{mlp}.gate_proj.weight.zero"]
    stored[f"{mlp}.up_proj.weight"] = stored[f"{mlp}.up_proj.weight"][:, :-1].contiguous()
    stored[f"{mlp}.down_proj.weight.scale"] = stored[f"{mlp}.down_proj.weight.scale"][:, :-1].contiguous()
    save_file(stored, small / "model.safetensors")
    message = refusal(small, BadWeights)
    assert f"missing: {mlp}.gate_proj.weight.zero" in message
    assert f"{mlp}.up_proj.weight is torch.uint8 [80, 23] in 3 groups" in message
    assert f"{mlp}.down_proj.weight is torch.uint8 [48, 40] in 4 groups" in message
