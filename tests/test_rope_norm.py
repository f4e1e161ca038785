"""Rope and norms against transformers' own functions and modules, to the bit, and against plain float64 forms."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.lfm2.modeling_lfm2 import Lfm2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import apply_rotary_pos_emb as apply_partial_rotary

from bough.errors import BoughError
from bough.ops import inverse_frequencies, rms_norm, rms_norm_gated, rms_norm_scaled, rotate, rotations

DTYPES = [torch.float32, torch.bfloat16]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("head_dim", [8, 64, 80, 256])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        {"rope_type": "linear", "factor": 8.0},
        {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
        {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 8192},
        {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 64},
        {**YARN},
        {**YARN, "rope_theta": 1e6, "beta_fast": 16, "beta_slow": 2, "attention_factor": 0.9},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2, "partial_rotary_factor": 0.5},
        {**YARN, "truncate": False, "factor": 1.0},
        {**YARN, "original_max_position_embeddings": 8},
        {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        {"rope_type": "proportional", "factor": 8.0},
    ],
    ids=lambda rope: "-".join(str(value) for value in rope.values()),
)
def test_frequencies(rope, head_dim):
    rope = {"rope_theta": 10000.0, **rope}
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=1024,
        rope_parameters=dict(rope),
    )
    compute = ROPE_INIT_FUNCTIONS.get(rope["rope_type"], LlamaRotaryEmbedding.compute_default_rope_parameters)
    if rope["rope_type"] == "default":  # that function does not look at the factor: a part of a head is a smaller head
        config.head_dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    expected, factor = compute(config, device="cpu")
    frequencies, ours = inverse_frequencies(head_dim, rope, 1024)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert ours == pytest.approx(factor, rel=1e-9)


def test_yarn_factor_may_follow_from_the_context():
    frequencies, factor = inverse_frequencies(64, {**YARN, "factor": None}, 1024)
    expected = inverse_frequencies(64, YARN, 1024)
    assert torch.equal(frequencies, expected[0]) and factor == expected[1]


@pytest.mark.parametrize("rope", [{"rope_type": "longrope"}, {"rope_type": "linear"}, {"rope_type": "llama3"}])
def test_unusable_parameters_are_named(rope):
    with pytest.raises(BoughError, match=r"longrope|factor"):
        inverse_frequencies(64, rope, 1024)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rotated", [16, 8, 2])
def test_rotate_is_the_reference(rotated, dtype):
    """Bit by bit, for q and k of a ragged forward, all of a head or its first dimensions."""
    positions = torch.tensor([0, 1, 2, 900, 5, 131071, 6])
    q, k = random(7, 3, 16).to(dtype), random(7, 1, 16, seed=1).to(dtype)
    frequencies, _ = inverse_frequencies(rotated, {"rope_theta": 10000.0}, 1024)
    factor = 1.1
    angles = (frequencies[:, None] @ positions[None].float()).T
    angles = torch.cat([angles, angles], -1)
    cos, sin = (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
    apply = apply_rotary_pos_emb if rotated == 16 else apply_partial_rotary
    expected = apply(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None])
    rotation = rotations(positions, frequencies, factor, dtype)
    for ours, theirs in zip((rotate(q, *rotation), rotate(k, *rotation)), expected, strict=True):
        assert ours.dtype == dtype and torch.equal(ours, theirs[0].transpose(0, 1))


@given(st.integers(0, 4000), st.integers(0, 4000), st.integers(0, 200), st.sampled_from([2, 6, 32]))
def test_scores_depend_on_distance_alone(a, b, shift, dim):
    """A rotation in the complex plane: it keeps lengths, and the product of two depends on how far apart they are."""
    frequencies, _ = inverse_frequencies(dim, {"rope_theta": 10000.0}, 1024)
    x, y = random(1, 1, dim), random(1, 1, dim, seed=1)

    def turned(vector, position):
        return rotate(vector, *rotations(torch.tensor([position]), frequencies, 1.0, torch.float32)).double()

    plane = torch.complex(*x.double().chunk(2, -1)) * torch.exp(1j * a * frequencies.double())
    torch.testing.assert_close(turned(x, a), torch.cat([plane.real, plane.imag], -1), atol=2e-3, rtol=0)
    torch.testing.assert_close(turned(x, a).norm(), x.double().norm(), rtol=1e-5, atol=0)
    near, far = turned(x, a) * turned(y, b), turned(x, a + shift) * turned(y, b + shift)
    torch.testing.assert_close(near.sum(), far.sum(), atol=1e-2, rtol=0)
    assert torch.equal(turned(x, 0), x.double())


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    """Rows as models have them: usual, large, so small that eps counts, zero, and heads sliced out of a projection."""
    x = random(9, 64)
    x[1] *= 1e4
    x[2] *= 1e-4
    x[3] = 0
    return [x.to(dtype), x[:0].to(dtype), random(9, 5, 192).to(dtype)[:, 1:4, 64:128]]


def scaled(x: torch.Tensor, module: torch.nn.Module) -> torch.Tensor:
    """Norms that multiply in float32; zero-centred ones start from weights of 0."""
    zero_centred = not isinstance(module, Gemma4RMSNorm)
    return rms_norm_scaled(x, module.weight.float() + zero_centred, 1e-6)


def plain(x: torch.Tensor, module: torch.nn.Module) -> torch.Tensor:
    return rms_norm(x, module.weight, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("ours", "reference"),
    [
        (plain, LlamaRMSNorm),
        (plain, Qwen3RMSNorm),
        (plain, Lfm2RMSNorm),
        (scaled, Gemma3RMSNorm),
        (scaled, Gemma4RMSNorm),
        (scaled, Qwen3_5RMSNorm),
        (scaled, Qwen3NextRMSNorm),
    ],
)
@torch.no_grad()
def test_norms_are_the_reference(ours, reference, dtype):
    module = reference(64, 1e-6).to(dtype)
    module.weight.add_(random(64, seed=2) * 0.3)
    for x in inputs(dtype):
        out, expected = ours(x, module), module(x)
        assert out.dtype == dtype
        if dtype == torch.bfloat16 and reference is not Gemma4RMSNorm:
            assert torch.equal(out, expected), "rounded at other places"
        else:  # one takes the root by another function
            torch.testing.assert_close(out, expected, rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("reference", [Qwen3_5RMSNormGated, Qwen3NextRMSNormGated])
@torch.no_grad()
def test_gated_norm_is_the_reference(reference, dtype):
    module = reference(64, 1e-6).to(dtype)
    module.weight.add_(random(64, seed=2) * 0.3)
    for x in inputs(dtype):
        gate = random(*x.shape, seed=3).to(dtype) * 3
        out = rms_norm_gated(x, gate, module.weight, 1e-6)
        assert out.dtype == dtype and torch.equal(out, module(x, gate))


@given(st.floats(1e-3, 1e3), st.integers(1, 40), st.sampled_from([1e-6, 1e-5, 0.1]))
def test_norms_are_what_they_say(size, width, eps):
    x, w, gate = random(3, width) * size, random(width, seed=1), random(3, width, seed=2)
    unit = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()
    for out, expected in [
        (rms_norm(x, None, eps), unit),
        (rms_norm(x, w, eps), unit * w.double()),
        (rms_norm_scaled(x, 1 + w, eps), unit * (1 + w.double())),
        (rms_norm_gated(x, gate, w, eps), unit * w.double() * gate.double() / (1 + (-gate.double()).exp())),
    ]:
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    assert math.isfinite(rms_norm(torch.zeros(1, width), w, eps).sum())
