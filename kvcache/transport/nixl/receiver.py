"""The receiving side of `nixl`: the write right without locks, and one agent for each sender.

A slot's row in the receiver's memory has its words and then a flag for each party; party 0 is the
owner, the others are senders. NIXL has neither locks nor atomic operations, so the right is taken
with loads and stores: raise your own flag, then read all others; if another is up, lower your own
and try again later. Of two that try at a time at least one sees the other, so it is never held
twice. The owner, too, only tries. Senders that share a claim raise their flags to its number, and
do not mind each other's.

A sender lowers its flag after its writes are complete: that is its acknowledgement. For a sender
that dies, or whose host vanishes, the receiver does it, but first closes the agent that is there
for this sender alone. Then no byte of it can arrive any more, not even one that the network still
had; that its connection broke would not prove this.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from typing import Final

import numpy as np

from kvcache.errors import MicroserveError, NoCapacity
from kvcache.lease.control_slots import SLOTS, WORDS
from kvcache.memory.layout import KVLayout
from kvcache.memory.region import LocalRegion
from kvcache.transport.nixl.agent import Agent
from kvcache.transport.nixl.hello import Welcome, greet, watch

__all__ = ["PARTIES", "ROW", "FlaggedRegion", "Receiver"]

log = logging.getLogger(__name__)

OWNER: Final = 0
PARTIES: Final = 120  # the owner and the senders that can be connected at a time
ROW: Final = WORDS + PARTIES  # words
ACCEPT_AGAIN_S: Final = 0.1  # after a failure, as where this process has no descriptor left


class FlaggedRegion(LocalRegion):
    """Private memory with a flag per slot and party."""

    def __init__(self, layout: KVLayout) -> None:
        super().__init__(layout)
        self.table = np.zeros((SLOTS, ROW), dtype=np.uint64)
        self.slots = self.table[:, :WORDS]
        self.flags = self.table[:, WORDS:]
        self._fence = threading.Lock()
        # For NIXL: address and size of the table and of the pool.
        self.memory = [
            (self.table.ctypes.data, self.table.nbytes),
            (self.pool.data_ptr(), layout.nbytes),
        ]

    def try_right(self, slot: int, share: int = 0) -> bool:
        """For the owner, who never shares."""
        if not super().try_right(slot):
            return False
        self.flags[slot, OWNER] = 1
        with self._fence:  # the store above is seen by all before the loads below
            pass
        if self.flags[slot, OWNER + 1 :].any():
            self.drop_right(slot)
            return False
        return True

    def drop_right(self, slot: int) -> None:
        self.flags[slot, OWNER] = 0
        super().drop_right(slot)


class Receiver:
    """Accepts senders. Each has a thread here, which sleeps until the sender goes."""

    def __init__(
        self,
        region: FlaggedRegion,
        epoch: int,
        secret: bytes,
        host: str,
        port: int,
    ) -> None:
        """Listen. Raises `OSError` if that is not possible."""
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
        """Turn all senders out; nothing is written afterwards."""
        self._closed.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        with self._lock:
            senders = dict(self._senders)
            for connection in senders:
                with contextlib.suppress(OSError):  # it is down already
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in senders.values():
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closed.wait(ACCEPT_AGAIN_S):
                    return
                log.warning("a sender could not be accepted: %s", error)
                continue
            thread = threading.Thread(
                target=self._attend, args=(connection,), name="nixl-sender", daemon=True
            )
            with self._lock:
                self._senders[connection] = thread
            thread.start()

    def _attend(self, connection: socket.socket) -> None:
        """One sender, from its hello to its end."""
        try:
            welcome = greet(connection, self._secret, self._epoch)
            party = self._enter()
            try:
                with Agent(self._region.memory) as agent:
                    welcome(
                        Welcome(
                            metadata=agent.metadata.hex(),
                            table=self._region.memory[0][0],
                            pool=self._region.memory[1][0],
                            pages=self._region.pool.shape[1],
                            party=party,
                        )
                    )
                    watch(connection)
                    connection.recv(1)  # returns or fails when the sender is gone
            finally:
                self._leave(party)
        except (MicroserveError, OSError) as error:
            log.info("a sender is gone: %s", error)
        finally:
            with self._lock:
                del self._senders[connection]
                connection.close()

    def _enter(self) -> int:
        with self._lock:
            if not self._free:
                raise NoCapacity(f"{PARTIES - 1} senders are connected")
            return self._free.pop()

    def _leave(self, party: int) -> None:
        """After its agent: the sender's writes have ended, so its flags fall."""
        self._region.flags[:, party] = 0
        with self._lock:
            self._free.append(party)
