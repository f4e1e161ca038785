"""Attention over pages or over explicit keys and values, for ragged rows.

What a query sees is one rule in token positions, however the keys are stored:
    within the window, and (not after itself and allowed by the mask's bias, or in one of the mask's spans with it).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bough.ops.ragged import Pages, Rows


@dataclass(frozen=True, slots=True)
class Mask:
    """What the tokens of one row see beyond, or short of, causal order.

    `bias` is added to the scores before the softmax: [count, keys], where keys are the row's tokens [0, history +
    count), or [count, 1] for all keys alike. A `span` [start, end) of token positions sees itself both ways.
    """

    bias: Tensor | None = None
    spans: tuple[tuple[int, int], ...] = ()

    def bias_for(self, start: int, end: int, keys: int) -> Tensor | None:
        """The bias over keys [start, end) of `keys`."""
        if self.bias is None or self.bias.shape[-1] == 1:
            return self.bias
        if self.bias.shape[-1] != keys:
            raise ValueError(
                f"the mask covers {self.bias.shape[-1]} keys; the row has {keys} (or give 1 for all alike)"
            )
        return self.bias[:, start:end]


def write_pages(k: Tensor, v: Tensor, pages: Pages) -> None:
    """Put the new tokens' K [T, H, k_dim] and V [T, H, v_dim] where the step says."""
    index = (pages.write_page, pages.write_at)
    pages.k.index_put_(index, k.to(pages.k.dtype))
    pages.v.index_put_(index, v.to(pages.v.dtype))


def attention(
    q: Tensor,
    rows: Rows,
    *,
    scale: float,
    stored: Pages | None = None,
    explicit: tuple[Tensor, Tensor] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    masks: Sequence[Mask | None] | None = None,
) -> Tensor:
    """q [T, H, k_dim] over each row's own keys → [T, H, v_dim].

    The keys are those in `stored` pages, the new tokens' entries written already, or `explicit` K [S, Hkv, k_dim] and
    V [S, Hkv, v_dim]: for each row its history + count entries, row after row.
    """
    if (stored is None) == (explicit is None):
        raise ValueError("attention takes stored pages or explicit keys and values: exactly one of them")
    outs, key_start = [], 0
    for row, count in enumerate(rows.counts):
        keys = rows.history[row] + count
        if count:
            low = 0 if window is None else max(0, rows.history[row] - window + 1)
            if stored is not None:
                k, v = stored.span(row, low, keys)
            else:
                assert explicit is not None
                k, v = (each[key_start + low : key_start + keys] for each in explicit)
            start = sum(rows.counts[:row])
            mask = masks[row] if masks else None
            outs.append(_attend(q[start : start + count], k, v, low, scale, window, softcap, mask))
        key_start += keys
    if not outs:
        value = stored.v if stored is not None else explicit[1]  # type: ignore[index]
        return q.new_zeros(0, q.shape[1], value.shape[-1])
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    low: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    mask: Mask | None,
) -> Tensor:
    """One row: q [n, H, dk] are its last n tokens, k [S, Hkv, dk] and v [S, Hkv, dv] its tokens from `low` on."""
    n, heads, _ = q.shape
    kv_heads = k.shape[1]
    k, v = k.to(q.dtype).transpose(0, 1), v.to(q.dtype).transpose(0, 1)  # [Hkv, S, d]
    if n == 1 and mask is None and softcap is None:
        grouped = q.view(kv_heads, heads // kv_heads, -1)  # one query sees every key: heads of a group are its rows
        out = F.scaled_dot_product_attention(grouped[None], k[None], v[None], scale=scale)
        return out.reshape(1, heads, -1)
    q = q.transpose(0, 1)  # [H, n, dk]
    bias = _bias(n, k.shape[1], low, window, mask, q)
    if softcap is None:
        causal = bias is None and n > 1
        out = F.scaled_dot_product_attention(
            q[None], k[None], v[None], bias, scale=scale, is_causal=causal, enable_gqa=heads != kv_heads
        )[0]
    else:
        group = heads // kv_heads
        scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * scale
        scores = softcap * torch.tanh(scores / softcap)
        if bias is None:
            bias = _causal(n, k.shape[1], low, window, (), q.device)
            bias = torch.zeros_like(scores[0]).masked_fill_(~bias, -torch.inf)
        weights = torch.softmax(scores.float() + bias, -1).to(q.dtype)
        out = weights @ v.repeat_interleave(group, 0)
    return out.transpose(0, 1)


def _bias(n: int, keys: int, low: int, window: int | None, mask: Mask | None, like: Tensor) -> Tensor | None:
    """What to add to the scores [n, S]; None when plain causal order from the first key says it all."""
    if mask is None and n == keys and (window is None or keys <= window):
        return None
    spans = mask.spans if mask else ()
    visible = _causal(n, keys, low, window, (), like.device)
    bias = torch.zeros(n, keys, dtype=like.dtype, device=like.device).masked_fill_(~visible, -torch.inf)
    extra = mask.bias_for(low, low + keys, low + keys) if mask else None
    if extra is not None:
        bias = bias + extra.to(like.dtype)
    if spans:
        relaxed = _causal(n, keys, low, window, spans, like.device)
        bias = bias.masked_fill(relaxed, 0)
    return bias


def _causal(
    n: int, keys: int, low: int, window: int | None, spans: Sequence[tuple[int, int]], device: torch.device
) -> Tensor:
    """[n, S] bool: which keys a query may see in causal order, or, with spans, which it sees through a span alone."""
    key = torch.arange(low, low + keys, device=device)
    query = key[keys - n :, None]
    if spans:
        seen = torch.zeros(n, keys, dtype=torch.bool, device=device)
        for start, end in spans:
            seen |= (query >= start) & (query < end) & (key >= start) & (key < end)
    else:
        seen = key <= query
    return seen if window is None else seen & (key > query - window)
