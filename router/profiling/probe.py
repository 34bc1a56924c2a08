"""One engine under measurement: what it counts, and work for it that no cache shortens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from engine.protocol import BadRequest, EngineState, ModelInfo
from router.engines import ChunkStream, EngineClient, HttpClient

__all__ = ["Counters", "Probe", "patience"]

FIRST_ID, IDS = 10, 290  # of random prompts: every vocabulary has these
POLL_S = 0.005
PATIENCE_S = 300.0  # for one measurement
COUNTERS = {
    "microserve:steps_total": "steps",
    "microserve:step_seconds_total": "seconds",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "output_tokens",
}
METRICS_BYTES = 4 << 20
MOST = 2.0**53  # of a counter: differences are exact


def patience() -> asyncio.Timeout:
    """Return the time limit of one measurement, for `async with`."""
    return asyncio.timeout(PATIENCE_S)


class Counters(NamedTuple):
    """What an engine has done: since its start, or between two readings."""

    steps: float
    seconds: float  # in steps
    prompt_tokens: float  # computed
    output_tokens: float

    def since(self, earlier: Counters) -> Counters:
        """Return the difference. Raises `BadRequest` if a counter has gone backwards."""
        passed = Counters(*(now - then for now, then in zip(self, earlier, strict=True)))
        if min(passed) < 0:
            raise BadRequest("the engine's counters go backwards: it was restarted, or is none")
        return passed


class Probe:
    """An engine that does nothing else."""

    def __init__(self, http: HttpClient, seed: int = 0) -> None:
        self.client = EngineClient(http)
        self.info: ModelInfo
        self.state: EngineState
        self._http = http
        self._source = random.Random(seed)
        self._names = 0

    async def meet(self) -> None:
        """Read its model and its state. Raises `BadRequest` if it is at work for others."""
        async with patience():
            self.info = await self.client.model()
            self.state = await self.client.state()
        if self.state.running or self.state.waiting or self.state.leases:
            raise BadRequest(
                f"{self.client.url} is at work: an engine is profiled while it is idle"
            )

    def check_puts(self, peer: Probe) -> None:
        """Raise `BadRequest` unless it can put KV into `peer`."""
        for probe, capability in ((self, "remote_send"), (peer, "prep_recv")):
            if capability not in probe.info.capabilities:
                raise BadRequest(f"{probe.client.url} does not support {capability}")
        if self.info.fingerprint != peer.info.fingerprint:
            raise BadRequest(f"{self.client.url} and {peer.client.url} exchange no KV")

    def prompt(self, tokens: int) -> list[int]:
        """Return a prompt that no cache knows."""
        return [FIRST_ID + self._source.randrange(IDS) for _ in range(tokens)]

    def name(self) -> str:
        """Return a new request id."""
        self._names += 1
        return f"profile-{self._source.getrandbits(48):012x}-{self._names}"

    async def counters(self) -> Counters:
        """Read the counters."""
        async with patience():
            reply = await self._http.call("GET", "/metrics", most=METRICS_BYTES)
        if reply.status != 200:
            raise BadRequest(f"{self.client.url}/metrics answers {reply.status}")
        found = {}
        for line in reply.body.splitlines():
            name, _, value = line.decode(errors="replace").rpartition(" ")
            name = name.partition("{")[0]
            if name in COUNTERS:
                found[COUNTERS[name]] = self._count(name, value)
        if len(found) < len(COUNTERS):
            raise BadRequest(f"{self.client.url} is no engine of microserve: it counts no steps")
        return Counters(**found)

    def _count(self, name: str, value: str) -> float:
        try:
            count = float(value)
        except ValueError:
            count = -1.0
        if not 0 <= count <= MOST:
            raise BadRequest(f"{self.client.url}/metrics says {name} {value:.40}")
        return count

    async def generate(self, prompt: list[int], tokens: int, request_id: str = "") -> ChunkStream:
        """Start a greedy generation of exactly `tokens` tokens."""
        body = {
            "request_id": request_id or self.name(), "prompt": prompt, "max_tokens": tokens,
            "ignore_eos": True, "temperature": 0.0,
        }  # fmt: skip
        return await self.client.start_generate(body, {})

    async def compute(self, prompt: list[int]) -> Counters:
        """Have a prompt computed, and one token sampled; return what that took."""
        before = await self.counters()
        async with patience():
            stream = await self.generate(prompt, 1)
            try:
                while (await stream.next()).finish_reason is None:
                    pass
                await stream.finish()
            finally:
                stream.abort()
        return (await self.counters()).since(before)

    @asynccontextmanager
    async def decoding(self, batch: int, context: int, tokens: int) -> AsyncIterator[Counters]:
        """Have `batch` sequences decode, after prompts of `context` tokens each.

        They emit up to `tokens` tokens. Yields the counters from before, once all of them decode.
        """
        before = await self.counters()
        names = [self.name() for _ in range(batch)]
        streams: list[ChunkStream] = []
        try:
            async with patience():
                for name in names:
                    streams.append(await self.generate(self.prompt(context), tokens, name))
                for stream in streams:
                    await stream.next()
            computed = (await self.counters()).since(before)
            if computed.prompt_tokens < batch * (context - 1):  # the last one counts as output
                raise BadRequest(f"{self.client.url} does not compute prompts that are new to it")
            yield before
        finally:
            for stream in streams:
                stream.abort()
            async with patience():
                for name in names:
                    await self.client.release({"request_id": name}, {})
                await self._rest()

    async def steps_later(self, since: Counters, steps: int) -> Counters:
        """Wait until it has done `steps` steps since a reading; return what it has done."""
        async with patience():
            while (done := (await self.counters()).since(since)).steps < steps:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
        return done

    async def _rest(self) -> None:
        while (state := await self.client.state()).running or state.waiting:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
