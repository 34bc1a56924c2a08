"""Who may use the admin API, and how its bodies are read."""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict

from engine.protocol import Unauthorized
from router.api.http import HttpRequest
from router.api.parts import Router
from router.base import Forbidden

__all__ = ["Body", "check_admin", "same_key"]


class Body(BaseModel):
    """Base of the bodies of the admin API."""

    model_config = ConfigDict(strict=True, extra="forbid")


def check_admin(router: Router, http: HttpRequest, given: str | None) -> None:
    """Check that an admin calls, and note who: by the key, or from loopback if there is no key.

    Raises `Unauthorized` or `Forbidden`. Calls by a web page in a browser on this machine are
    refused: they carry another origin or, with DNS rebinding, another host name.
    """
    if key := router.config.admin_key:
        if not same_key(given, key):
            raise Unauthorized("the admin API needs its key", code="invalid_api_key")
        http.who = "admin_key"
        return
    origin = http.headers.get("origin")
    host = http.headers.get("host", "")
    here = _is_loopback(http.remote) and _is_loopback(_host(f"http://{host}"))
    if not here or (origin is not None and not _is_loopback(_host(origin))):
        raise Forbidden("without --admin-key the admin API answers on loopback only")
    http.who = http.remote or "loopback"


def same_key(given: str | None, key: str) -> bool:
    """Compare in constant time."""
    if given is None:
        return False
    # Bytes of a header that are not UTF-8 are surrogates here.
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), key.encode())


def _host(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        return None if "@" in parts.netloc else parts.hostname
    except ValueError:
        return None


def _is_loopback(host: str | None) -> bool:
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
