"""The process of a worker. The lead starts it, with one end of a socket pair."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import astuple
from queue import SimpleQueue
from typing import TypeVar

from engine.workers.settings import WorkerSettings
from engine.workers.wire import Array, Kind, receive, send, send_text, text_of

PR_SET_PDEATHSIG = 1
log = logging.getLogger("engine.worker")
Item = TypeVar("Item")


def main() -> int:
    """Serve the lead until it ends; return the exit status."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the lead, too
    if os.getppid() != int(sys.argv[2]):
        return 1
    lead = socket.socket(fileno=int(sys.argv[1]))
    settings = WorkerSettings.from_json(text_of(receive(lead)[1]))
    logging.basicConfig(
        level="INFO", format=f"%(asctime)s %(levelname)s {settings.name}: %(message)s"
    )
    os.sched_setaffinity(0, settings.cpus)
    try:
        _serve(lead, settings)
    except (EOFError, ConnectionError):
        return 0  # the lead has ended
    return 0


def _serve(lead: socket.socket, settings: WorkerSettings) -> None:
    import torch

    torch.set_num_threads(settings.threads or len(settings.cpus))
    from engine.models import ModelError
    from engine.protocol import MicroserveError
    from engine.workers.compute import PartWorker
    from engine.workers.step_message import StepMessage
    from engine.workers.swapped_pages import SwapCounts

    try:
        worker = PartWorker(settings)
        facts = [worker.row_multiple, worker.weight_bytes]
    except (ModelError, MicroserveError, RuntimeError, OSError, MemoryError) as error:
        send_text(lead, Kind.FAILED, f"{type(error).__name__}: {error}")
        return
    digest = worker.model.weights_digest
    send(lead, Kind.DONE, [facts, list(digest.encode())])

    def answer(failure: Exception | None, computed_us: int, moved: SwapCounts) -> None:
        if failure is None:
            send(lead, Kind.DONE, [[computed_us, *astuple(moved)]])
            return
        log.error("%s", failure, exc_info=failure)
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
