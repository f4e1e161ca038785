"""The model in the box: complete and small enough, the same in transformers, and really trained."""

import math

import pytest
import torch
from parity import TIE, TOLERANCE, feed, pool_for, reference_logits
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from bough import Engine, SamplingParams
from bough.cli import BUNDLED
from bough.state.kinds import FullKV, Recurrent
from bough.state.live import State

MEGABYTE = 1_000_000
PROMPTS = [
    "Once upon a time, in a small village by the sea, there lived",
    "## CHAPTER I\n\n",
    "“You are late,” said the captain — “and naïve, too!”\n\n",
    "In 1848",
]
# Jane Eyre (1847), which is neither in the training text nor in the validation text.
UNSEEN = """\
There was no possibility of taking a walk that day. We had been wandering, indeed, in the leafless shrubbery an hour \
in the morning; but since dinner (Mrs. Reed, when there was no company, dined early) the cold winter wind had brought \
with it clouds so sombre, and a rain so penetrating, that further out-door exercise was now out of the question.

I was glad of it: I never liked long walks, especially on chilly afternoons: dreadful to me was the coming home in the \
raw twilight, with nipped fingers and toes, and a heart saddened by the chidings of Bessie, the nurse, and humbled by \
the consciousness of my physical inferiority to Eliza, John, and Georgiana Reed."""


@pytest.fixture(scope="module")
def engine():
    with Engine.load(BUNDLED, dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def reference():
    return AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()


def test_sizes():
    files = {file.name: file.stat().st_size for file in BUNDLED.iterdir()}
    assert sum(files.values()) <= 24 * MEGABYTE
    assert max(files.values()) <= 16 * MEGABYTE


def test_weights_are_bfloat16_and_data_alone():
    for file in BUNDLED.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"BF16"}  # noqa: SIM118 (no dict)


def test_layers_and_defaults(engine):
    assert [type(kind) for kind in engine.model.kinds] == [Recurrent, Recurrent, Recurrent, FullKV] * 2
    assert engine.model.head is engine.model.embedding
    assert engine.defaults == SamplingParams(temperature=0.8, top_p=0.95)
    assert engine.end_tokens == {0}


@pytest.mark.parametrize("text", [*PROMPTS, UNSEEN, "tabs\t and  spaces \n\n\n 日本 \x00 <|endoftext|>"])
def test_tokens_are_those_of_transformers_and_spell_the_text(engine, text):
    tokens = engine.tokenize(text)
    assert tokens == AutoTokenizer.from_pretrained(BUNDLED)(text).input_ids
    if 0 not in tokens:
        assert engine.tokenizer.decode(tokens) == text


def test_logits_are_those_of_transformers(engine, reference):
    tokens, pool = engine.tokenize(UNSEEN), pool_for(engine.model)
    state = State(pool)
    pieces = [tokens[:100], tokens[100:-8], *([token] for token in tokens[-8:])]
    logits = torch.cat([feed(engine.model, pool, [(state, piece)])[0] for piece in pieces])
    state.release()
    error = (logits - reference_logits(reference, tokens)).abs().max().item()
    assert error <= TOLERANCE


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_is_that_of_transformers(engine, reference, prompt):
    """64 tokens, as long as the reference's top two are not a tie."""
    tokens = engine.tokenize(prompt)
    written = engine.generate(prompt, SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)).tokens
    assert len(written) == 64
    oracle = reference_logits(reference, [*tokens, *written])[len(tokens) - 1 :]
    for i, token in enumerate(written):
        top = oracle[i].topk(2)
        if top.values[0] - top.values[1] > TIE:
            assert token == int(top.indices[0]), f"greedy token {i} differs"


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_it_predicts_a_book_it_has_not_read(dtype):
    """Measured: 1.36 bits per byte. Equal odds for all tokens cost 3.3, and so does a model before training."""
    with Engine.load(BUNDLED, dtype=dtype) as engine:
        tokens = engine.tokenize(UNSEEN)
        nats = -sum(engine.score([0, *tokens]))
        equal_odds = len(tokens) * math.log(engine.model.vocab_size)
    per_byte = math.log(2) * len(UNSEEN.encode())
    assert equal_odds / per_byte > 3
    assert nats / per_byte < 1.5


def test_the_mtp_head_is_there(engine):
    config = engine.model.config
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_attention_heads * head, config.num_key_value_heads * head
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (2 * query, hidden),  # each head's query, then its gate
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    around = {"fc": (hidden, 2 * hidden), "norm": (hidden,)}
    around |= {f"pre_fc_norm_{each}": (hidden,) for each in ("embedding", "hidden")}
    expected = around | {f"layers.0.{name}": shape for name, shape in layer.items()}
    found = {name: tuple(tensor.shape) for name, tensor in engine.model.extra.items()}
    assert found == {f"mtp.{name}.weight": shape for name, shape in expected.items()}
    assert config.mtp_num_hidden_layers == 1
    assert all(tensor.any() for tensor in engine.model.extra.values())
