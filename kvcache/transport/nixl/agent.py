"""NIXL for puts: registration of memory that one peer may write, and transfers into a peer's.

This uses NIXL's low-level bindings instead of its Python class. That class makes the progress
thread poll without a pause, which costs a core per agent. With a progress delay the thread sleeps
until the network wakes it.
"""

from __future__ import annotations

import importlib
import importlib.util
import secrets
import time
from collections.abc import Callable, Sequence
from types import ModuleType, TracebackType
from typing import Any, Final, Literal, Self

import numpy as np
import numpy.typing as npt

from kvcache.errors import BadRequest, Internal, PeerUnreachable, Timeout

__all__ = ["Agent", "has_nixl", "load_nixl"]

PACKAGES: Final = ("nixl_cu12", "nixl_cu13")  # either works without a GPU
PROGRESS_DELAY_US: Final = 100_000  # the progress thread's longest sleep; traffic wakes it
TRANSFER_TIMEOUT_S = 10.0  # of one transfer: the copies of one commit, or a few words
SPINS: Final = 50  # polls of a transfer before the first pause; each takes about a microsecond
PAUSE_S: Final = 50e-6
STALL_S: Final = 0.1  # a longer pause means this process was stopped; it counts as this much


def has_nixl() -> bool:
    """Return whether a package of NIXL is installed; does not import it."""
    return any(importlib.util.find_spec(package) is not None for package in PACKAGES)


def load_nixl() -> ModuleType:
    """Import NIXL's bindings. Raises: `BadRequest`, with the package to install, if missing."""
    for package in PACKAGES:
        try:
            return importlib.import_module(f"{package}._bindings")
        except ImportError as error:
            if importlib.util.find_spec(package) is not None:
                raise BadRequest(f"{package} is installed but broken: {error}") from error
    raise BadRequest(
        "the nixl transport needs NIXL: pip install -e '.[nixl]' in the clone (or nixl-cu13)",
        param="transport",
    )


class Agent:
    """A NIXL agent over UCX for one peer; not thread-safe.

    A peer that has the agent's metadata can write the registered memory until `close`. `close` ends
    the progress thread and the connections, so no byte arrives afterwards.
    """

    def __init__(self, memory: Sequence[tuple[int, int]]) -> None:
        """Register `(address, bytes)` ranges of this process's memory.

        Raises: `BadRequest` if NIXL is not installed, `Internal` if UCX finds no network.
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
            raise Internal(f"NIXL failed to start: {error}") from error
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
        """Addresses and keys with which a peer can reach the registered memory; plain data."""
        metadata: bytes = self._agent.getLocalMD()
        return metadata

    def connect(self, metadata: bytes) -> None:
        """Load the peer's metadata. Raises: `PeerUnreachable` if that fails."""
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
        """Move bytes between local memory and the peer's; block until the transfer is complete.

        `pieces` is `[n, 3]`: local address, the peer's address, bytes. `check` is called while
        waiting and may raise to end the wait.

        Raises: `PeerUnreachable`; `Timeout` after `TRANSFER_TIMEOUT_S`. After a failure the
        transfer may still be in flight until the agent is closed.
        """
        nixl = self._nixl
        # No local variable refers to the agent: a kept traceback would keep the agent alive.
        local, remote = np.zeros_like(pieces), np.zeros_like(pieces)
        local[:, :2], remote[:, :2] = pieces[:, (0, 2)], pieces[:, (1, 2)]
        try:
            request = self._agent.createXferReq(
                getattr(nixl, f"NIXL_{direction}"),
                nixl.nixlXferDList(nixl.DRAM_SEG, local),
                nixl.nixlXferDList(nixl.DRAM_SEG, remote),
                self._peer,
            )
            try:
                status = self._agent.postXferReq(request)
                polls, waited, now = 0, 0.0, time.monotonic()
                while status == nixl.NIXL_IN_PROG:
                    polls += 1
                    if polls > SPINS:
                        check()
                        time.sleep(PAUSE_S)
                        before, now = now, time.monotonic()
                        waited += min(now - before, STALL_S)
                        if waited > TRANSFER_TIMEOUT_S:
                            raise Timeout("the peer accepts no data; its process may be stopped")
                    status = self._agent.getXferStatus(request)
            finally:
                self._agent.releaseXferReq(request)
        except self._errors as error:
            raise PeerUnreachable(f"the peer has disconnected: {error}") from error
        if status != nixl.NIXL_SUCCESS:
            raise PeerUnreachable(f"the transfer failed: {status}")

    def close(self) -> None:
        """Release connections and registrations. No transfer is in flight afterwards."""
        self._agent = None  # NIXL destroys an agent with the last reference to it
