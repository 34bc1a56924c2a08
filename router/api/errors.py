"""Turns errors into OpenAI error objects; the only module that does."""

from __future__ import annotations

from collections.abc import Iterable

import orjson
from pydantic import ValidationError
from typing_extensions import TypedDict

from engine.protocol import BadRequest, Draining, MicroserveError, NoCapacity
from router.base import MethodNotAllowed, NoEngines

__all__ = [
    "ErrorObject",
    "complaint",
    "error_headers",
    "error_json",
    "error_object",
    "invalid",
    "not_json",
]

MOST_CHARACTERS = 8192  # of a message
# OpenAI's types by status; other errors keep the names of our own tree.
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    409: "conflict",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
}


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorObject(TypedDict):
    """The body of every response that is an error."""

    error: ErrorDetail


def error_object(error: MicroserveError) -> ErrorObject:
    """Return `{"error": {"message", "type", "param", "code"}}`."""
    named = error.type not in ("bad_request", "internal")
    return {
        "error": {
            "message": _text(error.message),
            "type": _TYPES.get(error.status, error.type),
            "param": _text(error.param) if error.param is not None else None,
            "code": error.code or (error.type if named else None),
        }
    }


def _text(text: str) -> str:
    """Return a bounded text that JSON can carry: a message may quote a client or a module."""
    return text[:MOST_CHARACTERS].encode("utf-8", "replace").decode()


def error_json(error: MicroserveError) -> bytes:
    """Return the error object as JSON."""
    return orjson.dumps(error_object(error))


def error_headers(error: MicroserveError) -> dict[str, str]:
    """Return `Retry-After`, in whole seconds, where a retry may help, or `Allow`."""
    if isinstance(error, MethodNotAllowed):
        return {"Allow": ", ".join(error.allowed)}
    if isinstance(error, NoCapacity):
        return {"Retry-After": str(max(1, round(error.retry_after_s)))}
    if isinstance(error, NoEngines | Draining):
        return {"Retry-After": "1"}
    return {}


def invalid(error: ValidationError, *, within: str = "") -> BadRequest:
    """Return the first complaint of pydantic.

    `within`: the field that was validated, if not the whole body.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    return complaint(first["msg"], first["loc"], within=within)


def complaint(message: str, path: Iterable[int | str], *, within: str = "") -> BadRequest:
    """Return the error for a field, with `param` as OpenAI writes it: `messages[0].role`."""
    param = within
    for part in path:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else str(part)
    return BadRequest(f"{param}: {message}" if param else message, param=param or None)


def not_json(problem: str, position: int) -> BadRequest:
    """Return the error of a body that is not JSON from `position` on."""
    return BadRequest(f"the body is not JSON: {problem} (character {position})")
