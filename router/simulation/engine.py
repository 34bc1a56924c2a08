"""A simulated engine: the calls of a real one, with a latency model instead of a model.

It keeps leases, a prefix cache and running generations as an engine does. Its tokens depend on all
tokens before them and on nothing else. Its time is the event loop's, real or virtual.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Literal

from engine.protocol import (
    BadAddress,
    BadRange,
    BadRequest,
    EngineState,
    KVIncomplete,
    ModelInfo,
    PageCounts,
    PageName,
    PrefixChange,
    PrepRecvReply,
    RemoteSendReply,
    UnknownLease,
    page_names,
)
from router.base import NobodyListens
from router.engines import Headers
from router.simulation.stream import (
    VOCAB,
    Latency,
    SimulatedLease,
    SimulatedMirror,
    SimulatedStream,
    tokens_after,
)

__all__ = ["Latency", "SimulatedEngine", "tokens_after"]

PAGE = 16
CONTEXT = 4096
LEASE_S = 30.0
Role = Literal["any", "prefill", "decode"]
# Words `w0 w1 …`: token i is the word wi.
TOKENIZER = (
    '{"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": {"type": "WordLevel", '
    f'"unk_token": "w0", "vocab": {json.dumps({f"w{i}": i for i in range(VOCAB)})}}}}}'
)


class SimulatedEngine:
    """One engine among `peers`, which all engines of a simulation share.

    `dies_after`, shared too, holds at most one number: the first engine to emit that many tokens in
    one stream dies, and empties it. At rest `busy` is empty.
    """

    def __init__(
        self,
        id: str,
        peers: dict[str, SimulatedEngine],
        *,
        role: Role = "any",
        latency: Latency | None = None,
        dies_after: list[int] | None = None,
    ) -> None:
        self.id = id
        self.url = f"sim://{id}"
        self.role: Role = role
        self.dies_after = dies_after if dies_after is not None else []
        self._latency = latency or Latency()
        self.peers = peers
        self._dead = False
        self.leases: dict[str, SimulatedLease] = {}
        self._running: dict[str, SimulatedStream] = {}
        self._sending = 0
        self._cached: set[PageName] = set()
        self._followers: set[asyncio.Queue[list[PageName] | None]] = set()
        self._numbers = itertools.count(1)
        peers[self.url] = self

    @property
    def busy(self) -> list[str]:
        """Descriptions of all that still runs."""
        return [
            *(f"a lease of {lease.end} tokens on {self.id}" for lease in self.leases.values()),
            *(f"a generation on {self.id}" for _ in self._running),
            *(f"a send from {self.id}" for _ in range(self._sending)),
        ]

    async def prep_recv(self, body: dict[str, Any], headers: Headers) -> PrepRecvReply:
        prompt, end = body["prompt"], body["end"]
        self._check(0 <= end <= len(prompt), f"end {end}")
        await self._spend(self._latency.call)
        match = self._match(prompt[:end])
        lease_id = f"{self.id}-{next(self._numbers)}"
        self.leases[lease_id] = SimulatedLease(
            body["request_id"], prompt[:end], match, end, end + body.get("reserve", 0), match
        )
        return PrepRecvReply(
            lease_id=lease_id, kv_addr=f"{self.url} {lease_id}", match_len=match, end=end,
            expires_ms=int(LEASE_S * 1e3),
        )  # fmt: skip

    async def remote_send(self, body: dict[str, Any], headers: Headers) -> RemoteSendReply:
        prompt, begin, end = body["prompt"], body["begin"], body["end"]
        self._check(0 <= begin < end <= len(prompt), f"[{begin}, {end})")
        url, _, lease_id = body["kv_addr"].partition(" ")
        receiver = self.peers[url]
        lease = receiver._lease(lease_id)
        if lease.prompt != prompt[: lease.end]:
            raise BadAddress("the address is for another prompt", param="kv_addr")
        self._check(end <= lease.end, f"end {end} of a lease of {lease.end}")
        self._check(begin == lease.landed, f"begin {begin}, but {lease.landed} tokens are there")
        match = self._match(prompt[:end])
        cached, computed = max(0, match - begin), end - match
        took = self._latency.prefill_token * computed + self._latency.put_token * (end - begin)
        self._sending += 1
        try:
            await self._spend(self._latency.call + took)
        finally:
            self._sending -= 1
        self._keep(prompt[:end])
        receiver._lease(lease_id)  # raises if it has ended
        lease.landed = end
        lease.changed.set()
        return RemoteSendReply(
            sent_tokens=end - begin, cached_tokens=cached, computed_tokens=computed,
            bytes=end - begin, ms=took,
        )  # fmt: skip

    async def start_generate(self, body: dict[str, Any], headers: Headers) -> SimulatedStream:
        tokens = [*body["prompt"], *body.get("output", ())]
        begin = body.get("begin", 0)
        self._check(begin < len(tokens), f"begin {begin} leaves nothing to compute")
        await self._spend(self._latency.call)
        have = self._match(tokens)
        if lease_id := body.get("lease_id"):
            lease = self._lease(lease_id)
            begin = body.get("begin", lease.landed)
            self._check(begin <= lease.room, f"begin {begin} of a lease of {lease.room}")
            await self._landed(lease, begin)
            self._end(lease_id)
            have = max(have, begin)
        stream = SimulatedStream(self, body, tokens, min(have, len(tokens) - 1), self._latency)
        self._running[body["request_id"]] = stream
        return stream

    async def mirror(self, body: dict[str, Any], headers: Headers) -> None:
        await self._spend(self._latency.call)
        if (stream := self._running.get(body["request_id"])) is None:
            raise BadRequest("no such generation", param="request_id")
        stream.mirror = SimulatedMirror(self.peers, body)

    async def commit(self, body: dict[str, Any], headers: Headers) -> None:
        await self._spend(self._latency.call)
        lease = self._lease(body["lease_id"])
        self._keep(lease.prompt[: lease.landed])
        self._end(body["lease_id"])

    async def release(self, body: dict[str, Any], headers: Headers) -> None:
        if lease_id := body.get("lease_id"):
            self._end(lease_id)
        if request_id := body.get("request_id"):
            for lease_id, lease in list(self.leases.items()):
                if lease.request_id == request_id:
                    self._end(lease_id)
            if stream := self._running.get(request_id):
                stream.abort()
        await self._spend(self._latency.call)

    async def pin(self, body: dict[str, Any], headers: Headers) -> int:
        await self._spend(self._latency.call)  # nothing is ever evicted here
        return self._match(body["prompt"])

    unpin = pin

    async def prefixes(self) -> AsyncGenerator[PrefixChange, None]:
        await self._spend(self._latency.call)
        changes: asyncio.Queue[list[PageName] | None] = asyncio.Queue()
        changes.put_nowait(list(self._cached))
        self._followers.add(changes)
        try:
            while (added := await changes.get()) is not None:
                yield PrefixChange(added=added, removed=[])
        finally:
            self._followers.discard(changes)
        raise NobodyListens(f"{self.url}: it is dead")

    async def model(self) -> ModelInfo:
        return ModelInfo(
            name="simulated", context_length=CONTEXT, vocab_size=VOCAB, eos_token_ids=[0],
            bos_token=None, eos_token="w0", tokenizer_json=TOKENIZER,  # noqa: S106  no password
            chat_template="{% for m in messages %}{{ m.content }} {% endfor %}",
            fingerprint="simulated", page_size=PAGE, kv_bytes_per_token=1,
        )  # fmt: skip

    async def state(self) -> EngineState:
        pages = PageCounts(total=0, free=0, cached=0, leased=0, active=0, quarantined=0, pinned=0)
        return EngineState(
            engine_id=self.id, epoch=1, role=self.role, model="simulated", page_size=PAGE,
            pages=pages, running=len(self._running), waiting=0, leases=[],
            puts_in_flight=self._sending, prefix_tokens=len(self._cached) * PAGE,
            secret_digest="simulated",  # noqa: S106  no password
        )  # fmt: skip

    async def health(self) -> None:
        await self._spend(0.0)

    def close(self) -> None:
        """Nothing is open."""

    def die(self) -> None:
        """Behave like a killed process: all that it held is gone, and nothing listens."""
        self._dead = True
        for lease_id in list(self.leases):
            self._end(lease_id)
        for stream in list(self._running.values()):
            stream.abort()
        for changes in self._followers:
            changes.put_nowait(None)

    def forget(self, request_id: str) -> None:
        self._running.pop(request_id, None)

    def keep(self, tokens: Sequence[int]) -> None:
        """Add the full pages of `tokens` to the prefix cache."""
        self._keep(tokens)

    async def _spend(self, milliseconds: float) -> None:
        for _ in range(2):
            if self._dead:
                raise NobodyListens(f"{self.url}: it is dead")
            await asyncio.sleep(milliseconds / 2e3)

    async def _landed(self, lease: SimulatedLease, begin: int) -> None:
        try:
            async with asyncio.timeout(LEASE_S):
                while lease.landed < begin and not lease.ended:
                    lease.changed.clear()
                    await lease.changed.wait()
        except TimeoutError:
            raise KVIncomplete(f"{lease.landed} of {begin} tokens have landed") from None
        if lease.ended:
            raise UnknownLease("the lease has ended", param="lease_id")

    def _lease(self, lease_id: str) -> SimulatedLease:
        if (lease := self.leases.get(lease_id)) is None:
            raise UnknownLease(f"no lease {lease_id!r}", param="lease_id")
        return lease

    def _end(self, lease_id: str) -> None:
        if (lease := self.leases.pop(lease_id, None)) is not None:
            lease.ended = True
            lease.changed.set()

    def _match(self, tokens: Sequence[int]) -> int:
        pages = itertools.takewhile(self._cached.__contains__, page_names(tokens, PAGE))
        return sum(PAGE for _ in pages)

    def _keep(self, tokens: Sequence[int]) -> None:
        added = [name for name in page_names(tokens, PAGE) if name not in self._cached]
        self._cached.update(added)
        if added:
            for changes in self._followers:
                changes.put_nowait(added)

    @staticmethod
    def _check(holds: bool, what: str) -> None:
        if not holds:
            raise BadRange(what)
