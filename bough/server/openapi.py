"""The served OpenAPI document, made of the tables that validate."""

from typing import Any

from bough import __version__
from bough.server.api import Api, Endpoint
from bough.server.errors import ApiError


def document(apis: tuple[Api, ...]) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for api in apis:
        for endpoint in api.endpoints:
            paths.setdefault(endpoint.path.replace(":path}", "}"), {})[endpoint.method.lower()] = _operation(
                api, endpoint
            )
    return {
        "openapi": "3.1.0",
        "info": {"title": "Bough", "version": __version__},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _operation(api: Api, endpoint: Endpoint) -> dict[str, Any]:
    told: dict[str, Any] = {"summary": endpoint.summary, "tags": [api.name]}
    names = [part.strip("{}").partition(":")[0] for part in endpoint.path.split("/") if part.startswith("{")]
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    if endpoint.query is not None:
        parameters += [
            {"name": name, "in": "query", "schema": shape.schema()} for name, shape in endpoint.query.fields.items()
        ]
    if parameters:
        told["parameters"] = parameters
    if endpoint.body is not None:
        content = {"application/json": {"schema": endpoint.body.schema()}}
        told["requestBody"] = {"required": True, "content": content}
    content = {endpoint.media_type: {}}
    if endpoint.stream is not None:
        content[endpoint.stream] = {}
    told["responses"] = {"200": {"description": "What was asked for", "content": content}} | _refusals(api)
    return told


def _refusals(api: Api) -> dict[str, Any]:
    example = api.error(ApiError(400, "what is wrong, and what to do about it"))
    return {"default": {"description": "An error", "content": {"application/json": {"example": example}}}}
