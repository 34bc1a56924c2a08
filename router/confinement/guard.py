"""The process around a confined function: bounds it, and ends everything that it has started.

    caller ── order, report ──► guard ── fork ──► [process 1] ── fork ──► worker: calls the function
                                │ reads its output, waits, ends its descendants

Where the kernel permits it, the worker is in a pid namespace, and ends with all its descendants
when the namespace's process 1 ends. Elsewhere the guard adopts those that lose their parent, and
kills them one by one. The guard runs no user code, and ends the worker also when its own standard
input ends, so when the caller has died.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import select
import signal
import time
import traceback
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

from router.base import (
    adopt_orphans,
    die_with_parent,
    enter_namespaces,
    forbid_new_privileges,
    hide_memory,
)
from router.confinement.limits import end_descendants, limit_resources

__all__ = ["main"]

TAIL_BYTES = 8192  # of what the worker prints
END_S = 5.0
PIECE = 1 << 16


def main() -> None:
    """Read the order from standard input, and write the report to standard output.

    The order is a line of JSON: `entry`, `job`, `timeout_s`, `cpu_s`, `nice`, `namespaces` and
    `verdict_bytes`, as of `run_confined`. The report is JSON: the worker's `verdict` (null if it
    gave none), its `exitcode` (negative: the signal that ended it; null: it took too long), and the
    `tail` of what it printed.
    """
    order = json.loads(_line(0))
    os.nice(order["nice"])
    adopt_orphans()
    confined = order["namespaces"] and enter_namespaces()
    worker = _Worker(order, confined)
    hide_memory()
    report = worker.watch(time.monotonic() + order["timeout_s"])
    if report is not None:
        os.write(1, json.dumps(report).encode())
    os._exit(0)


class _Worker:
    """The worker, seen from the guard."""

    def __init__(self, order: dict[str, Any], confined: bool) -> None:
        self._tail = b""
        self._verdict = b""
        self._status = b""  # its wait status, from the namespace's process 1
        # Text that the module prints, or writes to a descriptor by chance, is no verdict.
        self._nonce = secrets.token_hex(16)
        self._confined = confined
        self._most = int(order["verdict_bytes"])
        pipes = [os.pipe() for _ in range(3)]
        readers, writers = [pipe[0] for pipe in pipes], [pipe[1] for pipe in pipes]
        self._pid = os.fork()
        if not self._pid:
            for reader in readers:
                os.close(reader)
            run = _run_confined if confined else _run
            run(order, self._nonce, *writers)
        for writer in writers:
            os.close(writer)
        self._output, self._result, self._ending = readers
        self._ended = os.pidfd_open(self._pid)

    def watch(self, deadline: float) -> dict[str, Any] | None:
        """Wait until it has ended, or until `deadline`, and return the report.

        Return None if the guard's standard input has ended. No descendant is left on return.
        """
        poll = select.poll()
        for fd in (0, self._output, self._result, self._ending, self._ended):
            poll.register(fd, select.POLLIN)
        late = abandoned = False
        while not late and not abandoned:
            left_s = deadline - time.monotonic()
            ready = [fd for fd, _ in poll.poll(max(0.0, left_s) * 1e3)]
            for fd in ready:
                if fd == 0:
                    abandoned = not os.read(0, PIECE)
                elif fd != self._ended and not self._read(fd):
                    poll.unregister(fd)
            if self._ended in ready:
                break
            late = left_s <= 0
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        status = os.waitpid(self._pid, 0)[1]
        if not end_descendants(END_S):
            self._tail += b"\nit left processes behind that could not be ended"
        if abandoned:
            return None
        for fd in (self._output, self._result, self._ending):
            os.set_blocking(fd, False)
            with suppress(BlockingIOError):
                while self._read(fd):
                    pass
        if len(self._verdict) > self._most:
            self._tail += b"\nits result has more than %d bytes" % self._most
        return {
            "verdict": self._said(),
            "exitcode": None if late else self._exitcode(status),
            "tail": self._tail.decode(errors="replace"),
        }

    def _read(self, fd: int) -> bool:
        """Read a piece of one of its pipes; return whether there may be more."""
        piece = os.read(fd, PIECE)
        if fd == self._output:
            self._tail = (self._tail + piece)[-TAIL_BYTES:]
        elif fd == self._result:
            self._verdict = (self._verdict + piece)[: self._most + 1]
        else:
            self._status = (self._status + piece)[:16]
        return bool(piece)

    def _said(self) -> Any:
        nonce, _, text = self._verdict.partition(b"\n")
        if len(self._verdict) > self._most or nonce != self._nonce.encode():
            return None
        with suppress(ValueError):
            return json.loads(text)
        return None

    def _exitcode(self, status: int) -> int:
        if self._confined and self._status.isdigit():
            status = int(self._status)
        return os.waitstatus_to_exitcode(status)


def _run_confined(
    order: dict[str, Any], nonce: str, output: int, result: int, ending: int
) -> NoReturn:
    """Run in the namespace's process 1: start the worker, reap, and end when it has ended."""
    die_with_parent()
    pid = os.fork()
    if not pid:
        _run(order, nonce, output, result, ending)
    hide_memory()
    os.close(output)
    os.close(result)
    while True:
        ended, status = os.wait()
        if ended == pid:
            os.write(ending, str(status).encode())
            os._exit(0)


def _run(order: dict[str, Any], nonce: str, output: int, result: int, ending: int) -> NoReturn:
    """Run in the worker: the module may do anything from here on."""
    die_with_parent()
    os.close(ending)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(nothing)
    os.close(output)
    code = 1
    try:
        forbid_new_privileges()
        limit_resources(order["cpu_s"])
        logging.disable()
        # Not above: numpy starts threads, and a process with threads cannot enter namespaces.
        module, _, function = order["entry"].partition(":")
        verdict = json.dumps(getattr(import_module(module), function)(order["job"])).encode()
        os.write(result, nonce.encode() + b"\n" + verdict)
        code = 0
    except BaseException:  # noqa: BLE001  any end of the module ends here
        traceback.print_exc()
    os._exit(code)  # do not wait for threads and tasks of the strategy


def _line(fd: int) -> bytes:
    """Read up to the end of the line, or of the input."""
    line = bytearray()
    while not line.endswith(b"\n") and (piece := os.read(fd, PIECE)):
        line += piece
    return bytes(line)


if __name__ == "__main__":
    main()
