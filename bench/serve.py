"""Time to first token and tokens per second of a server, with several clients that each hold a conversation.

Any server that speaks OpenAI's API can be asked, so that peers are measured by the same script. Without --url, a server
of the bundled model is started for the run.

Each client says something, reads the whole answer as a stream, and says the next thing after it, for some turns; all
begin with the same opening. `cold`: the texts have never been sent before (they differ by a mark in the opening, which
is why nothing of an earlier run helps). `warm`: the same conversations once more, right after. Turns after the first
build on what a server has kept of the turns before, if it keeps anything. Each figure is one JSON line: seconds to the
first token by turn, tokens per second over all clients, and cached tokens as far as the server tells them.

A token is what usage.completion_tokens counts; a server that reports no usage is counted by events, and the line says
so. Answers have a fixed length on servers that know ignore_eos, and a largest length on others. `load_before` is what
else this machine was doing when the run began: figures of a busy one say little.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

EXAMPLES = """examples:
  python bench/serve.py                                        a server of its own, of the bundled model
  python bench/serve.py --clients 1,8 --turns 2 --tokens 16    the same in short
  python bench/serve.py --serve ./model --out serve.jsonl      a server of its own, of another model
  python bench/serve.py --url http://127.0.0.1:8080/v1 --api chat --clients 8
  python bench/serve.py --url http://peer:8000/v1 --model NAME --api-key KEY --label peer
"""
SENTENCE = (
    "a little girl named Lily and her friend the bear went out to play in the big green park with a red ball and saw"
    " one very old dog who was sad because it had lost its way home so they gave it some bread and milk"
)
WORDS = SENTENCE.split()


class Failed(Exception):
    """The server does not do what is measured."""


@dataclass
class Turn:
    """One answer, as its client saw it."""

    first: float  # seconds from the request to the first text
    tokens: int
    prompt: int | None  # tokens, where the server tells
    cached: int | None
    text: str


@dataclass
class Server:
    """Where to ask, and how."""

    http: httpx.AsyncClient
    model: str
    chat: bool
    tokens: int
    counted: bool = True  # by the server's own usage, so far

    async def ask(self, said: list[str]) -> Turn:
        """What follows after texts of which every second one is an answer."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": self.tokens, "temperature": 0, "stream": True}
        body |= {"stream_options": {"include_usage": True}, "ignore_eos": True}
        if self.chat:
            body["messages"] = [
                {"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(said)
            ]
        else:
            body["prompt"] = "".join(said)
        began, first, events, text, usage = time.perf_counter(), None, 0, "", {}
        async with self.http.stream("POST", "chat/completions" if self.chat else "completions", json=body) as answer:
            if answer.is_error:
                raise Failed(f"{answer.url} answers {answer.status_code}: {(await answer.aread()).decode()[:500]}")
            async for line in answer.aiter_lines():
                if not line.startswith("data:") or line.endswith("[DONE]"):
                    continue
                told = json.loads(line.removeprefix("data:"))
                if "error" in told:
                    raise Failed(f"a stream broke: {told['error']}")
                usage = told.get("usage") or usage
                piece = "".join(_text(choice) for choice in told["choices"])
                if piece:
                    first, events, text = first or time.perf_counter() - began, events + 1, text + piece
        self.counted = self.counted and bool(usage)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        tokens = usage.get("completion_tokens", events)
        return Turn(first or time.perf_counter() - began, tokens, usage.get("prompt_tokens"), cached, text)


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""


@dataclass
class Talks:
    """What all clients say, the same whenever it is said again."""

    mark: str
    clients: int
    turns: int
    words: int
    said: list[list[str]] = field(init=False)

    def __post_init__(self) -> None:
        opening = f"Story {self.mark}. " + " ".join(random.Random(0).choices(WORDS, k=self.words))
        self.said = [
            [" ".join(random.Random(f"{client} {turn}").choices(WORDS, k=12)) for turn in range(self.turns)]
            for client in range(self.clients)
        ]
        for each in self.said:
            each[0] = f"{opening} {each[0]}"

    async def run(self, server: Server) -> tuple[float, list[list[Turn]]]:
        """Seconds in all, and the turns of each client."""
        began = time.perf_counter()
        turns = await asyncio.gather(*(self._hold(server, said) for said in self.said))
        return time.perf_counter() - began, turns

    async def _hold(self, server: Server, said: list[str]) -> list[Turn]:
        history: list[str] = []
        turns = []
        for text in said:
            history.append(text if server.chat or not history else f" {text}")
            turns.append(await server.ask(history))
            history.append(turns[-1].text)
        return turns


async def measure(server: Server, clients: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Figures of that many clients, cold and warm; of several rounds, the one of median length."""
    rounds: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    for _ in range(options.rounds):
        talks = Talks(f"{random.SystemRandom().getrandbits(48):012x}", clients, options.turns, options.words)
        for state, seen in rounds.items():
            seen.append({"state": state, "clients": clients} | figures(*await talks.run(server)))
    return [sorted(seen, key=lambda each: each["seconds"])[len(seen) // 2] for seen in rounds.values()]


def figures(seconds: float, turns: list[list[Turn]]) -> dict[str, Any]:
    every = [turn for client in turns for turn in client]
    firsts = sorted(turn.first for turn in every)
    tokens = sum(turn.tokens for turn in every)
    known = [turn.cached for turn in every if turn.cached is not None]
    prompts = [turn.prompt for turn in every if turn.prompt is not None]
    by_turn = [statistics.median(each.first for each in same) for same in zip(*turns, strict=True)]
    return {
        "first_token_seconds": {
            "median": round(statistics.median(firsts), 4),
            "p95": round(firsts[min(len(firsts) - 1, int(0.95 * len(firsts)))], 4),
            "by_turn": [round(each, 4) for each in by_turn],
        },
        "tokens_per_second": round(tokens / seconds, 1),
        "completion_tokens": tokens,
        "prompt_tokens": sum(prompts) if prompts else None,
        "cached_tokens": sum(known) if known else None,
        "seconds": round(seconds, 3),
    }


@contextmanager
def serving(model: str) -> Iterator[str]:
    """`bough serve` in a process of its own; its address."""
    command = [sys.executable, "-m", "bough", "serve", model, "--port", "0"]
    wide = {**os.environ, "COLUMNS": "200"}
    begun = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=wide)
    assert begun.stderr is not None
    try:
        told = []
        for line in begun.stderr:
            told.append(line)
            if line.startswith("serving") and (found := re.search(r"http://\S+/v1", line)):
                threading.Thread(target=begun.stderr.read, daemon=True).start()  # or its log would fill the pipe
                yield found[0]
                return
        sys.exit("error: the server did not start\n" + "".join(told))
    finally:
        begun.terminate()
        begun.wait()


async def run(url: str, options: argparse.Namespace) -> None:
    key = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url.rstrip("/") + "/", headers=key, timeout=600, limits=limits) as http:
        try:
            model = options.model or (await http.get("models")).raise_for_status().json()["data"][0]["id"]
            server = Server(http, model, options.api == "chat", options.tokens)
            await Talks("of warming up", 1, 1, 8).run(server)
            for clients in options.clients:
                for line in await measure(server, clients, options):
                    report(line, server, options)
        except Failed as error:
            sys.exit(f"error: {error}")
        except httpx.HTTPError as error:
            sys.exit(f"error: {url} cannot be asked ({error or type(error).__name__}); is a server there?")


def report(line: dict[str, Any], server: Server, options: argparse.Namespace) -> None:
    asked = {"turns": options.turns, "tokens": options.tokens, "words": options.words, "rounds": options.rounds}
    about = {"bench": "serve", "server": options.label, "model": server.model, "api": options.api}
    counted = "usage" if server.counted else "events"
    where = {"tokens_counted_by": counted, "machine": options.machine, "load_before": options.load_before}
    text = json.dumps(about | line | asked | where)
    print(text, flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("a") as file:
            file.write(text + "\n")


def machine() -> str:
    """Where this script runs, which is where its own server runs too."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.*)", info.read_text()) if info.exists() else []
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")
    return int(text)


def several(text: str) -> list[int]:
    return [positive(each) for each in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="of a running server, up to and with /v1")
    parser.add_argument("--serve", default="bundled", metavar="MODEL", help="without --url: what to serve")
    parser.add_argument("--model", help="what the server calls its model; default: the first it lists")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: $OPENAI_API_KEY")
    parser.add_argument(
        "--api", choices=["chat", "completions"], default="completions", help="chat needs a model with a chat template"
    )
    parser.add_argument(
        "--clients",
        type=lambda text: [positive(each) for each in text.split(",")],
        default=[1, 8, 32],
        metavar="1,8,32",
    )
    parser.add_argument("--turns", type=positive, default=3, help="of each conversation")
    parser.add_argument("--tokens", type=positive, default=32, help="of each answer")
    parser.add_argument("--words", type=positive, default=150, help="of the opening that all conversations share")
    parser.add_argument("--rounds", type=positive, default=3, help="of which the one of median length counts")
    parser.add_argument("--label", help="what the lines call the server; default: bough, or the URL")
    parser.add_argument("--machine", default=machine(), help="where the server runs; default: this one")
    parser.add_argument("--out", type=Path, help="append the lines to this file too")
    options = parser.parse_args()
    options.label = options.label or options.url or "bough"
    options.load_before = round(os.getloadavg()[0], 1)
    if options.url:
        asyncio.run(run(options.url, options))
    else:
        with serving(options.serve) as url:
            asyncio.run(run(url, options))


if __name__ == "__main__":
    main()
