"""Errors and validation on the wire, for both sides."""

from __future__ import annotations

import contextlib
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from kvcache import errors
from kvcache.errors import BadRequest, Internal, MicroserveError, NoCapacity

__all__ = ["bad_request", "error_body", "error_from_body", "parse"]

_BY_TYPE: dict[str, type[MicroserveError]] = {
    error.type: error
    for error in vars(errors).values()
    if isinstance(error, type) and issubclass(error, MicroserveError)
}
M = TypeVar("M", bound=BaseModel)


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

    `retry_after` is the value of the reply's `Retry-After` header, in seconds.
    """
    detail = body.get("error") if isinstance(body, dict) else None
    if not isinstance(detail, dict):
        return Internal(f"not an error body: {str(body)[:200]}")
    kind = _BY_TYPE.get(str(detail.get("type")), Internal)
    message, param, code = (detail.get(key) for key in ("message", "param", "code"))
    error = kind(str(message), param=param, code=code)
    if isinstance(error, NoCapacity) and retry_after is not None:
        with contextlib.suppress(ValueError):
            error.retry_after_s = float(retry_after)
    return error


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
