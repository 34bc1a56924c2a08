"""Whether a web page has sent a request: checks of its Host, Origin and Sec-Fetch-Site headers.

A page of any site can send requests to servers on the machine and in the network of its reader. A
key stops them, because the page does not have it. These checks are for servers without keys.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from engine.protocol import Forbidden

__all__ = ["SAFE_METHODS", "AllowedHosts", "check_origin", "is_loopback"]

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})  # they change nothing
WILDCARDS = frozenset({"", "0.0.0.0", "::"})  # noqa: S104  compared, not listened on
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:@/?#\s]+)(:[0-9]*)?")
_MOST_KNOWN = 64  # values of Host that are remembered


class AllowedHosts:
    """The names by which clients may call a server.

    The name of a hostile page can be made to resolve to the server's address (DNS rebinding). For
    the browser, page and server are one site then, but Host still has the page's name. An address
    in Host is always allowed: nobody can make it resolve to another one.
    """

    def __init__(self, names: Iterable[str] | None, *, listed: Iterable[str] = ()) -> None:
        """`names`: without ports; None allows all. `listed`: those that an operator listed."""
        self._names = None if names is None else {name.lower().rstrip(".") for name in names}
        self._listed = {name.lower().rstrip(".") for name in listed}
        self._known: set[str] = set()

    @classmethod
    def of(cls, configured: str, bound: str, advertised: str = "") -> AllowedHosts:
        """Return the hosts for the flags of a server that listens on `bound`.

        `configured` has names with commas between them; `*` allows all. If it is empty, the names
        are localhost, `bound`, and the host of the URL `advertised`. A server on all addresses is
        called by names that it cannot know, so its default allows all.
        """
        listed = {name.strip() for name in configured.split(",")} - {""}
        if "*" in listed or (not listed and bound in WILDCARDS):
            return cls(None)
        own = {bound, host_of(_netloc(advertised) or "")} - WILDCARDS
        return cls(listed | own, listed=listed)

    @property
    def enforced(self) -> bool:
        """Whether an operator listed hosts, so that they count for requests with keys, too."""
        return bool(self._listed)

    def check(self, header: str | None) -> None:
        """Raise `Forbidden` unless `header`, the value of Host, is allowed.

        A request without Host is HTTP/1.0 and from no browser.
        """
        if header is None or header in self._known:
            return
        name = host_of(header)
        if self._names is None or name in self._names or is_loopback(name) or _is_address(name):
            if len(self._known) < _MOST_KNOWN:
                self._known.add(header)
            return
        raise Forbidden(
            f"this server is not called {name[:100]!r}: --allowed-hosts lists the names",
            code="host_not_allowed",
        )

    def is_local(self, header: str) -> bool:
        """Return whether `header`, a value of Host, is a loopback address or name, or listed."""
        name = host_of(header)
        return is_loopback(name) or (bool(name) and name in self._listed)


def check_origin(headers: Mapping[str, str]) -> None:
    """Raise `Forbidden` if a web page of another site has sent the request.

    The rules are those of Go's `net/http.CrossOriginProtection`. All browsers send Sec-Fetch-Site
    to trustworthy origins such as localhost, and pages cannot set it. Where it is missing, Origin
    must be Host. Another port is another site here. Clients that are no browsers send neither.
    """
    site = headers.get("sec-fetch-site")
    if site is not None:
        if site in ("same-origin", "none"):
            return
    else:
        origin = headers.get("origin")
        if origin is None or _netloc(origin) == headers.get("host", "").lower():
            return
    raise Forbidden("web pages of other sites may not call this without a key", code="cross_site")


def host_of(header: str) -> str:
    """Return the host of `HOST:PORT` in lower case, without brackets; "" if it is malformed."""
    match = _HOST.fullmatch(header)
    return match[1].strip("[]").lower().rstrip(".") if match else ""


def _netloc(url: str) -> str | None:
    """Return host and port of an origin; None without any, as in `null`."""
    try:
        return urlsplit(url).netloc.lower() or None
    except ValueError:
        return None


def is_loopback(name: str) -> bool:
    """Return whether `name` is localhost, below it, or a loopback address."""
    if name == "localhost" or name.endswith(".localhost"):  # RFC 6761: never in public DNS
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
