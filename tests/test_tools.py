import json
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import add_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Core

from bough.engine.request import Piece
from bough.engine.template import ChatTemplate
from bough.engine.tokenizer import Tokenizer
from bough.engine.tool_formats import FORMATS, CallFormat
from bough.engine.tools import THINKING, Dialect, Part, Reader, Said, Splitter, Thought, ToolCall

FORMAT = {each.name: each for each in FORMATS}
TOOLS = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "add": {"type": "object", "properties": {"numbers": {"type": "array"}, "exact": {"type": "boolean"}}},
}
PARIS = ToolCall("weather", {"city": "Paris", "days": 3})
SUM = ToolCall("add", {"numbers": [1, -2.5, None], "exact": True})

# One reply for each way to write the two calls.
WRITTEN = {
    "tagged": [
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"numbers": [1, -2.5, null], "exact": true}}\n</tool_call>',
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=add>\n<parameter=numbers>\n[1, -2.5, null]\n</parameter>\n"
        "<parameter=exact>\ntrue\n</parameter>\n</function>\n</tool_call>",
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\", \\"days\\": 3}"}</tool_call>'
        '<tool_call>{"function": {"name": "add", "parameters": {"numbers": [1, -2.5, null], "exact": true}}}',
    ],
    "gemma": [
        '<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>'
        "<|tool_call>call:add{numbers:[1,-2.5,null],exact:true}<tool_call|>",
        '<|tool_call>call:weather{"city": "Paris", <|"|>days<|"|>: 3}<tool_call|>\n'
        "<|tool_call>call:add{ numbers : [ 1 , -2.5 , None ] , exact : true }<tool_call|>",
    ],
    "functiongemma": [
        "<start_function_call>call:weather{city:<escape>Paris<escape>,days:3}<end_function_call>"
        "<start_function_call>call:add{numbers:[1,-2.5,null],exact:true}<end_function_call>"
    ],
    "lfm2": [
        '<|tool_call_start|>[weather(city="Paris", days=3), add(numbers=[1, -2.5, None], exact=True)]'
        "<|tool_call_end|>",
        "<|tool_call_start|>weather(city='Paris', days=3)<|tool_call_end|>"
        "<|tool_call_start|>[add(numbers=(1, -2.5, null), exact=true)]<|tool_call_end|>",
        '<|tool_call_start|>[{"name": "weather", "arguments": {"city": "Paris", "days": 3}},'
        ' {"name": "add", "arguments": {"numbers": [1, -2.5, null], "exact": true}}]<|tool_call_end|>',
    ],
    "mistral": [
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris", "days": 3}, "id": "abcdefghi"},'
        ' {"name": "add", "arguments": {"numbers": [1, -2.5, null], "exact": true}}]',
        '[TOOL_CALLS]weather{"city": "Paris", "days": 3}[TOOL_CALLS]add{"numbers": [1, -2.5, null], "exact": true}',
        '[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Paris", "days": 3}'
        '[TOOL_CALLS]add[ARGS]{"numbers": [1, -2.5, null], "exact": true}',
    ],
    "llama": [
        '{"name": "weather", "parameters": {"city": "Paris", "days": 3}}; '
        '{"name": "add", "parameters": {"numbers": [1, -2.5, null], "exact": true}}',
        '<|python_tag|>{"type": "function", "name": "weather", "parameters": {"city": "Paris", "days": 3}}\n'
        '{"name": "add", "parameters": {"numbers": [1, -2.5, null], "exact": true}}',
    ],
}  # fmt: skip
EVERY = [(name, text) for name, texts in WRITTEN.items() for text in texts]
THINKS = Dialect(FORMAT["tagged"], THINKING[0])


def split(
    pieces: list[str] | str, call: str | CallFormat | Dialect, tools: dict | None = TOOLS, thinking: bool = False
) -> list[Part]:
    """All parts of a reply, with neighbours of a kind joined."""
    dialect = call if isinstance(call, Dialect) else Dialect(FORMAT[call] if isinstance(call, str) else call)
    splitter = Splitter(dialect, tools, thinking=thinking)
    parts: list[Part] = []
    for part in [part for piece in pieces for part in splitter.push(piece)] + splitter.finish():
        if parts and isinstance(part, Said | Thought) and type(parts[-1]) is type(part):
            parts[-1] = type(part)(parts[-1].text + part.text)
        else:
            parts.append(part)
    return parts


@pytest.mark.parametrize(("name", "text"), EVERY)
def test_calls_are_read_however_the_text_is_cut(name: str, text: str) -> None:
    assert split([text], name) == [PARIS, SUM]
    assert split(text, name) == [PARIS, SUM]
    for at in range(len(text)):
        assert split([text[:at], text[at:]], name) == [PARIS, SUM]


@pytest.mark.parametrize(("name", "text"), [each for each in EVERY if each[0] != "llama"])
def test_text_before_calls_is_content(name: str, text: str) -> None:
    assert split(f"I ask.\n\n{text}\n", name) == [Said("I ask."), PARIS, SUM]


@pytest.mark.parametrize(("name", "text"), [each for each in EVERY if FORMAT[each[0]].close and each[1][-1] in ">"])
def test_text_after_calls_is_content(name: str, text: str) -> None:
    assert split(f"{text}\n\nThat is all. \n", name) == [PARIS, SUM, Said("That is all. \n")]


@pytest.mark.parametrize(("name", "text"), EVERY)
def test_a_reply_that_is_cut_off_loses_nothing(name: str, text: str) -> None:
    for at in range(len(text)):
        parts = split(text[:at], name)
        kept = [part.text for part in parts]
        assert "".join("".join(kept).split()) == "".join(text[:at].split())
        assert all(part in (PARIS, SUM) for part in parts if isinstance(part, ToolCall))


@pytest.mark.parametrize(("name", "text"), EVERY)
def test_without_tools_nothing_is_a_call(name: str, text: str) -> None:
    assert split(text, name, tools=None) == [Said(text)]


KEYS = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


def gemma(value: object, quote: str) -> str:
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(item, quote)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(gemma(item, quote) for item in value) + "]"
    return json.dumps(value)


def tags(arguments: dict[str, object]) -> str:
    shown = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in shown.items())
    return f"<tool_call>\n<function=f>\n{inside}</function>\n</tool_call>"


def python(arguments: dict[str, object]) -> str:
    return "[f(" + ", ".join(f"{key}={value!r}" for key, value in arguments.items()) + ")]"


# A call as the chat templates of the families write those of earlier replies.
WRITERS = {
    "tagged json": lambda given: f"<tool_call>\n{json.dumps({'name': 'f', 'arguments': given})}\n</tool_call>",
    "tagged tags": tags,
    "gemma": lambda given: "<|tool_call>call:f" + gemma(given, '<|"|>') + "<tool_call|>",
    "functiongemma": lambda given: "<start_function_call>call:f" + gemma(given, "<escape>") + "<end_function_call>",
    "lfm2": lambda given: f"<|tool_call_start|>{python(given)}<|tool_call_end|>",
    "mistral list": lambda given: f"[TOOL_CALLS] {json.dumps([{'name': 'f', 'arguments': given}], ensure_ascii=False)}",
    "mistral args": lambda given: f"[TOOL_CALLS]f[ARGS]{json.dumps(given)}",
    "llama": lambda given: json.dumps({"name": "f", "parameters": given}, ensure_ascii=False),
}


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=25)
@given(arguments=st.dictionaries(KEYS, VALUES, max_size=4), cut=st.integers(1, 9))
def test_what_templates_write_is_read(name: str, arguments: dict[str, object], cut: int) -> None:
    text = WRITERS[name](arguments)
    schema = {"properties": {key: {"type": "string"} for key, value in arguments.items() if isinstance(value, str)}}
    pieces = [text[at : at + cut] for at in range(0, len(text), cut)]
    assert split(pieces, name.partition(" ")[0], {"f": schema}) == [ToolCall("f", arguments)]


MALFORMED = [
    ("tagged", "<tool_call>{broken}</tool_call>"),
    ("tagged", "<tool_call>[]</tool_call>"),
    ("tagged", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    ("tagged", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("tagged", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>'),
    ("tagged", '<tool_call>{"name": "f", "arguments": {"x": -1e999}}</tool_call>'),
    ("tagged", "<tool_call>\n<function=f>\n<parameter=x>\n1\n</function>\n</tool_call>"),
    ("tagged", "<tool_call>\n<function=f>\n<parameter=x\n>1</parameter></function>\n</tool_call>"),
    ("tagged", "<tool_call>" + "[" * 100_000 + "</tool_call>"),
    ("gemma", "<|tool_call>weather{}<tool_call|>"),
    ("gemma", "<|tool_call>call:{}<tool_call|>"),
    ("gemma", "<|tool_call>call:f{x:1 y}z<tool_call|>"),
    ("gemma", "<|tool_call>call:f{x:<tool_call|>"),
    ("gemma", "<|tool_call>call:f{x:" + "[" * 100_000 + "<tool_call|>"),
    ("lfm2", "<|tool_call_start|>[f(1)]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[f(x=g())]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[f(**{'x': 1})]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[f(x=1 + 2)]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[f(x=b'a', y={1: 2})]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>[(lambda: f)(x=1)]<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>f(x=1e999)<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>f(x=" + "9" * 10_000 + ")<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>f(x=" + "(" * 10_000 + ")<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>f(x=" + "-" * 100_000 + "1)<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>f" + ".x" * 100_000 + "()<|tool_call_end|>"),
    ("lfm2", "<|tool_call_start|>f(x='\0')<|tool_call_end|>"),
    ("mistral", "[TOOL_CALLS] nothing"),
    ("mistral", "[TOOL_CALLS]two words{}"),
    ("mistral", "[TOOL_CALLS]f[ARGS][1]"),
    ("llama", '{"name": "weather", "parameters": {'),
    ("llama", '{"name": "weather"} is how one asks'),
    ("llama", '{"name": "Alice", "age": 4}'),
    ("llama", "<|python_tag|>print(1)"),
]


@pytest.mark.parametrize(("name", "text"), MALFORMED, ids=range(len(MALFORMED)))
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    assert split([f" a \n{text} b "], name) == [Said(f" a \n{text} b ")]
    assert split([text], name) == [Said(text)]


def test_a_call_after_a_malformed_one_is_read() -> None:
    good = WRITTEN["tagged"][0]
    assert split(f"<tool_call>oops</tool_call>\n{good}", "tagged") == [Said("<tool_call>oops</tool_call>"), PARIS, SUM]
    assert split(f"<tool_call> <tool_call> {good}", "tagged") == [Said("<tool_call> <tool_call>"), PARIS, SUM]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tagged", '<tool_call>{"name": "f", "arguments": {"x": "a</tool_call>\\"b"}}</tool_call>'),
        ("tagged", "<tool_call><function=f><parameter=x>a</tool_call>\"b</parameter></function></tool_call>"),
        ("gemma", '<|tool_call>call:f{x:<|"|>a</tool_call>"b<|"|>}<tool_call|>'),
        ("lfm2", "<|tool_call_start|>[f(x='a</tool_call>\"b')]<|tool_call_end|>"),
        ("mistral", '[TOOL_CALLS]f{"x": "a</tool_call>\\"b"}'),
    ],
)  # fmt: skip
def test_marks_inside_of_arguments(name: str, text: str) -> None:
    assert split(text, name) == [ToolCall("f", {"x": 'a</tool_call>"b'})]


def test_arguments_may_have_the_names_of_keywords() -> None:
    text = "<|tool_call_start|>[f(from='a, from=b', class =1, to=True)]<|tool_call_end|>"
    assert split(text, "lfm2") == [ToolCall("f", {"from": "a, from=b", "class": 1, "to": True})]


def test_lines_may_end_inside_of_strings() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"x": "a\n\tb"}}</tool_call>'
    assert split(text, "tagged") == [ToolCall("f", {"x": "a\n\tb"})]


def test_closing_marks_inside_of_gemma_strings() -> None:
    text = '<|tool_call>call:f{x:<|"|>a<tool_call|>b,}<|"|>}<tool_call|>'
    assert split(text, "gemma") == [ToolCall("f", {"x": "a<tool_call|>b,}"})]


def test_parameters_in_tags_are_of_the_type_that_the_tool_takes() -> None:
    def call(key: str, value: str) -> str:
        return f"<tool_call>\n<function=weather>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"

    for key, value, read in [
        ("city", "12", "12"),
        ("city", "  x\n</parameter>\ny ", "  x\n</parameter>\ny "),
        ("days", "12", 12),
        ("days", "a dozen", "a dozen"),
        ("unknown", "True", True),
        ("unknown", '{"a": 1}', {"a": 1}),
    ]:
        assert split(call(key, value), "tagged") == [ToolCall("weather", {key: read})]


def test_a_built_in_tool_of_llama() -> None:
    text = '<|python_tag|>brave_search.call(query="a \\d")'
    assert split(text, "llama") == [ToolCall("brave_search", {"query": "a \\d"})]


def test_json_that_is_no_call_is_not_held_back() -> None:
    splitter = Splitter(Dialect(FORMAT["llama"]), TOOLS)
    assert splitter.push('{"name": "w') == []
    assert splitter.push("hat") == [Said('{"name": "what')]
    assert splitter.push('{"name": "weather"') == [Said('{"name": "weather"')]


def test_text_that_is_full_of_marks_is_text_in_the_end() -> None:
    for name, text in [
        ("tagged", '<tool_call>"' * 20_000),
        ("tagged", '<tool_call>"' + '</tool_call>"' * 20_000),
        ("tagged", '<tool_call>"</tool_call>"' * 20_000),
        ("lfm2", "<|tool_call_start|>[" * 20_000),
        ("gemma", '<|tool_call>call:f{x:<|"|>' + "<tool_call|>" * 20_000),
        ("mistral", '[TOOL_CALLS]["' * 20_000),
    ]:
        assert split([text], name) == [Said(text)]


def test_only_what_may_be_a_mark_is_held_back() -> None:
    splitter = Splitter(Dialect(FORMAT["tagged"]), TOOLS)
    assert splitter.push("a < b <tool") == [Said("a < b")]
    assert splitter.push("s> ") == [Said(" <tools>")]
    assert splitter.push("\n") == []
    assert splitter.push("c") == [Said(" \nc")]


@pytest.mark.parametrize("marks", THINKING)
def test_thinking_is_told_apart(marks: tuple[str, str]) -> None:
    opening, close = marks
    dialect = Dialect(FORMAT["tagged"], marks)
    call = WRITTEN["tagged"][0]
    thought = [Thought("So.\n\nYes <tool_call> no"), Said("An answer with"), PARIS, SUM]
    text = f"\nSo.\n\nYes <tool_call> no\n{close}\n\nAn answer with\n{call}"
    assert split(f" {opening}{text}", dialect) == thought
    assert split(text, dialect, thinking=True) == thought
    assert split(f"{opening}\n\n{close}\n\nhi", dialect) == [Said("hi")]
    assert split(f"{opening}on and on \n", dialect) == [Thought("on and on \n")]


def test_thinking_comes_first_or_not_at_all() -> None:
    assert split("The <think> tag </think>", THINKS) == [Said("The <think> tag </think>")]
    assert split("<think>a</think><think>b</think>c<think>", THINKS) == [Thought("ab"), Said("c<think>")]


MARKS = sorted({mark for each in FORMATS for mark in (each.opening, each.close or "", *each.quotes)} - {""})
BITS = [
    *MARKS, "<think>", "</think>", "<function=f>", "<parameter=x>", "</parameter>", "</function>", "call:f{", "}",
    '{"name": "add", "arguments": {', '"x": "', '"', "f(x=", ")", "[", "]", ",", ":", " ", "\n", "\\", "1",
]  # fmt: skip


@given(
    name=st.sampled_from(sorted(FORMAT)),
    bits=st.lists(st.one_of(st.sampled_from(BITS), st.text(max_size=3)), max_size=30),
    cuts=st.lists(st.integers(0, 200), max_size=6),
    thinking=st.booleans(),
)
def test_anything_can_be_split_and_nothing_is_lost(name: str, bits: list[str], cuts: list[int], thinking: bool) -> None:
    text = "".join(bits)
    dialect = Dialect(FORMAT[name], THINKING[0])
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    parts = split(pieces, dialect, thinking=thinking)
    assert parts == split([text], dialect, thinking=thinking) == split(text, dialect, thinking=thinking)
    for part in parts:
        if isinstance(part, ToolCall):
            json.dumps(part.arguments, allow_nan=False)
    shown = "".join(part.text for part in parts)
    for left in ("<think>", "</think>"):  # at most these, and white space, are left out
        shown, text = shown.replace(left, ""), text.replace(left, "")
    assert "".join(shown.split()) == "".join(text.split())


# Which dialect a model speaks, and replies as tokens.

SPECIAL = ["<|im_end|>", "<|tool_call_start|>", "<|tool_call_end|>", "<think>", "</think>"]
LFM = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}{% if thinks %}<think>\n{% endif %}"


def spoken(template: str | None, special: list[str] = SPECIAL) -> Tokenizer:
    core = Core(models.BPE({char: at for at, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text) for text in special])
    return Tokenizer(core, special={"eos_token": "<|im_end|>"}, template=template)


@pytest.mark.parametrize(
    ("template", "special", "name"),
    [
        ("{{ tools }} <tool_call></tool_call>", [], "tagged"),
        ({"default": "plain", "tool_use": "{{ tools }} <|tool_call>"}, [], "gemma"),
        ("{{ tools }}", SPECIAL, "lfm2"),
        ("{{ tools }}", ["<|python_tag|>"], "llama"),
        ("{{ tools }} [TOOL_CALLS]", ["<|python_tag|>"], "mistral"),
        ("{{ messages }}", SPECIAL, None),
        ("{{ tools }}", [], None),
        (None, SPECIAL, None),
    ],
)
def test_the_dialect_is_known_from_the_template_or_the_special_tokens(template, special, name) -> None:
    calls = Dialect.of(spoken(template, ["<|im_end|>", *special])).calls
    assert (calls.name if calls else None) == name


def test_thinking_is_known_from_the_template_or_the_special_tokens() -> None:
    assert Dialect.of(spoken("{{ x }} </think>", [])).thinking == THINKING[0]
    assert Dialect.of(spoken("{{ x }}", ["<|channel>", "<channel|>"])).thinking == THINKING[1]
    assert Dialect.of(spoken("{{ x }}", [])).thinking is None


def test_a_tokenizer_without_any_of_it(tmp_path: Path) -> None:
    add_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert Dialect.of(tokenizer) == Dialect()
    reader = Reader(tokenizer, Dialect(), [5, 6], tools=[{"type": "function", "function": {"name": "f"}}])
    assert reader.push(Piece("a ", [7])) + reader.push(Piece("b", [8])) + reader.finish() == [Said("a "), Said("b")]


FUNCTION = {"type": "function", "function": {"name": "weather", "parameters": TOOLS["weather"]}}


def read(text: str, *, stop: tuple[str, ...] = (), tools: tuple = (FUNCTION,), **options: bool) -> list[Part]:
    """What a reader makes of the tokens of a reply, whose text does not show the marks."""
    tokenizer = spoken(LFM)
    prompt = ChatTemplate(tokenizer).prompt([{"role": "user", "content": "hi"}], tools=tools, **options)
    reader = Reader(tokenizer, Dialect.of(tokenizer), prompt.tokens, tools=tools, stop=stop)
    parts = [part for token in tokenizer.encode(text, special=False) for part in reader.push(Piece("?", [token]))]
    return parts + reader.finish()


def test_marks_that_are_special_tokens_are_seen() -> None:
    call = "<|tool_call_start|>[weather(city='Zürich')]<|tool_call_end|>"
    parts = read(f"é{call}<|im_end|>")
    assert parts == [Said("é"), ToolCall("weather", {"city": "Zürich"})]
    assert parts[1].text == call
    told = read(f"a{call}b<|im_end|>", tools=())
    assert "".join(part.text for part in told) == "a[weather(city='Zürich')]b"


def test_a_prompt_that_opens_the_thinking() -> None:
    thought, said = read("hm</think>\n\nyes<|im_end|>", thinks=True), read("hm</think>", thinks=False)
    assert ("".join(part.text for part in thought[:-3]), thought[-3:]) == ("hm", [Said("y"), Said("e"), Said("s")])
    assert "".join(part.text for part in said) == "hm</think>" and all(isinstance(part, Said) for part in said)


def test_stop_strings_in_text_that_is_made_anew() -> None:
    parts = read("one two<|im_end|>", stop=("two",))
    assert "".join(part.text for part in parts) == "one "
