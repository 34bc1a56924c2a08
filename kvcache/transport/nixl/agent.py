"""NIXL, as much of it as a put needs: memory that one peer may write, transfers into a peer's.

NIXL's own Python class is passed by for the module below it, since it makes the progress thread
poll without a pause: a core per agent. With a delay that thread sleeps until the network wakes it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import secrets
import time
from collections.abc import Callable, Sequence
from types import ModuleType, TracebackType
from typing import Any, Final, Literal, Self

import numpy as np
import numpy.typing as npt

from kvcache.errors import BadRequest, Internal, PeerUnreachable, Timeout

__all__ = ["Agent", "load_nixl", "stay_on_loopback"]

PACKAGES: Final = ("nixl_cu12", "nixl_cu13")  # either works without a GPU
PROGRESS_DELAY_US: Final = 100_000  # the progress thread's longest sleep; traffic wakes it
TRANSFER_TIMEOUT_S = 10.0  # one transfer is what one hold copies, or a few words
SPINS: Final = 50  # looks at a transfer before the first pause; each is about a microsecond
PAUSE_S: Final = 50e-6
STALL_S: Final = 0.1  # a longer pause is our own standing still, and counts as this


def load_nixl() -> ModuleType:
    """The library. Raises `BadRequest`, which says what to install, where it is missing."""
    for package in PACKAGES:
        try:
            return importlib.import_module(f"{package}._bindings")
        except ImportError as error:
            if importlib.util.find_spec(package) is not None:
                raise BadRequest(f"{package} is installed but broken: {error}") from error
    raise BadRequest(
        "the nixl transport needs NIXL: pip install 'microserve[nixl]' (or nixl-cu13)",
        param="transport",
    )


def stay_on_loopback() -> None:
    """Let agents made from now on use no network but the loopback, unless the user says else.

    UCX has no authentication, and listens on all interfaces without this.
    """
    os.environ.setdefault("UCX_NET_DEVICES", "lo")


class Agent:
    """A NIXL agent over UCX for one peer; for one thread at a time.

    What it registers can be written by whoever has its metadata, until it is closed: its progress
    thread has ended then, and its connections are down, so no byte arrives any more.
    """

    def __init__(self, memory: Sequence[tuple[int, int]]) -> None:
        """Register `(address, bytes)` pieces of this process's memory.

        Raises `BadRequest` without the library, `Internal` if UCX finds no network.
        """
        nixl = load_nixl()
        self._nixl = nixl
        self._errors = tuple(
            kind
            for kind in vars(nixl).values()
            if isinstance(kind, type) and issubclass(kind, Exception)
        )
        config = nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = PROGRESS_DELAY_US
        try:
            self._agent: Any = nixl.nixlAgent(secrets.token_hex(8), config)
            backend = self._agent.createBackend("UCX", {})
            pieces = [(address, size, 0, "") for address, size in memory]
            self._agent.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, pieces), [backend])
        except self._errors as error:
            raise Internal(f"NIXL does not start: {error}") from error
        self._peer = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def metadata(self) -> bytes:
        """What a peer needs to reach the registered memory: addresses and keys, plain data."""
        metadata: bytes = self._agent.getLocalMD()
        return metadata

    def connect(self, metadata: bytes) -> None:
        """Learn of the peer. Raises `PeerUnreachable`."""
        try:
            self._peer = self._agent.loadRemoteMD(metadata).decode()
        except self._errors as error:
            raise PeerUnreachable(f"NIXL cannot reach the peer: {error}") from error

    def transfer(
        self,
        direction: Literal["WRITE", "READ"],
        pieces: npt.NDArray[np.uint64],
        check: Callable[[], None],
    ) -> None:
        """Move bytes between our memory and the peer's, and wait until they are there.

        `pieces` is `[n, 3]`: our address, the peer's, bytes. `check` is called while waiting; what
        it raises ends the wait. Raises `PeerUnreachable` and `Timeout`; after any failure the
        transfer may still be under way, until the agent is closed.
        """
        nixl = self._nixl
        # The agent is in no variable here: a traceback that is kept would keep it alive.
        ours, theirs = np.zeros_like(pieces), np.zeros_like(pieces)
        ours[:, :2], theirs[:, :2] = pieces[:, (0, 2)], pieces[:, (1, 2)]
        try:
            request = self._agent.createXferReq(
                getattr(nixl, f"NIXL_{direction}"),
                nixl.nixlXferDList(nixl.DRAM_SEG, ours),
                nixl.nixlXferDList(nixl.DRAM_SEG, theirs),
                self._peer,
            )
            try:
                status = self._agent.postXferReq(request)
                looks, waited, now = 0, 0.0, time.monotonic()
                while status == nixl.NIXL_IN_PROG:
                    looks += 1
                    if looks > SPINS:
                        check()
                        time.sleep(PAUSE_S)
                        before, now = now, time.monotonic()
                        waited += min(now - before, STALL_S)
                        if waited > TRANSFER_TIMEOUT_S:
                            raise Timeout("the peer takes nothing: is it stopped?")
                    status = self._agent.getXferStatus(request)
            finally:
                self._agent.releaseXferReq(request)
        except self._errors as error:
            raise PeerUnreachable(f"the peer is gone: {error}") from error
        if status != nixl.NIXL_SUCCESS:
            raise PeerUnreachable(f"the transfer failed: {status}")

    def close(self) -> None:
        """Let go of connections and registrations; nothing is under way afterwards."""
        self._agent = None  # the library ends an agent with the last reference to it
