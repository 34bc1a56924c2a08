"""Creditors for the tests: in this process, and in processes of their own."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from shm_peer import Peer

from kvcache.lease import Identity
from kvcache.lending import Lender
from kvcache.memory import KVLayout, SharedRegion
from kvcache.pages import PageManager
from kvcache.remote_attention import (
    AttentionShape,
    BorrowedPages,
    Creditor,
    Limits,
    PagesOfLoans,
    RemoteAttention,
    RemoteSpan,
)
from kvcache.remote_attention.creditor import answering
from kvcache.transport import Network
from kvcache.types import EngineId, LeaseId, PageId, TokenPos

EPOCH, SECRET = 7, b"secret"
DEBTOR = Identity(EngineId("debtor"), 3, SECRET, "same")


def identity(name: str, epoch: int = EPOCH) -> Identity:
    return Identity(EngineId(name), epoch, SECRET, "same")


class LendingEngine:
    """What a creditor's process has: a pool, a lender, and the thread that answers."""

    def __init__(
        self, name: str, layout: KVLayout, query_heads: int, *, share: float = 1.0, **options: Any
    ) -> None:
        self.region = SharedRegion.create(layout, EPOCH)
        self.pool = self.region.pool
        self.pool[:, 1:] = torch.nan
        self.lock = threading.Lock()
        self.lender = Lender(
            PageManager(layout.pages, layout.page_size),
            epoch=EPOCH,
            most=layout.pages,
            lease_s=600.0,
            growth=lambda: 0,
            clock=time.monotonic,
        )
        bad_loans = options.pop("bad_loans", None) or PagesOfLoans(self.lender, self.lock)
        self.creditor = Creditor(
            self.pool,
            layout,
            query_heads=query_heads,
            identity=identity(name),
            bad_loans=bad_loans,
            share=share,
            network=Network("127.0.0.1"),
            **options,
        )

    def lend(
        self, loan: str, size: int, debtor: str = DEBTOR.engine_id, epoch: int = DEBTOR.epoch
    ) -> list[PageId]:
        with self.lock:
            pages = self.lender.allocate(EngineId(debtor), epoch, LeaseId(loan), size, at=EPOCH)
        assert pages
        return pages

    def free(self, loan: str, debtor: str = DEBTOR.engine_id, epoch: int = DEBTOR.epoch) -> int:
        with self.lock:
            return self.lender.free(EngineId(debtor), epoch, LeaseId(loan), at=EPOCH)

    def close(self) -> None:
        self.creditor.close()
        self.region.close()


class Commands:
    """A `LendingEngine` in a process of its own, for `shm_peer.Peer`."""

    def __init__(self, name: str, epoch: int) -> None:
        self.name = name
        self.engine: LendingEngine

    def start(self, layout: KVLayout, query_heads: int) -> tuple[int, tuple[str, ...]]:
        self.engine = LendingEngine(self.name, layout, query_heads)
        return self.engine.region.fd, self.engine.creditor.endpoints

    def lend(self, loan: str, size: int, epoch: int) -> list[PageId]:
        return self.engine.lend(loan, size, epoch=epoch)

    def answers(self) -> int:
        return self.engine.creditor.statistics().answers

    def stop_within_an_answer(self) -> None:
        """Stop this process in the middle of its next computation."""
        usual = answering.Answering._attend

        def stop_first(*args: Any) -> None:
            answering.Answering._attend = usual  # type: ignore[method-assign]
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            usual(*args)

        answering.Answering._attend = stop_first  # type: ignore[method-assign]


class CreditorProcess(Peer):
    """A creditor in a process of its own, and its pool as this process maps it."""

    def __init__(self, name: str, layout: KVLayout, query_heads: int) -> None:
        super().__init__(name, EPOCH, Commands)
        self.name = EngineId(name)
        fd, self.endpoints = self.call("start", layout, query_heads)
        self.region = SharedRegion.attach(self.pid, fd, EPOCH, layout)
        self.pool = self.region.pool

    def lend(self, loan: str, size: int, epoch: int) -> list[PageId]:
        pages: list[PageId] = self.call("lend", loan, size, epoch)
        return pages


def endpoint(endpoints: Sequence[str], kind: str) -> list[str]:
    """Return the endpoint of a kind, `unix` or `tcp`."""
    return [each for each in endpoints if each.startswith(kind)]


def borrow(loan: str, pages: Sequence[int], numbers: Sequence[int]) -> BorrowedPages:
    return BorrowedPages(LeaseId(loan), np.array(pages, np.int32), np.array(numbers, np.int32))


def decode_span(row: int, position: int, *borrowed: BorrowedPages) -> RemoteSpan:
    return RemoteSpan(row, TokenPos(position), 1, borrowed)


def remote(layout: KVLayout, query_heads: int, timeout_s: float = 20.0) -> RemoteAttention:
    return RemoteAttention(DEBTOR, AttentionShape.of(layout, query_heads), timeout_s=timeout_s)


def small_limits(**changes: int) -> Limits:
    return Limits(**{"rows": 64, "reply_bytes": 1 << 20, **changes})


def read_until_closed(connection: socket.socket) -> bytes:
    connection.settimeout(20)
    data = b""
    while part := connection.recv(1 << 16):
        data += part
    return data
