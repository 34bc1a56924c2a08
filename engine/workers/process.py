"""One worker process, as its lead sees it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine.workers.exchange.settings import WorkerSettings
from engine.workers.exchange.wire import Array, Kind, send_text
from engine.workers.template import ForkedWorker, WorkerTemplate

__all__ = ["WorkerProcess", "share_of", "start"]

BUFFER_BYTES = 4 << 20


@dataclass(slots=True)
class WorkerProcess:
    """A process, and how far it is with the messages of its lead."""

    settings: WorkerSettings
    process: ForkedWorker
    socket: socket.socket
    restarts: int = 0  # of this rank
    sent: int = 0  # number of the latest message
    answered: int = 0  # number of the latest message that has been answered
    weight_bytes: int = 0
    # µs of computing and of waiting for pages; bytes of pages fetched and of tokens written back.
    counts: tuple[int, int, int, int] = (0, 0, 0, 0)

    def note(self, counts: Array) -> None:
        """Add what a worker tells of a step."""
        computed, waited, fetched, written = (
            a + b for a, b in zip(self.counts, counts.tolist(), strict=True)
        )
        self.counts = computed, waited, fetched, written

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def dead(self) -> bool:
        """Whether the process has ended."""
        return self.process.poll() is not None

    @property
    def stopped(self) -> bool:
        """Whether the process was stopped by a signal (SIGSTOP)."""
        with suppress(OSError, IndexError):
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
            return stat.rpartition(")")[2].split()[0] == "T"
        return False

    @property
    def ending(self) -> str:
        """How the process has ended, for a message."""
        code = self.process.wait()
        return f"signal {-code}" if code < 0 else f"status {code}"

    def kill(self) -> None:
        """End the process now, and wait until it is gone."""
        self.process.kill()
        self.process.wait()
        self.socket.close()


def start(template: WorkerTemplate, settings: WorkerSettings) -> WorkerProcess:
    """Start a worker, and tell it what to load. Raises `OSError`."""
    own, theirs = socket.socketpair()
    for end in (own, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    with theirs:
        fds = (theirs.fileno(), settings.logits_fd, settings.sum_fd)
        process = template.fork([fd for fd in fds if fd >= 0])
    with suppress(OSError):  # it has ended already, as its answer will say
        send_text(own, Kind.SETTINGS, settings.to_json())
    return WorkerProcess(settings, process, own)


def share_of(cpus: Sequence[int], rank: int, count: int) -> tuple[int, ...]:
    """Return the cores of one of `count` workers; all share them if there are fewer."""
    each, more = divmod(len(cpus), count)
    if not each:
        return tuple(cpus)
    begin = each * rank + min(rank, more)
    return tuple(cpus[begin : begin + each + (rank < more)])
