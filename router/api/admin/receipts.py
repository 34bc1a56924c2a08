"""The admin API's receipts: what was done for a request."""

from __future__ import annotations

from itertools import chain
from typing import Any

from fastapi import APIRouter, Response

from router.api.openapi import api_router
from router.api.parts import Router
from router.api.rest import reply
from router.base import NotFound
from router.telemetry import Receipt

__all__ = ["receipt_of", "routes"]


def routes(router: Router) -> APIRouter:
    """Return `/admin/requests`."""
    api = api_router("Observation")

    @api.get("/admin/requests/{id:path}", response_model=dict[str, Any])
    async def receipt(id: str) -> Response:
        """What was done for a request: every leg, its times, bytes and retries."""
        try:
            return reply(receipt_of(router, id).describe())
        except NotFound:
            found = await router.peers.receipt(id) if router.peers is not None else None
            if found is None:
                raise
            return reply(found)

    return api


def receipt_of(router: Router, id: str) -> Receipt:
    """Return a request's receipt if this process has it. Raises `NotFound`.

    Receipts of requests that run, and of slow ones, are kept longer than others.
    """
    try:
        return router.receipts[id]
    except NotFound:
        activity = router.activity
        kept = chain[Receipt](activity.running, activity.slow)
        found = next((receipt for receipt in kept if receipt.id == id), None)
        if found is None:
            raise
        return found
