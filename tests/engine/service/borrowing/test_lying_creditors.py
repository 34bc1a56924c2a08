"""Creditors that answer nonsense lend nothing, and are told that the loan is over."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from engine.protocol import Creditor, LendCreditors
from engine.service.borrowing import Borrowing, BorrowingSettings
from kvcache.lease import Identity, KVAddress
from kvcache.remote_attention import AttentionShape, RemoteAttention
from kvcache.types import EngineId, LeaseId, PageId, SlotIndex

OWN = Identity(EngineId("d"), 5, b"secret", "print")
SHAPE = AttentionShape("float32", 1, 2, 1, 8, 16)
GOOD = KVAddress(
    engine_id=EngineId("c"), epoch=1, url="", endpoint="", lease_id=LeaseId("loan"),
    slot=SlotIndex(0), nonce=1, begin=0, end=0, room=128, runs=((PageId(1), 8),),
    fingerprint="print", digest="", shards=(),
)  # fmt: skip


def granted(address: str | None, **fields: Any) -> bytes:
    return json.dumps({"granted": True, "kv_addr": address, "lease_ms": 60_000, **fields}).encode()


LIES: dict[str, bytes] = {
    "no JSON": b"<html>",
    "another message": b'{"pages": 3}',
    "an error of its own": b'{"error": {"type": "internal", "message": "no"}}',
    "too long": b" " * (2 << 20),
    "no address": granted(None),
    "no signature": granted("A" * 200),
    "another secret": granted(GOOD.sign(b"other")),
    "another engine": granted(replace(GOOD, engine_id=EngineId("x")).sign(b"secret")),
    "another process": granted(replace(GOOD, epoch=2).sign(b"secret")),
    "another model": granted(replace(GOOD, fingerprint="x").sign(b"secret")),
    "fewer pages": granted(replace(GOOD, runs=((PageId(1), 7),)).sign(b"secret")),
    "all pages that there are": granted(
        replace(GOOD, runs=((PageId(1), 1 << 40),)).sign(b"secret")
    ),
    "no endpoint": granted(GOOD.sign(b"secret")),
    "a bad endpoint": granted(GOOD.sign(b"secret"), endpoints=["tcp:"]),
    "no time": granted(GOOD.sign(b"secret"), lease_ms=0),
}


class Liar:
    """Answers each allocation with `reply`, and notes all calls."""

    def __init__(self, reply: bytes) -> None:
        calls: list[tuple[str, dict[str, Any]]] = []
        self.calls = calls

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                name = self.path.rpartition("/")[2]
                calls.append((name, body))
                said = reply if name == "allocate" else b'{"freed_pages": 8}'
                self.send_response(200)
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def loans(self, call: str) -> set[str]:
        return {body["lease_id"] for name, body in list(self.calls) if name == call}


@pytest.fixture
def liar() -> Iterator[Callable[[bytes], Liar]]:
    made: list[Liar] = []

    def make(reply: bytes) -> Liar:
        made.append(Liar(reply))
        return made[-1]

    yield make
    for each in made:
        each.server.shutdown()
        each.server.server_close()


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_lends_nothing_and_is_freed(liar: Callable[[bytes], Liar], lie: str):
    creditor = liar(LIES[lie])
    settings = BorrowingSettings(rest_s=0.05, longest_rest_s=0.1)
    borrowing = Borrowing(OWN, RemoteAttention(OWN, SHAPE), page_size=16, settings=settings)
    try:
        one = Creditor(instance="c", epoch=1, url=creditor.url, available=99)
        borrowing.set_creditors(LendCreditors(creditors=[one]))
        borrowing.want(1)
        give_up = time.monotonic() + 20
        while len(creditor.loans("free")) < 2:  # it goes on asking, at a pace
            assert borrowing.take() is None
            assert time.monotonic() < give_up, creditor.calls
            time.sleep(0.01)
        assert borrowing.use().refusals >= 2
    finally:
        borrowing.close()
    assert creditor.loans("allocate") <= creditor.loans("free")
    assert not borrowing.use().pages
