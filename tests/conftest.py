"""Models that several test files use: tiny, random, made once for a run."""

import gc
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from parity import randomise
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = "the quick brown fox jumps over the lazy dog and runs away from a very old bear in the dark forest " * 8


def add_tokenizer(folder: Path, template: str | None = CHATML) -> int:
    """A byte-level tokenizer in the folder; returns its size."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        [WORDS], trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    )
    core.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "bos_token": None, "pad_token": "<|endoftext|>"}
    if template:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return core.get_vocab_size()


def pytest_collection_finish() -> None:
    """What has been imported by now stays: no test need look through it for garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def engines_that_leave_that_frozen():
    """An engine looks for garbage when it is opened, through all that tests before have left, and when it is closed,
    all that is frozen would be looked through by the next one: most of the time of a test that opens several. Here they
    look through what is young. test_engine.py tests what they do."""
    with pytest.MonkeyPatch.context() as patch:
        collecting = SimpleNamespace(isenabled=gc.isenabled, collect=lambda: gc.collect(1))
        collecting.freeze = collecting.unfreeze = lambda: None
        patch.setattr("bough.engine.garbage.gc", collecting)
        yield


@pytest.fixture(autouse=True)
def same_weights_every_time():
    """transformers draws the weights of a new model from torch's own generator."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory) -> Path:
    """A Llama with a tokenizer and a chat template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    vocab = add_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=2, bos_token_id=None,
    )  # fmt: skip
    return _save(LlamaForCausalLM(config), folder)


@pytest.fixture(scope="session")
def hybrid_folder(tmp_path_factory) -> Path:
    """A Qwen3.5 (gated delta and full attention) with a tokenizer and a chat template."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("hybrid")
    vocab = add_tokenizer(folder)
    config = Qwen3_5TextConfig(
        vocab_size=vocab, hidden_size=48, intermediate_size=80, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, max_position_embeddings=512, eos_token_id=2, bos_token_id=None,
    )  # fmt: skip
    return _save(Qwen3_5ForCausalLM(config), folder)


def _save(model: torch.nn.Module, folder: Path) -> Path:
    randomise(model, spread=0.2)
    model.save_pretrained(folder)  # type: ignore[operator]
    return folder
