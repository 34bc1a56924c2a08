"""What an OpenAI server's refusals mean here, by their status.

| status | is |
| --- | --- |
| 400, 405, 409, 415, 422 | `BadRequest`: the same request fails again anywhere |
| 401, 403 | `Unauthorized`: the router's key is wrong |
| 408, 504 | `Timeout` |
| 413 | `TooLarge` |
| 429, 503 | `NoCapacity`, with the time of `Retry-After`: the request waits in the router's queue |
| 502, and below 400 | `EngineUnreachable`: a proxy has lost the server, or it is no such server |
| others | `Internal` |
"""

from __future__ import annotations

from typing import Any

import orjson

from engine.protocol import (
    MOST_MESSAGE,
    MOST_NAME,
    BadRequest,
    Internal,
    MicroserveError,
    NoCapacity,
    Timeout,
    TooLarge,
    Unauthorized,
    error_body,
    error_from_body,
)
from router.base import EngineUnreachable

__all__ = ["REFUSED", "error_in_stream", "error_of"]

REFUSED = frozenset({400, 405, 409, 415, 422})
_KINDS: dict[int, type[MicroserveError]] = {
    **dict.fromkeys(REFUSED, BadRequest),
    **dict.fromkeys((401, 403), Unauthorized),
    **dict.fromkeys((408, 504), Timeout),
    413: TooLarge,
    **dict.fromkeys((429, 503), NoCapacity),
    502: EngineUnreachable,
}


def error_of(status: int, body: bytes, retry_after: str | None = None) -> MicroserveError:
    """Return the error of a reply other than 200."""
    try:
        fields: Any = orjson.loads(body)
    except ValueError:
        fields = body[:200].decode("utf-8", "replace")
    return _error(status, fields, retry_after)


def error_in_stream(event: Any) -> MicroserveError:
    """Return the error of an error event. A code that is an HTTP status counts as such."""
    detail = event.get("error", event) if isinstance(event, dict) else event
    code = detail.get("code") if isinstance(detail, dict) else None
    status = int(code) if isinstance(code, int) or (isinstance(code, str) and _digits(code)) else 0
    if not status and isinstance(detail, dict):
        status = {"invalid_request_error": 400, "rate_limit_error": 429}.get(
            str(detail.get("type"))[:MOST_NAME], 0
        )
    return _error(status or 500, event, None)


def _digits(text: str) -> bool:
    return len(text) == 3 and text.isascii() and text.isdecimal()


def _error(status: int, fields: Any, retry_after: str | None) -> MicroserveError:
    message, param, code = _said(fields)
    kind = _KINDS.get(status, Internal if status >= 400 else EngineUnreachable)
    error = kind(message or f"the server answers {status} and no reason", param=param, code=code)
    if isinstance(error, NoCapacity):
        return error_from_body(error_body(error), retry_after=retry_after)
    return error


def _said(fields: Any) -> tuple[str, str | None, str | None]:
    """Return message, param and code of an error in one of the forms that servers use.

    `{"error": {"message": …}}` is OpenAI's, `{"message": …}` vLLM's older one, `{"error": "…"}`
    TGI's, and `{"detail": …}` FastAPI's.
    """
    detail = fields
    if isinstance(fields, dict):
        detail = next((fields[name] for name in ("error", "detail") if fields.get(name)), fields)
    if not isinstance(detail, dict):
        return _text(detail, MOST_MESSAGE) or "", None, None
    message = _text(detail.get("message"), MOST_MESSAGE) or _text(detail, MOST_MESSAGE) or ""
    param, code = detail.get("param"), detail.get("code")
    return (
        message,
        _text(param, MOST_NAME) if isinstance(param, str) else None,
        _text(code, MOST_NAME) if isinstance(code, str) else None,
    )


def _text(value: Any, most: int) -> str | None:
    if value is None or isinstance(value, str):
        return value and value[:most]
    try:
        return orjson.dumps(value)[:most].decode("utf-8", "replace")
    except orjson.JSONEncodeError:  # nested too deeply
        return f"an error of type {type(value).__name__}"
