"""The calls of a debtor to its creditors, bounded in bytes and in time."""

from __future__ import annotations

import asyncio
import ssl
from typing import TypeVar

import httpx
import orjson
from pydantic import ValidationError

from engine.protocol import (
    LendAllocate,
    LendAllocateReply,
    LendFree,
    LendFreeReply,
    LendRenew,
    LendRenewReply,
    LendSend,
    LendSendReply,
    PeerUnreachable,
    error_from_body,
)
from engine.web import call_peer

__all__ = ["CreditorCalls"]

MOST_REPLY = 1 << 20  # bytes; a loan has few pages, and a renewal names 1024 loans of 256 bytes
LONGEST_S = 60.0
MESSAGE = 500  # characters of an error about a reply

Call = LendAllocate | LendFree | LendRenew | LendSend
R = TypeVar("R", LendAllocateReply, LendFreeReply, LendRenewReply, LendSendReply)


class CreditorCalls:
    """Each call raises the creditor's error, or `PeerUnreachable`. Lives on one event loop."""

    def __init__(self, api_key: str = "", tls: ssl.SSLContext | None = None) -> None:
        """`api_key` is common to this engine and its creditors; empty if they need none.

        `tls` verifies creditors with https URLs; None if there are none.
        """
        # An empty context: loading the system trust store would take longer than a call.
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=LONGEST_S,  # `call_peer` bounds the whole call
            verify=tls or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
            trust_env=False,
        )

    async def allocate(self, url: str, call: LendAllocate, within_s: float) -> LendAllocateReply:
        return await self._call(LendAllocateReply, url, "allocate", call, within_s)

    async def free(self, url: str, call: LendFree, within_s: float) -> LendFreeReply:
        return await self._call(LendFreeReply, url, "free", call, within_s)

    async def renew(self, url: str, call: LendRenew, within_s: float) -> LendRenewReply:
        return await self._call(LendRenewReply, url, "renew", call, within_s)

    async def send(self, url: str, call: LendSend, within_s: float) -> LendSendReply:
        return await self._call(LendSendReply, url, "send", call, within_s)

    async def refuses_connections(self, url: str, within_s: float) -> bool:
        """Return whether nobody listens at a URL: the process that did has ended."""
        where = httpx.URL(url)
        port = where.port or (443 if where.scheme == "https" else 80)
        try:
            async with asyncio.timeout(within_s):
                _, writer = await asyncio.open_connection(where.host, port)
        except ConnectionRefusedError:
            return True
        except (OSError, TimeoutError):
            return False
        writer.close()
        return False

    async def close(self) -> None:
        await self._http.aclose()

    async def _call(self, reply: type[R], url: str, name: str, call: Call, within_s: float) -> R:
        got = await call_peer(
            self._http,
            "POST",
            f"{url}/microserving/lend/{name}",
            call.model_dump_json().encode(),
            most=MOST_REPLY,
            within_s=within_s,
        )
        try:
            if got.status >= 400:
                raise error_from_body(orjson.loads(got.body))
            return reply.model_validate_json(got.body)
        except (ValidationError, ValueError) as error:
            raise PeerUnreachable(f"the creditor's reply is wrong: {error}"[:MESSAGE]) from error
