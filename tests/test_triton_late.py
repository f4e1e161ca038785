"""The gated delta rule where slots lag behind, in CUDA C++: against float64, on a Hopper and on the host."""

import shutil
import subprocess
from dataclasses import replace

import pytest
import torch
from on_host import Host, needs_compiler
from test_triton import INSTALLED
from test_triton_wide import error, on_hopper
from torch import Tensor
from torch.nn.functional import silu, softplus

from bough.ops import DeltaLayer
from bough.ops.ragged import STRETCH, Owed, ShortRows

pytestmark = pytest.mark.skipif(not INSTALLED, reason="triton is not installed")

if INSTALLED:
    from bough.ops.triton.late import Brought, Shape, _blocks, _kernel, advance

LOW = torch.bfloat16
SLOTS, LAYERS = 12, 3
COUNTS = (5, 0, 9, 1, 3, 2, 5, 4)  # up to as many as there is room for
OWED_TOKENS = (0, 3, 16, 1, 8, 9, 5, 10)
READ = (2, -1, 5, 0, -1, 7, 9, 1)  # the last but three has no state yet
KEEP = (-1, -1, 5, 3, 4, -1, 9, -1)


def advanced(s: Tensor, owed: tuple[Tensor, ...]) -> Tensor:
    """A state [dk, dv] after what is owed."""
    for key, decay, change in zip(*owed, strict=True):
        s = s * decay.exp() + key[:, None] * change[None, :]
    return s


def answered(s: Tensor, of: Brought, head: int, group: int, layer: DeltaLayer) -> tuple[Tensor, Tensor, Tensor]:
    """What a head's tokens answer, normed and gated; their decays; and what they change, by keys as they are."""
    outputs, decays, changes = [], [], []
    for q, k, v, z, a, b in zip(*of, strict=True):
        key, query, dv = k[head // group], q[head // group], v.shape[1]
        lengths = [(each.square().sum() + 1e-6).rsqrt() for each in (key, query)]
        decay = layer.rate[head].double() * softplus(a[head] + layer.dt_bias[head].double())
        step = torch.sigmoid(b[head]).to(LOW).double()
        s = s * decay.exp()
        change = step * (v[head] - lengths[0] * (key @ s)) * lengths[0]
        s = s + key[:, None] * change[None, :]
        out = lengths[1] * len(key) ** -0.5 * (query @ s)
        normed = out * (out.square().mean() + layer.eps).rsqrt() * layer.norm.double()
        outputs.append(normed * silu(z[head * dv : (head + 1) * dv]))
        decays.append(decay)
        changes.append(change)
    return torch.stack(outputs), torch.stack(decays), torch.stack(changes)


def expect_advanced(
    dk: int, dv: int, heads: int, group: int, each: int, times: int, weight: torch.dtype, device: str = "cpu", host=None
) -> None:
    """Rows of all sorts, so many times. Each records in the second half of its stretch what its tokens bring."""

    def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    def numbers(values) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    counts = [min(count, each) for count in COUNTS] * times
    rows, starts, k_heads = len(counts), [sum(counts[:row]) for row in range(len(counts))], heads // group
    total = rows * each  # of which those behind all rows are nobody's
    widths = k_heads * dk, k_heads * dk, heads * dv, heads * dv, heads, heads
    tokens = drawn(total, sum(widths) + -sum(widths) % 8, dtype=LOW)
    q, k, v, z, a, b = tokens[:, : sum(widths)].split(widths, 1)
    b.copy_(torch.randint(-8, 9, b.shape) / 4)  # of these no step is rounded up by one and down by another
    tokens[sum(counts) :] = torch.nan
    brought = Brought(*(each.unflatten(1, (-1, width)) for each, width in ((q, dk), (k, dk), (v, dv))), z, a, b)
    layer = DeltaLayer(-drawn(heads).abs(), drawn(heads), drawn(dv, dtype=weight), 1e-6)
    data = drawn(SLOTS * times, LAYERS, heads, dk, dv)
    states, before = data[:, 1], data.double()
    room = rows * STRETCH
    kept = drawn(room, k_heads, dk, dtype=LOW), -drawn(room, heads).abs() / 4, drawn(room, heads, dv)
    owing = [slice(row * STRETCH, row * STRETCH + OWED_TOKENS[row % len(COUNTS)]) for row in range(rows)]
    places = [of.start + STRETCH // 2 for of in owing]
    was = [tensor.clone() for tensor in kept]
    for row, of in enumerate(owing):
        for tensor in kept:
            tensor[of.stop : (row + 1) * STRETCH] = torch.nan
    by_row = [(slot if slot < 0 else slot + SLOTS * turn) for turn in range(times) for slot in READ]
    stored = [(slot if slot < 0 else slot + SLOTS * turn) for turn in range(times) for slot in KEEP]
    told = [of.start for of in owing], [of.stop - of.start for of in owing], stored, places
    out = torch.full((total, heads, dv), torch.nan, dtype=LOW, device=device)
    if host is not None:
        host.read, host.awaited = (tokens, data, *kept), tokens  # what tokens bring is there once it has waited
    short = ShortRows(*map(numbers, (starts, counts, by_row, [-1] * rows)))
    assert advance(brought, out, states, short, layer, kept, Owed(*map(numbers, told)))
    assert out[sum(counts) :].isnan().all()
    for row in range(0, rows, 1 if times == 1 else 7):
        of, own = owing[row], slice(starts[row], starts[row] + counts[row])
        recorded, end = slice(places[row], places[row] + counts[row]), (row + 1) * STRETCH
        assert all(tensor[of.stop : recorded.start].isnan().all() for tensor in kept)
        assert all(tensor[recorded.stop : end].isnan().all() for tensor in kept)
        if not counts[row]:
            continue
        assert torch.equal(kept[0][recorded], brought.k[own])
        for head in {0, heads // 2, heads - 1}:
            some = was[0][of, head // group].double(), was[1][of, head].double(), was[2][of, head].double()
            old = before[by_row[row], 1, head] if by_row[row] >= 0 else torch.zeros_like(before[0, 1, head])
            after = advanced(old, some)
            theirs = Brought(*(tensor[own].double() for tensor in brought))
            answer, decays, changes = answered(after, theirs, head, group, layer)
            assert error(out[own, head], answer) < 8e-3
            assert error(kept[1][recorded, head], decays) < 2e-6
            assert error(kept[2][recorded, head], changes) < 4e-6
            if stored[row] >= 0:
                assert error(states[stored[row], head], after) < 2e-6
    others = [slot for slot in range(len(data)) if slot not in stored]
    assert torch.equal(data[others].double(), before[others])  # nothing else was touched
    assert torch.equal(data[:, [0, 2]].double(), before[:, [0, 2]])


@on_hopper
@pytest.mark.parametrize(("dk", "dv", "heads", "group"), [(128, 128, 32, 2), (64, 96, 5, 1), (192, 32, 6, 3)])
@pytest.mark.parametrize("each", [1, 2, 3, 5, 8, 9])
@pytest.mark.parametrize("times", [1, 40])  # so many rows that blocks have several, too
def test_rows(dk, dv, heads, group, each, times):
    expect_advanced(dk, dv, heads, group, each, times, LOW, "cuda")


@needs_compiler
@pytest.mark.parametrize(
    ("dk", "dv", "heads", "group", "each", "weight"),
    [(128, 128, 2, 2, 1, LOW), (64, 96, 3, 1, 5, torch.float32), (192, 32, 2, 1, 9, LOW)],
)
def test_rows_on_the_host(dk, dv, heads, group, each, weight, tmp_path):
    """In several orders of its threads; copies come at once, or as late as they may."""
    host = Host(tmp_path)
    with host.stands_in(_kernel, processors=2):
        for host.seed in range(6):
            host.late = host.seed % 2 > 0
            expect_advanced(dk, dv, heads, group, each, 1, weight, host=host)
    assert host.launches == 6


@pytest.mark.parametrize(("heads", "blocks"), [(1, 1), (396, 396), (397, 199), (512, 256), (1584, 396), (2048, 396)])
def test_blocks(heads, blocks):
    assert _blocks(heads, 396) == blocks


SHAPE = (32, 2, 128, 128, 5, 1e-6, "bf16")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs CUDA's compiler")
@pytest.mark.parametrize("each", [1, 5])
def test_it_compiles_and_spills_nothing(each, tmp_path):
    (tmp_path / "late.cu").write_text(Shape(*SHAPE)._replace(each=each).source)
    target = ["-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-ftz=true", "-Xptxas", "-v", "-cubin"]
    command = ["nvcc", *target, "-o", tmp_path / "late.cubin", tmp_path / "late.cu"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    assert " 0 bytes spill stores" in told and " 0 bytes spill loads" in told, told


@pytest.mark.parametrize(
    "other",
    [
        lambda of, states, layer: (of._replace(a=of.a.float()), states, layer),
        lambda of, states, layer: (of._replace(v=of.v.float()), states, layer),
        lambda of, states, layer: (of, states.double(), layer),
        lambda of, states, layer: (of, states[:, :, :96], layer),
        lambda of, states, layer: (of, states, replace(layer, norm=layer.norm.half())),
        lambda of, states, layer: (of._replace(z=of.z[:, 1:]), states, layer),
    ],
)
def test_others_are_left_to_triton(other, monkeypatch):
    """Types, sizes and places that it is not made for."""
    monkeypatch.setattr("bough.ops.triton.late.able", lambda _: True)
    monkeypatch.setattr("bough.ops.triton.late._kernel", lambda *_: pytest.fail("it was made"))
    none, q = torch.zeros(1, dtype=torch.int32), torch.zeros(4, 2, 128, dtype=LOW)
    gates = torch.zeros(4, 4, dtype=LOW)
    brought = Brought(q, q, torch.zeros(4, 4, 128, dtype=LOW), torch.zeros(4, 4 * 128 + 8, dtype=LOW), gates, gates)
    layer = DeltaLayer(torch.zeros(4), torch.zeros(4), torch.zeros(128, dtype=LOW), 1e-6)
    given = brought, torch.zeros(2, 4, 128, 128), layer
    owed, rows = Owed(none, none, none, none), ShortRows(none, none, none, none)

    def asked(brought: Brought, states: Tensor, layer: DeltaLayer) -> bool:
        return advance(brought, torch.zeros_like(brought.v), states, rows, layer, (none, none, none), owed)

    assert not asked(*other(*given))
    with pytest.raises(pytest.fail.Exception, match="it was made"):
        asked(*given)
