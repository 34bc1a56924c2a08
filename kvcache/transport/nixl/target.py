"""The sending side of `nixl`: one connection to one receiver."""

from __future__ import annotations

import ctypes
import logging
import random
import socket
from collections.abc import Mapping
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from kvcache.errors import MicroserveError, PeerUnreachable
from kvcache.lease import WORDS
from kvcache.memory import EXCLUSIVE, ROW, PoolLayout, Region
from kvcache.transport.handshake import (
    HANDSHAKE_TIMEOUT_S,
    enable_keepalive,
    is_closed,
    send_handshake,
)
from kvcache.transport.network import Verify
from kvcache.transport.nixl.agent import Agent
from kvcache.transport.nixl.remote_region import RemoteRegion
from kvcache.transport.runs import Runs
from kvcache.transport.target import HostTarget
from kvcache.transport.worker import Worker
from kvcache.types import SlotIndex

__all__ = ["NixlTarget"]

log = logging.getLogger(__name__)

WORD = 8  # bytes
ROW_BYTES = ROW * WORD
BACK_BYTES: Final = 256 << 10  # read back at a time
SAMPLE_BYTES: Final = 16 << 10  # of a copy, at most, with `sampled`

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class NixlTarget(HostTarget):
    """A `Target` behind a network. All its work runs on the one thread of its worker.

    The first failure closes the connection and aborts all work in flight. Later calls raise the
    same error.
    """

    def __init__(self, source: Region, like: PoolLayout, verify: Verify) -> None:
        """`source` is the sender's region; `like` is the peer's layout except for its number of
        pages. `open` connects. `verify` says which bytes are read back after a copy."""
        self.worker = Worker("put")
        self._source = source
        self._like = like
        self._row = np.zeros(ROW, dtype=np.uint64)  # the slot's row as last read
        self._row_is_fresh = False  # whether it was read under the current write right
        self._out = np.zeros(ROW, dtype=np.uint64)  # words to be written
        self._verify = verify
        self._back = np.zeros(0 if verify == "off" else BACK_BYTES, dtype=np.uint8)  # read back
        self._failure: MicroserveError | None = None
        self._connection: socket.socket | None = None
        self._agent: Agent
        self._remote: RemoteRegion
        self._bases: Runs  # addresses of the two pools, and 0

    def open(self, host: str, port: int, secret: bytes, epoch: int) -> None:
        """Connect. A failure is kept, and all later calls raise it: `PeerUnreachable`, or
        `StaleEpoch` if the peer has restarted."""
        connection: socket.socket | None = None
        pool = self._source.pool
        try:
            connection = socket.create_connection((host, port), HANDSHAKE_TIMEOUT_S)
            self._remote = RemoteRegion.from_json(send_handshake(connection, secret, epoch))
            enable_keepalive(connection)
            self._agent = Agent(
                [
                    (pool.data_ptr(), pool.nbytes),
                    (self._row.ctypes.data, self._row.nbytes),
                    (self._out.ctypes.data, self._out.nbytes),
                    *([(self._back.ctypes.data, self._back.nbytes)] if self._back.size else []),
                ]
            )
            self._agent.connect(bytes.fromhex(self._remote.metadata))
        except (MicroserveError, OSError) as error:
            if isinstance(error, OSError):
                failed = "cannot connect to" if connection is None else "lost the connection to"
                self._failure = PeerUnreachable(f"{failed} {host}:{port}: {error}")
            else:
                self._failure = error
            if connection is not None:
                connection.close()
            return
        self._bases = np.array([pool.data_ptr(), self._remote.pool, 0])
        self._connection = connection

    @property
    def ended(self) -> bool:
        """Whether a call has failed or the peer has disconnected; thread-safe."""
        connection = self._connection
        return self._failure is not None or (connection is not None and is_closed(connection))

    def close(self) -> None:
        """Close the agent, then the connection: no write follows once the peer sees it closed."""
        if self._connection is not None and self._failure is None:
            self._end(PeerUnreachable("the connection was closed"))

    @property
    def layout(self) -> PoolLayout:
        return self._like.with_pages(self._peer.pages)

    def try_acquire_right(self, slot: SlotIndex, share: int = 0) -> bool:
        self._write_words(slot, {WORDS + self._peer.party: share or EXCLUSIVE})
        self._read_row(slot)
        flags = self._row[WORDS:].copy()
        flags[self._peer.party] = 0
        if ((flags != 0) & (flags != share)).any():
            self.release_right(slot)
            return False
        self._row_is_fresh = True
        return True

    def release_right(self, slot: SlotIndex) -> None:
        # After a failure the receiver lowers the flag, once no byte of this sender can arrive.
        if self._failure is None:
            self._write_words(slot, {WORDS + self._peer.party: 0})

    def words(self, slot: SlotIndex) -> npt.NDArray[np.uint64]:
        if not self._row_is_fresh:
            self._read_row(slot)
        self._row_is_fresh = False
        return self._row[:WORDS]

    def store(self, slot: SlotIndex, words: Mapping[int, int]) -> None:
        self._write_words(slot, words)

    def copy(self, runs: Runs) -> None:
        written = runs + self._bases
        self._transfer("WRITE", written)
        if self._verify == "always":
            for run in written.tolist():
                source, target, length = run
                for at in range(0, length, BACK_BYTES):
                    self._compare(source + at, target + at, min(BACK_BYTES, length - at))
        elif self._verify == "sampled":
            source, target, length = written[random.randrange(len(written))].tolist()  # noqa: S311
            size = min(SAMPLE_BYTES, length)
            at = random.randint(0, length - size)  # noqa: S311
            self._compare(source + at, target + at, size)

    def _compare(self, source: int, target: int, size: int) -> None:
        """Read `size` bytes at `target` back. Raises `PeerUnreachable` if they differ."""
        self._transfer("READ", [(self._back.ctypes.data, target, size)])
        if _memcmp(source, self._back.ctypes.data, size):
            error = PeerUnreachable("KV has arrived at the peer with other bytes")
            log.error("%s: %d bytes were compared", error.message, size)
            self._end(error)
            raise error

    def _read_row(self, slot: SlotIndex) -> None:
        self._transfer("READ", [(self._row.ctypes.data, self._at(slot, 0), ROW_BYTES)])

    def _write_words(self, slot: SlotIndex, words: Mapping[int, int]) -> None:
        pieces = []
        for word, value in words.items():
            self._out[word] = value
            pieces.append((self._out.ctypes.data + word * WORD, self._at(slot, word), WORD))
        self._transfer("WRITE", pieces)

    @property
    def _peer(self) -> RemoteRegion:
        if self._failure is not None:
            raise self._failure
        return self._remote

    def _at(self, slot: SlotIndex, word: int) -> int:
        return self._peer.table + (slot * ROW + word) * WORD

    def _transfer(self, direction: Literal["WRITE", "READ"], pieces: npt.ArrayLike) -> None:
        try:
            self._agent.transfer(direction, np.asarray(pieces, dtype=np.uint64), self._check)
        except MicroserveError as error:
            self._end(error)
            raise

    def _check(self) -> None:
        if self._connection is None or is_closed(self._connection):
            raise PeerUnreachable("the peer has disconnected")

    def _end(self, failure: MicroserveError) -> None:
        self._failure = failure
        self._agent.close()
        if self._connection is not None:
            self._connection.close()
