"""The engine as its users see it: generate, stream, score, chat, limits, cancellation, memory."""

import gc
import threading
import time
import weakref

import numpy as np
import pytest
import torch

from bough import CacheConfig, Engine, SamplingParams
from bough.engine import garbage
from bough.engine.budget import Budget
from bough.engine.request import Handle, Request, TokenIds
from bough.errors import (
    BadPrompt,
    EmptyPrompt,
    ModelError,
    OptionError,
    PoolFull,
    PromptTooLong,
    RequestError,
    TemplateError,
    TokenOutOfRange,
)

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module", params=["llama_folder", "hybrid_folder"])
def folder(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def loaded(folder):
    with Engine.load(folder, dtype="float32") as engine:
        yield engine


@pytest.fixture
def engine(loaded):
    before = loaded.used_bytes
    yield loaded
    loaded.check()
    loaded.cache.clear()
    assert loaded.used_bytes == before, "something leaked"


@pytest.fixture(scope="module")
def reference(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_greedy_equals_transformers(engine, reference):
    tokens = engine.tokenize("the quick brown fox")
    out = engine.generate("the quick brown fox", GREEDY)
    with torch.no_grad():
        logits = reference(torch.tensor([[*tokens, *out.tokens]])).logits[0].float()
    for i, token in enumerate(out.tokens):
        top = logits[len(tokens) + i - 1].topk(2)
        assert token == top.indices[0] or top.values[0] - top.values[1] < 1e-3
    assert out.text == engine.tokenizer.decode([*tokens, *out.tokens])[len("the quick brown fox") :]
    assert out.finish_reason == "length"
    assert (out.usage.prompt_tokens, out.usage.completion_tokens) == (len(tokens), 24)


def test_several_prompts_give_what_each_gives_alone(engine):
    prompts = ["the", "a very old bear in the dark forest " * 6, [5, 6, 7], "fox"]
    params = SamplingParams(max_tokens=17, temperature=0.9, top_p=0.95, seed=11, ignore_eos=True)
    together = engine.generate(prompts, params)
    alone = [engine.generate(prompt, params) for prompt in prompts]
    assert [out.tokens for out in together] == [out.tokens for out in alone]
    assert [out.text for out in together] == [out.text for out in alone]


def test_many_at_once_with_small_steps(hybrid_folder):
    """More requests than may run, prompts longer than a step, memory for few: all end with the right tokens."""
    prompts = [[3 + (7 * i + j) % 250 for j in range(5 + 13 * i)] for i in range(9)]
    with Engine.load(hybrid_folder, dtype="float32") as roomy:
        expected = [roomy.generate(prompt, GREEDY).tokens for prompt in prompts]
        loaded_bytes = roomy.layout.slab_bytes
    cache = CacheConfig(device_bytes=26 * loaded_bytes, page_tokens=8)
    with Engine.load(hybrid_folder, dtype="float32", cache=cache, max_running=4) as tight:
        tight._loop.budget = Budget(16)
        outs = tight.generate(prompts, GREEDY)
        tight.check()
    assert [out.tokens for out in outs] == expected


def test_stream_is_the_same_text(engine):
    pieces = list(engine.stream("jumps over", GREEDY))
    out = engine.generate("jumps over", GREEDY)
    assert "".join(piece.text for piece in pieces) == out.text
    assert [token for piece in pieces for token in piece.tokens] == out.tokens


def test_closing_a_stream_cancels(engine):
    stream = engine.stream("the dog", SamplingParams(max_tokens=400, temperature=0, ignore_eos=True))
    next(stream)
    stream.close()
    engine.generate("the", GREEDY)  # the loop has gone on and released the first


def test_cancel_keeps_what_was_written(engine):
    handle = engine.submit("the dog", SamplingParams(max_tokens=480, temperature=0, ignore_eos=True))
    first = next(iter(handle))
    handle.cancel()
    out = handle.result()
    assert out.finish_reason == "cancelled"
    assert out.tokens[: len(first.tokens)] == first.tokens


def test_score_equals_transformers(engine, reference):
    tokens = engine.tokenize("the quick brown fox jumps over the lazy dog and runs away") * 12  # more than a step
    tokens = tokens[: engine.context]
    with torch.no_grad():
        logprobs = torch.log_softmax(reference(torch.tensor([tokens])).logits[0].float(), -1)
    expected = logprobs[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    scores = torch.tensor(engine.score(tokens))
    assert scores.shape == expected.shape
    assert (scores - expected).abs().max() < 1e-4
    assert engine.score(tokens[:1]) == []


def test_logprobs(engine):
    out = engine.generate("the", SamplingParams(max_tokens=3, temperature=0, logprobs=4, ignore_eos=True))
    scores = engine.score([*engine.tokenize("the"), *out.tokens])
    assert [each.chosen for each in out.logprobs] == pytest.approx(scores[-3:], abs=1e-4)
    assert all(
        len(each.top) == 4 and each.top[0][0] == token for each, token in zip(out.logprobs, out.tokens, strict=True)
    )


def test_end_token_ends_and_is_not_text(engine):
    out = engine.generate("the quick", SamplingParams(max_tokens=400, temperature=1.5, seed=5))
    if out.finish_reason == "stop":
        assert out.tokens[-1] in engine.end_tokens
        assert "<|im_end|>" not in out.text
    assert not set(out.tokens[:-1]) & engine.end_tokens


def test_stop_string_cuts_the_text(engine):
    whole = engine.generate("the", GREEDY).text
    stop = whole[len(whole) // 2 :][:3]
    out = engine.generate("the", SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, stop=stop))
    assert out.text == whole[: whole.index(stop)]
    assert out.finish_reason == "stop"


def test_zero_tokens_reads_the_prompt_only(engine):
    out = engine.generate("the fox", SamplingParams(max_tokens=0))
    assert (out.text, out.tokens, out.finish_reason) == ("", [], "length")


def test_context_limit_ends_with_length(engine):
    tokens = [5] * (engine.context - 4)
    out = engine.generate(tokens, SamplingParams(max_tokens=100, temperature=0, ignore_eos=True))
    assert len(out.tokens) == 4
    assert out.finish_reason == "length"
    assert engine.generate([5] * engine.context, GREEDY).tokens == []


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("", EmptyPrompt),
        ([], EmptyPrompt),
        ([0, 10**6], TokenOutOfRange),
        ([-1], TokenOutOfRange),
        ([2**32 + 5], TokenOutOfRange),
        ([1.5], TokenOutOfRange),
        ([5] * 513, PromptTooLong),
        (["the", ""], EmptyPrompt),
        (["the", [10**6]], TokenOutOfRange),
    ],
)
def test_bad_prompts(engine, prompt, error):
    with pytest.raises(error):
        engine.generate(prompt, GREEDY)
    with pytest.raises(RequestError):
        engine.score([])


def test_bad_options(llama_folder):
    for options in ({"context": 0}, {"context": 10**9}, {"device": "abacus"}, {"dtype": "int3"}, {"max_running": 0}):
        with pytest.raises(OptionError):
            Engine.load(llama_folder, **options)
    with pytest.raises(PoolFull, match="bytes"):
        Engine.load(llama_folder, cache=CacheConfig(device_bytes=10))


def test_prompt_that_can_never_fit_is_refused_at_once(llama_folder):
    with Engine.load(llama_folder, dtype="float32", cache=CacheConfig(device_bytes=200_000)) as small:
        assert len(small.generate([5] * 40, GREEDY).tokens) == 24
        with pytest.raises(PoolFull, match="shorten"):
            small.generate([5] * 500, GREEDY)
        small.check()


def test_running_out_of_memory_ends_one_request_with_a_clear_error(llama_folder):
    with Engine.load(llama_folder, dtype="float32", cache=CacheConfig(device_bytes=200_000)) as small:
        with pytest.raises(PoolFull, match="memory"):
            small.generate([5] * 40, SamplingParams(max_tokens=460, temperature=0, ignore_eos=True))
        assert len(small.generate([5] * 40, GREEDY).tokens) == 24
        small.check()


def test_a_forward_that_fails_ends_its_requests_only(hybrid_folder, monkeypatch):
    with Engine.load(hybrid_folder, dtype="float32") as engine:
        expected = engine.generate("the fox", GREEDY).tokens
        whole = type(engine.model).logits
        monkeypatch.setattr(type(engine.model), "logits", lambda self, hidden: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.generate("the fox", GREEDY)
        monkeypatch.setattr(type(engine.model), "logits", whole)
        assert engine.generate("the fox", GREEDY).tokens == expected
        engine.check()


def test_threads(engine):
    expected = {prompt: engine.generate(prompt, GREEDY).tokens for prompt in ("the", "fox runs", "old bear")}
    found: list[bool] = []

    def ask(prompt: str) -> None:
        found.append(engine.generate(prompt, GREEDY).tokens == expected[prompt])

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in expected for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 9


@pytest.fixture
def nothing_frozen(monkeypatch):
    """Nor an engine that leaves what conftest.py has frozen."""
    monkeypatch.setattr("bough.engine.garbage.gc", gc)
    for name in ("_engines", "_closed"):  # others are open in other tests' fixtures
        monkeypatch.setattr(f"bough.engine.garbage.{name}", weakref.WeakSet())
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_what_libraries_made_is_not_looked_through_for_garbage(llama_folder):
    assert gc.get_freeze_count() == 0
    with Engine.load(llama_folder, dtype="float32") as engine:
        assert gc.get_freeze_count() > 1000, "all who write would wait for that"
        assert engine.generate("a", GREEDY).tokens
    assert gc.get_freeze_count() == 0, "what is garbage by now would stay"


@pytest.mark.usefixtures("nothing_frozen")
def test_an_engine_that_is_closed_goes_though_others_are_open(llama_folder):
    first, second = (Engine.load(llama_folder, dtype="float32") for _ in range(2))
    kept = [weakref.ref(each) for each in (second, second.model, second._runner.pool.arena.data)]
    second.close()
    assert gc.get_freeze_count() == 0
    garbage.leave_out()
    assert gc.get_freeze_count() == 0, "somebody still refers to it"
    del second
    garbage.leave_out()
    assert [each() is None for each in kept] == [True] * 3, "it was left out"
    garbage.closed(object())  # once more
    assert gc.get_freeze_count() > 1000
    first.close()
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("nothing_frozen")
def test_what_captured_graphs_leave_is_not_looked_through_either(llama_folder):
    with Engine.load(llama_folder, dtype="float32") as engine:
        engine.generate("a", GREEDY)
        before, made = gc.get_freeze_count(), [[] for _ in range(5000)]
        engine.generate("a", GREEDY)
        assert gc.get_freeze_count() <= before, "nothing was captured"
        engine._runner.graphs.made += 1  # as if on a device
        engine.generate("a", GREEDY)
        assert gc.get_freeze_count() > before + len(made) // 2
        gc.disable()
        try:
            before = gc.get_freeze_count()
            made += [[] for _ in range(5000)]
            engine._runner.graphs.made += 1
            engine.generate("a", GREEDY)
            assert gc.get_freeze_count() <= before, "nobody wants it to be looked for"
        finally:
            gc.enable()


def test_what_listens_is_forgotten_at_the_end(llama_folder):
    class Listener:
        def __call__(self) -> None:
            pass

    with Engine.load(llama_folder, dtype="float32") as engine:
        for late in (False, True):
            handle, listener = engine.submit("a", GREEDY), Listener()
            if late:
                handle.result()
            handle.listen(listener)
            handle.result()
            alive = weakref.ref(listener)
            listener = None
            for _ in range(200):  # the engine's thread lets go of it a moment after the result is there
                if alive() is None:
                    break
                time.sleep(0.01)
            assert alive() is None


@pytest.mark.parametrize("between", ["done and told", "told and over", "over"])
def test_who_begins_to_listen_while_a_request_ends_hears_of_it(between):
    """Whatever the engine's thread is about to do when another one begins to listen."""
    handle, seen = Handle(Request(TokenIds([1]), GREEDY, 0), has_text=False), []

    def listener() -> None:
        seen.append(handle._news.qsize())

    tell = handle._tell

    def told(news: None) -> None:
        if between == "done and told":
            handle.listen(listener)
        tell(news)
        if between == "told and over":
            handle.listen(listener)

    handle._tell = told
    handle.end()
    if between == "over":
        handle.listen(listener)
    assert seen[-1] == 1, "it never saw the end"
    assert handle._listener is None


def test_chat_keeps_its_tokens(engine):
    chat = engine.chat(system="be brief")
    params = SamplingParams(max_tokens=12, temperature=0)
    first = chat.send("the quick fox", params)
    reply = chat.stream("and the dog?", params)
    prompt = list(reply.handle.request.prompt)
    spoken = [t for t in first.tokens if t not in engine.end_tokens]
    start = engine.tokenizer.encode(
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nthe quick fox<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt[: len(start) + len(spoken)] == [*start, *spoken]
    assert "".join(piece.text for piece in reply) == reply.output.text
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant", "user", "assistant"]


def test_chat_fork_and_rewind(engine):
    params = SamplingParams(max_tokens=8, temperature=0)
    chat = engine.chat()
    chat.send("one", params)
    other = chat.fork()
    a, b = chat.send("two", params), other.send("two", params)
    assert a.tokens == b.tokens
    chat.rewind()
    assert chat.send("two", params).tokens == a.tokens
    with pytest.raises(OptionError):
        chat.rewind(turns=3)


def test_models_without_tokenizer_take_tokens(llama_folder, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(llama_folder / name)
    with Engine.load(tmp_path, dtype="float32") as bare:
        out = bare.generate([5, 6, 7], GREEDY)
        assert len(out.tokens) == 24 and out.text == ""
        with pytest.raises(RequestError, match="tokenizer"):
            bare.generate("text", GREEDY)
        with pytest.raises(TemplateError, match="tokenizer"):
            bare.chat()
        with pytest.raises(OptionError, match="tokenizer"):
            bare.generate([5], SamplingParams(stop="x"))


def test_reserve_leaves_the_pool_as_it_was(engine):
    pool = engine._runner.pool
    before = [(store.refs.copy(), store.fill.copy(), store.used) for store in pool.stores]
    fit = engine.reserve()
    after = [(store.refs, store.fill, store.used) for store in pool.stores]
    assert all(
        (a[0] == b[0]).all() and (a[1] == b[1]).all() and a[2] == b[2] for a, b in zip(before, after, strict=True)
    )
    assert fit.longest == engine.context
    assert fit.activation_bytes > 0
    assert fit.weight_bytes > 0


def test_what_reserve_promises_fits(hybrid_folder):
    cache = CacheConfig(device_bytes=3_000_000, page_tokens=16)
    with Engine.load(hybrid_folder, dtype="float32", cache=cache, max_running=64) as engine:
        fit = engine.reserve()
        length, count = next(iter(fit.sequences.items()))
        assert count >= 1
        prompts = [[5 + i % 7] * (length - 1) for i in range(count)]
        from bough.state.live import State

        pool = engine._runner.pool
        states = [State(pool) for _ in prompts]
        for start in range(0, length - 1, 64):
            for state, prompt in zip(states, prompts, strict=True):
                engine._runner.forward([(state, prompt[start : start + 64])], [0])
        pool.check()
        for state in states:
            state.release()


def test_closing_twice_and_using_after_closing(llama_folder):
    engine = Engine.load(llama_folder)
    engine.close()
    engine.close()
    with pytest.raises(RequestError, match="closed"):
        engine.generate("the", GREEDY)


@pytest.mark.parametrize(
    "wrong",
    [
        '{"do_sample": true, "temperature": "hot"}',
        '{"eos_token_id": ["x"]}',
        '{"eos_token_id": Infinity}',
        '{"do_sample": true, "top_p": 7}',
        "[]",
    ],
)
def test_a_wrong_generation_config_is_a_clear_error(llama_folder, tmp_path, wrong):
    for file in llama_folder.iterdir():
        if file.name != "generation_config.json":
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").write_text(wrong)
    with pytest.raises(ModelError, match="generation_config"):
        Engine.load(tmp_path)


@pytest.mark.parametrize("prompt", [b"the", bytearray(b"the"), memoryview(b"the"), None, 5, 1.5, {}, {1}, np.array(5)])
def test_what_is_no_prompt(engine, prompt):
    for ask in (engine.generate, engine.submit, engine.score):
        with pytest.raises(BadPrompt, match="token ids"):
            ask(prompt)
    with pytest.raises(BadPrompt):
        engine.generate(["the", prompt], GREEDY)


@pytest.mark.parametrize("tokens", [[True], [5, None], [5, "the"], [np.float32(5)], [[5]], [np.True_]])
def test_what_is_no_token(engine, tokens):
    with pytest.raises(TokenOutOfRange, match="not a token id"):
        engine.submit(tokens, GREEDY)


def test_arrays_and_tensors_are_prompts(engine):
    expected = engine.generate([5, 6, 7], GREEDY).tokens
    several = [5, 6, 7], np.array([5, 6, 7]), torch.tensor([5, 6, 7], dtype=torch.int32), (5, 6, 7), range(5, 8)
    for one in (*several, [np.int64(5), 6, torch.tensor(7)]):
        assert engine.generate(one, GREEDY).tokens == expected
    for prompts in (several, np.array([[5, 6, 7]] * 2), [torch.tensor([5, 6, 7])]):
        assert [out.tokens for out in engine.generate(prompts, GREEDY)] == [expected] * len(prompts)
    assert len(engine.generate([torch.tensor([5])], GREEDY)) == 1  # one prompt of one token, in a list
    assert engine.generate(["the", np.array([5, 6, 7])], GREEDY)[1].tokens == expected
    with pytest.raises(EmptyPrompt):
        engine.generate(np.array([], dtype=np.int64), GREEDY)


@pytest.mark.parametrize(
    ("kind", "name", "wrong"),
    [
        (SamplingParams, "max_tokens", ["5", 5.0, True, None, -1]),
        (SamplingParams, "temperature", ["hot", True, None, -0.5, float("nan"), float("inf"), 10**400]),
        (SamplingParams, "top_k", [2.5, "2", False, -1]),
        (SamplingParams, "top_p", ["1", 0, 1.5, None]),
        (SamplingParams, "min_p", ["0", -0.1, 1.5, [0]]),
        (SamplingParams, "repetition_penalty", ["1", 0, float("inf")]),
        (SamplingParams, "presence_penalty", ["1", float("nan"), None]),
        (SamplingParams, "frequency_penalty", [True, float("-inf")]),
        (
            SamplingParams,
            "logit_bias",
            [None, {5: None}, {5: float("nan")}, {-1: 1.0}, {"5": 1.0}, {True: 1}, ((5, 1, 2),)],
        ),
        (SamplingParams, "seed", [1.0, "1", True, -1, 2**63]),
        (SamplingParams, "stop", [5, None, [""], "", [b"x"], ["x", 5], b"x"]),
        (SamplingParams, "logprobs", [True, 2.0, -1, 65]),
        (SamplingParams, "ignore_eos", [1, "yes", None]),
        (CacheConfig, "device_bytes", ["2G", 1e9, True, 0, 2**63]),
        (CacheConfig, "page_tokens", [16.0, "16", 0, True]),
        (CacheConfig, "dtype", [None, 5, "int4", torch.float32]),
    ],
)
def test_wrong_options_are_named(kind, name, wrong):
    for value in wrong:
        with pytest.raises(OptionError, match=name):
            kind(**{name: value})


def test_wrong_types_of_engine_options(llama_folder, tmp_path):
    for name in ("context", "max_running"):
        for value in ("5", 5.0, True, 0):
            with pytest.raises(OptionError, match=name):
                Engine.load(llama_folder, **{name: value})
            with pytest.raises(OptionError, match=name):
                Engine.load(tmp_path / "nothing is read yet", **{name: value})


def test_params_of_another_type(engine):
    with pytest.raises(OptionError, match="SamplingParams"):
        engine.generate("the", {"max_tokens": 5})


def test_nothing_starts_when_one_prompt_is_refused(llama_folder, monkeypatch):
    with Engine.load(llama_folder, dtype="float32", cache=CacheConfig(device_bytes=200_000)) as small:
        started = []
        monkeypatch.setattr(small._loop, "submit", started.append)
        for refused, error in (([5] * 500, PoolFull), ([5] * 513, PromptTooLong), ("", EmptyPrompt)):
            with pytest.raises(error):
                small.generate(["the", refused], GREEDY)
        with pytest.raises(PoolFull):
            small.score([5] * 500)
        assert started == []


def test_memory_that_cannot_be_had(llama_folder):
    with pytest.raises(PoolFull, match="cannot be had"):
        Engine.load(llama_folder, cache=CacheConfig(device_bytes=2**62))


def test_memory_for_state_where_the_system_does_not_tell(llama_folder, monkeypatch):
    from bough.engine import memory as module

    class NoFile:
        def __init__(self, name):
            pass

        def read_text(self):
            raise FileNotFoundError

    assert module.available_bytes() > 1 << 20
    monkeypatch.setattr(module, "Path", NoFile)
    assert module.available_bytes() > 1 << 20

    def sysconf(name):
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(module.os, "sysconf", sysconf)
    assert module.available_bytes() == 1 << 30


def test_a_home_that_is_not_there():
    with pytest.raises(ModelError, match="~nobody-of-this-name/x is not there"):
        Engine.load("~nobody-of-this-name/x")


def test_a_tokenizer_with_more_tokens_than_the_model(llama_folder, tmp_path):
    """As Gemma 3 has it. What the model cannot read is refused when it is asked for."""
    from tokenizers import Tokenizer

    for file in llama_folder.iterdir():
        if file.name != "tokenizer.json":
            (tmp_path / file.name).symlink_to(file)
    core = Tokenizer.from_file(str(llama_folder / "tokenizer.json"))
    core.add_tokens(["<image>"])
    core.save(str(tmp_path / "tokenizer.json"))
    with Engine.load(tmp_path, dtype="float32") as engine:
        assert len(engine.generate("the fox", GREEDY).tokens) == 24
        with pytest.raises(TokenOutOfRange, match="300"):
            engine.generate("the <image>", GREEDY)


def test_prefilled_grows_to_the_prompt(engine, monkeypatch):
    monkeypatch.setattr(engine._loop, "budget", Budget(32))
    submitted, seen = threading.Event(), []
    forward = type(engine._runner).forward

    def watched(runner, *args, **options):
        submitted.wait()
        seen.append(handle.prefilled)
        return forward(runner, *args, **options)

    monkeypatch.setattr(type(engine._runner), "forward", watched)
    handle = engine.submit([5] * 100, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
    submitted.set()
    handle.result()
    assert seen == [0, 32, 64, 96]
    assert handle.prefilled == 100


def test_a_reply_is_closed_once(engine):
    chat = engine.chat()
    reply = chat.stream("one", GREEDY)
    with pytest.raises(OptionError, match="still open"):
        chat.stream("two", GREEDY)
    next(iter(reply))
    reply.close()
    turns = chat.turns
    assert len(turns) == 1
    reply.close()
    assert chat.turns is turns
    chat.send("two", GREEDY)
    reply.close()
    assert len(chat.turns) == 2


def test_a_reply_does_not_undo_a_rewind(engine):
    chat = engine.chat()
    chat.send("one", GREEDY)
    reply = chat.stream("two", GREEDY)
    chat.rewind()
    reply.close()
    assert chat.turns == ()
    assert len(chat.send("three", GREEDY).tokens) == 24


def test_a_reply_that_nobody_holds_is_cancelled(engine):
    chat = engine.chat()
    reply = chat.stream("one", SamplingParams(max_tokens=400, temperature=0, ignore_eos=True))
    handle = reply.handle
    del reply
    gc.collect()
    assert handle.result().finish_reason == "cancelled"
    assert chat.turns == ()
    chat.send("two", GREEDY)
    assert len(chat.turns) == 1


def test_reserve_tells_the_step_it_measured(hybrid_folder):
    with Engine.load(hybrid_folder, dtype="float32", context=96, max_running=3) as engine:
        assert engine.reserve().step_tokens == 96
    with Engine.load(hybrid_folder, dtype="float32") as engine:
        assert engine.reserve().step_tokens == 512


def test_a_deadline_ends_a_request_with_what_it_has(engine):
    out = engine.generate("the fox", SamplingParams(max_tokens=4000, temperature=0, ignore_eos=True, deadline=0.001))
    assert out.finish_reason == "deadline" and len(out.tokens) < 4000
    assert (
        engine.generate("the fox", SamplingParams(max_tokens=3, temperature=0, deadline=600)).finish_reason
        != "deadline"
    )
