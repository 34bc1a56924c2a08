"""The sending side of `nixl`: one connection to one receiver."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from kvcache.errors import MicroserveError, PeerUnreachable
from kvcache.lease.control_slots import WORDS
from kvcache.memory.layout import KVLayout
from kvcache.memory.region import Region
from kvcache.transport.nixl.agent import Agent
from kvcache.transport.nixl.hello import HELLO_TIMEOUT_S, Welcome, is_over, meet, watch
from kvcache.transport.nixl.receiver import ROW
from kvcache.transport.runs import Runs
from kvcache.transport.target import HostTarget
from kvcache.transport.worker import Worker

__all__ = ["Link"]

WORD = 8  # bytes
ROW_BYTES = ROW * WORD
ALONE: Final = 1  # the flag of who has a right alone; else it is the number that they share


class Link(HostTarget):
    """A `Target` behind a network. All its work is done by its worker, which has one thread.

    The first failure ends it, and with it whatever is under way; all later calls raise the same.
    """

    def __init__(self, source: Region, like: KVLayout) -> None:
        """`source` is ours; `like` gives all of the peer's layout but the number of pages.

        Nothing is connected before `open`.
        """
        self.worker = Worker("put")
        self._source = source
        self._like = like
        self._row = np.zeros(ROW, dtype=np.uint64)  # the slot's, as last read
        self._row_is_new = False  # whether it has been read for who has the right now
        self._out = np.zeros(ROW, dtype=np.uint64)  # words on their way out
        self._failure: MicroserveError | None = None
        self._connection: socket.socket | None = None
        self._agent: Agent
        self._welcome: Welcome
        self._bases: Runs  # where the two pools begin

    def open(self, host: str, port: int, secret: bytes, epoch: int) -> None:
        """Connect. What goes wrong is raised by all later calls: `PeerUnreachable`, and
        `StaleEpoch` if it is another life of the peer."""
        connection: socket.socket | None = None
        pool = self._source.pool
        try:
            connection = socket.create_connection((host, port), HELLO_TIMEOUT_S)
            self._welcome = meet(connection, secret, epoch)
            watch(connection)
            self._agent = Agent(
                [
                    (pool.data_ptr(), pool.nbytes),
                    (self._row.ctypes.data, self._row.nbytes),
                    (self._out.ctypes.data, self._out.nbytes),
                ]
            )
            self._agent.connect(bytes.fromhex(self._welcome.metadata))
        except (MicroserveError, OSError) as error:
            if isinstance(error, OSError):
                what = "nobody listens at" if connection is None else "nobody stays at"
                self._failure = PeerUnreachable(f"{what} {host}:{port}: {error}")
            else:
                self._failure = error
            if connection is not None:
                connection.close()
            return
        self._bases = np.array([pool.data_ptr(), self._welcome.pool, 0])
        self._connection = connection

    @property
    def ended(self) -> bool:
        """Whether something has failed or the peer is gone; any thread may ask."""
        connection = self._connection
        return self._failure is not None or (connection is not None and is_over(connection))

    def close(self) -> None:
        """Let go of the peer, our writes first: when it sees the connection end, none follows."""
        if self._connection is not None and self._failure is None:
            self._end(PeerUnreachable("the link was closed"))

    @property
    def layout(self) -> KVLayout:
        return replace(self._like, pages=self._peer.pages)

    def try_right(self, slot: int, share: int = 0) -> bool:
        self._write_words(slot, {WORDS + self._peer.party: share or ALONE})
        self._read_row(slot)
        flags = self._row[WORDS:].copy()
        flags[self._peer.party] = 0
        if ((flags != 0) & (flags != share)).any():
            self.drop_right(slot)
            return False
        self._row_is_new = True
        return True

    def drop_right(self, slot: int) -> None:
        # After a failure the receiver does it, once nothing of ours can arrive any more.
        if self._failure is None:
            self._write_words(slot, {WORDS + self._peer.party: 0})

    def words(self, slot: int) -> npt.NDArray[np.uint64]:
        if not self._row_is_new:
            self._read_row(slot)
        self._row_is_new = False
        return self._row[:WORDS]

    def store(self, slot: int, words: Mapping[int, int]) -> None:
        self._write_words(slot, words)

    def copy(self, runs: Runs) -> None:
        self._transfer("WRITE", runs + self._bases)

    def _read_row(self, slot: int) -> None:
        self._transfer("READ", [(self._row.ctypes.data, self._at(slot, 0), ROW_BYTES)])

    def _write_words(self, slot: int, words: Mapping[int, int]) -> None:
        pieces = []
        for word, value in words.items():
            self._out[word] = value
            pieces.append((self._out.ctypes.data + word * WORD, self._at(slot, word), WORD))
        self._transfer("WRITE", pieces)

    @property
    def _peer(self) -> Welcome:
        if self._failure is not None:
            raise self._failure
        return self._welcome

    def _at(self, slot: int, word: int) -> int:
        return self._peer.table + (slot * ROW + word) * WORD

    def _transfer(self, direction: Literal["WRITE", "READ"], pieces: npt.ArrayLike) -> None:
        try:
            self._agent.transfer(direction, np.asarray(pieces, dtype=np.uint64), self._check)
        except MicroserveError as error:
            self._end(error)
            raise

    def _check(self) -> None:
        if self._connection is None or is_over(self._connection):
            raise PeerUnreachable("the peer is gone")

    def _end(self, failure: MicroserveError) -> None:
        self._failure = failure
        self._agent.close()
        if self._connection is not None:
            self._connection.close()
