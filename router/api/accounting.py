"""The scope of each request to the model: deadline, receipt, metrics, log, trace."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Callable
from types import TracebackType

from engine.protocol import LONGEST_S, BadRequest, Draining, MicroserveError, Timeout
from router.admission import ANYBODY
from router.api.http import HttpRequest
from router.api.parts import Router
from router.base import CancelScope, RouterConfig
from router.telemetry import Receipt, serves

__all__ = ["accounted", "deadline_s", "priority_of"]

_PRIORITY = re.compile(r"-?[0-9]{1,9}")
log = logging.getLogger(__name__)


def deadline_s(config: RouterConfig, http: HttpRequest, requested: float | None) -> float:
    """Return the request's time limit in seconds: the least of the configured limit, the body's
    `requested` and `X-Request-Timeout`. Raises `BadRequest` for a header other than a number above
    0 and up to `LONGEST_S`."""
    limit = config.request_timeout_s
    if requested is not None:
        limit = min(limit, requested)
    header = http.headers.get("x-request-timeout")
    if header is None:
        return limit
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST_S:
        message = (
            f"X-Request-Timeout is a number of seconds above 0, up to {LONGEST_S:.0f}; "
            f"not {header!r:.80}"
        )
        raise BadRequest(message, param="X-Request-Timeout")
    return min(limit, seconds)


def priority_of(http: HttpRequest, requested: int | None) -> int:
    """Return the request's priority in the queue, lower is earlier: the body's `requested`, else
    `X-Priority`, else 0. Raises `BadRequest` for a header other than an integer of 9 digits."""
    header = http.headers.get("x-priority")
    if header is None:
        return requested or 0
    if not _PRIORITY.fullmatch(header):
        message = f"X-Priority is an integer, lower is earlier; not {header!r:.80}"
        raise BadRequest(message, param="X-Priority")
    return int(header) if requested is None else requested


class accounted:
    """Scope of the work on one request, cancelled `timeout_s` after it `arrived` (loop time).

    Raises `Timeout` then, naming the phase that it was in, or `Draining` if the router's shutdown
    has ended the request. Calls `tally` at the end, to note in the
    receipt what was written. Other exceptions pass through.
    """

    __slots__ = (
        "_caller", "_counted", "_due", "_phase", "_receipt", "_router", "_scope", "_shut_down",
        "_tally", "_timeout_s", "_timer", "_trace",
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
        self._counted = http.counted
        self._router = router
        self._caller, self._trace = http.caller or ANYBODY, http.trace
        self._receipt = receipt
        self._due, self._timeout_s = arrived + timeout_s, timeout_s
        self._tally = tally
        self._phase = ""
        self._shut_down = False
        self._scope = CancelScope(http.task)

    def __enter__(self) -> None:
        router, receipt = self._router, self._receipt
        serves(receipt)
        router.metrics.running += 1
        router.activity.begin(receipt)
        router.limits.charge(self._caller, receipt.prompt_tokens)
        router.shutdown.request_begins(self._end)
        self._counted()
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
            ended = self._why()
            receipt.fail(ended)
            raise ended from None
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
                self._router.shutdown.request_ends(self._end)

    def _close(self) -> None:
        router, receipt = self._router, self._receipt
        receipt.ms = receipt.elapsed_ms()
        self._tally()
        router.metrics.running -= 1
        router.metrics.finished(receipt)
        router.activity.end(receipt)
        router.limits.charge(self._caller, receipt.completion_tokens)
        router.queue.freed()
        if self._trace is not None:
            self._trace.finish(receipt)
        if log.isEnabledFor(logging.INFO):
            log.info("request %s", receipt.status, extra={"receipt": receipt.summary()})

    def _why(self) -> MicroserveError:
        """Return the error of a request that was ended here."""
        if self._shut_down:
            return Draining("the router shut down before the request had ended")
        receipt = self._receipt
        return Timeout(
            f"the request took longer than {self._timeout_s:g} s; it was in: {self._phase} "
            f"(strategy {receipt.strategy}, generation {receipt.generation})"
        )

    def _end(self) -> None:
        """End the request because the router shuts down."""
        if not self._scope.cancelled:
            self._shut_down = True
            self._scope.cancel()

    def _expire(self) -> None:
        self._phase = self._receipt.phase  # read now: its legs are about to end
        self._scope.cancel()
