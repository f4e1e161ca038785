"""Attention of rows of a few tokens against its reference, with whatever no token has written poisoned, and memory that
is handed out. Where there is no GPU the tests run in the interpreter, as those of test_triton.py.
"""

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from test_attention import Case, paged
from test_delta import close
from test_triton import DEVICE, HERE, LOW, kernels, plain_numbers
from test_triton_experts import poisoned_memory
from torch import Tensor

from bough import ops
from bough.ops import Pages, Rows
from bough.ops.spans import most_spans, programs

__all__ = ["plain_numbers"]  # a fixture that all tests here use

if HERE:
    twin = import_module("bough.ops.triton.attention")

ROWS = Rows((1, 3, 0, 8, 1, 2), (150, 0, 2, 77, 30, 260))


@pytest.fixture(autouse=True, params=[0, 64])
def rows_joined_apart(request, monkeypatch):
    monkeypatch.setattr("bough.ops.spans.APART", request.param)


WIDTHS = [(24, 40)] if DEVICE == "cpu" else [(24, 40), (64, 64), (192, 128), (256, 256), (512, 512)]


def stored(case: Case) -> tuple[Tensor, Pages]:
    q, k, v = case.tensors()
    pages = paged(case, k, v)
    wide = torch.cat([q, q], -1).to(DEVICE)[..., : case.k_dim]
    moved = {name: getattr(pages, name).to(DEVICE) for name in ("k", "v", "table", "write_page", "write_at")}
    return wide, replace(pages, **moved)


def gates(case: Case) -> Tensor:
    both = torch.randn(case.rows.total, case.heads, 2 * case.v_dim).to(DEVICE, case.dtype)
    return both[..., case.v_dim :]


def expected(case: Case, gate: Tensor | None) -> Tensor:
    q, k, v = case.tensors()
    return ops.attention(q, case.rows, explicit=(k, v), gate=None if gate is None else gate.cpu(), **case.options)


def compare(case: Case, pages: Pages, q: Tensor, gate: Tensor | None, rows: Rows | None = None) -> None:
    with poisoned_memory():
        ours = twin.attention(
            q, rows or case.rows, scale=case.scale, stored=pages, window=case.window, softcap=case.softcap, gate=gate
        )
    want = expected(case, None if gate is None else gate[: case.rows.total])
    close(ours[: case.rows.total].cpu(), want, 2e-5 if case.dtype == torch.float32 else 2e-2)
    assert twin.arrivals(q.device).count_nonzero() == 0, "the next launch starts from none"


def case_of(rows: Rows, group: int, k_dim: int, v_dim: int, **options) -> Case:
    return Case(rows, 2 * group, 2, k_dim, v_dim, scale=0.5 * k_dim**-0.5, **options)


@kernels
@pytest.mark.parametrize("page", [16, 32, 64])
@pytest.mark.parametrize(
    ("window", "softcap", "group", "processors", "dtype"),
    [
        (None, None, 1, 1, torch.float32),
        (7, None, 3, 8, torch.float32),
        (None, 5.0, 3, 8, torch.float32),
        (70, 3.0, 2, 2, LOW),
        (None, None, 4, 8, LOW),
    ],
)
@pytest.mark.parametrize(("k_dim", "v_dim"), WIDTHS)
def test_attention(monkeypatch, page, window, softcap, group, processors, dtype, k_dim, v_dim):
    monkeypatch.setattr("bough.ops.spans.processors", lambda device: processors)
    case = case_of(ROWS, group, k_dim, v_dim, page_tokens=page, window=window, softcap=softcap, dtype=dtype)
    q, pages = stored(case)
    gate = None if page == 64 else gates(case)
    compare(case, pages, q, gate)
    compare(case, replace(pages, spans=twin._divided(ROWS, pages.offset, window, 2, q.device)), q, gate)  # as captured


@kernels
@pytest.mark.parametrize("gated", [True, False])
def test_short_rows_beside_long_ones(monkeypatch, gated):
    monkeypatch.setattr("bough.ops.spans.processors", lambda device: 8)
    case = case_of(Rows((1, 20, 0, 2), (150, 30, 0, 77)), 2, 16, 24, page_tokens=16)
    q, pages = stored(case)
    compare(case, pages, q, gates(case) if gated else None)


@kernels
@pytest.mark.parametrize("joined", [64, 128, 1024])
def test_spans_are_joined_in_several_rounds(monkeypatch, joined):
    """Few parts at a time, of more than one block of queries."""
    monkeypatch.setattr("bough.ops.spans.processors", lambda device: 12)
    monkeypatch.setattr(twin, "JOINED", joined)
    monkeypatch.setattr(twin, "CARRIED", 2048)
    case = case_of(Rows((9, 1, 4), (500, 300, 70)), 3, 16, 24, page_tokens=32)
    q, pages = stored(case)
    compare(case, pages, q, gates(case))


@kernels
@pytest.mark.parametrize("rows", [Rows((5,), (700,)), Rows((1,), (639,)), Rows((1, 2), (0, 130))])
@pytest.mark.parametrize("window", [None, 100])
def test_keys_asked_for_before_queries_are_there(monkeypatch, rows, window):
    """Captured steps of few rows: spans of several tiles and of one, the last of which has the new tokens."""
    monkeypatch.setattr("bough.ops.spans.processors", lambda device: 12)
    case = case_of(rows, 3, 24, 40, page_tokens=32, window=window, dtype=LOW)
    q, pages = stored(case)
    spans = twin._divided(rows, pages.offset, window, 2, q.device)
    compare(case, replace(pages, spans=spans), q, gates(case))


@kernels
def test_rows_and_spans_that_are_not_there(monkeypatch):
    """As in a captured step: to the host all rows are there and of full length."""
    monkeypatch.setattr("bough.ops.spans.processors", lambda device: 8)
    case = case_of(Rows((2, 1, 5), (200, 0, 90)), 2, 16, 16, page_tokens=32)
    q, pages = stored(case)
    spans = twin._divided(case.rows, pages.offset, None, 2, q.device)
    room = most_spans(6, programs(q.device, 2, 6))
    missing = spans.row.new_full((room - len(spans.row),), -1)
    per_row = {name: torch.cat([each, each.new_zeros(3)]) for name, each in spans._asdict().items() if name != "row"}
    pages = replace(pages, offset=(0,) * 6, spans=type(spans)(**per_row, row=torch.cat([spans.row, missing])))
    more = 30 - case.rows.total
    q, gate = (torch.cat([each, each.new_full((more, *each.shape[1:]), torch.nan)]) for each in (q, gates(case)))
    compare(case, pages, q, gate, Rows((5,) * 6, (1,) * 6))
