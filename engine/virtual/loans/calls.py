"""The calls of a virtual debtor to its creditors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

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
)

__all__ = ["VirtualLoanCalls"]

# Calls the engine at a URL, in virtual time; raises its error, or `PeerUnreachable`.
LoanCall = LendAllocate | LendFree | LendRenew | LendSend
CallCreditor = Callable[[str, LoanCall], Awaitable[Any]]


class VirtualLoanCalls:
    """The `engine.borrowing.LoanCalls` of a virtual engine."""

    def __init__(self, call: CallCreditor, listens: Callable[[str], bool]) -> None:
        """`listens` says whether an engine lives at a URL."""
        self._call = call
        self._listens = listens
        self._dead = False

    def die(self) -> None:
        """Send nothing further: the debtor has died."""
        self._dead = True

    async def allocate(self, url: str, call: LendAllocate, within_s: float) -> LendAllocateReply:
        """See `LoanCalls.allocate`."""
        reply: LendAllocateReply = await self._send(url, call)
        return reply

    async def free(self, url: str, call: LendFree, within_s: float) -> LendFreeReply:
        """See `LoanCalls.free`."""
        reply: LendFreeReply = await self._send(url, call)
        return reply

    async def renew(self, url: str, call: LendRenew, within_s: float) -> LendRenewReply:
        """See `LoanCalls.renew`."""
        reply: LendRenewReply = await self._send(url, call)
        return reply

    async def send(self, url: str, call: LendSend, within_s: float) -> LendSendReply:
        """See `LoanCalls.send`."""
        try:
            async with asyncio.timeout(within_s):
                reply: LendSendReply = await self._send(url, call)
        except TimeoutError:
            raise PeerUnreachable(f"{url} does not answer in time") from None
        return reply

    async def refuses_connections(self, url: str, within_s: float) -> bool:
        """See `LoanCalls.refuses_connections`."""
        return not self._dead and not self._listens(url)

    async def close(self) -> None:
        """Nothing is open."""

    async def _send(self, url: str, call: LoanCall) -> Any:
        if self._dead:
            raise PeerUnreachable("this engine is dead")
        return await self._call(url, call)
