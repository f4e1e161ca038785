"""The server around the APIs: who may ask, limits, operations, and its document, which a fuzzer is let loose on."""

import asyncio
import io
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from prometheus_client.parser import text_string_to_metric_families
from schemathesis import GenerationMode
from serving import held, serving, until
from test_cli import bough

from bough import CacheConfig, Engine, SamplingParams
from bough.errors import OptionError
from bough.server.app import APIS
from bough.server.logs import log_to
from bough.server.settings import Settings


@pytest.fixture(scope="module")
def engine(hybrid_folder):
    cache = CacheConfig(device_bytes=64 << 20)
    with Engine.load(hybrid_folder, dtype="float32", cache=cache, context=96, max_running=4) as engine:
        yield engine
        engine.check()


@pytest.fixture(scope="module")
def live(engine):
    settings = Settings(body_bytes=20_000, prompt_tokens=64, queue=2)
    with serving(engine, settings) as live:
        yield live


def asking(**given):
    return {"prompt": "the fox", "max_tokens": 3, "temperature": 0} | given


def test_health_and_unknown_paths(live):
    answer = live.client.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (200, "ready")
    lost = live.client.get("/v1/nothing")
    assert lost.status_code == 404 and "/openapi.json" in lost.json()["error"]["message"]
    assert live.client.get("/v1/completions").status_code == 405
    live.service.closing = True
    try:
        assert live.client.get("/health").status_code == 503
        assert live.client.post("/v1/completions", json=asking()).status_code == 503
    finally:
        live.service.closing = False


def test_request_ids(live):
    assert live.client.get("/health", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    for odd in ("a b", "x" * 200):
        made = live.client.get("/health", headers={"X-Request-Id": odd}).headers["x-request-id"]
        assert re.fullmatch("req-[0-9a-f]{24}", made)


def test_the_log_has_one_line_a_request(live, caplog):
    def noted(name: str) -> list[dict]:
        return [record.facts for record in list(caplog.records) if getattr(record, "facts", {}).get("id") == name]

    with caplog.at_level(logging.INFO, "bough.server"):
        live.client.post("/v1/completions", json=asking(), headers={"X-Request-Id": "one"})
        until(lambda: noted("one"))  # it is written when the answer has been sent
    [facts] = noted("one")
    assert facts["status"] == 200 and facts["completion_tokens"] == 3 and facts["path"] == "/v1/completions"
    assert "fox" not in str(facts)


def test_metrics(live):
    live.client.post("/v1/completions", json=asking())
    live.client.post("/v1/completions", json=asking())
    families = list(text_string_to_metric_families(live.client.get("/metrics").text))
    samples = {(each.name, *sorted(each.labels.values())): each.value for one in families for each in one.samples}
    assert samples["bough_requests_total", "length"] >= 2
    assert samples["bough_cached_tokens_total",] > 0 and samples["bough_completion_tokens_total",] >= 6
    assert samples["bough_cache_used_bytes", "device"] > 0
    assert samples["bough_lost_tokens_total", "no_resume_point"] >= 0
    assert samples["bough_time_to_first_token_seconds_count",] >= 2
    assert samples["bough_inter_token_latency_seconds_count",] >= 4
    assert samples["bough_requests_waiting",] == samples["bough_requests_running",] == 0
    for name in ("prompt", "matched", "drafted", "accepted"):
        assert (f"bough_{name}_tokens_total",) in samples


def test_the_cache_can_be_looked_into(live):
    live.client.post("/v1/completions", json=asking())
    rows = live.client.get("/cache", params={"most": 2}).json()
    assert 0 < len(rows) <= 2 and {"start", "end", "tiers", "salt"} <= rows[0].keys()
    assert live.client.get("/cache", params={"most": 0}).status_code == 400
    assert live.client.get("/cache/stats").json()["bytes"]["device"]["used"] > 0
    told = live.client.post("/cache/explain", json={"prompt": "the fox"}).json()
    assert told["resumable"] == told["tokens"] - 1
    for command in (["tree"], ["stats"], ["explain", "the fox"]):
        done = bough("cache", *command, "--url", live.url)
        assert done.exit_code == 0 and done.stdout, done.stderr


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "not valid JSON"),
        (b"\xff\xfe", 400, "not valid JSON"),
        (b'{"prompt": NaN}', 400, "NaN"),
        (b'{"prompt": "x", "user": 1e999}', 400, "1e999"),
        (b"[" * 9000, 400, "JSON"),
        (b"[]", 400, "must be an object"),
        (b'{"prompt": "\\ud800"}', 400, "surrogate"),
        (b'{"prompt": "x", "model": "\\ud800"}', 404, "not served"),
        (b'{"prompt": "' + b"x" * 30_000 + b'"}', 413, "larger than the 20000 bytes"),
        (b'{"prompt": "' + b"the bear " * 25 + b'"}', 400, "takes 64"),
        (b'{"prompt": "x", "n": 100}', 400, "works on 6"),
        (b'{"prompt": "x", "seed": 1' + b"0" * 5000 + b"}", 400, "JSON"),
    ],
)
def test_limits_say_why(live, body, status, said):
    answer = live.client.post("/v1/completions", content=body)
    assert answer.status_code == status and said in answer.json()["error"]["message"]


def test_too_many_are_refused_before_any_is_read(live, monkeypatch):
    read = []
    monkeypatch.setattr(live.service, "checked", read.append)
    answer = live.client.post("/v1/completions", json=asking(prompt=["the fox", "the bear"], n=4, seed=1))
    assert answer.status_code == 400 and "8 answers" in answer.json()["error"]["message"] and read == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_continuations_with_many_biases_keep_nobody_waiting(live, monkeypatch, path):
    def choices(params, n):
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        return [params] * n

    monkeypatch.setattr("bough.server.openai_requests.choices", choices)
    asked = asking(n=2, logit_bias={"5": 1}, messages=[{"role": "user", "content": "x"}])
    answer = live.client.post(path, json=asked)
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 2


def test_a_body_without_a_length_is_limited_too(live):
    answer = live.client.post("/v1/completions", content=(b" " * 5000 for _ in range(10)))
    assert answer.status_code == 413


@pytest.mark.parametrize("length", [False, True])
def test_who_still_sends_too_large_a_body_gets_the_answer(live, length):
    piece, pieces = b" " * 5000, 12
    told = f"Content-Length: {pieces * len(piece)}" if length else "Transfer-Encoding: chunked"
    with socket.create_connection(("127.0.0.1", live.client.base_url.port), timeout=10) as client:
        client.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{told}\r\n\r\n".encode())
        for at in range(pieces):
            client.sendall(piece if length else b"%x\r\n%s\r\n" % (len(piece), piece))
            time.sleep(0.2 if at > pieces - 3 else 0)
        client.sendall(b"" if length else b"0\r\n\r\n")
        time.sleep(0.1)
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 413") and b"body_too_large" in answer


def test_who_never_stops_sending_is_left(live, monkeypatch):
    monkeypatch.setattr("bough.server.app.DISCARDING", 0.1)
    with socket.create_connection(("127.0.0.1", live.client.base_url.port), timeout=10) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n" + b" " * 30_000
        )
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 413")


def test_a_full_queue_is_told(live):
    long = asking(n=6, max_tokens=90, stream=True, ignore_eos=True, temperature=1)
    with held(live.engine), live.client.stream("POST", "/v1/completions", json=long):
        refused = httpx.post(live.url + "/v1/completions", json=asking())
        assert refused.status_code == 429 and refused.headers["retry-after"]
        assert "try again" in refused.json()["error"]["message"]
    assert until(live.is_idle)
    assert live.client.post("/v1/completions", json=asking()).status_code == 200


def test_what_waits_and_what_runs_is_counted(live):
    def busy() -> list[float]:
        names = ["bough_requests_waiting", "bough_requests_running"]
        only = live.service.metrics.registry.restricted_registry(names)  # the cache's would ask the engine's thread
        found = {sample.name: sample.value for family in only.collect() for sample in family.samples}
        return [found[name] for name in names]

    long = asking(n=6, max_tokens=90, stream=True, ignore_eos=True)
    with held(live.engine, after=2), live.client.stream("POST", "/v1/completions", json=long):
        assert until(lambda: sum(each := busy()) == 6 and 1 <= each[1] <= live.engine.max_running)
    assert until(live.is_idle) and until(lambda: busy() == [0, 0])


def test_nothing_but_news_is_logged():
    loggers = [logging.getLogger(name) for name in ("bough", "uvicorn", "asyncio")]
    before = [(each.handlers, each.propagate, each.level, each.filters[:]) for each in loggers]
    try:
        log_to(told := io.StringIO(), as_json=True)
        for text in ("socket.send() raised exception.", "socket.send() raised another exception."):
            loggers[-1].warning(text)
    finally:
        for each, kept in zip(loggers, before, strict=True):
            each.handlers, each.propagate, each.level, each.filters = kept
    assert [json.loads(line)["event"] for line in told.getvalue().splitlines()] == [text]


ENDPOINTS = [each for api in APIS for each in api.endpoints]
AS_DESCRIBED, OTHERWISE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
SENT = [(each, mode) for each in ENDPOINTS for mode in (AS_DESCRIBED, OTHERWISE) if each.body or mode is AS_DESCRIBED]


@pytest.fixture(scope="module")
def described(live):
    return schemathesis.openapi.from_url(live.url + "/openapi.json")


@pytest.mark.parametrize("examples", [8, pytest.param(120, marks=pytest.mark.long)])
@pytest.mark.parametrize(("endpoint", "mode"), SENT, ids=lambda each: getattr(each, "path", each).replace("/", " "))
def test_nothing_that_is_sent_breaks_the_server(live, described, endpoint, mode, examples):
    operation = described[endpoint.path.replace(":path}", "}")][endpoint.method]

    @given(case=operation.as_strategy(generation_mode=mode))
    @hypothesis_settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    def send(case):
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = live.engine.name  # or all that comes after that check would never be reached
        answer = case.call(base_url=live.url)
        assert answer.status_code < 500, (answer.status_code, answer.text, case.body)
        assert answer.status_code < 400 or endpoint.method == "HEAD" or "error" in answer.json()

    send()
    assert live.client.get("/health").status_code == 200


def test_web_pages_may_not_ask_unless_they_are_let(live, engine):
    for headers, status in (
        ({"Origin": "http://evil.example"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Origin": live.url}, 200),
        ({"Origin": "null"}, 403),
    ):
        assert live.client.get("/v1/models", headers=headers).status_code == status, headers
    assert "access-control-allow-origin" not in live.client.get("/health").headers
    with serving(engine, Settings(origins=("http://page.example",))) as other:
        headers = {"Origin": "http://page.example"}
        answer = httpx.get(other.url + "/v1/models", headers=headers)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "http://page.example"
        asked = headers | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        assert httpx.options(other.url + "/v1/completions", headers=asked).status_code == 200
        assert httpx.get(other.url + "/v1/models", headers={"Origin": "http://no.example"}).status_code == 403


def test_keys(engine):
    with serving(engine, Settings(api_keys=("öne", "two"), names=("m", "alias"))) as live:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": ""}, {"Authorization": "Basic two"}):
            refused = httpx.get(live.url + "/v1/models", headers=headers)
            assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(live.url + "/health").status_code == 200
        for headers in ({"Authorization": "bearer two"}, {"x-api-key": "two"}, {"x-api-key": "öne".encode()}):
            listed = httpx.get(live.url + "/v1/models", headers=headers).json()["data"]
            assert [each["id"] for each in listed] == ["m", "alias"]


def test_the_cache_can_be_looked_into_with_a_key(engine, monkeypatch):
    with serving(engine, Settings(api_keys=("öne",))) as live:
        for key, status, said in (
            ([], 1, "asks for an API key; give one of its own with --api-key, or as BOUGH_API_KEY"),
            (["--api-key", "other"], 1, "does not know this API key"),
            (["--api-key", "a\nb"], 1, "no request can carry"),
            (["--api-key", "öne"], 0, ""),
        ):
            for command in (["tree"], ["stats"], ["explain", "the fox"]):
                done = bough("cache", *command, "--url", live.url, *key)
                assert done.exit_code == status and said in " ".join(done.stderr.split()), done.stderr
        monkeypatch.setenv("BOUGH_API_KEY", "öne")
        assert bough("cache", "stats", "--url", live.url).exit_code == 0


def test_each_key_has_a_cache_of_its_own(engine):
    with serving(engine, Settings(api_keys=("one", "two"))) as live:
        one, two = ({"x-api-key": key} for key in ("one", "two"))

        def cached(headers) -> int:
            body = asking(prompt="the old bear runs away from the fox")
            answer = httpx.post(live.url + "/v1/completions", json=body, headers=headers).json()
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert [cached(one), cached(two)] == [0, 0]
        assert cached(one) > 0 and cached(one | {"X-Cache-Salt": "apart"}) == 0
        body = {"prompt": "the old bear runs away from the dog"}
        told = httpx.post(live.url + "/cache/explain", json=body, headers=two | {"X-Cache-Salt": "new"}).json()
        assert told["matched"] == 0 and "salt" not in json.dumps(told["losses"])
        seen = [httpx.get(live.url + "/cache", headers=headers).json() for headers in (one, two)]
        salts = [{row["salt"] for row in rows} for rows in seen]
        assert [len(each) for each in salts] == [1, 1] and salts[0] != salts[1]


def test_a_server_that_stops_tells_its_streams(engine):
    body = asking(stream=True, max_tokens=90, ignore_eos=True, return_token_ids=True)
    with serving(engine) as live, ExitStack() as hold:
        hold.enter_context(held(engine, after=2))
        with live.client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            live.service.closing = True
            live.service.cancel_all()
            hold.close()
            last = [line for line in lines if line][-1]
    assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]


def test_settings_are_checked():
    for wrong in ({"queue": -1}, {"api_keys": ("",)}, {"names": ("a", "a")}, {"grace": -1}, {"body_bytes": 0}):
        with pytest.raises(OptionError):
            Settings(**wrong)


@pytest.fixture
def process(hybrid_folder, tmp_path):
    """`bough serve` in a process of its own, with a disk cache; where it listens."""

    def start(*arguments) -> tuple[subprocess.Popen, str]:
        command = [sys.executable, "-m", "bough", "serve", hybrid_folder, "--port", "0", "--dtype", "float32"]
        begun = subprocess.Popen(
            [*command, "--cache-bytes", "64M", "--disk-cache", tmp_path, *arguments],
            stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"},
        )  # fmt: skip
        processes.append(begun)
        for line in begun.stderr:
            told.append(line)
            if line.startswith("serving"):
                return begun, re.search(r"http://\S+?(?=/v1)", line)[0]
        raise AssertionError("".join(told))

    processes, told = [], []
    start.told = told
    yield start
    for each in processes:
        each.kill()
        each.communicate()


def test_sigterm_under_load_ends_in_time_and_a_restart_goes_on(process, hybrid_folder, tmp_path):
    begun, url = process("--grace", "0.2", "--log-json")
    assert "tiers   device" in "".join(process.told) and "disk" in "".join(process.told)
    prompt = {"prompt": "the old bear runs away from the fox in the dark", "max_tokens": 4, "temperature": 0}
    first = httpx.post(url + "/v1/completions", json=prompt, timeout=60).json()
    ended = []

    def read() -> None:
        body = asking(stream=True, max_tokens=480, ignore_eos=True)
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as stream:
            begin.set()
            ended.append([line for line in stream.iter_lines() if line][-1])

    begin = threading.Event()
    reader = threading.Thread(target=read)
    reader.start()
    assert begin.wait(30)
    begun.send_signal(signal.SIGTERM)
    _, errors = begun.communicate(timeout=60)
    reader.join(30)
    assert begun.returncode == 0 and "Traceback" not in errors
    assert ended and ("[DONE]" in ended[0] or "shutting down" in ended[0])
    assert all(json.loads(line)["event"] for line in errors.splitlines())

    with Engine.load(hybrid_folder, dtype="float32", cache=CacheConfig(disk_path=tmp_path)) as engine:
        again = engine.generate(prompt["prompt"], SamplingParams(max_tokens=4, temperature=0))
    assert again.text == first["choices"][0]["text"]
    assert again.usage.cached_tokens == again.usage.prompt_tokens - 1


def test_mistakes_are_told_before_a_model_is_loaded(hybrid_folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for arguments, said in (
            (["--port", port], "in use"),
            (["--host", "no such host"], "cannot be served on"),
            (["--queue", "-1"], "queue"),
            (["--max-body", "much"], "500M"),
        ):
            done = bough("serve", hybrid_folder, *arguments)
            assert done.exit_code == 1 and done.stderr.startswith("error: ") and said in done.stderr
    done = bough("serve", "/nowhere", "--port", 0)
    assert done.exit_code == 1 and "is not there" in done.stderr
    assert "Examples" in bough("serve", "--help").stdout
