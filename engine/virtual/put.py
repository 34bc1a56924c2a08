"""Puts in virtual time: claims and watermarks as real ones have, and bytes without contents."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt

from engine.protocol import BadRange, LeaseExpired, MicroserveError, PeerUnreachable, StaleEpoch
from engine.virtual.compute import Compute
from engine.virtual.network import Link, Transfer, VirtualNetwork
from kvcache.lease import CLAIM, LANDED, NONCE, RENEWALS, ControlSlots, KVAddress, PageTable
from kvcache.types import TokenPos

__all__ = ["Endpoint", "Puts", "VirtualPut"]

_claims = count(1)


@dataclass(slots=True, eq=False)
class Endpoint:
    """What peers reach of an engine: its control slots, over its link, and its device."""

    link: Link
    epoch: int
    slots: ControlSlots
    landed: Callable[[], object]  # called after each change of a watermark
    compute: Compute
    alive: bool = True


@dataclass(slots=True)
class _Write:
    """Bytes to carry, not before a time (s) and with a delay of their own (s)."""

    size: float
    ready: float
    delay: float


class Puts:
    """Opens the puts of one engine (`kvcache.lease.sender.PutOpener`)."""

    def __init__(
        self,
        network: VirtualNetwork,
        peers: dict[str, Endpoint],
        own: Endpoint,
        *,
        layers: int,
        token_bytes: float,
        before_end: Callable[[], object],
    ) -> None:
        """`token_bytes` are those of one token in one of `layers` layers.

        `peers` are all engines that can be reached, by their endpoints. `before_end` is called
        before a put's end takes effect: pages become free, and the stepper hears of it.
        """
        self.network = network
        self.own = own
        self.layers = layers
        self.token_bytes = token_bytes
        self.before_end = before_end
        self._peers = peers

    def open(self, address: KVAddress, begin: int) -> VirtualPut:
        """Claim the lease and start a put at `begin`; raises as `Transport.open`."""
        peer = self._peers.get(address.endpoint)
        if peer is None or not peer.alive:
            raise PeerUnreachable(f"no engine is reachable at {address.endpoint}")
        if peer.epoch != address.epoch:
            raise StaleEpoch("the engine was restarted since the address was made")
        words = peer.slots.slots[address.slot]
        if int(words[NONCE]) != address.nonce:
            raise LeaseExpired("the receive lease has ended", param="kv_addr")
        if begin != int(words[LANDED]):
            landed = int(words[LANDED])
            raise BadRange(f"begin is {begin}, but {landed} tokens have landed", param="begin")
        put = VirtualPut(self, peer, address, next(_claims))
        words[CLAIM] = put.claim
        return put


class VirtualPut:
    """A `kvcache.lease.Put` whose bytes take the time of the links.

    Its work is done in the order of the calls: a write ends, then the next one starts.
    """

    def __init__(self, puts: Puts, peer: Endpoint, address: KVAddress, claim: int) -> None:
        self.bytes_sent = 0
        self.copy_s = self.began = 0.0  # nobody asks: its time is known
        self.claim = claim
        self._puts = puts
        self._peer = peer
        self._address = address
        self._loop = asyncio.get_running_loop()
        self._queue: deque[_Write | TokenPos | Future[None] | None] = deque()  # None: renew
        self._busy = False  # something will call `_run`
        self._transfer: Transfer | None = None
        self._failure: MicroserveError | None = None
        self._cancelled = False

    def write(self, layers: range, pages: PageTable, begin: TokenPos, end: TokenPos) -> None:
        self._add(self._sized((end - begin) * len(layers), self._loop.time(), len(layers)))

    def write_step(self, tokens: int, began: float, seconds: float) -> None:
        """Put `tokens` tokens that a step from `began` on computes layer by layer.

        A layer is sent while the next ones are computed. All but the last are one write that is
        ready with the first layer: with layers of equal size and time, it ends when the last but
        one would (the microserving paper's overlap, Table 3).
        """
        layers = self._puts.layers
        if layers > 1:
            self._add(self._sized(tokens * (layers - 1), began + seconds / layers, layers - 1))
        self._add(self._sized(tokens, began + seconds, 1))

    def _sized(self, layer_tokens: int, ready: float, layers: int) -> _Write:
        delay = layers * self._puts.own.link.latency.layer_s
        return _Write(layer_tokens * self._puts.token_bytes, ready, delay)

    def signal(self, landed: TokenPos) -> None:
        self._add(landed)

    def renew(self) -> None:
        self._add(None)

    @property
    def failed(self) -> bool:
        return self._failure is not None

    def cancel(self) -> None:
        self._cancelled = True
        self._stop()

    def fail(self, failure: MicroserveError) -> None:
        """End the put with an error: one of its engines has died."""
        self._failure = self._failure or failure
        self._stop()

    def close(self) -> Future[None]:
        done: Future[None] = Future()
        self._add(done)
        return done

    def _stop(self) -> None:
        if self._transfer is not None:
            self._puts.network.stop(self._transfer)
            self._transfer = None
            self._again()

    def _add(self, entry: _Write | TokenPos | Future[None] | None) -> None:
        self._queue.append(entry)
        if not self._busy:
            self._again()

    def _again(self) -> None:
        self._busy = True
        self._loop.call_soon(self._run)

    def _run(self) -> None:
        """Do what can be done now; `_busy` says whether something is awaited at the end."""
        while self._queue:
            entry = self._queue.popleft()
            if isinstance(entry, Future):
                self._complete(entry)
            elif self._cancelled or self._failure is not None:
                continue
            elif isinstance(entry, _Write):
                if self._start(entry):
                    return
            else:
                self._signal(entry)
        self._busy = False

    def _start(self, write: _Write) -> bool:
        """Start a write; return False if that has failed."""
        try:
            self._check()
        except MicroserveError as error:
            self._failure = error
            return False
        begin = max(write.ready, self._loop.time()) + write.delay
        self.bytes_sent += round(write.size)
        self._loop.call_at(begin, self._carry, write.size)
        return True

    def _carry(self, size: float) -> None:
        if self._cancelled or self._failure is not None or not self._puts.own.alive:
            self._again()
            return
        network, source = self._puts.network, self._puts.own.link
        self._transfer = network.start(source, self._peer.link, size, self._carried)

    def _carried(self) -> None:
        self._transfer = None
        self._run()

    def _signal(self, landed: TokenPos | None) -> None:
        try:
            words = self._check()
        except MicroserveError as error:
            self._failure = error
            return
        if landed is not None:
            words[LANDED] = landed
        words[RENEWALS] += 1
        self._peer.landed()

    def _check(self) -> npt.NDArray[np.uint64]:
        """Return the lease's words. Raises if this put may not write any more."""
        if not self._peer.alive:
            raise PeerUnreachable(f"no engine is reachable at {self._address.endpoint}")
        words: npt.NDArray[np.uint64] = self._peer.slots.slots[self._address.slot]
        if int(words[NONCE]) != self._address.nonce:
            raise LeaseExpired("the receive lease has ended", param="kv_addr")
        if int(words[CLAIM]) != self.claim:
            raise LeaseExpired("another sender has taken over the lease")
        return words

    def _complete(self, done: Future[None]) -> None:
        if not done.set_running_or_notify_cancel():
            return
        self._puts.before_end()
        if self._failure is not None:
            done.set_exception(self._failure)
        else:
            done.set_result(None)
