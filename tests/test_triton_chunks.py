"""A long row whose chunks are worked off in segments; test_triton.py runs this in the interpreter where there is no
GPU.
"""

import pytest
from test_delta import Case, close
from test_triton import HERE, kernels, on_device, plain_numbers, pool

from bough import ops
from bough.ops import Rows, Slots

__all__ = ["plain_numbers"]  # a fixture that all tests here use

if HERE:
    from bough.ops import triton as twin
    from bough.ops.triton import chunks


@kernels
@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize(
    ("history", "cuts", "write"),
    [(1, (), 2), (0, (32, 70, 150), 2), (1, (64, 96, 149), 1)],  # the last in place
)
def test_segments_change_nothing(monkeypatch, step, history, cuts, write):
    monkeypatch.setattr(chunks, "SEGMENT", step)
    rows = Rows((150,), (history,), (cuts,))
    case = on_device(Case.of(rows, k_heads=1, k_dim=16, v_dim=20))
    data = pool(8, 2, 16, 20)
    expected, slots = data.clone(), ((1,), (write,), (tuple(range(4, 4 + len(cuts))),))
    want = ops.gated_delta(*case.inputs, rows, stored=Slots(expected, *slots))
    ours = twin.gated_delta(*case.inputs, rows, stored=Slots(data, *slots))
    close(ours.out, want.out)
    close(data, expected)


@kernels
def test_several_rows_are_one_segment(monkeypatch):
    monkeypatch.setattr(chunks, "SEGMENT", 1)
    rows = Rows((40, 70), (1, 0), ((), (33,)))
    case = on_device(Case.of(rows, k_heads=1, k_dim=16, v_dim=16))
    data = pool(6, 2, 16, 16)
    expected, slots = data.clone(), ((1, 2), (1, 3), ((), (4,)))
    want = ops.gated_delta(*case.inputs, rows, stored=Slots(expected, *slots))
    ours = twin.gated_delta(*case.inputs, rows, stored=Slots(data, *slots))
    close(ours.out, want.out)
    close(data, expected)
