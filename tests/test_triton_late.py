"""The gated delta rule where slots lag behind, in CUDA C++: against float64, on a Hopper and on the host."""

import shutil
import subprocess
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from on_host import Host, needs_compiler
from test_triton import INSTALLED
from test_triton_wide import on_hopper
from torch import Tensor
from torch.nn.functional import silu, softplus

from bough.ops import DeltaLayer
from bough.ops.ragged import STRETCH, Owed, ShortRows

pytestmark = pytest.mark.skipif(not INSTALLED, reason="triton is not installed")

if INSTALLED:
    from bough.ops.triton.late import Brought, Shape, _blocks, _kernel, advance
    from bough.ops.triton.native import Box, map_of

LOW = torch.bfloat16
LAYERS, HALF = 3, STRETCH // 2


def is_near(out: Tensor, exact: Tensor, most: float) -> bool:
    """By norm; what is no number is far."""
    return bool((out.double() - exact).norm() <= most * exact.norm())


class Row(NamedTuple):
    count: int  # tokens of this step
    owed: int
    start: int  # where in its stretch of the journal it owes from
    record: int
    read: int  # slots; below 0: none
    keep: int


def drawn_rows(draw: Random, rows: int, each: int) -> list[Row]:
    """Rows of all sorts: not there, with slots of others, stored in place or elsewhere, owing from either half."""
    reads = [draw.choice((-1, row, row, draw.randrange(rows))) for row in range(rows)]
    made = []
    for row, read in enumerate(reads):
        count = draw.choice((0, 1, each, draw.randint(1, each)))
        owed, start = draw.choice((0, 1, 7, 8, 9, HALF, draw.randint(0, HALF))), draw.choice((0, HALF))
        behind = owed + count <= HALF and draw.random() < 0.5
        own = read if reads.count(read) == 1 else rows + row
        made.append(
            Row(count, owed, start, start + owed if behind else HALF - start, read, draw.choice((-1, own, rows + row)))
        )
    return made


def advanced(s: Tensor, owed: tuple[Tensor, ...]) -> Tensor:
    """A state [dk, dv] after what is owed."""
    for key, decay, change in zip(*owed, strict=True):
        s = s * decay.exp() + key[:, None] * change[None, :]
    return s


def answered(s: Tensor, of: "Brought", head: int, group: int, layer: DeltaLayer) -> tuple[Tensor, Tensor, Tensor]:
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
    dk: int, dv: int, heads: int, group: int, each: int, count: int, weight: torch.dtype, device: str = "cpu", host=None
) -> None:
    """So many rows. States and keys are small in some, and large in others; of some heads states decay at once. What is
    nobody's is no number."""

    def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    def numbers(values) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    draw = Random(torch.initial_seed() + 100 * each + count + (host.seed if host is not None else 0))
    rows, k_heads = drawn_rows(draw, count, each), heads // group
    starts, total = [sum(row.count for row in rows[:at]) for at in range(count)], sum(row.count for row in rows)
    widths = k_heads * dk, k_heads * dk, heads * dv, heads * dv, heads
    tokens = drawn(count * each, sum(widths) + -sum(widths) % 8, dtype=LOW)
    q, k, v, z, a = tokens[:, : sum(widths)].split(widths, 1)
    for row, start in zip(rows, starts, strict=True):
        tokens[start : start + row.count, : 2 * k_heads * dk] *= draw.choice((1e-3, 1, 30))
    # Of these no step is rounded up by one and down by another.
    b = (torch.randint(-8, 9, (count * each, 2 * heads + 1), device=device) / 4).to(LOW)[:, 1 : heads + 1]
    tokens[total:] = torch.nan
    brought = Brought(*(each.unflatten(1, (-1, width)) for each, width in ((q, dk), (k, dk), (v, dv))), z, a, b)
    rate = -(0.1 + drawn(heads).abs()) * torch.tensor([draw.choice((1e-3, 1, 50)) for _ in range(heads)], device=device)
    layer = DeltaLayer(rate, drawn(heads), drawn(dv, dtype=weight), 1e-6)
    data = drawn(2 * count, LAYERS, heads, dk, dv)
    for slot in range(count):
        data[slot] *= draw.choice((1e-8, 1, 1, 1e6))
    data[[slot for slot in range(2 * count) if slot not in {row.read for row in rows}]] = torch.nan
    states, before = data[:, 1], data.clone()
    room = count * STRETCH
    kept = drawn(room, k_heads, dk, dtype=LOW), -drawn(room, heads).abs() / 4, drawn(room, heads, dv)
    kept[1][:, heads // 2 :] *= draw.choice((1, 100))
    owing = [slice(at * STRETCH + row.start, at * STRETCH + row.start + row.owed) for at, row in enumerate(rows)]
    recorded = [slice(at * STRETCH + row.record, at * STRETCH + row.record + row.count) for at, row in enumerate(rows)]
    was = [tensor.clone() for tensor in kept]
    nobodys = set(range(room)) - {at for of in owing for at in range(of.start, of.stop)}
    for tensor in kept:
        tensor[sorted(nobodys)] = torch.nan
    owed = (
        (of.start for of in owing),
        (row.owed for row in rows),
        (row.keep for row in rows),
        (of.start for of in recorded),
    )
    out = torch.full((count * each, heads, dv), torch.nan, dtype=LOW, device=device)
    if host is not None:
        host.read, host.awaited = (tokens, b, data, *kept), tokens  # what tokens bring is there once it has waited
    short = starts, (row.count for row in rows), (row.read for row in rows), [-1] * count
    given = ShortRows(*map(numbers, short)), layer, kept, Owed(*map(numbers, owed))
    assert advance(brought, out, states, *given)
    assert out[total:].isnan().all()
    nobodys -= {at for of in recorded for at in range(of.start, of.stop)}
    assert all(tensor[sorted(nobodys)].isnan().all() for tensor in kept)
    for at in range(0, count, 1 if count < 30 else 7):
        row, of, to, own = rows[at], owing[at], recorded[at], slice(starts[at], starts[at] + rows[at].count)
        if not row.count:
            continue
        assert torch.equal(kept[0][to], brought.k[own])
        for head in {0, heads // 2, heads - 1}:
            some = was[0][of, head // group].double(), was[1][of, head].double(), was[2][of, head].double()
            old = before[row.read, 1, head].double() if row.read >= 0 else torch.zeros(dk, dv, device=device).double()
            after = advanced(old, some)
            theirs = Brought(*(tensor[own].double() for tensor in brought))
            answer, decays, changes = answered(after, theirs, head, group, layer)
            assert is_near(out[own, head], answer, 1e-2)
            assert is_near(kept[1][to, head], decays, 2e-6)
            assert is_near(kept[2][to, head], changes, 4e-6)
            if row.keep >= 0:
                assert is_near(states[row.keep, head], after, 2e-6)
    others = [slot for slot in range(2 * count) if slot not in {row.keep for row in rows if row.count}]
    assert torch.equal(data[others].view(torch.int32), before[others].view(torch.int32))  # nothing else was touched
    assert torch.equal(data[:, [0, 2]].view(torch.int32), before[:, [0, 2]].view(torch.int32))


@on_hopper
@pytest.mark.parametrize(("dk", "dv", "heads", "group"), [(128, 128, 32, 2), (64, 96, 5, 1), (192, 32, 6, 3)])
@pytest.mark.parametrize("each", [1, 2, 3, 5, 8, 9])
@pytest.mark.parametrize("count", [7, 320])  # so many rows that blocks have several, too
def test_rows(dk, dv, heads, group, each, count):
    expect_advanced(dk, dv, heads, group, each, count, LOW, "cuda")


@needs_compiler
@pytest.mark.parametrize(
    ("dk", "dv", "heads", "group", "each", "weight"),
    [(128, 128, 2, 2, 1, LOW), (64, 96, 3, 1, 5, torch.float32), (192, 32, 2, 1, 9, LOW), (128, 64, 3, 3, 8, LOW)],
)
def test_rows_on_the_host(dk, dv, heads, group, each, weight, tmp_path):
    """In several orders of its threads; copies come at once, or as late as they may."""
    host = Host(tmp_path)
    with host.stands_in(_kernel, processors=2):
        for host.seed in range(6):
            host.late = host.seed % 2 > 0
            expect_advanced(dk, dv, heads, group, each, 8, weight, host=host)
    assert host.launches == 6


SHAPE = (32, 2, 128, 128, 5, 1e-6, "bf16")


def test_copies_that_the_driver_does_not_take(monkeypatch, caplog):
    refuses = SimpleNamespace(cuTensorMapEncodeTiled=lambda *_: 1)
    monkeypatch.setattr("bough.ops.triton.native.cuda", lambda: refuses)
    assert map_of(Box(1024, (64, 2), (128,), (64, 2)), LOW) is None
    map_of.cache_clear()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "steps take longer" in said


@pytest.mark.parametrize(("each", "blocks"), [(1, 3), (5, 3), (8, 3), (9, 2)])
def test_blocks_of_a_processor(each, blocks):
    assert Shape(*SHAPE)._replace(each=each).blocks == blocks


@pytest.mark.parametrize(("heads", "blocks"), [(1, 1), (396, 396), (397, 199), (512, 256), (1584, 396), (2048, 396)])
def test_blocks(heads, blocks):
    assert _blocks(heads, 396) == blocks


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
        lambda of, states, layer: (of._replace(v=torch.zeros(4, 4, 129, dtype=LOW)[..., 1:]), states, layer),
        lambda of, states, layer: (of, torch.zeros(2, 4 * 128 * 128 + 2)[:, 2:].unflatten(1, (4, 128, 128)), layer),
        lambda of, states, layer: (of, torch.zeros(2, 4, 128, 160), layer),
        lambda of, states, layer: (of, torch.zeros(2, 4, 128, 80), layer),
        lambda of, states, layer: (of, states, replace(layer, rate=layer.rate.double())),
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
    with monkeypatch.context() as patch:  # where the driver does not take the copies
        patch.setattr("bough.ops.triton.late._kernel", lambda *_: object())
        patch.setattr("bough.ops.triton.late.map_of", lambda *_: None)
        assert not asked(*given)
