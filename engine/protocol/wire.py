"""Errors and validation on the wire, for both sides: one error body, one way to read a message."""

from __future__ import annotations

import contextlib
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from kvcache import errors
from kvcache.errors import BadRequest, Internal, MicroserveError, NoCapacity

__all__ = ["error_body", "error_from_body", "parse"]

_BY_TYPE: dict[str, type[MicroserveError]] = {
    error.type: error
    for error in vars(errors).values()
    if isinstance(error, type) and issubclass(error, MicroserveError)
}
M = TypeVar("M", bound=BaseModel)


def error_body(error: MicroserveError) -> dict[str, Any]:
    """`{"error": {"type", "message", "param", "code"}}`, the body of every error reply."""
    detail = {
        "type": error.type,
        "message": error.message,
        "param": error.param,
        "code": error.code,
    }
    return {"error": detail}


def error_from_body(body: object, *, retry_after: str | None = None) -> MicroserveError:
    """The exception that `error_body` was made from; `Internal` where the body is not one."""
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
    """Read a JSON body as `message`, strictly. Raises `BadRequest` naming the first bad field."""
    try:
        return message.model_validate_json(body)
    except ValidationError as invalid:
        raise bad_request(invalid) from None


def bad_request(invalid: ValidationError) -> BadRequest:
    """The first complaint of a validation error as ours."""
    first = invalid.errors(include_url=False, include_input=False)[0]
    param = ".".join(str(part) for part in first["loc"]) or None
    where = f"{param}: " if param else ""
    return BadRequest(f"{where}{first['msg']}", param=param)
