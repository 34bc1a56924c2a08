"""Errors and validation on the wire, for both sides."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from kvcache import errors
from kvcache.errors import BadRequest, Internal, MicroserveError, NoCapacity

__all__ = [
    "MOST_MESSAGE", "MOST_NAME", "bad_request", "error_body", "error_from_body", "parse",
]  # fmt: skip

_BY_TYPE: dict[str, type[MicroserveError]] = {
    error.type: error
    for error in vars(errors).values()
    if isinstance(error, type) and issubclass(error, MicroserveError)
}
M = TypeVar("M", bound=BaseModel)

MOST_RETRY_AFTER_S = 600.0
# Longest message, and longest param or code, of an error that another process sends or the code of
# a user raises (characters). Errors are kept in receipts and logs, and told to clients.
MOST_MESSAGE, MOST_NAME = 2000, 256


def error_body(error: MicroserveError) -> dict[str, Any]:
    """Return `{"error": {"type", "message", "param", "code"}}`, the body of every error reply."""
    detail = {
        "type": error.type,
        "message": error.message,
        "param": error.param,
        "code": error.code,
    }
    return {"error": detail}


def error_from_body(body: object, *, retry_after: str | None = None) -> MicroserveError:
    """Return the exception of an error body; `Internal` if `body` is not an error body.

    Fields of other types are dropped and long ones cut. `retry_after` is the value of the reply's
    `Retry-After` header.
    """
    detail = body.get("error") if isinstance(body, dict) else None
    if not isinstance(detail, dict):
        return Internal(f"not an error body: {_text(body, 200) or type(body).__name__}")
    kind = _BY_TYPE.get(_text(detail.get("type"), MOST_NAME) or "", Internal)
    error = kind(
        _text(detail.get("message"), MOST_MESSAGE) or f"an error without a message ({kind.type})",
        param=_text(detail.get("param"), MOST_NAME),
        code=_text(detail.get("code"), MOST_NAME),
    )
    if isinstance(error, NoCapacity) and retry_after is not None:
        seconds = _retry_after_s(retry_after)
        if seconds is not None:
            error.retry_after_s = seconds
    return error


def _retry_after_s(value: str) -> float | None:
    """Return the seconds of a `Retry-After` header, from 0 to `MOST_RETRY_AFTER_S`.

    The value is a number or a date. Returns None for any other value, NaN included.
    """
    try:
        seconds = float(value)
    except ValueError:
        try:
            when = parsedate_to_datetime(value)
        except (ValueError, OverflowError):
            return None
        seconds = (when.replace(tzinfo=when.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    if math.isnan(seconds):
        return None
    return min(max(seconds, 0.0), MOST_RETRY_AFTER_S)


def parse(message: type[M], body: bytes) -> M:
    """Parse a JSON body as `message`. Raises `BadRequest`, with the first bad field as param."""
    try:
        return message.model_validate_json(body)
    except ValidationError as invalid:
        raise bad_request(invalid) from None


def bad_request(invalid: ValidationError) -> BadRequest:
    """Return a `BadRequest` for the first problem of a validation error."""
    first = invalid.errors(include_url=False, include_input=False)[0]
    param = ".".join(str(part) for part in first["loc"]) or None
    where = f"{param}: " if param else ""
    return BadRequest(f"{where}{first['msg']}", param=param)


def _text(value: object, most: int) -> str | None:
    return value[:most] if isinstance(value, str) else None
