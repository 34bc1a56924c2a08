"""What a debtor needs of its creditors: their answers to calls, and connections for queries."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from engine.protocol import (
    LendAllocate,
    LendAllocateReply,
    LendFree,
    LendFreeReply,
    LendRenew,
    LendRenewReply,
    LendSend,
    LendSendReply,
)
from kvcache.types import EngineId

__all__ = ["Links", "LoanCalls"]


class LoanCalls(Protocol):
    """The calls about loans. Each raises the creditor's error, or `PeerUnreachable`."""

    async def allocate(self, url: str, call: LendAllocate, within_s: float) -> LendAllocateReply:
        """See `POST /microserving/lend/allocate`."""
        ...

    async def free(self, url: str, call: LendFree, within_s: float) -> LendFreeReply:
        """See `POST /microserving/lend/free`."""
        ...

    async def renew(self, url: str, call: LendRenew, within_s: float) -> LendRenewReply:
        """See `POST /microserving/lend/renew`."""
        ...

    async def send(self, url: str, call: LendSend, within_s: float) -> LendSendReply:
        """See `POST /microserving/lend/send`."""
        ...

    async def refuses_connections(self, url: str, within_s: float) -> bool:
        """Return whether nobody listens at a URL: the process that did has ended."""
        ...

    async def close(self) -> None:
        """End all connections."""
        ...


class Links(Protocol):
    """The connections over which queries are shipped to creditors."""

    def connected(self) -> Collection[EngineId]:
        """Return the creditors that can be asked now."""
        ...

    async def connect(self, creditor: EngineId, endpoints: Sequence[str], epoch: int) -> None:
        """Connect to a process of a creditor. Raises as `RemoteAttention.connect`."""
        ...

    def disconnect(self, creditor: EngineId) -> None:
        """Disconnect from a creditor, if connected."""
        ...
