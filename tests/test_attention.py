"""Attention against a float64 oracle that asks, for every query and key, whether the one sees the other."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bough.ops import Mask, Pages, Rows, attention, gated, write_pages
from bough.ops.spans import FEW, SPAN, divided, most_spans

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Case:
    """One attention problem: each row's K and V, and what its new tokens ask of them."""

    rows: Rows
    heads: int = 4
    kv_heads: int = 2
    k_dim: int = 8
    v_dim: int = 8
    page_tokens: int = 4
    window: int | None = None
    softcap: float | None = None
    scale: float = 0.3
    masks: tuple[Mask | None, ...] | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, H, k_dim], and K and V of all rows, row after row."""
        generator = torch.Generator().manual_seed(self.seed)
        entries = self.rows.total + sum(self.rows.history)
        shapes = [(self.rows.total, self.heads), (entries, self.kv_heads), (entries, self.kv_heads)]
        dims = (self.k_dim, self.k_dim, self.v_dim)
        return tuple(  # type: ignore[return-value]
            torch.randn(*shape, dim, generator=generator).to(self.dtype) * 2
            for shape, dim in zip(shapes, dims, strict=True)
        )

    @property
    def options(self) -> dict:
        return {"scale": self.scale, "window": self.window, "softcap": self.softcap, "masks": self.masks}

    def sees(self, query: int, key: int, spans: tuple[tuple[int, int], ...]) -> bool:
        causal = key <= query
        together = any(start <= query < end and start <= key < end for start, end in spans)
        return (causal or together) and (self.window is None or key > query - self.window)


def oracle(case: Case) -> Tensor:
    """[T, H, v_dim] in float64, one query at a time."""
    q, k, v = (each.double() for each in case.tensors())
    outs, start, base = [], 0, 0
    for row, (count, history) in enumerate(zip(case.rows.counts, case.rows.history, strict=True)):
        mask = (case.masks and case.masks[row]) or Mask()
        for i in range(count):
            bias = torch.full((history + count,), -math.inf, dtype=torch.float64)
            for key in range(history + count):
                if case.sees(history + i, key, mask.spans):
                    bias[key] = 0
                    if mask.bias is not None:
                        given = mask.bias[i, 0 if mask.bias.shape[1] == 1 else key]
                        bias[key] = (0 if given else -math.inf) if given.dtype == torch.bool else given.double()
            for head in range(case.heads):
                own = head // (case.heads // case.kv_heads)
                scores = k[base : base + history + count, own] @ q[start + i, head] * case.scale
                if case.softcap is not None:
                    scores = case.softcap * torch.tanh(scores / case.softcap)
                weights = (scores + bias - bias.max().clamp(min=-1e9)).exp()
                weights = weights / weights.sum().clamp(min=1e-300)
                outs.append(weights @ v[base : base + history + count, own])
        start, base = start + count, base + history + count
    return torch.stack(outs).view(-1, case.heads, case.v_dim) if outs else q.new_empty(0, case.heads, case.v_dim)


def paged(case: Case, k: Tensor, v: Tensor) -> Pages:
    """The same K and V in pages as a pool keeps them: in any order, each inside a longer record, none before a window.

    Whatever holds no entry is NaN, so that reading it cannot go unnoticed. The new tokens are written by the op.
    """
    size = case.page_tokens
    spans = [
        (max(0, h - case.window + 1) // size if case.window else 0, -(-(h + n) // size))
        for h, n in zip(case.rows.history, case.rows.counts, strict=True)
    ]
    shuffled = torch.randperm(sum(end - first for first, end in spans), generator=torch.Generator().manual_seed(1)) + 1
    ids = iter(shuffled.tolist())
    tables = [[next(ids) for _ in range(first, end)] for first, end in spans]
    record = torch.full((len(shuffled) + 1, 3, size, case.kv_heads, max(case.k_dim, case.v_dim)), math.nan).to(k.dtype)
    page_k, page_v = record[:, 0, ..., : case.k_dim], record[:, 2, ..., : case.v_dim]
    starts = [sum(map(len, tables[:row])) for row in range(len(tables))]
    table = torch.tensor([page for pages in tables for page in pages], dtype=torch.int32)
    new, where, base = [], [], 0
    for row, (h, n) in enumerate(zip(case.rows.history, case.rows.counts, strict=True)):
        for token in range(h + n):
            number = token // size - spans[row][0]
            if token >= h:
                new.append(base + token)
                where.append((tables[row][number], token % size))
            elif number >= 0:
                page_k[tables[row][number], token % size] = k[base + token]
                page_v[tables[row][number], token % size] = v[base + token]
        base += h + n
    write_page, write_at = torch.tensor(where, dtype=torch.int32).view(-1, 2).unbind(1)
    offset = tuple(start - first for start, (first, _) in zip(starts, spans, strict=True))
    pages = Pages(page_k, page_v, table, offset, write_page, write_at)
    write_pages(k[new], v[new], pages)
    return pages


def check(case: Case) -> None:
    """Stored and explicit both agree with the oracle."""
    q, k, v = case.tensors()
    expected = oracle(case)
    for out in (
        attention(q, case.rows, explicit=(k, v), **case.options),
        attention(q, case.rows, stored=paged(case, k, v), **case.options),
    ):
        assert out.shape == expected.shape and out.dtype == case.dtype
        torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype])


MIXED = Rows(counts=(5, 0, 1, 3, 1), history=(0, 7, 9, 4, 0))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("softcap", [None, 2.5])
@pytest.mark.parametrize("window", [None, 1, 4, 6, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "k_dim", "v_dim"), [(4, 4, 8, 8), (6, 2, 16, 16), (3, 1, 5, 7)])
def test_shapes(heads, kv_heads, k_dim, v_dim, window, softcap, dtype):
    dims = {"heads": heads, "kv_heads": kv_heads, "k_dim": k_dim, "v_dim": v_dim}
    check(Case(MIXED, **dims, window=window, softcap=softcap, dtype=dtype))
    check(Case(Rows((11,), (0,)), **dims, window=window, softcap=softcap, dtype=dtype))
    check(Case(Rows((1,), (13,)), **dims, window=window, softcap=softcap, dtype=dtype))


def biases(rows: int, keys: int) -> st.SearchStrategy[Tensor]:
    def build(seed: int, kind: str, width: int) -> Tensor:
        values = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
        if kind == "float":
            return values
        allowed = values < 0.8  # some queries end up seeing nothing
        return allowed if kind == "bool" else torch.zeros(rows, width).masked_fill_(~allowed, -math.inf)

    return st.builds(build, st.integers(0, 9), st.sampled_from(["float", "bool", "inf"]), st.sampled_from([keys, 1]))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = draw(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), min_size=1, max_size=4))
    masks = []
    for count, history in lengths:
        point = st.integers(0, history + count + 2)
        spans = tuple(draw(st.lists(st.tuples(point, point), max_size=2)))
        bias = draw(st.none() | biases(count, history + count)) if count else None
        masks.append(Mask(bias, spans) if spans or bias is not None else None)
    kv_heads = draw(st.integers(1, 3))
    return Case(
        Rows(tuple(count for count, _ in lengths), tuple(history for _, history in lengths)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        k_dim=draw(st.integers(1, 9)),
        v_dim=draw(st.integers(1, 9)),
        page_tokens=draw(st.sampled_from([1, 3, 8])),
        window=draw(st.none() | st.integers(1, 12)),
        softcap=draw(st.none() | st.just(1.7)),
        scale=draw(st.sampled_from([0.25, 1.0])),
        masks=draw(st.sampled_from([tuple(masks), None])),
        seed=draw(st.integers(0, 3)),
    )


@settings(max_examples=150)
@given(cases())
def test_any_case(case):
    check(case)


@pytest.mark.long
@settings(max_examples=5000)
@given(cases())
def test_any_case_long(case):
    check(case)


@pytest.mark.parametrize("window", [None, 3, 8])
@pytest.mark.parametrize("page_tokens", [1, 3, 8])
def test_a_span_sees_itself_both_ways(window, page_tokens):
    """Whole in this forward, begun in the history, ended by it, or left behind; beside a row without one."""
    for span in [(6, 9), (3, 8), (0, 4), (7, 99), (5, 6)]:
        masks = (Mask(spans=(span,)), None, Mask(spans=((0, 2), (2, 4))))
        case = Case(Rows((5, 4, 4), (5, 3, 0)), page_tokens=page_tokens, window=window, masks=masks)
        check(case)
        q, k, v = case.tensors()
        plain = attention(q, case.rows, explicit=(k, v), **{**case.options, "masks": None})
        masked = attention(q, case.rows, explicit=(k, v), **case.options)
        changed = (plain != masked).flatten(1).any(1)
        start, end = max(span[0], 5), min(span[1], 10)
        assert changed[:5].tolist() == [start <= 5 + i < end - 1 for i in range(5)], "only those before a span's end"
        assert not changed[5:9].any()


def test_a_bool_mask_is_one_of_zeros_and_minus_infinity():
    allowed = torch.rand(5, 12, generator=torch.Generator().manual_seed(0)) < 0.5
    as_bias = torch.zeros(5, 12).masked_fill_(~allowed, -math.inf)
    case = Case(Rows((5,), (7,)))
    q, k, v = case.tensors()
    outs = [
        attention(q, case.rows, scale=0.3, explicit=(k, v), masks=(Mask(bias),))
        for bias in (allowed, as_bias, as_bias.double())
    ]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("kind", ["bool", "inf", "beyond the window"])
def test_a_query_that_sees_nothing_gives_zeros(kind, softcap, dtype):
    for count, history in [(1, 6), (4, 6), (4, 0)]:
        bias = torch.ones(count, history + count, dtype=torch.bool)
        bias[-1, -2 if kind == "beyond the window" else 0 :] = False
        if kind != "bool":
            bias = torch.zeros(bias.shape).masked_fill_(~bias, -math.inf)
        window = 2 if kind == "beyond the window" else None
        case = Case(Rows((count,), (history,)), softcap=softcap, window=window, masks=(Mask(bias),), dtype=dtype)
        check(case)
        q, k, v = case.tensors()
        out = attention(q, case.rows, explicit=(k, v), **case.options)
        assert not out[-1].any() and not out.isnan().any()


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_nan_is_not_hidden(softcap):
    case = Case(Rows((3,), (2,)), softcap=softcap, masks=(Mask(torch.zeros(3, 1)),))
    q, k, v = case.tensors()
    k[1, 0, 0] = math.nan
    out = attention(q, case.rows, explicit=(k, v), **case.options)
    assert out[:, :2].isnan().all() and not out[:, 2:].isnan().any(), "the heads that share the key head, no others"


@pytest.mark.parametrize("shape", [(3, 4), (3, 6), (3, 0), (2, 5), (1, 5), (3,), (1, 3, 5)])
def test_a_bias_of_another_shape_is_refused(shape):
    case = Case(Rows((3,), (2,)), window=2, masks=(Mask(torch.zeros(shape)),))
    q, k, v = case.tensors()
    for keys in ({"explicit": (k, v)}, {"stored": paged(case, k, v)}):
        with pytest.raises(ValueError, match=r"takes \[3, 5\], or \[3, 1\]"):
            attention(q, case.rows, **keys, **case.options)


def test_exactly_one_kind_of_keys_is_taken():
    case = Case(MIXED)
    q, k, v = case.tensors()
    with pytest.raises(ValueError, match="exactly one"):
        attention(q, case.rows, **case.options)
    with pytest.raises(ValueError, match="exactly one"):
        attention(q, case.rows, stored=paged(case, k, v), explicit=(k, v), **case.options)
    with pytest.raises(ValueError, match="masks for"):
        attention(q, case.rows, explicit=(k, v), **{**case.options, "masks": (None,)})


@pytest.mark.parametrize("counts", [(), (0,), (0, 0, 0)])
def test_no_tokens(counts):
    case = Case(Rows(counts, (4,) * len(counts)), v_dim=6)
    check(case)


def test_keys_of_a_narrower_dtype():
    """A cache may be kept in another dtype than the model computes in."""
    case = Case(MIXED)
    q, k, v = case.tensors()
    rounded = (k.bfloat16(), v.bfloat16())
    same = attention(q, case.rows, explicit=tuple(each.float() for each in rounded), **case.options)
    pages = paged(case, *rounded)
    pages_again = replace(pages, k=pages.k.clone(), v=pages.v.clone())
    new = torch.cat(
        [torch.arange(h, h + n) + b for h, n, b in zip(MIXED.history, MIXED.counts, (0, 5, 12, 22, 29), strict=True)]
    )
    write_pages(k[new], v[new], pages_again)  # rounds as it writes
    for stored in (pages, pages_again):
        assert torch.equal(attention(q, case.rows, stored=stored, **case.options), same)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("counts", [MIXED.counts, (1,) * 5, (0,) * 5])
def test_a_gate_multiplies_what_is_seen(counts, dtype):
    case = Case(Rows(counts, MIXED.history), v_dim=6, dtype=dtype)
    q, k, v = case.tensors()
    gate = torch.randn(case.rows.total, case.heads, case.v_dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    for keys in ({"explicit": (k, v)}, {"stored": paged(case, k, v)}):
        seen = attention(q, case.rows, **keys, **case.options)
        assert torch.equal(attention(q, case.rows, **keys, gate=gate, **case.options), gated(gate, seen, torch.sigmoid))


@given(
    st.lists(st.tuples(st.integers(0, FEW + 2), st.integers(0, 5000)), min_size=1, max_size=20),
    st.none() | st.integers(1, 2000),
    st.integers(1, 200),
)
def test_spans_share_out_all_keys_evenly(lengths, window, programs):
    """No span is empty where the keys from a multiple of SPAN on are shared out, so many at a time."""
    counts, history = zip(*lengths, strict=True)
    parts = divided(counts, history, window, programs)
    assert len(parts.row) == sum(parts.used) <= most_spans(len(lengths), programs)
    for row, (count, before) in enumerate(lengths):
        used = parts.used[row]
        assert (used > 0) == (0 < count <= FEW) and parts.row.count(row) == used
        low = 0 if window is None else max(0, before - window + 1) // SPAN * SPAN
        assert used <= -(-(before + count - low) // SPAN)
