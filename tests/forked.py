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
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

PRELOAD = ["engine.main", "engine.build", "engine.server", "kvcache.cache", "router.cli"]
START_S = 60.0
PR_SET_PDEATHSIG = 1
Program = Callable[[Sequence[str]], int]


def engine(flags: Sequence[str]) -> int:
    """`python -m engine`."""
    from engine.main import main

    return main(flags)


def microserve(flags: Sequence[str]) -> int:
    """`microserve`, the console script."""
    from router.cli import main

    sys.argv = ["microserve", *flags]
    main()
    return 0


class Forked:
    """A process that runs `program`; `line` is what it prints, `log` what it logs.

    With `WALL_CLOCK` in its environment, a file with a number, its wall clock is so many seconds
    off.
    """

    _context = mp.get_context("forkserver")

    def __init__(self, program: Program, *flags: str, **environment: str) -> None:
        # Here and not once: the other users of the one server per test run want less of it.
        self._context.set_forkserver_preload(PRELOAD)
        self._log = tempfile.NamedTemporaryFile()  # noqa: SIM115 - as long as this object
        self._output, theirs = self._context.Pipe(duplex=False)
        self._process = self._context.Process(
            target=_run, args=(program, flags, environment, theirs, self._log.name)
        )
        self._process.start()
        # One that a test has lost would be waited for at the end. Not `daemon`, which must not have
        # children.
        atexit.register(self._process.kill)
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def line(self) -> str:
        """The next line that it prints. Raises `RuntimeError`, with its log, if there is none."""
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self._output.fileno(), 1) if self._output.poll(START_S) else b""
            if not byte:
                raise RuntimeError(self.log)
            line += byte
        return line.decode().rstrip()

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text()

    @property
    def stopped(self) -> bool:
        """Whether each of its threads is."""
        # Thread by thread: one that is on another core runs on for a moment after the others.
        return {_state(task) for task in Path(f"/proc/{self.pid}/task").iterdir()} == {"T"}

    def signal(self, number: signal.Signals) -> None:
        """Send a signal. After SIGSTOP no thread runs, after SIGKILL nothing is left."""
        os.kill(self.pid, number)
        if number == signal.SIGSTOP:
            give_up = time.monotonic() + 20
            while not self.stopped:
                assert time.monotonic() < give_up, "it does not stop"
        elif number == signal.SIGKILL:
            self.wait()

    def wait(self, timeout: float = 20.0) -> int:
        """Its exit code; negative: the signal that ended it."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, "it does not end"
        return self._process.exitcode

    def kill(self) -> None:
        """End it, in whatever state it is. Idempotent."""
        if self._process.is_alive():
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


def _shift_wall_clock(offset: Path) -> None:
    """The wall clock is off by the seconds in the file from now on, also when they change; the
    monotonic clocks are left alone."""
    real_ns, real_clock = time.time_ns, time.clock_gettime

    def shifted_ns() -> int:
        return real_ns() + round(float(offset.read_text()) * 1e9)

    def clock_gettime(clock: int) -> float:
        return shifted_ns() / 1e9 if clock == time.CLOCK_REALTIME else real_clock(clock)

    time.time_ns, time.clock_gettime = shifted_ns, clock_gettime
    time.time = lambda: shifted_ns() / 1e9


def _run(
    program: Program,
    flags: Sequence[str],
    environment: dict[str, str],
    output: Connection,
    log: str,
) -> None:
    os.setpgrp()
    # With the server ends the test run, and with that everything, however the run ends.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(environment)
    os.dup2(output.fileno(), 1)
    with open(log, "wb") as file:  # noqa: PTH123
        os.dup2(file.fileno(), 2)
    output.close()
    if clock := environment.get("WALL_CLOCK"):
        _shift_wall_clock(Path(clock))
    sys.exit(program(flags))
