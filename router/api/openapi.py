"""`/openapi.json`: what the routes say of themselves, and the messages that validate their bodies.

A route's summary is its handler's docstring; `documented` adds what a handler takes and gives.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from importlib.metadata import version
from typing import Any, TypeVar

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode

from router.api.openai.errors import ErrorObject
from router.api.routes import Routes

__all__ = ["DOCS_PAGE", "documented", "openapi"]

H = TypeVar("H", bound=Callable[..., Any])
JSON, EVENTS = "application/json", "text/event-stream"
REF = "#/components/schemas/{model}"

# As an engine's: the page itself is on a public host, and shows what this router says.
DOCS_PAGE = b"""<!doctype html>
<html><head><title>microserve</title><meta charset="utf-8">
<link rel="stylesheet" href="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui.css"></head>
<body><div id="ui"></div>
<script src="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({url: "/openapi.json", dom_id: "#ui"})</script></body></html>
"""


@dataclass(frozen=True, slots=True)
class _Api:
    body: Any
    reply: Any
    status: int
    media: tuple[str, ...]
    errors: tuple[int, ...]


def documented(
    *,
    body: Any = None,
    reply: Any = dict[str, Any],
    status: int = 200,
    media: tuple[str, ...] = (JSON,),
    errors: tuple[int, ...] = (),
) -> Callable[[H], H]:
    """Say of a handler which type its `body` is read as, what it replies, and which statuses its
    errors have beside those that follow from its path and from having a body."""

    def mark(handler: H) -> H:
        handler.__api__ = _Api(body, reply, status, media, errors)  # type: ignore[attr-defined]
        return handler

    return mark


def openapi(routes: Routes) -> dict[str, Any]:
    """The OpenAPI 3.1 document of all routes."""
    operations = list(_operations(routes))
    inputs: list[tuple[Any, JsonSchemaMode, TypeAdapter[Any]]] = [
        (ErrorObject, "serialization", TypeAdapter(ErrorObject))
    ]
    for _, _, _, api in operations:
        if api.body is not None:
            inputs.append((api.body, "validation", TypeAdapter(api.body)))
        if JSON in api.media:
            inputs.append((api.reply, "serialization", TypeAdapter(api.reply)))
    unique = {(str(key), mode): (key, mode, adapter) for key, mode, adapter in inputs}
    made, definitions = TypeAdapter.json_schemas(
        [(str(key), mode, adapter) for key, mode, adapter in unique.values()],
        ref_template=REF,
        schema_generator=GenerateJsonSchema,
    )
    paths: dict[str, dict[str, Any]] = {}
    for method, path, handler, api in operations:
        paths.setdefault(path, {})[method] = _operation(method, path, handler, api, made)
    return {
        "openapi": "3.1.0",
        "info": {"title": "microserve", "version": version("microserve")},
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operations(routes: Routes) -> Iterator[tuple[str, str, Any, _Api]]:
    for route in routes:
        api = getattr(route.handler, "__api__", _Api(None, dict[str, Any], 200, (JSON,), ()))
        yield route.method.lower(), route.path, route.handler, api


def _operation(
    method: str, path: str, handler: Any, api: _Api, made: dict[Any, Any]
) -> dict[str, Any]:
    summary, _, description = (inspect.getdoc(handler) or handler.__name__).partition("\n\n")
    error = {"content": {JSON: {"schema": made[(str(ErrorObject), "serialization")]}}}
    statuses = {*api.errors, 401}
    for applies, more in (
        (api.body is not None, {400, 408, 413}),
        (path.startswith("/admin/"), {403}),
        ("{" in path, {404}),
        (path.startswith("/v1/") and method == "post", {429, 503}),  # limits, and shutting down
    ):
        statuses |= more if applies else set()
    replies = {
        media: {"schema": made[(str(api.reply), "serialization")]} if media == JSON else {}
        for media in api.media
    }
    responses = {str(api.status): {"description": "done", "content": replies}}
    for status in sorted(statuses):
        responses[str(status)] = {"description": HTTPStatus(status).phrase, **error}
    operation: dict[str, Any] = {
        "operationId": f"{method} {path}",
        "summary": " ".join(summary.split()),
        "responses": responses,
    }
    if description:
        operation["description"] = description
    if names := re.findall(r"{(\w+)}", path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if api.body is not None:
        schema = made[(str(api.body), "validation")]
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    return operation
