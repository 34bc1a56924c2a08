"""A debtor without a `RemoteAttention`."""

from __future__ import annotations

from creditors import EPOCH, LendingEngine, endpoint, identity

from kvcache.remote_attention import AttentionShape
from kvcache.remote_attention.debtor.entry import enter
from kvcache.remote_attention.exchange import HEAD, Head, Kind, Refusal


class Raw:
    """A debtor that sends what it likes."""

    def __init__(
        self, engine: LendingEngine, shape: AttentionShape, kind: str = "tcp", name: str = "raw"
    ) -> None:
        (where,) = endpoint(engine.creditor.endpoints, kind)
        self.socket, self.limits, self.buffers = enter(where, EPOCH, identity(name), shape, 20.0)
        self.socket.settimeout(20)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self.buffers.close()

    def send(
        self, kind: Kind, step: int = 1, layer: int = 0, body: bytes = b"", size: int | None = None
    ) -> None:
        head = Head(kind, step, layer, len(body) if size is None else size)
        self.socket.sendall(head.pack() + body)

    def reply(self) -> tuple[Head, bytes]:
        head = Head.unpack(self._read(HEAD.size))
        return head, self._read(head.size)

    def refusal(self) -> Refusal:
        head, body = self.reply()
        assert head.kind is Kind.REFUSED
        return Refusal.unpack(body)

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += (part := self.socket.recv(size - len(data)))
            assert part
        return data
