"""The processes of `bench.faults`: engines that are broken on purpose, and a router."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import zip_longest

import httpx

from router.conformance.forkserver import ForkedProcess, run_engine, run_microserve

__all__ = [
    "UP_S", "Engine", "Fleet", "blocks_of", "borrowing", "deployed", "leaked_pages", "oracle",
    "replicating", "until_up",
]  # fmt: skip

NAMES = ("a", "b", "c")
PAGES = 1024
UP_S = 60.0
REQUEST_S = 300.0
SETTLE_S = 60.0  # abandoned leases expire after 30 s
BLOCKS = re.compile(
    r"^microserve:(moved_blocks|lost_blocks|recomputed_tokens|recovered_steps)_total\S* (\S+)$",
    re.M,
)


@dataclass(frozen=True)
class Fleet:
    """The flags of the engines and of the router. `flags` belong to the first engines."""

    strategy: tuple[str, ...]
    flags: tuple[tuple[str, ...], ...] = ()
    borrows: bool = False


def replicating(every: int, flags: Sequence[tuple[str, ...]] = ()) -> Fleet:
    """Return a fleet under `replicate`, whose replicas get `every` tokens at a time."""
    return Fleet(("--strategy", "replicate", "--param", f"every={every}"), tuple(flags))


def borrowing() -> Fleet:
    """Return a fleet whose engines lend to each other: contexts may be 1.6 times a pool."""
    flags = (
        *("--dtype", "float32", "--pool-pages", "128", "--max-model-len", "4096"),
        *("--borrow", "--lend-share", "0.75", "--lease-ms", "4000"),
    )
    # A request waits while the engines that live have no room for it. Without a replica, a long one
    # begins anew with each fault of its engine, so it may meet several.
    router = (
        *("--strategy", "data_parallel", "--attempts", "20"),
        *("--queue-timeout", str(REQUEST_S)),
    )
    return Fleet(router, (flags,) * len(NAMES), borrows=True)


@dataclass
class Engine:
    """An engine that can be killed and restarted on the same port."""

    name: str
    secret: str
    flags: tuple[str, ...] = ()
    url: str = ""
    process: ForkedProcess | None = None

    def start(self) -> None:
        port = self.url.rpartition(":")[2] or "0"
        flags = ("tiny", "--port", port, "--threads", "1", "--pool-pages", str(PAGES))
        self.process = ForkedProcess(
            run_engine, *flags, *self.flags, "--engine-id", self.name, MICROSERVE_SECRET=self.secret
        )
        self.url = self.process.line().split()[-1]

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None:
            os.kill(self.process.pid, number)

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()


@asynccontextmanager
async def deployed(fleet: Fleet) -> AsyncIterator[tuple[list[Engine], str, httpx.AsyncClient]]:
    """Start three engines and a router. Yield the engines, its URL and a client."""
    secret = secrets.token_hex(16)
    flags = zip_longest(NAMES, fleet.flags)
    engines = [Engine(name or "", secret, own or ()) for name, own in flags]
    router: ForkedProcess | None = None
    try:
        for one in engines:
            one.start()
        urls = [word for one in engines for word in ("--engine", one.url)]
        router = ForkedProcess(run_microserve, "router", "--port", "0", *fleet.strategy, *urls)
        url = router.line().split()[-1]
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(limits=limits, timeout=REQUEST_S) as http:
            await until_up(http, url)
            yield engines, url, http
    finally:
        for process in (router, *(one.process for one in engines)):
            if process is not None:
                process.kill()


@asynccontextmanager
async def oracle(flags: tuple[str, ...] = ()) -> AsyncIterator[str]:
    """Start an engine that stays undisturbed, and yield its URL."""
    one = Engine("oracle", secrets.token_hex(16), flags)
    one.start()
    try:
        yield one.url
    finally:
        one.end()


async def until_up(http: httpx.AsyncClient, router: str) -> None:
    """Wait until the router sees all engines up."""
    async with asyncio.timeout(UP_S):
        while True:
            engines = (await http.get(f"{router}/admin/engines")).json()["engines"]
            if {one["id"] for one in engines if one["status"] == "up"} >= set(NAMES):
                return
            await asyncio.sleep(0.05)


async def leaked_pages(http: httpx.AsyncClient, one: Engine) -> int:
    """Return the number of pages that stay neither free nor cached after the last request.

    Pages that are still lent, and loans that it still has, count, too. Ends the bench if an
    engine's bookkeeping is inconsistent.
    """
    give_up = time.monotonic() + SETTLE_S
    while True:
        state = (await http.get(f"{one.url}/microserving/state")).json()
        pages, borrowing = state["pages"], state.get("borrowing")
        leaked = int(pages["total"] - pages["free"] - pages["cached"])
        leaked += borrowing["loans"] if borrowing is not None else 0
        if not leaked or time.monotonic() > give_up:
            break
        await asyncio.sleep(0.1)
    reply = await http.get(f"{one.url}/microserving/integrity")
    if reply.status_code != 200:
        raise SystemExit(f"the page bookkeeping of engine {one.name} is inconsistent: {reply.text}")
    return leaked


async def blocks_of(http: httpx.AsyncClient, one: Engine) -> Counter[str]:
    """Return what became of the blocks that an engine has put into borrowed pages."""
    text = (await http.get(f"{one.url}/metrics")).text
    return Counter({name: int(float(value)) for name, value in BLOCKS.findall(text)})
