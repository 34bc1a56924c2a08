"""Handshakes with debtors that have connected, each in a thread of its own."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from kvcache.errors import MicroserveError
from kvcache.lease import Identity
from kvcache.remote_attention.creditor.admission import admit
from kvcache.remote_attention.creditor.debtor_connection import DebtorConnection
from kvcache.remote_attention.exchange import AttentionShape, Limits

__all__ = ["Reception"]

log = logging.getLogger(__name__)

HANDSHAKES: Final = 64  # under way at once


class Reception:
    """Admits debtors, and hands them over. Thread-safe.

    Anybody who reaches the listener can begin a handshake and be silent. So where too many are
    under way, the oldest one ends: that of a debtor takes milliseconds.
    """

    def __init__(
        self,
        identity: Identity,
        shape: AttentionShape,
        limits: Limits,
        admitted: Callable[[DebtorConnection], None],
    ) -> None:
        """`admitted` is called by the thread of a handshake, and not after `close`."""
        self._identity, self._shape, self._limits = identity, shape, limits
        self._admitted = admitted
        self._lock = threading.Lock()
        self._shaking: dict[socket.socket, None] = {}  # the oldest first
        self._closed = False

    def begin(self, connection: socket.socket) -> None:
        """Shake hands with who has connected."""
        with self._lock:
            while len(self._shaking) >= HANDSHAKES:
                oldest = next(iter(self._shaking))
                del self._shaking[oldest]
                _wake(oldest)
            self._shaking[connection] = None
        thread = threading.Thread(
            target=self._shake_hands, args=(connection,), name="creditor-admit", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # no more threads
            log.warning("a debtor could not be accepted: %s", error)
            with self._lock:
                self._shaking.pop(connection, None)
            connection.close()

    def close(self) -> None:
        """End the handshakes under way."""
        with self._lock:
            self._closed = True
            for connection in self._shaking:
                _wake(connection)
            self._shaking.clear()

    def _shake_hands(self, connection: socket.socket) -> None:
        admitted: DebtorConnection | None = None
        try:
            admitted = admit(connection, self._identity, self._shape, self._limits)
        except (MicroserveError, OSError) as error:
            log.info("a debtor was not admitted: %s", error)
        except Exception:
            log.exception("a debtor was not admitted")
        with self._lock:
            self._shaking.pop(connection, None)
            if admitted is not None and not self._closed:
                self._admitted(admitted)
                return
        if admitted is not None:
            admitted.close()
        connection.close()


def _wake(connection: socket.socket) -> None:
    """Have the thread of a handshake find its connection closed, and close it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
