"""Heartbeats: an engine with `--router` announces itself there for as long as it lives."""

from __future__ import annotations

import asyncio
import logging

import httpx

from engine.protocol.config import EngineConfig

__all__ = ["announce"]

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0


async def announce(config: EngineConfig) -> None:
    """Register with the router, again and again, until cancelled.

    A router that is not there yet, or is restarted, hears of this engine with the next heartbeat;
    each change between reaching it and not is logged.
    """
    body = {"url": config.url, "id": config.engine_id, "role": config.role}
    headers = {"Authorization": f"Bearer {config.admin_key}"} if config.admin_key else {}
    trouble: str | None = ""
    async with httpx.AsyncClient(base_url=config.router, headers=headers, timeout=5.0) as client:
        while True:
            try:
                reply = await client.post("/admin/engines", json=body)
                now = None if reply.is_success else f"{reply.status_code} {reply.text[:200]}"
            except httpx.HTTPError as error:
                now = str(error) or type(error).__name__
            if now != trouble:
                trouble = now
                if trouble is None:
                    log.info("registered with %s", config.router)
                else:
                    log.warning("cannot register with %s: %s", config.router, trouble)
            await asyncio.sleep(HEARTBEAT_S)
