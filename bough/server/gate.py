"""What every request passes on its way in and out: its id, who may ask, the log, the count.

Nothing here knows what is asked. A server without keys that only this machine can reach is still reachable by the web
pages that a browser here shows, so requests that come from one (an Origin that was not allowed), or by a name that is
not this machine's (DNS rebinding), are refused.
"""

import hashlib
import hmac
import logging
import re
import secrets
import time
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bough.server.api import Api, Context, Json
from bough.server.errors import ApiError, as_api_error
from bough.server.generation import Service

OPEN = ("/health",)  # what needs no key
REQUEST_ID = re.compile(r"[!-~]{1,128}")
LOCAL = re.compile(r"localhost|127(\.\d+){3}|::1|.*\.localhost")

log = logging.getLogger("bough.server")


class Gate:
    """The outermost of the application but for CORS."""

    def __init__(self, app: ASGIApp, service: Service, apis: tuple[Api, ...], *, local: bool) -> None:
        self.app, self.service, self.apis, self.local = app, service, apis, local
        self.keys = {key.encode(): _tenant(key) for key in service.settings.api_keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, began = Headers(scope=scope), time.perf_counter()
        given = headers.get("x-request-id", "")
        context = Context(given if REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}")
        scope["bough"] = context
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                for name in ("X-Request-Id", "Request-Id"):  # as OpenAI's and Anthropic's clients look for it
                    MutableHeaders(scope=message)[name] = context.id
            await send(message)

        try:
            context.tenant = self._tenant(scope["path"], headers)
            await self.app(scope, receive, answer)
        except Exception as error:  # whatever it is, the client is told and the server goes on
            told = as_api_error(error)
            if told.code == "internal_error":
                log.exception("request %s failed", context.id)
            if not status:
                await refusal(self.apis, scope["path"], told)(scope, receive, answer)
        finally:
            self._note(scope, context, status, began)

    def _note(self, scope: Scope, context: Context, status: int, began: float) -> None:
        route = scope.get("route")
        path = getattr(route, "path", "(unknown)")
        self.service.metrics.answered(scope["method"], path, status)
        facts = {"id": context.id, "method": scope["method"], "path": scope["path"], "status": status}
        seconds = round(time.perf_counter() - began, 4)
        log.info("request", extra={"facts": facts | {"seconds": seconds} | context.facts})

    def _tenant(self, path: str, headers: Headers) -> str | None:
        """Whose request it is. Raises if it is nobody's who may ask."""
        if not self.keys:
            self._require_local(headers)
            return None
        if path in OPEN:
            return None
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        sent = given.encode("latin-1")  # as bytes, which is what headers are
        # Every key is compared, each in constant time, so that the time tells nothing.
        matches = [tenant for key, tenant in self.keys.items() if hmac.compare_digest(key, sent)]
        if not matches:
            message = "a valid API key is needed; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            raise ApiError(401, message, kind="authentication_error", code="invalid_api_key")
        return matches[0] if len(self.keys) > 1 else None

    def _require_local(self, headers: Headers) -> None:
        allowed = self.service.settings.origins
        host = _name(f"//{headers.get('host', '')}")
        origin = headers.get("origin")
        if self.local and host and not LOCAL.fullmatch(host):
            message = f"this server answers to localhost, not to {host!r}; start it with --api-key or another --host"
            raise ApiError(403, message, kind="permission_error", code="forbidden_host")
        if origin is None or origin in allowed or "*" in allowed or _name(origin) == host:
            return
        message = f"pages of {origin!r} may not ask this server; allow them with --cors {origin}"
        raise ApiError(403, message, kind="permission_error", code="forbidden_origin")


def refusal(apis: tuple[Api, ...], path: str, error: ApiError) -> Json:
    """An error in the shape of the API that the path belongs to; the first API's if it belongs to none."""
    found = [(len(prefix), api) for api in apis for prefix in api.prefixes if path.startswith(prefix)]
    api = max(found, key=lambda each: each[0])[1] if found else apis[0]
    return Json(api.error(error), error.status, error.headers)


def _tenant(key: str) -> str:
    """What stands for a key in cache salts, which may be seen where keys may not."""
    return hashlib.sha256(b"bough tenant " + key.encode()).hexdigest()[:32]


def _name(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
