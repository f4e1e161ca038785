"""Every kernel is compiled for GPUs, which needs none: the interpreter takes what the compiler does not.

Steps of tiny models in bfloat16 launch kernels as they would on a device; what is launched is compiled, and not run.
"""

import sys
from dataclasses import replace

import pytest
import torch
from parity import save
from test_fixed import SHAPE, by_kernels
from test_triton import INSTALLED, INTERPRETED

from bough import ops
from bough.models.load import load_model
from bough.models.rounding import quantised
from bough.ops.quant import chunks
from bough.ops.ragged import Pages, ReplayedRow, Rows, Slots
from bough.state.fixed import Fixed
from bough.state.layout import Layout
from bough.state.pool import Pool
from bough.state.recordings import Journal
from bough.state.step import Ends, Step

pytestmark = pytest.mark.skipif(not INSTALLED or INTERPRETED, reason="needs triton, and not its interpreter")
WIDE = {**SHAPE, "hidden_size": 128, "head_dim": 64, "intermediate_size": 256}
LINEAR = {"num_key_heads": 1, "num_value_heads": 2, "key_head_dim": 64, "value_head_dim": 64}
LINEAR = {f"linear_{name}": value for name, value in LINEAR.items()}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


class Device:
    """What Triton asks of a device when it compiles for one."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return self.capability  # for kernels remember what device a number stands for

    def get_current_stream(self, device):
        return 0


HOPPER, ADA = 232_448, 101_376  # bytes that the threads of a program share
OTHERS = [pytest.param(capability, marks=pytest.mark.long) for capability in (80, 89, 120)]


@pytest.fixture(params=[90, *OTHERS])
def compiled(request, monkeypatch, tmp_path_factory):
    """The kernels that were launched, and the most that one of each kind shares."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    names, run = {}, JITFunction.run

    def compile_alone(self, *given, warmup, **options):
        made = run(self, *given, warmup=True, **options)
        name = f"{self.module.removeprefix('bough.ops.triton.')}.{self.__name__}"
        names[name] = max(made.metadata.shared, names.get(name, 0))
        return made

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
    monkeypatch.setattr(JITFunction, "run", compile_alone)
    monkeypatch.setattr(driver, "_active", Device(request.param))
    for module in ("linear", "quant", "follow"):  # as on that device
        follows = {"follows": True, "launch_pdl": True} if request.param >= 90 else {"follows": False}
        monkeypatch.setattr(f"bough.ops.triton.{module}.following", lambda device, follows=follows: follows)
    for module in ("quant", "seen"):
        monkeypatch.setattr(f"bough.ops.triton.{module}.has_ptx", lambda device: True)
    with by_kernels():
        yield names


def qwen3_next():
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    shared = {"shared_expert_intermediate_size": 64}
    return Qwen3NextForCausalLM(Qwen3NextConfig(**WIDE, **LINEAR, **EXPERTS, **shared, num_hidden_layers=4))


def gemma3():
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    types = ["sliding_attention", "full_attention"]
    options = {"num_hidden_layers": 2, "layer_types": types, "sliding_window": 64, "attn_logit_softcapping": 30.0}
    return Gemma3ForCausalLM(Gemma3TextConfig(**WIDE, **options))


def lfm2():
    from transformers import Lfm2Config, Lfm2ForCausalLM

    shape = {name: value for name, value in WIDE.items() if name != "head_dim"}
    return Lfm2ForCausalLM(Lfm2Config(**shape, num_hidden_layers=2, layer_types=["conv", "full_attention"]))


@pytest.mark.parametrize("family", [qwen3_next, gemma3, lfm2])
@torch.inference_mode()
def test_steps_of_all_shapes(family, tmp_path, compiled, monkeypatch):
    monkeypatch.setattr("bough.ops.triton.prefill.processors", lambda device: 64)
    monkeypatch.setattr("bough.ops.triton.seen.BUSY", 0)
    model = load_model(save(family(), tmp_path), dtype="bfloat16")
    layout = Layout.of(model.kinds, page_tokens=16, dtype=model.dtype)
    pool = Pool(layout, 80 * layout.slab_bytes, max_running=8)
    step = Step.rehearsal(pool, (100, 2), (30, 5))
    model(step)
    model(replace(step, wanted=Ends.of(step.rows, (1, 0), model.device)))
    journal = Journal(pool, 1)
    for rows, each, into in ((1, 1, None), (1, 1, journal.late), (4, 5, journal.all)):
        step = Fixed(pool, rows, each, 256).step(into)
        hidden = model(step)
        model.logits(hidden)
    for (layer, part), recording in (step.recordings.parts if step.recordings else {}).items():
        data, field = pool.part(layer, part), pool.stores[pool.slot_store].unit.fields[layer, part]
        field.part.replay([(data, recording.inputs)], [ReplayedRow(1, 0, 1)])
        if part == "conv":
            ops.carry(recording.inputs[0], step.rows, stored=step.slots(layer, part))
    expected = {
        "prefill._join",
        "attention._spans",
        "prefill._blocks",
        "norm._norm_after",
        "heads._place_heads",
    }
    assert expected <= set(compiled)
    for kernel in ("delta._short_rows", "seen._look", "seen._say"):
        assert (kernel in compiled) == (family is qwen3_next)


def test_what_stands_is_compiled_once(compiled):
    """However many rows there are: nobody waits for a compiler in the middle of a reply."""
    from triton.runtime import driver

    from bough.ops.triton.rounds import _standing

    for rows in (1, 2, 3, 4, 7):
        numbers = torch.zeros(4 * rows, dtype=torch.int32)
        start, count, fed = numbers.tensor_split((rows, 2 * rows))
        ops.standing(torch.zeros(2 * rows, dtype=torch.int64), fed, start, count)
    [cache, *_] = _standing.device_caches[driver.active.get_current_device()]
    assert "rounds._standing" in compiled and len(cache) == 1


@pytest.mark.parametrize("bits", [8, 4])
def test_products_with_quantised_weights(bits, compiled):
    made = chunks(quantised(torch.randn(1024, 1024), bits))
    mixed = made.above(torch.zeros(8, 1024, dtype=torch.bfloat16))
    silu, taps, tails = torch.nn.functional.silu, torch.zeros(4, 512), torch.zeros(20, 3, 512, dtype=torch.bfloat16)
    for rows in (1, 9, 20):
        x, slots = torch.randn(rows, 1024, dtype=torch.bfloat16), tuple(range(rows))
        for weight in (made, mixed):
            ops.linear(x, weight)
            onto = torch.zeros(rows, weight.shape[0], dtype=torch.bfloat16)
            ops.Norm(torch.zeros(weight.shape[0]), 1e-6, rounded=False).after(onto, ops.later(x, weight))
        _, normed = ops.Norm(None, 1e-6, rounded=False).after(x, ops.later(x, made))
        ops.gated_linear(normed, made, None, silu)
        stored = Slots(tails, slots, slots)
        ops.projected_conv(normed, mixed, taps, Rows((1,) * rows, (1,) * rows), stored=stored, activation=silu)
    made.expanded()
    assert set(compiled) == {"quant._product", "quant._expand"}


def sharing(monkeypatch, shared: int) -> None:
    """As if the threads of a program could share so many bytes."""
    for module in ("attention", "prefill", "chunks", "experts", "linear"):
        monkeypatch.setattr(sys.modules[f"bough.ops.triton.{module}"], "shared_bytes", lambda device: shared)


@pytest.mark.parametrize("shared", [HOPPER, ADA])
@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 128), (torch.float32, 128)])
def test_the_delta_rule_and_experts_fit(dtype, width, shared, compiled, monkeypatch):
    sharing(monkeypatch, shared)
    q, v, g = torch.zeros(200, 1, width, dtype=dtype), torch.zeros(200, 2, 128, dtype=dtype), torch.zeros(200, 2)
    states = Slots(torch.zeros(2, 2, width, 128), (0,), (1,))
    ops.gated_delta(q, q, v, g, g, Rows((200,), (1,)), stored=states)
    gate_up, down = torch.zeros(2, 256, 256, dtype=dtype), torch.zeros(2, 256, 128, dtype=dtype)
    for tokens in (1, 40, 700):
        share, chosen = torch.ones(tokens, 2, dtype=dtype), torch.zeros(tokens, 2, dtype=torch.int64)
        x = torch.zeros(tokens, 256, dtype=dtype)
        ops.experts(x, share, chosen, gate_up, down, torch.nn.functional.silu)
    assert {"chunks._pass", "chunks._systems", "experts._down"} <= set(compiled) and max(compiled.values()) <= shared


@pytest.mark.parametrize("shared", [HOPPER, ADA])
def test_products_of_few_rows_fit(shared, compiled, monkeypatch):
    sharing(monkeypatch, shared)
    for rows in (2, 16, 64):
        for outputs in (2560, 8192, 18432):
            ops.linear(*(torch.zeros(count, 4096, dtype=torch.bfloat16) for count in (rows, outputs)))
    assert 0 < compiled["linear._product"] <= shared


@pytest.mark.parametrize("shared", [HOPPER, ADA])
@pytest.mark.parametrize(
    ("dtype", "width", "group", "tokens"),
    [
        (torch.bfloat16, 512, 8, 9),
        (torch.bfloat16, 256, 16, 9),
        (torch.bfloat16, 128, 32, 9),
        (torch.float32, 512, 8, 9),
        (torch.bfloat16, 512, 64, 2),
        (torch.bfloat16, 64, 1, 1),
    ],
)
def test_attention_fits_whatever_the_heads_are(dtype, width, group, tokens, shared, compiled, monkeypatch):
    sharing(monkeypatch, shared)
    k = torch.zeros(20, 16, 1, width, dtype=dtype)
    pages = Pages(k, k, torch.arange(20, dtype=torch.int32), (0, 10), *[torch.zeros(0, dtype=torch.int32)] * 2)
    q = torch.zeros(tokens + 40, group, width, dtype=dtype)
    ops.attention(q, Rows((tokens, 40), (100, 100)), scale=1.0, stored=pages)
    assert {"attention._spans", "prefill._blocks"} <= set(compiled) and max(compiled.values()) <= shared
