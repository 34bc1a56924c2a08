"""The whole API of a router, as one ASGI application.

request ──► Gate ──┬─► completions, chat completions, the page's files   (called directly)
                   └─► FastAPI ──► every other function
"""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI

from router.api import probes, ui
from router.api.admin import (
    advice,
    engines,
    ledger,
    live,
    migrate,
    pins,
    receipts,
    sources,
    strategies,
    trace,
    traffic,
)
from router.api.gate import Gate
from router.api.openai import completions, models, tokens
from router.api.openapi import add_docs
from router.api.parts import Router
from router.api.rest import catch_errors

__all__ = ["build_app"]


def build_app(router: Router) -> Gate:
    """Return the application over `router`."""
    api = FastAPI(
        title="microserve",
        version=version("microserve"),
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    catch_errors(api)
    for room in (completions, models, tokens, probes, live, receipts, trace, traffic):
        api.include_router(room.routes(router))
    for room in (engines, ledger, migrate, pins, strategies, sources, advice):
        api.include_router(room.routes(router))
    add_docs(api)
    handlers = completions.handlers(router)
    if not router.config.no_ui:
        handlers |= ui.handlers()
    return Gate(router, api, handlers)
