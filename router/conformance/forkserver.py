"""Engine and router processes that start in a fraction of a second.

An engine spends most of its start on importing torch. These processes are forked from a server
process that has imported it, and then run the program's real `main` with real flags. Pid, port,
memory and signals are real, and each process leads a process group of its own.
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
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

from router.base import StartFailed, child_environment

__all__ = ["ForkedProcess", "Program", "run_engine", "run_microserve"]

PRELOAD = [
    "engine.main", "engine.build", "engine.api.app", "kvcache.cache", "router.cli", "xgrammar",
    "kvcache.kernels.stable_attention",  # compiled
    # What these import when they start to serve: most of the processor time of a start.
    "anyio._backends._asyncio", "httpcore", "pydantic.v1", "uvicorn.lifespan.on", "uvloop",
]  # fmt: skip
START_S = 300.0  # four vLLM engines at once import and warm up for minutes on two slow cores
PR_SET_PDEATHSIG = 1
Program = Callable[[Sequence[str]], object]
_environment = threading.Lock()


def run_engine(flags: Sequence[str]) -> None:
    """Run `python -m engine`."""
    _run_module("engine", flags)


def run_microserve(flags: Sequence[str]) -> None:
    """Run the console script `microserve`."""
    _run_module("router", flags)


def _run_module(name: str, flags: Sequence[str]) -> None:
    sys.argv = [name, *flags]
    # By name, because the router must not import engine modules.
    runpy.run_module(name, run_name="__main__", alter_sys=True)


class ForkedProcess:
    """A process that runs `program`. `line` reads its standard output, `log` its standard error.

    It inherits our environment without the variables that stand for flags, plus `environment`.
    """

    _context = mp.get_context("forkserver")

    def __init__(self, program: Program, *flags: str, **environment: str) -> None:
        # Each time, since a process has one server, and its other users set another preload.
        self._context.set_forkserver_preload(PRELOAD)
        self._log = tempfile.NamedTemporaryFile()  # noqa: SIM115 - as long as this object
        self._output, theirs = self._context.Pipe(duplex=False)
        environment = {**child_environment(), **environment}
        with _importing_as_here():
            forkserver.ensure_running()
        self._process = self._context.Process(
            target=_run, args=(program, flags, environment, theirs, self._log.name)
        )
        self._process.start()
        # At exit, multiprocessing waits for children that are still running, so kill this one. A
        # `daemon` process would be killed too, but must not have children.
        atexit.register(self._process.kill)
        theirs.close()
        self.pid = self._process.pid or 0

    def line(self) -> str:
        """Return the next line of output.

        Raises `StartFailed`, with the log, if it ended or takes more than `START_S`.
        """
        line = b""
        while not line.endswith(b"\n"):
            if not self._output.poll(START_S):
                raise StartFailed(f"not ready within {START_S:.0f} s\n{self.log}")
            byte = os.read(self._output.fileno(), 1)
            if not byte:
                raise StartFailed(self.log)
            line += byte
        return line.decode().rstrip()

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    @property
    def stopped(self) -> bool:
        """Whether all threads are stopped."""
        # After SIGSTOP a thread on another core runs on for a moment.
        return {_state(task) for task in Path(f"/proc/{self.pid}/task").iterdir()} == {"T"}

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, and wait for the effect of SIGSTOP (all threads) and SIGKILL.

        Raises `TimeoutError` if that takes more than 20 s.
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
        """Wait for its exit code; negative: the signal that ended it. Raises `TimeoutError`."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"process {self.pid} does not end")
        return self._process.exitcode

    def kill(self) -> None:
        """Kill its process group, in any state. Idempotent."""
        if self._process.is_alive():
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()
        atexit.unregister(self._process.kill)
        self._output.close()
        self._log.close()


@contextmanager
def _importing_as_here() -> Iterator[None]:
    """Have processes that start meanwhile import the packages that this process has imported.

    Otherwise the fork server would prefer those in the current folder.
    """
    path = child_environment().get("PYTHONPATH", "")
    with _environment:
        before = dict(os.environ)
        os.environ |= {"PYTHONSAFEPATH": "1", **({"PYTHONPATH": path} if path else {})}
        try:
            yield
        finally:
            for name in ("PYTHONSAFEPATH", "PYTHONPATH"):
                os.environ.pop(name, None)
                if name in before:
                    os.environ[name] = before[name]


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
    # The fork server ends when the last holder of this descriptor closes it. The server passes the
    # descriptor to its children too. Without their copies, the server ends with the process that
    # started it, however that ends, and by PDEATHSIG so do the children.
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(output.fileno(), 1)
    with open(log, "wb") as file:  # noqa: PTH123
        os.dup2(file.fileno(), 2)
    output.close()
    sys.exit(program(flags))  # type: ignore[arg-type]  # None or an exit code
