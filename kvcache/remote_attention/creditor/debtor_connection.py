"""A debtor as its creditor sees it: one socket, read and written without waiting."""

from __future__ import annotations

import socket
import time
from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvcache.attention import HeldPlan, PartialAttention
from kvcache.errors import BadRequest, MicroserveError, TooLarge
from kvcache.remote_attention.creditor.loans import Debtor
from kvcache.remote_attention.exchange import HEAD, Buffers, Head, Kind, Limits, Refusal
from kvcache.types import LeaseId, PageId

__all__ = ["DebtorConnection", "PlannedStep", "Request"]

DISCARDED_BYTES: Final = 64 << 20  # of a debtor that was refused for good and still sends


class Request(NamedTuple):
    """A message of a debtor. The body of a QUERY is in the buffers of its connection."""

    head: Head
    body: bytearray | None = None  # of a PLAN


@dataclass(slots=True)
class PlannedStep:
    """A step of a debtor, planned for all layers."""

    step: int
    rows: int
    pages_of: dict[LeaseId, frozenset[PageId]]
    plan: HeldPlan
    place: PartialAttention  # of the answer, in the buffers
    answer_bytes: int


class DebtorConnection:
    """Reads one request at a time, and writes its reply.

    After `finish` it discards what the debtor still sends, since closing the socket before that
    would reset the connection, and the debtor would lose the reply. It counts as stalled from then
    on.
    """

    def __init__(
        self, connection: socket.socket, debtor: Debtor, buffers: Buffers, limits: Limits
    ) -> None:
        """`connection` has shaken hands. The buffers are shared if they have a descriptor."""
        connection.setblocking(False)
        self.socket = connection
        self.debtor = debtor
        self.buffers = buffers
        self.watched = 0  # the event that a selector waits for; 0: it does not know the socket
        self.planned: PlannedStep | None = None
        # Why the plan of a step was refused: the queries that follow it are refused for the same.
        self.refused: tuple[int, Refusal] = (-1, Refusal(BadRequest("no step was planned")))
        self._limits = limits
        self._head_bytes = bytearray(HEAD.size)
        self._into = memoryview(self._head_bytes)  # where the next bytes go
        self._head: Head | None = None  # of the message whose body is awaited
        self._body: bytearray | None = None
        self._outgoing: deque[memoryview] = deque()
        self._finished = False
        self._discarded = 0
        # time.monotonic() when a message began to arrive, or a reply to be sent; None: neither.
        self.stalled_since: float | None = None
        self.active_at = time.monotonic()  # when a message or reply last ended

    @property
    def shared(self) -> bool:
        """Whether bodies of queries and answers are in shared memory."""
        return self.buffers.fd >= 0

    @property
    def sending(self) -> bool:
        """Whether a reply has yet to be sent."""
        return bool(self._outgoing)

    def receive(self) -> Request | None:
        """Read what has arrived; return a request once it is complete.

        Raises `EOFError` or `OSError` when the debtor is gone, and `BadRequest` or `TooLarge` for
        bytes after which no message can be told from the next: reply with it, and `finish`.
        """
        while True:
            while self._into:
                try:
                    got = self.socket.recv_into(self._into)
                except BlockingIOError:
                    return None
                if not got:
                    raise EOFError("the debtor has disconnected")
                self._into = self._into[got:]
                if self.stalled_since is None:
                    self.stalled_since = time.monotonic()
                self._discarded += got if self._finished else 0
                if self._discarded > DISCARDED_BYTES:
                    raise EOFError("the debtor does not stop to send")
            if self._finished:
                self._into = memoryview(bytearray(1 << 16))
            elif self._head is None:
                head = Head.unpack(self._head_bytes)
                self._into = self._room(head)
                self._head = head
            else:
                request = Request(self._head, self._body)
                self._head = self._body = None
                self._into = memoryview(self._head_bytes)
                self._ended()
                return request

    def reply(self, head: Head, body: bytes | memoryview = b"") -> None:
        """Queue a reply; `body` must not change until it is sent."""
        self.stalled_since = time.monotonic()
        self._outgoing.append(memoryview(head._replace(size=len(body)).pack()))
        if len(body):
            self._outgoing.append(memoryview(body).cast("B"))

    def refuse(self, head: Head, refusal: Refusal) -> None:
        """Queue a REFUSED for a request."""
        self.reply(Head(Kind.REFUSED, head.step, head.layer), refusal.pack())

    def send(self) -> bool:
        """Send what can be sent now; return whether that is all. Raises `OSError`."""
        while self._outgoing:
            try:
                sent = self.socket.sendmsg(self._outgoing)
            except BlockingIOError:
                return False
            while sent and self._outgoing:
                first = self._outgoing[0]
                if sent < len(first):
                    self._outgoing[0] = first[sent:]
                    break
                sent -= len(first)
                self._outgoing.popleft()
        if self._finished:
            self.socket.shutdown(socket.SHUT_WR)
        else:
            self._ended()
        return True

    def finish(self, error: MicroserveError) -> None:
        """Queue a last reply, for a connection whose messages cannot be told apart any more."""
        self.refuse(Head(Kind.REFUSED, 0), Refusal(error))
        self._finished = True
        self._into = memoryview(bytearray(1 << 16))

    def close(self) -> None:
        self.socket.close()
        self.buffers.close()

    def _ended(self) -> None:
        self.stalled_since, self.active_at = None, time.monotonic()

    def _room(self, head: Head) -> memoryview:
        """Return where the body of a message goes."""
        if head.kind is Kind.PLAN:
            if head.size > self._limits.plan_bytes:
                raise TooLarge(f"a plan of {head.size} bytes, {self._limits.plan_bytes} at most")
            self._body = bytearray(head.size)
            return memoryview(self._body)
        if head.kind is not Kind.QUERY:
            raise BadRequest(f"a debtor does not send {head.kind.name}")
        most = 0 if self.shared else len(self.buffers.query)
        if head.size > most:
            raise TooLarge(f"queries of {head.size} bytes in a message, {most} at most")
        return self.buffers.query[: head.size]
