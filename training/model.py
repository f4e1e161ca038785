"""The network that is trained: Qwen3.5's text layout with an MTP head, in plain torch, whole rows at once.

Parameters carry the names that transformers and Bough load, so a state dict is a model file. There is no cache and no
decoding here, and no knowledge of data or losses.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 64  # tokens that the delta rule takes together
KV = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Shape:
    """Fields are named as in config.json. The two mixers have the same size, so plain attention is a fair baseline."""

    vocab_size: int = 6144
    hidden_size: int = 320
    intermediate_size: int = 704
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    full_attention_interval: int = 4  # every fourth layer attends; 1 makes a plain-attention model
    max_position_embeddings: int = 2048
    rope_theta: float = 10_000.0
    partial_rotary_factor: float = 0.25
    rms_norm_eps: float = 1e-6

    @property
    def layer_types(self) -> list[str]:
        every = self.full_attention_interval
        kinds = (
            "full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(self.num_hidden_layers)
        )
        return list(kinds)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Norm(nn.Module):
    """RMS norm with a zero-centred weight: zero is the identity."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (F.rms_norm(x.float(), x.shape[-1:], eps=self.eps) * (1 + self.weight)).type_as(x)


class GatedNorm(nn.Module):
    """RMS norm over a value head, its weight not centred, times silu(z)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self.eps) * self.weight * F.silu(z.float())


def rope(shape: Shape, start: int, length: int, device: torch.device) -> Tensor:
    """cos and sin for `length` positions from `start`: [2, length, rotated dims]."""
    rotated = int(shape.head_dim * shape.partial_rotary_factor)
    frequencies = shape.rope_theta ** -(torch.arange(0, rotated, 2, device=device).float() / rotated)
    angles = torch.outer(torch.arange(start, start + length, device=device).float(), frequencies).repeat(1, 2)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Turns the first dims of each head, [batch, heads, tokens, head_dim]; the rest carry no position."""
    cos, sin = turn
    turned, still = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    return torch.cat((turned * cos + torch.cat((-second, first), dim=-1) * sin, still), dim=-1).type_as(x)


class Attention(nn.Module):
    """Causal attention, its output gated per head: q_proj holds each head's query and then its gate."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.sharing = shape.num_attention_heads // shape.num_key_value_heads
        self.q_proj = linear(shape.hidden_size, 2 * shape.num_attention_heads * shape.head_dim)
        self.k_proj = linear(shape.hidden_size, shape.num_key_value_heads * shape.head_dim)
        self.v_proj = linear(shape.hidden_size, shape.num_key_value_heads * shape.head_dim)
        self.o_proj = linear(shape.num_attention_heads * shape.head_dim, shape.hidden_size)
        self.q_norm = Norm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = Norm(shape.head_dim, shape.rms_norm_eps)

    def forward(self, x: Tensor, turn: Tensor, earlier: tuple[KV, ...]) -> tuple[Tensor, KV]:
        """`earlier`: keys and values of the passes before this one (see MTP), [batch, heads, tokens, head_dim]."""
        query, gate = self.q_proj(x).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        key = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        value = self.v_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2).repeat_interleave(self.sharing, dim=1)
        query = rotate(self.q_norm(query).transpose(1, 2), turn)
        key = rotate(self.k_norm(key).transpose(1, 2), turn).repeat_interleave(self.sharing, dim=1)
        passes = (*earlier, (key, value))
        alone = len(passes) == 1
        out = F.scaled_dot_product_attention(
            query,
            torch.cat([keys for keys, _ in passes], dim=2),
            torch.cat([values for _, values in passes], dim=2),
            attn_mask=None if alone else chain_mask(x.shape[1], len(passes), x.device),
            is_causal=alone,
        )
        return self.o_proj(out.transpose(1, 2).flatten(2) * gate.flatten(2).sigmoid()), (key, value)


def chain_mask(tokens: int, passes: int, device: torch.device) -> Tensor:
    """Chain t sees what the first pass wrote up to t, and what the later passes wrote for chain t itself."""
    first = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
    own = torch.eye(tokens, dtype=torch.bool, device=device)
    return torch.cat([first] + [own] * (passes - 1), dim=1)


def unit_lower_inverse(a: Tensor) -> Tensor:
    """(I + a)⁻¹ for strictly lower triangular a, of a size that is a power of two: blocks are joined two by two."""
    fixed, size = a.detach(), a.shape[-1]
    row = torch.arange(size, device=a.device)[:, None]
    column = row.T
    inverse = torch.eye(size, device=a.device, dtype=a.dtype) - fixed * ((row // 2 == column // 2) & (row > column))
    block = 2
    while block < size:
        below = (row // (2 * block) == column // (2 * block)) & (row // block > column // block)
        inverse = inverse - inverse @ (fixed * below) @ inverse
        block *= 2
    # One Newton step on constants: it takes off rounding, and its gradient is that of the inverse.
    return 2 * inverse - inverse @ (inverse + a @ inverse)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """S ← e^decay S; S ← S + k (beta (v − Sᵀk))ᵀ; out = Sᵀq for every token, in chunks. All float32.

    q, k: [batch, heads, tokens, dk], unit length and q scaled; v: [batch, heads, tokens, dv]; decay, beta: [batch,
    heads, tokens]. Within a chunk the rule is one triangular system; from chunk to chunk it is S ← carry S + write.
    """
    tokens = q.shape[2]
    short = -tokens % CHUNK
    if short:
        q, k, v = (F.pad(x, (0, 0, 0, short)) for x in (q, k, v))
        decay, beta = (F.pad(x, (0, short)) for x in (decay, beta))
    q, k, v, decay, beta = (x.unflatten(2, (-1, CHUNK)) for x in (q, k, v, decay, beta))
    total = decay.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    weighted = beta[..., None] * k
    inverse = unit_lower_inverse((weighted @ k.mT * between).tril(-1))
    wanted = inverse @ (beta[..., None] * v)
    seen = inverse @ (weighted * total.exp()[..., None])
    last = total[..., -1:]
    ending = (k * (last - total).exp()[..., None]).mT
    write = (ending @ wanted).unbind(2)
    carry = (last.exp()[..., None] * torch.eye(k.shape[-1], device=k.device) - ending @ seen).unbind(2)
    state = torch.zeros_like(write[0])
    states = []
    for carry_chunk, write_chunk in zip(carry, write, strict=True):
        states.append(state)
        state = carry_chunk @ state + write_chunk
    start = torch.stack(states, dim=2)
    out = (q * total.exp()[..., None]) @ start + (q @ k.mT * between) @ (wanted - seen @ start)
    return out.flatten(2, 3)[:, :, :tokens]


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class GatedDelta(nn.Module):
    """Gated delta rule behind a short causal convolution."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.key_dim, self.value_dim = shape.linear_key_head_dim, shape.linear_value_head_dim
        self.keys, self.values = shape.linear_num_key_heads, shape.linear_num_value_heads
        wide = 2 * self.keys * self.key_dim + self.values * self.value_dim
        self.in_proj_qkv = linear(shape.hidden_size, wide)
        self.in_proj_z = linear(shape.hidden_size, self.values * self.value_dim)
        self.in_proj_b = linear(shape.hidden_size, self.values)
        self.in_proj_a = linear(shape.hidden_size, self.values)
        self.conv1d = nn.Conv1d(wide, wide, shape.linear_conv_kernel_dim, groups=wide, bias=False)
        step = torch.exp(torch.empty(self.values).uniform_(-6.9, -2.3))  # 0.001 to 0.1
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus gives the step back
        self.A_log = nn.Parameter(torch.empty(self.values).uniform_(1, 16).log())
        self.norm = GatedNorm(self.value_dim, shape.rms_norm_eps)
        self.out_proj = linear(self.values * self.value_dim, shape.hidden_size)

    def convolve(self, x: Tensor) -> Tensor:
        """As sums of shifted rows: one fused pass when compiled, where a grouped convolution is slow backwards."""
        taps = self.conv1d.weight[:, 0].T
        padded = F.pad(x, (0, 0, len(taps) - 1, 0))
        return F.silu(sum(padded[:, i : i + x.shape[1]] * tap for i, tap in enumerate(taps)))

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.convolve(self.in_proj_qkv(x).float())
        z, b, a = self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)
        with torch.autocast(x.device.type, enabled=False):
            wide = self.keys * self.key_dim
            q, k, v = mixed.split([wide, wide, self.values * self.value_dim], dim=-1)
            q, k = (unit(y.unflatten(-1, (self.keys, self.key_dim))) for y in (q, k))
            q, k = (y.transpose(1, 2).repeat_interleave(self.values // self.keys, dim=1) for y in (q, k))
            v = v.unflatten(-1, (self.values, self.value_dim)).transpose(1, 2)
            decay = -self.A_log.exp() * F.softplus(a.float() + self.dt_bias)
            out = gated_delta_rule(q * self.key_dim**-0.5, k, v, decay.mT, b.float().sigmoid().mT)
            out = self.norm(out.transpose(1, 2), z.unflatten(-1, (self.values, self.value_dim)))
        return self.out_proj(out.flatten(2))


class GatedMLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A mixer and an MLP, each behind a norm and added to its input."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        if kind == "full_attention":
            self.self_attn = Attention(shape)
        else:
            self.linear_attn = GatedDelta(shape)
        self.mlp = GatedMLP(shape)
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, turn: Tensor, earlier: tuple[KV, ...] = ()) -> tuple[Tensor, KV | None]:
        normed = self.input_layernorm(x)
        if hasattr(self, "self_attn"):
            mixed, kv = self.self_attn(normed, turn, earlier)
        else:
            mixed, kv = self.linear_attn(normed), None
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), kv


class MTP(nn.Module):
    """Predicts one token further: from the hidden row at t and token t + 1, the token at t + 2.

    Used again on its own output it drafts deeper. Pass d of chain t stands at position t + d − 1; its attention sees
    the first pass up to t, which came from true hidden rows, and the chain's own later passes: as when decoding.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.fc = linear(2 * shape.hidden_size, shape.hidden_size)
        self.pre_fc_norm_embedding = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.pre_fc_norm_hidden = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList([Layer(shape, "full_attention")])
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, hidden: Tensor, embedded: Tensor, turn: Tensor, earlier: tuple[KV, ...]) -> tuple[Tensor, KV]:
        both = torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), dim=-1)
        x, kv = self.layers[0](self.fc(both).type_as(hidden), turn, earlier)
        return self.norm(x), kv


class Trunk(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape, kind) for kind in shape.layer_types)
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)


class Network(nn.Module):
    """Trunk and MTP head; embedding and unembedding are one matrix."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        self.mtp = MTP(shape)
        self.apply(draw)

    @property
    def embedding(self) -> Tensor:
        return self.model.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden rows after the final norm, [batch, tokens, hidden]."""
        x = self.model.embed_tokens(tokens)
        turn = rope(self.shape, 0, tokens.shape[1], tokens.device)
        for layer in self.model.layers:
            x, _ = layer(x, turn)
        return self.model.norm(x)

    def drafts(self, hidden: Tensor, tokens: Tensor, depth: int) -> Iterator[Tensor]:
        """Hidden rows of MTP passes 1 to depth; row t of pass d predicts token t + d + 1 of `tokens`.

        `tokens` are those that `hidden` was computed from and at least `depth` more.
        """
        length = hidden.shape[1]
        earlier: tuple[KV, ...] = ()
        for ahead in range(1, depth + 1):
            turn = rope(self.shape, ahead - 1, length, tokens.device)
            embedded = self.model.embed_tokens(tokens[:, ahead : ahead + length])
            hidden, kv = self.mtp(hidden, embedded, turn, earlier)
            earlier = (*earlier, kv)
            yield hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embedding)


def draw(module: nn.Module) -> None:
    """Starting weights; what a layer adds to its input starts at zero, so every layer starts as the identity."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, GatedMLP):
        nn.init.zeros_(module.down_proj.weight)
    if isinstance(module, Attention):
        nn.init.zeros_(module.o_proj.weight)
    if isinstance(module, GatedDelta):
        nn.init.zeros_(module.out_proj.weight)
