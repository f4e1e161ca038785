"""Parity with transformers: tiny random models of a family, and the ways of feeding them that must all agree.

`reference(model)` of each test is a transformers model; ours is loaded from the folder it was saved to. The oracle is
one uncached forward of the reference over the whole text.
"""

from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache

from bough.models.load import load_model
from bough.models.model import Model
from bough.state.kinds import Recurrent
from bough.state.layout import Layout
from bough.state.live import State
from bough.state.pool import Pool
from bough.state.reservation import forward

TOLERANCE = 1e-4  # of logits, float32
TIE = 1e-3  # a top-two margin below this may go either way


def randomise(model: torch.nn.Module, seed: int = 0, spread: float = 0.05) -> None:
    """Move every weight off its initial value, so that norms, biases and scalars are not the neutral ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * spread)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.mul_(0.9)


def remember(model: torch.nn.Module) -> None:
    """Give gated-delta layers states that matter: fresh from a config they are tiny, and forgotten in a few tokens."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.sub_(3)
            elif name.endswith("conv1d.weight"):
                parameter.mul_(4)


def save(reference: torch.nn.Module, folder: Path) -> Path:
    reference.save_pretrained(folder)  # type: ignore[operator]
    return folder


def pool_for(model: Model, *, tokens: int = 4096, page_tokens: int = 4, running: int = 64) -> Pool:
    """A pool with room for about so many tokens, in small pages so that tests cross many of them."""
    layout = Layout.of(model.kinds, page_tokens=page_tokens, dtype=model.dtype)
    slabs = sum(-(-(tokens // page_tokens if u.is_page else running) // u.per_slab) + 1 for u in layout.units)
    return Pool(layout, max(slabs, 2 * len(layout.units)) * layout.slab_bytes, max_running=running)


def feed(model: Model, pool: Pool, batch: list[tuple[State, list[int]]]) -> list[Tensor]:
    """One forward; the logits of every token, row by row."""
    with forward(pool, batch) as step:
        logits = model.logits(model(step))
    pool.check()
    for state, _ in batch:
        state.check()
    return list(logits.split([len(tokens) for _, tokens in batch]))


def random_tokens(vocab: int, count: int, seed: int) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def reference_logits(reference: torch.nn.Module, tokens: list[int]) -> Tensor:
    return reference(torch.tensor([tokens]), use_cache=False).logits[0].float()


def check_prompt(reference: torch.nn.Module, model: Model, *, length: int = 40, tolerance: float = TOLERANCE) -> None:
    """A prompt and a few single steps against the reference: for what differs in loading alone, or in precision."""
    pool, tokens = pool_for(model), random_tokens(model.vocab_size, length, seed=5)
    state = State(pool)
    pieces = [tokens[:-8], *([token] for token in tokens[-8:])]
    logits = torch.cat([feed(model, pool, [(state, piece)])[0] for piece in pieces]).float()
    error = (logits - reference_logits(reference, tokens)).abs().max().item()
    assert error <= tolerance, f"logits differ by {error:.2e}"


@torch.no_grad()
def check_recurrent(reference: torch.nn.Module, model: Model, *, tolerance: float = TOLERANCE) -> None:
    """The states of gated-delta layers after each piece of a text, prefill and decode, against those in its cache.

    The reference keeps one more column of the convolution's inputs than it needs, the oldest, and keeps it transposed.
    """
    pool, cache, tokens = pool_for(model), DynamicCache(config=reference.config), random_tokens(model.vocab_size, 90, 1)
    state, at = State(pool), 0
    recurrent = [layer for layer, kind in enumerate(model.kinds) if isinstance(kind, Recurrent)]
    for size in (1, 1, 37, 2, 1, 1, 40, 1):
        piece = tokens[at : at + size]
        feed(model, pool, [(state, piece)])
        reference(torch.tensor([piece]), past_key_values=cache, use_cache=True)
        at += size
        for layer in recurrent:
            theirs = cache.layers[layer]
            expected = {"conv": theirs.conv_states[0][0, :, 1:].T, "delta": theirs.recurrent_states[0][0]}
            for name, value in expected.items():
                ours = pool.part(layer, name)[state.slot]
                assert (ours.shape, ours.dtype) == (value.shape, value.dtype)
                error = (ours - value).abs().max().item() if value.numel() else 0.0
                assert error <= tolerance, f"{name} of layer {layer} differs by {error:.2e} after {at} tokens"
    state.release()


def check_family(reference: torch.nn.Module, folder: Path, *, length: int = 61, tolerance: float = TOLERANCE) -> Model:
    """Whole prompt, odd pieces, single steps, ragged batches and greedy tokens, all against the reference."""
    reference.eval()
    model = load_model(save(reference, folder), dtype="float32")
    pool = pool_for(model)
    texts = [random_tokens(model.vocab_size, length - 7 * i, seed=i) for i in range(4)]
    expected = [reference_logits(reference, text) for text in texts]

    def close(ours: Tensor, row: int, start: int) -> None:
        error = (ours - expected[row][start : start + len(ours)]).abs().max().item()
        assert error <= tolerance, f"logits differ by {error:.2e} at row {row} from token {start}"

    _whole(model, pool, texts, close)
    _pieces(model, pool, texts, close)
    _ragged(model, pool, texts, close)
    _greedy(model, pool, reference, texts[1][:9])
    pool.check()
    assert not pool.states and all(store.used == 1 for store in pool.stores), "something leaked"
    return model


def _whole(model, pool, texts, close) -> None:
    for row, text in enumerate(texts[:2]):
        state = State(pool)
        close(feed(model, pool, [(state, text)])[0], row, 0)
        state.release()


def _pieces(model, pool, texts, close) -> None:
    state, at = State(pool), 0
    for size in [1, 2, 3, 17, 1, 5, 11, *[1] * 8, 1000]:
        piece = texts[0][at : at + size]
        close(feed(model, pool, [(state, piece)])[0], 0, at)
        at += len(piece)
    state.release()


def _ragged(model, pool, texts, close) -> None:
    """Rows of unequal histories and lengths, prefill beside decode, rows without tokens among them."""
    states = [State(pool) for _ in texts]
    at = [0] * len(texts)
    for sizes in [(7, 0, 1, 20), (1, 13, 0, 1), (0,) * 4, (19, 2, 3, 4), (1, 1, 1, 1), (9, 0, 0, 2), (99,) * 4]:
        batch = [(s, t[a : a + n]) for s, t, a, n in zip(states, texts, at, sizes, strict=True)]
        for row, logits in enumerate(feed(model, pool, batch)):
            if len(logits):
                close(logits, row, at[row])
            at[row] += len(logits)
    assert at == [len(text) for text in texts]
    for state in states:
        state.release()


@torch.no_grad()
def _greedy(model, pool, reference, prompt, count: int = 64) -> None:
    """64 greedy tokens equal the reference's, as long as its top two are not a tie."""
    state, tokens = State(pool), list(prompt)
    logits = feed(model, pool, [(state, tokens)])[0]
    for _ in range(count):
        tokens.append(int(logits[-1].argmax()))
        logits = feed(model, pool, [(state, tokens[-1:])])[0]
    state.release()
    oracle = reference_logits(reference, tokens)
    for i in range(len(prompt), len(tokens)):
        top = oracle[i - 1].topk(2)
        if top.values[0] - top.values[1] > TIE:
            assert tokens[i] == int(top.indices[0]), f"greedy token {i - len(prompt)} differs"
