"""What a simulated engine emits: one token per step, and what it puts into a replica."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.protocol import Usage
from router.base import Chunk, EngineUnreachable, Mirrored

__all__ = [
    "VOCAB", "Latency", "SimulatedLease", "SimulatedMirror", "SimulatedStream", "tokens_after",
]  # fmt: skip

VOCAB = 1000


@dataclass(frozen=True, slots=True)
class Latency:
    """Durations in milliseconds."""

    call: float = 1.0  # the round trip of any call
    prefill_token: float = 0.01
    put_token: float = 0.001
    step: float = 1.0  # one decode step


def tokens_after(prompt: Sequence[int], *, seed: int = 0, choice: int = 0) -> Iterator[int]:
    """Yield what every simulated engine emits after `prompt`, without end."""
    state = zlib.crc32(b"%d/%d" % (seed, choice))
    for token in prompt:
        state = zlib.crc32(b"%d," % token, state)
    while True:
        token = 1 + state % (VOCAB - 1)
        yield token
        state = zlib.crc32(b"%d," % token, state)


@dataclass(eq=False, slots=True)
class SimulatedLease:
    """Room for the KV of `prompt[match_len:end]`, `room` tokens in all."""

    request_id: str
    prompt: list[int]
    match_len: int
    end: int
    room: int
    landed: int
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # more has landed, or it ended
    ended: bool = False


class Host(Protocol):
    """The simulated engine that a stream runs on."""

    leases: dict[str, SimulatedLease]

    @property
    def dies_after(self) -> list[int]: ...

    @property
    def peers(self) -> Mapping[str, Host]: ...

    def die(self) -> None: ...

    def forget(self, request_id: str) -> None: ...

    def keep(self, tokens: Sequence[int]) -> None: ...


class SimulatedStream:
    """One generation: one token per step."""

    def __init__(
        self,
        engine: Host,
        body: dict[str, Any],
        tokens: list[int],
        begin: int,
        latency: Latency,
    ) -> None:
        self._engine = engine
        self._request_id: str = body["request_id"]
        self._prompt_tokens = len(body["prompt"])
        self._tokens = tokens
        self._begin = begin
        self._latency = latency
        self._limit: int = body.get("max_tokens", 16) - len(tokens) + self._prompt_tokens
        self._source = tokens_after(tokens, seed=body.get("seed", 0), choice=body.get("choice", 0))
        self._emitted = 0
        self.mirror = SimulatedMirror(engine.peers, body["mirror"]) if "mirror" in body else None
        self._aborted = False

    async def next(self) -> Chunk:
        todo = len(self._tokens) - self._begin if self._emitted == 0 else 0
        await asyncio.sleep((self._latency.step + self._latency.prefill_token * todo) / 1e3)
        dies_after = self._engine.dies_after
        if dies_after and self._emitted >= dies_after[0]:
            dies_after.clear()
            self._engine.die()
        if self._aborted:
            raise EngineUnreachable("the stream broke")
        token = next(self._source)
        self._tokens.append(token)
        self._emitted += 1
        chunk = Chunk([token], f"w{token} ", self._begin if self._emitted == 1 else None)
        if self.mirror is not None:
            chunk.mirror = self.mirror.advance(len(self._tokens) - 1)
        if self._emitted >= self._limit:
            chunk.finish_reason = "length"
            chunk.usage = Usage(
                prompt_tokens=self._prompt_tokens,
                completion_tokens=len(self._tokens) - self._prompt_tokens,
                cached_tokens=min(self._begin, self._prompt_tokens),
            )
            self._engine.keep(self._tokens)
            self._engine.forget(self._request_id)
        return chunk

    def progress(self) -> None:
        """A simulated engine is never silent."""

    def abort(self, reason: str = "") -> None:
        self._aborted = True
        self._engine.keep(self._tokens)
        self._engine.forget(self._request_id)

    async def finish(self) -> None:
        self._engine.forget(self._request_id)


class SimulatedMirror:
    """What a generation has put into a replica's lease on another engine."""

    def __init__(self, peers: Mapping[str, Host], body: dict[str, Any]) -> None:
        url, _, self._lease_id = body["kv_addr"].partition(" ")
        self._peer = peers[url]
        self._every: int = body["every"]
        self._sent = 0

    def advance(self, computed: int) -> Mirrored:
        """Put new KV if there is enough; what one step puts has landed in the next."""
        lease = self._peer.leases.get(self._lease_id)
        if lease is None:
            return Mirrored(0, self._lease_id, "lease_expired", "the lease has ended")
        lease.landed = max(lease.landed, self._sent)
        if computed >= self._sent + self._every:
            self._sent = lease.room = computed  # as if it had requested more room in time
        return Mirrored(lease.landed, self._lease_id)
