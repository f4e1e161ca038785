"""The gated delta rule over ragged rows, each with its own carried float32 state.

Per token and head, with state S [dk, dv], decay exp(g), and q, k of unit length:
    S ← exp(g) S;   S ← S + k (β (v − Sᵀk))ᵀ;   out = Sᵀ q / √dk
`recurrent` does just that. `chunked` gives the same for many tokens by solving one triangular system a chunk.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bough.ops.ragged import Rows, Slots

CHUNK = 64
FEW = 4  # up to so many tokens the per-token form is cheaper


@dataclass(frozen=True, slots=True)
class Delta:
    """The output [T, Hv, dv]; with an explicit state also each row's state after it, and those at its cuts."""

    out: Tensor
    state: Tensor | None = None  # [R, Hv, dk, dv] float32
    cuts: tuple[Tensor, ...] = ()  # for each row [cuts, Hv, dk, dv]


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """The log decay g ≤ 0 and the step size β, both float32 [T, Hv], of projections a and b."""
    g = -torch.exp(a_log.float()) * F.softplus(a.float() + dt_bias.float())
    return g, torch.sigmoid(b).float()


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
) -> Delta:
    """q, k [T, Hk, dk] (not yet normalised), v [T, Hv, dv], g and beta [T, Hv] → out [T, Hv, dv].

    Hv is a multiple of Hk: each k head serves Hv / Hk neighbouring v heads. The state is in `stored` slots (zeros for
    a row without history) or `explicit` [R, Hv, dk, dv]. At a row's cuts the state is emitted too.
    """
    if (stored is None) == (explicit is None):
        raise ValueError("gated_delta takes stored slots or an explicit state: exactly one of them")
    group = v.shape[1] // k.shape[1]
    q = (_unit(q) * q.shape[-1] ** -0.5).repeat_interleave(group, 1)
    k = _unit(k).repeat_interleave(group, 1)
    values = v.float()
    out = torch.empty_like(v)
    states = None if explicit is None else explicit.clone()
    cuts = [v.new_empty(0)] * len(rows.counts)
    for row, start, end in rows:
        if states is not None:
            state = states[row]
        elif rows.history[row]:
            assert stored is not None
            state = stored.data[stored.read[row]]
        else:
            state = torch.zeros(v.shape[1], k.shape[2], v.shape[2], device=v.device)
        target = states[row] if states is not None else stored.data[stored.write[row]]  # type: ignore[union-attr]
        edges = [*rows.cuts_of(row), end - start]
        at, emitted = 0, []
        for edge in dict.fromkeys(edges):
            piece = slice(start + at, start + edge)
            form = recurrent if edge - at <= FEW else chunked
            out[piece], state = form(q[piece], k[piece], values[piece], g[piece], beta[piece], state, target)
            at = edge
            if edge in rows.cuts_of(row):
                if stored is not None:
                    stored.data[stored.cut[row][len(emitted)]] = state
                emitted.append(state.clone() if states is not None else state)
        if states is not None and emitted:
            cuts[row] = torch.stack(emitted)
    return Delta(out, states, tuple(cuts) if states is not None else ())


def _unit(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """One token after the other: q, k [n, H, dk], v [n, H, dv] → [n, H, dv]; the state goes to `target`."""
    decay = torch.exp(g)[..., None, None]  # [n, H, 1, 1]
    outs = []
    for t in range(q.shape[0]):
        state = torch.mul(state, decay[t], out=target)
        seen = torch.bmm(k[t, :, None], state)  # [H, 1, dv]
        change = (v[t, :, None] - seen) * beta[t, :, None, None]
        state.baddbmm_(k[t, :, :, None], change)
        outs.append(torch.bmm(q[t, :, None], state)[:, 0])
    return (outs[0][None] if len(outs) == 1 else torch.stack(outs)), state


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """The same for many tokens. Padding has beta = 0 and g = 0, which changes nothing."""
    n = q.shape[0]
    size = min(CHUNK, n)
    q, k, v = (_chunks(x, size) for x in (q, k, v))  # [C, H, L, d]
    g, beta = (_chunks(x[..., None], size) for x in (g, beta))  # [C, H, L, 1]
    total = g.cumsum(2)
    decay = (total - total.transpose(2, 3)).masked_fill_(_above(size, 1, q.device), -torch.inf).exp_()  # [C, H, L, L]
    system = (beta * (k @ k.transpose(2, 3))) * decay  # its strict lower part; the solver takes the diagonal as 1
    right = torch.cat([beta * v, beta * k * total.exp()], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], -1)
    within = (q @ k.transpose(2, 3)) * decay
    q = q * total.exp()
    last = total[:, :, -1:]
    k = k * (last - total).exp()
    outs = []
    for c in range(q.shape[0]):
        change = torch.baddbmm(u[c], w[c], state, alpha=-1)
        outs.append(torch.baddbmm(within[c] @ change, q[c], state))
        state = torch.baddbmm(last[c].exp() * state, k[c].transpose(1, 2), change)
    target.copy_(state)
    return torch.stack(outs).transpose(1, 2).flatten(0, 1)[:n], target


def _chunks(x: Tensor, size: int) -> Tensor:
    """[n, H, d] → [C, H, L, d], zeros at the end."""
    pad = -x.shape[0] % size
    if pad:
        x = F.pad(x, (0, 0, 0, 0, 0, pad))
    return x.view(-1, size, *x.shape[1:]).transpose(1, 2)


def _above(size: int, diagonal: int, device: torch.device) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool, device=device).triu_(diagonal)
