"""The other worker processes of this router: what they know, and what this one tells them."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from router.base import StoreUnavailable
from router.store import Link
from router.telemetry import Samples, merged, render
from router.timeline import TracedRequest

__all__ = ["Peers"]

log = logging.getLogger(__name__)

GATHER_S = 2.0


class Peers:
    """Asks the other workers, by way of their parent."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def ready(self) -> None:
        """Tell the parent that this worker serves."""
        await self._link.call("ready")

    async def metrics(self, own: Samples) -> bytes:
        """Return the metrics of all workers together, also of those that have ended.

        A worker that does not answer within a second is represented by its latest answer.
        """
        try:
            told = await self._link.call("gather_metrics", timeout_s=GATHER_S)
        except StoreUnavailable as error:
            log.warning("metrics of this worker alone: %s", error.message)
            return render(own)
        return render(merged([own, msgspec.convert(told, Samples)]))

    async def receipt(self, id: str) -> dict[str, Any] | None:
        """Return the receipt of a request that another worker served, `None` if none has it."""
        told = await self.ask_others("receipt", id)
        return next((one for one in told if one is not None), None)

    async def ask_others(self, question: str, *arguments: Any) -> list[Any]:
        """Return what the other workers answer to a question, without those that do not.

        Raises `StoreUnavailable` if the parent is gone.
        """
        told: list[Any] = await self._link.call(
            "ask_others", question, arguments, timeout_s=GATHER_S
        )
        return told

    async def requests(self, seconds: float, most: int) -> list[TracedRequest]:
        """Return what a time line shows of the requests of the latest seconds, of all others.

        Each tells at most `most`. Raises `StoreUnavailable` if the parent does not answer.
        """
        told = await self.ask_others("requests", seconds, most)
        return [msgspec.convert(one, TracedRequest) for requests in told for one in requests]
