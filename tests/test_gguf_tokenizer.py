"""Tokenizers from GGUF metadata: the ids and the text of the original, and of a plain sentencepiece."""

import json
import random
from itertools import pairwise
from pathlib import Path

import gguf
import pytest
from gguf_files import finish
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as QWEN3_5

from bough.errors import ModelError
from bough.models.gguf import GGUFFile
from bough.models.gguf_tokenizer import gguf_tokenizer

TEXTS = [
    "The quick brown fox didn't jump over 12 lazy dogs in 1984; it's WE'LL see.\n\n  def f(x):\n\treturn x + 1\r\n",
    "naïve café, zażółć gęślą jaźń, 日本語のテキスト, привет мир, 한국어 🤗🤗 e\u0301\n" * 2,
] * 3
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level(pattern: str) -> pre_tokenizers.PreTokenizer:
    cut = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# The originals, as their tokenizer.json has them.
CUTS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "default": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "unheard-of": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]),
    "llama-bpe": byte_level(TikTokenConverter(vocab_file="").pattern),
    "qwen2": byte_level(QWEN2),
    "qwen35": byte_level(QWEN3_5),
}


def original(pre: str) -> Tokenizer:
    core = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    core.pre_tokenizer, core.decoder = CUTS[pre], decoders.ByteLevel()
    if pre.startswith("qwen"):
        core.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(TEXTS, trainer)
    core.add_tokens([AddedToken("<think>", normalized=False)])
    return core


def write(path: Path, **metadata) -> GGUFFile:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        getattr(writer, f"add_{key}")(value)
    finish(writer)
    return GGUFFile(path)


def write_byte_level(path: Path, core: Tokenizer, pre: str, **metadata) -> GGUFFile:
    tokens = [core.id_to_token(i) for i in range(core.get_vocab_size())]
    merges = json.loads(core.to_str())["model"]["merges"]
    types = [3 if token in SPECIAL else 4 if token == "<think>" else 1 for token in tokens]
    return write(
        path,
        tokenizer_model="gpt2",
        tokenizer_pre=pre,
        token_list=tokens,
        token_types=types,
        token_merges=[" ".join(merge) for merge in merges],
        **metadata,
    )


@pytest.fixture(scope="module", params=CUTS)
def pair(request, tmp_path_factory) -> tuple[Tokenizer, Tokenizer]:
    """An original, and ours from the file made of it."""
    theirs = original(request.param)
    return theirs, gguf_tokenizer(write_byte_level(tmp_path_factory.mktemp("bpe") / "a.gguf", theirs, request.param))[0]


WORDS = st.sampled_from(
    ["the", " fox", "didn't", "WE'LL", "12345", " 12", "  ", "\n", "\r\n\n", "日本語", "e\u0301", "x\u0301y", "🤗"]
)
TEXT = st.lists(WORDS | st.sampled_from([*SPECIAL, "<think>"]) | st.text(max_size=6)).map("".join)


@given(text=TEXT)
def test_byte_level(pair, text):
    theirs, ours = pair
    expected = theirs.encode(text).ids
    assert ours.encode(text).ids == expected
    for skip in (True, False):
        assert ours.decode(expected, skip_special_tokens=skip) == theirs.decode(expected, skip_special_tokens=skip)


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["1234", "5"]),
        ("llama-bpe", ["123", "45"]),
        ("lfm2", ["123", "45"]),
        ("smollm", list("12345")),
        ("qwen2", list("12345")),
        ("qwen35", list("12345")),
        ("tekken", list("12345")),
    ],
)
def test_digits(pre, expected, tmp_path):
    tokens = [*"12345", "12", "123", "1234", "45"]
    options = {"token_list": tokens, "token_merges": ["1 2", "12 3", "123 4", "4 5"]}
    core = gguf_tokenizer(write(tmp_path / "a.gguf", tokenizer_model="gpt2", tokenizer_pre=pre, **options))[0]
    assert core.encode("12345").tokens == expected


def test_whole_words(tmp_path):
    """Llama 3 takes a word that is a token, though merges do not lead to it."""
    tokens = ["a", "b", "c", "ab", "abc", "bc"]
    for pre, expected in [("llama-bpe", ["abc"]), ("gpt-2", ["a", "bc"])]:
        options = {"token_list": tokens, "token_merges": ["b c", "a b"]}
        core = gguf_tokenizer(write(tmp_path / f"{pre}.gguf", tokenizer_model="gpt2", tokenizer_pre=pre, **options))[0]
        assert core.encode("abc").tokens == expected


def vocabulary(seed: int) -> list[str]:
    """Pieces as training finds them: each is two earlier ones joined. Early ones are better."""
    choice = random.Random(seed).choice
    letters, pieces = ["▁", "a", "b", "c", "é"], []
    while len(pieces) < 60:
        piece = choice(letters + pieces[:20]) + choice(letters + pieces[:20])
        if piece not in pieces and len(piece) < 9:
            pieces.append(piece)
    return pieces + letters


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
MARKED = ["<s>", "</s>", "<unk>", "  ", "\n\n", "<b>"]
MARKED_TYPES = [3, 3, 2, 4, 4, 4]


def write_sentencepiece(path: Path, pieces: list[str], **metadata) -> GGUFFile:
    """Pieces, then bytes, then control tokens and those the user defined, as Gemma has them."""
    return write(
        path,
        tokenizer_model="llama",
        token_list=[*pieces, *BYTES, *MARKED],
        token_scores=[-float(rank) for rank in range(len(pieces))] + [-1000.0] * 262,
        token_types=[1] * len(pieces) + [6] * 256 + MARKED_TYPES,
        bos_token_id=len(pieces) + 256,
        eos_token_id=len(pieces) + 257,
        unk_token_id=len(pieces) + 258,
        **metadata,
    )


def sentencepiece(pieces: list[str], text: str) -> list[str]:
    """The rule itself: of all neighbours that make a piece, join the best, the leftmost of equals."""
    rank = {piece: -score for score, piece in enumerate(pieces)}
    parts = list(text.replace(" ", "▁"))
    while pairs := [(rank[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in rank]:
        at = -max(pairs)[1]
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    return [token for part in parts for token in ([part] if part in rank else map("<0x{:02X}>".format, part.encode()))]


@pytest.fixture(scope="module", params=range(4))
def pieces(request, tmp_path_factory) -> tuple[list[str], Tokenizer, Tokenizer]:
    """A vocabulary, its tokenizer, and the one that puts a space in front."""
    pieces, folder = vocabulary(request.param), tmp_path_factory.mktemp("pieces")
    plain = write_sentencepiece(folder / "plain.gguf", pieces, add_space_prefix=False)
    return pieces, gguf_tokenizer(plain)[0], gguf_tokenizer(write_sentencepiece(folder / "led.gguf", pieces))[0]


@given(text=st.text("abcé", min_size=1) | st.text("aab é日\n<🤗", min_size=1))
def test_sentencepiece(pieces, text):
    vocabulary, plain, led = pieces
    while "  " in text or "\n\n" in text:  # tokens of their own
        text = text.replace("  ", " ").replace("\n\n", "\n")
    assert plain.encode(text).tokens == sentencepiece(vocabulary, text)
    assert led.encode(text).tokens == sentencepiece(vocabulary, " " + text)
    assert plain.decode(plain.encode(text).ids) == led.decode(led.encode(text).ids) == text


def test_marked_tokens(tmp_path):
    core = gguf_tokenizer(write_sentencepiece(tmp_path / "a.gguf", ["▁a", "▁", "a"], add_space_prefix=False))[0]
    encoding = core.encode("<s>a  a\n\n a<b></s>")
    assert encoding.tokens == ["<s>", "a", "  ", "a", "\n\n", "▁a", "<b>", "</s>"]
    assert core.decode(encoding.ids) == "a  a\n\n a<b>"
    assert core.decode(encoding.ids, skip_special_tokens=False) == "<s>a  a\n\n a<b></s>"


def test_names_and_template(tmp_path):
    file = write_sentencepiece(tmp_path / "a.gguf", ["a"], eot_token_id=0, chat_template="{{ messages }}")
    core, special, template, add_bos = gguf_tokenizer(file)
    assert special == {"bos_token": "<s>", "eos_token": "</s>", "eot_token": "a", "unk_token": "<unk>"}
    assert template == "{{ messages }}" and add_bos is True
    assert core.token_to_id("<s>") == 257 and core.get_vocab_size() == 263


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"tokenizer_pre": "gpt-2"}, False),
        ({"tokenizer_pre": "gpt-2", "add_bos_token": True}, True),
        ({"tokenizer_pre": "llama-bpe"}, True),
        ({"tokenizer_pre": "llama-bpe", "add_bos_token": False}, False),
    ],
)
def test_bos(metadata, expected, tmp_path):
    options = {"tokenizer_model": "gpt2", "token_list": ["a", "b", "ab"], "token_merges": ["a b"], **metadata}
    assert gguf_tokenizer(write(tmp_path / "a.gguf", **options, bos_token_id=0))[3] is expected
    assert gguf_tokenizer(write(tmp_path / "b.gguf", **options))[3] is False


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({}, "lacks tokenizer.ggml.tokens"),
        ({"token_list": ["a"]}, "lacks tokenizer.ggml.model"),
        ({"token_list": ["a"], "tokenizer_model": "t5"}, "'t5'.* gpt2 and llama"),
        ({"token_list": ["a"], "tokenizer_model": "gpt2"}, "lacks tokenizer.ggml.merges"),
        ({"token_list": ["a"], "tokenizer_model": "gpt2", "token_merges": ["a b"]}, "no usable tokenizer"),
        ({"token_list": ["a"], "tokenizer_model": "gpt2", "token_merges": ["a a"]}, "no usable tokenizer"),  # a panic
        ({"token_list": ["a"], "tokenizer_model": "llama", "token_scores": [0.0, 1.0]}, "2 entries .* for 1 tokens"),
        ({"token_list": ["a"], "tokenizer_model": "llama", "token_types": [1, 1]}, "2 entries .* for 1 tokens"),
        ({"token_list": ["a"], "tokenizer_model": "llama", "bos_token_id": 7}, "no token 7"),
    ],
)
def test_damaged(metadata, said, tmp_path):
    with pytest.raises(ModelError, match=said):
        gguf_tokenizer(write(tmp_path / "a.gguf", **metadata))
