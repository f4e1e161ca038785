"""How requests are refused: one exception that each API words in its own shape."""

from collections.abc import Mapping

from bough.errors import BadLogits, BoughError, DiskUnavailable, PoolFull, PromptTooLong
from bough.server.schema import Invalid


class ApiError(Exception):
    """A request that ends with a status other than 200. `kind` and `code` are OpenAI's words for it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.code, self.param = status, message, kind, code, param
        self.headers = dict(headers or {})


def not_found(path: str) -> ApiError:
    return ApiError(404, f"there is nothing at {path}; see /openapi.json for what there is", code="not_found")


def no_such_model(name: str, served: str) -> ApiError:
    message = f"the model {name!r} is not served here; {served!r} is"
    return ApiError(404, message, code="model_not_found", param="model")


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an exception. Ours carry their remedy; of others only the log has the details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Invalid):
        return ApiError(400, str(error), param=error.path or None)
    if isinstance(error, RecursionError):
        return ApiError(400, "something in the request is nested too deeply; flatten it")
    if isinstance(error, PromptTooLong):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, PoolFull):
        return ApiError(503, str(error), kind="server_error", code="out_of_memory")
    if isinstance(error, BoughError) and not isinstance(error, BadLogits | DiskUnavailable):
        return ApiError(400, str(error))
    message = str(error) if isinstance(error, BoughError) else "something went wrong in the server; its log says what"
    return ApiError(500, message, kind="server_error", code="internal_error")
