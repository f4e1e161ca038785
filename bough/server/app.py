"""The application: every API's endpoints behind one gate, and the document that describes them.

An endpoint is a table entry (api.Endpoint). Here bodies are read within the size limit, checked against the endpoint's
Record, and handed over; whatever is raised becomes an error in the API's own shape.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from bough.engine.engine import Engine
from bough.engine.tool_formats import finite, no_constant
from bough.server import anthropic, ollama, openai, operations
from bough.server.api import Api, Call, ClientGone, Endpoint, Json
from bough.server.errors import ApiError, as_api_error, not_found
from bough.server.gate import Gate, refusal
from bough.server.generation import Service
from bough.server.openapi import document
from bough.server.settings import Settings

APIS: tuple[Api, ...] = (openai.API, ollama.API, anthropic.API, operations.API)
GONE = 499  # for the log: nobody reads it
DISCARDED, DISCARDING = 64 << 20, 2  # bytes, and seconds, of what follows too large a body

log = logging.getLogger("bough.server")


def create_app(engine: Engine, settings: Settings | None = None, *, local: bool = True) -> Starlette:
    """The server of an engine, as an ASGI application. `local`: only this machine can reach it.

    Its `state.service` is the Service. Whoever runs it closes the engine.
    """
    settings = settings or Settings()
    service = Service(engine, settings)
    described = Json(document(APIS))

    async def describe(request: Request) -> Response:
        return described

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        told = not_found(path) if error.status_code == 404 else ApiError(error.status_code, error.detail)
        told.headers = dict(error.headers or {})
        return refusal(APIS, path, told)

    routes = [Route("/openapi.json", describe)]
    routes += [Route(e.path, _route(service, api, e), methods=[e.method]) for api in APIS for e in api.endpoints]
    middleware = [Middleware(Gate, service=service, apis=APIS, local=local)]
    if settings.origins:
        cors = Middleware(
            CORSMiddleware, allow_origins=settings.origins, allow_methods=["*"], allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )  # fmt: skip
        middleware.insert(0, cors)
    app = Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: refuse})
    app.state.service = service
    return app


def _route(service: Service, api: Api, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        context = request.scope["bough"]
        try:
            body = {} if endpoint.body is None else endpoint.body.read(await _body(request, service))
            query = {} if endpoint.query is None else endpoint.query.read(_numbers(dict(request.query_params)))
            return await endpoint.answer(Call(service, request, body, query, context))
        except (ClientGone, ClientDisconnect):
            return Response(status_code=GONE)
        except Exception as error:  # each API has a shape for it
            told = as_api_error(error)
            if told.code == "internal_error":
                log.exception("request %s failed", context.id)
            return Json(api.error(told), told.status, told.headers)

    return answer


async def _body(request: Request, service: Service) -> Any:
    most, parts, size, coming = service.settings.body_bytes, list[bytes](), 0, request.stream()
    async for part in coming:
        size += len(part)
        if size > most:
            parts.clear()
            await _discard(coming)
            message = f"the body is larger than the {most} bytes that this server takes"
            raise ApiError(413, message, code="body_too_large", headers={"Connection": "close"})
        parts.append(part)
    try:
        return json.loads(b"".join(parts), parse_constant=no_constant, parse_float=finite)
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not valid JSON: {reason}") from None


async def _discard(coming: AsyncIterator[bytes]) -> None:
    """Read what else there is of too large a body, within limits: who still sends it while the connection is closed
    does not get to read the answer."""
    size = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(DISCARDING):
            async for part in coming:
                size += len(part)
                if size > DISCARDED:
                    return


def _numbers(query: dict[str, str]) -> dict[str, Any]:
    """Values as JSON would have them: in an address everything is text."""
    return {name: int(value) if value.isascii() and value.isdigit() else value for name, value in query.items()}
