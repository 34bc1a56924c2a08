"""Who may use the admin API, and how its bodies are read."""

from __future__ import annotations

import hmac

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from engine.protocol import Forbidden, Unauthorized
from engine.web import AllowedHosts, check_origin, is_loopback
from router.api.http import HttpRequest
from router.api.parts import Router
from router.base import UnsupportedMediaType

__all__ = ["Body", "check_admin", "check_upload", "same_key"]

JSON = "application/json"
MOST_FIELDS = 64  # of a body: pydantic would describe each one that it does not know


class Body(BaseModel):
    """Base of the bodies of the admin API."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, fields: object) -> object:
        if isinstance(fields, dict) and len(fields) > MOST_FIELDS:
            what = f"the body has {len(fields)} fields; no call has more than {MOST_FIELDS}"
            raise PydanticCustomError("too_many_fields", what)
        return fields


def check_admin(router: Router, http: HttpRequest, given: str | None, hosts: AllowedHosts) -> None:
    """Check that an admin calls, and note who: by the key, or from loopback if there is no key.

    Without a key, calls by web pages are refused: they carry another origin or, with DNS rebinding,
    a host name that is not in `hosts`. Raises `Unauthorized`, `Forbidden`, or
    `UnsupportedMediaType` for a body that is not declared as JSON.
    """
    if key := router.config.admin_key:
        if not same_key(given, key):
            wrong = "this is not the key of the admin API"
            raise Unauthorized(
                wrong if given else "the admin API needs its key", code="invalid_api_key"
            )
        if hosts.enforced:
            hosts.check(http.headers.get("host"))
        http.who = "admin_key"
    else:
        if not (is_loopback(http.remote) and hosts.is_local(http.headers.get("host", ""))):
            raise Forbidden("without --admin-key the admin API answers on loopback only")
        check_origin(http.headers)
        http.who = http.remote
    _check_media_type(http)


def check_upload(router: Router) -> None:
    """Raise `Forbidden` if strategies' sources must not come by the admin API."""
    if not router.config.allow_upload:
        raise Forbidden("strategies are loaded from source only with --allow-upload")


def same_key(given: str | None, key: str) -> bool:
    """Compare in constant time."""
    if given is None:
        return False
    # Bytes of a header that are not UTF-8 are surrogates here.
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), key.encode())


def _check_media_type(http: HttpRequest) -> None:
    """Pages of any site can send bodies of other types, but this one only to a site that agrees."""
    headers = http.headers
    if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return
    media = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != JSON:
        raise UnsupportedMediaType(f"the body must have the header Content-Type: {JSON}")
