"""The links between virtual engines: bandwidth, latency, and contention.

Each engine has a link that carries so many bytes per second out, and as many in. Transfers share
links max-min fairly: no transfer can get more without taking from one that has no more than it.
That is what fair queueing, and nearly what TCP and InfiniBand's credits, do on a network whose core
is not the bottleneck.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.latency import PutLatency

__all__ = ["Link", "Transfer", "VirtualNetwork"]

DONE_BYTES = 1e-3  # what rounding may leave of a transfer


class Link:
    """One engine's connection to the network, with the transfers in either direction."""

    __slots__ = ("incoming", "latency", "name", "outgoing", "sent")

    def __init__(self, latency: PutLatency, name: str = "") -> None:
        self.latency = latency
        self.name = name
        self.sent = 0.0  # bytes, since the start
        self.outgoing: dict[Transfer, None] = {}
        self.incoming: dict[Transfer, None] = {}


class Transfer:
    """Bytes on their way from one link to another; `done` is called when the last one is there."""

    __slots__ = ("began", "done", "left", "rate", "size", "source", "target")

    def __init__(
        self, source: Link, target: Link, size: float, began: float, done: Callable[[], object]
    ) -> None:
        self.source = source
        self.target = target
        self.size = size
        self.began = began
        self.left = size
        self.done = done
        self.rate = 0.0  # bytes per second


class VirtualNetwork:
    """All transfers of one event loop, in the loop's time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transfers: dict[Transfer, None] = {}  # in the order of their starts
        self._at = self._loop.time()  # until when `left` is right
        self._timer: asyncio.TimerHandle | None = None
        self.bytes = 0.0  # carried since the start
        self.on_end: Callable[[Transfer], object] | None = None  # of a transfer that is through

    def start(
        self, source: Link, target: Link, size: float, done: Callable[[], object]
    ) -> Transfer:
        """Start a transfer of `size` bytes; `done` is called at its end, by the event loop."""
        self._advance()
        transfer = Transfer(source, target, size, self._at, done)
        self._transfers[transfer] = None
        source.outgoing[transfer] = None
        target.incoming[transfer] = None
        self._share()
        return transfer

    @property
    def now(self) -> float:
        """The loop's time."""
        return self._loop.time()

    def stop(self, transfer: Transfer) -> None:
        """Stop a transfer, whose `done` is not called then. Idempotent."""
        if transfer in self._transfers:
            self._advance()
            self._remove(transfer)
            self._share()

    def _remove(self, transfer: Transfer) -> None:
        del self._transfers[transfer]
        del transfer.source.outgoing[transfer]
        del transfer.target.incoming[transfer]

    def _advance(self) -> None:
        """Bring `left` up to date."""
        now = self._loop.time()
        passed, self._at = now - self._at, now
        if passed > 0:
            for transfer in self._transfers:
                carried = min(transfer.rate * passed, transfer.left)
                transfer.left -= carried
                transfer.source.sent += carried
                self.bytes += carried

    def _share(self) -> None:
        """Divide the links among the transfers, and wait for the one that ends first."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._transfers:
            return
        self._fill()
        wait = min(transfer.left / transfer.rate for transfer in self._transfers)
        self._timer = self._loop.call_at(self._at + wait, self._end)

    def _fill(self) -> None:
        """Set max-min fair rates (progressive filling).

        Again and again, the direction of a link with the least for each of its transfers gives
        them that much.
        """
        open_ = dict(self._transfers)
        room: dict[tuple[Link, bool], list[float]] = {}  # bytes per second, transfers
        for transfer in open_:
            for end in ((transfer.source, True), (transfer.target, False)):
                room.setdefault(end, [end[0].latency.bandwidth, 0])[1] += 1
        while open_:
            (link, out), (left, count) = min(
                ((end, share) for end, share in room.items() if share[1]),
                key=lambda item: item[1][0] / item[1][1],
            )
            rate = left / count
            for transfer in list(link.outgoing if out else link.incoming):
                if transfer in open_:
                    del open_[transfer]
                    transfer.rate = rate
                    for end in ((transfer.source, True), (transfer.target, False)):
                        room[end][0] -= rate
                        room[end][1] -= 1

    def _end(self) -> None:
        """End the transfers that are through."""
        self._timer = None
        self._advance()
        over = [
            transfer
            for transfer in self._transfers
            if transfer.left <= max(DONE_BYTES, transfer.rate * 1e-9)
        ]
        for transfer in over:
            transfer.source.sent += transfer.left
            self.bytes += transfer.left
            self._remove(transfer)
        self._share()
        for transfer in over:
            if self.on_end is not None:
                self.on_end(transfer)
            transfer.done()
