"""A second process with a cache in shared memory, driven over a pipe, for the tests of `shm`.

It is forked from a server that has imported torch, so that it starts in milliseconds; it shares
nothing with the test but the kernel.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import torch
from kv_helpers import assert_content, compute, make_cache, send, sequence, small_layout

from kvcache.errors import MicroserveError
from kvcache.transport import ShmTransport, Transport
from kvcache.transport.mapped import MappedTarget
from kvcache.types import LeaseId, SeqId

PAGES = 32


class Commands:
    """What a peer does when told to."""

    target: ClassVar[type] = MappedTarget  # what puts write into

    def __init__(self, name: str, epoch: int) -> None:
        torch.set_num_threads(1)
        layout = small_layout(PAGES)
        transport = self.transport(epoch)
        self.cache = make_cache(transport, layout, name=name, epoch=epoch, clock=time.monotonic)

    def transport(self, epoch: int) -> Transport:
        return ShmTransport(epoch)

    def prep_recv(self, prompt: list[int], end: int) -> tuple[str, str]:
        lease, address = self.cache.prep_recv("r", prompt, end, 0, 60.0)
        return lease.lease_id, address

    def landed(self, lease_id: str) -> int:
        return self.cache.lease(LeaseId(lease_id)).landed

    def start_and_compare(self, lease_id: str, prompt: list[int]) -> int:
        length = self.cache.start_lease(LeaseId(lease_id), SeqId(1), prompt, None)
        assert_content(self.cache, SeqId(1), prompt[:length])
        self.cache.check_integrity()
        return length

    def send(self, address: str, prompt: list[int], begin: int, end: int) -> None:
        send(self.cache, address, prompt, begin, end)

    def send_and_stop_within(self, address: str, prompt: list[int], end: int) -> str:
        """Stop this process while it holds the write right, before a byte; say how it went on."""
        put = self.cache.open_put(address, prompt, 0, end)
        seq_id = sequence(self.cache, 7, prompt[:end])
        self._stop_within("copy")
        self.cache.mark_send(seq_id, put, 0, end)
        try:
            put.close().result(10)
        except MicroserveError as error:
            return f"{error.type} after {put.bytes_sent} bytes"
        return "landed"

    def claim_and_stop_within(self, address: str, prompt: list[int], end: int) -> None:
        """Stop this process while it holds the write right alone, before it has claimed."""
        self._stop_within("store")
        self.cache.open_put(address, prompt, 0, end)

    def _stop_within(self, call: str) -> None:
        """Stop in the next call of that name of what puts write into, which is under the right."""
        target = self.target
        usual = getattr(target, call)

        def stop_first(*args: Any) -> Any:
            setattr(target, call, usual)
            # To this thread: sent to the process, it might run on for a moment.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            return usual(*args)

        setattr(target, call, stop_first)

    def compute(self, number: int, tokens: list[int]) -> None:
        self.cache.add_sequence(SeqId(number))
        compute(self.cache, SeqId(number), tokens)


def serve(pipe: Connection, make: Callable[[str, int], Commands], name: str, epoch: int) -> None:
    commands = make(name, epoch)
    pipe.send(os.getpid())
    while True:
        try:
            what, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(getattr(commands, what)(*args))
        except Exception as error:  # noqa: BLE001 - the test raises it
            pipe.send(error)


class Peer:
    """The test's end of such a process."""

    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["kvcache.cache"])

    def __init__(
        self, name: str, epoch: int = 1, make: Callable[[str, int], Commands] = Commands
    ) -> None:
        self._pipe, theirs = self.context.Pipe()
        self._process = self.context.Process(
            target=serve, args=(theirs, make, name, epoch), daemon=True
        )
        self._process.start()
        theirs.close()
        self.pid: int = self._pipe.recv()

    def tell(self, what: str, *args: object) -> None:
        """Give a command and do not wait for it."""
        self._pipe.send((what, args))

    def answer(self) -> Any:
        """Wait for the oldest command's result; raises what it raised."""
        if not self._pipe.poll(20):
            raise TimeoutError("the peer does not answer")
        result = self._pipe.recv()
        if isinstance(result, BaseException):
            raise result
        return result

    def has_answered(self) -> bool:
        """Return whether `answer` would not wait."""
        return self._pipe.poll(0)

    def call(self, what: str, *args: object) -> Any:
        self.tell(what, *args)
        return self.answer()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)
        if number == signal.SIGSTOP:
            self.wait_until_stopped()

    def wait_until_stopped(self) -> None:
        give_up = time.monotonic() + 20
        while self._state() != "T":
            if time.monotonic() > give_up:
                raise TimeoutError("the peer does not stop")
            time.sleep(0.001)

    def kill(self) -> None:
        """SIGKILL, and wait until nothing is left."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _state(self) -> str:
        with open(f"/proc/{self.pid}/stat") as stat:  # noqa: PTH123
            return stat.read().rpartition(")")[2].split()[0]
