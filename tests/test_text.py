"""Tokenizers, detokenisation, stop strings and chat templates, beside transformers on the same folder."""

import json
import random
import threading
from functools import cache
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Core

from bough.engine.template import MAX_OUTPUT, ChatTemplate
from bough.engine.text import StopStrings
from bough.engine.tokenizer import Detokenizer, Tokenizer, common_prefix
from bough.errors import ModelError, RequestError, TemplateError

# Vocabularies as the model families have them, trained on a few lines.

LINES = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't care at all.",
    "user assistant system model: you are a helpful assistant. Hello world! hello  there",
    "def main():\n    return [x * 2 for x in range(10)]\n\n\nprint(main())",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. naïve café",
    "日本語の文章と中文句子 and some emoji 😀 👩‍👩‍👧 🏳️‍🌈",
]
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA3 = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
SPACED = ["<unk>", "<s>", "</s>", "<start_of_turn>", "<end_of_turn>"]
QWEN_WORDS = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level() -> Core:
    core = Core(models.BPE())
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, show_progress=False, initial_alphabet=alphabet)
    core.train_from_iterator(LINES, trainer)
    core.add_special_tokens(CHATML + LLAMA3)
    core.add_tokens([AddedToken(text, normalized=False, special=False) for text in ("<think>", "</think>", "<｜äß｜>")])
    return core


def spaced(*, style: str) -> Core:
    """BPE over text with "▁" for spaces and tokens for single bytes, as sentencepiece models are converted."""
    start = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trained = Core(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trained.train_from_iterator(LINES[:4], trainers.BpeTrainer(vocab_size=300, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    texts = [*SPACED, *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(model["vocab"], key=model["vocab"].get)]
    vocab = {text: token for token, text in enumerate(dict.fromkeys([*texts, "▁", "▁▁"]))}
    merges = [*map(tuple, model["merges"]), ("▁", "▁")]
    core = Core(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    space = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if style == "llama":
        core.pre_tokenizer = start
        core.decoder = decoders.Sequence([*space, decoders.Strip(" ", 1, 0)])
    elif style == "prepend":
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        core.decoder = decoders.Sequence([*space, decoders.Strip(" ", 1, 0)])
    elif style == "gemma":
        core.normalizer = normalizers.Replace(" ", "▁")
        core.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
        core.decoder = decoders.Sequence(space)
    else:
        core.pre_tokenizer = start
        core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    core.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    core.add_special_tokens(SPACED)
    extra = ("▁▁", "\n", "\n\n", "[tool]") if style == "gemma" else ("▁▁",)
    core.add_tokens([AddedToken(text, normalized=False, special=False) for text in extra])
    core.add_tokens([AddedToken("fox", normalized=True, special=False)])
    return core


BUILDERS = {
    "byte_level": byte_level,
    "llama": lambda: spaced(style="llama"),
    "prepend": lambda: spaced(style="prepend"),
    "gemma": lambda: spaced(style="gemma"),
    "metaspace": lambda: spaced(style="metaspace"),
}
NAMED = {
    "byte_level": {
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": {"content": "<|endoftext|>", "__type": "AddedToken"},
    },
    "spaced": {"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}, "unk_token": "<unk>"},
}


@cache
def serialised(kind: str) -> str:
    return BUILDERS[kind]().to_str()


@cache
def tokenizer(kind: str) -> Tokenizer:
    special = {"eos_token": "<|im_end|>", "bos_token": "<|begin_of_text|>"} if kind == "byte_level" else {}
    special = special or {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(Core.from_str(serialised(kind)), special=special)


def write_folder(folder: Path, kind: str, **config: object) -> Path:
    (folder / "tokenizer.json").write_text(serialised(kind), encoding="utf-8")
    named = NAMED.get(kind, NAMED["spaced"])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def both(folder: Path):
    """Our tokenizer of a folder and that of transformers."""
    from transformers import AutoTokenizer

    return Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)


kinds = pytest.mark.parametrize("kind", BUILDERS)
texts = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from([*LINES, *CHATML, *LLAMA3, *SPACED, "<think>", "[tool]", "▁", " ", "  ", "\n", "\n\n\n", "é"]),
    ),
    max_size=8,
).map("".join)
vocabulary = st.integers(0, 700)  # reaches past every vocabulary here, as models with padded embeddings do


# Encoding and decoding


@kinds
def test_equals_transformers(kind: str, tmp_path: Path) -> None:
    ours, theirs = both(write_folder(tmp_path, kind, add_bos_token=True, clean_up_tokenization_spaces=True))
    assert ours is not None

    @given(text=texts, tokens=st.lists(vocabulary))
    @settings(max_examples=80)
    def check(text: str, tokens: list[int]) -> None:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text, special=False) == theirs.encode(text, add_special_tokens=False)
        for some in (tokens, ours.encode(text)):
            for skip in (True, False):
                assert ours.decode(some, skip_special=skip) == theirs.decode(some, skip_special_tokens=skip)

    check()
    assert ours.vocab_size == len(theirs)
    assert ours.eos_ids == {theirs.eos_token_id}
    assert ours.special == theirs.special_tokens_map
    assert ours.special_ids == {
        token for token in range(ours.vocab_size) if theirs.decode([token, token], skip_special_tokens=True) == ""
    } - {token for token in range(ours.vocab_size) if theirs.decode([token, token]) == ""}


@kinds
def test_pieces_join_to_the_decoded_text(kind: str) -> None:
    ours = tokenizer(kind)
    by_byte = {ours.token_bytes(token): token for token in range(ours.vocab_size)}
    cut_characters = st.builds(
        lambda text, start, end: [by_byte[bytes([byte])] for byte in text.encode()[start : len(text.encode()) - end]],
        st.sampled_from(["€", "😀", "é😀", "\n", "\xff"]),
        st.integers(0, 1),
        st.integers(0, 3),
    )
    spaces = st.sampled_from([by_byte[b" "], by_byte.get(b"  ", 0)])
    chunks = st.lists(st.one_of(cut_characters, spaces.map(lambda token: [token]), st.lists(vocabulary, max_size=4)))

    @given(
        tokens=chunks.map(lambda chunks: [token for chunk in chunks for token in chunk]),
        prompt=st.integers(0, 8),
        skip=st.booleans(),
        step=st.integers(1, 4),
    )
    @settings(max_examples=150)
    def check(tokens: list[int], prompt: int, skip: bool, step: int) -> None:
        text, shown = (ours.decode(some, skip_special=skip) for some in (tokens, tokens[:prompt]))
        whole = Detokenizer(ours, skip_special=skip)
        pieces = [whole.push(tokens[at : at + step]) for at in range(0, len(tokens), step)] + [whole.finish()]
        assert "".join(pieces) == text
        rest = Detokenizer(ours, tokens[:prompt], skip_special=skip)
        pieces = [rest.push([token]) for token in tokens[prompt:]] + [rest.finish()]
        assert "".join(pieces) == text[common_prefix(text, shown) :]

    check()


@kinds
@given(text=texts)
@settings(max_examples=50)
def test_valid_text_never_shows_a_broken_character(kind: str, text: str) -> None:
    ours = tokenizer(kind)
    tokens = ours.encode(text.replace("\N{REPLACEMENT CHARACTER}", ""))
    stream = Detokenizer(ours, skip_special=False)
    assert not any("\N{REPLACEMENT CHARACTER}" in stream.push([token]) for token in tokens)


def test_a_character_comes_with_its_last_byte() -> None:
    ours = tokenizer("byte_level")
    one_byte = {ours.token_bytes(token): token for token in range(256)}
    tokens = [one_byte[bytes([byte])] for byte in "a€😀".encode()]
    stream = Detokenizer(ours)
    assert [stream.push([token]) for token in tokens] == ["a", "", "", "€", "", "", "", "😀"]
    assert stream.push(tokens[1:3]) == ""
    assert stream.push(tokens[:1]) == "\N{REPLACEMENT CHARACTER}a"  # these bytes can no longer become valid
    assert stream.push(tokens[1:2]) + stream.finish() == "\N{REPLACEMENT CHARACTER}"


def test_a_run_of_byte_tokens_comes_when_it_ends() -> None:
    ours = tokenizer("llama")
    euro = ours.encode("a€€a", special=False)[-7:]
    stream = Detokenizer(ours, ours.encode("a"))
    assert [stream.push([token]) for token in euro] == ["", "", "", "", "", "", "€€a"]
    assert stream.push(euro[:3]) + stream.finish() == "€"


def test_a_character_begun_in_the_prompt() -> None:
    for kind in ("byte_level", "llama"):
        ours = tokenizer(kind)
        by_byte = {ours.token_bytes(token): token for token in range(ours.vocab_size)}
        prompt, invalid = [by_byte[bytes([byte])] for byte in "😀".encode()], by_byte[b"\xff"]
        begun = Detokenizer(ours, prompt[:3])
        assert begun.push(prompt[3:]) + begun.finish() == "😀"
        given_up = Detokenizer(ours, prompt[:3])
        assert given_up.push(ours.encode_split("a", follows=True)[0]) == "a"
        spoilt = Detokenizer(ours, [invalid, *prompt])
        assert spoilt.push([invalid]) + spoilt.finish() == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("kind", ["llama", "prepend", "metaspace"])
def test_only_the_start_of_a_text_loses_its_space(kind: str) -> None:
    ours = tokenizer(kind)
    prompt, tokens = ours.encode("hello"), ours.encode("world", special=False)
    assert ours.decode(tokens) == "world"
    assert Detokenizer(ours).push(tokens) == "world"
    assert Detokenizer(ours, prompt[:1]).push(tokens) == "world"  # behind BOS alone, a text begins
    assert Detokenizer(ours, prompt).push(tokens) == " world"


@kinds
def test_token_bytes(kind: str) -> None:
    ours = tokenizer(kind)
    tokens = ours.encode(f"x {LINES[0]} 日本 <think>", special=False)[1:]
    assert b"".join(map(ours.token_bytes, tokens)).decode().endswith(f"{LINES[0]} 日本 <think>")
    assert b"".join(map(ours.token_bytes, ours.encode("x the dog", special=False))).endswith(b"x the dog")
    assert ours.token_bytes(100_000) == b""


@kinds
@given(text=st.lists(st.one_of(st.text(max_size=8), st.sampled_from([*LINES, " ", "  ", "\n", "\n\n"])), max_size=5))
@settings(max_examples=50)
def test_following_text_is_encoded_without_a_start(kind: str, text: list[str]) -> None:
    ours, plain = tokenizer(kind), normalize("NFC", "".join(text).replace("▁", "_"))
    tokens, _ = ours.encode_split(plain, follows=True)
    stream = Detokenizer(ours, ours.encode("hello"))
    assert stream.push(tokens) + stream.finish() == plain


@kinds
@given(text=texts, follows=st.booleans())
@settings(max_examples=50)
def test_text_is_tokenised_apart_at_splits(kind: str, text: str, follows: bool) -> None:
    ours = tokenizer(kind)
    tokens, splits = ours.encode_split(text, follows=follows)
    assert follows or tokens == ours.encode(text, special=False)
    for char, token in splits:
        assert ours.encode(text[char:], special=False) == tokens[token:]
        assert ours.encode_split(text[:char], follows=follows)[0] == tokens[:token]


# Folders


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    assert Tokenizer.from_folder(tmp_path) is None


def test_a_merge_that_the_library_panics_at(tmp_path: Path) -> None:
    """It makes what is longer than any token. What is raised is no Exception."""
    core = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "a"]]}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(core))
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a usable tokenizer"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", [b'{"model": ', b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_broken_file_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    write_folder(tmp_path, "llama")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=name):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"x": {"content": "<x>"}}},
        {"added_tokens_decoder": {"1": {}}},
        {"added_tokens_decoder": ["<x>"]},
        {"added_tokens_decoder": {"1": {"content": 7}}},
        {"chat_template": [{"name": "default"}]},
        {"chat_template": 7},
    ],
)
def test_a_malformed_config_is_a_model_error(config: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        Tokenizer.from_folder(write_folder(tmp_path, "llama", **config))


FLAGS = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token": "<new>", "extra_special_tokens": ["<more>", "the"]},
        {"additional_special_tokens": ["<more>"], "image_token": "<image>"},
        {"extra_special_tokens": {"boi_token": "<boi>", "eot_token": "<end_of_turn>"}},
        {
            "added_tokens_decoder": {
                "900": FLAGS | {"content": "<b>"},
                "31": FLAGS | {"content": "<a>", "special": False},
            }
        },
        {"added_tokens_decoder": {"1": FLAGS | {"content": "<s>", "rstrip": True, "special": False}}},
        {"added_tokens_decoder": {"5": FLAGS | {"content": "[tool]"}}, "eos_token": "[tool]"},
    ],
)
def test_tokens_declared_in_the_config(config: dict[str, object], tmp_path: Path) -> None:
    ours, theirs = both(write_folder(tmp_path, "gemma", **config))
    assert ours is not None
    text = "a<new> <more>the<a> <b><image><boi>[tool]<s> b</s><end_of_turn>"
    assert ours.encode(text) == theirs.encode(text)
    for skip in (True, False):
        tokens = theirs.encode(text)
        assert ours.decode(tokens, skip_special=skip) == theirs.decode(tokens, skip_special_tokens=skip)
        stream = Detokenizer(ours, skip_special=skip)
        assert stream.push(tokens) + stream.finish() == theirs.decode(tokens, skip_special_tokens=skip)
    assert ours.special == theirs.special_tokens_map
    assert theirs.eos_token_id in ours.eos_ids


def test_special_tokens_map(tmp_path: Path) -> None:
    write_folder(tmp_path, "llama", eos_token="<s>")
    special = {"eos_token": {"content": "<end_of_turn>", **FLAGS}, "pad_token": "<pad>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special), encoding="utf-8")
    ours, theirs = both(tmp_path)
    assert ours is not None
    assert ours.special == theirs.special_tokens_map
    assert ours.eos_ids == {theirs.eos_token_id}
    assert ours.encode("a<pad>") == theirs.encode("a<pad>")


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    def source() -> object:
        found = Tokenizer.from_folder(tmp_path)
        assert found is not None
        return found.template

    write_folder(tmp_path, "llama")
    assert source() is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}), encoding="utf-8")
    assert source() == "from json"
    write_folder(tmp_path, "llama", chat_template="from config")
    assert source() == "from config"
    write_folder(tmp_path, "llama", chat_template=[{"name": "default", "template": "from list"}])
    assert source() == "from list"
    named = {"default": "plain", "tool_use": "with tools"}
    pairs = [{"name": name, "template": template} for name, template in named.items()]
    write_folder(tmp_path, "llama", chat_template=pairs)
    assert source() == named
    (tmp_path / "chat_template.jinja").write_text("from a file", encoding="utf-8")
    assert source() == "from a file"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools", encoding="utf-8")
    assert source() == {"default": "from a file", "tool_use": "tools"}


@pytest.mark.parametrize(("add_bos", "starts"), [(None, True), (True, True), (False, False)])
def test_add_bos(add_bos: bool | None, starts: bool) -> None:
    core = Core.from_str(serialised("llama"))
    ours = Tokenizer(core, special={"bos_token": "<s>"}, add_bos=add_bos)
    assert ours.encode("hello") == [core.token_to_id("<s>")] * starts + ours.encode("hello", special=False)
    assert core.token_to_id("<s>") not in ours.encode("hello", special=False)


def test_truncation_and_padding_in_the_file_are_not_applied(tmp_path: Path) -> None:
    core = Core.from_str(serialised("llama"))
    core.enable_truncation(2)
    core.enable_padding(length=50)
    core.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_folder(tmp_path)
    assert ours is not None
    assert ours.encode(LINES[0]) == tokenizer("llama").encode(LINES[0])


def test_text_that_is_not_unicode() -> None:
    with pytest.raises(RequestError, match="valid Unicode"):
        tokenizer("llama").encode("a\ud800")


# Stop strings


def cut(text: str, stops: list[str]) -> str:
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=3, max_size=9), max_size=4),
    cuts=st.lists(st.integers(1, 6), min_size=30, max_size=30),
)
@settings(max_examples=200)
def test_stop_strings_cut_at_the_earliest(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher, out, at = StopStrings(stops), "", 0
    for length in cuts:
        piece, stopped = matcher.push(text[at : at + length])
        out, at = out + piece, min(at + length, len(text))
        assert stopped == matcher.stopped
        assert cut(text, stops).startswith(out)
        if not stopped:  # what is held back is no more than it must be
            held = text[len(out) : at]
            assert not held or any(stop in held or stop.startswith(held) for stop in stops)
    assert out + matcher.finish() == cut(text, stops)
    assert matcher.stopped == (cut(text, stops) != text)


def test_a_stop_string_that_repeats_itself() -> None:
    matcher = StopStrings(["aabaaac"])
    assert [matcher.push(char) for char in "aabaaabaa"][-1] == ("", False)
    assert matcher.push("ac") == ("", True)


def test_an_earlier_longer_stop_may_still_win() -> None:
    assert StopStrings(["abcd", "bc"]).push("xabcd") == ("x", True)
    waiting = StopStrings(["abcd", "bc"])
    assert waiting.push("xabc") == ("x", False)
    assert waiting.push("e") == ("a", True)
    assert waiting.push("more") == ("", True)
    ended = StopStrings(["abcd", "bc"])
    assert (ended.push("xabc"), ended.finish(), ended.stopped) == (("x", False), "a", True)


def test_long_stop_strings_cost_no_more_than_the_text() -> None:
    matcher = StopStrings(["a" * 50_000 + "b"])
    assert "".join(matcher.push("a")[0] for _ in range(60_000)) == "a" * 10_000
    assert matcher.push("b") == ("", True)


# Chat templates

CHATML_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
    {%- for tool in tools %}{{ tool | tojson }}
    {% endfor %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
LLAMA3_TEMPLATE = """\
{{ bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
GEMMA_TEMPLATE = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
THINKING_TEMPLATE = """\
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and loop.index0 < ns.last and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
PLAIN_TEMPLATE = """\
{%- for message in messages %}{{ message.role + ':' + message.content + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""
TEMPLATES = {
    "chatml": ("byte_level", CHATML_TEMPLATE),
    "llama3": ("byte_level", LLAMA3_TEMPLATE),
    "gemma": ("gemma", GEMMA_TEMPLATE),
    "thinking": ("byte_level", THINKING_TEMPLATE),
    "plain": ("byte_level", PLAIN_TEMPLATE),
    "plain llama": ("llama", PLAIN_TEMPLATE),
}
TOOLS = [{"type": "function", "function": {"name": "größe", "description": "<b>&'\"", "parameters": {"x": [1, None]}}}]
templates = pytest.mark.parametrize("name", TEMPLATES)


def chat_template(name: str) -> ChatTemplate:
    kind, source = TEMPLATES[name]
    return ChatTemplate(tokenizer(kind), source)


def one(source: str) -> ChatTemplate:
    return ChatTemplate(tokenizer("llama"), source)


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


HELLO = [user("hello")]
CHAT = [
    user(" Hello there "),
    assistant("<think>\nhm\n</think>\n\nHi! 日本"),
    user("the dog?"),
    assistant("No."),
    user("ok"),
]


@templates
def test_renders_as_transformers_does(name: str, tmp_path: Path) -> None:
    kind, source = TEMPLATES[name]
    ours, theirs = both(write_folder(tmp_path, kind, chat_template=source))
    assert ours is not None
    template = ChatTemplate(ours)
    system = [] if name == "gemma" else [{"role": "system", "content": "be brief"}]
    for messages in (system + CHAT, CHAT[:1], CHAT[:4]):
        for options in ({}, {"tools": TOOLS}, {"add_generation_prompt": False}, {"bos_token": "<other>"}):
            text = theirs.apply_chat_template(messages, tokenize=False, **{"add_generation_prompt": True, **options})
            assert template.render(messages, **options) == text
        tokens = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert template.prompt(messages).tokens == tokens


@pytest.mark.parametrize(
    "source",
    [
        "{{ tools | tojson }} {{ tools | tojson(indent=2) }} {{ tools | tojson(sort_keys=true, ensure_ascii=true) }}",
        "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.content }}{% continue %}x{% endfor %}",
        "{% for m in messages %}{{ loop.length }}{{ loop.last }}{{ loop.revindex }}{{ loop.cycle(1, 2) }}{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ loop.previtem.role if loop.previtem }}{% else %}x{% endfor %}",
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{{ messages[0].content }}{% endgeneration %}{{ x }}",
        "{% macro f(n) %}{{ n }}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}{{ dict(a=2 * 3).a ** 2 }}",
        "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is sequence else x }}{% endfor %}{{ '-' * 3 + 'x' }}",
        "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{% for x in absent %}{% else %}b{% endfor %}",
        "{{ messages[1].thinking }}{{ messages[1].reasoning_content }}{{ missing }}{{ documents }}{{ eos_token }}",
        "{{ strftime_now('%Y') }}{{ messages | map(attribute='content') | join('|') }}{{ range(5) | sum }}",
        "  {% if true %}\n  a\n  {% endif %}\n{%- if false %}b{% endif %}\n c\n",
    ],
)
def test_what_templates_use(source: str, tmp_path: Path) -> None:
    ours, theirs = both(write_folder(tmp_path, "llama", chat_template=source))
    assert ours is not None
    messages = [user("a & <b>"), assistant("é") | {"reasoning": "why"}, user("ünïcode")]
    expected = theirs.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    assert ChatTemplate(ours).render(messages, tools=TOOLS, add_generation_prompt=False) == expected


def test_a_template_of_its_own_for_tools() -> None:
    template = ChatTemplate(tokenizer("llama"), {"default": "plain", "tool_use": "tools"})
    assert (template.render(HELLO), template.render(HELLO, tools=TOOLS)) == ("plain", "tools")
    assert ChatTemplate(tokenizer("llama"), {"default": "plain"}).render(HELLO, tools=TOOLS) == "plain"
    with pytest.raises(TemplateError, match="rag"):
        ChatTemplate(tokenizer("llama"), {"rag": "x"}).render(HELLO)


def test_without_a_template_the_error_says_what_to_do() -> None:
    with pytest.raises(TemplateError, match=r"chat_template\.jinja.*plain prompt"):
        ChatTemplate(tokenizer("llama")).render(HELLO)


def test_a_refusal_is_passed_on() -> None:
    with pytest.raises(TemplateError, match="System role not supported"):
        chat_template("gemma").render([{"role": "system", "content": "x"}])


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{% for x in %}",
        "{{ 'open",
        "{% unknown %}",
        "{{ x | no_such_filter }}",
        "{% include 'file' %}",
        "{% generation %}x",
        "{{" + "(" * 3000 + "1" + ")" * 3000 + "}}",
        "{% if true %}" * 3000 + "{% endif %}" * 3000,
        "{{ messages.missing.attribute }}",
        "{{ messages[0].content + 1 }}",
        "{{ missing() }}",
        "{{ missing | tojson }}",
        "{{ 1 / 0 }}",
        "{{ raise_exception('x' * 100000) }}",
        "{{ ''.__class__.__mro__ }}{{ ().__class__.__bases__[0].__subclasses__() }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ '{0.__class__.__init__}'.format(messages).missing.x }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% set r = range(99999) | list %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% set r = range(9999) %}{% for a in r %}{% for b in r %}{{ 'xxxxxxxxxx' }}{% endfor %}{% endfor %}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ [0] * 10 ** 9 }}",
        "{{ 10 ** 9 * 'x' }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    ],
)
def test_a_bad_template_is_a_template_error(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bough.engine.template.MAX_STEPS", 100_000)
    with pytest.raises(TemplateError) as caught:
        one(source).render(HELLO)
    assert len(str(caught.value)) < 1000


def test_output_is_bounded_whatever_writes_it() -> None:
    source = "{% set x = 'x' * 1000000 %}{% for i in range(N) %}{{ x }}{% endfor %}"
    assert len(one(source.replace("N", "16")).render(HELLO)) == 16_000_000 <= MAX_OUTPUT
    with pytest.raises(TemplateError, match="characters"):
        one(source.replace("N", "17")).render(HELLO)


@pytest.mark.parametrize("messages", [[], ["hello"], [{"role": "user", "content": object()}], [{1: {2, 3}}]])
def test_messages_that_are_no_messages(messages: list[object]) -> None:
    with pytest.raises(TemplateError):
        one("x").render(messages)  # type: ignore[arg-type]


def test_deeply_nested_messages() -> None:
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(TemplateError):
        one("x").render([{"role": "user", "content": nested}])


def test_threads_render_at_once() -> None:
    template = one("{% for i in range(2000) %}{{ messages[0].content }}{% endfor %}")
    wrong = []

    def check(content: str) -> None:
        wrong.extend(content for _ in range(5) if template.render([user(content)]) != content * 2000)

    threads = [threading.Thread(target=check, args=(str(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# Turn boundaries


def expected_boundaries(template: ChatTemplate, ours: Tokenizer, messages: list[dict[str, str]]) -> list[int]:
    """By tokenising every partial render whole."""
    tokens = ours.encode(template.render(messages), special=False)
    first = next(i for i, message in enumerate(messages) if message["role"] != "system")
    parts = [messages[:end] for end in range(1, len(messages) + 1)]
    other = "b" if messages[first]["content"].startswith("a") else "a"
    parts.append([*messages[:first], messages[first] | {"content": other}])
    found = set()
    for part in parts:
        try:
            partial = ours.encode(template.render(part, add_generation_prompt=False), special=False)
        except TemplateError:
            continue
        length = 0
        while length < min(len(tokens), len(partial)) and tokens[length] == partial[length]:
            length += 1
        found.add(length)
    return sorted(length for length in found if 0 < length < len(tokens))


def tokens_and_boundaries(
    template: ChatTemplate, messages: list[dict[str, Any]], **extra: Any
) -> tuple[list[int], list[int]]:
    transcript = template.prompt(messages, **extra)
    return transcript.tokens, template.boundaries(transcript, messages, **extra)


@templates
@given(contents=st.lists(texts, min_size=1, max_size=5), system=st.booleans())
@settings(max_examples=30)
def test_boundaries_are_common_token_prefixes(name: str, contents: list[str], system: bool) -> None:
    template, ours = chat_template(name), tokenizer(TEMPLATES[name][0])
    roles = ["user", "assistant"] * 3
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    if system and name != "gemma":
        messages.insert(0, {"role": "system", "content": "be brief"})
    tokens, boundaries = tokens_and_boundaries(template, messages)
    assert tokens == ours.encode(template.render(messages), special=False)
    assert boundaries == expected_boundaries(template, ours, messages)


def test_where_boundaries_are() -> None:
    template, ours = chat_template("chatml"), tokenizer("byte_level")
    messages = [{"role": "system", "content": "be brief"}, *CHAT[:3]]
    tokens, boundaries = tokens_and_boundaries(template, messages)
    turns = ["<|im_start|>system\nbe brief<|im_end|>\n"]
    turns += ["<|im_start|>user\n", f"{CHAT[0]['content']}<|im_end|>\n"]
    turns += [f"<|im_start|>assistant\n{CHAT[1]['content']}<|im_end|>\n", "<|im_start|>user\nthe dog?<|im_end|>\n"]
    ends = [ours.decode(tokens[:end], skip_special=False) for end in boundaries]
    assert ends == ["".join(turns[: end + 1]) for end in range(len(turns))]


def test_the_tools_end_at_a_boundary() -> None:
    template, ours = chat_template("chatml"), tokenizer("byte_level")
    tokens, boundaries = tokens_and_boundaries(template, CHAT, tools=TOOLS)
    head = ours.decode(tokens[: boundaries[0]], skip_special=False)
    assert head.endswith("<|im_end|>\n<|im_start|>user\n")
    assert "größe" in head


def test_refused_parts_have_no_boundary() -> None:
    source = "{% if messages | length % 2 == 0 %}{{ raise_exception('odd') }}{% endif %}" + CHATML_TEMPLATE
    template = ChatTemplate(tokenizer("byte_level"), source)
    every = tokens_and_boundaries(chat_template("chatml"), CHAT)[1]
    assert tokens_and_boundaries(template, CHAT)[1] == [every[0], every[1], every[3], every[5]]


@templates
def test_a_long_chat(name: str) -> None:
    draw = random.Random(0)
    contents = ["".join(draw.choices("".join(LINES), k=100)).strip() for _ in range(201)]
    messages = [user(text) if i % 2 == 0 else assistant(text) for i, text in enumerate(contents)]
    tokens, boundaries = tokens_and_boundaries(chat_template(name), messages)
    assert len(boundaries) >= (30 if name.startswith("plain") else 200)  # without added tokens, all is tokenised anew
    assert boundaries == sorted(set(boundaries))
    assert boundaries[0] > 0 and boundaries[-1] < len(tokens)


def test_the_search_for_boundaries_is_bounded_newest_turns_first() -> None:
    source = "{% for i in range(5000) %}{% endfor %}" + CHATML_TEMPLATE
    messages = CHAT[:2] * 40 + CHAT[:1]
    every = tokens_and_boundaries(chat_template("chatml"), messages)[1]
    found = tokens_and_boundaries(ChatTemplate(tokenizer("byte_level"), source), messages)[1]
    assert found == every[:1] + every[-len(found) + 1 :]
    assert 1 < len(found) < len(every)


# A chat keeps its tokens


def spelled(ours: Tokenizer, text: str) -> list[int]:
    """Tokens of a text that are not those its encoder would choose."""
    return [token for char in text for token in ours.encode_split(char, follows=True)[0]]


@templates
def test_a_reply_is_never_retokenised(name: str) -> None:
    template, ours = chat_template(name), tokenizer(TEMPLATES[name][0])
    messages, transcript = [*HELLO], template.prompt(HELLO)
    assert transcript.tokens == ours.encode(template.render(HELLO), special=False)
    for text in (" Hello world, the dog.", "日本 😀\n\nassistant", ""):
        if name in ("gemma", "llama3"):
            text = text.strip()  # as these templates do
        ended = list(ours.eos_ids) if text else []
        reply = spelled(ours, text)
        assert len(reply) > len(ours.encode(text, special=False)) or not text
        messages += [assistant(Detokenizer(ours, transcript.tokens).push(reply + ended)), user(" And the fox?")]
        previous, transcript = transcript, template.extend(transcript, reply + ended, messages)
        kept = previous.tokens + reply
        assert transcript.tokens[: len(kept)] == kept
        assert transcript.text == template.render(messages)
        rest = Detokenizer(ours, kept, skip_special=False)
        assert rest.push(transcript.tokens[len(kept) :]) == transcript.text[len(previous.text) + len(text) :]
    boundaries = template.boundaries(transcript, messages)
    assert boundaries == sorted(set(boundaries))
    if name in ("chatml", "llama3", "thinking"):
        ends = {ours.decode(transcript.tokens[:end], skip_special=False) for end in boundaries}
        assert ends > {template.render(messages[:end], add_generation_prompt=False) for end in range(1, len(messages))}


def test_the_end_of_turn_token_is_the_one_of_the_template() -> None:
    template, ours = chat_template("chatml"), tokenizer("byte_level")
    prompt, reply = template.prompt(HELLO), spelled(ours, "Hello world")
    messages = [*HELLO, assistant("Hello world"), user("more")]
    extended = [
        template.extend(prompt, [*reply, *ours.encode(end, special=False)], messages)
        for end in ("", "<|im_end|>", "<|endoftext|>")
    ]
    assert extended[0] == extended[1] == extended[2]
    closing = ours.encode("<|im_end|>\n<|im_start|>", special=False)
    assert extended[0].tokens[: len(prompt.tokens + reply + closing)] == prompt.tokens + reply + closing


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma"])
@pytest.mark.parametrize("dropped", ["\n", "\nUser:", "<think>"])
def test_a_reply_that_lost_its_end_keeps_the_rest(name: str, dropped: str) -> None:
    """As after a stop string, or when the template trims."""
    template, ours = chat_template(name), tokenizer(TEMPLATES[name][0])
    prompt, reply = template.prompt(HELLO), spelled(ours, "Hello wörld")
    messages = [*HELLO, assistant("Hello wörld"), user("more")]
    extended = template.extend(prompt, reply + spelled(ours, dropped), messages)
    assert extended == template.extend(prompt, reply, messages)
    assert extended.tokens[: len(prompt.tokens + reply)] == prompt.tokens + reply


def test_an_edited_reply_is_tokenised_anew_and_the_past_kept() -> None:
    template, ours = chat_template("chatml"), tokenizer("byte_level")
    first, reply = template.prompt(HELLO), spelled(ours, "Hello world")
    messages = [*HELLO, assistant("Hello world"), user("the dog?")]
    second = template.extend(first, reply, messages)
    messages += [assistant("Hello there"), user("ok")]
    third = template.extend(second, spelled(ours, "Hello world"), messages)
    rest = ours.encode(third.text[len(second.text) :], special=False)
    assert third.tokens == second.tokens + rest


def test_thinking_left_out_of_the_past() -> None:
    template, ours = chat_template("thinking"), tokenizer("byte_level")
    first, reply = template.prompt(HELLO), spelled(ours, "Hello world")
    messages = [*HELLO, assistant("Hello world"), user("the dog?")]
    second = template.extend(first, reply, messages)
    thought = "<think>\nwell, the dog\n</think>\n\nNo."
    messages += [assistant(thought), user("ok")]
    third = template.extend(second, spelled(ours, thought), messages)
    assert (
        third.text
        == template.render(messages)
        == second.text + "No.<|im_end|>\n<|im_start|>user\nok" + ("<|im_end|>\n<|im_start|>assistant\n")
    )
    assert third.tokens == second.tokens + ours.encode(third.text[len(second.text) :], special=False)


def test_a_rewritten_prompt_keeps_what_comes_before() -> None:
    source = THINKING_TEMPLATE.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}")
    assert source != THINKING_TEMPLATE
    ours = tokenizer("byte_level")
    template = ChatTemplate(ours, source)
    messages = [*HELLO, assistant("Hello world"), user("the dog?")]
    second = template.extend(template.prompt(HELLO), spelled(ours, "hm</think>Hello world"), messages)
    assert second.tokens == ours.encode(second.text, special=False)
    messages += [assistant("No."), user("ok")]
    third = template.extend(second, spelled(ours, "hm</think>No."), messages)
    assert third.text == template.render(messages)
    kept = ours.encode(second.text[: second.text.rindex("<|im_end|>")], special=False)
    assert third.tokens[: len(kept)] == kept
    assert ours.decode(third.tokens, skip_special=False) == third.text


@templates
@given(contents=st.lists(texts, min_size=4, max_size=4))
@settings(max_examples=20)
@example(contents=["hel", "", "hello", ""])
@example(contents=["a\n", "", "a\n\nb", ""])
def test_an_edited_past_is_tokenised_as_a_whole(name: str, contents: list[str]) -> None:
    template = chat_template(name)
    before, after = ([user(contents[i]), assistant(contents[i + 1]), user("ok")] for i in (0, 2))
    transcript = template.prompt(before)
    edited = template.extend(transcript, [], after)
    if not edited.text.startswith(transcript.text):
        assert edited == template.prompt(after)


def test_an_edited_past_is_tokenised_anew() -> None:
    template, ours = chat_template("plain"), tokenizer("byte_level")
    messages = [user("something else"), assistant(" Hello"), user("more")]
    extended = template.extend(template.prompt(HELLO), spelled(ours, " Hello"), messages)
    assert extended.tokens == ours.encode(template.render(messages), special=False)
    assert extended.splits == []


@templates
@given(contents=st.lists(texts, min_size=4, max_size=4), edited=st.booleans(), data=st.data())
@settings(max_examples=30)
def test_an_extended_chat_stands_for_its_text(
    name: str, contents: list[str], edited: bool, data: st.DataObject
) -> None:
    template, ours = chat_template(name), tokenizer(TEMPLATES[name][0])
    messages, transcript = [user(contents[0])], template.prompt([user(contents[0])])
    for said, asked in ((contents[1], contents[2]), (contents[3], contents[0])):
        reply = data.draw(st.sampled_from([spelled(ours, said), ours.encode_split(said, follows=True)[0]]))
        stream = Detokenizer(ours, transcript.tokens)
        text = stream.push(reply) + stream.finish()
        messages += [assistant("edited" if edited else text), user(asked)]
        transcript = template.extend(transcript, reply, messages)
        assert transcript.text == template.render(messages)
        for char, token in transcript.splits:
            assert transcript.text.startswith(ours.token_bytes(transcript.tokens[token]).decode(errors="replace"), char)
    canonical = ours.encode(transcript.text, special=False)
    shown, expected = (ours.decode(tokens, skip_special=False) for tokens in (transcript.tokens, canonical))
    assert shown == expected
