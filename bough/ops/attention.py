"""Attention over pages or over explicit keys and values, for ragged rows.

What a query sees is one rule in token positions, however the keys are stored: keys up to itself and those in a span
with it; of these the ones within the window, and the ones the mask allows. A query that sees nothing gives zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bough.ops.activation import gated
from bough.ops.ragged import Pages, Rows
from bough.ops.twins import twins


@dataclass(frozen=True, slots=True)
class Mask:
    """What the tokens of one row see beyond, or short of, causal order.

    A `span` [start, end) of token positions sees itself both ways, as far as it is here and within the window.
    `bias` [count, keys] is added to the scores of whatever is seen; a bool one says what may be seen (True). Its keys
    are the row's tokens [0, history + count), also those that a window has left behind; one key stands for all.
    """

    bias: Tensor | None = None
    spans: tuple[tuple[int, int], ...] = ()

    def bias_of(self, count: int, low: int, keys: int) -> Tensor | None:
        """The bias over keys [low, keys) of a row of `count` new tokens and `keys` tokens in all."""
        if self.bias is None:
            return None
        if self.bias.shape not in ((count, keys), (count, 1)):
            raise ValueError(
                f"the mask's bias is {list(self.bias.shape)}; a row of {count} new tokens and {keys} in all takes"
                f" [{count}, {keys}], or [{count}, 1] for all keys alike"
            )
        return self.bias if self.bias.shape[1] == 1 else self.bias[:, low:]


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
    gate: Tensor | None = None,
) -> Tensor:
    """q [T, H, k_dim] over each row's own keys → [T, H, v_dim].

    The keys are those in `stored` pages, the new tokens' entries written already, or `explicit` K [S, Hkv, k_dim] and
    V [S, Hkv, v_dim]: for each row its history + count entries, row after row. H is a multiple of Hkv; neighbouring
    heads share keys. A `softcap` c turns scores s into c · tanh(s / c) before the mask.
    What is seen is multiplied by the sigmoid of a `gate` [T, H, v_dim].
    """
    if (stored is None) == (explicit is None):
        raise ValueError("attention takes stored pages or explicit keys and values: exactly one of them")
    if masks is not None and len(masks) != len(rows.counts):
        raise ValueError(f"{len(masks)} masks for {len(rows.counts)} rows; give each row one, or None")
    if (fast := twins(q)) is not None and stored is not None and masks is None and stored.k.dtype == q.dtype:
        return fast.attention(q, rows, scale=scale, stored=stored, window=window, softcap=softcap, gate=gate)
    outs = []
    for row, start, end in rows:
        keys = rows.history[row] + rows.counts[row]
        low = 0 if window is None else max(0, rows.history[row] - window + 1)  # what the row's first token sees
        if stored is not None:
            k, v = stored.span(row, low, keys)
        else:
            assert explicit is not None
            base = sum(rows.history[:row]) + sum(rows.counts[:row])
            k, v = (each[base + low : base + keys] for each in explicit)
        mask = masks[row] if masks else None
        outs.append(_attend(q[start:end], k, v, low, scale, window, softcap, mask))
    if not outs:
        return q.new_empty(0, q.shape[1], (stored.v if stored is not None else explicit[1]).shape[-1])  # type: ignore[index]
    seen = outs[0] if len(outs) == 1 else torch.cat(outs)
    return seen if gate is None else gated(gate, seen, torch.sigmoid)


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
    (n, heads, _), (keys, kv_heads, _) = q.shape, k.shape
    k, v = k.to(q.dtype).transpose(0, 1), v.to(q.dtype).transpose(0, 1)  # [Hkv, S, d]
    causal = mask is None and softcap is None and n == keys and (window is None or n <= window)
    bias = None if causal or (mask is None and n == 1) else _bias(q, low, keys, window, mask)
    if softcap is not None:
        return _capped(q, k, v, scale, softcap, bias)
    if n == 1:  # the heads of a group are queries of one key head, so that its keys are read once for all of them
        grouped = q.view(1, kv_heads, heads // kv_heads, -1)
        return F.scaled_dot_product_attention(grouped, k[None], v[None], bias, scale=scale).reshape(1, heads, -1)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], bias, scale=scale, is_causal=causal, enable_gqa=heads != kv_heads
    )
    return out[0].transpose(0, 1)


def _capped(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, bias: Tensor | None) -> Tensor:
    """q [n, H, dk] over k [Hkv, S, dk] and v [Hkv, S, dv], with capped scores."""
    n, heads, _ = q.shape
    grouped = q.transpose(0, 1).reshape(k.shape[0], -1, q.shape[-1])  # [Hkv, group · n, dk]
    scores = torch.tanh(grouped @ k.transpose(1, 2) * (scale / softcap)) * softcap
    scores = scores.view(heads, n, -1).float()
    if bias is not None:
        scores += bias
    weights = torch.softmax(scores, -1)
    if bias is not None:
        weights.masked_fill_((bias == -torch.inf).all(-1, keepdim=True), 0)
    out = weights.to(q.dtype).view(*grouped.shape[:2], -1) @ v
    return out.view(heads, n, -1).transpose(0, 1)


def _bias(q: Tensor, low: int, keys: int, window: int | None, mask: Mask | None) -> Tensor:
    """What is added to the scores [n, S] of the keys from `low` on: −inf where a query does not see the key."""
    key = torch.arange(low, low + keys, device=q.device)
    query = key[keys - len(q) :, None]
    seen = key <= query
    bias = q.new_zeros(())
    if mask is not None:
        for start, end in mask.spans:
            seen |= (start <= query) & (query < end) & (start <= key) & (key < end)
        given = mask.bias_of(len(q), low, low + keys)
        if given is not None and given.dtype == torch.bool:
            seen &= given
        elif given is not None:
            bias = given.to(bias)
    if window is not None:
        seen &= key > query - window
    return torch.where(seen, bias, -torch.inf)
