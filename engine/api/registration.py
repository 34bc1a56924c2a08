"""Registration: an engine with `--router` registers there and sends heartbeats."""

from __future__ import annotations

import asyncio
import logging
import ssl
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import httpx

from engine.protocol import EngineConfig

__all__ = ["announce", "read_labels"]

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
DEREGISTER_TIMEOUT_S = 1.0


async def announce(config: EngineConfig) -> None:
    """Register with the router and repeat it as a heartbeat; on cancellation, deregister.

    The router may start later or restart: the next heartbeat registers the engine. Logs whenever
    the router becomes reachable or unreachable.
    """
    body: dict[str, Any] = {"url": config.url, "id": config.engine_id, "role": config.role}
    body["labels"] = read_labels(config.labels)
    body["heartbeat"] = True
    headers = {"Authorization": f"Bearer {config.admin_key}"} if config.admin_key else {}
    failure: str | None = ""  # of the latest heartbeat; "": none was sent yet
    known_as = ""
    verify = ssl.create_default_context(cafile=config.router_ca or None)
    async with httpx.AsyncClient(
        base_url=config.router, headers=headers, timeout=5.0, verify=verify
    ) as client:
        try:
            while True:
                try:
                    reply = await client.post("/admin/engines", json=body)
                    now = None if reply.is_success else f"{reply.status_code} {reply.text[:200]}"
                    if reply.is_success:
                        known_as = reply.json()["id"]
                except (httpx.HTTPError, ValueError, KeyError) as error:
                    now = str(error) or type(error).__name__
                if now != failure:
                    failure = now
                    if failure is None:
                        log.info("registered with %s", config.router)
                    else:
                        log.warning("cannot register with %s: %s", config.router, failure)
                await asyncio.sleep(HEARTBEAT_S)
        finally:
            if known_as and failure is None:
                # Best effort: otherwise the router notices by a refused connection.
                with suppress(httpx.HTTPError, TimeoutError):
                    async with asyncio.timeout(DEREGISTER_TIMEOUT_S):
                        await client.delete(
                            f"/admin/engines/{quote(known_as, safe='')}",
                            params={"heartbeat": True},
                        )


def read_labels(text: str) -> dict[str, str]:
    """Parse `zone=a,rack=7` into a dict. Raises `ValueError`."""
    labels = {}
    for part in text.split(",") if text else ():
        name, equals, value = part.partition("=")
        if not name or not equals:
            raise ValueError(f"--labels {text}: expected labels as in zone=a,rack=7")
        labels[name] = value
    return labels
