"""Engines that `bench.workers` starts, and what it runs on them."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.engine_calls import tokens, unused_id
from bench.streams import post_stream
from router.engines.http_client import HttpClient

__all__ = ["Running", "decode_rate", "makespan", "prefill_rate", "running", "worker_share"]

MODEL = "smollm2"
SECONDS = 4.0  # over which tokens are counted
PROMPT, LONG = 64, 1200  # tokens
START_S = 120.0
SHARE_TOKENS = 64  # new ones of each stream


@dataclass(frozen=True, slots=True)
class Running:
    """An engine process."""

    url: str
    pid: int

    def state(self) -> dict:
        """Return its state."""
        return httpx.get(f"{self.url}/microserving/state", timeout=60).json()

    def counted(self, name: str) -> float:
        """Return the value of a metric, over all its labels; 0 if the engine has none."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        families = (one for one in text_string_to_metric_families(text) if one.name == name)
        return sum(sample.value for one in families for sample in one.samples
                   if not sample.name.endswith("_created"))  # fmt: skip


@contextmanager
def running(*flags: str) -> Iterator[Running]:
    """Start an engine of SmolLM2 with these flags, and end it afterwards."""
    command = [sys.executable, "-m", "engine", MODEL, "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        if process.stdout is None or not (line := process.stdout.readline()):
            raise SystemExit(f"{' '.join(command)} ended with {process.wait()}")
        yield Running(line.split()[-1], process.pid)
    finally:
        process.terminate()
        process.wait()


def decode_rate(engine: Running, streams: int) -> float:
    """Return the tokens per second of so many streams, once all of them decode."""
    return asyncio.run(_decode_rate(engine, streams))


async def _decode_rate(engine: Running, streams: int) -> float:
    client = HttpClient(engine.url)
    counts = [0] * streams
    try:
        tasks = [
            asyncio.create_task(_generate(client, tokens(PROMPT), 1500, counts, number))
            for number in range(streams)
        ]
        while min(counts) < 3:
            await asyncio.sleep(0.02)
            if any(task.done() for task in tasks):
                raise SystemExit("a stream ended before it was measured")
        began, before = time.perf_counter(), sum(counts)
        await asyncio.sleep(SECONDS)
        rate = (sum(counts) - before) / (time.perf_counter() - began)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    finally:
        client.close()
    _settle(engine)
    return rate


async def _generate(
    client: HttpClient, prompt: list[int], count: int, counts: list[int], number: int
) -> None:
    def note(event: dict, _now: float) -> None:
        counts[number] += len(event.get("token_ids", ()))

    body = {
        "request_id": unused_id(), "prompt": prompt, "max_tokens": count, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip
    await post_stream(client, "/microserving/start_generate", body, note)


def prefill_rate(engine: Running) -> float:
    """Return the tokens per second of one long prompt that is in no cache."""
    return LONG / asyncio.run(_makespan(engine, [tokens(LONG)], 1))


def makespan(engine: Running, prompts: Sequence[list[int]], count: int) -> float:
    """Return the seconds until all prompts have `count` tokens of output."""
    return asyncio.run(_makespan(engine, prompts, count))


async def _makespan(engine: Running, prompts: Sequence[list[int]], count: int) -> float:
    client = HttpClient(engine.url)
    counts = [0] * len(prompts)
    began = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for number, prompt in enumerate(prompts):
                group.create_task(_generate(client, prompt, count, counts, number))
    finally:
        client.close()
    took = time.perf_counter() - began
    if any(got != count for got in counts):
        raise SystemExit(f"streams ended early: {counts}")
    _settle(engine)
    return took


def worker_share(engine: Running, streams: int) -> float:
    """Return the share of the time of some streams in which the busiest worker computes.

    From rest to rest, so that both clocks have the same steps.
    """

    def computing() -> list[float]:
        return [worker["computing_ms"] for worker in engine.state()["workers"]]

    before = computing()
    took = makespan(engine, [tokens(PROMPT) for _ in range(streams)], SHARE_TOKENS)
    return max(b - a for a, b in zip(before, computing(), strict=True)) / 1e3 / took


def _settle(engine: Running) -> None:
    """Wait until the engine does nothing."""
    end = time.monotonic() + START_S
    for pause in itertools.repeat(0.05):
        state = engine.state()
        if not state["running"] + state["waiting"]:
            return
        if time.monotonic() > end:
            raise SystemExit(f"engine {engine.pid} does not come to rest: {state}")
        time.sleep(pause)
