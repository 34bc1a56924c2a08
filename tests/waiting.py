"""Polling, for conditions without an event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["until"]


async def until(condition: Callable[[], object], timeout: float = 20.0) -> None:
    """Poll until `condition` holds. Raises `TimeoutError` after `timeout` seconds."""
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110  there is no event for it
            await asyncio.sleep(0.002)
