"""What `top` knows of a router: its latest answers, those before, and how long it has been away."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import click
import httpx
from pydantic import BaseModel

from engine.protocol import BadRequest, parse
from router.cli.on_router.admin_client import problem_of
from router.cli.on_router.top.answers import Audit, Engine, Engines, Strategies
from router.cli.on_router.top.samples import Metrics, quantile, read_metrics

__all__ = ["SHOWN_EVENTS", "Away", "Events", "Frame", "History", "ask"]

WINDOW_S = 60.0  # of quantiles
MOST_BYTES = 16 << 20  # of an answer
SHOWN_EVENTS = 8
SILENT = frozenset({"request_begun", "request_ended"})  # one of each for every request
MOST_LINE = 1 << 20  # characters
PAUSE_S = 1.0
M = TypeVar("M", bound=BaseModel)


class Away(Exception):
    """The router did not answer, or not as a router does."""


@dataclass(slots=True)
class Frame:
    """The answers of one moment."""

    at: float  # time.monotonic()
    engines: list[Engine]
    strategies: Strategies
    audit: list[dict[str, Any]]
    metrics: Metrics


def ask(client: httpx.Client, clock: Callable[[], float] = time.monotonic) -> Frame:
    """Ask a router for everything. Raises `Away`, and `ClickException` if it refuses."""
    try:
        engines = _told(client, Engines, "/admin/engines").engines
        strategies = _told(client, Strategies, "/admin/strategies")
        audit = _told(client, Audit, "/admin/audit").entries
        metrics = read_metrics(_body(client, "/metrics").decode())
        return Frame(clock(), engines, strategies, audit[-SHOWN_EVENTS:], metrics)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Away(str(error) or type(error).__name__) from None
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise Away(f"not an answer of a router: {type(error).__name__}: {error}") from None


def _told(client: httpx.Client, kind: type[M], path: str) -> M:
    """Return an answer as a record. Raises `ValueError` if it is none of this kind."""
    try:
        return parse(kind, _body(client, path))
    except BadRequest as error:
        raise ValueError(f"{path}: {error.message}") from None


def _body(client: httpx.Client, path: str) -> bytes:
    with client.stream("GET", path) as reply:
        body = bytearray()
        for piece in reply.iter_bytes():
            body += piece
            if len(body) > MOST_BYTES:
                raise ValueError(f"{path} has more than {MOST_BYTES} bytes")
    if reply.status_code in (401, 403):
        raise click.ClickException(problem_of(json.loads(body)))
    if reply.is_error:
        raise ValueError(f"{path}: status {reply.status_code}")
    return bytes(body)


class History:
    """The frames of the latest minute. `whole`: quantiles are those since the router's start."""

    def __init__(self, *, whole: bool = False) -> None:
        self._whole = whole
        self._frames: deque[Frame] = deque()

    @property
    def latest(self) -> Frame | None:
        return self._frames[-1] if self._frames else None

    def add(self, frame: Frame) -> None:
        """Take a frame. If the router has started anew, forget those of its predecessor."""
        frames = self._frames
        if frames and frame.metrics.total("http_requests_total") < frames[-1].metrics.total(
            "http_requests_total"
        ):
            frames.clear()
        frames.append(frame)
        while len(frames) > 2 and frames[1].at <= frame.at - WINDOW_S:
            frames.popleft()

    def rate(self, name: str, **labels: str) -> float | None:
        """Return by how much a counter grew per second since the frame before."""
        if len(self._frames) < 2:
            return None
        before, now = self._frames[-2], self._frames[-1]
        grown = now.metrics.total(name, **labels) - before.metrics.total(name, **labels)
        return grown / max(now.at - before.at, 1e-6)

    def quantile(self, share: float, name: str) -> float | None:
        """Return a quantile of the latest minute, or as far as there are frames."""
        if not self._frames:
            return None
        now = self._frames[-1].metrics.buckets(name)
        whole = self._whole or len(self._frames) == 1
        before = {} if whole else self._frames[0].metrics.buckets(name)
        return quantile(share, now, before)

    def tokens_per_s(self, engine: Engine) -> float | None:
        """Return how many tokens an engine sampled per second, since the frame before."""
        if len(self._frames) < 2:
            return None
        before, now = self._frames[-2], self._frames[-1]
        state = engine.state
        earlier = next((one.state for one in before.engines if one.id == engine.id), None)
        if state is None or earlier is None or earlier.epoch != state.epoch:  # restarted
            return None
        had, has = earlier.generation_tokens, state.generation_tokens
        if had is None or has is None:
            return None
        return max(has - had, 0) / max(now.at - before.at, 1e-6)

    def all_tokens_per_s(self) -> float | None:
        """Return that of all engines which tell."""
        frame = self.latest
        rates = [] if frame is None else [self.tokens_per_s(one) for one in frame.engines]
        known = [rate for rate in rates if rate is not None]
        return sum(known) if known else None


@dataclass(slots=True)
class Events:
    """The latest events of a router, read by a thread that ends with this process."""

    latest: deque[tuple[str, dict[str, Any]]] = field(
        default_factory=lambda: deque(maxlen=SHOWN_EVENTS)
    )

    def follow(self, client: httpx.Client) -> None:
        """Read events from now on, again after each loss of the connection."""
        threading.Thread(target=self._run, args=(client,), name="events", daemon=True).start()

    def _run(self, client: httpx.Client) -> None:
        while not client.is_closed:
            try:
                with client.stream("GET", "/admin/events", timeout=60.0) as reply:
                    if not reply.is_error:
                        self._read(reply)
            except (httpx.HTTPError, httpx.InvalidURL, ValueError, RuntimeError):
                pass  # the router is away, which the frames show
            time.sleep(PAUSE_S)

    def _read(self, reply: httpx.Response) -> None:
        kind, rest = "", ""
        for piece in reply.iter_text():
            *lines, rest = (rest + piece).split("\n")
            if len(rest) > MOST_LINE:
                raise ValueError("an event is too long")
            for line in lines:
                if line.startswith("event: "):
                    kind = line.removeprefix("event: ")
                elif line.startswith("data: ") and kind not in SILENT:
                    about = json.loads(line.removeprefix("data: "))
                    if isinstance(about, dict):
                        self.latest.append((kind, about))
