"""Two real engines and the calls between them, to break at a chosen moment and inspect.

A moment is found by polling, never by sleeping: `until` polls the receiver's memory or state. After
breaking something, a test checks that the moment had not passed.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import httpx
import torch
from engine_process import EngineProcess, events
from forked import ForkedProcess, run_microserve

from kvcache.lease.address import KVAddress
from kvcache.lease.control_slots import CLAIM, LANDED, WORDS
from kvcache.memory.layout import KVLayout
from kvcache.memory.region import HEADER_BYTES, SharedRegion

SECRET = "secret"
LEASE_MS = 500
SLACK_S = 8.0  # slack for a busy machine; a leak never ends
DEADLINE_S = 20.0  # of every call
PAGE = 16
NEW = 16  # tokens generated to compare
# Chunks of one page: a send of a long prompt takes many steps, so a test can interrupt it midway.
FLAGS = ("--token-budget", "16", "--pool-pages", "200", "--lease-ms", str(LEASE_MS))
LAYOUT = KVLayout(2, 1, PAGE, 2, 32, torch.float32)  # of `tiny`
CANARY = 0x7FC5A5A5  # a NaN: no computation gives these bits, and reading them spoils the result


def prompt_of(name: str, length: int) -> list[int]:
    source = random.Random(name)
    return [source.randrange(500) for _ in range(length)]


def until(condition: Callable[[], bool], what: str = "it") -> None:
    give_up = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up, f"waited in vain for {what}"
        time.sleep(0.001)


class Memory:
    """An engine's region, mapped as a sender maps it. None of its pages may be in use yet."""

    def __init__(self, engine: EngineProcess) -> None:
        lease = Lease(engine, "map", [1] * PAGE, PAGE)
        lease.release()
        _, pid, fd = lease.address.endpoint.split(":")
        assert int(pid) == engine.pid
        self.region = SharedRegion.attach(int(pid), int(fd), lease.address.epoch, LAYOUT)
        self._words = self.region.pool.view(torch.int32)

    def fill(self) -> None:
        """Write the canary to every page but the scratch page."""
        self._words[:, 1:] = CANARY

    def written(self) -> set[int]:
        """Return the pages without a canary, and the scratch page if it is not zero."""
        intact = (self._words == CANARY).all(dim=5).all(dim=4).all(dim=3).all(dim=2).all(dim=0)
        intact[0] = not self._words[:, 0].any()
        return set((~intact).nonzero().flatten().tolist())

    def read(self, pages: list[int]) -> torch.Tensor:
        """Return a copy of the pages' bits."""
        return self._words[:, pages].clone()

    def claimed(self, lease: Lease) -> bool:
        return bool(self.region.slots[lease.address.slot, CLAIM])

    def landed(self, lease: Lease) -> int:
        return int(self.region.slots[lease.address.slot, LANDED])

    def writing(self, lease: Lease) -> bool:
        """Return whether a process holds the lease's write right."""
        start = HEADER_BYTES + lease.address.slot * WORDS * 8
        flock = struct.pack("hhxxxxqqixxxx", fcntl.F_WRLCK, os.SEEK_SET, start, WORDS * 8, 0)
        answer = fcntl.fcntl(self.region.fd, fcntl.F_OFD_GETLK, flock)
        return bool(struct.unpack_from("h", answer)[0] != fcntl.F_UNLCK)


class NoRoom(Exception):
    """A `no_capacity` reply, which must have a Retry-After."""

    def __init__(self, reply: httpx.Response) -> None:
        assert kind_of(reply) == "no_capacity"
        assert int(reply.headers["retry-after"]) >= 1


class Lease:
    """A receive lease, as the caller of `prep_recv` sees it. Raises `NoRoom` if there is none."""

    def __init__(
        self, receiver: EngineProcess, request_id: str, prompt: list[int], end: int, **fields: Any
    ) -> None:
        self.receiver, self.request_id, self.prompt, self.end = receiver, request_id, prompt, end
        reply = receiver.post("prep_recv", request_id=request_id, prompt=prompt, end=end, **fields)
        if reply.status_code == 429:
            raise NoRoom(reply)
        assert reply.status_code == 200, reply.text
        self.id: str = reply.json()["lease_id"]
        self.begin: int = reply.json()["match_len"]
        self.kv_addr: str = reply.json()["kv_addr"]
        self.address = KVAddress.verify(self.kv_addr, SECRET.encode())
        self.pages: list[int] = [int(page) for page in self.address.pages()]

    def send(
        self,
        sender: EngineProcess,
        *,
        begin: int | None = None,
        end: int | None = None,
        as_id: str | None = None,
    ) -> httpx.Response:
        return sender.post(
            "remote_send",
            request_id=as_id or self.request_id,
            prompt=self.prompt,
            begin=self.begin if begin is None else begin,
            end=self.end if end is None else end,
            kv_addr=self.kv_addr,
        )

    def release(self) -> None:
        self.receiver.post("release", lease_id=self.id).raise_for_status()


class Call:
    """A call in its own thread.

    `outcome` is `ok`, the type of the error, `cut` if the connection broke, or `hung` if the call
    timed out. It fails the test if the thread does not end.
    """

    def __init__(self, call: Callable[[], httpx.Response | str]) -> None:
        self._call = call
        self._outcome: str | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return self._outcome is not None

    def outcome(self) -> str:
        self._thread.join(DEADLINE_S + 5)
        assert self._outcome is not None, "a call hangs"
        return self._outcome

    def _run(self) -> None:
        try:
            reply = self._call()
        except httpx.TimeoutException:
            self._outcome = "hung"
        except httpx.TransportError:
            self._outcome = "cut"
        else:
            self._outcome = reply if isinstance(reply, str) else kind_of(reply)


class Generation(Call):
    """A `start_generate` in its own thread."""

    def __init__(self, engine: EngineProcess, prompt: list[int], **fields: Any) -> None:
        self.tokens: list[int] = []
        self._engine = engine
        self._body = {"prompt": prompt, "temperature": 0.0, "ignore_eos": True, "max_tokens": NEW}
        self._body |= fields
        super().__init__(self._generate)

    def _generate(self) -> httpx.Response | str:
        with self._engine.http.stream(
            "POST", "/microserving/start_generate", json=self._body
        ) as reply:
            if reply.status_code != 200:
                reply.read()
                return reply
            for event in events(reply):
                if "error" in event:
                    return str(event["error"]["type"])
                self.tokens += event.get("token_ids", [])
        return "ok"


def kind_of(reply: httpx.Response) -> str:
    """Return `ok`, or the type of the error."""
    return "ok" if reply.status_code == 200 else str(reply.json()["error"]["type"])


def transfer(sender: EngineProcess, receiver: EngineProcess, prompt: list[int]) -> list[int]:
    """Make the three calls of a disaggregated request; return its tokens."""
    request_id, end = f"t{time.monotonic_ns()}", len(prompt) - 1
    lease = Lease(receiver, request_id, prompt, end, lease_ms=20_000)
    assert kind_of(lease.send(sender)) == "ok"
    return started(lease)


def started(lease: Lease) -> list[int]:
    """Return the tokens of a generation whose lease has all its KV."""
    generation = Generation(
        lease.receiver,
        lease.prompt,
        request_id=lease.request_id,
        begin=lease.end,
        lease_id=lease.id,
    )
    assert generation.outcome() == "ok"
    return generation.tokens


class Alone:
    """The tokens of an undisturbed engine, to compare with. It also serves as a third sender."""

    def __init__(self, engine: EngineProcess) -> None:
        self.engine = engine
        self.tokens = cache(self._tokens)

    def __call__(self, prompt: list[int], new: int = NEW) -> list[int]:
        return self.tokens(tuple(prompt), new)

    def _tokens(self, prompt: tuple[int, ...], new: int) -> list[int]:
        generation = Generation(
            self.engine, list(prompt), request_id=f"a{time.monotonic_ns()}", max_tokens=new
        )
        assert generation.outcome() == "ok"
        assert len(generation.tokens) == new
        return generation.tokens


@contextmanager
def engines(
    count: int, *flags: str, secret: str = SECRET, **environment: str
) -> Iterator[list[EngineProcess]]:
    """Start fresh engines; at the end kill all in the list, with those that a test appended."""
    running: list[EngineProcess] = []
    try:
        for _ in range(count):
            running.append(EngineProcess(*FLAGS, *flags, secret=secret, **environment))
        yield running
    finally:
        for engine in running:
            engine.kill()


class Router(ForkedProcess):
    """A router process in front of engines, started as by `up`, which has made the dry run."""

    def __init__(
        self,
        running: list[EngineProcess],
        port: int = 0,
        strategy: str = "prefill_decode",
        **environment: str,
    ) -> None:
        urls = [word for engine in running for word in ("--engine", engine.url)]
        flags = ("--strategy", strategy, "--port", str(port), "--parent-pid", str(os.getpid()))
        super().__init__(run_microserve, "router", *flags, *urls, **environment)
        self.url = self.line().split()[-1]
        self.port = httpx.URL(self.url).port or 0


class Completion(Call):
    """A streamed completion in its own thread."""

    def __init__(self, router: Router, prompt: list[int], new: int = NEW) -> None:
        self.tokens: list[int] = []
        self._url = router.url
        self._body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": new,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        super().__init__(self._complete)

    def _complete(self) -> httpx.Response | str:
        url = f"{self._url}/v1/completions"
        with httpx.stream("POST", url, json=self._body, timeout=DEADLINE_S, verify=False) as reply:
            if reply.status_code != 200:
                reply.read()
                return reply
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        return str(event["error"]["type"])
                    for choice in event["choices"]:
                        self.tokens += choice.get("token_ids") or []
        return "ok"
