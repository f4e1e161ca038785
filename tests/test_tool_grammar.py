"""Replies by grammars: whatever a model would rather write, it writes calls or answers that follow the schemas."""

import json
import random

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Core

from bough.config import Grammar, SamplingParams
from bough.engine.grammar import Grammars, masks
from bough.engine.request import Piece
from bough.engine.tokenizer import Tokenizer
from bough.engine.tool_grammar import reply_grammar
from bough.engine.tools import Dialect, Reader, Said, Thought, ToolCall, begins_thinking
from bough.errors import OptionError

pytest.importorskip("llguidance")

END = "<|end|>"
# What the template of each format mentions, and which of its marks are special tokens.
TEMPLATES = {
    "tagged": "<tool_call> </tool_call> <think> </think>",
    "tags": "<tool_call> <function= </tool_call> <think> </think>",
    "gemma": '<|tool_call> <tool_call|> <|"|> <|channel>thought\n <channel|>',
    "functiongemma": "<start_function_call> <end_function_call> <escape>",
    "lfm2": "<|tool_call_start|> <|tool_call_end|>",
    "mistral": "[TOOL_CALLS] [THINK] [/THINK]",
    "mistral, newer": "[TOOL_CALLS] [ARGS] [THINK] [/THINK]",
    "llama": "<|python_tag|>",
}
SPECIAL = [
    '<|tool_call>', '<tool_call|>', '<|"|>', "<|channel>", "<channel|>", "<start_function_call>", "<end_function_call>",
    "<escape>", "<|tool_call_start|>", "<|tool_call_end|>", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]",
    "<|python_tag|>",
]  # fmt: skip
PLAIN = ["<tool_call>", "</tool_call>", "<think>", "</think>", "</parameter>"]


def tool(name: str, required: list[str], **properties) -> dict:
    schema = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


WEATHER = tool(
    "weather",
    ["city"],
    city={"type": "string", "enum": ["Paris", 'the "City"', "New York"]},
    days={"type": "integer", "minimum": 1, "maximum": 9},
    hours={"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 23}, "maxItems": 2},
)
SWITCH = tool("switch-off", ["at"], at={"anyOf": [{"const": "once"}, {"type": "null"}]}, sure={"type": "boolean"})
CODE = tool("code", ["text"], text={"type": "string", "pattern": "^[a-c]{2,3}$"})
NOTHING = {"type": "function", "function": {"name": "nothing"}}
TOOLS = [WEATHER, SWITCH, CODE, NOTHING]
ANSWER = Grammar.json_schema(WEATHER["function"]["parameters"] | {"additionalProperties": False})


def tokenizer_for(template: str) -> Tokenizer:
    """One for bytes, with all the marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Core(models.BPE({char: at for at, char in enumerate(alphabet)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens([AddedToken(mark, special=True) for mark in (END, *SPECIAL)])
    core.add_tokens([AddedToken(mark, normalized=False) for mark in PLAIN])
    return Tokenizer(core, special={"eos_token": END}, template=template)


def written(tokenizer: Tokenizer, seed: int, prompt: str = "hello", **asked) -> list[int]:
    """A reply that has to be a call."""
    tokens = tokenizer.encode(prompt, special=False)
    thinking = begins_thinking(tokenizer, Dialect.of(tokenizer), tokens)
    return walk(tokenizer, reply_grammar(tokenizer, asked.pop("tools", TOOLS), thinking=thinking, **asked), seed)


def walk(tokenizer: Tokenizer, grammar: Grammar, seed: int, most: int = 3000) -> list[int]:
    """What a model comes to write that likes every token as much as any other, and marks a little more."""
    [end] = tokenizer.encode(END, special=False)
    grammars = Grammars(tokenizer, tokenizer.vocab_size, frozenset([end]))
    matcher, dice, tokens = grammars.begin(SamplingParams(grammar=grammar)), random.Random(seed), []
    while not matcher.complete:
        [mask] = masks([(matcher, [])])
        allowed = np.flatnonzero(np.unpackbits(mask[0].numpy(), bitorder="little")).tolist()
        assert allowed and len(tokens) < most, tokenizer.decode(tokens, skip_special=False)[:500]
        close = [token for token in allowed if token >= 256]  # a mark
        tokens.append(dice.choice(close if close and dice.random() < 0.3 else allowed))
        assert matcher.take(tokens[-1]), matcher.problem
    return tokens


def read(tokenizer: Tokenizer, tokens: list[int], prompt: str = "hello", tools: list[dict] = TOOLS) -> list:
    reader = Reader(tokenizer, Dialect.of(tokenizer), tokenizer.encode(prompt, special=False), tools=tools)
    parts = [part for token in tokens for part in reader.push(Piece(tokenizer.decode([token]), [token]))]
    return parts + reader.finish()


def is_right(call: ToolCall) -> bool:
    given = call.arguments
    match call.name:
        case "weather":
            hours = given.get("hours", [])
            return (
                given["city"] in ("Paris", 'the "City"', "New York")
                and given.get("days", 1) in range(1, 10)
                and len(hours) <= 2
                and all(hour in range(24) for hour in hours)
                and given.keys() <= {"city", "days", "hours"}
            )
        case "switch-off":
            return (
                given["at"] in ("once", None) and given.keys() <= {"at", "sure"} and given.get("sure", True) in (0, 1)
            )
        case "code":
            return len(given["text"]) in (2, 3) and given.keys() == {"text"}
    return call.name == "nothing" and not given


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_forced_is_read_as_calls_that_fit(name, several):
    tokenizer = tokenizer_for(TEMPLATES[name])
    assert Dialect.of(tokenizer).calls.name == {"tags": "tagged"}.get(name, name.partition(",")[0])
    called, most = set(), 0
    for seed in range(8):
        tokens = written(tokenizer, seed, several=several)
        parts = [part for part in read(tokenizer, tokens) if not isinstance(part, Thought)]
        assert parts and all(isinstance(part, ToolCall) and is_right(part) for part in parts), parts
        assert several or len(parts) == 1
        called |= {part.name for part in parts}
        most = max(most, len(parts))
    assert len(called) > 1 and (most > 1) == several


@pytest.mark.parametrize("name", ["tags", "gemma", "mistral"])
def test_thinking_that_the_prompt_begins_is_ended_first(name):
    tokenizer = tokenizer_for(TEMPLATES[name])
    prompt = "hello" + Dialect.of(tokenizer).thinking[0]
    for seed in range(4):
        parts = read(tokenizer, written(tokenizer, seed, prompt, several=False), prompt)
        assert [type(part) for part in parts if not isinstance(part, Thought)] == [ToolCall]


def test_parameters_in_tags_are_written_without_quotes_where_they_are_text():
    tokenizer = tokenizer_for(TEMPLATES["tags"])
    free = tool("say", ["text", "loud"], text={"type": "string"}, loud={"type": "boolean"})
    for seed in range(4):
        tokens = written(tokenizer, seed, several=False, tools=[free])
        text = tokenizer.decode(tokens, skip_special=False)
        assert "<function=say>\n<parameter=text>\n" in text and "</parameter>\n</function>\n</tool_call>" in text
        [call] = [part for part in read(tokenizer, tokens, tools=[free]) if isinstance(part, ToolCall)]
        assert isinstance(call.arguments["text"], str) and isinstance(call.arguments["loud"], bool)


@pytest.mark.parametrize("name", ["tags", "gemma", "mistral"])
def test_json_comes_after_thinking(name):
    tokenizer = tokenizer_for(TEMPLATES[name])
    prompt = "hello" + Dialect.of(tokenizer).thinking[0]
    grammar = reply_grammar(tokenizer, [], ANSWER, several=True, thinking=True)
    for seed in range(4):
        parts = read(tokenizer, walk(tokenizer, grammar, seed), prompt)
        told = json.loads("".join(part.text for part in parts if isinstance(part, Said)))
        assert told["city"] in ("Paris", 'the "City"', "New York")


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_of_a_format_or_calls(name, several):
    tokenizer, kinds = tokenizer_for(TEMPLATES[name]), set()
    grammar = reply_grammar(tokenizer, TOOLS, ANSWER, several=several, thinking=False)
    for seed in range(12):
        parts = [part for part in read(tokenizer, walk(tokenizer, grammar, seed)) if not isinstance(part, Thought)]
        calls = [part for part in parts if isinstance(part, ToolCall)]
        if calls:
            assert all(map(is_right, calls)) and calls == parts and (several or len(calls) == 1)
        else:
            told = json.loads("".join(part.text for part in parts))
            assert is_right(ToolCall("weather", told))
        kinds.add(bool(calls))
    assert kinds == {False, True}


def test_what_cannot_be_forced_is_told():
    tokenizer = tokenizer_for(TEMPLATES["tagged"])
    deep = {"type": "object"}
    for _ in range(5000):
        deep = {"type": "object", "properties": {"a": deep}}
    for wrong, said in (
        ({"name": "a b"}, "letters, digits"),
        ({"name": "a", "parameters": {"type": "string"}}, "must be an object"),
        ({"name": "a", "parameters": {"properties": 5}}, "must be an object"),
        ({"name": "a", "parameters": {"required": [{}]}}, "must be an object"),
        ({"name": "a", "parameters": deep}, "nested too deeply"),
    ):
        with pytest.raises(OptionError, match=said):
            reply_grammar(tokenizer, [{"function": wrong}], several=False, thinking=False)
    odd = tool("a", ["b"], b={"type": "string", "enum": 5})  # for whoever reads the grammar to refuse
    assert reply_grammar(tokenizer_for(TEMPLATES["tags"]), [odd], several=False, thinking=False).source
    with pytest.raises(OptionError, match="no known way of calling"):
        reply_grammar(tokenizer_for("nothing"), TOOLS, several=False, thinking=False)
