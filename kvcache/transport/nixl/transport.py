"""The `nixl` transport: engines on many hosts, over RDMA, TCP or shared memory, as UCX finds.

Each pair of sender and receiver has its own connection, made at the first put: a TCP connection for
the handshake (`kvcache.transport.handshake`), and an agent and a thread on each side.

- Over RDMA, and between processes of one host, a put needs no help of the receiver's process once
  connected. Over TCP the receiver's progress thread takes part, because no hardware does: a put
  into a stopped process waits and fails with `timeout`.
- UCX has neither authentication nor encryption: run it in a trusted network. An engine on a
  loopback address uses the loopback only. `UCX_TLS` and `UCX_NET_DEVICES` select what UCX uses.
- A sender reads some or all of its bytes back and compares them, before it raises the watermark.
"""

from __future__ import annotations

import threading
from functools import partial

from kvcache.errors import Internal, MicroserveError, PeerUnreachable
from kvcache.lease import KVAddress, Put
from kvcache.memory import FlaggedRegion, PoolLayout, Region
from kvcache.transport.base import Registered
from kvcache.transport.endpoint import parse_auto, strip_scheme
from kvcache.transport.network import LOOPBACK, Network
from kvcache.transport.nixl.agent import Agent, load_nixl
from kvcache.transport.nixl.listener import SenderListener
from kvcache.transport.nixl.target import NixlTarget
from kvcache.transport.put import QueuedPut

__all__ = ["NixlTransport"]


class NixlTransport:
    """A `Transport` over NIXL."""

    def __init__(self, epoch: int, *, secret: bytes, network: Network = LOOPBACK) -> None:
        """Prepare to listen for senders.

        Raises: `BadRequest` if NIXL is not installed, or peers cannot reach the address.
        """
        network.check()
        network.configure_ucx()
        load_nixl()
        self._secret = secret
        self._epoch = epoch
        self._network = network
        self._own = Registered(FlaggedRegion)
        self._listener: SenderListener | None = None
        self._lock = threading.Lock()
        self._targets: dict[tuple[str, int], NixlTarget] = {}  # by endpoint and epoch

    def allocate(self, layout: PoolLayout) -> FlaggedRegion:
        return FlaggedRegion.create(layout, self._epoch)

    def register(self, region: Region) -> None:
        flagged = self._own.set(region)
        with Agent(flagged.memory):
            pass  # fail now if NIXL does not work here; also loads it before the first sender
        self._listener = SenderListener(flagged, self._epoch, self._secret, self._network)

    @property
    def region(self) -> FlaggedRegion:
        return self._own.get()

    @property
    def endpoint(self) -> str:
        if self._listener is None:
            raise Internal("no memory is registered with the transport")
        host, port = self._listener.address
        return f"nixl:{host}:{port}"

    def open(self, address: KVAddress, begin: int, join: int | None = None) -> Put:
        host, port = _parse(address.endpoint)
        with self._lock:
            self._drop_ended()
            target = self._targets.get((address.endpoint, address.epoch))
            if target is None:
                like = self.region.layout.of_peer(address.shards)
                target = NixlTarget(self.region, like, self._network.verify)
                self._targets[address.endpoint, address.epoch] = target
                opening = partial(target.open, host, port, self._secret, address.epoch)
                target.worker.submit(opening)
        put = QueuedPut(target, self.region.layout, address, target.worker, join)
        try:
            put.take_claim(begin)
        except MicroserveError:
            with self._lock:
                self._drop_ended()
            raise
        return put

    def close(self) -> None:
        with self._lock:
            targets = list(self._targets.values())
            self._targets.clear()
        for target in targets:
            target.worker.close()
            target.close()
        if self._listener is not None:
            self._listener.close()

    def _drop_ended(self) -> None:
        """Drop the targets of disconnected peers. Puts in flight keep theirs, and its failure."""
        for key, target in list(self._targets.items()):
            if target.ended:
                del self._targets[key]
                target.worker.submit(target.close)


def _parse(endpoint: str) -> tuple[str, int]:
    ways = parse_auto(endpoint)
    far = ways.far if ways is not None else strip_scheme(endpoint, "nixl")
    host, _, port = far.rpartition(":")
    if not host or not port.isdecimal():
        raise PeerUnreachable(f"{endpoint} is not a valid nixl endpoint")
    return host, int(port)
