"""The process that workers are forked from (`engine.workers.template`), and a worker."""

from __future__ import annotations

import ctypes
import errno
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from queue import SimpleQueue
from typing import NoReturn, TypeVar

from engine.workers.exchange import (
    FORK,
    MESSAGE,
    Array,
    Kind,
    StepMessage,
    WorkerSettings,
    receive,
    send,
    send_text,
    text_of,
)

PR_SET_PDEATHSIG = 1
MOST_FDS = 8
log = logging.getLogger("engine.worker")
Item = TypeVar("Item")


def main() -> int:
    """Serve the lead until it ends; return the exit status."""
    if not _end_with(int(sys.argv[2])):
        return 1
    for number in (signal.SIGINT, signal.SIGTERM):  # the lead gets them too, and ends its workers
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    # What a worker needs. It starts no thread, so forks have all of this process.
    importlib.import_module("engine.workers.part.compute")
    importlib.import_module("engine.models.decoder")
    gc.collect()
    gc.freeze()  # so that collections in workers write less of the memory that they share
    while True:
        message, fds, _, _ = socket.recv_fds(control, MESSAGE.size, MOST_FDS)
        if len(message) < MESSAGE.size:
            return 0  # the lead has ended
        command, pid = MESSAGE.unpack(message)
        if command == FORK:
            answer = _fork(control, fds)
        else:
            try:
                answer = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            except ChildProcessError:
                answer = -signal.SIGKILL
        control.sendall(MESSAGE.pack(command, answer))


def _fork(control: socket.socket, fds: Sequence[int]) -> int:
    """Fork a worker with these descriptors; return its pid, or a negative error number."""
    own = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        pid = -(error.errno or errno.EAGAIN)
    if pid == 0:
        control.close()
        _run_worker(own, fds)
    for fd in fds:
        os.close(fd)
    return pid


def _end_with(parent: int) -> bool:
    """Have this process killed when its parent ends; return whether that is still there."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def _run_worker(parent: int, fds: Sequence[int]) -> NoReturn:
    """Be a worker, with these descriptors: of its lead, of logits, and perhaps of sums."""
    status = 1
    try:
        if _end_with(parent):
            with suppress(EOFError, ConnectionError):  # the lead has ended
                _serve(socket.socket(fileno=fds[0]), fds[1:])
            status = 0
    except BaseException:
        log.exception("a worker has ended")
    finally:
        logging.shutdown()
        os._exit(status)


def _serve(lead: socket.socket, fds: Sequence[int]) -> None:
    settings = WorkerSettings.from_json(text_of(receive(lead)[1]))
    settings = replace(settings, logits_fd=fds[0], sum_fd=fds[1] if len(fds) > 1 else -1)
    logging.basicConfig(
        level="INFO", format=f"%(asctime)s %(levelname)s {settings.name}: %(message)s"
    )
    os.sched_setaffinity(0, settings.cpus)
    import torch

    torch.set_num_threads(settings.threads)
    from engine.models import ModelError
    from engine.protocol import MicroserveError
    from engine.workers.part.compute import PartWorker
    from engine.workers.part.stage_link import StageLost
    from engine.workers.part.swapped_pages import SwapCounts

    try:
        worker = PartWorker(settings)
        facts = [worker.row_multiple, worker.weight_bytes]
    except (ModelError, MicroserveError, RuntimeError, OSError, MemoryError) as error:
        send_text(lead, Kind.FAILED, f"{type(error).__name__}: {error}")
        return
    digest = worker.model.weights_digest
    send(lead, Kind.DONE, [facts, list(digest.encode())])

    def answer(failure: Exception | None, computed_us: int, moved: SwapCounts) -> None:
        with suppress(ConnectionError):  # the lead has ended, as the next `receive` says
            if failure is None:
                send(lead, Kind.DONE, [[computed_us, *astuple(moved)]])
                return
            expected = isinstance(failure, StageLost)  # where another worker was lost
            log.error("%s", failure, exc_info=None if expected else failure)
            send_text(lead, Kind.FAILED, f"{type(failure).__name__}: {failure}")

    def announced() -> Iterator[tuple[Kind, list[Array], StepMessage | None]]:
        """Yield the lead's messages; the worker knows of steps before they are yielded."""
        while True:
            kind, arrays = receive(lead)
            step = StepMessage.of(arrays) if kind == Kind.STEP else None
            if step is not None:
                worker.announce(step)
            yield kind, arrays, step

    try:
        for kind, arrays, step in read_ahead(announced()) if settings.device_pages else announced():
            if step is not None:
                worker.step(step, answer)
                continue
            failure = None
            try:
                if kind == Kind.ALLOCATE:
                    worker.map_pages(*map(int, arrays[0]))
                elif kind == Kind.REJOIN:
                    worker.rejoin(text_of(arrays))
                else:
                    raise ValueError(f"a lead sends no {kind.name}")
            except Exception as error:  # noqa: BLE001  the lead says what becomes of it
                failure = error
            answer(failure, 0, SwapCounts())
    finally:
        worker.close()


def read_ahead(source: Iterator[Item]) -> Iterator[Item]:
    """Yield the items of an iterator that another thread advances. Raises what it raises."""
    items: SimpleQueue[Item | BaseException] = SimpleQueue()

    def read() -> None:
        try:
            for item in source:
                items.put(item)
        except BaseException as error:  # noqa: BLE001  raised below
            items.put(error)

    threading.Thread(target=read, name="messages", daemon=True).start()
    while not isinstance(item := items.get(), BaseException):
        yield item
    raise item


if __name__ == "__main__":
    raise SystemExit(main())
