"""Kernels that first move slots on by what rows owe, and record, against the readable ops in two steps."""

import pytest
import torch
from test_delta import close
from test_triton import DEVICE, HERE, LOW, kernels, plain_numbers, pool  # noqa: F401 (a fixture)
from torch import Tensor

from bough import ops
from bough.ops import Rows, Slots
from bough.ops.ragged import Owed, Recording, ReplayedRow, ShortRows

if HERE:
    from bough.ops import triton as twin

EACH, MOST = 5, 80
COUNTS, OWED = (5, 2, 9, 1, 0), (4, 0, 16, 2, 0)  # the last row is not there
STARTS, OWED_STARTS = (0, 5, 7, 16, 0), (3, 0, 40, 60, 0)
RECORDS = (33, 0, 64, 16, 0)
READ, WRITE = (2, 4, 1, 3, -1), (-1, -1, -1, 3, -1)  # the row before it is not recorded, and goes on in place
KEEP, LATE_KEEP = (2, -1, 1, -1, -1), (2, -1, -1, 5, -1)  # of late parts one is left behind, and one goes elsewhere
ROWS, FULL = Rows(COUNTS[:4], (1,) * 4), Rows((EACH,) * 5, (1,) * 5)
TOTAL = sum(COUNTS)


def numbers(values: tuple[int, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def slots(data: Tensor, recording: Recording) -> Slots:
    short = ShortRows(*map(numbers, (STARTS, COUNTS, READ, WRITE)))
    owed = Owed(*map(numbers, (OWED_STARTS, OWED, LATE_KEEP if recording.late else KEEP, RECORDS)))
    return Slots(data, (0,) * 5, (0,) * 5, recorded=(True,) * 5, recording=recording, short=short, owed=owed)


def settled(data: Tensor, replay, recorded: tuple[Tensor, ...]) -> tuple[Tensor, Slots, Recording]:
    """Slots that have been moved on, twice: to be left, and for the tokens that follow, with room for their states."""
    data = data.cpu().clone()
    owing = [ReplayedRow(*each) for each in zip(READ, OWED_STARTS, OWED, strict=True) if each[2]]
    replay([(data, tuple(each.cpu() for each in recorded))], owing)
    recording, scratch = Recording(), torch.cat([data, data[:4]])
    write = (*range(len(data), len(data) + 3), 3)
    return data, Slots(scratch, READ[:4], write, recorded=(True,) * 4, recording=recording), recording


def journal(*inputs: tuple[Tensor, Tensor], late: bool = False) -> Recording:
    """Room for inputs like these, with what is owed in it, and nothing elsewhere."""
    recording = Recording(most=MOST, late=late)
    for room, (_, owed) in zip(recording.room(*((x, o.dtype) for x, o in inputs)), inputs, strict=True):
        room.fill_(torch.nan)
        for start, count in zip(OWED_STARTS, OWED, strict=True):
            room[start : start + count] = owed[start : start + count]
    return recording


def expect_recorded(recording: Recording, before: Recording, theirs: Recording, tolerance: float) -> None:
    """Their inputs, row by row, each at its place; and else what was there before."""
    for ours, old, inputs in zip(recording.inputs, before.inputs, theirs.inputs, strict=True):
        want = old.cpu().clone()
        for start, count, place in zip(STARTS, COUNTS, RECORDS, strict=True):
            want[place : place + count] = inputs[start : start + count]
        torch.testing.assert_close(ours.cpu(), want, rtol=tolerance, atol=tolerance, equal_nan=True)


@kernels
@pytest.mark.parametrize(
    ("rate", "dtype", "dk", "dv", "apart"),
    [
        (0.5, torch.float32, 16, 24, False),
        (0.5, torch.float32, 40, 36, True),
        (30.0, torch.float32, 24, 16, False),
        (0.5, LOW, 40, 36, False),
        (30.0, LOW, 24, 16, True),
    ],
)
def test_delta(rate, dtype, dk, dv, apart, monkeypatch):
    """With decays of which a few leave next to nothing, too; a state is looked at by one program, or by several."""
    monkeypatch.setattr("bough.ops.triton.seen.BUSY", 1000 if apart else 0)
    full = Rows((max(COUNTS),) * 5, (1,) * 5)
    k_heads, heads = 2, 4
    keys, padded = k_heads * dk, full.total
    widths = (2 * keys + heads * dv, heads * dv, heads, heads)
    qkv, z, b, a = (torch.randn(padded, width).to(DEVICE, dtype) for width in widths)
    for each in (qkv, z, b, a):
        each[TOTAL:] = torch.nan
    layer = ops.DeltaLayer(
        *(each.to(DEVICE) for each in (-rate * torch.rand(heads), torch.randn(heads), torch.randn(dv).to(dtype))), 1e-6
    )
    q, k, v = (
        each.unflatten(1, (-1, width))
        for each, width in zip(qkv.split([keys, keys, heads * dv], 1), (dk, dk, dv), strict=True)
    )
    owed = torch.randn(MOST, k_heads, dk).to(DEVICE, dtype), -rate * torch.rand(MOST, heads).to(DEVICE)
    changes = torch.randn(MOST, heads, dv).to(DEVICE)
    made = ((k, owed[0]), (a, owed[1]), (v, changes))
    recording, before = journal(*made, late=True), journal(*made)
    data = pool(6, heads, dk, dv)
    moved, stored, theirs = settled(data, ops.replay_delta, (*owed, changes))
    expected = data.cpu().clone()
    expected[2], expected[5] = moved[2], moved[3]  # no other is touched
    ours = twin.gated_delta_layer(qkv, z, b, a, layer, k_heads, full, slots(data, recording))
    q, k, v, a, b, z = (each[:TOTAL].cpu() for each in (q, k, v, a, b, z))
    rule = ops.delta_gates(a, b, layer.rate.cpu(), layer.dt_bias.cpu())
    out = ops.gated_delta(q, k, v, *rule, ROWS, stored=stored).out
    want = ops.rms_norm_gated(out, z.view(out.shape), layer.norm.cpu(), layer.eps)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    close(ours[:TOTAL].cpu(), want, tolerance)
    close(data.cpu(), expected, 2e-5)
    expect_recorded(recording, before, theirs, 2e-5)


@kernels
@pytest.mark.parametrize(("kernel", "dtype"), [(4, torch.float32), (2, LOW)])
def test_conv_and_carry(kernel, dtype):
    channels = 139
    x = torch.randn(EACH * 5, channels + 9).to(DEVICE, dtype)[:, 8:-1]
    x[TOTAL:] = torch.nan
    taps, past = torch.randn(kernel, channels).to(DEVICE), torch.randn(MOST, channels).to(DEVICE, dtype)
    tails = pool(6, kernel - 1, channels, dtype=dtype)
    for carried in (False, True):
        data, recording, before = tails.clone(), journal((x, past)), journal((x, past))
        expected, stored, theirs = settled(data, ops.replay_conv, (past,))
        if carried:
            twin.carry(x, FULL, stored=slots(data, recording))
            ops.carry(x[:TOTAL].cpu(), ROWS, stored=stored)
        else:
            ours = twin.causal_conv(x, taps, FULL, stored=slots(data, recording), silu=True).out
            silu = torch.nn.functional.silu
            want = ops.causal_conv(x[:TOTAL].cpu(), taps.cpu(), ROWS, stored=stored, activation=silu).out
            close(ours[:TOTAL].cpu(), want, 2e-5 if dtype == torch.float32 else 1e-2)
        expected[3] = stored.data[3]
        assert torch.equal(data.cpu(), expected)
        expect_recorded(recording, before, theirs, 0)
