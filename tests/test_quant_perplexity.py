"""What perplexity models of 8 and 4 bits lose, on text that none of them was trained on."""

import lzma
import math
from pathlib import Path

import pytest
import torch
from parity import feed, pool_for
from test_real_weights import SMOLLM2, SMOLLM2_SHA256, fetch
from test_real_weights import pytestmark as real_weights

from bough.cli import BUNDLED
from bough.engine.load import load
from bough.models.load import load_model
from bough.models.model import Model
from bough.models.quantize import quantize
from bough.state.live import State

CORPUS = Path(__file__).parents[2] / "shared" / "corpus" / "classic_books.val.txt.xz"


@torch.inference_mode()
def perplexity(model: Model, tokens: list[int], window: int = 512) -> float:
    pool, nats = pool_for(model, tokens=2 * window, page_tokens=16, running=2), 0.0
    for at in range(0, len(tokens) - window, window):
        state = State(pool)
        logits = feed(model, pool, [(state, tokens[at : at + window])])[0].float()
        state.release()
        nats -= (
            torch.log_softmax(logits, -1)
            .gather(1, torch.tensor(tokens[at + 1 : at + window + 1])[:, None])
            .sum()
            .item()
        )
    return math.exp(nats / (len(tokens) // window * window))


def expect_little_lost(source: Path, folder: Path) -> None:
    """Of the text that the aims are about, in bfloat16 throughout."""
    loaded = load(source, dtype="bfloat16")
    text = lzma.decompress(CORPUS.read_bytes())[300_000:340_000].decode(errors="ignore")
    tokens = loaded.tokenizer.encode(text)[:4097]
    plain = perplexity(loaded.model, tokens)
    for scheme, most in (("int8", 1.005), ("int4", 1.05)):
        quantize(source, folder / scheme, scheme)
        ours = perplexity(load_model(folder / scheme), tokens)
        assert ours < most * plain, f"{scheme}: {ours:.3f}, where bfloat16 has {plain:.3f}"


@pytest.mark.long
@pytest.mark.skipif(not CORPUS.exists(), reason="the validation text is not there")
def test_perplexity_of_the_bundled_model(tmp_path):
    expect_little_lost(BUNDLED, tmp_path)


@real_weights[0]
@real_weights[1]
@pytest.mark.skipif(not CORPUS.exists(), reason="the validation text is not there")
def test_perplexity_of_smollm2(tmp_path):
    """The file has weights of 4 bits in groups of 32 itself, so int4 has less to lose here than on most."""
    expect_little_lost(fetch(SMOLLM2, SMOLLM2_SHA256), tmp_path)
