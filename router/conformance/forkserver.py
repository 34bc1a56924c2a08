"""Programs of ours as processes that start in a fraction of a second.

Most of what an engine does before it is ready is to import torch. Here processes are forked from a
server that has done so already, and then run the program's real `main` with real flags: the pid,
the port, the memory and the signals are real, and each is a process group of its own.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing as mp
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

from router.base.environment import child_environment
from router.base.errors import StartFailed

__all__ = ["Forked", "Program", "engine", "microserve"]

PRELOAD = [
    "engine.main", "engine.build", "engine.api.app", "kvcache.cache", "router.cli", "xgrammar",
]  # fmt: skip
START_S = 60.0
PR_SET_PDEATHSIG = 1
Program = Callable[[Sequence[str]], object]


def engine(flags: Sequence[str]) -> None:
    """`python -m engine`."""
    _run_module("engine", flags)


def microserve(flags: Sequence[str]) -> None:
    """`microserve`, the console script."""
    _run_module("router", flags)


def _run_module(name: str, flags: Sequence[str]) -> None:
    sys.argv = [name, *flags]
    # By its name: the router imports nothing of an engine.
    runpy.run_module(name, run_name="__main__", alter_sys=True)


class Forked:
    """A process that runs `program`; `line` is what it prints, `log` what it logs.

    Its environment is ours, without the twins of flags, and `environment`.
    """

    _context = mp.get_context("forkserver")

    def __init__(self, program: Program, *flags: str, **environment: str) -> None:
        # Here and not once: the other users of the one server per process want less of it.
        self._context.set_forkserver_preload(PRELOAD)
        self._log = tempfile.NamedTemporaryFile()  # noqa: SIM115 - as long as this object
        self._output, theirs = self._context.Pipe(duplex=False)
        environment = {**child_environment(), **environment}
        self._process = self._context.Process(
            target=_run, args=(program, flags, environment, theirs, self._log.name)
        )
        self._process.start()
        # One that was lost would be waited for at the end. Not `daemon`, which must not have
        # children.
        atexit.register(self._process.kill)
        theirs.close()
        self.pid = self._process.pid or 0

    def line(self) -> str:
        """The next line that it prints. Raises `StartFailed`, with its log, if there is none."""
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self._output.fileno(), 1) if self._output.poll(START_S) else b""
            if not byte:
                raise StartFailed(self.log)
            line += byte
        return line.decode().rstrip()

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    @property
    def stopped(self) -> bool:
        """Whether each of its threads is."""
        # Thread by thread: one that is on another core runs on for a moment after the others.
        return {_state(task) for task in Path(f"/proc/{self.pid}/task").iterdir()} == {"T"}

    def signal(self, number: signal.Signals) -> None:
        """Send a signal. After SIGSTOP no thread runs, after SIGKILL nothing is left.

        Raises `TimeoutError` where that takes too long.
        """
        os.kill(self.pid, number)
        if number == signal.SIGSTOP:
            give_up = time.monotonic() + 20
            while not self.stopped:
                if time.monotonic() > give_up:
                    raise TimeoutError(f"process {self.pid} does not stop")
        elif number == signal.SIGKILL:
            self.wait()

    def wait(self, timeout: float = 20.0) -> int:
        """Its exit code; negative: the signal that ended it. Raises `TimeoutError`."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"process {self.pid} does not end")
        return self._process.exitcode

    def kill(self) -> None:
        """End it, in whatever state it is, and all that it has started. Idempotent."""
        if self._process.is_alive():
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()
        atexit.unregister(self._process.kill)
        self._output.close()
        self._log.close()


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # the thread has ended
        return "T"


def _run(
    program: Program,
    flags: Sequence[str],
    environment: dict[str, str],
    output: Connection,
    log: str,
) -> None:
    os.setpgrp()
    # The server ends when nobody has its lifeline any longer, with that all its children, and it is
    # given to each of them too. Without, only whoever has started it has it, however that ends.
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(output.fileno(), 1)
    with open(log, "wb") as file:  # noqa: PTH123
        os.dup2(file.fileno(), 2)
    output.close()
    sys.exit(program(flags))  # type: ignore[arg-type]  # None and codes alike
