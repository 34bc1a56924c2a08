"""The process of a worker. The lead starts it, with one end of a socket pair."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import sys

from engine.workers.settings import WorkerSettings
from engine.workers.wire import Array, Kind, receive, send, send_text, text_of

PR_SET_PDEATHSIG = 1
log = logging.getLogger("engine.worker")


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

    try:
        worker = PartWorker(settings)
        facts = [worker.row_multiple, worker.weight_bytes]
    except (ModelError, MicroserveError, RuntimeError, OSError, MemoryError) as error:
        send_text(lead, Kind.FAILED, f"{type(error).__name__}: {error}")
        return
    digest = worker.model.weights_digest
    send(lead, Kind.DONE, [facts, list(digest.encode())])

    def answer(kind: Kind, arrays: list[Array]) -> None:
        if kind == Kind.STEP:
            worker.step(arrays)
        elif kind == Kind.ALLOCATE:
            worker.map_pages(*map(int, arrays[0]))
        elif kind == Kind.REJOIN:
            worker.rejoin(text_of(arrays))
        else:
            raise ValueError(f"a lead sends no {kind.name}")

    try:
        while True:
            kind, arrays = receive(lead)
            try:
                answer(kind, arrays)
            except Exception as error:  # the lead says what becomes of it
                log.exception("%s failed", kind.name)
                send_text(lead, Kind.FAILED, f"{type(error).__name__}: {error}")
            else:
                send(lead, Kind.DONE)
    finally:
        worker.close()


if __name__ == "__main__":
    raise SystemExit(main())
