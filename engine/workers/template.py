"""The process that an engine's workers are forked from, as their lead sees it.

A worker needs torch and this project's modules, which take seconds to import. One process imports
them once and computes nothing, so that a worker starts, and is replaced, in milliseconds, and the
workers share that memory.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress

from engine.workers.exchange import FORK, MESSAGE, REAP

__all__ = ["ForkedWorker", "WorkerTemplate", "readable"]

START_S = 120.0  # to import torch, on a busy host
ANSWER_S = 20.0  # later on


class WorkerTemplate:
    """Starts the process when it is first needed, and again if it has ended.

    The kernel ends it with the thread that started it, and its workers with it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False

    def fork(self, fds: Sequence[int]) -> ForkedWorker:
        """Start a worker with copies of these descriptors. Raises `OSError`."""
        with self._lock:
            control = self._control
            if control is None or self._process is None or self._process.poll() is not None:
                control = self._start()
            try:
                socket.send_fds(control, [MESSAGE.pack(FORK, 0)], fds)
                pid = self._answer(control)
                control.settimeout(ANSWER_S)
            except OSError:  # a late answer would be taken for that to the next message
                self._end()
                raise
            if pid < 0:
                raise OSError(-pid, f"a worker cannot be forked: {os.strerror(-pid)}")
            return ForkedWorker(self, control, pid)

    def reap(self, of: socket.socket, pid: int) -> int:
        """Return the exit code of a worker that has ended; it was killed if the template has.

        `of` is the connection by which it was forked.
        """
        with self._lock:
            if self._control is not of:
                return -signal.SIGKILL
            try:
                of.sendall(MESSAGE.pack(REAP, pid))
                return self._answer(of)
            except OSError:
                self._end()
                return -signal.SIGKILL

    def close(self) -> None:
        """End the process, and with it all workers that are left. No further ones start."""
        with self._lock:
            self._closed = True
            self._end()

    def _start(self) -> socket.socket:
        self._end()
        if self._closed:
            raise OSError("the engine ends")
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own.settimeout(START_S)
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603  our own module
                [
                    *(sys.executable, "-P", "-m", "engine.workers.part"),
                    *(str(theirs.fileno()), str(os.getpid())),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
            )
        self._control = own
        return own

    def _end(self) -> None:
        control, self._control = self._control, None
        process, self._process = self._process, None
        if control is not None:
            control.close()
        if process is not None:
            process.kill()
            process.wait()

    @staticmethod
    def _answer(control: socket.socket) -> int:
        answer = control.recv(MESSAGE.size)
        if len(answer) != MESSAGE.size:
            raise ConnectionError("the process that workers are forked from has ended")
        number: int = MESSAGE.unpack(answer)[1]
        return number


class ForkedWorker:
    """A process that is no child of this one. The calls are those of `subprocess.Popen`."""

    def __init__(self, template: WorkerTemplate, of: socket.socket, pid: int) -> None:
        """`of` is the connection by which `template` has forked it."""
        self.pid = pid
        self._template, self._of = template, of
        self._lock = threading.Lock()
        self._pidfd = os.pidfd_open(pid)
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        with self._lock:
            if self._code is None and readable([self._pidfd], 0):
                self._code = self._template.reap(self._of, self.pid)
                os.close(self._pidfd)
            return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises `subprocess.TimeoutExpired`."""
        if (code := self.poll()) is not None:
            return code
        readable([self._pidfd], timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("engine.workers.part", timeout or 0.0)
        return code

    def kill(self) -> None:
        """Send SIGKILL, if the process runs."""
        with self._lock:
            if self._code is None:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


def readable(fds: Iterable[int], timeout: float | None) -> list[int]:
    """Return the descriptors that can be read, waiting up to `timeout` seconds for the first.

    Unlike `select.select`, it takes those above 1023, which a lead with many connections has.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(None if timeout is None else max(timeout, 0.0) * 1e3)]
