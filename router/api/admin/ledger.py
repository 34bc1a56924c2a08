"""The admin API's ledger of lent memory (Infinite-LLM, section 4.4)."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from router.api.openapi import api_router
from router.api.parts import Router
from router.api.rest import reply

__all__ = ["routes"]


def routes(router: Router) -> APIRouter:
    """Return `/admin/ledger`."""
    api = api_router("Engines")

    @api.get("/admin/ledger", response_model=dict[str, Any])
    async def ledger() -> Response:
        """The pages that engines can lend, have lent and have borrowed, by their heartbeats.

        Engines stand under the names that they use among themselves. `lent` is by debtor and
        `borrowed` by creditor. A row that is not `fresh` has nothing available. `swaps` are those
        of cycles of debts, under way and ended: `home` counts the blocks that came home.
        """
        return reply(router.registry.lending.describe())

    return api
