"""The calls that migrate a prefix, and what keeps one from being migrated, without connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from engine.protocol import BadAddress, BadRequest, PrepRecvReply, RemoteSendReply
from router.base.config import RouterConfig
from router.base.errors import EngineUnreachable
from router.engines.backend import Backend
from router.engines.circuit_breaker import CircuitBreaker
from router.engines.prefix_index import NOTHING
from router.execution import Migrated, migrate_prefix
from router.execution import prefix_migration as module
from router.legs import Releaser, Runtime
from router.telemetry import Metrics

PREFIX = list(range(70))
HEADERS = {"X-Request-Id": "x"}


class Engine:
    """An engine of which others have `match_len` tokens in common with a prefix."""

    def __init__(self, id: str, calls: list[Any], match_len: int = 16) -> None:
        self.url = f"http://{id}:1"
        self.id = id
        self.calls = calls
        self.match_len = match_len
        self.fails: dict[str, Exception] = {}

    def _note(self, call: str, body: dict[str, Any], headers: Mapping[str, str]) -> None:
        assert headers == HEADERS
        self.calls.append((self.id, call))
        if call in self.fails:
            raise self.fails[call]

    async def prep_recv(self, body: dict[str, Any], headers: Any) -> PrepRecvReply:
        assert body["prompt"] == PREFIX
        self._note("prep_recv", body, headers)
        return PrepRecvReply(
            lease_id="l", kv_addr="k", match_len=self.match_len, end=body["end"], expires_ms=1
        )

    async def remote_send(self, body: dict[str, Any], headers: Any) -> RemoteSendReply:
        self._note("remote_send", body, headers)
        assert (body["prompt"], body["kv_addr"]) == (PREFIX, "k")
        sent = body["end"] - body["begin"]
        return RemoteSendReply(
            sent_tokens=sent, cached_tokens=sent, computed_tokens=0, bytes=4 * sent, ms=1.0
        )

    async def commit(self, body: dict[str, Any], headers: Any) -> None:
        self._note("commit", body, headers)
        assert body["lease_id"] == "l"

    async def release(self, body: dict[str, Any], headers: Any) -> None:
        self._note("release", body, headers)

    async def pin(self, body: dict[str, Any], headers: Any) -> int:
        self._note("pin", body, headers)
        assert body["prompt"] == PREFIX
        return 64

    async def unpin(self, body: dict[str, Any], headers: Any) -> int:
        self._note("unpin", body, headers)
        assert body["prompt"] == PREFIX
        return 7


class Prefixes:
    """The prefix index of an engine that has `cached` tokens, once `ready`."""

    def __init__(self) -> None:
        self.cached_tokens = 64
        self.ready = asyncio.Event()
        self.ready.set()
        self.told = False

    async def known(self, backend: Any) -> None:
        await self.ready.wait()
        self.told = backend.id == "source:1"

    def cached(self, backend: Any, request: Any, end: int, *, coming: bool) -> int:
        assert (backend.id, request.tokens, end, coming) == ("source:1", PREFIX, 70, False)
        return self.cached_tokens if self.told else 0

    def expect(self, *_: Any) -> Any:
        return NOTHING


class Pair:
    """Two engines that are up, and the parts of a router that moves a prefix between them."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.calls: list[Any] = []
        self.engines = [Engine(id, self.calls) for id in ("source", "target")]
        self.backends = [self._backend(engine) for engine in self.engines]
        self.prefixes = Prefixes()
        rooms = SimpleNamespace(leases=lambda *_: True, outgrows=lambda *_: False)
        registry: Any = SimpleNamespace(prefixes=self.prefixes, rooms=rooms)
        releaser = Releaser(tasks, 1.0)
        self.runtime = Runtime(RouterConfig(), registry, releaser, Metrics(), tasks)

    def _backend(self, engine: Any) -> Backend:
        backend = Backend(engine, CircuitBreaker(5, 5.0, lambda: 0.0))
        backend.status = "".join(["u", "p"])  # type: ignore[assignment]  # another object than "up"
        return backend

    async def migrate(self, pin: bool = False) -> Migrated:
        source, target = self.backends
        return await migrate_prefix(self.runtime, HEADERS, PREFIX, source, target, pin=pin)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with asyncio.TaskGroup() as tasks:
        yield Pair(tasks)


COPY = [("target", "prep_recv"), ("source", "remote_send"), ("target", "commit")]


async def test_what_the_receiver_lacks_is_sent_and_committed(pair, monkeypatch):
    times = iter([10.0, 32.5])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(times)))
    assert await pair.migrate() == Migrated(
        tokens=64, sent_tokens=48, bytes=4 * 48, ms=22500.0, pinned=0
    )
    assert pair.calls == COPY


async def test_a_pin_moves_with_the_prefix(pair):
    moved = await pair.migrate(pin=True)
    assert (moved.tokens, moved.pinned) == (64, 64)
    assert pair.calls == [*COPY, ("target", "pin"), ("source", "unpin")]


async def test_what_is_there_is_not_sent_again(pair):
    pair.engines[1].match_len = 64
    moved = await pair.migrate()
    assert (moved.tokens, moved.sent_tokens, moved.bytes) == (64, 0, 0)
    assert pair.calls == [COPY[0], COPY[2]]


@pytest.mark.parametrize("status", ["unknown", "suspect", "down"])
@pytest.mark.parametrize("number", [0, 1])
async def test_both_engines_must_be_up(pair, status, number):
    pair.backends[number].status = status
    name = ("source", "target")[number]
    with pytest.raises(EngineUnreachable, match=f"^engine {name}:1 is {status}$"):
        await pair.migrate()
    assert not pair.calls and not pair.prefixes.told


@pytest.mark.parametrize("digests", [("1", "2"), ("1", "1"), (None, "2")])
async def test_engines_with_different_secrets_exchange_no_prefix(pair, digests):
    for backend, digest in zip(pair.backends, digests, strict=True):
        backend.state = SimpleNamespace(secret_digest=digest, epoch=1, draining=False)
    if digests == ("1", "2"):
        with pytest.raises(BadRequest, match="source:1 and target:1 have different") as refused:
            await pair.migrate()
        assert refused.value.param == "to" and not pair.calls
    else:
        assert (await pair.migrate()).tokens == 64


async def test_a_prefix_that_is_not_cached_cannot_be_migrated(pair):
    pair.prefixes.cached_tokens = 0
    with pytest.raises(BadRequest, match="source:1 has no full page") as refused:
        await pair.migrate()
    assert refused.value.param == "prefix" and not pair.calls


async def test_a_refused_address_is_told_and_ends_the_lease(pair):
    """The engines have told nothing about their secrets."""
    pair.engines[0].fails["remote_send"] = BadAddress("not signed by this cluster")
    with pytest.raises(BadRequest, match="source:1 refuses the addresses of target:1") as refused:
        await pair.migrate(pin=True)
    assert refused.value.param == "to"
    assert pair.calls == [*COPY[:2], ("target", "release")]


async def test_the_loss_of_the_sender_ends_the_wait_for_its_prefixes(pair):
    pair.prefixes.ready.clear()
    moving = asyncio.ensure_future(pair.migrate())
    await asyncio.sleep(0)
    assert not moving.done()
    pair.backends[0].go_down("gone")
    with pytest.raises(EngineUnreachable, match="engine source:1 went down: gone"):
        await moving
    assert not pair.calls


async def test_a_failed_commit_ends_the_lease(pair):
    pair.engines[1].fails["commit"] = BadRequest("no")
    with pytest.raises(BadRequest, match="no"):
        await pair.migrate(pin=True)
    assert pair.calls == [*COPY, ("target", "release")]
