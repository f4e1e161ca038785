"""A live server on a loopback port, for tests that speak HTTP to it."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from bough import Engine
from bough.server.app import create_app
from bough.server.generation import Service
from bough.server.settings import Settings

PATIENCE = 60.0  # seconds for what should take a moment


@dataclass(frozen=True)
class Live:
    """A server and what is behind it."""

    url: str
    engine: Engine
    service: Service
    client: httpx.Client

    def ended(self, reason: str) -> float:
        """How many requests have ended so."""
        labels = {"finish_reason": reason}
        return self.service.metrics.registry.get_sample_value("bough_requests_total", labels) or 0

    def all_cancelled(self) -> bool:
        return all(handle.cancelled for each in list(self.service.running) for handle in each.handles)

    def is_idle(self) -> bool:
        return not self.service.running


@contextmanager
def serving(engine: Engine, settings: Settings | None = None) -> Iterator[Live]:
    """Serve an engine until the block ends. The engine stays open."""
    app = create_app(engine, settings)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=5))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True)
        thread.start()
        try:
            url = f"http://127.0.0.1:{port}"
            with httpx.Client(base_url=url, timeout=60) as client:
                yield Live(url, engine, app.state.service, client)
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive(), "the server did not end"


@contextmanager
def held(engine: Engine, after: int = 0) -> Iterator[None]:
    """Let the engine do so many more forwards, and the next only when the block ends: what runs until then goes on
    running, on the fastest of machines. Whatever asks the engine's thread (the cache's counters do) waits as well.
    """
    runner, goes_on = engine._runner, threading.Event()
    forward, left = runner.forward, after

    def wait(*given: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        assert left >= 0 or goes_on.wait(PATIENCE), "nobody let the engine go on"
        return forward(*given, **options)

    runner.forward = wait
    try:
        yield
    finally:
        del runner.forward
        goes_on.set()


def until(true: Callable[[], object]) -> bool:
    """Whether something comes true, however long a slow machine takes."""
    end = time.monotonic() + PATIENCE
    while not true() and time.monotonic() < end:
        time.sleep(0.005)
    return bool(true())
