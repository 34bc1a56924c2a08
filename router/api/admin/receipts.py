"""The admin API's receipts: what was done for a request."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from router.api.openapi import api_router
from router.api.parts import Router
from router.api.rest import reply
from router.base import NotFound

__all__ = ["routes"]


def routes(router: Router) -> APIRouter:
    """Return `/admin/requests`."""
    api = api_router("Observation")

    @api.get("/admin/requests/{id:path}", response_model=dict[str, Any])
    async def receipt(id: str) -> Response:
        """What was done for a request: every leg, its times, bytes and retries."""
        try:
            return reply(router.receipts[id].describe())
        except NotFound:
            found = await router.peers.receipt(id) if router.peers is not None else None
            if found is None:
                raise
            return reply(found)

    return api
