"""What keys and queries see of states, by the kernel in CUDA C++: against float64, on a Hopper and on the host."""

import shutil
import subprocess

import pytest
import torch
from on_host import Host, needs_compiler
from test_triton import INSTALLED
from test_triton_wide import HOPPER, error, on_hopper
from torch import Tensor

from bough.ops.ragged import OWED, Owed, ShortRows

pytestmark = pytest.mark.skipif(not INSTALLED, reason="triton is not installed")

if INSTALLED:
    from bough.ops.triton.look import _kernel, look, source

SLOTS, LAYERS = 12, 3
COUNTS = (5, 0, 9, 1, 3, 2, 5, 4)  # up to as many as there is room for
OWED_TOKENS = (0, 3, 16, 1, 8, 9, 5, 10)
READ = (2, -1, 5, 0, -1, 7, 9, 1)  # the last but three has no state yet
KEEP = (-1, -1, 5, 3, 4, -1, 9, -1)


def expected(s: Tensor, owed: tuple[Tensor, ...], asked: Tensor) -> tuple[Tensor, Tensor]:
    """A state [dk, dv] after what is owed, and what is seen of it."""
    for key, decay, change in zip(*owed, strict=True):
        s = s * decay.exp() + key[:, None] * change[None, :]
    return s, asked @ s


def expect_seen(dk: int, dv: int, heads: int, group: int, each: int, times: int, device: str = "cpu", host=None):
    """Rows of all sorts, so many times."""

    def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    def numbers(values) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    counts = [min(count, each) for count in COUNTS] * times
    rows, starts = len(counts), [sum(counts[:row]) for row in range(len(counts))]
    qk = drawn(max(1, sum(counts)), 2, heads // group, dk, dtype=torch.bfloat16)
    q, k = qk[:, 0], qk[:, 1]
    data = drawn(SLOTS * times, LAYERS, heads, dk, dv)
    states, before = data[:, 1], data.double()
    kept = (
        drawn(rows * OWED, heads // group, dk, dtype=torch.bfloat16), -drawn(rows * OWED, heads).abs() / 4,
        drawn(rows * OWED, heads, dv),
    )  # fmt: skip
    by_row = [(slot if slot < 0 else slot + SLOTS * turn) for turn in range(times) for slot in READ]
    stored = [(slot if slot < 0 else slot + SLOTS * turn) for turn in range(times) for slot in KEEP]
    owed = Owed(*map(numbers, ([row * OWED for row in range(rows)], OWED_TOKENS * times, stored, [0] * rows)))
    seen = torch.full((rows, heads, 1, 2 * each, dv), torch.nan, device=device)
    if host is not None:
        host.read = qk, data, *kept
    assert look(q, k, seen, states, ShortRows(*map(numbers, (starts, counts, by_row, [-1] * rows))), kept, owed)
    for row in range(0, rows, 1 if times == 1 else 7):
        tokens, start, count = OWED_TOKENS[row % len(COUNTS)], starts[row], counts[row]
        if not count:
            assert seen[row].isnan().all()
            continue
        for head in {0, heads // 2, heads - 1}:
            of = slice(row * OWED, row * OWED + tokens)
            some = kept[0][of, head // group].double(), kept[1][of, head].double(), kept[2][of, head].double()
            asked = [each[start : start + count, head // group].double() for each in (k, q)]
            old = before[by_row[row], 1, head] if by_row[row] >= 0 else torch.zeros_like(before[0, 1, head])
            after, want = expected(old, some, torch.cat(asked))
            got = torch.cat([seen[row, head, 0, :count], seen[row, head, 0, each : each + count]])
            assert (not len(some[0]) and by_row[row] < 0) or error(got, want) < 2e-6
            if stored[row] >= 0:
                assert error(states[stored[row], head], after) < 2e-6
    others = [slot for slot in range(len(data)) if slot not in stored]
    assert torch.equal(data[others].double(), before[others])  # nothing else was touched
    assert torch.equal(data[:, [0, 2]].double(), before[:, [0, 2]])


@on_hopper
@pytest.mark.parametrize(("dk", "dv", "heads", "group"), [(128, 128, 32, 2), (64, 96, 5, 1), (192, 32, 6, 3)])
@pytest.mark.parametrize("each", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("times", [1, 40])  # so many rows that blocks have several, too
def test_what_is_seen(dk, dv, heads, group, each, times):
    expect_seen(dk, dv, heads, group, each, times, "cuda")


@needs_compiler
@pytest.mark.parametrize(
    ("dk", "dv", "heads", "group", "each"), [(128, 128, 2, 2, 1), (64, 96, 3, 1, 5), (192, 32, 2, 1, 9)]
)
def test_what_is_seen_on_the_host(dk, dv, heads, group, each, tmp_path):
    """In several orders of its threads; copies come at once, or as late as they may."""
    host = Host(tmp_path)
    with host.stands_in(_kernel, processors=2):
        for host.seed in range(6):
            host.late = host.seed % 2 > 0
            expect_seen(dk, dv, heads, group, each, 1, host=host)
    assert host.launches == 6


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs CUDA's compiler")
@pytest.mark.parametrize("each", [1, 5])
def test_it_compiles_and_spills_nothing(each, tmp_path):
    (tmp_path / "look.cu").write_text(source(32, 2, 128, 128, each))
    target = ["-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-Xptxas", "-v", "-cubin"]
    command = ["nvcc", *target, "-o", tmp_path / "look.cubin", tmp_path / "look.cu"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    assert " 0 bytes spill stores" in told and " 0 bytes spill loads" in told, told


@pytest.mark.skipif(HOPPER, reason="is for other devices")
def test_others_are_left_to_triton():
    q, seen, none = torch.zeros(4, 2, 128, dtype=torch.bfloat16), torch.zeros(1, 4, 1, 8, 128), torch.zeros(1)
    rows, owed = ShortRows(none, none, none, none), Owed(none, none, none, none)
    assert not look(q, q, seen, torch.zeros(2, 4, 128, 128), rows, (none, none, none), owed)
