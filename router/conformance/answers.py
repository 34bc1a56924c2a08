"""Sends completions as a client does, and compares the answers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import httpx
import orjson

from router.base import DONE, EventSplitter

__all__ = ["Answer", "RequestFailed", "complete", "difference"]

COMPARED = ("token_ids", "text", "logprobs", "finish_reason", "stop_reason")  # of each choice
COUNTED = ("prompt_tokens", "completion_tokens", "total_tokens")


class RequestFailed(Exception):
    """The server refused, or its answer is incomplete. The message is the server's, if any."""


@dataclass(slots=True)
class Answer:
    """Choices by index, each with the fields in `COMPARED`. Streamed or not makes no difference."""

    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def cached_tokens(self) -> int:
        return int(self.usage.get("prompt_tokens_details", {}).get("cached_tokens", -1))

    def add(self, event: dict[str, Any]) -> None:
        """Add one chunk of a stream, or a whole response."""
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            joined = self.choices.setdefault(choice["index"], dict.fromkeys(COMPARED))
            for name in COMPARED:
                joined[name] = _joined(joined[name], choice.get(name))


async def complete(
    http: httpx.AsyncClient, url: str, body: dict[str, Any], request_id: str
) -> Answer:
    """Request a completion with token ids, streamed if `body` says so.

    Raises `RequestFailed`. Cancellation closes the connection.
    """
    body = {"return_token_ids": True, **body}
    if body.get("stream"):
        body["stream_options"] = {"include_usage": True}
    answer = Answer()
    headers = {"X-Request-Id": request_id}
    try:
        url = f"{url}/v1/completions"
        async with http.stream("POST", url, json=body, headers=headers) as reply:
            if reply.status_code != 200:
                raise RequestFailed(_error_message(await reply.aread(), reply.status_code))
            if not body.get("stream"):
                answer.add(orjson.loads(await reply.aread()))
                return answer
            events = EventSplitter()
            async for received in reply.aiter_bytes():
                for data in events.feed(received):
                    if data == DONE:
                        return answer
                    event = orjson.loads(data)
                    if "error" in event:
                        raise RequestFailed(_error_message(data, reply.status_code))
                    answer.add(event)
    except (httpx.HTTPError, OSError, ValueError) as error:
        raise RequestFailed(f"{type(error).__name__}: {error}") from error
    raise RequestFailed("the stream ended without [DONE]")


def difference(got: Answer, wanted: Answer, rounding: float = 0.0) -> str:
    """Describe the first difference; empty if there is none. Cached tokens are not compared.

    Log probabilities may differ by `rounding`, relative and absolute.
    """
    if got.choices.keys() != wanted.choices.keys():
        return f"the choices are {sorted(got.choices)}, not {sorted(wanted.choices)}"
    for index, choice in sorted(wanted.choices.items()):
        for name in COMPARED:
            own = got.choices[index][name]
            if not _equal(own, choice[name], rounding):
                where = f"choice {index}: " if len(wanted.choices) > 1 else ""
                return f"{where}{name} {_first_difference(own, choice[name], rounding)}"
    for name in COUNTED:
        if got.usage.get(name) != wanted.usage.get(name):
            return f"usage: {name} is {got.usage.get(name)}, not {wanted.usage.get(name)}"
    return ""


def _joined(before: Any, after: Any) -> Any:
    """Concatenate strings and lists, join dicts field by field, replace any other value."""
    if before is None or after is None:
        return before if after is None else after
    if isinstance(before, dict):
        return {name: _joined(value, after.get(name)) for name, value in before.items()}
    return before + after if isinstance(before, str | list) else after


def _equal(got: Any, wanted: Any, rounding: float) -> bool:
    if isinstance(got, float) and isinstance(wanted, float):
        return math.isclose(got, wanted, rel_tol=rounding, abs_tol=rounding)
    if isinstance(got, dict) and isinstance(wanted, dict):
        same = got.keys() == wanted.keys()
        return same and all(_equal(got[name], wanted[name], rounding) for name in wanted)
    if isinstance(got, list) and isinstance(wanted, list):
        return len(got) == len(wanted) and all(map(_equal, got, wanted, repeat(rounding)))
    return bool(got == wanted)


def _first_difference(got: Any, wanted: Any, rounding: float) -> str:
    if isinstance(got, dict) and isinstance(wanted, dict):
        for name, value in wanted.items():
            if not _equal(got.get(name), value, rounding):
                return f"{name} {_first_difference(got.get(name), value, rounding)}"
    if isinstance(got, list) and isinstance(wanted, list):
        pairs = enumerate(zip(got, wanted, strict=False))
        same = next((i for i, (a, b) in pairs if not _equal(a, b, rounding)), None)
        if same is None:
            return f"are {len(got)}, not {len(wanted)}"
        return f"differ from number {same} on: {got[same]!r}, not {wanted[same]!r}"
    return f"is {got!r}, not {wanted!r}"


def _error_message(body: bytes, status: int) -> str:
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"{status} {body[:200]!r}"
