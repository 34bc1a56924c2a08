"""Receipts: what was done for a request, leg by leg. Kept for the newest requests only."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from engine.protocol import MicroserveError
from router.errors import NotFound
from router.ids import EngineId, EngineRequestId, GenerationNumber

__all__ = ["Leg", "Receipt", "Receipts"]

Call = Literal["prep_recv", "remote_send", "start_generate", "commit"]


@dataclass(slots=True)
class Leg:
    """One call to one engine. Times are milliseconds, `start_ms` since the request arrived.

    `begin`, `end`: the range of the prompt whose KV was asked for or sent; of a generation, from
    where on it computed, and the length of the prompt (plus what had been emitted before).
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
    first_token_ms: float | None = None  # of a generation, since its start
    match_len: int | None = None  # of prep_recv
    bytes: int = 0  # put
    sent_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    tokens: int = 0  # emitted
    collapsed: bool = False  # sender and receiver are one: nothing was sent
    error: dict[str, Any] | None = None

    def fail(self, error: BaseException) -> None:
        if isinstance(error, MicroserveError):
            self.error = {"type": error.type, "message": error.message}
        else:  # cancelled: by the client, by a failed sibling or by the request's deadline
            self.error = {"type": "cancelled", "message": type(error).__name__}


@dataclass(slots=True)
class Receipt:
    """One request of a client: every leg of every choice and attempt."""

    id: str
    generation: GenerationNumber
    strategy: str
    params: dict[str, Any]
    seed: int
    prompt_tokens: int
    began: float = field(default_factory=time.monotonic)
    created: float = field(default_factory=time.time)
    status: Literal["running", "done", "failed", "cancelled"] = "running"
    ms: float | None = None
    first_token_ms: float | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0
    retries: list[dict[str, Any]] = field(default_factory=list)
    waits: int = 0  # how often it waited for room on an engine
    legs: list[Leg] = field(default_factory=list)
    error: dict[str, Any] | None = None

    def elapsed_ms(self) -> float:
        return (time.monotonic() - self.began) * 1e3

    @contextmanager
    def timed(self, leg: Leg) -> Iterator[Leg]:
        """Note in `leg`, when the body is left, how long it took and how it failed."""
        try:
            yield leg
        except BaseException as error:
            leg.fail(error)
            raise
        finally:
            leg.ms = self.elapsed_ms() - leg.start_ms

    def describe(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["began"]
        return fields


class Receipts:
    """The newest `limit` receipts by the client's request id; the last of equal ids is kept."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._receipts: OrderedDict[str, Receipt] = OrderedDict()

    def add(self, receipt: Receipt) -> None:
        self._receipts.pop(receipt.id, None)
        self._receipts[receipt.id] = receipt
        while len(self._receipts) > self._limit:
            self._receipts.popitem(last=False)

    def __getitem__(self, request_id: str) -> Receipt:
        """Raises `NotFound`."""
        try:
            return self._receipts[request_id]
        except KeyError:
            raise NotFound(f"no receipt of request {request_id!r}", param="id") from None
