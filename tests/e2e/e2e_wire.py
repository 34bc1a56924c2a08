"""A wire that delays and loses frames, since not every kernel has netem.

A thread moves the frames between two interfaces of a namespace that has no addresses.
"""

from __future__ import annotations

import ctypes
import os
import random
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import TypeVar

__all__ = ["Wire", "within"]

CLONE_NEWNET = 0x40000000
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
ETH_P_ALL = 0x0003
FRAME = 1 << 17  # bytes, with the header that says which segments and checksums are left to do
MOST_WAITING = 2000  # frames in one direction; further ones are lost, as in a router
T = TypeVar("T")


def within(namespace: str, call: Callable[[], T]) -> T:
    """Return the result of a call in a network namespace."""

    def run() -> T:
        with (Path("/run/netns") / namespace).open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        return call()

    with ThreadPoolExecutor(1) as pool:  # a thread that ends, since it stays there
        return pool.submit(run).result()


class Wire:
    """Moves frames between two interfaces of `namespace` until `close`.

    Each waits for `delay_s` and is lost with the probability `loss`.
    """

    def __init__(self, namespace: str, ends: tuple[str, str], delay_s: float, loss: float) -> None:
        self._delay_s, self._loss = delay_s, loss
        self._random = random.Random(1)
        self._ends = [within(namespace, lambda end=end: _tap(end)) for end in ends]
        self._waiting: list[deque[tuple[float, bytes]]] = [deque(), deque()]  # by their source
        self.moved = self.lost = 0
        self._wake, self._woken = os.pipe()
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.close(self._woken)
        self._thread.join()
        os.close(self._wake)
        for end in self._ends:
            end.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for number, end in enumerate(self._ends):
                selector.register(end, selectors.EVENT_READ, number)
            selector.register(self._wake, selectors.EVENT_READ, None)
            while True:
                first = min((queue[0][0] for queue in self._waiting if queue), default=None)
                timeout = None if first is None else max(0.0, first - time.monotonic())
                for key, _ in selector.select(timeout):
                    if key.data is None:
                        return
                    self._take(key.data)
                for number, queue in enumerate(self._waiting):
                    while queue and queue[0][0] <= time.monotonic():
                        self._put(1 - number, queue.popleft()[1])

    def _take(self, source: int) -> None:
        queue = self._waiting[source]
        for _ in range(64):
            try:
                frame = self._ends[source].recv(FRAME)
            except OSError:
                return
            if self._random.random() < self._loss or len(queue) >= MOST_WAITING:
                self.lost += 1
            else:
                queue.append((time.monotonic() + self._delay_s, frame))

    def _put(self, target: int, frame: bytes) -> None:
        try:
            self._ends[target].send(frame)
            self.moved += 1
        except OSError:  # a full queue, or an interface that is down
            self.lost += 1


def _tap(interface: str) -> socket.socket:
    tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    tap.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    tap.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    tap.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 23)
    tap.bind((interface, 0))
    tap.setblocking(False)
    return tap
