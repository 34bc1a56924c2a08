"""The receiving side of `nixl`: one agent per sender.

Senders raise flags in the receiver's memory (`kvcache.memory.flagged_region`).

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

from kvcache.errors import MicroserveError, NoCapacity
from kvcache.memory import PARTIES, FlaggedRegion
from kvcache.transport.handshake import accept_handshake, enable_keepalive
from kvcache.transport.network import Network, listen
from kvcache.transport.nixl.agent import Agent
from kvcache.transport.nixl.remote_region import RemoteRegion

__all__ = ["SenderListener"]

log = logging.getLogger(__name__)

SWEEP_S: Final = 0.5  # between two looks for flags of killed processes of this host
ACCEPT_RETRY_S: Final = 0.1  # after a failed accept, as when file descriptors have run out


class SenderListener:
    """Accepts senders. Each has a thread, which sleeps until the sender disconnects."""

    def __init__(
        self,
        region: FlaggedRegion,
        epoch: int,
        secret: bytes,
        network: Network,
    ) -> None:
        """Listen for senders. Raises: `OSError` if that fails."""
        self._region = region
        self._epoch = epoch
        self._secret = secret
        self._lock = threading.Lock()
        self._free = list(range(PARTIES - 1, 0, -1))
        self._senders: dict[socket.socket, threading.Thread] = {}
        self._closed = threading.Event()
        self._listener = listen(network.host, network.ports, backlog=PARTIES)
        self._listener.settimeout(SWEEP_S)
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
            except TimeoutError:
                self._region.lower_stale()
                continue
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
