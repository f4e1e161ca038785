"""`python -m pytest training`: the network against transformers and against the definitions, at tiny sizes on a CPU."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from training.data import END_ID, Batches, encode, learn_tokenizer
from training.evaluate import acceptance, bits_per_byte
from training.export import load_state, save_model, save_state
from training.model import CHUNK, Network, Shape, gated_delta_rule, rope, unit_lower_inverse
from training.optimizer import orthogonal
from training.train import Trainer, rate

TINY = Shape(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    head_dim=16,
    linear_key_head_dim=8,
    linear_value_head_dim=16,
    partial_rotary_factor=0.5,
)
TEXT = ["The cat sat on the mat.\n\nA dog ran by; naïve, “quoted” — and 3.14 more.\n" * 4, "Another book."]


@pytest.fixture
def network() -> Network:
    """Weights far from the start, where a layer adds nothing; rounded, so that saving them loses nothing."""
    torch.manual_seed(1)
    network = Network(TINY)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1).copy_(parameter.bfloat16())
    return network


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return learn_tokenizer([text * 10 for text in TEXT], 300)


def recurrence(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    state = torch.zeros(*k.shape[:2], k.shape[-1], v.shape[-1], dtype=k.dtype)
    out = []
    for t in range(k.shape[2]):
        state = state * decay[:, :, t, None, None].exp()
        seen = (state.mT @ k[:, :, t, :, None]).squeeze(-1)
        state = state + k[:, :, t, :, None] * (beta[:, :, t, None] * (v[:, :, t] - seen))[:, :, None]
        out.append((state.mT @ q[:, :, t, :, None]).squeeze(-1))
    return torch.stack(out, dim=2)


@pytest.mark.parametrize("tokens", [1, CHUNK, 2 * CHUNK + 5])
def test_the_chunked_delta_rule_and_its_gradients_are_those_of_the_recurrence(tokens: int) -> None:
    torch.manual_seed(2)
    q, k = (torch.nn.functional.normalize(torch.randn(2, 3, tokens, 8).double(), dim=-1) for _ in range(2))
    v, decay, beta = torch.randn(2, 3, tokens, 5).double(), -torch.rand(2, 3, tokens).double(), torch.rand(2, 3, tokens)
    inputs = [x.double().requires_grad_() for x in (q, k, v, decay, beta)]
    want, have = recurrence(*inputs), gated_delta_rule(*inputs)
    torch.testing.assert_close(have, want)
    weight = torch.randn_like(want)
    gradients = (torch.autograd.grad((x * weight).sum(), inputs) for x in (have, want))
    torch.testing.assert_close(*gradients)


def test_the_inverse_holds_when_all_keys_are_nearly_one() -> None:
    torch.manual_seed(3)
    keys = torch.nn.functional.normalize(1 + 0.3 * torch.randn(64, 16), dim=-1)
    a = (keys @ keys.T).tril(-1)
    product = unit_lower_inverse(a) @ (a + torch.eye(64))
    torch.testing.assert_close(product, torch.eye(64), atol=1e-4, rtol=0)


def test_transformers_loads_the_saved_folder_and_gives_the_same_logits(
    network: Network, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    save_model(network, tokenizer, tmp_path)
    reference, said = transformers.Qwen3_5ForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not said["missing_keys"] and not said["unexpected_keys"] and not said["mismatched_keys"]
    tokens = torch.randint(300, (2, 150))
    with torch.no_grad():
        torch.testing.assert_close(network.logits(network(tokens)), reference(tokens).logits, atol=1e-4, rtol=0)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(TEXT[0]).input_ids == tokenizer.encode(TEXT[0]).ids
    assert loaded.decode(loaded(TEXT[0]).input_ids) == TEXT[0]
    assert loaded.eos_token_id == END_ID


def test_saved_files_hold_every_weight_and_stay_small(
    network: Network, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.export.FILE_BYTES", 40_000)
    save_model(network, tokenizer, tmp_path)
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 1
    saved = {name: weight for file in files for name, weight in load_file(file).items()}
    assert {name: weight.float().tolist() for name, weight in saved.items()} == {
        name: weight.tolist() for name, weight in network.state_dict().items()
    }
    assert "mtp.fc.weight" in saved and "mtp.layers.0.self_attn.k_proj.weight" in saved


def test_drafts_are_what_decoding_one_pass_at_a_time_gives(
    network: Network, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Written out for one chain: first-pass rows up to t, then the chain's own rows, through transformers' layer."""
    transformers = pytest.importorskip("transformers")
    save_model(network, tokenizer, tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config._attn_implementation = "eager"
    layer = transformers.models.qwen3_5.modeling_qwen3_5.Qwen3_5DecoderLayer(config, 3)
    layer.load_state_dict(network.mtp.layers[0].state_dict())
    mtp, length, depth, t = network.mtp, 12, 3, 7
    tokens = torch.randint(300, (1, length + depth))
    with torch.no_grad():
        hidden = network(tokens[:, :length])
        have = [rows[0, t] for rows in network.drafts(hidden, tokens, depth)]
        embedded = network.embedding[tokens[0]]
        entries = [
            mtp.fc(torch.cat((mtp.pre_fc_norm_embedding(embedded[j + 1]), mtp.pre_fc_norm_hidden(hidden[0, j]))))
            for j in range(t + 1)
        ]
        for ahead in range(1, depth + 1):
            count = len(entries)
            mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
            turn = tuple(part[None] for part in rope(TINY, 0, count, tokens.device))
            row = mtp.norm(layer(torch.stack(entries)[None], position_embeddings=turn, attention_mask=mask)[0, -1])
            torch.testing.assert_close(have[ahead - 1], row, atol=1e-5, rtol=0)
            deeper = embedded[t + ahead + 1] if ahead < depth else embedded[0]
            entries.append(mtp.fc(torch.cat((mtp.pre_fc_norm_embedding(deeper), mtp.pre_fc_norm_hidden(row)))))


def test_training_learns_and_a_resumed_run_is_the_unbroken_one(tokenizer: Tokenizer, tmp_path: Path) -> None:
    row = encode(tokenizer, TEXT * 8)
    batches = Batches(row, length=32, ahead=4, size=4, seed=0)

    def run(trainer: Trainer, first: int, last: int) -> list[float]:
        return [trainer.step(batches.at(i), i + 1, 1.0)[0].item() for i in range(first, last)]

    torch.manual_seed(0)
    whole = Trainer(Network(TINY), compiled=False)
    losses = run(whole, 0, 6)
    assert losses[-1] < losses[0] - 0.5
    save_state(tmp_path / "state", whole.network, whole.optimizer, step=6, steps=9)
    rest = run(whole, 6, 9)
    resumed = Trainer(Network(TINY), compiled=False)
    assert load_state(tmp_path / "state", resumed.network, resumed.optimizer) == {"step": 6, "steps": 9}
    assert run(resumed, 6, 9) == rest


def test_batches_tile_the_row_once_an_epoch() -> None:
    batches = Batches(torch.arange(1000, dtype=torch.int32), length=10, ahead=3, size=4, seed=5)
    first = torch.cat([batches.at(step) for step in range(batches.per_epoch)])
    assert first.shape == (4 * batches.per_epoch, 13)
    assert (first.diff(dim=1) == 1).all()
    assert first[:, :10].unique().numel() == first[:, :10].numel() > 900
    assert not torch.equal(batches.at(batches.per_epoch), first[:4])
    assert torch.equal(batches.at(0), first[:4])


def test_measures_of_a_network_that_knows_nothing(tokenizer: Tokenizer) -> None:
    network = Network(TINY)
    with torch.no_grad():
        network.embedding.zero_()
    row = encode(tokenizer, TEXT * 4)
    bits = bits_per_byte(network, row, tokenizer, length=32, batch=3)
    assert 0 < bits <= 8.23  # log2(300) a token, and a token is at least a byte
    assert acceptance(network, row, length=32, batch=3) == [1.0, 1.0, 1.0]  # all logits are equal, so all choices are


def test_orthogonal_evens_out_the_directions() -> None:
    torch.manual_seed(0)
    spread = torch.linalg.svdvals(orthogonal(torch.randn(2, 48, 32)).float())
    assert spread.min() > 0.4 and spread.max() < 1.4


def test_the_rate_rises_stays_and_falls_to_zero() -> None:
    rates = [rate(step, 1000) for step in range(1001)]
    assert rates[0] == 0.01 and max(rates) == 1.0 == rates[300] and rates[-1] == 0.0
    assert rates[:500] == [rate(step, None) for step in range(500)]
