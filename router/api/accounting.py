"""What is done around each request to the model, whatever becomes of it: its deadline, its end in
the receipt, and all that is counted, logged and traced of it then."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from types import TracebackType

from engine.protocol import MicroserveError, Timeout
from router.admission.keys import ANYBODY
from router.api.http import HttpRequest
from router.api.parts import Router
from router.base.cancel_scope import CancelScope
from router.base.config import RouterConfig
from router.telemetry.logs import serves
from router.telemetry.receipts import Receipt

__all__ = ["accounted", "deadline_s", "priority_of"]

_PRIORITY = re.compile(r"-?[0-9]{1,9}")
log = logging.getLogger(__name__)


def deadline_s(config: RouterConfig, http: HttpRequest, asked: float | None) -> float:
    """How long the request may take: as the client asks, but not longer than configured.

    A header that is no positive number is as good as none.
    """
    limit = config.request_timeout_s
    try:
        header = float(http.headers.get("x-request-timeout", "inf"))
    except ValueError:
        header = limit
    wished = [seconds for seconds in (asked, header) if seconds is not None and seconds > 0]
    return min([limit, *wished])


def priority_of(http: HttpRequest, asked: int | None) -> int:
    """Its place in the queue, lower is earlier: as the body says, else as `X-Priority` does, else
    0. A header that is no small number is as good as none."""
    if asked is not None:
        return asked
    header = http.headers.get("x-priority", "")
    return int(header) if _PRIORITY.fullmatch(header) else 0


class accounted:
    """Around the work on one request, cancelled `timeout_s` after it `arrived` (loop time).

    Raises `Timeout` then, naming what it was doing. `tally` is called at the end, to fill in what
    was emitted. Everything else raises through.
    """

    __slots__ = (
        "_caller", "_due", "_phase", "_receipt", "_router", "_scope", "_tally", "_timeout_s",
        "_timer", "_trace",
    )  # fmt: skip

    def __init__(
        self,
        router: Router,
        http: HttpRequest,
        receipt: Receipt,
        arrived: float,
        timeout_s: float,
        *,
        tally: Callable[[], object],
    ) -> None:
        http.receipt = receipt
        self._router = router
        self._caller, self._trace = http.caller or ANYBODY, http.trace
        self._receipt = receipt
        self._due, self._timeout_s = arrived + timeout_s, timeout_s
        self._tally = tally
        self._phase = ""
        self._scope = CancelScope()

    def __enter__(self) -> None:
        router, receipt = self._router, self._receipt
        serves(receipt)
        router.metrics.in_flight.inc()
        router.limits.charge(self._caller, receipt.prompt_tokens)
        router.shutdown.request_begins()
        self._scope.__enter__()
        self._timer = asyncio.get_running_loop().call_at(self._due, self._expire)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        receipt = self._receipt
        try:
            self._scope.__exit__(kind, error, traceback)
        except TimeoutError:
            late = Timeout(
                f"the request took longer than {self._timeout_s:g} s; it was in: {self._phase} "
                f"(strategy {receipt.strategy}, generation {receipt.generation})"
            )
            receipt.fail(late)
            raise late from None
        else:
            if kind is None:
                receipt.status = "done"
            elif isinstance(error, MicroserveError):
                receipt.fail(error)
            else:
                receipt.status = "cancelled"
        finally:
            try:
                self._close()
            finally:
                self._router.shutdown.request_ends()

    def _close(self) -> None:
        router, receipt = self._router, self._receipt
        receipt.ms = receipt.elapsed_ms()
        self._tally()
        router.metrics.in_flight.dec()
        router.metrics.finished(receipt)
        router.limits.charge(self._caller, receipt.completion_tokens)
        router.queue.freed()
        if self._trace is not None:
            self._trace.finish(receipt)
        if log.isEnabledFor(logging.INFO):
            log.info("request %s", receipt.status, extra={"receipt": receipt.summary()})

    def _expire(self) -> None:
        self._phase = self._receipt.phase  # now: all of its legs are about to end
        self._scope.cancel()
