"""The wait for KV that its senders say they have sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from router.base import fired_late
from router.legs.grant import LeaseGrant

__all__ = ["arrival"]

T = TypeVar("T")


async def arrival(
    call: Awaitable[T],
    grant: LeaseGrant,
    begin: int,
    within_s: float,
    end_lease: Callable[[], object],
) -> T:
    """Await `call`, a `start_generate` that waits until `begin` tokens have landed in `grant`.

    `remote_send` returns after the last byte has landed, so the engine answers soon after it. If it
    has not answered `within_s` seconds after the senders have said that these tokens are sent,
    `end_lease` is called. An engine that waits for KV then answers with `LeaseExpired`; otherwise
    it would wait until the lease ends. Time in which this process was held up does not count.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None

    def begin_timer() -> None:
        nonlocal timer
        if timer is None and grant.sent >= begin:
            timer = loop.call_later(within_s, expire)

    def expire() -> None:
        nonlocal timer
        if timer is not None and fired_late(timer):
            timer = loop.call_later(within_s, expire)
        else:
            end_lease()

    grant.on_sent = begin_timer
    begin_timer()
    try:
        return await call
    finally:
        grant.on_sent = None
        if timer is not None:
            timer.cancel()
