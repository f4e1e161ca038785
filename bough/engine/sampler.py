"""Choosing the next token of each row: masks, biases, penalties, temperature, filters, noise, logprobs.

Token i of a request is argmax(log p_i + Gumbel(seed, i)). p_i is the model's distribution after, in this order: the
mask of what is allowed, biases, penalties, temperature, top-k, top-p, min-p. Greedy (temperature 0) is the case without
noise; filters never remove the likeliest of the allowed tokens, so greedy rows skip them.

- The noise of a token depends on (seed, i, token id) and on nothing else. Sampling keeps no state of its own: asking
  again for the same row gives the same token.
- A row gets exactly what it would get alone. Every reduction over the vocabulary is a maximum, a sum of integers, or a
  sum in float64 that is then rounded to float32, so that the order of summation does not show.
- Of equal logits, argmax and top-k prefer the lower token id: top-k keeps exactly k. Top-p and min-p judge by value
  only: tokens equally likely are kept or dropped together.
- Logprobs are those of the model itself, its log-softmax in float32 before all that.
- One transfer to the host per call; all that goes the other way is copied without waiting.

This module knows logits and token ids. It does not know sequences, text, state or when a request ends.
"""

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from bough.config import SamplingParams
from bough.engine.noise import gumbel
from bough.errors import BadLogits
from bough.ops import largest
from bough.ops.sent import sent

# Rows are taken a few at a time, so that temporaries stay within some hundred megabytes whatever the batch.
MAX_ELEMENTS = 1 << 22
# Top-p without top-k looks at this many of the likeliest tokens before it sorts them all (on a CPU).
NUCLEUS = 4096


class TokenCounts:
    """What penalties look at: which tokens the prompt holds, and how often each was written since.

    The counts are dense, on the device; the newest tokens wait in a list and are folded into them now and then, so
    that adding a token costs nothing. Device tensors are replaced, never written, so a fork shares them.
    """

    FOLD = 64

    def __init__(self, prompt: Sequence[int], vocabulary: int, device: torch.device | str) -> None:
        seen = torch.zeros(vocabulary, dtype=torch.bool)
        seen[torch.tensor(prompt, dtype=torch.int64)] = True
        self.prompt = seen.to(device, non_blocking=True)  # [V]
        self.written = torch.zeros(vocabulary, dtype=torch.int32, device=device)  # [V]
        self.recent: list[int] = []

    @classmethod
    def wanted_by(
        cls, params: SamplingParams, prompt: Sequence[int], vocabulary: int, device: torch.device | str
    ) -> "TokenCounts | None":
        """The counts of a new request, or None when it asks for no penalty."""
        return cls(prompt, vocabulary, device) if _penalises(params) else None

    def add(self, tokens: Iterable[int]) -> None:
        """Count tokens that are now part of the request."""
        self.recent.extend(tokens)
        if len(self.recent) >= self.FOLD:
            recent = _send(self.recent, torch.int64, self.written.device)
            self.written = self.written.index_add(0, recent, torch.ones_like(recent, dtype=torch.int32))
            self.recent = []

    def fork(self) -> "TokenCounts":
        """Counts that are equal now and go their own way from here."""
        twin = object.__new__(TokenCounts)
        twin.prompt, twin.written, twin.recent = self.prompt, self.written, list(self.recent)
        return twin


class Biases:
    """What a request adds to the logits of tokens, each of which is there once: on the device, for all its rows."""

    def __init__(self, biases: Mapping[int, float], device: torch.device | str) -> None:
        self.tokens = torch.tensor(list(biases)).to(device, non_blocking=True)
        self.values = torch.tensor(list(biases.values()), dtype=torch.float32).to(device, non_blocking=True)

    @classmethod
    def wanted_by(cls, params: SamplingParams, device: torch.device | str) -> "Biases | None":
        return cls(dict(params.logit_bias), device) if params.logit_bias else None


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How to choose the token of one row of logits.

    A draft of k tokens is verified with k + 1 rows of one request: row j has index i + j and, as `drafted`, the first
    j tokens of the draft, which penalties count as written.
    """

    params: SamplingParams
    seed: int  # params.seed, or a fresh one: see resolve_seed
    index: int  # i: how many tokens of the request were written before this one
    counts: TokenCounts | None = None  # present exactly if params has a penalty
    biases: Biases | None = None  # present exactly if params has some
    drafted: Sequence[int] = ()
    allowed: Tensor | None = None  # uint8, on the host: token t is bit t % 8 of byte t // 8. None: all

    def __post_init__(self) -> None:
        assert (self.counts is not None) == _penalises(self.params), "counts go with penalties"
        assert (self.biases is not None) == bool(self.params.logit_bias), "biases go with what asks for them"


@dataclass(frozen=True, slots=True)
class Logprobs:
    """How likely the model itself found the chosen token and the likeliest ones."""

    chosen: float
    top: list[tuple[int, float]]  # (token, logprob), likeliest first; params.logprobs of them


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token of each row."""

    ids: Tensor  # [R] int64, on the device of the logits
    tokens: list[int]  # the same, on the host
    logprobs: list[Logprobs | None]  # None for rows that did not ask
    along: list[int]  # what was sent along
    bad: list[int]  # rows whose logits were not numbers: their tokens mean nothing


class Drawing:
    """Tokens that are being chosen on the device, and sent to the host. Nobody waits before `result` is asked for."""

    def __init__(self, ids: Tensor, parts: Sequence[Tensor], asked: Sequence[int | None], along: int) -> None:
        """`parts`: ids, scores and what is sent along; then logprobs, of the rows that asked for so many."""
        self.ids, self._asked, self._along, self._sent = ids, asked, along, None
        if not ids.is_cuda:
            self._numbers = _packed(parts)
            return
        stream = _sending(ids.device)  # beside the next step, which needs but the ids
        stream.wait_stream(torch.cuda.current_stream(ids.device))
        with torch.cuda.stream(stream):
            numbers = _packed(parts)
            self._numbers = torch.empty(len(numbers), dtype=torch.float64, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
        for part in parts:
            part.record_stream(stream)
        self._sent = stream.record_event()

    def result(self) -> Sampled:
        if self._sent is not None:
            self._sent.synchronize()
        numbers: list[float] = self._numbers.tolist()
        count, asking = len(self.ids), [r for r, most in enumerate(self._asked) if most is not None]
        bad = [r for r, score in enumerate(numbers[count : 2 * count]) if not math.isfinite(score)]
        logprobs: list[Logprobs | None] = [None] * count
        sent = 2 * count + self._along
        width = len(numbers[sent:]) // max(len(asking), 1)
        for a, r in enumerate(asking):
            start = sent + a * width
            ids, values = numbers[start : start + width : 2], numbers[start + 1 : start + width : 2]
            top = list(zip(map(int, ids), values, strict=True))[1:]
            logprobs[r] = Logprobs(chosen=values[0], top=top[: self._asked[r]])
        others = [int(each) for each in numbers[2 * count : sent]]
        tokens = [int(each) if math.isfinite(each) else 0 for each in numbers[:count]]
        return Sampled(self.ids, tokens, logprobs, others, bad)


@cache
def _sending(device: torch.device) -> torch.cuda.Stream:
    """What drawn tokens are sent to the host on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """In one tensor; exact for ids and float32."""
    return torch.cat([part.double() for part in parts])


def resolve_seed(params: SamplingParams) -> int:
    """The seed of a request: its own, or a fresh one."""
    return secrets.randbits(63) if params.seed is None else params.seed


def sample(logits: Tensor, rows: Sequence[RowSampling], along: Sequence[Tensor] = ()) -> Sampled:
    """Choose a token for each row of logits [R, V]. Raises BadLogits, which names the rows at fault."""
    sampled = drawing(logits, rows, along).result()
    if sampled.bad:
        raise BadLogits(sampled.bad)
    return sampled


def drawing(logits: Tensor, rows: Sequence[RowSampling], along: Sequence[Tensor] = ()) -> Drawing:
    """Begin to choose a token for each row of logits [R, V].

    Other ids on the device may be sent `along` to the host, so that whoever wants them does not wait again.
    """
    ids, scores = draw(logits, rows)
    asked = [row.params.logprobs for row in rows]
    asking = [r for r, most in enumerate(asked) if most is not None]
    most = max((most for most in asked if most is not None), default=0)
    parts = [ids, scores, *along]
    for piece in _pieces(asking, logits.shape[1]):
        which = _send(piece, torch.int64, logits.device)
        parts.append(_logprobs(logits[which].float(), ids[which], most).flatten())
    return Drawing(ids, parts, asked, sum(map(len, along)))


def draw(logits: Tensor, rows: Sequence[RowSampling]) -> tuple[Tensor, Tensor]:
    """The token of each row and the score it won with (not finite: bad logits), both [R] and on the device."""
    assert len(logits) == len(rows), f"{len(logits)} rows of logits, {len(rows)} rows to sample"
    masked = {r: row.allowed for r, row in enumerate(rows) if row.allowed is not None}
    biased = {r: row.biases for r, row in enumerate(rows) if row.biases is not None}
    penalised = [r for r, row in enumerate(rows) if row.counts is not None]
    if masked or biased or penalised:
        logits = logits.to(torch.float32, copy=True)  # the caller's stay as they are
    if masked:
        _mask_(logits, masked)
    if biased:
        _bias_(logits, biased)
    for piece in _pieces(penalised, logits.shape[1]):
        which = _send(piece, torch.int64, logits.device)
        logits.index_copy_(0, which, _penalise(logits[which], [rows[r] for r in piece]))
    scores, ids = largest(logits)  # the answer of greedy rows, and what the others are measured by

    noisy = [r for r, row in enumerate(rows) if row.params.temperature > 0]
    # Apart, so that rows with a small top-k need not carry the whole vocabulary along.
    limited = [r for r in noisy if rows[r].params.top_k]
    free = [r for r in noisy if not rows[r].params.top_k]
    for piece in (*_pieces(limited, logits.shape[1]), *_pieces(free, logits.shape[1])):
        which = _send(piece, torch.int64, logits.device)
        drawn, won = _draw_noisy(logits[which].float(), scores[which], [rows[r] for r in piece])
        ids = ids.index_copy(0, which, drawn)
        scores = scores.index_copy(0, which, won)
    return ids, scores


def _draw_noisy(logits: Tensor, best: Tensor, rows: Sequence[RowSampling]) -> tuple[Tensor, Tensor]:
    """Draw from float32 logits [R, V] whose maxima are best [R]: tokens and their scores."""
    params = [row.params for row in rows]
    ids, logits = _candidates(logits, [p.top_k for p in params])
    # log p up to a constant: at most 0, and 0 for the likeliest. Subtracting first keeps tiny temperatures finite.
    tiny = torch.finfo(torch.float32).tiny
    temperature = _send([max(p.temperature, tiny) for p in params], torch.float32, logits.device)[:, None]
    logp = (logits - best[:, None]) / temperature
    if any(p.top_p < 1 or p.min_p > 0 for p in params):
        logp = logp.masked_fill(logp < _bound(logp, params), -math.inf)
    noise = gumbel([row.seed for row in rows], [row.index for row in rows], ids)
    won, place = (logp + noise).max(-1, keepdim=True)
    return ids.expand(len(rows), -1).gather(1, place)[:, 0].long(), won[:, 0]


def _candidates(logits: Tensor, top_k: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The ids that top-k keeps, int32 [R, K], or [1, V] where it keeps all; and their logits [R, K]."""
    vocabulary = logits.shape[1]
    kept = [min(k or vocabulary, vocabulary) for k in top_k]
    if min(kept) == vocabulary:
        return torch.arange(vocabulary, dtype=torch.int32, device=logits.device)[None], logits
    ids = _likeliest(logits, max(kept))
    rank = torch.arange(max(kept), device=logits.device)
    beyond = rank >= _send(kept, torch.int64, logits.device)[:, None]
    return ids.int(), logits.gather(1, ids).masked_fill_(beyond, -math.inf)


def _bound(logp: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The least log p (relative to the likeliest token's) that top-p and min-p let through, [R, 1]."""
    ratios = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
    bound = _send(ratios, torch.float32, logp.device)[:, None]
    nucleus = [r for r, p in enumerate(params) if p.top_p < 1]
    if nucleus:
        which = _send(nucleus, torch.int64, logp.device)
        top_p = _send([params[r].top_p for r in nucleus], torch.float64, logp.device)[:, None]
        bound = bound.index_copy(0, which, torch.maximum(bound[which], _nucleus(logp[which], top_p)))
    return bound


def _nucleus(logp: Tensor, top_p: Tensor) -> Tensor:
    """The least log p such that the tokens above it have less than top_p [R, 1] of the probability, [R, 1]."""
    width = logp.shape[1]
    needed = top_p * _mass(logp).sum(-1, keepdim=True)
    # Sorting a whole vocabulary takes a CPU longer than all the rest, and asking whether a part of it is enough costs
    # nothing there. It would make us wait for a GPU, which sorts fast.
    if width > NUCLEUS and not logp.is_cuda:
        ranked = logp.topk(NUCLEUS).values
        if bool((_mass(ranked).sum(-1, keepdim=True) >= needed).all()):
            return _last_needed(ranked, needed)
    return _last_needed(logp.sort(descending=True).values, needed)


def _last_needed(ranked: Tensor, needed: Tensor) -> Tensor:
    """The last of the descending log p before which the probability is less than needed."""
    mass = _mass(ranked)
    before = mass.cumsum(-1) - mass
    last = (before < needed).sum(-1, keepdim=True) - 1
    return ranked.gather(1, last.clamp_(min=0))  # below 0 only where logits are NaN


def _mass(logp: Tensor) -> Tensor:
    """Probability in integers, whose sum is the same in any order."""
    return (logp.double().exp() * 2.0**40).long()


def _mask_(logits: Tensor, allowed: Mapping[int, Tensor]) -> None:
    """Set the logits of what these rows may not choose to -inf."""
    packed = sent(torch.stack(list(allowed.values())), logits.device)
    bits = torch.arange(256, device=logits.device)[:, None] >> torch.arange(8, device=logits.device)
    unset = (bits & 1 == 0).view(torch.int64)[:, 0]  # [256]: the eight bits of a byte are looked up together
    at = 0
    for piece in _pieces(list(allowed), logits.shape[1]):
        which = _send(piece, torch.int64, logits.device)
        refused = unset[packed[at : at + len(piece)].int()].view(torch.bool)[:, : logits.shape[1]]
        logits.index_copy_(0, which, torch.where(refused, -math.inf, logits[which]))
        at += len(piece)


def _bias_(logits: Tensor, biased: Mapping[int, Biases]) -> None:
    """Add the biases of these rows."""
    counts = [len(each.tokens) for each in biased.values()]
    rows, many = _send(list(zip(biased, counts, strict=True)), torch.int64, logits.device).unbind(1)
    tokens, values = (torch.cat([getattr(each, name) for each in biased.values()]) for name in ("tokens", "values"))
    logits[torch.repeat_interleave(rows, many, output_size=sum(counts)), tokens] += values


def _penalise(logits: Tensor, rows: Sequence[RowSampling]) -> Tensor:
    """Apply repetition (over prompt and written tokens), frequency and presence penalties (over written ones)."""
    counts = [row.counts for row in rows if row.counts is not None]
    written = torch.stack([count.written for count in counts])  # [R, V], a copy
    later = [(r, token) for r, count in enumerate(counts) for token in (*count.recent, *rows[r].drafted)]
    if later:
        places = _send(later, torch.int64, logits.device)
        ones = torch.ones(len(later), dtype=torch.int32, device=logits.device)
        written.index_put_((places[:, 0], places[:, 1]), ones, accumulate=True)
    seen = torch.stack([count.prompt for count in counts]) | (written > 0)

    penalties = [
        (row.params.repetition_penalty, row.params.frequency_penalty, row.params.presence_penalty) for row in rows
    ]
    repetition, frequency, presence = _send(penalties, torch.float32, logits.device)[:, :, None].unbind(1)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    return torch.where(seen, repeated, logits) - (frequency * written + presence * (written > 0))


def _logprobs(logits: Tensor, chosen: Tensor, top: int) -> Tensor:
    """(id, logprob) of the chosen token and of the likeliest ones, float64 [R, 1 + top, 2]."""
    best = logits.amax(-1, keepdim=True)
    total = (logits - best).exp().sum(-1, keepdim=True, dtype=torch.float64)
    ids = torch.cat([chosen[:, None], _likeliest(logits, min(top, logits.shape[1]))], dim=-1)
    logprobs = (logits.gather(1, ids) - best).double() - total.log()
    return torch.stack([ids.double(), logprobs.float().double()], dim=-1)


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """Ids [R, count] of the highest float32 logits, highest first and of equal ones the lower id first.

    torch.topk leaves open which of equal values it takes; keys of (value, id) are never equal.
    """
    last = logits.shape[1] - 1
    bits = (logits + 0.0).view(torch.int32)  # + 0.0: -0.0 equals 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers that compare as the floats do
    keys = (ordered.long() << 32) | torch.arange(last, -1, -1, device=logits.device)
    return last - (keys.topk(count).values & 0xFFFFFFFF)


def _penalises(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def _pieces(which: list[int], vocabulary: int) -> list[list[int]]:
    """Rows in pieces small enough to be worked on at once."""
    size = max(1, MAX_ELEMENTS // vocabulary)
    return [which[at : at + size] for at in range(0, len(which), size)]


def _send(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Few host numbers to the device. Nobody waits for it, and they are not worth memory that the device can read."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
