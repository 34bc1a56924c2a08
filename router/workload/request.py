"""A request of a workload."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["MOST_TOKENS", "LoadRequest", "timed"]

MOST_TOKENS = 2**24  # of a prompt or an answer; larger lengths are mistakes


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request. `body` has `prompt` or `messages`, and `max_tokens`, as in the OpenAI API."""

    body: dict[str, Any]
    input_tokens: int | None  # `None`: unknown
    at_s: float | None = None  # since the start; `None`: the sender decides
    session: str | None = None
    strategy: str | None = None  # that served it when it was recorded


def timed(requests: Iterator[LoadRequest], times: Iterator[float]) -> Iterator[LoadRequest]:
    """Yield the requests at these times, until there are no more of either."""
    return (replace(request, at_s=at) for at, request in zip(times, requests, strict=False))
