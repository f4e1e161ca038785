"""Many clients at once on a live server: they talk on, leave, hang up and send nonsense. Every answer must be the one
that an engine without cache and drafts gives, and afterwards nothing may be left of them.

The server runs in the event loop of the test, so that its tasks and its sockets can be counted.
"""

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import uvicorn
from conftest import WORDS
from parity import TIE
from timeline import audit, empty

from bough import CacheConfig, Engine, SamplingParams
from bough.engine.template import ChatTemplate
from bough.server.app import create_app
from bough.server.generation import Service
from bough.server.run import KEEP_ALIVE, LAST_WORDS, Server
from bough.server.settings import Settings

CONTEXT, BODY, TURNS, TALKS = 320, 20_000, 3, 12
PATIENCE = 60.0  # seconds for what should take a moment, on a machine that does other things too
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
WROTE_TO_NOBODY = "socket.send() raised exception."  # asyncio, when several pieces are ready for a client that has left
REFUSED = [
    (COMPLETE, b'{"prompt": "' + b"x" * BODY + b'"}', 413),
    (CHAT, json.dumps({"messages": [{"role": "user", "content": "old bear " * 400}]}).encode(), 400),
    (COMPLETE, json.dumps({"prompt": [5] * (CONTEXT + 1)}).encode(), 400),
    (COMPLETE, b'{"prompt": ', 400),
    (COMPLETE, b'{"prompt": [1, 99999]}', 400),
    (COMPLETE, b'{"prompt": "x", "temperature": -1, "stream": true}', 400),
    (CHAT, b'{"messages": []}', 400),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "model": "another"}', 404),
    ("/v1/nothing", b"{}", 404),
]


@dataclass(frozen=True)
class Answer:
    """What a client was told: its prompt and limit, the tokens as they are spelt, the text, and why it ended."""

    prompt: tuple[int, ...]
    most: int
    spelt: tuple[bytes, ...]
    text: str
    reason: str


class Oracle:
    """The engine that keeps nothing and guesses nothing."""

    def __init__(self, folder: Path) -> None:
        cache = CacheConfig(enabled=False, device_bytes=64 << 20)
        self.engine = Engine.load(folder, dtype="float32", cache=cache, context=CONTEXT, max_running=16, draft=None)
        assert self.engine.tokenizer is not None
        self.tokenizer, self.template = self.engine.tokenizer, ChatTemplate(self.engine.tokenizer)

    def spell(self, tokens: Iterable[int]) -> tuple[bytes, ...]:
        """Tokens without the one that ends a reply, which is no part of its text."""
        return tuple(self.tokenizer.token_bytes(each) for each in tokens if each not in self.engine.end_tokens)

    def check(self, answers: Iterable[Answer]) -> None:
        """Assert that these are right, each up to the first tie of two tokens."""
        asked = {(each.prompt, each.most): each for each in answers}
        handles = {key: self.engine.submit(list(key[0]), greedy(key[1])) for key in asked}
        for answer in answers:
            right = handles[answer.prompt, answer.most].result()
            expected = self.spell(right.tokens)
            if answer.spelt == expected:
                assert (answer.text, answer.reason) == (right.text, right.finish_reason)
            else:
                self._require_tie(answer, expected)

    def _require_tie(self, answer: Answer, expected: tuple[bytes, ...]) -> None:
        pairs = enumerate(zip_longest(answer.spelt, expected))  # None: it has ended
        at, ours = next((i, ours) for i, (ours, theirs) in pairs if ours != theirs)
        assert ours is not None or answer.reason == "stop", f"it ends after {at} tokens: {answer.reason}"
        told = self.engine.generate(list(answer.prompt), greedy(answer.most, logprobs=20)).logprobs[at].top
        best, ends = max(logprob for _, logprob in told), self.engine.end_tokens
        likely = [token for token, logprob in told if best - logprob < TIE]
        close = [None if token in ends else self.tokenizer.token_bytes(token) for token in likely]
        assert ours in close, f"token {at} after {len(answer.prompt)} is {ours!r}, not {close}"


def greedy(most: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=most, temperature=0, **options)


@dataclass
class Load:
    """What all clients share: the server's address, and what has happened."""

    url: str
    oracle: Oracle
    until: float  # of the monotonic clock
    answers: list[Answer] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    @property
    def goes_on(self) -> bool:
        """Until its time is over, and everything has happened."""
        return time.monotonic() < self.until or bool(KINDS - self.seen.keys())


KINDS = {"chat", "tokens", "left", "gave up", "hung up", "cached", *(str(status) for _, _, status in REFUSED)}


class Client:
    """Somebody who has conversations, and does not always behave. Different ones have the same conversations."""

    def __init__(self, load: Load, seed: int, http: httpx.AsyncClient) -> None:
        self.load, self.http, self.dice = load, http, Random(seed)
        self.begin()

    def begin(self) -> None:
        self.talk = Random(self.dice.randrange(TALKS))
        self.as_tokens = self.talk.random() < 0.4
        self.messages = [{"role": "system", "content": self.talk.choice(["old bear", WORDS[:70]])}]
        self.tokens = self.load.oracle.tokenizer.encode(self.messages[0]["content"])

    async def run(self) -> None:
        acts = [self.answered, self.leave, self.give_up, self.hang_up, self.be_refused]
        while self.load.goes_on:
            await self.dice.choices(acts, [10, 3, 1, 1, 2])[0]()

    async def answered(self) -> Answer:
        """One turn, to its end."""
        if len(self.messages) > 2 * TURNS:
            self.begin()
        path, body, prompt = self.turn()
        stream = self.dice.random() < 0.7
        told = await self.read(path, body | {"stream": True}) if stream else await self.whole(path, body)
        spelt, text, reason, usage = told
        answer = Answer(prompt, body["max_tokens"], spelt, text, reason)
        self.load.answers.append(answer)
        self.load.seen["chat" if path == CHAT else "tokens"] += 1
        self.load.seen["cached"] += usage["prompt_tokens_details"]["cached_tokens"] > 0
        assert usage["prompt_tokens"] == len(prompt)
        self.messages.append({"role": "assistant", "content": text})
        return answer

    def turn(self) -> tuple[str, dict[str, Any], tuple[int, ...]]:
        """The next question: where it goes, its body, and the prompt that it comes to."""
        said = " ".join(self.talk.choices(WORDS.split(), k=self.talk.choice([2, 6])))
        most = self.talk.choice([1, 6, 16])
        options = {"max_tokens": most, "temperature": 0, "stream_options": {"include_usage": True}}
        oracle = self.load.oracle
        if self.messages[-1]["role"] != "user":
            self.messages.append({"role": "user", "content": said})
            self.tokens = self.tokens + oracle.tokenizer.encode(f" {said}")
        if self.as_tokens:
            options |= {"prompt": self.tokens, "return_token_ids": True}
            return COMPLETE, options, tuple(self.tokens)
        prompt = tuple(oracle.template.prompt(self.messages).tokens)
        return CHAT, options | {"messages": self.messages, "logprobs": True}, prompt

    async def whole(self, path: str, body: dict[str, Any]) -> tuple[tuple[bytes, ...], str, str, dict[str, Any]]:
        while (answer := await self.http.post(path, json=body)).status_code == 429:
            await self.wait()
        assert answer.status_code == 200, answer.text
        told = answer.json()
        [choice] = told["choices"]
        text = choice["text"] if self.as_tokens else choice["message"]["content"]
        return self.spelt(choice), text, choice["finish_reason"], told["usage"]

    async def read(
        self, path: str, body: dict[str, Any], enough: int | None = None
    ) -> tuple[tuple[bytes, ...], str, str, dict[str, Any]]:
        """A stream to its end, or until that many events have come: then the client leaves."""
        spelt, text, reason, usage, count = (), "", "left", {}, 0
        async with self.streaming(path, body) as lines:
            async for line in lines:
                if not line.startswith("data: "):
                    continue
                count += 1
                if enough is not None and count > enough:
                    break
                if line == "data: [DONE]":
                    assert usage and reason != "left"
                    continue
                told = json.loads(line.removeprefix("data: "))
                assert "error" not in told, told
                usage = told.get("usage") or usage
                for choice in told["choices"]:
                    spelt += self.spelt(choice)
                    text += choice["text"] if self.as_tokens else choice["delta"].get("content", "")
                    reason = choice["finish_reason"] or reason
        return spelt, text, reason, usage

    @asynccontextmanager
    async def streaming(self, path: str, body: dict[str, Any]) -> AsyncIterator[AsyncIterator[str]]:
        while True:
            async with self.http.stream("POST", path, json=body) as answer:
                if answer.status_code != 429:
                    assert answer.status_code == 200, await answer.aread()
                    yield answer.aiter_lines()
                    return
            await self.wait()

    def spelt(self, choice: dict[str, Any]) -> tuple[bytes, ...]:
        if self.as_tokens:
            self.tokens = self.tokens + choice["token_ids"]
            return self.load.oracle.spell(choice["token_ids"])
        return tuple(bytes(each["bytes"]) for each in (choice["logprobs"] or {"content": []})["content"])

    async def wait(self) -> None:
        self.load.seen["429"] += 1
        await asyncio.sleep(0.05)

    async def leave(self) -> None:
        """In the middle of a stream; the question is asked again later, with the answer so far forgotten."""
        path, body, _ = self.turn()
        kept = self.tokens
        await self.read(path, body | {"stream": True, "max_tokens": 100}, self.dice.choice([0, 1, 3, 9]))
        self.tokens = kept
        self.load.seen["left"] += 1

    async def give_up(self) -> None:
        """Before the answer is there."""
        path, body, _ = self.turn()
        try:
            async with asyncio.timeout(self.dice.choice([0.001, 0.01, 0.05])):
                await self.http.post(path, json=body | {"max_tokens": 200, "ignore_eos": True})
        except TimeoutError:
            self.load.seen["gave up"] += 1

    async def hang_up(self) -> None:
        """Before the question is asked."""
        _, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(self.load.url).port)
        writer.write(f"POST {COMPLETE} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90\r\n\r\n".encode() + b'{"pro')
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        self.load.seen["hung up"] += 1

    async def be_refused(self) -> None:
        path, body, status = self.dice.choice(REFUSED)
        answer = await self.http.post(path, content=body)
        assert answer.status_code == status and answer.json()["error"]["message"], (body[:99], answer.text)
        self.load.seen[str(status)] += 1


@dataclass(frozen=True)
class Here:
    """A server in this event loop."""

    url: str
    service: Service
    server: uvicorn.Server

    @property
    def is_idle(self) -> bool:
        """Nobody is connected, and nothing is on its way to the engine or in it."""
        kept = self.server.server_state
        return not (kept.connections or kept.tasks or self.service.running or self.service._starting)


@asynccontextmanager
async def served(engine: Engine, settings: Settings) -> AsyncIterator[Here]:
    app, ready = create_app(engine, settings), asyncio.Event()
    config = uvicorn.Config(
        app, log_config=None, lifespan="off", timeout_keep_alive=KEEP_ALIVE, timeout_graceful_shutdown=5
    )
    server = Server(config, ready.set)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # so that what is not read is noticed soon
        task = asyncio.create_task(server.serve(sockets=[listening]))
        await ready.wait()
        try:
            yield Here(f"http://127.0.0.1:{listening.getsockname()[1]}", app.state.service, server)
        finally:
            server.should_exit = True
            await task


@asynccontextmanager
async def clients(load: Load, count: int) -> AsyncIterator[list[Client]]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=count)
    async with httpx.AsyncClient(base_url=load.url, timeout=PATIENCE, limits=limits) as http:
        yield [Client(load, seed, http) for seed in range(count)]


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not true():
            await asyncio.sleep(0.02)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd"))


@pytest.fixture(scope="module")
def oracle(hybrid_folder):
    made = Oracle(hybrid_folder)
    yield made
    made.engine.close()


@pytest.fixture
def engine(hybrid_folder, tmp_path):
    """With less memory than its clients would fill, and all the tiers."""
    cache = CacheConfig(
        page_tokens=8, device_bytes=2 << 20, host_bytes=1 << 20, disk_path=tmp_path, disk_bytes=8 << 20,
        disk_write_rate=1 << 40,
    )  # fmt: skip
    with Engine.load(hybrid_folder, dtype="float32", cache=cache, context=CONTEXT, max_running=6) as engine:
        yield engine


@pytest.mark.parametrize(("count", "seconds"), [(16, 8), pytest.param(64, 120, marks=pytest.mark.long)])
def test_many_clients_get_right_answers_and_leave_nothing(engine, oracle, caplog, count, seconds):
    async def run() -> Load:
        async with served(engine, Settings(body_bytes=BODY, queue=count // 2)) as here:
            load = Load(here.url, oracle, time.monotonic())
            async with clients(load, 1) as [client]:
                await client.answered()  # whatever is opened once is open now
            tasks, files = asyncio.all_tasks(), open_files()
            load.until = time.monotonic() + seconds
            async with clients(load, count) as all_of_them, asyncio.TaskGroup() as group:
                for each in all_of_them:
                    group.create_task(each.run())
            await until(lambda: here.is_idle and asyncio.all_tasks() == tasks and open_files() <= files)
        return load

    with caplog.at_level(logging.WARNING):
        load = asyncio.run(run())
    assert [each.getMessage() for each in caplog.records if each.getMessage() != WROTE_TO_NOBODY] == []
    audit(engine)
    empty(engine)
    oracle.check(load.answers)


def test_a_slow_reader_holds_nobody_back(engine, oracle):
    async def run() -> Load:
        async with served(engine, Settings()) as here:
            load = Load(here.url, oracle, time.monotonic())
            small = httpx.AsyncHTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)])
            async with (
                httpx.AsyncClient(base_url=here.url, timeout=PATIENCE, transport=small) as slowly,
                clients(load, 8) as others,
            ):
                body = {"prompt": "the old bear", "max_tokens": 250, "temperature": 0, "logprobs": 20, "stream": True}
                body |= {"ignore_eos": True}
                async with slowly.stream("POST", COMPLETE, json=body) as answer, asyncio.TaskGroup() as group:
                    lines = answer.aiter_lines()
                    turns = [group.create_task(several(each, 4)) for each in others]
                    read = 0
                    while not all(each.done() for each in turns):
                        await asyncio.wait(turns, timeout=1)
                        read += (await anext(lines)).startswith("data: ")
                    await until(lambda: not here.service.running)  # the engine has long been done with it
                    assert len(here.server.server_state.tasks) == 1, "it was not slow"
                    rest = [line async for line in lines if line.startswith("data: ")]
                assert read < len(rest) and rest[-1] == "data: [DONE]"
                last = json.loads(rest[-2].removeprefix("data: "))["choices"][0]
                assert last["finish_reason"] == "length" and read + len(rest) > 200
        return load

    async def several(client: Client, count: int) -> None:
        for _ in range(count):
            await client.answered()

    oracle.check(asyncio.run(run()).answers)
    audit(engine)


@contextmanager
def process(folder: Path, *arguments: object):
    """`bough serve` in a process of its own, and where it listens."""
    command = [sys.executable, "-m", "bough", "serve", folder, "--port", "0", "--dtype", "float32", "--log-json"]
    command += ["--cache-bytes", "8M", "--context", CONTEXT, *arguments]
    begun = subprocess.Popen(
        [*map(str, command)], stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"}
    )
    try:
        assert begun.stderr is not None
        told = []
        for line in begun.stderr:
            told.append(line)
            if line.startswith("serving"):
                yield begun, re.search(r"http://\S+?(?=/v1)", line)[0]
                return
        raise AssertionError("".join(told))
    finally:
        begun.kill()
        begun.communicate()


def test_a_server_stops_under_load_and_another_goes_on(hybrid_folder, oracle, tmp_path):
    grace, answers = 0.5, []

    async def talk(url: str, before: list[Client], begun: subprocess.Popen | None) -> list[Client]:
        load = Load(url, oracle, time.monotonic())
        async with clients(load, 8) as talking:
            for client, old in zip(talking, before, strict=False):
                client.talk, client.as_tokens = old.talk, old.as_tokens
                client.messages, client.tokens = old.messages, old.tokens
            await asyncio.gather(*(client.answered() for client in talking))
            assert not before or load.seen["cached"] == len(talking)
            if begun is not None:
                await stop(talking, begun)
        answers.extend(load.answers)
        return talking

    async def stop(talking: list[Client], begun: subprocess.Popen) -> None:
        """While each of them is being told a long answer."""
        started = [asyncio.Event() for _ in talking]
        reads = [asyncio.create_task(told(*each)) for each in zip(talking, started, strict=True)]
        await asyncio.gather(*(each.wait() for each in started))
        begun.send_signal(signal.SIGTERM)
        ended = await asyncio.gather(*reads)
        assert all("[DONE]" in last or "shutting down" in last for last in ended), ended

    async def told(client: Client, started: asyncio.Event) -> str:
        body = {"prompt": client.tokens, "max_tokens": CONTEXT, "ignore_eos": True, "stream": True, "temperature": 0}
        last = ""
        async with client.streaming(COMPLETE, body) as lines:
            async for line in lines:
                started.set()
                last = line or last
        return last

    with process(hybrid_folder, "--disk-cache", tmp_path, "--grace", grace) as (begun, url):
        before = asyncio.run(talk(url, [], begun))
        _, errors = begun.communicate(timeout=grace + LAST_WORDS + PATIENCE)
        assert begun.returncode == 0 and "Traceback" not in errors
    with process(hybrid_folder, "--disk-cache", tmp_path) as (_, url):
        asyncio.run(talk(url, before, None))
    oracle.check(answers)
