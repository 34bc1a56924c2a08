"""The documentation pages of the API; this server has their assets, so they work offline."""

from __future__ import annotations

from importlib import resources

import fastapi_offline
from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from fastapi.staticfiles import StaticFiles
from starlette.responses import Response

__all__ = ["add_docs"]

ASSETS = "/docs"


def add_docs(app: FastAPI) -> None:
    """Add `/docs` (Swagger UI) and `/redoc` for the application's `/openapi.json`.

    Where the engine has an API key, these need it, too; browsers send it as a password.
    """
    schema = app.openapi_url or "/openapi.json"

    async def docs(_request: Request) -> Response:
        return get_swagger_ui_html(
            openapi_url=schema,
            title=app.title,
            swagger_js_url=f"{ASSETS}/swagger-ui-bundle.js",
            swagger_css_url=f"{ASSETS}/swagger-ui.css",
            swagger_favicon_url=f"{ASSETS}/favicon.png",
        )

    async def redoc(_request: Request) -> Response:
        return get_redoc_html(
            openapi_url=schema,
            title=app.title,
            redoc_js_url=f"{ASSETS}/redoc.standalone.js",
            redoc_favicon_url=f"{ASSETS}/favicon.png",
            with_google_fonts=False,
        )

    app.add_route("/docs", docs, include_in_schema=False)
    app.add_route("/redoc", redoc, include_in_schema=False)
    with resources.as_file(resources.files(fastapi_offline) / "static") as assets:
        app.mount(ASSETS, StaticFiles(directory=assets))
