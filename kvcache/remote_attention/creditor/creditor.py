"""The creditor's side: one thread computes the parts that debtors ask for.

(Infinite-LLM, section 4.2: the queries travel to the KV.)
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import torch

from kvcache.errors import BadRequest, Internal, MicroserveError, NoCapacity, TooLarge
from kvcache.lease import Identity
from kvcache.memory import KVLayout
from kvcache.remote_attention.creditor.answering import Answering, RefusedError
from kvcache.remote_attention.creditor.budget import ComputeBudget
from kvcache.remote_attention.creditor.debtor_connection import DebtorConnection, Request
from kvcache.remote_attention.creditor.loans import BadLoans
from kvcache.remote_attention.creditor.reception import Reception
from kvcache.remote_attention.exchange import Head, Limits, Refusal, listen_tcp, listen_unix
from kvcache.transport import Network

__all__ = ["Creditor", "CreditorStatistics"]

log = logging.getLogger(__name__)

CONNECTIONS: Final = 64  # of debtors
MESSAGE_S: Final = 10.0  # within which a message has to arrive, or a reply be read, to its end
IDLE_S: Final = 30.0  # after which the connection of a debtor is given to another one, if need be
LOOK_S: Final = 0.02  # between looks whether requests still have to wait for their turn
ACCEPT_RETRY_S: Final = 0.1  # after a failed accept, as when file descriptors have run out


@dataclass(frozen=True, slots=True)
class CreditorStatistics:
    """What a creditor has done for debtors since it started."""

    debtors: int  # connected now
    answers: int  # each of one layer
    refusals: int
    computed_s: float
    waited_s: float  # of all requests, for their turn


class _Waiting(NamedTuple):
    connection: DebtorConnection
    request: Request
    since: float


class Creditor:
    """Answers queries over the pages that a process has lent.

    One thread serves all debtors, one request each in turn. Bad input is refused with a typed
    error; a debtor whose messages cannot be told apart any more is disconnected, and nobody else.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        layout: KVLayout,
        *,
        query_heads: int,
        identity: Identity,
        bad_loans: BadLoans,
        share: float,
        burst_s: float = 0.05,
        wait_s: float = 3.0,
        busy: Callable[[], bool] = lambda: True,
        guard: Callable[[], AbstractContextManager[object]] = nullcontext,
        network: Network | None = None,
        limits: Limits | None = None,
        threads: int = 1,
    ) -> None:
        """Listen, and start the thread.

        `pool` is `[layers, pages, 2, page_size, kv_heads, head_dim]`, of `layout`. It must outlive
        the creditor. `bad_loans` says which loans have ended. It is asked before each
        computation and after it, and `guard` is held from the one to the other: so an answer is
        over pages that were lent all the while. While `busy` says that the process has
        requests of its own, at most `share` of the time goes into computations, but for `burst_s`
        seconds (see `ComputeBudget`); a request that this makes wait longer than `wait_s` is
        refused with `NoCapacity`. Debtors on other hosts reach it by `network`; None:
        there are none. The thread computes with `threads` threads.

        Raises `OSError` if it cannot listen, `Unsupported` for a pool that holds a part of the
        model, and `BadRequest` as `ComputeBudget` does.
        """
        self._answering = Answering(
            pool, layout, query_heads, limits=limits or Limits(), bad_loans=bad_loans, guard=guard
        )
        self._wait_s, self._threads = wait_s, threads
        self._on_device = pool.device.type != "cpu"
        self._budget = ComputeBudget(share, burst_s, time.monotonic, busy)
        self._closed = threading.Event()
        self._reception = Reception(
            identity, self._answering.shape, self._answering.limits, self._on_admitted
        )
        self._arrived: deque[DebtorConnection] = deque()
        self._connections: dict[str, DebtorConnection] = {}  # by debtor: each has one
        self._ready: deque[_Waiting] = deque()
        self._refusals, self._waited_s = 0, 0.0
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, self._on_wake)
        self._listeners: list[socket.socket] = []
        try:
            self.endpoints = tuple(self._listen(network))
        except BaseException:
            self._release()
            raise
        self._thread = threading.Thread(target=self._run, name="creditor", daemon=True)
        self._thread.start()

    def statistics(self) -> CreditorStatistics:
        """Return what has been done. Thread-safe."""
        done = self._answering
        return CreditorStatistics(
            len(self._connections), done.answers, self._refusals, done.computed_s, self._waited_s
        )

    def close(self) -> None:
        """Disconnect all debtors, after the computation under way. Idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            self._wake.send(b"\0")
            self._thread.join()
            self._release()

    # The thread

    def _run(self) -> None:
        # A thread's first such call copies the process-wide setting; the second then sets its own.
        torch.get_num_threads()
        torch.set_num_threads(self._threads)
        with torch.inference_mode():
            while not self._closed.is_set():
                self._act()
                self._serve()
                self._end_stalled()

    def _act(self) -> None:
        """Wait for what arrives, and act on it; no name is left of a debtor that has gone."""
        for waiting in self._ready:  # one request of each at a time
            self._unwatch(waiting.connection)
        for key, _ in self._selector.select(self._timeout_s()):
            act: Callable[[], None] = key.data
            act()

    def _timeout_s(self) -> float | None:
        """Return how long nothing is to be done, unless something arrives."""
        if not self._ready:
            began = [each.stalled_since for each in self._connections.values()]
            first = min((since for since in began if since is not None), default=None)
            return None if first is None else max(0.0, first + MESSAGE_S - time.monotonic())
        expires = self._ready[0].since + self._wait_s - time.monotonic()
        # It may cease to be busy meanwhile.
        return max(0.0, min(self._budget.wait_s(), expires, LOOK_S))

    def _serve(self) -> None:
        """Serve the request that has waited longest, if the budget allows."""
        now = time.monotonic()
        if self._budget.wait_s() > 0:
            while self._ready and self._ready[0].since < now - self._wait_s:
                connection, request, _ = self._ready.popleft()
                busy = NoCapacity("the creditor computes too much for others", retry_after_s=1.0)
                self._refuse(connection, request.head, Refusal(busy))
            return
        if not self._ready:
            return
        connection, request, since = self._ready.popleft()
        if self._connections.get(connection.debtor.engine_id) is not connection:
            return
        self._waited_s += now - since
        cpu = time.thread_time()
        try:
            self._answering.answer(connection, request, now - since)
        except RefusedError as refused:
            self._refuse(connection, request.head, refused.refusal)
        except MicroserveError as error:
            self._refuse(connection, request.head, Refusal(error))
        except Exception:
            log.exception("a debtor's request failed")
            self._refuse(connection, request.head, Refusal(Internal("the creditor has failed")))
        else:
            self._send(connection)
        finally:
            # Time in which this thread did not run took nothing from others.
            took = time.monotonic() - now
            ran = (time.thread_time() - cpu) * self._threads
            self._budget.spend(took if self._on_device else min(took, ran))

    # Connections

    def _on_readable(self, connection: DebtorConnection) -> None:
        try:
            request = connection.receive()
        except (BadRequest, TooLarge) as error:
            self._refusals += 1
            connection.finish(error)
            self._send(connection)
        except (EOFError, OSError):
            self._drop(connection)
        else:
            if request is not None:
                self._ready.append(_Waiting(connection, request, time.monotonic()))

    def _refuse(self, connection: DebtorConnection, head: Head, refusal: Refusal) -> None:
        if self._connections.get(connection.debtor.engine_id) is connection:
            self._refusals += 1
            connection.refuse(head, refusal)
            self._send(connection)

    def _send(self, connection: DebtorConnection) -> None:
        """Send the reply, and then wait for the next request."""
        try:
            done = connection.send()
        except OSError:
            self._drop(connection)
            return
        if done:
            self._watch(connection, selectors.EVENT_READ, self._on_readable)
        else:
            self._watch(connection, selectors.EVENT_WRITE, self._send)

    def _watch(
        self,
        connection: DebtorConnection,
        event: int,
        call: Callable[[DebtorConnection], None],
    ) -> None:
        if connection.watched == event:
            return
        change = self._selector.modify if connection.watched else self._selector.register
        change(connection.socket, event, partial(call, connection))
        connection.watched = event

    def _unwatch(self, connection: DebtorConnection) -> None:
        if connection.watched:
            self._selector.unregister(connection.socket)
            connection.watched = 0

    def _drop(self, connection: DebtorConnection) -> None:
        self._unwatch(connection)
        if self._connections.get(connection.debtor.engine_id) is connection:
            del self._connections[connection.debtor.engine_id]
        connection.close()

    def _end_stalled(self) -> None:
        """Drop the debtors that stopped within a message, or do not read a reply."""
        now = time.monotonic()
        for connection in list(self._connections.values()):
            since = connection.stalled_since
            if since is not None and now - since >= MESSAGE_S:
                log.info("a debtor has stopped within a message")
                self._drop(connection)

    def _make_room(self) -> bool:
        """Return whether a further debtor can be served, dropping one that has long been idle."""
        if len(self._connections) < CONNECTIONS:
            return True
        waiting = {id(each.connection) for each in self._ready}
        idle = [
            each
            for each in self._connections.values()
            if each.stalled_since is None and id(each) not in waiting
        ]
        oldest = min(idle, key=lambda each: each.active_at, default=None)
        if oldest is None or time.monotonic() - oldest.active_at < IDLE_S:
            return False
        self._drop(oldest)
        return True

    def _on_wake(self) -> None:
        self._woken.recv(1 << 12)
        while self._arrived:
            connection = self._arrived.popleft()
            before = self._connections.get(connection.debtor.engine_id)
            if before is not None:
                self._drop(before)
            if not self._make_room():
                connection.close()
                continue
            self._connections[connection.debtor.engine_id] = connection
            self._watch(connection, selectors.EVENT_READ, self._on_readable)

    def _on_connect(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            log.warning("a debtor could not be accepted: %s", error)
            self._closed.wait(ACCEPT_RETRY_S)
            return
        self._reception.begin(connection)

    def _on_admitted(self, connection: DebtorConnection) -> None:
        """Take a debtor over from the thread of its handshake."""
        self._arrived.append(connection)
        self._wake.send(b"\0")

    def _listen(self, network: Network | None) -> list[str]:
        endpoints = []
        for listener, endpoint in self._sockets(network):
            self._listeners.append(listener)
            listener.setblocking(False)
            self._selector.register(
                listener, selectors.EVENT_READ, partial(self._on_connect, listener)
            )
            endpoints.append(endpoint)
        return endpoints

    @staticmethod
    def _sockets(network: Network | None) -> Iterator[tuple[socket.socket, str]]:
        yield listen_unix()
        if network is not None:
            yield listen_tcp(network.host, network.ports)

    def _release(self) -> None:
        """Close everything, once the thread has ended."""
        for listener in self._listeners:
            listener.close()
        self._reception.close()
        for admitted in [*self._arrived, *self._connections.values()]:
            admitted.close()
        self._connections.clear()
        self._ready.clear()
        self._selector.close()
        self._wake.close()
        self._woken.close()
