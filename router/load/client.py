"""Sends streamed requests in an open or a closed loop, and records when their tokens arrive.

It uses the router's own HTTP client, because it often shares its cores with the server under test:
per streamed chunk, httpx costs about four times as much CPU, and aiohttp twice as much.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from router.base import DONE, EngineUnreachable, EventSplitter
from router.engines import HttpClient
from router.workload import LoadRequest

__all__ = ["Outcome", "Target", "closed_loop", "open_loop"]

REJECTED = frozenset({429, 503})


@dataclass(slots=True)
class Outcome:
    """The outcome of a request.

    Times are seconds since the request was due. A delay in the client itself is included, since a
    user would have waited for it too.
    """

    input_tokens: int | None
    due_s: float  # since the start
    status: int = 0  # 0: no response
    error: str = ""
    first_token_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)  # between two events with tokens
    end_s: float = 0.0
    output_tokens: int = 0

    @property
    def ok(self) -> bool:
        return self.status == 200 and not self.error and self.first_token_s is not None

    @property
    def rejected(self) -> bool:
        """Whether the server refused it for lack of room."""
        return self.status in REJECTED

    @property
    def per_token_s(self) -> float | None:
        """Seconds per token after the first one; `None` with fewer than two tokens."""
        if self.first_token_s is None or self.output_tokens < 2:
            return None
        return sum(self.gaps_s) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Target:
    """A server under load, and the fields that every request to it carries."""

    client: HttpClient
    model: str
    extra: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0

    async def send(self, request: LoadRequest, due: float, began: float) -> Outcome:
        """Send a request that is due at `due`, in a run that began at `began` (loop time).

        Every failure is an outcome. Cancellation closes the connection.
        """
        outcome = Outcome(request.input_tokens, due - began)
        loop = asyncio.get_running_loop()
        body = {
            "model": self.model, "stream": True, "stream_options": {"include_usage": True},
            **self.extra, **request.body,
        }  # fmt: skip
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        headers = {"X-Session-ID": request.session} if request.session else {}
        recorder = _EventRecorder(outcome, due)
        try:
            async with asyncio.timeout(self.timeout_s):
                reply = await self.client.call(
                    "POST", path, orjson.dumps(body), headers, sink=recorder.feed
                )
            outcome.status = reply.status
            if reply.status != 200:
                outcome.error = _error_message(reply.body)
        except TimeoutError:
            outcome.error = f"no end within {self.timeout_s:g} s"
        except EngineUnreachable as error:
            outcome.error = error.message
        outcome.end_s = loop.time() - due
        return outcome


class _EventRecorder:
    """Notes in an outcome when each event of its stream arrived."""

    def __init__(self, outcome: Outcome, due: float) -> None:
        self._outcome = outcome
        self._due = due
        self._events = EventSplitter()
        self._last = 0.0
        self._pieces = 0
        self._told: int | None = None
        self._loop = asyncio.get_running_loop()

    def feed(self, received: bytes) -> None:
        """Read more of the body of a reply of status 200."""
        self._outcome.status = 200
        now = self._loop.time()
        for data in self._events.feed(received):
            if data != DONE:
                self._add(data, now)

    def _add(self, data: bytes, now: float) -> None:
        outcome = self._outcome
        try:
            event = orjson.loads(data)
        except ValueError as error:
            outcome.error = f"an event is not JSON: {error}"
            return
        if "error" in event:
            outcome.error = _error_message(data)
            return
        self._told = (event.get("usage") or {}).get("completion_tokens", self._told)
        if any(_has_tokens(choice) for choice in event.get("choices", ())):
            self._pieces += 1
            if outcome.first_token_s is None:
                outcome.first_token_s = now - self._due
            else:
                outcome.gaps_s.append(now - self._last)
            self._last = now
        # A server that reports no usage is assumed to send one token per event.
        outcome.output_tokens = self._pieces if self._told is None else self._told


async def open_loop(target: Target, requests: Iterator[LoadRequest]) -> list[Outcome]:
    """Send each request at its time (`at_s`), whether or not earlier ones have ended."""
    began = asyncio.get_running_loop().time()
    running: list[asyncio.Task[Outcome]] = []
    async with asyncio.TaskGroup() as tasks:
        for request in requests:
            at = request.at_s or 0.0
            await asyncio.sleep(began + at - asyncio.get_running_loop().time())
            running.append(tasks.create_task(target.send(request, began + at, began)))
    return [task.result() for task in running]


async def closed_loop(
    target: Target, requests: Iterator[LoadRequest], concurrency: int
) -> list[Outcome]:
    """Run `concurrency` clients, each of which sends a request when its last one has ended."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    outcomes: list[Outcome] = []

    async def work() -> None:
        for request in requests:  # all clients share the iterator
            outcomes.append(await target.send(request, loop.time(), began))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(concurrency):
            tasks.create_task(work())
    return outcomes


def _has_tokens(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or choice
    return bool(delta.get("text") or delta.get("content") or delta.get("reasoning_content"))


def _error_message(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["error"]["message"])[:200]
    except (ValueError, LookupError, TypeError):
        return body[:200].decode(errors="replace")
