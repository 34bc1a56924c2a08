"""Worker processes, as their lead sees them: started, loaded, stopped, ended."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine.protocol import BadRequest
from engine.workers.exchange import Array, Kind, WorkerSettings, receive, send_text, text_of
from engine.workers.template import ForkedWorker, WorkerTemplate, readable

__all__ = [
    "ANSWER_S",
    "POLL_S",
    "StopWatch",
    "WorkerProcess",
    "first_answers",
    "share_of",
    "start",
    "threads_of",
]

log = logging.getLogger(__name__)

BUFFER_BYTES = 4 << 20
START_S = 300.0  # for a new worker to load its weights
ANSWER_S = 60.0  # a step that takes longer counts as a hang
STOPPED_S = 2.0  # a worker that is stopped for longer counts as lost
POLL_S = 0.1


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


def first_answers(
    workers: Sequence[WorkerProcess], while_waiting: Callable[[], object]
) -> dict[int, list[Array]]:
    """Return the answer of each of these workers, which load or meet, by its rank.

    Calls `while_waiting` again and again. Raises `BadRequest` if one of them fails, and what that
    call raises.
    """
    waiting = {worker.socket.fileno(): worker for worker in workers}
    found: dict[int, list[Array]] = {}
    end = time.monotonic() + START_S
    while waiting:
        while_waiting()
        left = end - time.monotonic()
        answered = readable(waiting, min(left, POLL_S))
        if not answered and left <= 0:
            names = ", ".join(worker.name for worker in waiting.values())
            raise BadRequest(f"{names}: not ready after {START_S:.0f} s", param="tp")
        for worker in map(waiting.pop, answered):
            try:
                kind, arrays = receive(worker.socket)
            except (OSError, EOFError):
                raise BadRequest(
                    f"{worker.name} ended while it loaded the model, with {worker.ending}",
                    param="tp",
                ) from None
            if kind != Kind.DONE:
                raise BadRequest(f"{worker.name}: {text_of(arrays)}", param="tp")
            found[worker.settings.rank] = arrays
    for worker in workers:
        worker.socket.settimeout(ANSWER_S)
    return found


class StopWatch:
    """Ends workers that a signal has stopped for long: the others wait for them."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}  # by pid

    def end_stopped(self, workers: Sequence[WorkerProcess]) -> None:
        """End those that have been stopped for `STOPPED_S`. Call it often."""
        now = time.monotonic()
        stopped = {w.process.pid: w for w in workers if not w.dead and w.stopped}
        self._since = {pid: self._since.get(pid, now) for pid in stopped}
        for pid, worker in stopped.items():
            if now - self._since[pid] > STOPPED_S:
                log.warning("%s is stopped: it is replaced", worker.name)
                worker.process.kill()
                worker.process.wait()


def share_of(cpus: Sequence[int], rank: int, count: int) -> tuple[int, ...]:
    """Return the cores of one of `count` workers; all share them if there are fewer."""
    each, more = divmod(len(cpus), count)
    if not each:
        return tuple(cpus)
    begin = each * rank + min(rank, more)
    return tuple(cpus[begin : begin + each + (rank < more)])


def threads_of(threads: int, cpus: Sequence[int], rank: int, count: int) -> int:
    """Return the threads of one of `count` workers: its share of `threads`; 0: of the cores.

    More threads than cores would wait for each other in every product.
    """
    if threads:
        return max(threads // count, 1)
    return len(share_of(cpus, rank, count)) if len(cpus) >= count else 1
