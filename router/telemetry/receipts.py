"""Receipts: what was done for each request, leg by leg. Only the newest are kept."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from engine.protocol import MOST_MESSAGE, MicroserveError, NoCapacity
from router.base import EngineId, EngineRequestId, NotFound, RevisionNumber
from router.telemetry.timings import Timings

__all__ = ["CANCELLED", "Leg", "Receipt", "Receipts"]

CANCELLED = "cancelled"  # type of a leg's error
MOST_ENGINES = 16  # that an outline names
MOST_WAITS = 64  # of a request that are told one by one

Phase = Literal["prefill", "migration", "decode"]
Call = Literal["prep_recv", "remote_send", "start_generate", "commit", "pin", "unpin"]


@dataclass(slots=True)
class Leg:
    """One call to one engine. Times are milliseconds, `start_ms` since the request arrived.

    `begin` and `end` are the range of the prompt whose KV was requested or sent. For a generation
    they are the first position it computed, and the length of the prompt plus earlier output.
    """

    call: Call
    engine: EngineId
    request_id: EngineRequestId
    choice: int
    attempt: int
    begin: int
    end: int
    start_ms: float
    ms: float | None = None
    first_token_ms: float | None = None  # of a generation, from its start
    match_len: int | None = None  # of prep_recv; for pin and unpin, tokens pinned
    bytes: int = 0  # put
    put_ms: float = 0.0  # of a send: the time at its end when only puts were left
    sent_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    tokens: int = 0  # emitted
    to: EngineId | None = None  # of a send: the receiver
    collapsed: bool = False  # sender and receiver are one engine: nothing was sent
    # Of a mirrored generation: the replica's engine, the tokens of prompt and output known to have
    # landed there, and why mirroring stopped or could not begin.
    replica: EngineId | None = None
    landed: int | None = None
    mirror_error: str | None = None
    recomputed_tokens: int | None = None  # of a resumed generation: tokens computed again
    error: dict[str, Any] | None = None

    def fail(self, error: BaseException) -> None:
        if isinstance(error, MicroserveError):
            self.error = _error(error)
        else:  # cancelled by the client, another choice's failure or the request's deadline
            self.error = {"type": CANCELLED, "message": type(error).__name__}


@dataclass(slots=True)
class Wait:
    """A time in which a choice waited, and for what, in words. Milliseconds as in `Leg`."""

    why: str
    choice: int
    start_ms: float
    ms: float | None = None  # `None`: it still waits


@dataclass(slots=True)
class Receipt:
    """One request of a client: every leg of every choice and attempt."""

    id: str
    generation: RevisionNumber
    strategy: str
    params: dict[str, Any]
    seed: int
    prompt_tokens: int
    key: str = ""  # the name of the client's API key
    began: float = field(default_factory=time.monotonic)  # on `clock`
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    _queueing: int = 0  # choices that are waiting for room
    created: float = field(default_factory=time.time)
    status: Literal["running", "done", "failed", "cancelled"] = "running"
    ms: float | None = None
    first_token_ms: float | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0
    retries: list[dict[str, Any]] = field(default_factory=list)
    waits: int = 0  # how often it waited, for room on an engine or for an engine
    queued_ms: float = 0.0  # time spent waiting, over all choices
    waiting: list[Wait] = field(default_factory=list)  # the first `MOST_WAITS` of them
    fallbacks: list[str] = field(default_factory=list)  # deviations from what was asked for
    delegates: list[str] = field(default_factory=list)  # strategies that the strategy has called
    legs: list[Leg] = field(default_factory=list)
    error: dict[str, Any] | None = None

    def fallback(self, name: str) -> None:
        """Note a fallback; each is noted once."""
        if name not in self.fallbacks:
            self.fallbacks.append(name)

    def delegated(self, name: str) -> None:
        """Note a strategy that another one has called; each is noted once."""
        if name not in self.delegates:
            self.delegates.append(name)

    @contextmanager
    def queueing(self, why: str, choice: int = 0) -> Iterator[None]:
        """Count the time of the body as waiting; `why` completes "waited …"."""
        wait = Wait(why, choice, self.elapsed_ms())
        if self.waits < MOST_WAITS:
            self.waiting.append(wait)
        self.waits += 1
        self._queueing += 1
        try:
            yield
        finally:
            self._queueing -= 1
            wait.ms = self.elapsed_ms() - wait.start_ms
            self.queued_ms += wait.ms

    @property
    def phase(self) -> str:
        """What it is doing now: `queue`, `prefill`, `migration` or `decode`, with call and engine.

        It is the phase of the first leg that has not ended.
        """
        if self._queueing:
            return "queue"
        for leg in self.legs:
            if leg.ms is None:
                return f"{self._phase_of(leg)} ({leg.call} on {leg.engine})"
        return "decode" if self.first_token_ms is not None else "strategy"

    @staticmethod
    def _phase_of(leg: Leg) -> Phase:
        if leg.call == "start_generate":
            return "prefill" if leg.first_token_ms is None else "decode"
        return "prefill" if leg.call == "remote_send" else "migration"

    @property
    def emitted(self) -> int:
        """Tokens emitted so far, as far as legs know."""
        if self.ms is not None:
            return self.completion_tokens
        return sum([leg.tokens for leg in self.legs])

    def refused_by(self) -> EngineId | None:
        """Return the engine whose lack of room ended the last attempt, if one did."""
        for leg in reversed(self.legs):
            if leg.error is not None and leg.error["type"] == NoCapacity.type:
                return leg.engine
        return None

    def outline(self) -> dict[str, Any]:
        """Return what a list of requests shows."""
        engines = dict.fromkeys(leg.engine for leg in self.legs)
        return {
            "id": self.id,
            "status": self.status,
            "phase": self.phase if self.status == "running" else None,
            "strategy": self.strategy,
            "generation": self.generation,
            "key": self.key,
            "created": self.created,
            "ms": self.ms if self.ms is not None else self.elapsed_ms(),
            "first_token_ms": self.first_token_ms,
            "per_token_ms": self.per_token_ms(),
            "queued_ms": self.queued_ms,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.emitted,
            "engines": [*engines][:MOST_ENGINES],
            "retries": len(self.retries),
            "error": self.error["type"] if self.error else None,
        }

    def per_token_ms(self) -> float | None:
        """Return the time from first to last token per token and sequence; `None` without two."""
        streams = {(leg.choice, leg.request_id) for leg in self.legs if leg.tokens}
        later = self.completion_tokens - len(streams)
        if self.ms is None or self.first_token_ms is None or later <= 0:
            return None
        return (self.ms - self.first_token_ms) * len(streams) / later

    def timings(self) -> Timings:
        """Return the lifetime events, up to now if the request still runs.

        They are those of the first choice that had a token. A send puts layer by layer while it
        computes, so only the puts left after the computation are migration: the cost of
        disaggregation.
        """
        total = self.ms if self.ms is not None else self.elapsed_ms()
        begin = min([leg.start_ms for leg in self.legs], default=total)
        answers = [leg for leg in self.legs if leg.first_token_ms is not None]
        if not answers:
            return Timings.of(begin, total, total, total)
        answer = min(answers, key=_first_token)
        sends = [
            leg
            for leg in self.legs
            if leg.call == "remote_send"
            and leg.request_id == answer.request_id
            and leg.ms is not None
            and leg.sent_tokens
        ]
        if not sends:
            first = _first_token(answer)
            return Timings.of(begin, first, first, total)
        last = max(sends, key=_end)
        landed = _end(last)
        computed = landed - min(last.put_ms, last.ms or 0.0)
        return Timings.of(begin, computed, landed, total)

    def elapsed_ms(self) -> float:
        return (self.clock() - self.began) * 1e3

    @contextmanager
    def timed(self, leg: Leg) -> Iterator[Leg]:
        """Note in `leg`, when the body is left, its duration and its error."""
        try:
            yield leg
        except BaseException as error:
            leg.fail(error)
            raise
        finally:
            leg.ms = self.elapsed_ms() - leg.start_ms

    def fail(self, error: MicroserveError) -> None:
        """Note that the request failed with `error`."""
        self.status = "failed"
        self.error = _error(error)

    def summary(self) -> dict[str, Any]:
        """Return the fields of a log line."""
        return {
            "status": self.status,
            "error": self.error["type"] if self.error else None,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "ms": self.ms,
            "first_token_ms": self.first_token_ms,
            "retries": len(self.retries),
            "key": self.key,
        }

    def describe(self) -> dict[str, Any]:
        times = self.timings()
        fields = asdict(replace(self, clock=time.monotonic))  # a loop's clock cannot be copied
        del fields["began"], fields["clock"], fields["_queueing"]
        fields["events"] = times.events()
        fields["breakdown_ms"] = times.breakdown()
        return fields


class Receipts:
    """The newest `limit` receipts by the client's request id; of equal ids, the last."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._receipts: OrderedDict[str, Receipt] = OrderedDict()

    def add(self, receipt: Receipt) -> None:
        self._receipts.pop(receipt.id, None)
        self._receipts[receipt.id] = receipt
        while len(self._receipts) > self._limit:
            self._receipts.popitem(last=False)

    def latest(self, seconds: float, most: int) -> list[Receipt]:
        """Return those that ran within the latest `seconds`, by arrival; of too many, the last."""
        found = []
        for receipt in reversed(self._receipts.values()):
            took_ms = receipt.ms if receipt.ms is not None else receipt.elapsed_ms()
            if receipt.elapsed_ms() - took_ms <= seconds * 1e3:
                found.append(receipt)
                if len(found) == most:
                    break
        return found[::-1]

    def __iter__(self) -> Iterator[Receipt]:
        """Yield them, the newest first."""
        return reversed(self._receipts.values())

    def __getitem__(self, request_id: str) -> Receipt:
        """Return the receipt of this request. Raises `NotFound`."""
        try:
            return self._receipts[request_id]
        except KeyError:
            raise NotFound(f"no receipt of request {request_id!r}", param="id") from None


def _error(error: MicroserveError) -> dict[str, Any]:
    return {"type": error.type, "message": error.message[:MOST_MESSAGE]}


def _first_token(leg: Leg) -> float:
    return leg.start_ms + (leg.first_token_ms or 0.0)


def _end(leg: Leg) -> float:
    return leg.start_ms + (leg.ms or 0.0)
