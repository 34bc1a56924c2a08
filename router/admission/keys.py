"""API keys: who may call, under which name, and how much.

A key is a secret: only its digest is kept, and messages, logs and metrics show at most the first
digits of the digest. Names are not secret.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass

from engine.protocol import BadRequest, Unauthorized

__all__ = ["ANYBODY", "Key", "Keys", "bearer", "make_key", "parse_keys"]

_HASHED = re.compile(r"sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Key:
    """One key. Limits are per minute; 0 means none, `None` the configured ones."""

    name: str
    digest: bytes
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


ANYBODY = Key("", b"")  # the caller if no keys are required


class Keys:
    """The keys that are valid now."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self.replace(keys)

    def replace(self, keys: Iterable[Key]) -> None:
        """Make exactly these keys valid."""
        self._by_digest = {key.digest: key for key in keys}

    def __len__(self) -> int:
        return len(self._by_digest)

    def identify(self, given: str) -> Key:
        """Return the key with this secret. Raises `Unauthorized` if there is none.

        The lookup is by digest: its time depends on the digest of a guess, which an attacker cannot
        choose, and the digests are compared in constant time.
        """
        if not self._by_digest:
            return ANYBODY
        digest = _digest(given)
        key = self._by_digest.get(digest)
        if key is None or not hmac.compare_digest(digest, key.digest):
            raise Unauthorized("a valid API key is needed", code="invalid_api_key")
        return key


def bearer(authorization: str) -> str:
    """Return the key in the value of an `Authorization` header, "" without one."""
    if not authorization:
        return ""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def make_key(
    secret: str,
    name: str = "",
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
) -> Key:
    """Make a key from its secret, or from `sha256:HEX`, the secret's digest."""
    hashed = _HASHED.fullmatch(secret)
    digest = bytes.fromhex(hashed[1]) if hashed else _digest(secret)
    return Key(name or digest.hex()[:8], digest, requests_per_minute, tokens_per_minute)


def parse_keys(text: str) -> list[Key]:
    """Parse lines of the form `KEY [name=N] [rpm=60] [tpm=100000]`; `#` begins a comment.

    KEY may be `sha256:HEX`. Raises `BadRequest`, naming the line but never its content; also for a
    file without keys, which would admit everybody.
    """
    keys: dict[bytes, Key] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            fields = dict(word.split("=", 1) for word in words[1:])
            name, rpm, tpm = (fields.pop(field, None) for field in ("name", "rpm", "tpm"))
            key = make_key(words[0], name or "", _limit(rpm), _limit(tpm))
        except ValueError:
            fields = {"": ""}
        if fields or key.digest in keys:
            why = "a key that was there before" if not fields else "not KEY [name=] [rpm=] [tpm=]"
            raise BadRequest(f"line {number}: {why}")
        keys[key.digest] = key
    if not keys:
        raise BadRequest("there is no key in it")
    return list(keys.values())


def _limit(value: str | None) -> int | None:
    if value is not None and not value.isdecimal():
        raise ValueError
    return None if value is None else int(value)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
