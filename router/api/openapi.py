"""`/openapi.json` and `/docs`: what FastAPI makes of the routes and of the models of their bodies.

A route's summary is its function's docstring. Beside those that it declares, it may fail as all
routes of its kind may.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from importlib import resources
from typing import Any

import fastapi_offline
import orjson
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from starlette.staticfiles import StaticFiles

from router.api.errors import ErrorObject

__all__ = ["DOCS", "Route", "add_docs", "api_router", "errors", "raw_body"]

DOCS = "/docs"
JSON = "application/json"
# FastAPI passes on fields that it does not know; its own schemas keep no whole number above 2**53.
RAW_BODY = "x-raw-body"
REF = "#/components/schemas/{model}"


class JsonRequest(Request):
    """Parses bodies as strictly as the OpenAI API does: no NaN, no half of a surrogate pair."""

    async def json(self) -> Any:
        """Return the parsed body. Raises `orjson.JSONDecodeError`."""
        return orjson.loads(await self.body())


class Route(APIRoute):
    """A route that describes itself by its docstring and declares the errors of its kind."""

    def __init__(
        self, path: str, endpoint: Callable[..., Any], *, responses: Any = None, **options: Any
    ) -> None:
        summary, _, description = (inspect.getdoc(endpoint) or "").partition("\n\n")
        method = min(options["methods"]).lower()
        statuses = {401}
        for applies, more in (
            (method in ("post", "put", "patch"), {400, 408, 413}),
            (path.startswith("/admin/"), {403}),
            ("{" in path, {404}),
            (path.startswith("/v1/") and method == "post", {429, 503}),  # limits, shutting down
        ):
            statuses |= more if applies else set()
        path_format = path.replace(":path}", "}")
        described = {
            "summary": " ".join(summary.split()),
            "description": description,
            "responses": {**errors(*statuses), **(responses or {})},
            "operation_id": f"{method} {path_format}",
        }
        super().__init__(path, endpoint, **{**options, **described})

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, given a `JsonRequest`."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handler


def api_router() -> APIRouter:
    """Return a router of routes that describe themselves."""
    return APIRouter(route_class=Route)


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return FastAPI's `responses` for errors of these statuses."""
    return {
        status: {"model": ErrorObject, "description": HTTPStatus(status).phrase}
        for status in sorted(statuses)
    }


def raw_body(body: Any) -> dict[str, Any]:
    """Return FastAPI's `openapi_extra` for a function that reads a body of type `body` itself."""
    return {RAW_BODY: TypeAdapter(body).json_schema(ref_template=REF)}


def add_docs(app: FastAPI) -> None:
    """Add `/openapi.json`, and `/docs` with all that it needs, so that it works offline."""
    api = api_router()
    made: list[dict[str, Any]] = []

    @api.get("/openapi.json", response_model=dict[str, Any])
    def document() -> dict[str, Any]:
        """This document."""
        if not made:  # it takes a tenth of a second
            made.append(_document(app))
        return made[0]

    @api.get(DOCS, response_class=HTMLResponse)
    def docs() -> Response:
        """This document, to look at in a browser."""
        return get_swagger_ui_html(
            openapi_url="/openapi.json",
            title=app.title,
            swagger_js_url=f"{DOCS}/swagger-ui-bundle.js",
            swagger_css_url=f"{DOCS}/swagger-ui.css",
            swagger_favicon_url=f"{DOCS}/favicon.png",
        )

    app.include_router(api)
    with resources.as_file(resources.files(fastapi_offline) / "static") as assets:
        app.mount(DOCS, StaticFiles(directory=assets))


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = document["components"]["schemas"]
    for name in (
        "HTTPValidationError",
        "ValidationError",
    ):  # ours are `ErrorObject`s, of status 400
        schemas.pop(name, None)
    operations = [one for methods in document["paths"].values() for one in methods.values()]
    for operation in operations:
        operation["responses"].pop("422", None)
        if schema := operation.pop(RAW_BODY, None):
            schemas.update(schema.pop("$defs", {}))
            operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{}, {"key": []}]
    return document
