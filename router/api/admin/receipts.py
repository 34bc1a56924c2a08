"""The admin API's receipts: what was done for a request."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from router.api.openapi import api_router
from router.api.parts import Router
from router.api.rest import reply

__all__ = ["routes"]


def routes(router: Router) -> APIRouter:
    """Return `/admin/requests`."""
    api = api_router("Observation")

    @api.get("/admin/requests/{id:path}", response_model=dict[str, Any])
    async def receipt(id: str) -> Response:
        """What was done for a request: every leg, its times, bytes and retries."""
        return reply(router.receipts[id].describe())

    return api
