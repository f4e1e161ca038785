"""Running the application: a socket, signals, and an end that lets what is running finish.

The first SIGINT or SIGTERM stops accepting, and gives running requests their grace; then they are cancelled, which
their clients are told, and what was computed for them is kept. A second one cancels at once.
"""

import asyncio
import errno
import ipaddress
import math
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from bough.engine.engine import Engine
from bough.errors import OptionError
from bough.server.app import create_app
from bough.server.generation import Service
from bough.server.settings import Settings

LAST_WORDS = 5.0  # seconds that cancelled requests get to tell their clients
BACKLOG = 1024
KEEP_ALIVE = 75  # seconds; longer than clients keep idle connections, or one may be closed just as it is used again


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens, so that a mistake is told before a model is loaded. Whoever connects meanwhile waits."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        taken = socket.socket(family, kind, protocol)
    except OSError as error:
        raise OptionError(f"the host {host!r} cannot be served on ({error.strerror}); try 127.0.0.1") from None
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
        taken.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        taken.close()
        number = getattr(error, "errno", None)
        if number == errno.EADDRINUSE:
            raise OptionError(f"port {port} of {host} is in use; choose another with --port, or 0 for any") from None
        raise OptionError(f"port {port} of {host} cannot be had ({error}); choose another with --port") from None
    return taken


def address(taken: socket.socket) -> str:
    """Where a socket is reached."""
    host, port = taken.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(engine: Engine, settings: Settings, taken: socket.socket, started: Callable[[], None]) -> None:
    """Serve until a signal says to stop. Whoever calls this closes the engine."""
    local = ipaddress.ip_address(taken.getsockname()[0].partition("%")[0]).is_loopback
    app = create_app(engine, settings, local=local)
    grace = math.ceil(settings.grace + LAST_WORDS)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", ws="none", server_header=False, backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE, timeout_graceful_shutdown=grace,
    )  # fmt: skip
    asyncio.run(_serve(Server(config, started), app.state.service, taken))


class Server(uvicorn.Server):
    """uvicorn's, with signals left to us: it would raise them again at its end, before the engine is closed."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.ready = ready

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready()


async def _serve(server: Server, service: Service, taken: socket.socket) -> None:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if service.closing:
            service.cancel_all()
        else:
            service.closing = server.should_exit = True
            loop.call_later(service.settings.grace, service.cancel_all)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    await server.serve(sockets=[taken])
