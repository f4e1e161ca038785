"""The real `openai` client against a live server."""

import json
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from serving import Live, held, serving, until

from bough import CacheConfig, Engine, SamplingParams
from bough.engine.template import ChatTemplate

HELLO = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the quick brown fox"}]


@pytest.fixture(scope="module")
def live(hybrid_folder):
    with Engine.load(hybrid_folder, dtype="float32", cache=CacheConfig(device_bytes=64 << 20)) as engine:
        with serving(engine) as live:
            yield live
        engine.check()


@pytest.fixture(scope="module")
def client(live):
    with openai.OpenAI(base_url=live.url + "/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client


def chat_tokens(live: Live, messages) -> list[int]:
    return ChatTemplate(live.engine.tokenizer).prompt(messages).tokens


def chat(live: Live, client, **given):
    asked = {"model": live.engine.name, "messages": HELLO, "max_tokens": 12, "temperature": 0}
    return client.chat.completions.create(**asked | given)


def complete(live: Live, client, **given):
    asked = {"model": live.engine.name, "prompt": "the lazy dog", "max_tokens": 12, "temperature": 0}
    return client.completions.create(**asked | given)


def test_models(live, client):
    assert [each.id for each in client.models.list()] == [live.engine.name]
    assert client.models.retrieve(live.engine.name).id == live.engine.name
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_chat_is_what_the_engine_writes(live, client):
    expected = live.engine.generate(chat_tokens(live, HELLO), SamplingParams(max_tokens=12, temperature=0))
    answer = chat(live, client)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.finish_reason == expected.finish_reason
    assert answer.model == live.engine.name
    assert answer.usage.prompt_tokens == len(chat_tokens(live, HELLO))
    assert answer.usage.completion_tokens == len(expected.tokens)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize("seed", [7, -3])
def test_stream_equals_whole_and_seeds_hold(live, client, seed):
    sampled = {"temperature": 1.5, "seed": seed, "top_p": 0.9, "extra_body": {"top_k": 50, "min_p": 0.01}}
    whole = chat(live, client, **sampled)
    chunks = list(chat(live, client, stream=True, **sampled))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == whole.choices[0].finish_reason
    assert all(chunk.usage is None for chunk in chunks) and len({chunk.id for chunk in chunks}) == 1
    params = SamplingParams(max_tokens=12, temperature=1.5, seed=seed % 2**63, top_p=0.9, top_k=50, min_p=0.01)
    assert live.engine.generate(chat_tokens(live, HELLO), params).text == whole.choices[0].message.content


def test_streamed_usage(live, client):
    *chunks, last = chat(live, client, stream=True, stream_options={"include_usage": True})
    assert last.choices == [] and last.usage.completion_tokens == 12
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_the_wire_format(live):
    body = {"prompt": "the", "max_tokens": 2, "stream": True, "temperature": 0}
    answer = httpx.post(live.url + "/v1/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(json.loads(event.removeprefix("data: "))["object"] == "text_completion" for event in events)


def test_completions(live, client):
    params = SamplingParams(max_tokens=12, temperature=0)
    prompts = ["the lazy dog", "the dark forest"]
    expected = [output.text for output in live.engine.generate(prompts, params)]
    assert complete(live, client).choices[0].text == expected[0]
    both = complete(live, client, prompt=prompts, n=2)
    assert [choice.text for choice in both.choices] == [text for text in expected for _ in range(2)]
    tokens = [live.engine.tokenize(prompt) for prompt in prompts]
    assert both.usage.prompt_tokens == sum(map(len, tokens))
    given = complete(live, client, prompt=tokens[1], extra_body={"return_token_ids": True})
    assert given.choices[0].text == expected[1]
    assert given.choices[0].token_ids == live.engine.generate(prompts[1], params).tokens
    streamed = {0: "", 1: ""}
    for chunk in complete(live, client, prompt=prompts, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert list(streamed.values()) == expected
    assert complete(live, client, max_tokens=0).choices[0].text == ""


def test_several_choices_read_the_prompt_once(live, client):
    messages = [{"role": "user", "content": "a very old bear runs away from " * 8}]
    before = live.engine.cache.stats()
    answer = chat(live, client, messages=messages, n=3, temperature=1, seed=5, max_tokens=8)
    after = live.engine.cache.stats()
    tokens = chat_tokens(live, messages)
    for index, choice in enumerate(answer.choices):
        params = SamplingParams(max_tokens=8, temperature=1, seed=5 + index)
        assert (choice.index, choice.message.content) == (index, live.engine.generate(tokens, params).text)
    assert answer.usage.prompt_tokens == len(tokens) and answer.usage.completion_tokens == 24
    computed = {key: after[key] - before.get(key, 0) for key in ("prompt_tokens", "cached_tokens")}
    assert computed["prompt_tokens"] == 3 * len(tokens)
    assert computed["cached_tokens"] >= 2 * (len(tokens) - 1)


def test_the_second_turn_is_cached(live, client):
    messages = [{"role": "user", "content": "away from a very old bear in the dark"}]
    first = chat(live, client, messages=messages, max_tokens=6)
    again = chat(live, client, messages=messages, max_tokens=6)
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
    messages += [{"role": "assistant", "content": first.choices[0].message.content}]
    messages += [{"role": "user", "content": "and the dog"}]
    second = chat(live, client, messages=messages)
    assert second.usage.prompt_tokens_details.cached_tokens > 0
    salted = chat(live, client, messages=messages, extra_body={"cache_salt": "mine"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0
    assert salted.choices[0].message.content == second.choices[0].message.content


def test_stop_strings(live, client):
    text = complete(live, client, max_tokens=40).choices[0].text
    stop = text[6:9]
    for given in (stop, [stop, "never written"]):
        cut = complete(live, client, max_tokens=40, stop=given).choices[0]
        assert (cut.text, cut.finish_reason) == (text[: text.index(stop)], "stop")


def test_penalties_and_vendor_fields(live, client):
    extra = {"repetition_penalty": 1.3, "ignore_eos": True, "min_p": 0, "top_k": -1}
    answer = complete(live, client, presence_penalty=0.5, frequency_penalty=0.5, user="me", extra_body=extra)
    params = SamplingParams(
        max_tokens=12, temperature=0, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.3,
        ignore_eos=True,
    )  # fmt: skip
    assert answer.choices[0].text == live.engine.generate("the lazy dog", params).text


def test_biases(live, client):
    """A token that is not to be written is not, and one that is to be is, whatever else the model would write."""
    text = complete(live, client).choices[0].text
    [first] = live.engine.generate("the lazy dog", SamplingParams(max_tokens=1, temperature=0)).tokens
    assert complete(live, client, logit_bias={str(first): -100}).choices[0].text[:1] != text[:1]
    extra = {"return_token_ids": True, "ignore_eos": True}
    told = complete(live, client, logit_bias={"77": 100, str(first): -3.5}, extra_body=extra).choices[0]
    assert told.token_ids == [77] * 12
    assert complete(live, client, logit_bias={}).choices[0].text == text


def test_chat_logprobs(live, client):
    expected = live.engine.generate(
        chat_tokens(live, HELLO), SamplingParams(max_tokens=5, temperature=0, logprobs=2, ignore_eos=True)
    )
    extra = {"ignore_eos": True}
    answer = chat(live, client, max_tokens=5, logprobs=True, top_logprobs=2, extra_body=extra)
    told = answer.choices[0].logprobs.content
    assert [each.logprob for each in told] == pytest.approx([each.chosen for each in expected.logprobs], abs=1e-5)
    assert [len(each.top_logprobs) for each in told] == [2] * 5
    assert told[0].top_logprobs[0].logprob == told[0].logprob  # greedy
    assert b"".join(bytes(each.bytes) for each in told).decode(errors="replace") == expected.text
    streamed = chat(live, client, max_tokens=5, logprobs=True, top_logprobs=2, stream=True, extra_body=extra)
    pieces = [chunk.choices[0].logprobs for chunk in streamed]
    assert [each.token for piece in pieces if piece for each in piece.content] == [each.token for each in told]


def test_completion_logprobs(live, client):
    told = complete(live, client, logprobs=1, extra_body={"ignore_eos": True}).choices[0].logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset) == 12
    assert told.text_offset[1] == len(told.tokens[0])


@pytest.mark.parametrize(
    ("given", "param", "said"),
    [
        ({"temperature": "hot"}, "temperature", "a number"),
        ({"temperature": -1}, "temperature", "0 or more"),
        ({"max_tokens": 1.5}, "max_tokens", "whole number"),
        ({"messages": []}, "messages", "not empty"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "given"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
            "'text' (the model reads nothing else), not 'image_url'",
        ),
        ({"n": 0}, "n", "from 1 to 128"),
        ({"stop": [""]}, "stop[0]", "not empty"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs"),
        ({"functions": [{"name": "x"}]}, "functions", "give tools instead"),
        ({"logit_bias": {"the": 1}}, "logit_bias", "by token id, not 'the'"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "from -100 to 100, not 101"),
        ({"logit_bias": {"999999": 1}}, None, "token 999999 is not in the vocabulary"),
        ({"tool_choice": "required"}, "tool_choice", "where no tools are given"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "where no tools are given"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, None, "cannot be set"),
    ],
)
def test_mistakes_name_the_field(live, client, given, param, said):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(live, client, **given)
    assert said in caught.value.message and caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_refusals(live, client):
    with pytest.raises(openai.NotFoundError, match="gpt-9") as caught:
        chat(live, client, model="gpt-9")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="shorten") as caught:
        chat(live, client, messages=[{"role": "user", "content": "the fox " * 600}])
    assert caught.value.code == "context_length_exceeded"
    for given in ({"prompt": ""}, {"echo": True}, {"suffix": "x"}, {"best_of": 2}, {"prompt": [300_000]}):
        with pytest.raises(openai.BadRequestError):
            complete(live, client, **given)
    assert complete(live, client, extra_body={"unknown_field": {"x": 1}}).choices


def test_a_reply_ends_at_the_context(live, client):
    answer = complete(live, client, prompt="the " * 80, max_tokens=10_000, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == live.engine.context


SCHEMA = {"type": "object", "properties": {"name": {"enum": ["fox", "dog"]}, "old": {"type": "boolean"}}}
SCHEMA |= {"required": ["name", "old"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize("stream", [False, True])
def test_json_by_a_schema(live, client, stream):
    pytest.importorskip("llguidance")
    answer = chat(live, client, response_format=FORMAT, max_tokens=100, temperature=1, seed=3, stream=stream)
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
    else:
        text = answer.choices[0].message.content
    animal = json.loads(text)
    assert animal["name"] in ("fox", "dog") and isinstance(animal["old"], bool)


def test_json_objects_and_formats_that_cannot_be(live, client):
    pytest.importorskip("llguidance")
    answer = chat(live, client, response_format={"type": "json_object"}, max_tokens=10)
    assert answer.choices[0].message.content.lstrip().startswith("{")
    for wrong in ({"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}):
        with pytest.raises(openai.BadRequestError):
            chat(live, client, response_format=wrong)
    told = [{"type": "function", "function": {"name": "weather"}}]  # to a model that knows no way of calling it
    answer = chat(live, client, response_format={"type": "json_object"}, tools=told, max_tokens=10)
    assert answer.choices[0].message.content.lstrip().startswith("{")
    deep = b'{"a":' * 900 + b"{}" + b"}" * 900
    body = b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "response_format":'
    body += b'{"type": "json_schema", "json_schema": {"schema": {"default":' + deep + b"}}}}"
    assert live.client.post("/v1/chat/completions", content=body).status_code in (200, 400)


def test_parallel_requests_are_each_as_if_alone(live, client):
    prompts = [f"the {word} {number}" for word in ("fox", "dog", "bear") for number in range(8)]
    params = SamplingParams(max_tokens=10, temperature=0)
    with ThreadPoolExecutor(8) as threads:
        answers = list(
            threads.map(lambda prompt: complete(live, client, prompt=prompt, max_tokens=10).choices[0].text, prompts)
        )
    assert answers == [live.engine.generate(prompt, params).text for prompt in prompts]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_client_that_leaves_stops_its_request(live, client, streaming):
    before = live.ended("cancelled")
    with held(live.engine, after=2):
        if streaming:
            stream = chat(live, client, stream=True, n=2, max_tokens=400, extra_body={"ignore_eos": True})
            next(iter(stream))
            assert live.service.running
            stream.close()
        else:
            ask_and_leave(live, {"messages": HELLO, "n": 2, "max_tokens": 400, "ignore_eos": True})
        assert until(live.all_cancelled)
    assert until(live.is_idle) and live.ended("cancelled") == before + 2
    live.engine.check()


def ask_and_leave(live: Live, body: dict) -> None:
    """Send a question, and hang up when it is being answered."""
    sent, address = json.dumps(body).encode(), httpx.URL(live.url)
    with socket.create_connection((address.host, address.port)) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(sent)}\r\n\r\n"
        connection.sendall(head.encode() + sent)
        assert until(lambda: live.service.running)


def test_a_slow_reader_holds_nobody_back(live, client):
    stream = complete(live, client, stream=True, max_tokens=300, extra_body={"ignore_eos": True})
    next(iter(stream))
    answers = [complete(live, client, max_tokens=3) for _ in range(3)]
    assert all(answer.usage.completion_tokens <= 3 for answer in answers)
    rest = "".join(chunk.choices[0].text for chunk in stream)
    assert rest and until(live.is_idle)


def test_no_stream_takes_a_thread(live, client):
    """More streams than the event loop has threads for short work all begin, and no other threads come."""
    most, before = min(32, (os.cpu_count() or 1) + 4), others()
    with held(live.engine):
        streams = [complete(live, client, stream=True, max_tokens=60, prompt=f"bear {i}") for i in range(most + 1)]
        assert others() == before
        for stream in streams:
            stream.close()
        assert until(live.all_cancelled)
    assert until(live.is_idle)


def others() -> set[str]:
    """Threads but those that the event loop has for short work."""
    return {each.name for each in threading.enumerate() if not each.name.startswith("asyncio")}
