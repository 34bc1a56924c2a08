"""The receiving side of `nixl`: write rights without locks, and one agent per sender.

A slot's row in the receiver's memory holds its words, then one flag per party. Party 0 is the
owner, the others are senders. NIXL has neither locks nor atomic operations, so a party takes the
write right with loads and stores (as in Dekker's algorithm): it raises its own flag, then reads all
others. If another flag is raised, it lowers its own and tries again later. Of two concurrent
attempts at least one sees the other, so the right is never held twice. The owner never waits
either. Senders that share a claim set their flags to the claim and ignore each other's.

A sender lowers its flag after its writes are complete, which acknowledges them. For a sender that
dies, or whose host vanishes, the receiver lowers the flag, but first closes the agent of this one
sender. After that no byte of it can arrive, not even one still in the network; a broken connection
would not prove this.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from typing import Final

import numpy as np

from kvcache.errors import MicroserveError, NoCapacity
from kvcache.lease import SLOTS, WORDS
from kvcache.memory import LocalRegion, PoolLayout
from kvcache.transport.handshake import accept_handshake, enable_keepalive
from kvcache.transport.nixl.agent import Agent
from kvcache.transport.nixl.remote_region import RemoteRegion
from kvcache.types import SlotIndex

__all__ = ["PARTIES", "ROW", "FlaggedRegion", "SenderListener"]

log = logging.getLogger(__name__)

OWNER: Final = 0
PARTIES: Final = 120  # one owner and up to 119 senders
ROW: Final = WORDS + PARTIES  # 64-bit words of a slot's row
ACCEPT_RETRY_S: Final = 0.1  # after a failed accept, as when file descriptors have run out


class FlaggedRegion(LocalRegion):
    """Private memory with one flag per slot and party."""

    def __init__(self, layout: PoolLayout) -> None:
        super().__init__(layout)
        self.table = np.zeros((SLOTS, ROW), dtype=np.uint64)
        self.slots = self.table[:, :WORDS]
        self.flags = self.table[:, WORDS:]
        self._fence = threading.Lock()
        # (address, bytes) of the table and the pool, for registration with NIXL.
        self.memory = [
            (self.table.ctypes.data, self.table.nbytes),
            (self.pool.data_ptr(), layout.nbytes),
        ]

    def try_acquire_right(self, slot: SlotIndex, share: int = 0) -> bool:
        """Try to take the right for the owner, which never shares it."""
        if not super().try_acquire_right(slot):
            return False
        self.flags[slot, OWNER] = 1
        with self._fence:  # a full memory barrier between the store above and the loads below
            pass
        if self.flags[slot, OWNER + 1 :].any():
            self.release_right(slot)
            return False
        return True

    def release_right(self, slot: SlotIndex) -> None:
        self.flags[slot, OWNER] = 0
        super().release_right(slot)


class SenderListener:
    """Accepts senders. Each has a thread, which sleeps until the sender disconnects."""

    def __init__(
        self,
        region: FlaggedRegion,
        epoch: int,
        secret: bytes,
        host: str,
        port: int,
    ) -> None:
        """Listen at `host`. Raises: `OSError` if that fails."""
        self._region = region
        self._epoch = epoch
        self._secret = secret
        self._lock = threading.Lock()
        self._free = list(range(PARTIES - 1, OWNER, -1))
        self._senders: dict[socket.socket, threading.Thread] = {}
        self._closed = threading.Event()
        self._listener = socket.create_server((host, port), backlog=PARTIES)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._accepting = threading.Thread(target=self._accept, name="nixl-accept", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Disconnect all senders. None writes afterwards."""
        self._closed.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        with self._lock:
            senders = dict(self._senders)
            for connection in senders:
                with contextlib.suppress(OSError):  # the connection is closed already
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in senders.values():
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closed.wait(ACCEPT_RETRY_S):
                    return
                log.warning("a sender could not be accepted: %s", error)
                continue
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="nixl-sender", daemon=True
            )
            with self._lock:
                self._senders[connection] = thread
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        """Serve one sender from its handshake to its end."""
        try:
            _, finish = accept_handshake(connection, self._secret, self._epoch)
            party = self._take_party()
            try:
                with Agent(self._region.memory) as agent:
                    finish(
                        RemoteRegion(
                            metadata=agent.metadata.hex(),
                            table=self._region.memory[0][0],
                            pool=self._region.memory[1][0],
                            pages=self._region.layout.pages,
                            party=party,
                        ).to_json()
                    )
                    enable_keepalive(connection)
                    connection.recv(1)  # blocks until the sender disconnects
            finally:
                self._free_party(party)
        except (MicroserveError, OSError) as error:
            log.info("a sender has disconnected: %s", error)
        finally:
            with self._lock:
                del self._senders[connection]
                connection.close()

    def _take_party(self) -> int:
        with self._lock:
            if not self._free:
                raise NoCapacity(f"{PARTIES - 1} senders are connected, the limit")
            return self._free.pop()

    def _free_party(self, party: int) -> None:
        """Lower the sender's flags. Its agent is closed, so its writes have ended."""
        self._region.flags[:, party] = 0
        with self._lock:
            self._free.append(party)
