"""The requests of `bench.interference` to its engines, and the arrival times of the replies."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import orjson
from tokenizers import Tokenizer

from bench.streams import post_stream
from router.engines.http_client import HttpClient

__all__ = ["BUDGET", "DECODES", "LONG", "SHORT", "Engines", "Figures"]

DECODES, TOKENS, SECONDS = 16, 400, 16.0
LONG, SHORT = 3000, 32
BUDGET = 512  # tokens; the default of --token-budget

Figures = dict[str, float]


@dataclass(slots=True)
class Stream:
    """Arrival times of one generation's events (`perf_counter`), and its number of tokens."""

    times: list[float] = field(default_factory=list)
    tokens: int = 0
    begun: asyncio.Event = field(default_factory=asyncio.Event)


class Engines:
    """An engine whose decodes are measured, which is the sender of `send`, and another one."""

    def __init__(self, sender: str, receiver: str, key: str) -> None:
        self._sender = HttpClient(sender, api_key=key)
        self._receiver = HttpClient(receiver, api_key=key)
        self._numbers = itertools.count()
        self._draw = random.Random(0)
        self._text: list[int] = []
        self._cached: list[int] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._sender.close()
        self._receiver.close()

    async def prepare(self) -> None:
        """Choose a text for decodes to continue, and run everything that compiles at first use.

        The text is in letters, so that each generated token is an event.
        """
        model = orjson.loads(await _get(self._sender, "/microserving/model"))
        tokenizer = Tokenizer.from_str(model["tokenizer_json"])
        self._text = tokenizer.encode("Once upon a time there was an engine. " * 8).ids
        await self.first_token(self.random(LONG))
        await self.send()
        async with self.decoding():
            await self.first_token(self.random(SHORT))

    async def phase(self, name: str) -> tuple[Figures, list[float]]:
        """Run a phase. Return its figures (ms), and the times of its prefills and sends (s)."""
        disturb: list[Callable[[], Coroutine[Any, Any, Any]]] = []
        if name in ("prefills", "both"):
            disturb.append(lambda: self.first_token(self.random(LONG)))
        if name in ("sends", "both"):
            disturb.append(self.send)
        if name in ("calls", "puts", "receives"):
            disturb.append(lambda: self.receive(name))
        took: list[float] = []
        async with self.decoding() as streams, asyncio.TaskGroup() as group:
            computed, began = await self._computed(), time.perf_counter()
            tasks = [group.create_task(_repeat(call, took)) for call in disturb]
            while time.perf_counter() < began + SECONDS:
                await asyncio.sleep(0.05)
                if min(stream.tokens for stream in streams) >= TOKENS:
                    break
            ended, computed = time.perf_counter(), await self._computed() - computed
            for task in tasks:
                task.cancel()
        gaps = [
            1e3 * (later - earlier)
            for stream in streams
            for earlier, later in itertools.pairwise(stream.times[:TOKENS])
            if began < earlier and later < ended
        ]
        return {
            "tpot_p50_ms": statistics.median(gaps),
            "tpot_p99_ms": statistics.quantiles(gaps, n=100)[98],
            "tpot_max_ms": max(gaps),
            "prompt_tokens_per_s": computed / (ended - began),
            "seconds": ended - began,
        }, took

    async def behind(self, *, decodes: bool) -> float:
        """Return the time to first token (ms) of a short prompt that arrives during a long one."""
        if decodes:
            async with self.decoding():
                return await self.behind(decodes=False)
        long = asyncio.create_task(self.first_token(self.random(LONG)))
        try:
            await asyncio.sleep(self._draw.uniform(0.2, 0.8))
            return await self.first_token(self.random(SHORT))
        finally:
            long.cancel()
            await asyncio.wait([long])

    async def longest_step(self) -> float:
        """Return the time of the last `BUDGET` tokens of a long prompt (ms)."""
        context = self.random(LONG - BUDGET)
        await self.first_token(context)
        return await self.first_token(context + self.random(BUDGET))

    async def first_token(self, prompt: list[int]) -> float:
        """Return the time until the only token generated for `prompt` (ms)."""
        stream, began = Stream(), time.perf_counter()
        await self._generate(prompt, 1, stream)
        return 1e3 * (stream.times[0] - began)

    async def send(self) -> None:
        """Compute `LONG` tokens, put their KV to the other engine, and release it there."""
        await self._put(self._sender, self._receiver, self.random(LONG))

    async def receive(self, what: str) -> None:
        """Let the other engine put the KV of `LONG` tokens to the measured one; release it there.

        `what`: "receives" computes them before, "puts" has them cached from the second time on,
        and "calls" prepares and releases without a put.
        """
        if not self._cached:
            self._cached = self.random(LONG)
        prompt = self.random(LONG) if what == "receives" else self._cached
        await self._put(self._receiver, self._sender, prompt, puts=what != "calls")

    async def _put(
        self, sender: HttpClient, receiver: HttpClient, prompt: list[int], *, puts: bool = True
    ) -> None:
        asked = {"request_id": f"bench-{next(self._numbers)}", "prompt": prompt}
        lease = await self._call(receiver, "prep_recv", **asked, end=LONG)
        if puts:
            where = {"begin": lease["match_len"], "end": LONG, "kv_addr": lease["kv_addr"]}
            await self._call(sender, "remote_send", **asked, **where)
        await self._call(receiver, "release", lease_id=lease["lease_id"])

    @asynccontextmanager
    async def decoding(self) -> AsyncIterator[list[Stream]]:
        """Keep `DECODES` generations decoding during the body; abort them afterwards."""
        streams = [Stream() for _ in range(DECODES)]
        tasks = []
        for number, stream in enumerate(streams):
            prompt = self._text[number : number + SHORT]
            tasks.append(asyncio.create_task(self._generate(prompt, 4000, stream)))
        try:
            for stream in streams:
                await stream.begun.wait()
            yield streams
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await self._at_rest()
        if failed := [task for task in tasks if not task.cancelled()]:
            raise RuntimeError(f"a decode ended: {failed[0].exception()}")

    async def _generate(self, prompt: list[int], tokens: int, stream: Stream) -> None:
        body = {
            "request_id": f"bench-{next(self._numbers)}", "prompt": prompt, "max_tokens": tokens,
            "temperature": 0.0, "ignore_eos": True, "begin": 0,
        }  # fmt: skip

        def note(event: dict[str, Any], now: float) -> None:
            if count := len(event.get("token_ids", ())):
                stream.times.append(now)
                stream.tokens += count
                stream.begun.set()

        await post_stream(self._sender, "/microserving/start_generate", body, note)

    async def _call(self, engine: HttpClient, name: str, **body: Any) -> dict[str, Any]:
        reply = await engine.call("POST", f"/microserving/{name}", orjson.dumps(body))
        if reply.status != 200:
            raise RuntimeError(f"{name}: {reply.body!r}")
        answer: dict[str, Any] = orjson.loads(reply.body)
        return answer

    async def _at_rest(self) -> None:
        for engine in (self._sender, self._receiver):
            for _ in range(600):
                state = orjson.loads(await _get(engine, "/microserving/state"))
                if not state["running"] + state["waiting"] + state["puts_in_flight"]:
                    break
                await asyncio.sleep(0.05)
            else:
                raise RuntimeError(f"{engine.url} does not become idle")

    async def _computed(self) -> float:
        """Return the prompt tokens that the engine has computed so far, for prefills and sends."""
        lines = (await _get(self._sender, "/metrics")).decode().splitlines()
        return next(float(ln.split()[-1]) for ln in lines if ln.startswith("vllm:prompt_tokens_t"))

    def random(self, count: int) -> list[int]:
        return [self._draw.randrange(1000, 40_000) for _ in range(count)]


async def _get(engine: HttpClient, path: str) -> bytes:
    return (await engine.call("GET", path)).body


async def _repeat(call: Callable[[], Coroutine[Any, Any, Any]], took: list[float]) -> None:
    while True:
        began = time.perf_counter()
        await call()
        took.append(time.perf_counter() - began)
