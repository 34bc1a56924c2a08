"""What is done around each request to the model, whatever becomes of it: its deadline, its end in
the receipt, and all that is counted, logged and traced of it then."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType

from aiohttp import web

from engine.protocol import MicroserveError, Timeout
from router.config import RouterConfig
from router.http import CALLER, RECEIPT, TRACE
from router.logs import serving
from router.receipts import Receipt
from router.router import Router

__all__ = ["accounted", "deadline_s", "priority_of"]

_PRIORITY = re.compile(r"-?[0-9]{1,9}")
log = logging.getLogger(__name__)


def deadline_s(config: RouterConfig, http: web.Request, asked: float | None) -> float:
    """How long the request may take: as the client asks, but not longer than configured.

    A header that is no positive number is as good as none.
    """
    limit = config.request_timeout_s
    try:
        header = float(http.headers.get("X-Request-Timeout", "inf"))
    except ValueError:
        header = limit
    wished = [seconds for seconds in (asked, header) if seconds is not None and seconds > 0]
    return min([limit, *wished])


def priority_of(http: web.Request, asked: int | None) -> int:
    """Its place in the queue, lower is earlier: as the body says, else as `X-Priority` does, else
    0. A header that is no small number is as good as none."""
    if asked is not None:
        return asked
    header = http.headers.get("X-Priority", "")
    return int(header) if _PRIORITY.fullmatch(header) else 0


@asynccontextmanager
async def accounted(
    router: Router,
    http: web.Request,
    receipt: Receipt,
    arrived: float,
    timeout_s: float,
    *,
    tally: Callable[[], object],
) -> AsyncIterator[None]:
    """Around the work on one request, cancelled `timeout_s` after it `arrived` (loop time).

    Raises `Timeout` then, naming what it was doing. `tally` is called at the end, to fill in what
    was emitted. Everything else raises through.
    """
    http[RECEIPT] = receipt
    router.metrics.in_flight.inc()
    router.limits.charge(http[CALLER], receipt.prompt_tokens)
    with router.drain.request(), serving(receipt):
        try:
            async with _Deadline(receipt, arrived + timeout_s, timeout_s):
                yield
            receipt.status = "done"
        except MicroserveError as error:
            receipt.fail(error)
            raise
        finally:
            if receipt.status == "running":
                receipt.status = "cancelled"
            receipt.ms = receipt.elapsed_ms()
            tally()
            router.metrics.in_flight.dec()
            router.metrics.finished(receipt)
            router.limits.charge(http[CALLER], receipt.completion_tokens)
            router.backlog.freed()
            http[TRACE].finish(receipt)
            if log.isEnabledFor(logging.INFO):
                log.info("request %s", receipt.status, extra={"receipt": receipt.summary()})


class _Deadline:
    """Cancels its body at `due` (loop time). Raises `Timeout` then, which names the phase."""

    __slots__ = ("_cut", "_due", "_phase", "_receipt", "_timeout_s", "_timer")

    def __init__(self, receipt: Receipt, due: float, timeout_s: float) -> None:
        self._receipt = receipt
        self._due = due
        self._timeout_s = timeout_s
        self._phase = ""
        self._cut = asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._cut.__aenter__()
        self._timer = asyncio.get_running_loop().call_at(self._due, self._expire)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        try:
            await self._cut.__aexit__(kind, error, traceback)
        except TimeoutError:
            receipt = self._receipt
            raise Timeout(
                f"the request took longer than {self._timeout_s:g} s; it was in: {self._phase} "
                f"(strategy {receipt.strategy}, generation {receipt.generation})"
            ) from None

    def _expire(self) -> None:
        self._phase = self._receipt.phase  # now: all of its legs are about to end
        self._cut.reschedule(self._due)
