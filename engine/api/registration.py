"""Registration: an engine with `--router` registers there and sends heartbeats."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import httpx
import orjson
from pydantic import BaseModel, Field, ValidationError

from engine.protocol import EngineConfig, PeerUnreachable
from engine.web import PeerReply, call_peer, client_context

__all__ = ["announce", "read_labels"]

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
REGISTER_TIMEOUT_S = 5.0  # for a whole reply
DEREGISTER_TIMEOUT_S = 1.0
MOST_REPLY = 1 << 20  # bytes; a router describes the engine


class _Registered(BaseModel):
    """The part of a router's reply that matters here."""

    id: str = Field(min_length=1, max_length=1024)


async def announce(config: EngineConfig) -> None:
    """Register with the router and repeat it as a heartbeat; on cancellation, deregister.

    The router may start later or restart: the next heartbeat registers the engine. Logs whenever
    the router becomes reachable or unreachable.
    """
    body: dict[str, Any] = {"url": config.url, "id": config.engine_id, "role": config.role}
    body["labels"] = read_labels(config.labels)
    body["heartbeat"] = True
    content = orjson.dumps(body)
    headers = {"Authorization": f"Bearer {config.admin_key}"} if config.admin_key else {}
    failure: str | None = ""  # of the latest heartbeat; "": none was sent yet
    known_as = ""
    verify = client_context(config.router_ca, config.tls_cert, config.tls_key)
    async with httpx.AsyncClient(
        base_url=config.router,
        headers=headers,
        timeout=REGISTER_TIMEOUT_S,
        verify=verify,
        # Behind one address may be another router by the next heartbeat: one that replaces a
        # router while that drains.
        limits=httpx.Limits(max_keepalive_connections=0),
    ) as client:
        try:
            while True:
                try:
                    reply = await call_peer(
                        client,
                        "POST",
                        "/admin/engines",
                        content,
                        most=MOST_REPLY,
                        within_s=REGISTER_TIMEOUT_S,
                    )
                    known_as, now = _registered(reply), None
                except PeerUnreachable as error:
                    now = error.message
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
                with suppress(PeerUnreachable):
                    await call_peer(
                        client,
                        "DELETE",
                        f"/admin/engines/{quote(known_as, safe='')}?heartbeat=true",
                        most=MOST_REPLY,
                        within_s=DEREGISTER_TIMEOUT_S,
                    )


def _registered(reply: PeerReply) -> str:
    """Return the id that the router has given. Raises `PeerUnreachable` for a refusal."""
    if not 200 <= reply.status < 300:
        raise PeerUnreachable(f"{reply.status} {reply.body[:200].decode(errors='replace')}")
    try:
        return _Registered.model_validate_json(reply.body).id
    except ValidationError:
        raise PeerUnreachable("its reply names no engine") from None


def read_labels(text: str) -> dict[str, str]:
    """Parse `zone=a,rack=7` into a dict. Raises `ValueError`."""
    labels = {}
    for part in text.split(",") if text else ():
        name, equals, value = part.partition("=")
        if not name or not equals:
            raise ValueError(f"--labels {text}: expected labels as in zone=a,rack=7")
        labels[name] = value
    return labels
