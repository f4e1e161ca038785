"""What an API is made of: endpoints, the shape of its errors, and the forms in which answers are written.

`Call` is one HTTP request as an endpoint sees it. `Stream` is an answer that is written while it comes, and that stops
the generation behind it when the client leaves, however it leaves.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from bough.engine.request import Output
from bough.server.errors import ApiError, as_api_error
from bough.server.generation import Generation, Service
from bough.server.schema import Record

log = logging.getLogger("bough.server")


@dataclass(slots=True)
class Context:
    """What the server knows of a request before and beside its endpoint."""

    id: str
    tenant: str | None = None  # of its API key; None: everybody's
    facts: dict[str, Any] = field(default_factory=dict)  # for the log


@dataclass(frozen=True, slots=True)
class Call:
    """One request to an endpoint."""

    service: Service
    request: Request
    body: dict[str, Any]  # as its Record has read it
    query: dict[str, Any]
    context: Context

    def salt(self, own: str | None = None) -> str | None:
        """The cache_salt: what the request asks for, within what its key may see."""
        own = own if own is not None else self.request.headers.get("x-cache-salt")
        tenant = self.context.tenant
        if tenant is None:
            return own
        return f"{tenant}/{own or ''}"

    async def outputs(self, generation: Generation) -> list[Output]:
        """Wait for the end of all that is generated. A client that leaves meanwhile stops it."""
        work = asyncio.ensure_future(generation.outputs())
        gone = asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientGone
            return work.result()
        finally:
            generation.cancel()
            for task in (work, gone):
                task.cancel()

    async def _gone(self) -> None:
        while (await self.request.receive())["type"] != "http.disconnect":
            pass


class ClientGone(Exception):
    """The client closed the connection before it had an answer."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A method and a path, what its body may hold, and what answers it."""

    method: str
    path: str
    answer: Callable[[Call], Awaitable[Response]]
    summary: str
    body: Record | None = None
    query: Record | None = None
    media_type: str = "application/json"
    stream: str | None = None  # the media type of its stream, if it has one


@dataclass(frozen=True, slots=True)
class Api:
    """Endpoints that word their errors in one way, as does whatever else goes wrong below their prefixes."""

    name: str
    prefixes: tuple[str, ...]
    error: Callable[[ApiError], dict[str, Any]]
    endpoints: tuple[Endpoint, ...]


def encode(value: Any) -> bytes:
    """JSON. Half a surrogate pair, which UTF-8 cannot hold, becomes the escape that JSON has for it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def server_sent(value: Any, event: str | None = None) -> bytes:
    """One server-sent event."""
    name = b"" if event is None else f"event: {event}\n".encode()
    return name + b"data: " + (value.encode() if isinstance(value, str) else encode(value)) + b"\n\n"


def json_line(value: Any) -> bytes:
    return encode(value) + b"\n"


class Json(Response):
    """An answer in JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content)


class Stream(StreamingResponse):
    """An answer piece by piece. What breaks it after it has begun is told in it, in the API's way (`broken`)."""

    def __init__(
        self,
        generation: Generation,
        content: AsyncIterator[bytes],
        media_type: str,
        broken: Callable[[ApiError], bytes],
    ) -> None:
        super().__init__(_guarded(content, broken), media_type=media_type, headers={"Cache-Control": "no-cache"})
        self.generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self.generation.left:
                scope["bough"].facts["outcome"] = "the client left"
            self.generation.cancel()


async def _guarded(content: AsyncIterator[bytes], broken: Callable[[ApiError], bytes]) -> AsyncIterator[bytes]:
    try:
        async for chunk in content:
            yield chunk
    except Exception as error:  # the status is sent already: the client is told in the stream
        told = as_api_error(error)
        if told.status >= 500:
            log.error("a stream broke: %s", error, exc_info=told.code == "internal_error")
        yield broken(told)
