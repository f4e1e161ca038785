"""A live server on a loopback port, for tests that speak HTTP to it."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import uvicorn

from bough import Engine
from bough.server.app import create_app
from bough.server.generation import Service
from bough.server.settings import Settings


@dataclass(frozen=True)
class Live:
    """A server and what is behind it."""

    url: str
    engine: Engine
    service: Service
    client: httpx.Client


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
