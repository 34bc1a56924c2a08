"""The peer process of `shm_peer` over NIXL, at another loopback address or in another network."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping
from pathlib import Path

from kv_helpers import make_cache
from shm_peer import Commands

from kvcache.lease.address import KVAddress
from kvcache.memory.layout import KVLayout
from kvcache.transport import Transport
from kvcache.transport.network import Network
from kvcache.transport.nixl.target import NixlTarget
from kvcache.transport.nixl.transport import NixlTransport
from kvcache.types import LeaseId

CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x00020000
MS_REC, MS_SLAVE, MNT_DETACH = 0x4000, 0x80000, 2


class NixlCommands(Commands):
    target = NixlTarget

    def __init__(
        self,
        host: str,
        environment: Mapping[str, str],
        port: int,
        namespace: str,
        name: str,
        epoch: int,
    ) -> None:
        os.environ.update(environment)
        if namespace:
            enter(namespace)
        self._where = host, port
        super().__init__(name, epoch)

    def transport(self, epoch: int) -> Transport:
        host, port = self._where
        return NixlTransport(epoch, secret=b"wire", network=Network(host, range(port, port + 1)))

    def become_big(self, layout: KVLayout) -> None:
        """Start again with another layout."""
        self.cache.close()
        self.cache = make_cache(self.transport(1), layout, name="big")

    def prep_recv_big(self, end: int) -> tuple[str, str]:
        lease, address = self.cache.prep_recv("r", list(range(end + 1)), end, 0, 60.0)
        return lease.lease_id, address

    def touched(self) -> bool:
        return bool(self.cache.store.pool.count_nonzero())

    def written_after_quarantine(self, lease_id: str) -> int:
        """End a lease; return how many values change after its pages are free."""
        self.cache.release(LeaseId(lease_id))
        while self.cache.page_use().quarantined:
            self.cache.sweep()
            time.sleep(0)  # let other threads run
        # Compare a part of each page, which is fast enough to miss no change.
        sample = self.cache.store.pool[:, :, :, 0, 0, 0]
        before = sample.clone()
        time.sleep(0.3)
        self.cache.check_integrity()
        return int((sample != before).sum())

    def flood(self, address: str, end: int) -> str:
        """Put different values into all layers repeatedly, until killed."""
        put = self.cache.open_put(address, list(range(end + 1)), 0, end)
        pages = KVAddress.verify(address, b"secret").pages()  # the same numbers here
        while not put.failed:
            self.cache.store.pool[:, 1:, :, 0, 0, 0] += 1
            put.write(range(self.cache.layout.layers), pages, 0, end)
            put.close().result()
        return "stopped"


def enter(namespace: str) -> None:
    """Move this single-threaded process into a network namespace, as `ip netns exec` does.

    Mounts the namespace's /sys, where UCX looks for networks.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *args: object) -> None:
        if getattr(libc, name)(*args):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}: {name}")

    handle = os.open(Path("/run/netns") / namespace, os.O_RDONLY)
    call("setns", handle, CLONE_NEWNET)
    os.close(handle)
    call("unshare", CLONE_NEWNS)
    call("mount", b"none", b"/", None, MS_REC | MS_SLAVE, None)
    call("umount2", b"/sys", MNT_DETACH)
    call("mount", b"sysfs", b"/sys", b"sysfs", 0, None)
