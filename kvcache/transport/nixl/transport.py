"""`nixl`: engines on many hosts, over what UCX finds between them: RDMA, TCP, shared memory.

Each pair of sender and receiver has a connection of its own, made at the first put: a TCP
connection to meet on (`nixl_hello`), an agent on either side, and a thread on either side.

- Over RDMA, and between processes of one host, a put needs nothing of the receiver's process once
  the connection stands. Over TCP the receiver's progress thread takes part, as there is no hardware
  to do it: a put into a stopped process waits, and fails with `timeout`.
- UCX moves bytes without authentication or encryption: run it in a network that you trust. An
  engine on a loopback address stays on it. `UCX_TLS` and `UCX_NET_DEVICES` choose what UCX uses.
"""

from __future__ import annotations

import ipaddress
import threading
from dataclasses import replace
from functools import partial

from kvcache.errors import BadRequest, MicroserveError, PeerUnreachable
from kvcache.lease.address import KVAddress
from kvcache.lease.put import Put
from kvcache.memory.layout import KVLayout
from kvcache.transport.base import strip_scheme
from kvcache.transport.nixl.agent import Agent, stay_on_loopback
from kvcache.transport.nixl.receiver import FlaggedRegion, Receiver
from kvcache.transport.nixl.sender import Link
from kvcache.transport.put import QueuedPut

__all__ = ["NixlTransport"]


class NixlTransport:
    """A `Transport` over NIXL."""

    def __init__(
        self, layout: KVLayout, epoch: int, *, secret: bytes, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        """Listen for senders at `host`, which peers must be able to reach.

        Raises `BadRequest` without the library or for an address that means any, `OSError` if it
        cannot be listened on.
        """
        if _means_any(host):
            raise BadRequest(f"{host} is no address that peers can reach", param="host")
        if _is_loopback(host):
            stay_on_loopback()
        self._secret = secret
        self._region = FlaggedRegion(layout)
        with Agent(self._region.memory):
            pass  # if NIXL does not work here, say so now, and spare the first sender the loading
        self.region = self._region
        self._receiver = Receiver(self._region, epoch, secret, host, port)
        self._lock = threading.Lock()
        self._links: dict[tuple[str, int], Link] = {}  # by endpoint and epoch

    @property
    def endpoint(self) -> str:
        host, port = self._receiver.address
        return f"nixl:{host}:{port}"

    def open(self, address: KVAddress, begin: int, join: int | None = None) -> Put:
        host, port = _parse(address.endpoint)
        with self._lock:
            self._forget_dead()
            link = self._links.get((address.endpoint, address.epoch))
            if link is None:
                like = replace(self._region.layout, shard=address.shard)
                link = Link(self._region, like)
                self._links[address.endpoint, address.epoch] = link
                opening = partial(link.open, host, port, self._secret, address.epoch)
                link.worker.submit(opening)
        put = QueuedPut(link, self._region.layout, address, link.worker, join)
        try:
            put.take_claim(begin)
        except MicroserveError:
            with self._lock:
                self._forget_dead()
            raise
        return put

    def close(self) -> None:
        with self._lock:
            links = list(self._links.values())
            self._links.clear()
        for link in links:
            link.worker.close()
            link.close()
        self._receiver.close()

    def _forget_dead(self) -> None:
        """Let go of peers that are gone. Puts still have the link, and their failure from it."""
        for key, link in list(self._links.items()):
            if link.ended:
                del self._links[key]
                link.worker.submit(link.close)


def _parse(endpoint: str) -> tuple[str, int]:
    host, _, port = strip_scheme(endpoint, "nixl").rpartition(":")
    if not host or not port.isdecimal():
        raise PeerUnreachable(f"{endpoint} is no endpoint of nixl")
    return host, int(port)


def _means_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return not host


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
