"""The lead's side: the worker processes of an engine, and what is said to all of them."""

from __future__ import annotations

import logging
import mmap
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.protocol import BadRequest, Internal
from engine.workers.settings import WorkerSettings
from engine.workers.shared_sum import sum_bytes
from engine.workers.wire import Array, Kind, receive, send, send_text, text_of

__all__ = ["WorkerGroup"]

log = logging.getLogger(__name__)

ANSWER_S = 60.0  # a step that takes longer counts as a hang
BLAME_S = 0.5  # to find out whose end another worker's failure comes from
WATCH_S = POLL_S = 0.1
STOP_S = 5.0  # for workers to end by themselves
BUFFER_BYTES = 4 << 20


@dataclass(slots=True)
class _Worker:
    name: str
    process: subprocess.Popen[bytes]
    socket: socket.socket
    sent: int = 0  # messages
    answered: int = 0
    weight_bytes: int = 0


class WorkerGroup:
    """All workers of one engine. They do what they are told in the same order.

    After a failure of a worker the others may wait for it, so nothing is computed any more: every
    call raises `Internal`, and `on_loss` has been called once.
    """

    def __init__(self, settings: WorkerSettings, *, vocab: int, digest: str) -> None:
        """Start the workers, and wait until they have loaded their weights.

        `settings` are those of all; each gets its rank and its share of `cpus`. `digest` is that of
        the weights. Raises `BadRequest` with what a worker said if one does not come up, or has
        loaded other weights; none is left then.
        """
        self.on_loss: Callable[[str], object] = lambda _reason: None
        self.row_multiple = 1
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._lost = ""
        self._closed = False
        self._workers: list[_Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="microserve-workers-")
        tp, pp = settings.tp, settings.pp
        size = settings.logits_rows * vocab * 4
        logits_fd = _memory("logits", size)
        memory = mmap.mmap(logits_fd, size)
        self.logits = torch.frombuffer(memory, dtype=torch.float32).view(-1, vocab)
        sums = sum_bytes(tp, settings.hidden, getattr(torch, settings.dtype))
        sum_fds = [_memory("sums", sums) for _ in range(pp)] if tp > 1 else [-1] * pp
        settings = replace(
            settings, rendezvous=str(Path(self._folder.name) / "rendezvous"), logits_fd=logits_fd
        )
        try:
            for rank in range(tp * pp):
                cpus = _share(settings.cpus, rank, tp * pp)
                own = replace(settings, rank=rank, cpus=cpus, sum_fd=sum_fds[rank // tp])
                self._workers.append(_start(own))
            self._meet(digest)
        except BaseException:
            self.close()
            raise
        finally:
            for fd in filter(_is_open, (logits_fd, *sum_fds)):
                os.close(fd)
            self._folder.cleanup()  # they have met
        for worker in self._workers:
            worker.socket.settimeout(ANSWER_S)
        threading.Thread(target=self._watch, name="workers", daemon=True).start()

    @property
    def weight_bytes(self) -> list[int]:
        """Bytes of the weights of each worker."""
        return [worker.weight_bytes for worker in self._workers]

    def tell(self, kind: Kind, arrays: Sequence[Array | Sequence[int]] = ()) -> int:
        """Send a message to all workers; return its number, for `wait` and `answered`.

        Raises `Internal` if a worker is lost.
        """
        with self._sending:
            self._check()
            for worker in self._workers:
                try:
                    send(worker.socket, kind, arrays)
                except OSError as error:
                    raise self._lose(f"{worker.name} cannot be reached: {error}") from None
                worker.sent += 1
            return self._workers[0].sent

    def wait(self, number: int) -> None:
        """Wait until all workers have answered a message. Raises `Internal` if one failed."""
        with self._receiving:
            for worker in self._workers:
                while worker.answered < number:
                    self._receive(worker)

    def answered(self, number: int) -> bool:
        """Return whether all workers have answered a message; never wait.

        Raises `Internal` if one failed.
        """
        if not self._receiving.acquire(blocking=False):
            return min(worker.answered for worker in self._workers) >= number
        try:
            for worker in self._workers:
                while worker.answered < number:
                    if not select.select([worker.socket], [], [], 0)[0]:
                        return False
                    self._receive(worker)
            return True
        finally:
            self._receiving.release()

    def ask(self, kind: Kind, arrays: Sequence[Array | Sequence[int]] = ()) -> None:
        """Send a message and wait for the answers. Raises `Internal` if a worker failed."""
        self.wait(self.tell(kind, arrays))

    def close(self) -> None:
        """End the workers."""
        self._closed = True
        for worker in self._workers:
            with suppress(OSError):
                worker.socket.shutdown(socket.SHUT_RDWR)
        end = time.monotonic() + STOP_S
        for worker in self._workers:
            try:
                worker.process.wait(max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            worker.socket.close()

    def _meet(self, digest: str) -> None:
        """Wait for all workers' facts."""
        waiting = list(self._workers)
        while waiting:
            readable, _, _ = select.select([worker.socket for worker in waiting], [], [], None)
            for worker in [worker for worker in waiting if worker.socket in readable]:
                waiting.remove(worker)
                try:
                    kind, arrays = receive(worker.socket)
                except (OSError, EOFError):
                    status = worker.process.wait()
                    raise BadRequest(
                        f"{worker.name} ended while it loaded the model, with {_status(status)}",
                        param="tp",
                    ) from None
                if kind != Kind.DONE:
                    raise BadRequest(f"{worker.name}: {text_of(arrays)}", param="tp")
                (multiple, worker.weight_bytes), said = arrays[0].tolist(), text_of(arrays[1:])
                if said != digest:
                    raise BadRequest(
                        f"{worker.name} has loaded weights {said}, not {digest}: the model's files "
                        "have changed, or are others there",
                        param="model",
                    )
                self.row_multiple = max(self.row_multiple, multiple)

    def _receive(self, worker: _Worker) -> None:
        """Take in the next answer of a worker."""
        self._check()
        try:
            kind, arrays = receive(worker.socket)
        except TimeoutError:
            raise self._lose(f"{worker.name} has not answered for {ANSWER_S:.0f} s") from None
        except (OSError, EOFError):
            raise self._lose(self._dead(BLAME_S) or f"{worker.name} does not answer") from None
        worker.answered += 1
        if kind != Kind.DONE:
            raise self._lose(self._dead(BLAME_S) or f"{worker.name}: {text_of(arrays)}")

    def _watch(self) -> None:
        """Notice workers that end while nobody waits for them."""
        while not self._closed:
            if reason := self._dead(WATCH_S):
                self._lose(reason)
                return

    def _dead(self, within_s: float) -> str:
        """Say which worker has ended, or does so soon; empty if none."""
        end = time.monotonic() + within_s
        while True:
            for worker in self._workers:
                if worker.process.poll() is not None:
                    return f"{worker.name} has ended, with {_status(worker.process.returncode)}"
            if time.monotonic() > end:
                return ""
            time.sleep(POLL_S)

    def _check(self) -> None:
        if self._lost:
            raise Internal(self._lost)

    def _lose(self, reason: str) -> Internal:
        """Note that the workers are out of step; return the error."""
        if not self._lost and not self._closed:
            self._lost = reason
            log.critical("%s: this engine cannot go on", reason)
            self.on_loss(reason)
        return Internal(self._lost or reason)


def _start(settings: WorkerSettings) -> _Worker:
    """Start one worker, and tell it what to load."""
    own, theirs = socket.socketpair()
    for end in (own, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    with theirs:
        arguments = [str(theirs.fileno()), str(os.getpid())]
        fds = (theirs.fileno(), settings.logits_fd, settings.sum_fd)
        process = subprocess.Popen(  # noqa: S603  our own module
            [sys.executable, "-P", "-m", "engine.workers", *arguments],
            pass_fds=list(filter(_is_open, fds)),
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
        )
    send_text(own, Kind.SETTINGS, settings.to_json())
    return _Worker(settings.name, process, own)


def _is_open(fd: int) -> bool:
    return fd >= 0


def _share(cpus: Sequence[int], rank: int, count: int) -> tuple[int, ...]:
    """Return the cores of one of `count` workers; all share them if there are fewer."""
    each, more = divmod(len(cpus), count)
    if not each:
        return tuple(cpus)
    begin = each * rank + min(rank, more)
    return tuple(cpus[begin : begin + each + (rank < more)])


def _memory(name: str, size: int) -> int:
    """Return a descriptor of zeroed memory that only this user can map."""
    fd = os.memfd_create(f"microserve-{name}", os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, size)
    return fd


def _status(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"status {code}"
