"""Attention of long rows against its reference, with what is not to be touched poisoned. Where there is no GPU the
tests run in the interpreter, as those of test_triton.py.
"""

import pytest
import torch
from test_triton import DEVICE, HERE, LOW, kernels, plain_numbers, pool
from torch import Tensor

from bough import ops
from bough.ops import Pages, Rows

__all__ = ["plain_numbers"]  # a fixture that all tests here use

if HERE:
    from bough.ops.triton import library, prefill


PAGE = 8
ROWS = Rows((3, 29, 0, 12, 41), (9, 50, 4, 0, 7))
LONG = (1, 3, 4)


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that is handed out holds NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def filled(rows: Rows, window: int | None, heads: int, k_dim: int, v_dim: int, dtype: torch.dtype) -> Pages:
    """Pages in any order, only those in reach, and NaN wherever no token of the rows is."""
    first = [0 if window is None else max(0, history - window + 1) // PAGE for history in rows.history]
    last = [-(-(history + count) // PAGE) for history, count in zip(rows.history, rows.counts, strict=True)]
    used = [end - start for start, end in zip(first, last, strict=True)]
    table = torch.randperm(sum(used) + 3, dtype=torch.int32)[: sum(used)]
    offset = tuple(sum(used[:row]) - start for row, start in enumerate(first))
    k, v = (pool(sum(used) + 3, PAGE, heads, width, dtype=dtype) for width in (k_dim, v_dim))
    for row, end in enumerate(last):
        spare = end * PAGE - rows.history[row] - rows.counts[row]
        for each in (k, v):
            each[int(table[offset[row] + end - 1]), PAGE - spare :] = torch.nan
    nowhere = torch.empty(0, dtype=torch.int32)
    return Pages(k, v, table.to(DEVICE), offset, nowhere, nowhere)


def expected(q: Tensor, rows: Rows, pages: Pages, window: int | None, softcap: float | None, scale: float) -> Tensor:
    """In float64, over explicit keys."""
    keys = ([], [])
    for row, (history, count) in enumerate(zip(rows.history, rows.counts, strict=True)):
        low = 0 if window is None else max(0, history - window + 1)
        for each, found in zip(keys, pages.span(row, low, history + count), strict=True):
            each += [found.new_zeros(low, *found.shape[1:]), found]
    explicit = tuple(torch.cat(each).double().cpu() for each in keys)
    options = {"scale": scale, "window": window, "softcap": softcap}
    return ops.attention(q.double().cpu(), rows, explicit=explicit, **options)


@kernels
@pytest.mark.parametrize(
    ("window", "softcap", "group", "dtype", "processors"),
    [
        (None, None, 1, torch.float32, 1),
        (None, None, 3, torch.float32, 64),
        (1, None, 2, torch.float32, 1),
        (11, None, 2, torch.float32, 1),
        (40, 3.0, 5, torch.float32, 64),
        (200, 5.0, 2, torch.float32, 8),
        (None, None, 18, torch.float32, 1),
        (None, None, 4, LOW, 1),
        (23, 3.0, 4, LOW, 64),
    ],
)
@pytest.mark.parametrize(("k_dim", "v_dim"), [(24, 40)] if DEVICE == "cpu" else [(64, 64), (96, 80), (192, 128)])
def test_long_rows_over_pages(monkeypatch, window, softcap, group, dtype, processors, k_dim, v_dim):
    monkeypatch.setattr(prefill, "processors", lambda device: processors)
    prefill._work.cache_clear()
    pages = filled(ROWS, window, 2, k_dim, v_dim, dtype)
    q = torch.randn(ROWS.total, 2 * group, 2 * k_dim).to(DEVICE, dtype)[..., :k_dim]
    out = torch.full((ROWS.total, 2 * group, v_dim), 7.0).to(DEVICE, dtype)
    options = {"scale": k_dim**-0.5, "window": window, "softcap": softcap}
    prefill.over_pages(q, ROWS, pages, LONG, out, prefill.Tile(32, 16, 4, 2), **options)
    want = expected(q, ROWS, pages, **options)
    for row, start, end in ROWS:
        ours, theirs = out[start:end].cpu().double(), want[start:end] if row in LONG else torch.tensor(7.0)
        assert (ours - theirs).abs().max() < (2e-5 if dtype == torch.float32 else 1e-2), row


@kernels
def test_keys_are_shared_out_where_blocks_are_few(monkeypatch):
    monkeypatch.setattr(prefill, "processors", lambda device: 8)
    prefill._work.cache_clear()
    device = torch.device(DEVICE)
    work, joins, slots = prefill._work(Rows((10,), (90,)), (5,), (0,), None, 16, 16, 1, device)
    assert slots == len(work.token) == 7 and joins.parts.tolist() == [7] and work.pages.tolist() == [5] * 7
    assert sorted(zip(work.begin.tolist(), work.end.tolist(), strict=True))[-2:] == [(80, 96), (96, 100)]
    work, joins, slots = prefill._work(Rows((256,), (0,)), (0,), (0,), None, 16, 16, 1, device)
    assert slots == len(joins.token) == 0 and work.end.tolist() == list(range(256, 0, -16))


def seen(q, k, v, scale, causal):
    """Each query over all keys, or those up to its own place from the end: [n, H, d], and the log of its weight."""
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    scores = torch.einsum("nhd,shd->hns", q.double(), k.double()) * scale
    if causal:
        scores += torch.full(scores.shape[1:], -torch.inf, device=q.device).triu(1 + len(k) - len(q))
    return torch.einsum("hns,shd->nhd", scores.softmax(-1), v.double()), scores.logsumexp(-1)


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
def test_each_row_takes_one_way_or_the_other(monkeypatch, dtype):
    def by_library(q, k, v, out, scale):
        out.copy_(seen(q, k, v, scale, True)[0])

    monkeypatch.setattr(prefill, "is_served", lambda q, rows, stored, row, window, softcap: row == 3 or row == 4)
    monkeypatch.setattr(prefill, "by_library", by_library)
    pages = filled(ROWS, None, 2, 16, 16, dtype)
    q = torch.randn(ROWS.total, 6, 16).to(DEVICE, dtype)
    out = torch.full_like(q, 7.0)
    prefill.attention_long(q, ROWS, pages, LONG, out, scale=0.25)
    want = expected(q, ROWS, pages, None, None, 0.25)
    for row, start, end in ROWS:
        ours, theirs = out[start:end].cpu().double(), want[start:end] if row in LONG else torch.tensor(7.0)
        assert (ours - theirs).abs().max() < (2e-5 if dtype == torch.float32 else 1e-2), row


@kernels
@pytest.mark.parametrize("history", [0, 8, 40])
def test_blocks_are_joined_by_what_they_weigh(monkeypatch, history):
    """The library's part is computed here as it is defined, unless there is a device that has the library."""

    def part(q, k, v, scale, *, causal):
        out, log = seen(q, k, v, scale, causal)
        return out.float(), log.float()

    monkeypatch.setattr(library, "BLOCK", 8)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    if DEVICE == "cpu":
        monkeypatch.setattr(library, "_part", part)
    q = torch.randn(24, 4, 64).to(DEVICE, dtype)
    k, v = (torch.randn(24 + history, 2, 64).to(DEVICE, dtype) for _ in range(2))
    ours = torch.empty_like(q)
    library.by_library(q, k, v, ours, 0.125)
    want = seen(q, k, v, 0.125, True)[0]
    assert (ours.double() - want).abs().max() < (1e-5 if DEVICE == "cpu" else 2e-2)


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_the_mean_of_parts(dtype, parts):
    """Also of such that weigh all or nothing, and wherever they and the mean are."""
    said = torch.randn(parts, 3, 9, 2 * 20).to(DEVICE, dtype)[..., :20].transpose(1, 2)  # [parts, n, H, d]
    log = torch.randn(parts, 3, 9).to(DEVICE) * torch.tensor([1.0, 30.0, 2000.0]).to(DEVICE)[:, None]
    out, total = torch.full((9, 5, 24), 7.0).to(DEVICE, dtype), torch.empty(3, 9, device=DEVICE)
    library._joined(list(zip(said, log, strict=True)), out[:, 1:4, 2:22], total)
    weight = log.double().softmax(0).transpose(1, 2)[..., None]
    close = {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-3}
    torch.testing.assert_close(out[:, 1:4, 2:22].double(), (weight * said.double()).sum(0), **close)
    torch.testing.assert_close(total.double(), log.double().logsumexp(0), rtol=1e-6, atol=1e-5)
    out[:, 1:4, 2:22] = 7
    assert (out == 7).all()


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
def test_keys_are_gathered_as_spans_are(monkeypatch, dtype):
    monkeypatch.setattr(library, "TILE", 128)
    pages = filled(ROWS, None, 3, 20, 20, dtype)
    for row, keys in ((1, 79), (3, 12), (4, 48), (2, 1)):
        for ours, want in zip(library.gathered(pages, row, keys), pages.span(row, 0, keys), strict=True):
            assert torch.equal(ours, want)
