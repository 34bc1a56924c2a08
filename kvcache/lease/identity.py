"""The identity of an engine, as its addresses state it."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

from kvcache.types import EngineId

__all__ = ["Identity"]

SECRET_LABEL = b"microserve cluster secret"


@dataclass(frozen=True, slots=True)
class Identity:
    """The fields of an engine that its addresses carry; fixed for the life of the process."""

    engine_id: EngineId
    epoch: int  # increases each time the engine starts
    secret: bytes  # of the cluster; signs addresses
    fingerprint: str  # of layout and weights; equal if one engine can use the KV of the other
    url: str = ""  # of its HTTP API; empty if it has none

    @property
    def secret_digest(self) -> str:
        """16 hexadecimal digits that are equal for equal secrets (HMAC-SHA256 of a fixed label).

        They do not reveal a random secret. A short one can be guessed from them, as from any
        address.
        """
        return hmac.new(self.secret, SECRET_LABEL, hashlib.sha256).hexdigest()[:16]
