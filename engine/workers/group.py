"""The lead's side: the worker processes of an engine, what they are told, and their recovery."""

from __future__ import annotations

import logging
import mmap
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from engine.protocol import BadRequest, Internal, WorkerState
from engine.workers.exchange import (
    Array,
    Kind,
    WorkerSettings,
    receive,
    send,
    send_text,
    set_stopped,
    sum_bytes,
    text_of,
)
from engine.workers.process import (
    ANSWER_S,
    POLL_S,
    StopWatch,
    WorkerProcess,
    first_answers,
    share_of,
    start,
    threads_of,
)
from engine.workers.template import WorkerTemplate, readable
from kvcache.shard import Shard

__all__ = ["WorkerGroup"]

log = logging.getLogger(__name__)

RETURN_S = 5.0  # for the other workers to give up a step after one is lost
BLAME_S = 0.5  # to find out whose end another worker's failure comes from
STOP_S = 5.0  # for workers to end by themselves
RECOVERIES = 3  # in a row, without a step that ended or `CALM_S` between them
CALM_S = 30.0


class _Told(NamedTuple):
    """A message to all workers."""

    number: int
    kind: Kind
    arrays: Sequence[Array | Sequence[int]]


class WorkerGroup:
    """All workers of one engine. They do what they are told in the same order.

    A worker that ends, is stopped or hangs is replaced (DéjàVu, §4.2.3, in our case without a
    replica, because the pages are the lead's memory): the others give up the steps under way and
    keep their weights, a new process loads the part and maps its pages, all meet again, and the
    steps that had not ended are computed again. Meanwhile `tell` and `wait` wait. If that fails
    too often, every call raises `Internal`, and `on_loss` has been called once.

    Steps come from one thread. Another supervises the workers, and starts them: the kernel ends a
    process with the thread that started it.
    """

    def __init__(
        self, settings: WorkerSettings, shards: Sequence[Shard], *, vocab: int, digest: str
    ) -> None:
        """Start the workers, and wait until they have loaded their weights.

        `settings` are those of all; each gets its rank and its share of `cpus`. `shards` are their
        layers and KV heads, and `digest` is that of the weights. Raises `BadRequest` with what a
        worker said if one does not come up, or has loaded other weights; none is left then.
        """
        self.on_loss: Callable[[str], object] = lambda _reason: None
        self.shards = tuple(shards)
        self.row_multiple = 0
        self._digest = digest
        self._settings = settings
        self._lock = threading.Lock()  # for messages, answers and recovery
        self._healthy = threading.Event()  # cleared while workers are replaced
        self._kick = threading.Event()  # wakes the supervisor
        self._told: deque[_Told] = deque()  # not answered by all, oldest first
        self._number = 0  # of the latest message
        self._failed: dict[int, str] = {}  # messages that failed, and why
        self._error = ""  # what a worker said that failed and lives
        self._broken = self._lost = ""
        self._attempts, self._recovered = 0, 0.0
        self._stops = StopWatch()
        self._pages: list[int] = []
        self._closed = threading.Event()
        self._ended = threading.Event()  # all workers are gone, after `_closed`
        self._fds: list[int] = []
        self._workers: list[WorkerProcess] = []
        self._template = WorkerTemplate()
        tp, pp = settings.tp, settings.pp
        size = settings.logits_rows * vocab * 4
        logits_fd = self._memory("logits", size)
        self.logits = torch.frombuffer(
            mmap.mmap(logits_fd, size), dtype=torch.float32
        ).view(-1, vocab)  # fmt: skip
        sums = sum_bytes(tp, settings.hidden, getattr(torch, settings.dtype))
        self._sum_fds = [self._memory("sums", sums) for _ in range(pp)] if tp > 1 else []
        self._sums = [mmap.mmap(fd, sums) for fd in self._sum_fds]
        self._settings = replace(settings, logits_fd=logits_fd)
        started: Future[None] = Future()
        threading.Thread(
            target=self._supervise, args=(started,), name="workers", daemon=True
        ).start()
        try:
            started.result()
        except BaseException:
            self.close()
            raise

    @property
    def weight_bytes(self) -> list[int]:
        """Bytes of the weights of each worker."""
        return [worker.weight_bytes for worker in self._workers]

    def states(self) -> list[WorkerState]:
        """Describe the workers, for the engine's state."""
        return [
            WorkerState(
                rank=worker.settings.rank,
                stage=worker.settings.stage,
                pid=worker.process.pid,
                weight_bytes=worker.weight_bytes,
                restarts=worker.restarts,
                computing_ms=worker.counts[0] / 1e3,
                swap_wait_ms=worker.counts[1] / 1e3,
                fetched_bytes=worker.counts[2],
                written_bytes=worker.counts[3],
            )
            for worker in list(self._workers)
        ]

    def map_pages(self, pages: int, fd: int, at: int) -> None:
        """Have the workers map their parts of a pool of this process. Raises `Internal`.

        The pool begins at byte `at` behind descriptor `fd`.
        """
        with self._lock:
            self._pages = [pages, os.getpid(), fd, at]
            try:
                self._map(self._workers)
            except BadRequest as error:
                raise Internal(error.message) from None

    def tell(self, kind: Kind, arrays: Sequence[Array | Sequence[int]] = ()) -> int:
        """Send a message to all workers; return its number, for `wait`.

        Raises `Internal` if the workers are lost.
        """
        while True:
            self._healthy.wait()
            with self._lock:
                self._check()
                if not self._healthy.is_set():
                    continue
                self._number += 1
                told = _Told(self._number, kind, arrays)
                self._told.append(told)
                self._send([told])
                return self._number

    def wait(self, number: int) -> None:
        """Wait until all workers have answered a message.

        Raises `Internal` if a worker failed to do what it says, or if the workers are lost.
        """
        while True:
            self._healthy.wait()
            with self._lock:
                self._check()
                if reason := self._failed.pop(number, ""):
                    raise Internal(reason)
                if self._healthy.is_set() and self._collect(number):
                    return

    def close(self) -> None:
        """End the workers. Calls that wait for them raise `Internal`."""
        self._closed.set()
        self._lost = self._lost or "the engine ends"
        self._healthy.set()
        self._kick.set()
        for worker in self._workers:
            with suppress(OSError):
                worker.socket.shutdown(socket.SHUT_RDWR)
        end = time.monotonic() + STOP_S
        for worker in self._workers:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(end - time.monotonic(), 0.1))
            worker.kill()
        self._template.close()
        self._ended.set()
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)

    # Messages and answers; the caller holds the lock.

    def _send(self, messages: Sequence[_Told]) -> None:
        for worker in self._workers:
            try:
                for number, kind, arrays in messages:
                    send(worker.socket, kind, arrays)
                    worker.sent = number
            except OSError as error:
                self._break(f"{worker.name} cannot be reached: {error}")

    def _collect(self, number: int) -> bool:
        """Take in answers until all workers have answered a message; return False if one fails."""
        while waiting := [worker for worker in self._workers if worker.answered < number]:
            sockets = {worker.socket.fileno(): worker for worker in self._workers}
            answered = readable(sockets, ANSWER_S)
            for worker in map(sockets.__getitem__, answered):
                if not self._take_answer(worker):
                    return False
            if not answered:
                for worker in waiting:
                    worker.process.kill()
                names = ", ".join(worker.name for worker in waiting)
                self._break(f"{names}: no answer for {ANSWER_S:.0f} s")
                return False
        while self._told and self._told[0].number <= number:
            self._told.popleft()
        self._attempts = 0
        return True

    def _take_answer(self, worker: WorkerProcess) -> bool:
        """Take in the next answer of a worker; return whether it did what it was told."""
        try:
            kind, arrays = receive(worker.socket)
        except (OSError, EOFError, ValueError):
            self._break(f"{worker.name} does not answer")
            return False
        worker.answered += 1
        if kind != Kind.DONE:
            self._error = f"{worker.name}: {text_of(arrays)}"
            self._break(self._error)
            return False
        for counts in arrays:
            worker.note(counts)
        return True

    def _break(self, reason: str) -> None:
        """Have the supervisor replace what is lost, before anything else is done."""
        if self._healthy.is_set():
            self._broken = reason
            self._healthy.clear()
        self._kick.set()

    def _check(self) -> None:
        if self._lost:
            raise Internal(self._lost)

    # On the supervisor's thread

    def _supervise(self, started: Future[None]) -> None:
        """Start the workers, and replace those that are lost, until `close`.

        Stays until the workers have ended: without this thread, the kernel would end them at once.
        """
        try:
            self._supervise_until_closed(started)
        finally:
            self._ended.wait()

    def _supervise_until_closed(self, started: Future[None]) -> None:
        try:
            self._start(range(self._settings.tp * self._settings.pp))
        except Exception as error:  # noqa: BLE001  the constructor raises it
            started.set_exception(error)
            return
        started.set_result(None)
        self._healthy.set()
        while not self._closed.is_set() and not self._lost:
            self._kick.wait(POLL_S)
            self._kick.clear()
            self._stops.end_stopped(self._workers)
            if self._healthy.is_set() and not any(worker.dead for worker in self._workers):
                continue
            with self._lock:
                if self._closed.is_set():
                    return
                self._break("")
                self._recover()

    def _recover(self) -> None:
        """Replace the workers that are lost, and have all go on where they were."""
        began = time.monotonic()
        end = began + BLAME_S
        while not any(worker.dead for worker in self._workers) and time.monotonic() < end:
            time.sleep(POLL_S)
        dead = [worker for worker in self._workers if worker.dead]
        reason = self._error if not dead else "; ".join(
            f"{worker.name} has ended, with {worker.ending}" for worker in dead
        )  # fmt: skip
        reason = reason or self._broken
        if not dead:  # computing it once more would fail again
            self._failed |= {told.number: reason for told in self._told}
            self._told.clear()
        self._error = self._broken = ""
        if began - self._recovered > CALM_S:
            self._attempts = 0
        self._attempts += 1
        try:
            if self._attempts > RECOVERIES:
                raise BadRequest(f"{RECOVERIES} recoveries were in vain")
            log.error("%s: workers are replaced", reason)
            try:
                self._release()
                self._start([w.settings.rank for w in self._workers if w.dead])
            except (BadRequest, OSError, ValueError) as error:
                log.error("%s: all workers are replaced", error)
                for worker in self._workers:
                    worker.kill()
                self._start(range(len(self._workers)))
        except (BadRequest, OSError, ValueError) as error:
            if not self._closed.is_set():
                self._lost = f"{reason}; {error}"
                log.critical("%s: this engine cannot go on", self._lost)
                self._healthy.set()
                self.on_loss(self._lost)
            return
        for worker in self._workers:
            worker.sent = self._told[0].number - 1 if self._told else self._number
            worker.answered = worker.sent
        self._recovered = time.monotonic()
        took = self._recovered - began
        log.warning("workers go on after %.1f s, %d steps again", took, len(self._told))
        self._healthy.set()
        self._send(list(self._told))

    def _release(self) -> None:
        """Have the workers that live give up what they wait for. Ends those that do not."""
        for memory in self._sums:
            set_stopped(memory, self._settings.tp, stopped=True)
        end = time.monotonic() + RETURN_S
        for worker in self._workers:
            while not worker.dead and worker.answered < worker.sent:
                left = max(end - time.monotonic(), 0.0)
                if not readable([worker.socket.fileno()], left):
                    worker.kill()
                    break
                try:
                    receive(worker.socket)
                except (OSError, EOFError, ValueError):
                    worker.kill()
                    break
                worker.answered += 1

    def _start(self, ranks: Sequence[int]) -> None:
        """Start these workers, and have all of them meet. Raises `BadRequest` and `OSError`."""
        settings = self._settings
        count = settings.tp * settings.pp
        if self._closed.is_set():
            raise BadRequest("the engine ends")
        for memory in self._sums:
            set_stopped(memory, settings.tp, stopped=False)
        kept = [worker for worker in self._workers if worker.settings.rank not in ranks]
        before = {worker.settings.rank: worker for worker in self._workers}
        with tempfile.TemporaryDirectory(prefix="microserve-workers-") as folder:
            rendezvous = str(Path(folder) / "rendezvous")
            for worker in kept:
                send_text(worker.socket, Kind.REJOIN, rendezvous)
            new = []
            for rank in ranks:
                own = replace(
                    settings,
                    rank=rank,
                    rendezvous=rendezvous,
                    cpus=share_of(settings.cpus, rank, count),
                    threads=threads_of(settings.threads, settings.cpus, rank, count),
                    sum_fd=self._sum_fds[rank // settings.tp] if self._sum_fds else -1,
                )
                worker = start(self._template, own)
                if (old := before.get(rank)) is not None:
                    old.kill()
                    worker.restarts, worker.counts = old.restarts + 1, old.counts
                new.append(worker)
            self._workers = sorted([*kept, *new], key=lambda worker: worker.settings.rank)
            self._meet(new, kept)
        self._map(new)

    def _meet(self, new: Sequence[WorkerProcess], kept: Sequence[WorkerProcess]) -> None:
        """Wait until new workers have loaded their weights, and the others have met them."""
        facts = first_answers([*new, *kept], self._while_waiting)
        for worker in new:
            arrays = facts[worker.settings.rank]
            (multiple, worker.weight_bytes), said = arrays[0].tolist(), text_of(arrays[1:])
            if said != self._digest:
                raise BadRequest(
                    f"{worker.name} has loaded weights {said}, not {self._digest}: the model's "
                    "files have changed, or are others there",
                    param="model",
                )
            self.row_multiple = max(self.row_multiple, multiple)

    def _map(self, workers: Sequence[WorkerProcess]) -> None:
        """Have workers map the pages, if there are any yet. Raises `BadRequest`."""
        if self._pages:
            for worker in workers:
                send(worker.socket, Kind.ALLOCATE, [self._pages])
            first_answers(workers, self._while_waiting)

    def _while_waiting(self) -> None:
        """Is called again and again while workers load. Raises `BadRequest` if the engine ends."""
        if self._closed.is_set():
            raise BadRequest("the engine ends")
        self._stops.end_stopped(self._workers)

    def _memory(self, name: str, size: int) -> int:
        """Return a descriptor of zeroed memory that only this user can map; `close` closes it."""
        fd = os.memfd_create(f"microserve-{name}", os.MFD_CLOEXEC)
        self._fds.append(fd)
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size)
        return fd
