"""A creditor that answers what it is told to."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

from creditors import identity, small_limits

from kvcache.remote_attention import AttentionShape
from kvcache.remote_attention.creditor.admission import admit
from kvcache.remote_attention.creditor.debtor_connection import DebtorConnection
from kvcache.remote_attention.exchange import HEAD, Head, Kind, listen_tcp
from kvcache.types import EngineId

Reply = tuple[Kind, dict[str, int], bytes]  # the body in one piece


class FakeCreditor:
    """Answers each request with the next of its replies: a kind, changes of the head, a body.

    Sends them byte by byte if it dribbles.
    """

    def __init__(
        self, name: str, shape: AttentionShape, replies: list[Reply], dribble_s: float = 0.0
    ) -> None:
        self.name = EngineId(name)
        self.replies, self._shape = replies, shape
        self._listener, self.endpoint = listen_tcp("127.0.0.1")
        self._done, self._dribble_s = threading.Event(), dribble_s
        self._connection: DebtorConnection
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        accepted, _ = self._listener.accept()
        self._connection = admit(accepted, identity(self.name), self._shape, small_limits())
        connection = self._connection.socket
        connection.settimeout(20)
        with suppress(EOFError, OSError):
            self._answer(connection)
        self._done.wait(20)

    def _answer(self, connection: socket.socket) -> None:
        while self.replies:
            head = Head.unpack(self._read(HEAD.size))
            self._read(head.size)
            kind, changes, body = self.replies.pop(0)
            reply = Head(kind, head.step, head.layer, len(body))._replace(**changes)
            data = reply.pack() + body
            if not self._dribble_s:
                connection.sendall(data)
                continue
            for at in range(len(data)):
                connection.sendall(data[at : at + 1])
                if self._done.wait(self._dribble_s):
                    return

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += (part := self._connection.socket.recv(size - len(data)))
            if not part:
                raise EOFError("the debtor has disconnected")
        return data

    def close(self) -> None:
        self._done.set()
        self._thread.join(20)
        self._connection.close()
        self._listener.close()
