"""The URL of a store, and the password that a file has. No message names a part of the URL."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from engine.protocol import BadRequest

__all__ = ["StoreAddress", "read_password"]

SCHEMES = {
    "redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss", "unix": "unix",
}  # fmt: skip
SENTINEL = re.compile(r"(redis|rediss|valkey|valkeys)\+?-?sentinel")
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
DEFAULT_NAME = "microserve"
MOST_PASSWORD = 4096  # bytes


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where a store is. `url` is one that the package `redis` understands."""

    url: str
    name: str  # of the fleet
    username: str | None  # where the password is in a file

    @classmethod
    def parse(cls, given: str, *, password_file: str = "") -> StoreAddress:
        """Parse `SCHEME://[[USER]:PASSWORD@]HOST[:PORT][/DB][#NAME]` or `unix://PATH[#NAME]`.

        Raises `BadRequest` with what is wrong, without the password.
        """
        address, hash_sign, name = given.partition("#")
        if hash_sign and not NAME.fullmatch(name):
            raise BadRequest(
                "--store: what follows # is the name of a fleet: up to 64 letters, digits, '_', "
                "'.' and '-'. A # in a password is written %23"
            )
        try:
            parts = urlsplit(address)
            port = parts.port
        except ValueError:
            raise BadRequest(
                "--store: its port is no number from 1 to 65535, or it names several hosts. In a "
                "password, write / as %2F, ? as %3F, # as %23 and @ as %40"
            ) from None
        scheme = parts.scheme
        if SENTINEL.fullmatch(scheme):
            raise BadRequest("--store: Sentinel is not supported; name the server, or a proxy")
        if scheme not in SCHEMES:
            known = ", ".join(sorted(SCHEMES))
            raise BadRequest(f"--store: not the URL of a store; it begins with one of {known}")
        if "," in parts.netloc.rpartition("@")[2] or port == 0:
            raise BadRequest("--store: it names one server: neither Cluster nor a list of hosts")
        _check_path(scheme, parts)
        username = None
        if password_file:
            if parts.password is not None:
                raise BadRequest(
                    "--store has a password already: drop it, or --store-password-file"
                )
            read_password(password_file)
            username = unquote(parts.username or "")
            parts = parts._replace(netloc=parts.netloc.rpartition("@")[2])
        url = parts._replace(scheme=SCHEMES[scheme]).geturl()
        if scheme == "unix":  # without a host, `geturl` leaves // out
            url = f"unix://{parts.netloc}{parts.path}" + (f"?{parts.query}" * bool(parts.query))
        return cls(url, name or DEFAULT_NAME, username)


def _check_path(scheme: str, parts: SplitResult) -> None:
    if scheme == "unix":
        if not parts.path:
            raise BadRequest("--store: unix:// is followed by the path of a socket")
        return
    if not parts.hostname:
        raise BadRequest("--store: it names no host")
    if not re.fullmatch(r"/?[0-9]{0,6}", parts.path):
        raise BadRequest("--store: what follows the host is /N, the number of a database")


def read_password(file: str) -> str:
    """Return the password that a file has in its only line. Raises `BadRequest`."""
    try:
        with Path(file).open("rb") as opened:
            content = opened.read(MOST_PASSWORD + 1).decode().strip()
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or "it is not UTF-8"
        raise BadRequest(f"--store-password-file {file}: {what}") from None
    if not content or len(content) > MOST_PASSWORD or not content.isprintable():
        raise BadRequest(f"--store-password-file {file}: it has only the password, in one line")
    return content
