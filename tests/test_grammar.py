"""Grammars: masks from scratch, and requests that hold to them: drafted, in batches, short of memory, and in error."""

import json
import random
import re
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

import bough
from bough import CacheConfig, Engine, SamplingParams
from bough.config import Grammar
from bough.draft.ngram import NGram
from bough.engine import drafting as drafting_module
from bough.engine.grammar import LONGEST, Grammars, Words, masks
from bough.engine.sampler import RowSampling, TokenCounts, draw, sample
from bough.engine.tokenizer import Tokenizer
from bough.errors import OptionError, RequestError
from bough.state import capacity

pytest.importorskip("llguidance")

DATE = Grammar.regex(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
SUMS = Grammar.lark(
    'start: "let " NAME "=" sum ";"\nsum: NUMBER | sum "+" sum | "(" sum ")"\nNAME: /[a-z]{1,8}/\n'
    'NUMBER: /[0-9]+/\n%ignore " "'
)
PERSON = Grammar.json_schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 3, "maximum": 99},
            "tags": {"type": "array", "items": {"enum": ["fox", "<|im_end|>"]}, "minItems": 1, "maxItems": 2},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
)
BUNDLED = Path(bough.__file__).parent / "bundled"
SAMPLED = SamplingParams(max_tokens=160, temperature=1.2, top_p=0.95, seed=3)
PROMPTS = ["the quick brown fox", "a very old bear in the dark", "the lazy dog and the", "runs away"]


def is_person(text: str) -> bool:
    person = json.loads(text)
    return (
        list(person) == ["name", "age", "tags"]
        and len(person["name"]) <= 6
        and type(person["age"]) is int
        and 3 <= person["age"] <= 99
        and 1 <= len(person["tags"]) <= 2
        and all(tag in ("fox", "<|im_end|>") for tag in person["tags"])
    )


def follows(engine: Engine, tokens: list[int], grammar: Grammar) -> bool:
    matcher = engine._grammars.begin(SamplingParams(grammar=grammar))
    return all(matcher.take(token) for token in tokens)


class Always:
    """A depth that is always the same."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def begin(self, *, greedy):
        return self

    def choose(self, rows: int, most: int) -> int:
        return min(self.depth, most)

    def observe(self, *_) -> None:
        pass


class Told:
    """Drafts what it was told that texts go on with; changed in places, or on the device, if asked for."""

    kinds, lag, reads_hidden = (), 0, False

    def __init__(self, known, *, wrong: float = 0.0, on_device: bool = False) -> None:
        self.known, self.wrong, self.on_device = [list(each) for each in known], wrong, on_device
        self.dice, self.texts = random.Random(0), {}

    def committed(self, rows) -> None:
        for row in rows:
            self.texts.setdefault(row.sequence, []).extend(row.tokens)

    def propose(self, rows, choose):
        drafts = []
        for row in rows:
            text = self.texts[row.sequence]
            rest = next((each[len(text) :] for each in self.known if each[: len(text)] == text), [])
            draft = [self.dice.randrange(300) if self.dice.random() < self.wrong else token for token in rest]
            draft = (draft + [self.dice.randrange(300) for _ in range(8)])[: row.most]
            drafts.append(torch.tensor(draft) if self.on_device else draft)
        return drafts

    def close(self, sequence: int) -> None:
        self.texts.pop(sequence, None)


def set_drafter(engine: Engine, drafter, depth: int) -> None:
    def put() -> None:
        engine._loop.drafting.drafter, engine._loop.drafting.depth = drafter, Always(depth)

    engine.call(put)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    monkeypatch.setattr(drafting_module, "PATIENCE", 60)  # a busy machine is no failure


@pytest.fixture(scope="module", params=["llama_folder", "hybrid_folder"])
def folder(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def loaded(folder):
    with Engine.load(folder, dtype="float32", draft=None) as engine:
        yield engine


@pytest.fixture
def engine(loaded):
    set_drafter(loaded, None, 0)
    yield loaded
    assert loaded._loop.drafting.failure is None
    loaded.check()


@pytest.fixture(scope="module")
def words(llama_folder) -> Tokenizer:
    return Tokenizer.from_folder(llama_folder)


def grammars(words: Tokenizer, ends=frozenset({2})) -> Grammars:
    return Grammars(words, words.vocab_size, ends)


def listed(mask: torch.Tensor, size: int) -> list[int]:
    return [token for token in range(size) if mask[token // 8] >> (token % 8) & 1]


# Masks.


def dates_after(words: Tokenizer, text: bytes) -> list[int]:
    """From scratch: the tokens with which a text can still become a date."""

    def goes_on(token: int) -> bool:
        longer = (text + words.token_bytes(token)).decode(errors="replace")
        return re.fullmatch(DATE.source, longer + "0000-00-00"[len(longer) :]) is not None

    plain = (token for token in range(words.vocab_size) if token not in words.special_ids)
    return [token for token in plain if words.token_bytes(token) and goes_on(token)] or [2]


def test_masks_after_a_text_and_after_each_token_of_a_draft(words):
    matcher = grammars(words).begin(SamplingParams(grammar=DATE))
    written = b""
    for token in words.encode("2024-", special=False):
        (mask,) = masks([(matcher, [])])
        assert listed(mask[0], words.vocab_size) == dates_after(words, written)
        assert matcher.take(token)
        written += words.token_bytes(token)
    draft = words.encode("05-31", special=False)
    free, mask, other = masks([(None, []), (matcher, draft), (matcher, [*draft[:2], draft[0], 2, 5])])
    assert free is None
    for depth in range(len(draft) + 1):
        assert listed(mask[depth], words.vocab_size) == dates_after(words, written + b"05-31"[:depth])
    assert torch.equal(other[:3], mask[:3])
    assert (other[3:] == 255).all(), "nobody looks at what follows a token that is refused"


def test_what_may_follow_depends_on_the_tokens_written_alone(words):
    """Whatever was drafted and not accepted leaves no trace, also in grammars that nest."""
    dice = random.Random(1)
    for grammar, _ in product((SUMS, PERSON), range(5)):
        reading = grammars(words)
        matcher, written = reading.begin(SamplingParams(grammar=grammar)), []
        for _ in range(40):
            (mask,) = masks([(matcher, [])])
            fresh = reading.begin(SamplingParams(grammar=grammar))
            assert all(fresh.take(token) for token in written)
            assert torch.equal(mask, masks([(fresh, [])])[0])
            allowed = [token for token in listed(mask[0], words.vocab_size) if token != 2]
            if not allowed or matcher.complete:
                break
            for _ in range(2):
                draft = [dice.choice(allowed), *(dice.randrange(words.vocab_size) for _ in range(dice.randint(0, 3)))]
                (tried,) = masks([(matcher, draft)])
                assert torch.equal(tried[0], mask[0])
                fresh_too = reading.begin(SamplingParams(grammar=grammar))
                assert all(fresh_too.take(token) for token in [*written, draft[0]])
                assert torch.equal(tried[1], masks([(fresh_too, [])])[0][0])
            written.append(dice.choice(allowed))
            assert matcher.take(written[-1])


def test_end_tokens_may_come_where_the_text_is_whole(words):
    number = Grammar.regex("[0-9]{1,2}")
    for ignore_eos in (False, True):
        matcher = grammars(words, frozenset({0, 2})).begin(SamplingParams(grammar=number, ignore_eos=ignore_eos))
        digit = words.encode("7", special=False)[0]
        seen = []
        for _ in range(2):
            seen.append({0, 2} & set(listed(masks([(matcher, [])])[0][0], words.vocab_size)))
            assert not matcher.complete
            assert matcher.take(digit)
        assert seen == [set(), set() if ignore_eos else {0, 2}]
        assert matcher.complete
        assert {0, 2} == set(listed(masks([(matcher, [])])[0][0], words.vocab_size))


def test_names_of_special_tokens_in_a_text_are_text(words):
    grammar = Grammar.lark('start: "<|im_end|>x"')
    matcher, text = grammars(words).begin(SamplingParams(grammar=grammar)), b""
    while not matcher.complete:
        token = listed(masks([(matcher, [])])[0][0], words.vocab_size)[0]
        assert token not in words.special_ids
        assert matcher.take(token)
        text += words.token_bytes(token)
    assert text == b"<|im_end|>x"


@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2, "top_k": 9}])
def test_a_mask_is_logits_of_minus_infinity(temperature, penalty, filters):
    size, rows = 300, 6
    params = SamplingParams(temperature=temperature, repetition_penalty=penalty, logprobs=3, **filters)
    logits, allowed = torch.randn(rows, size) * 3, torch.rand(rows, size) < 0.1
    allowed[2] = True
    allowed[3] = False
    allowed[3, 17] = True
    packed = torch.zeros(rows, 304, dtype=torch.uint8)
    packed[:, :size] = allowed
    packed = (packed.view(rows, 38, 8) << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)
    counts = TokenCounts.wanted_by(params, [1, 2, 3], size, "cpu")
    masked = [RowSampling(params, 5, r, counts, allowed=packed[r] if r != 2 else None) for r in range(rows)]
    free = [replace(row, allowed=None) for row in masked]
    before = logits.clone()
    ids, scores = draw(logits, masked)
    expected = draw(logits.masked_fill(~allowed, -torch.inf), free)
    assert torch.equal(ids, expected[0])
    assert torch.equal(scores, expected[1])
    assert allowed[torch.arange(rows), ids].all()
    found = sample(logits, masked)
    assert torch.equal(logits, before)
    model = torch.log_softmax(logits, -1)
    for r, each in enumerate(found.logprobs):
        assert each.chosen == pytest.approx(model[r, found.tokens[r]].item(), abs=1e-5)
        assert [token for token, _ in each.top] == model[r].topk(3).indices.tolist()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_masks_are_sent_to_the_gpu_without_waiting_for_it():
    logits, allowed = torch.randn(64, 150_001), torch.randint(0, 256, (64, 18_752), dtype=torch.uint8)
    rows = [RowSampling(SamplingParams(temperature=r % 2), 5, r, allowed=allowed[r]) for r in range(64)]
    on_device = logits.cuda()
    draw(on_device, rows)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ids, _ = draw(on_device, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ids.tolist() == draw(logits, rows)[0].tolist()


# Requests.


@pytest.mark.parametrize("temperature", [0, 0.8, 1.5])
def test_texts_are_what_the_grammar_says(engine, temperature):
    params = replace(SAMPLED, temperature=temperature, max_tokens=300)
    for grammar, holds in (
        (PERSON, is_person),
        (DATE, lambda text: re.fullmatch(DATE.source, text)),
        (SUMS, lambda text: re.fullmatch(r"let *[a-z]{1,8} *=[0-9+() ]*; *", text)),
    ):
        for out in engine.generate(PROMPTS, replace(params, grammar=grammar)):
            if out.finish_reason == "stop":
                assert holds(out.text)
            else:  # white space and sums can be long
                assert (out.finish_reason, grammar is DATE) == ("length", False)
                assert follows(engine, out.tokens, grammar)


def test_any_json_object(engine):
    for out in engine.generate(PROMPTS, replace(SAMPLED, grammar=Grammar.json_object())):
        if out.finish_reason == "stop":
            assert isinstance(json.loads(out.text), dict)
        else:
            assert out.finish_reason == "length"
            assert follows(engine, out.tokens, Grammar.json_object())


def test_the_text_ends_where_nothing_can_follow(engine):
    for ignore_eos in (False, True):
        out = engine.generate("the", SamplingParams(grammar=DATE, temperature=0, ignore_eos=ignore_eos))
        assert out.finish_reason == "stop"
        assert re.fullmatch(DATE.source, out.text)
        assert out.tokens[-1] not in engine.end_tokens


def test_a_text_that_could_go_on_ends_with_an_end_token(engine):
    grammar = Grammar.regex("[a-z ]+")
    ended = engine.generate(PROMPTS * 4, replace(SAMPLED, grammar=grammar, temperature=2.0, top_p=1.0))
    assert any(out.tokens[-1] in engine.end_tokens for out in ended)
    for out in ended:
        assert re.fullmatch("[a-z ]+", out.text)
        assert (out.finish_reason == "stop") == (out.tokens[-1] in engine.end_tokens)
    going = engine.generate("the", replace(SAMPLED, grammar=grammar, ignore_eos=True))
    assert (going.finish_reason, len(going.tokens)) == ("length", SAMPLED.max_tokens)


def test_max_tokens_cuts(engine):
    whole = engine.generate("the", SamplingParams(grammar=PERSON, temperature=0, max_tokens=300))
    cut = engine.generate("the", SamplingParams(grammar=PERSON, temperature=0, max_tokens=5))
    assert (cut.finish_reason, cut.tokens) == ("length", whole.tokens[:5])
    just = engine.generate("the", SamplingParams(grammar=PERSON, temperature=0, max_tokens=len(whole.tokens)))
    assert (just.finish_reason, just.text) == ("stop", whole.text)


def test_an_empty_text(engine):
    out = engine.generate("the", SamplingParams(grammar=Grammar.regex(""), temperature=0))
    assert (out.text, out.finish_reason) == ("", "stop")


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=60, temperature=0),
        replace(SAMPLED, max_tokens=60, logprobs=2),
        replace(SAMPLED, max_tokens=60, top_k=7, repetition_penalty=1.4, presence_penalty=0.3, logprobs=1),
        replace(SAMPLED, max_tokens=60, ignore_eos=True, stop=("fo",)),
    ],
    ids=["greedy", "noise", "penalties", "stops"],
)
def test_drafts_change_nothing_but_speed(engine, params):
    """At any depth, right or wrong, on the host or the device, beside rows that are free."""
    wanted = [replace(params, grammar=grammar) for grammar in (PERSON, DATE, None, SUMS)]
    plain = [engine.generate(prompt, each) for prompt, each in zip(PROMPTS, wanted, strict=True)]
    known = [[*engine.tokenize(p), *out.tokens] for p, out in zip(PROMPTS, plain, strict=True)]
    for drafter, depth in (
        (None, 0), (NGram(), 4), (Told(known), 8), (Told(known, wrong=0.3), 3), (Told(known, wrong=1.0), 5),
        (Told(known, wrong=0.2, on_device=True), 6),
    ):  # fmt: skip
        set_drafter(engine, drafter, depth)
        handles = [engine.submit(prompt, each) for prompt, each in zip(PROMPTS, wanted, strict=True)]
        for handle, expected in zip(handles, plain, strict=True):
            out = handle.result()
            assert (out.tokens, out.text, out.finish_reason) == (expected.tokens, expected.text, expected.finish_reason)
            assert [each.chosen for each in out.logprobs] == pytest.approx(
                [each.chosen for each in expected.logprobs], abs=1e-3
            )
            if isinstance(drafter, Told) and not drafter.wrong:
                assert out.usage.accepted_tokens >= len(out.tokens) // 2


def test_drafts_that_end_too_early_or_too_late(engine):
    """End tokens drafted where they may not come, and drafts past the end of a grammar."""
    params = SamplingParams(grammar=DATE, temperature=0)
    plain = engine.generate("the", params)
    start = engine.tokenize("the")
    for rest in ([*plain.tokens[:4], 2, 5, 6], [*plain.tokens, *plain.tokens], [2, 2, 2]):
        set_drafter(engine, Told([[*start, *rest]]), 8)
        assert engine.generate("the", params).tokens == plain.tokens


def test_logprobs_are_those_of_the_model(engine):
    out = engine.generate("the", SamplingParams(grammar=DATE, temperature=0, logprobs=2))
    scores = engine.score([*engine.tokenize("the"), *out.tokens])
    assert [each.chosen for each in out.logprobs] == pytest.approx(scores[-len(out.tokens) :], abs=1e-4)


def test_short_of_memory(folder):
    """Those that give their memory back go on with what they had written."""
    params = replace(SAMPLED, max_tokens=90, ignore_eos=True, grammar=Grammar.json_object())
    prompts = [[3 + (7 * i + j) % 250 for j in range(40 + 5 * i)] for i in range(5)]
    with Engine.load(folder, dtype="float32", cache=CacheConfig(page_tokens=8), max_running=6) as roomy:
        expected = [roomy.generate(prompt, params) for prompt in prompts]
        layout = roomy.layout
    slabs = capacity.slabs(layout, 1, 240, 160, 6)
    cache = CacheConfig(device_bytes=slabs * layout.slab_bytes, page_tokens=8)
    with Engine.load(folder, dtype="float32", cache=cache, max_running=6) as tight:
        outs = tight.generate(prompts, params)
        tight.check()
    assert [out.tokens for out in outs] == [out.tokens for out in expected]


def test_cancelling(engine):
    params = SamplingParams(max_tokens=450, temperature=0, ignore_eos=True, grammar=Grammar.regex("[a-z ]*"))
    handle = engine.submit("the dog", params)
    first = next(iter(handle))
    handle.cancel()
    out = handle.result()
    assert out.finish_reason == "cancelled"
    assert out.tokens[: len(first.tokens)] == first.tokens
    assert re.fullmatch("[a-z ]*", out.text)


def test_chats(engine):
    chat = engine.chat(params=replace(SAMPLED, max_tokens=100, grammar=DATE))
    for said in ("when?", "and then?"):
        assert re.fullmatch(DATE.source, chat.send(said).text)


def test_the_bundled_model_writes_json_with_and_without_drafts():
    params = SamplingParams(max_tokens=40, temperature=0, grammar=Grammar.json_object())
    with Engine.load(BUNDLED, dtype="float32", draft=None) as engine:
        plain = engine.generate("Here is what I know about her as JSON:", params)
        set_drafter(engine, NGram(), 4)
        drafted = engine.generate("Here is what I know about her as JSON:", params)
    assert plain.text.startswith("{")
    assert drafted.tokens == plain.tokens


# Refusals and faults.


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (Grammar.regex("[0-9"), "regular expression .*unclosed"),
        (Grammar.regex("(?=a)b"), "regular expression"),
        (Grammar.json_schema({"type": "frob"}), "JSON schema .*frob"),
        (Grammar.json_schema({"type": "string", "not": {}}), "JSON schema .*not"),
        (Grammar.json_schema(False), "JSON schema .*false"),
        (Grammar.json_schema({"$ref": "https://example.com/a.json"}), "JSON schema"),
        (Grammar.json_schema('{"items":' * 200 + "{}" + "}" * 200), "JSON schema .*recursion"),
        (Grammar.lark("start: missing"), "Lark grammar .*missing"),
        (Grammar.lark(""), "Lark grammar .*[Ee]mpty"),
        (Grammar.lark('start: "\ud800"'), "Lark grammar"),
        (Grammar.regex("a" * (LONGEST + 1)), "characters"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.kind,
)
def test_a_wrong_grammar_is_refused_at_once(engine, grammar, says):
    with pytest.raises(OptionError, match=says):
        engine.submit("the", SamplingParams(grammar=grammar))


@pytest.mark.parametrize("schema", ["{", "[1]", "3", 3, {"a": {1, 2}}, {"const": float("nan")}])
def test_what_is_no_schema_at_all(schema):
    with pytest.raises(OptionError, match="JSON schema"):
        Grammar.json_schema(schema)


def test_grammars_are_values():
    assert Grammar.json_schema({"a": 1}) == Grammar.json_schema('{"a":1}')
    assert hash(SamplingParams(grammar=DATE)) == hash(SamplingParams(grammar=Grammar.regex(DATE.source)))
    for wrong in ({"kind": "frob", "source": "a"}, {"kind": "regex", "source": 3}):
        with pytest.raises(OptionError):
            Grammar(**wrong)
    with pytest.raises(OptionError, match="grammar"):
        SamplingParams(grammar="[0-9]+")


def test_rules_nested_very_deep_do_not_end_the_process(words):
    chain = "".join(f'r{i}: "a" r{i + 1}\n' for i in range(8000))
    grammars(words).check(Grammar.lark(f'start: r0\n{chain}r8000: "b"'))
    defs = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(4000)}
    grammars(words).check(Grammar.json_schema({"$ref": "#/$defs/d0", "$defs": {**defs, "d4000": {"type": "integer"}}}))


def test_without_the_library(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(OptionError, match=r"pip install 'bough\[grammar\]'"):
        engine.submit("the", SamplingParams(grammar=Grammar.regex("not read yet")))
    engine.generate("the", SamplingParams(max_tokens=2))


def test_without_a_tokenizer_or_an_end_token(words):
    with pytest.raises(OptionError, match="tokenizer"):
        Grammars(None, 300, frozenset({2})).check(DATE)
    with pytest.raises(OptionError, match="end token"):
        grammars(words, frozenset()).check(DATE)


def test_what_the_vocabulary_cannot_write_fails_that_request_alone(llama_folder, monkeypatch):
    """No token has a 7 in it: a text gets stuck where nothing else may come, with drafts as without."""

    def without_sevens(self, tokenizer, *given, made=Words.__init__):
        made(self, tokenizer, *given)
        self.tokens = [b"" if b"7" in token else token for token in self.tokens]

    monkeypatch.setattr(Words, "__init__", without_sevens)
    stuck = SamplingParams(temperature=0, grammar=Grammar.regex("[a-c]{4}7"))
    with Engine.load(llama_folder, dtype="float32", draft=None) as engine:
        free = engine.generate("the", SamplingParams(temperature=0, max_tokens=30))
        for drafter in (None, Told([engine.tokenize("the") + [engine.tokenize("a")[0]] * 4], wrong=0.5)):
            set_drafter(engine, drafter, 6)
            handles = [engine.submit("the", stuck), engine.submit("the", SamplingParams(temperature=0, max_tokens=30))]
            with pytest.raises(RequestError, match="no token"):
                handles[0].result()
            assert handles[1].result().tokens == free.tokens
        engine.check()


@pytest.mark.parametrize("drafted", [False, True])
def test_a_grammar_that_becomes_too_complex_fails_that_request_alone(engine, monkeypatch, drafted):
    """Also with a draft; and what was written until then is not answered as if it were whole."""
    import llguidance

    def limited(*given, **options):
        return real(*given, **options, limits=llguidance.LLParserLimits(step_max_items=30))

    real = llguidance.LLMatcher
    limited.grammar_from_lark = real.grammar_from_lark
    monkeypatch.setattr(llguidance, "LLMatcher", limited)
    # One grammar each, since those that were read before are not read again.
    grammar = Grammar.lark(f'start: a\na: a a | "a" | "b" a | "{"d" if drafted else "c"}"')
    params = SamplingParams(temperature=0, grammar=grammar, max_tokens=200, ignore_eos=True)
    if drafted:
        letters = [engine.tokenize(letter)[0] for letter in "aaaaaaaaaaaa"]
        set_drafter(engine, Told([engine.tokenize("the") + letters], wrong=0.3), 5)
    with pytest.raises(RequestError, match="could not be followed"):
        engine.generate("the", params)
    assert engine.generate("the", SamplingParams(max_tokens=3, temperature=0)).finish_reason == "length"
