"""The gated delta rule over ragged rows, each with its own carried float32 state.

Per token and v head, with state S [dk, dv], decay exp(g), and q and k of unit length:
    S ← exp(g) S;   S ← S + k (β (v − Sᵀk))ᵀ;   out = Sᵀq / √dk
`advance_token` does just that. `advance_chunk` does it for several tokens at once: what each token changes depends on
what the tokens before it in the chunk changed, which is one triangular system. A chunk may be of any length, so rows
and cuts need no padding: a row is worked off in chunks, and one ends at every cut.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bough.ops.norm import rms_norm_gated
from bough.ops.ragged import Carried, Replayed, ReplayedRow, Rows, Slots, close_slots, open_slots
from bough.ops.twins import twins

CHUNK = 32  # tokens; more means larger products, but work within a chunk that grows with its square
ROOT_EPS = torch.tensor(1e-3)  # the root of the models' ε


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """The small weights of a gated-delta layer."""

    rate: Tensor  # [Hv] float32
    dt_bias: Tensor  # [Hv] float32
    norm: Tensor  # [dv]
    eps: float


def gated_delta_layer(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    layer: DeltaLayer,
    k_heads: int,
    rows: Rows,
    states: Slots,
) -> Tensor:
    """From q, k and v after their convolution [T, C], and z [T, Hv · dv], b and a [T, Hv] to the output [T, Hv, dv].

    The gated delta rule, and a norm gated by z.
    """
    if (fast := twins(qkv)) is not None:
        return fast.gated_delta_layer(qkv, z, b, a, layer, k_heads, rows, states)
    q, k, v = split_heads(qkv, k_heads, states.data)
    g, beta = delta_gates(a, b, layer.rate, layer.dt_bias)
    out = gated_delta(q, k, v, g, beta, rows, stored=states).out
    return rms_norm_gated(out, z.view(out.shape), layer.norm, layer.eps)


def split_heads(qkv: Tensor, k_heads: int, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k [T, Hk, dk] and v [T, Hv, dv], as they stand side by side, for states [slots, Hv, dk, dv]."""
    (_, heads, dk, dv), total = states.shape, len(qkv)
    q, k, v = qkv.split([k_heads * dk, k_heads * dk, heads * dv], 1)
    return q.view(total, k_heads, dk), k.view(total, k_heads, dk), v.view(total, heads, dv)


def delta_gates(a: Tensor, b: Tensor, rate: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """The log decay g ≤ 0 and the step size β, both float32 [T, Hv], of projections a and b [T, Hv].

    rate = −exp(A_log) and dt_bias are float32 [Hv].
    """
    if (fast := twins(a)) is not None:
        g, beta = fast.delta_gates(a, b, rate, dt_bias)
        return g, beta
    return rate * F.softplus(a.float() + dt_bias), torch.sigmoid(b).float()


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    rows: Rows,
    *,
    stored: Slots | None = None,
    explicit: Tensor | None = None,
) -> Carried:
    """q, k [T, Hk, dk] (not yet of unit length), v [T, Hv, dv], g and beta [T, Hv] → out [T, Hv, dv].

    Hv is a multiple of Hk: each k head serves Hv / Hk neighbouring v heads. The state is in `stored` slots (zeros for
    a row without history) or `explicit` [R, Hv, dk, dv]. At a row's cuts the state is emitted too.
    """
    if (fast := twins(v)) is not None:
        return fast.gated_delta(q, k, v, g, beta, rows, stored=stored, explicit=explicit)
    slots = open_slots("gated_delta", rows, stored, explicit)
    out, scale = torch.empty_like(v, memory_format=torch.contiguous_format), q.shape[-1] ** -0.5
    changes = torch.empty_like(out, dtype=torch.float32) if slots.recording is not None else None
    for row, start, end in rows:
        state, target = slots.before(row), slots.data[slots.write[row]]
        emit = slots.cuts_of(row, rows)
        for first, last in _pieces(end - start, emit):
            piece = slice(start + first, start + last)
            advance = advance_token if last - first == 1 else advance_chunk
            seen, change = advance(q[piece], k[piece], v[piece], g[piece], beta[piece], state, target)
            torch.mul(seen, scale, out=out[piece])
            if changes is not None:
                changes[piece] = change
            state = target
            if last in emit:
                slots.data[emit[last]] = state
    if changes is not None:
        slots.record(rows, k, g, changes / _by_head(_lengths(k), len(slots.data[0])))
    return close_slots(out, slots, explicit)


def replay_delta(layers: Sequence[Replayed], rows: Sequence[ReplayedRow]) -> None:
    """Move states on by recorded tokens: in each layer those of each row's slot, by so many tokens from a start on.

    What a token changes, β (v − Sᵀk), depends on the tokens before it alone. So it was recorded, divided by the length
    that its key has as it is, and all that is left to do is to add up.
    """
    if (fast := twins(layers[0][0])) is not None:
        fast.replay_delta(layers, rows)
        return
    for states, inputs in layers:
        for slot, start, count in rows:
            k, g, change = (each[start : start + count] for each in inputs)
            keys = _by_head(k.float(), states.shape[1]).transpose(0, 1)  # [H, n, dk]
            left = F.pad(g[1:], (0, 0, 0, 1)).flip(0).cumsum(0).flip(0).exp()  # [n, H]: the decay after each token
            states[slot].mul_(g.sum(0).exp()[:, None, None])
            states[slot].baddbmm_((keys * left.T[..., None]).transpose(1, 2), change.transpose(0, 1))


def _pieces(count: int, cuts: Iterable[int]) -> Iterator[tuple[int, int]]:
    """[0, count) in ranges of at most CHUNK tokens, one of which ends at each cut."""
    first = 0
    for edge in (*cuts, count):
        while first < edge:
            last = min(first + CHUNK, edge)
            yield first, last
            first = last


def advance_token(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: q, k [1, Hk, dk], v [1, H, dv], g and beta [1, H] → what it sees and what it changes, [1, H, dv] both.

    The new state goes to `target`.
    """
    key, query = _unit((k, q), len(state)).split(1, 1)  # [H, 1, dk]
    torch.mul(state, torch.exp(g).T[..., None], out=target)
    change = (v.transpose(0, 1) - torch.bmm(key, target)) * beta.T[..., None]  # [H, 1, dv]
    target.addcmul_(key.transpose(1, 2), change)
    return torch.bmm(query, target).transpose(0, 1), change.transpose(0, 1)


def advance_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """The same for n tokens: q, k [n, Hk, dk], v [n, H, dv], g and beta [n, H] → [n, H, dv] both."""
    n, heads, width = v.shape
    both = _unit((k, q), heads)  # [H, 2n, dk]: keys, then queries
    keys = both[:, :n]
    g, beta = g.T, beta.T[..., None]  # [H, n], [H, n, 1]
    between = _decay_between(g)
    since = g.cumsum(1).exp()[..., None]  # [H, n, 1]: the decay from the start of the chunk to each token
    scores = torch.bmm(both, keys.transpose(1, 2)).view(heads, 2, n, n) * between[:, None]
    seen = torch.bmm(both, state).view(heads, 2, n, width) * since[:, None]  # of the state before the chunk
    # (1 + strictly lower part of β · scores of keys) change = β (v − seen). Solved from the right, transposed: that is
    # how these tensors lie in memory for the solver.
    system = scores[:, 0] * beta
    wanted = (v.transpose(0, 1) - seen[:, 0]) * beta
    change = torch.linalg.solve_triangular(
        system.transpose(1, 2), wanted.transpose(1, 2), upper=True, left=False, unitriangular=True
    ).transpose(1, 2)  # [H, n, dv]
    torch.mul(state, since[:, -1:], out=target)
    target.baddbmm_((keys * between[:, -1, :, None]).transpose(1, 2), change)
    return torch.baddbmm(seen[:, 1], scores[:, 1], change).transpose(0, 1), change.transpose(0, 1)


def _unit(vectors: Sequence[Tensor], heads: int) -> Tensor:
    """Keys, and queries after them, of n tokens by v head [H, 2n, dk]: in float32, of unit length or less if near 0."""
    both = torch.cat([each.transpose(0, 1) for each in vectors], 1).float()  # [Hk, 2n, dk]
    both /= _lengths(both)
    if len(both) == heads:
        return both
    return both[:, None].expand(-1, heads // len(both), -1, -1).reshape(heads, *both.shape[1:])


def _lengths(vectors: Tensor) -> Tensor:
    """[..., 1]: √(Σ x² + ε)."""
    return torch.hypot(torch.linalg.vector_norm(vectors.float(), dim=-1, keepdim=True), ROOT_EPS)


def _by_head(of_keys: Tensor, heads: int) -> Tensor:
    """[n, Hk, ...] for each v head: [n, H, ...]."""
    return of_keys.repeat_interleave(heads // of_keys.shape[1], 1)


def _decay_between(g: Tensor) -> Tensor:
    """[H, n, n]: the decay from token j (its own not counted) to token i; 0 where j comes after i.

    Each entry is the sum of its own span of g. Differences of one running sum would be cheaper, but after a strong
    decay they keep no digits of the weak ones that follow.
    """
    n = g.shape[1]
    return g[:, :, None].expand(-1, n, n).tril(-1).cumsum(1).exp_().tril_()
