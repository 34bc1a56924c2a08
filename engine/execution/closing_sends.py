"""The sends that compute nothing more, until their puts have drained. Imports no torch.

    close ──► the put drains ──► pages are free, the call is complete ──► forgotten
    stepper   the put's thread   the put's thread, also during a step     stepper

The cache's lock guards `Send.started` and the sequence; the future of a send takes its first
outcome; the set of closing sends belongs to the thread that steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import NoReturn

from engine.execution.runner import StepCache
from engine.protocol import Internal, RemoteSendReply
from engine.scheduling import Send

__all__ = ["ClosingSends"]

log = logging.getLogger(__name__)


class ClosingSends:
    """Holds the pages of computed, failed and aborted sends while writes may read them."""

    def __init__(
        self,
        cache: StepCache,
        clock: Callable[[], float],
        post: Callable[[Callable[[], object]], object],
        sent: Callable[[Send, float], object],
    ) -> None:
        """`clock` returns monotonic seconds on any thread. `post` has the stepper make a call.

        `sent` is called for each send whose put has written all of it, with the time of its end by
        that clock, under the cache's lock.
        """
        self._cache = cache
        self._clock = clock
        self._post = post
        self._sent = sent
        self._sends: set[Send] = set()

    def __contains__(self, send: Send) -> bool:
        return send in self._sends

    def __len__(self) -> int:
        return len(self._sends)

    def close(self, send: Send) -> None:
        """Write nothing further of a send that no step computes any more."""
        self._sends.add(send)
        send.computed_at = self._clock()
        self._cache.clear_mark(send.seq_id)
        send.put.close().add_done_callback(partial(self._drained, send))

    def _drained(self, send: Send, closed: Future[None]) -> None:
        """Free a send's pages and complete its call: no write reads them any more."""
        now = self._clock()
        try:
            outcome = self._free(send, closed.exception(), now) or _reply(send, now)
        except Exception as error:  # the stepper cannot continue either
            log.exception("a send cannot be ended")
            outcome = Internal(f"the send failed: {error}")
            self._post(partial(_raise, error))
        self._post(partial(self._sends.discard, send))
        send.complete(outcome)

    def _free(self, send: Send, failure: BaseException | None, now: float) -> BaseException | None:
        """Free a send's pages, published unless it has failed; return its failure."""
        with self._cache.lock:
            failure = send.failure or failure
            if failure is None:
                self._cache.publish(send.seq_id, send.tokens)
                self._sent(send, now)
            send.started = False
            self._cache.remove_sequence(send.seq_id)
            return failure


def _reply(send: Send, now: float) -> RemoteSendReply:
    return RemoteSendReply(
        sent_tokens=send.target - send.begin,
        cached_tokens=max(send.cached - send.begin, 0),
        computed_tokens=send.target - send.cached,
        bytes=send.put.bytes_sent,
        ms=(now - send.arrived) * 1000,
        put_ms=(now - send.computed_at) * 1000,
    )


def _raise(error: Exception) -> NoReturn:
    raise error
